"""What the reader of a request's outputs gets, and how it ends."""

from __future__ import annotations

import asyncio

import pytest

from mlxpaged.core.engine import errors
from mlxpaged.core.engine.errors import EngineState
from mlxpaged.core.engine.prompt_progress import PromptChunk, WaitingLine
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.engine.request_stream import RequestStream, raise_unless_complete
from tests import virtual_time


class Engine:
    """What a stream knows of it. The clock stands at 12 seconds."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.state = EngineState.READY
        self.line = WaitingLine()

    def stream(self, name: str, arrival_time: float = 10.0) -> RequestStream:
        request = Request(name, [1, 2, 3, 4], SamplingParams(), arrival_time)
        return RequestStream(request, self.aborted.append, lambda: self.state, self.line, lambda: 12.0)


def read(stream: RequestStream) -> list[str]:
    async def texts() -> list[str]:
        return [output.text async for output in stream]

    return asyncio.run(texts())


def test_outputs_come_in_order_until_the_last_one() -> None:
    engine = Engine()
    stream = engine.stream("a")
    stream.put(RequestOutput("a", 11.0, "x"))
    stream.put(RequestOutput("a", 12.0, "y", finish_reason=FinishReason.STOP))
    assert read(stream) == ["x", "y"]
    stream.close()
    assert engine.aborted == [], "it has ended"


def test_a_reader_that_closes_early_aborts_the_request_once() -> None:
    engine = Engine()
    stream = engine.stream("a")
    stream.put(RequestOutput("a", 11.0, "x"))
    stream.close()
    stream.close()
    assert engine.aborted == ["a"]
    assert read(stream) == []


def test_a_request_is_in_the_line_until_a_step_computes_a_part_of_it() -> None:
    engine = Engine()
    first, second = engine.stream("first", 10.0), engine.stream("second", 11.0)
    assert (first.progress.waiting_before, second.progress.waiting_before) == (0, 1)
    first.put_chunk(PromptChunk("first", computed_tokens=3, cached_tokens=2))
    assert not first.is_waiting
    assert second.is_waiting
    assert second.progress.waiting_before == 0
    progress = first.progress
    assert (progress.waiting_before, progress.prompt, progress.cached, progress.computed) == (None, 4, 2, 3)
    assert progress.seconds == 2.0
    first.put(RequestOutput("first", 12.0, "x", num_output_tokens=1))
    assert (first.progress.computed, first.progress.output) == (4, 1), "a token of the answer: all of the prompt"


def test_a_reader_that_is_woken_gets_nothing_twice() -> None:
    stream = Engine().stream("a")
    stream.put(RequestOutput("a", 11.0, "x", (7,), num_output_tokens=1))
    stream.wake()
    stream.put(RequestOutput("a", 12.0, "y", finish_reason=FinishReason.LENGTH))
    stream.wake()  # it has the last one
    assert read(stream) == ["x", "", "y"]


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.TIMEOUT, errors.DeadlineExceededError),
        (FinishReason.CANCELLED, errors.RequestCancelledError),
        (FinishReason.CONSTRAINT, errors.ConstraintFailedError),
        (FinishReason.MEMORY, errors.OutOfMemoryError),
        (FinishReason.ERROR, errors.RequestFailedError),
        (FinishReason.ABORT, errors.RequestFailedError),
    ],
)
def test_each_end_without_an_answer_is_an_error_of_its_own(reason: FinishReason, error: type[Exception]) -> None:
    stream = Engine().stream("a")
    stream.put(RequestOutput("a", 11.0, finish_reason=reason, error="the reason"))
    with pytest.raises(error, match="the reason"):
        read(stream)


@pytest.mark.parametrize("state", [EngineState.DRAINING, EngineState.DEAD, EngineState.STALLED])
def test_what_the_engines_end_has_ended_says_whether_to_come_back(state: EngineState) -> None:
    with pytest.raises(errors.EngineUnavailableError, match="the client disconnected") as caught:
        raise_unless_complete(FinishReason.ABORT, None, state)
    assert caught.value.state is state


def test_a_state_that_is_over_when_the_end_is_read_still_counts() -> None:
    engine = Engine()
    stream = engine.stream("a")
    stream.put(RequestOutput("a", 11.0, finish_reason=FinishReason.ERROR, error="stalled"))
    stream.ended_in = EngineState.STALLED
    with pytest.raises(errors.EngineUnavailableError) as caught:
        read(stream)
    assert caught.value.state is EngineState.STALLED


@pytest.mark.parametrize("reason", [None, FinishReason.STOP, FinishReason.LENGTH])
def test_a_complete_answer_is_no_error(reason: FinishReason | None) -> None:
    raise_unless_complete(reason, None, EngineState.DEAD)


def times_of(steps: list[tuple[float, int]], ends_at: float, evenly: bool = True) -> list[float]:
    """When a reader gets each output. steps: when a step ends, and its outputs."""
    engine, request = Engine(), Request("a", [1], SamplingParams(), 0.0)

    async def read(loop: asyncio.AbstractEventLoop) -> list[float]:
        stream = RequestStream(request, engine.aborted.append, lambda: engine.state, engine.line, loop.time)

        def put(count: int, reason: FinishReason | None = None) -> None:
            for _ in range(count):
                stream.put(RequestOutput("a", loop.time(), "x", finish_reason=reason))

        for at, count in steps:
            loop.call_at(at, put, count)
        loop.call_at(ends_at, put, 1, FinishReason.STOP)
        return [round(loop.time(), 3) async for _ in (stream.evenly() if evenly else stream)]

    return virtual_time.run(read)


def test_tokens_that_come_at_once_are_given_one_after_another() -> None:
    steps = [(0.1 * number, count) for number, count in enumerate((1, 1, 4, 1, 2, 1), 1)]
    given = times_of(steps, 0.7)
    assert given == [0.1, 0.2, 0.3, 0.325, 0.35, 0.375, 0.4, 0.5, 0.55, 0.6, 0.7]
    assert times_of(steps, 0.7, evenly=False).count(0.3) == 4, "an answer that is read whole is not kept"


def test_what_is_kept_never_piles_up() -> None:
    """Each step comes a little sooner than the one before."""
    at, steps = 0.0, list[tuple[float, int]]()
    for number in range(20):
        at += 0.3 - 0.01 * number
        steps.append((at, 3))
    given = times_of(steps, at + 0.2)
    assert given == sorted(given)
    for number in range(len(steps) - 1):
        assert given[3 * number + 2] <= steps[number + 1][0] + 0.1, "not much later than the next step"


def test_the_end_of_an_answer_is_not_kept() -> None:
    assert times_of([(0.1, 1), (0.2, 8)], 0.22)[-7:] == [0.22] * 7


@pytest.mark.parametrize("period", [0.02, 3.0])
def test_steps_that_are_quick_or_late_are_given_as_they_come(period: float) -> None:
    steps = [(period * number, 3) for number in range(1, 5)]
    assert times_of(steps, 5 * period) == [round(at, 3) for at, _ in steps for _ in range(3)] + [round(5 * period, 3)]
