"""A sequence begins where what it has in common with cached ones ends, also within a block."""

from __future__ import annotations

import pytest

from mlxpaged.core.scheduling.sequence import FinishReason, Sequence
from mlxpaged.core.step import Step
from tests.scheduler.simulation import Simulation, answer, make_scheduler, sequence, undisturbed

SHARED = list(range(10))
"""Two blocks of four tokens, and two tokens."""


def asks(number: int, prompt: list[int], max_tokens: int = 1, logits_from: int | None = None) -> Sequence:
    seq = sequence(number, prompt, max_tokens)
    seq.logits_from = logits_from
    return seq


def computed(simulation: Simulation, *sequences: Sequence) -> list[int]:
    """Run sequences that arrive together to their ends. Returns the tokens that were computed of each."""
    simulation.add(*sequences)
    simulation.run()
    return [simulation.computed[seq.sequence_id] for seq in sequences]


def shared(windows: tuple[int | None, ...] = (None,), num_blocks: int = 64, **options: object) -> Simulation:
    """After a sequence that only computes what others share."""
    simulation = Simulation(make_scheduler(num_blocks, max_num_batched_tokens=64, windows=windows, **options))
    assert computed(simulation, asks(1, SHARED, max_tokens=0)) == [10]
    return simulation


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (1, 8)])
def test_no_shared_token_is_computed_twice(windows: tuple[int | None, ...]) -> None:
    simulation = shared(windows)
    prompts = [[*SHARED, 100 + i, 200 + i] for i in range(5)]
    asked = [asks(2 + i, prompt) for i, prompt in enumerate(prompts)]
    assert computed(simulation, *asked) == [2] * 5
    assert simulation.scheduler.stats().blocks_copied_total == 5 * len(windows)
    assert [answer(seq) for seq in asked] == [undisturbed(seq.token_ids[:12], seq.sequence_id, 1) for seq in asked]


def test_the_same_prompts_again_compute_only_their_last_tokens() -> None:
    simulation = shared()
    prompts = [[*SHARED, 100 + i] for i in range(3)]
    computed(simulation, *(asks(2 + i, prompt) for i, prompt in enumerate(prompts)))
    assert computed(simulation, *(asks(9 + i, prompt) for i, prompt in enumerate(prompts))) == [1] * 3


def test_the_first_tokens_of_a_block_are_shared_too() -> None:
    """Of a block that is full or not."""
    simulation = shared()
    assert computed(simulation, asks(2, [*SHARED[:9], 100, 101])) == [2]
    assert computed(simulation, asks(3, [*SHARED, *range(100, 110)])) == [10]
    assert computed(simulation, asks(4, [*SHARED, 100, 102])) == [1]
    assert computed(simulation, asks(5, [*SHARED[:6], 7, 8])) == [2]


def test_the_block_with_most_common_tokens_is_copied() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    computed(simulation, *(asks(1 + i, [*SHARED[:4], 5, *[6] * i, 7 + i, 7, 7, 7]) for i in range(3)))
    assert computed(simulation, asks(9, [*SHARED[:4], 5, 6, 6, 100])) == [1]
    assert computed(simulation, asks(10, [*SHARED[:4], 5, 6, 8, 100])) == [1]
    assert computed(simulation, asks(11, [*SHARED[:4], 6, 100])) == [2]


def test_an_answer_is_shared_to_its_last_token() -> None:
    """The next turn of a conversation computes only what is new, and the last token of the answer."""
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    first = asks(1, SHARED, max_tokens=4)
    computed(simulation, first)
    assert computed(simulation, asks(2, [*first.token_ids, 100, 101])) == [3]


def test_sequences_with_other_seeds_share_nothing() -> None:
    simulation = shared()
    other = asks(2, [*SHARED, 100])
    other.cache_seed = b"other"
    assert computed(simulation, other) == [11]
    again = asks(3, [*SHARED, 101])
    again.cache_seed = b"other"
    assert computed(simulation, again) == [1]


def test_other_clients_share_whole_blocks_only() -> None:
    """They could find out a prompt token by token."""
    simulation = shared()
    own, other = asks(2, [*SHARED, 100, 101]), asks(3, [*SHARED, 100, 101])
    other.client = "other"
    assert computed(simulation, own, other) == [2, 4]
    again = asks(4, [*SHARED, 100, 102])
    again.client = "other"
    assert computed(simulation, again) == [4], "its last block is the first one's"


def test_logits_that_are_wanted_are_computed() -> None:
    """The last token whose logits are wanted is one of the shared ones."""
    simulation = shared()
    assert computed(simulation, asks(2, [*SHARED, 100, 101], logits_from=9)) == [3]


def test_a_prefix_that_fills_its_last_block_is_shared_as_ever() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    computed(simulation, asks(1, SHARED[:8], max_tokens=0))
    assert computed(simulation, asks(2, [*SHARED[:8], 100])) == [1]
    assert simulation.scheduler.stats().blocks_copied_total == 0


def test_a_step_evicts_no_block_that_it_copies() -> None:
    """The pool has room for one sequence beside the cached blocks: the second one waits."""
    simulation = shared(num_blocks=6)
    simulation.add(*(asks(2 + i, [*SHARED, 100 + i, 101, 102, 103], max_tokens=3) for i in range(2)))
    sources, targets = [], []
    while simulation.has_work:
        moves = simulation.step().moves
        sources += [source for source, _ in moves.copies]
        targets += [target for _, target in moves.copies]
        assert not {source for source, _ in moves.copies} & {target for _, target in moves.copies}
    assert sources
    assert all(answer(seq) == undisturbed(seq.token_ids[:14], seq.sequence_id, 3) for seq in simulation.added[1:])


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_sequence_that_needs_the_whole_pool_runs_without_the_copy(windows: tuple[int | None, ...]) -> None:
    simulation = shared(windows, num_blocks=3 * len(windows))
    assert computed(simulation, asks(2, [*SHARED, 100, 101])) == [4]


@pytest.mark.parametrize("prompt", [[*SHARED, 100, 101, 102], [*SHARED, 100]])
def test_a_block_is_not_copied_from_a_step_that_may_still_fail(prompt: list[int]) -> None:
    """Sequences that share a block of a failed step are found by it, but those with a copy of it are not."""
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64), overlap=True)
    simulation.add(asks(1, [*SHARED, 50, 51, 52], max_tokens=4))
    simulation.step()
    second, third = asks(2, prompt), asks(3, [*SHARED, 200])
    simulation.add(second)
    assert simulation.in_flight is not None
    assert {row.sequence_id: row.start for row in simulation.step().rows}[2] == 8, "whole blocks"
    simulation.add(third)
    assert {row.sequence_id: row.start for row in simulation.step().rows}[3] == 10
    simulation.run()
    assert answer(second) == undisturbed(prompt, 2, 1)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.MEMORY])
def test_what_failed_is_not_shared(reason: FinishReason) -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    seq = asks(1, SHARED, max_tokens=4)
    simulation.add(seq)
    step: Step = simulation.step()
    assert step.num_tokens == 10
    simulation.scheduler.finish(1, reason)
    assert computed(simulation, asks(2, [*SHARED, 100])) == [3]


def test_a_prompt_that_is_computed_in_part_is_shared_so_far() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=6, max_num_seqs=2))
    simulation.add(asks(1, SHARED, max_tokens=0))
    simulation.step()
    simulation.scheduler.finish(1, FinishReason.CANCELLED)
    assert computed(simulation, asks(2, [*SHARED, 100])) == [5]


def test_a_sequence_that_was_preempted_begins_there_again() -> None:
    simulation = shared(num_swap_slots=0)
    seq = asks(2, [*SHARED, *range(100, 130)])
    simulation.add(seq)
    simulation.scheduler.limit_tokens(1)
    simulation.step()
    simulation.scheduler.recompute(seq)
    assert simulation.step().rows[0].start == 10
    simulation.scheduler.limit_tokens(64)
    simulation.run()
    assert answer(seq) == undisturbed(seq.token_ids[:40], 2, 1)


def test_states_go_on_after_whole_blocks() -> None:
    simulation = shared(recurrent=True, num_checkpoints=8)
    assert computed(simulation, asks(2, [*SHARED, 100])) == [3]
