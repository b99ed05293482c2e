"""The state machine: every legal edge passes, every other one raises."""

from __future__ import annotations

import itertools

import pytest

from mlxpaged.scheduler.sequence import FinishReason, IllegalTransitionError, Sequence, SequenceStatus

WAITING, RUNNING, PREEMPTED, SWAPPED, FINISHED = SequenceStatus

PATHS = {
    WAITING: [],
    RUNNING: [RUNNING],
    PREEMPTED: [RUNNING, PREEMPTED],
    SWAPPED: [RUNNING, SWAPPED],
    FINISHED: [FINISHED],
}
LEGAL = {
    (WAITING, RUNNING),
    (WAITING, FINISHED),
    (RUNNING, PREEMPTED),
    (RUNNING, SWAPPED),
    (RUNNING, FINISHED),
    (SWAPPED, RUNNING),
    (SWAPPED, PREEMPTED),
    (SWAPPED, FINISHED),
    (PREEMPTED, RUNNING),
    (PREEMPTED, FINISHED),
}


@pytest.mark.parametrize(("origin", "target"), [*itertools.product(SequenceStatus, repeat=2)])
def test_states_change_along_legal_edges_only(origin: SequenceStatus, target: SequenceStatus) -> None:
    sequence = Sequence(1, [1], max_tokens=1)
    for status in PATHS[origin]:
        sequence.transition(status)
    if (origin, target) in LEGAL:
        sequence.transition(target)
        assert sequence.status is target
    else:
        with pytest.raises(IllegalTransitionError, match=f"{origin.value} to {target.value}"):
            sequence.transition(target)
        assert sequence.status is origin


def test_an_answer_ends_at_a_stop_token_before_it_ends_at_its_length() -> None:
    sequence = Sequence(1, [1, 2], max_tokens=2, stop_token_ids=frozenset({9}))
    assert sequence.finish_reason_after(5, 1) is None
    assert sequence.finish_reason_after(9, 2) is FinishReason.STOP
    assert sequence.finish_reason_after(8, 2) is FinishReason.LENGTH


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([1], -1)])
def test_sequences_without_work_are_refused(prompt: list[int], max_tokens: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        Sequence(1, prompt, max_tokens)
