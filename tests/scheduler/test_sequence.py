"""The state machine: every legal edge passes, every other one raises."""

from __future__ import annotations

import itertools

import pytest

from mlxpaged.core.scheduling.sequence import FinishReason, IllegalTransitionError, Sequence, SequenceStatus

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


@pytest.mark.parametrize(
    ("computed", "chunks"),
    [
        (0, {4: 4, 5: 5, 6: 5, 11: 5, 12: 12, 13: 13}),
        (5, {1: 7, 7: 7, 8: 8, 15: 15, 16: 15}),
        (8, {1: 4, 4: 4}),  # after a prefix hit within the image
        (20, {1: 3, 2: 3, 3: 3}),
    ],
)
def test_a_chunk_does_not_end_within_an_image_whose_tokens_see_one_another(
    computed: int, chunks: dict[int, int]
) -> None:
    sequence = Sequence(1, list(range(40)), max_tokens=1)
    sequence.spans = [(5, 12), (20, 23)]
    sequence.num_computed_tokens = computed
    assert {size: sequence.whole_chunk(size) for size in chunks} == chunks
