"""The requests inside an engine: how they are taken and ended."""

from __future__ import annotations

from collections import Counter

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.part import Part
from mlxpaged.core.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.core.engine.request_table import WEIGHTS, RequestTable
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import FinishReason, Priority, Sequence, SequenceStatus
from mlxpaged.models.loader import ServedModel
from tests.engine.llama import PROMPTS, core, make_core, run, served, submit
from tests.support import run_requests

__all__ = ["core", "served"]


@pytest.mark.usefixtures("overlaps")
def test_every_request_ends_exactly_once_under_aborts(core: EngineCore) -> None:
    ends: Counter[str] = Counter()
    for i in range(12):
        submit(core, str(i), [i + 1] * (5 * i + 1), max_tokens=6)
    step = 0
    while core.has_work():
        outputs = core.step()
        step += 1
        outputs += core.abort(str(step)) + core.abort("unknown")
        ends.update(output.request_id for output in outputs if output.finish_reason is not None)
    assert ends == {str(i): 1 for i in range(12)}
    assert core.scheduler.pool.usage().used == 0


def table_of(core: EngineCore, **requests: Priority) -> RequestTable:
    for name, priority in requests.items():
        params = SamplingParams(max_tokens=3)
        core.add(Request(name, [1, 2, 3], params, 0.0, priority=priority))
    return core.requests


def test_cancelling_tells_how_far_each_request_was_and_skips_unknown_ids(core: EngineCore) -> None:
    table = table_of(core, a=Priority.NORMAL, b=Priority.NORMAL)
    ended, outputs = table.cancel(["a", "unknown", "a"])
    assert ended == [EndedRequest("a", SequenceStatus.WAITING, 0)]
    assert [(each.request_id, each.finish_reason, each.error) for each in outputs] == [
        ("a", FinishReason.CANCELLED, "the request was cancelled")
    ]
    assert [each.request.request_id for each in table.by_sequence.values()] == ["b"]


def test_an_abort_with_a_reason_is_an_error_and_one_without_is_none(core: EngineCore) -> None:
    table = table_of(core, a=Priority.NORMAL, b=Priority.NORMAL, c=Priority.NORMAL)
    [output] = table.abort("a")
    assert (output.finish_reason, output.error) == (FinishReason.ABORT, None)
    assert [(each.request_id, each.finish_reason, each.error) for each in table.abort_all("the end")] == [
        ("b", FinishReason.ERROR, "the end"),
        ("c", FinishReason.ERROR, "the end"),
    ]
    assert not table.by_sequence
    assert table.abort("a") == []


def test_the_weight_is_that_of_the_highest_class_that_is_left(core: EngineCore) -> None:
    table = table_of(core)
    weights = [table.weight]
    table_of(core, low=Priority.LOW)
    weights.append(table.weight)
    table_of(core, high=Priority.HIGH)
    weights.append(table.weight)
    table.abort("high")
    weights.append(table.weight)
    assert weights == [WEIGHTS[each] for each in (Priority.NORMAL, Priority.LOW, Priority.HIGH, Priority.LOW)]


def test_of_requests_that_arrive_together_those_that_cannot_run_are_refused_alone(core: EngineCore) -> None:
    requests = [
        Request(name, [1] * length, SamplingParams(max_tokens=1), 0.0) for name, length in (("a", 9_999), ("b", 3))
    ]
    [refusal] = core.requests.submit(requests)
    assert (refusal.request_id, refusal.finish_reason) == ("a", FinishReason.ERROR)
    assert refusal.error is not None
    assert "raise --kv-cache-memory" in refusal.error
    assert [each.request.request_id for each in core.requests.by_sequence.values()] == ["b"]


class Refusing(Part):
    """Admits no request, and notes whose sequences it is told to forget."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def admit(self, request: Request, sequence: Sequence) -> None:
        raise ValueError("not here")

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)


def test_a_request_that_a_part_refuses_leaves_nothing_behind(core: EngineCore) -> None:
    part = Refusing()
    table = RequestTable(core.served, core.scheduler, core.grammars, core.sampler, lambda: 0.0, [part])
    with pytest.raises(ValueError, match="not here"):
        table.add(Request("a", [1, 2, 3], SamplingParams(max_tokens=3), 0.0))
    assert part.forgotten == [0]
    assert not table.by_sequence
    assert not core.scheduler.sequences
    assert table.abort("a") == []


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("holds", ["a stop string", "half a character"])
def test_a_completed_answer_has_the_text_that_was_held_back(served: ServedModel, holds: str) -> None:
    [whole] = run_requests(make_core(served), [PROMPTS[3]], max_tokens=24)
    num_held = 0
    for length in range(1, 24):
        text = served.tokenizer.decode(whole[:length])
        stop = (text[-1:] + "\0",) if holds == "a stop string" else ()
        core = make_core(served)
        submit(core, "a", PROMPTS[3], max_tokens=24, stop=stop, logprobs=0)
        outputs: list[RequestOutput] = []
        while sum(len(each.token_ids) for each in outputs) < length:
            outputs += core.step()
        [sequence_id] = core.requests.by_sequence
        num_held += "".join(each.text for each in outputs) != text
        outputs.append(core.requests.complete(sequence_id, "tiredness; hours=9"))
        assert "".join(each.text for each in outputs) == text
        assert [each.token_id for output in outputs for each in output.logprobs] == whole[:length]
        assert (outputs[-1].finish_reason, outputs[-1].error) == (FinishReason.STOP, None)
        assert (outputs[-1].stop_cause, outputs[-1].num_output_tokens) == ("tiredness; hours=9", length)
        run(core)
        assert core.scheduler.pool.usage().used == 0
    assert num_held, "some text was held back"


def test_a_stop_string_in_the_text_that_was_held_back_is_the_reason_itself(served: ServedModel) -> None:
    """Half a character is the replacement character at the end of an answer, and a stop string may have that."""
    [whole] = run_requests(make_core(served), [PROMPTS[3]], max_tokens=24)
    length = next(i for i in range(1, 24) if "\ufffd" in served.tokenizer.decode(whole[:i]))
    core = make_core(served)
    submit(core, "a", PROMPTS[3], max_tokens=24, stop=("\ufffd",))
    outputs: list[RequestOutput] = []
    while len(outputs) < length:
        outputs += core.step()
    [sequence_id] = core.requests.by_sequence
    outputs.append(core.requests.complete(sequence_id, "tiredness"))
    assert (outputs[-1].stop_string, outputs[-1].stop_cause) == ("\ufffd", None)
    assert "".join(each.text for each in outputs) == served.tokenizer.decode(whole[:length]).partition("\ufffd")[0]
