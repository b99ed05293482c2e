"""What the engine thread tells of failures, and how questions are answered. Stalls: test_watchdog.py."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from mlxpaged.core.engine.request import RequestOutput
from mlxpaged.core.engine.stall import Work
from mlxpaged.core.engine.worker import Worker
from mlxpaged.engine.engine_thread import Activity, Callbacks, EngineThread, Failure, Guard, ModelSlot, answer
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.errors import InsufficientMemoryError, ModelNotFoundError

OUTPUT = RequestOutput("a", 1.0)


def nothing(*_: object) -> None: ...


def slot(load: Any, on_end: Any = nothing) -> ModelSlot:
    return ModelSlot(EngineConfig("here", served_model_name="mine"), load, Callbacks(nothing, nothing, nothing, on_end))


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ModelNotFoundError("no such model"), Failure("no such model")),
        (RuntimeError("broken"), Failure("RuntimeError: broken")),
        (MemoryError("too little"), Failure("too little", lacks_memory=True)),
    ],
)
def test_a_failure_says_all_in_a_sentence(error: Exception, failure: Failure) -> None:
    assert Failure.of(error) == failure


def test_a_load_without_memory_says_how_much_is_missing() -> None:
    error = InsufficientMemoryError("too little", 123)
    assert (Failure.of(error).missing_bytes, Failure.of(error).lacks_memory) == (123, True)


def test_a_question_is_answered_and_its_last_outputs_are_returned() -> None:
    reply: Future[int] = Future()
    assert answer(Worker(None), lambda _: (7, [OUTPUT]), reply) == [OUTPUT]
    assert reply.result(0) == 7


def test_a_question_that_raises_hands_its_error_to_who_asked() -> None:
    def failing(_: Worker) -> Any:
        raise ValueError("no")

    reply: Future[int] = Future()
    assert answer(Worker(None), failing, reply) == []
    assert isinstance(reply.exception(0), ValueError)


def test_a_question_that_is_not_awaited_any_more_still_has_outputs() -> None:
    reply: Future[int] = Future()
    reply.cancel()
    assert answer(Worker(None), lambda _: (7, [OUTPUT]), reply) == [OUTPUT]


def test_an_error_ends_the_model_of_its_guard_alone() -> None:
    ended: list[tuple[ModelSlot, BaseException]] = []
    mine, error = slot(nothing), RuntimeError("broken")
    with Guard(mine, lambda *each: ended.append(each)):
        raise error
    assert ended == [(mine, error)]


def test_only_a_step_has_a_size() -> None:
    assert Activity(Work.STEP, None, 0.0).size() is None
    assert Activity(Work.LOAD, slot(nothing), 0.0).size() is None


def test_a_model_that_cannot_be_loaded_ends_with_its_failure_and_the_thread_goes_on() -> None:
    thread, failures = EngineThread(), list[Failure | None]()

    def failing(_: object) -> Worker:
        raise ModelNotFoundError("no such model")

    def on_end(failure: Failure | None) -> None:
        failures.append(failure)
        if len(failures) == 2:
            thread.end()

    for _ in range(2):
        thread.load(slot(failing, on_end))
    thread.run()
    assert failures == [Failure("no such model")] * 2
