"""Blocks under pressure: swapped out and in, forked and copied before a write, evicted, cleared."""

from __future__ import annotations

import pytest

from mlxpaged.core.blocks.block_pool import BlockUsage, OutOfBlocksError
from mlxpaged.core.scheduling.sequence import FinishReason, Priority, Sequence, SequenceStatus
from mlxpaged.core.step import Step
from tests.scheduler.simulation import Simulation, answer, make_scheduler, sequence, undisturbed

HIGH, NORMAL, LOW = Priority
PROMPT = list(range(10))

# -- swap ------------------------------------------------------------------------------------------------------------


def swapped(num_swap_slots: int = 8, prefix_caching: bool = False) -> tuple[Simulation, Sequence, Step]:
    """A LOW one of 10 + 1 tokens for which a HIGH one has just been admitted to a pool of 4 blocks."""
    scheduler = make_scheduler(
        num_blocks=4, max_num_batched_tokens=64, num_swap_slots=num_swap_slots, prefix_caching=prefix_caching
    )
    simulation = Simulation(scheduler)
    low = sequence(1, PROMPT, max_tokens=4, priority=LOW)
    simulation.add(low)
    simulation.step()
    simulation.add(sequence(2, 9, max_tokens=2, priority=HIGH))
    return simulation, low, simulation.step()


def test_what_is_swapped_out_comes_back_whole_and_is_not_computed_again() -> None:
    simulation, low, batch = swapped()
    assert low.status is SequenceStatus.SWAPPED
    assert batch.moves.swap_out == ((0, 0), (1, 1), (2, 2))
    assert (low.kv.swap_slots, low.kv.num_swapped_tokens, low.kv.num_swaps_out) == ([0, 1, 2], 10, 1)
    assert simulation.scheduler.stats().swap == BlockUsage(used=3, cached=0, free=5)
    simulation.step()
    batch = simulation.step()
    assert [slot for slot, _ in batch.moves.swap_in] == [0, 1, 2]
    assert low.kv.table is not None
    assert [block for _, block in batch.moves.swap_in] == low.kv.table.block_ids[:3]
    assert (low.kv.swap_slots, low.kv.num_swapped_tokens, low.kv.num_swaps_in) == ([], 0, 1)
    assert [(row.start, row.num_tokens) for row in batch.rows] == [(10, 1)]
    simulation.run()
    stats = simulation.scheduler.stats()
    assert (stats.blocks_swapped_out_total, stats.blocks_swapped_in_total, stats.swap.used) == (3, 3, 0)
    assert simulation.computed[1] == 10 + 3
    assert answer(low) == undisturbed(PROMPT, 1, 4)


def test_only_what_the_prefix_cache_has_not_kept_is_swapped_in() -> None:
    simulation = Simulation(make_scheduler(max_num_seqs=1, max_num_batched_tokens=64, num_swap_slots=8))
    low = sequence(1, PROMPT, max_tokens=4, priority=LOW)
    simulation.add(low)
    simulation.step()
    simulation.add(sequence(2, 9, max_tokens=1, priority=HIGH))
    assert len(simulation.step().moves.swap_out) == 3
    batch = simulation.step()
    assert [slot for slot, _ in batch.moves.swap_in] == [2]
    simulation.run()
    assert answer(low) == undisturbed(PROMPT, 1, 4)
    assert simulation.scheduler.stats().swap.used == 0


def test_swapped_sequences_are_admitted_before_new_ones_of_their_class() -> None:
    simulation, low, _ = swapped()
    simulation.add(sequence(3, 9, priority=LOW))
    simulation.step()
    assert simulation.step().sequence_ids == [1]
    assert low.status is SequenceStatus.RUNNING


def test_without_room_in_swap_space_it_is_recomputed() -> None:
    simulation, low, batch = swapped(num_swap_slots=2)
    assert low.status is SequenceStatus.PREEMPTED
    assert not batch.moves
    simulation.run()
    assert simulation.computed[1] == 10 + 11 + 2
    assert answer(low) == undisturbed(PROMPT, 1, 4)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_the_swap_slots_of_a_sequence_that_ends_are_free_at_once(reason: FinishReason) -> None:
    simulation, _, _ = swapped()
    simulation.scheduler.finish(1, reason)
    assert simulation.scheduler.stats().swap.used == 0


def test_a_slot_that_a_step_reads_is_not_written_by_the_same_step() -> None:
    blocks = make_scheduler(num_blocks=8, num_swap_slots=3, prefix_caching=False).blocks
    swap = blocks.swap
    assert swap is not None
    first = sequence(1, PROMPT)
    blocks.start(first, blocks.find(first))
    blocks.grow(first, 10)
    first.num_computed_tokens = 10
    assert blocks.swap_out(first)
    blocks.take_moves()
    assert swap.num_free == 0
    assert blocks.start(first, blocks.find(first)) == 10
    assert first.kv.swap_slots == []
    assert swap.num_free == 0, "until the step has its moves"
    blocks.take_moves()
    assert swap.num_free == 3


def test_moves_that_fail_cost_only_what_needed_them() -> None:
    """One block was swapped out, the others were not: the whole sequence is recomputed."""
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=64, num_swap_slots=8)
    simulation = Simulation(scheduler, overlap=True)
    low = sequence(1, PROMPT, max_tokens=4, priority=LOW)
    simulation.add(low)
    simulation.step()
    simulation.add(sequence(2, 9, max_tokens=2, priority=HIGH))
    simulation.fail_to_move(1)
    assert low.status is SequenceStatus.PREEMPTED
    assert low.num_output_tokens == 1, "the token of the step before, which did not fail"
    assert scheduler.stats().swap.used == 0
    simulation.run()
    assert answer(low) == undisturbed(PROMPT, 1, 4)
    assert simulation.ended == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH}


def test_blocks_that_were_not_loaded_are_not_found_by_others() -> None:
    """They were published for the step whose moves failed."""
    simulation = Simulation(make_scheduler(max_num_seqs=1, max_num_batched_tokens=64, num_swap_slots=8))
    low = sequence(1, PROMPT, max_tokens=4, priority=LOW)
    simulation.add(low)
    simulation.step()
    simulation.add(sequence(2, 9, max_tokens=1, priority=HIGH))
    simulation.step()
    scheduler = simulation.scheduler
    scheduler.pool.evict(64)
    simulation.fail_to_move(0)
    assert low.status is SequenceStatus.PREEMPTED
    assert not scheduler.blocks.find(sequence(3, PROMPT)).hit
    simulation.run()
    assert answer(low) == undisturbed(PROMPT, 1, 4)


def test_a_sequence_that_only_waits_for_its_last_token_is_not_swapped_out() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=64, num_swap_slots=8)
    simulation = Simulation(scheduler, overlap=True)
    simulation.add(sequence(1, PROMPT, max_tokens=1, priority=LOW))
    simulation.step()
    simulation.add(sequence(2, 9, max_tokens=2, priority=HIGH))
    assert simulation.step().sequence_ids == [2]
    assert 1 in simulation.ended
    assert scheduler.stats().blocks_swapped_out_total == 0
    simulation.run()


def test_a_sequence_that_has_computed_nothing_is_not_swapped_out() -> None:
    blocks = make_scheduler(num_swap_slots=8).blocks
    seq = sequence(1, PROMPT)
    blocks.start(seq, blocks.find(seq))
    assert not blocks.swap_out(seq)
    assert seq.kv.table is not None
    assert not blocks.take_moves()


# -- forks -----------------------------------------------------------------------------------------------------------


def test_a_fork_copies_exactly_its_partly_full_block_once_and_its_parent_keeps_its_own() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64, prefix_caching=False))
    parent = sequence(1, PROMPT, max_tokens=5)
    fork = sequence(2, PROMPT, max_tokens=5, fork_of=parent)
    simulation.add(parent, fork)
    assert simulation.step().sequence_ids == [1], "the fork waits for its parent's prompt"
    assert parent.kv.table is not None
    blocks = list(parent.kv.table.block_ids)
    batch = simulation.step()
    assert fork.kv.table is not None
    assert batch.moves.copies == ((blocks[2], fork.kv.table.block_ids[2]),)
    assert fork.kv.table.block_ids[:2] == blocks[:2]
    assert parent.kv.table.block_ids[:3] == blocks
    assert simulation.batches[-1] == [(1, 1), (2, 1)]
    simulation.run()
    assert simulation.scheduler.stats().blocks_copied_total == 1
    assert simulation.computed == {1: 14, 2: 5}
    assert answer(parent) == answer(fork) == undisturbed(PROMPT, 1, 5)


def test_the_last_owner_of_a_shared_block_writes_in_place() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64, prefix_caching=False))
    parent = sequence(1, PROMPT, max_tokens=5)
    simulation.add(parent)
    simulation.step()
    assert parent.kv.table is not None
    blocks = list(parent.kv.table.block_ids)
    fork = sequence(2, PROMPT, max_tokens=5, fork_of=parent)
    simulation.scheduler.add(fork)
    scheduler = simulation.scheduler
    fork.num_computed_tokens = scheduler.blocks.start(fork, scheduler.blocks.find(fork, parent))
    assert [scheduler.pool.ref_count(block) for block in blocks] == [2, 2, 2]
    parent.kv.table.release()
    parent.kv.table = None
    scheduler.blocks.grow(fork, 1)
    assert not scheduler.blocks.take_moves()
    assert fork.kv.table is not None
    assert fork.kv.table.block_ids == blocks


def test_a_fork_whose_prompt_ends_at_a_block_boundary_still_computes_its_last_token() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    parent = sequence(1, list(range(8)), max_tokens=3)
    forks = [sequence(number, list(range(8)), max_tokens=3, fork_of=parent) for number in (2, 3)]
    simulation.add(parent, *forks)
    simulation.run()
    assert simulation.computed == {1: 10, 2: 3, 3: 3}


@pytest.mark.parametrize("fate", ["aborted", "finished", "preempted", "swapped", "aborted waiting"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_fork_of_a_parent_that_is_gone_computes_what_it_does_not_find(fate: str, prefix_caching: bool) -> None:
    slots = 8 if fate == "swapped" else 0
    scheduler = make_scheduler(num_swap_slots=slots, max_num_batched_tokens=64, prefix_caching=prefix_caching)
    simulation = Simulation(scheduler)
    parent = sequence(1, PROMPT, max_tokens=1 if fate == "finished" else 5)
    fork = sequence(2, PROMPT, max_tokens=5, fork_of=parent)
    simulation.add(parent)
    if fate == "aborted waiting":
        simulation.add(fork)
        simulation.abort(1)
    else:
        simulation.step()
        if fate == "aborted":
            simulation.abort(1)
        elif fate != "finished":
            simulation.preempt_all()
            assert parent.status.value == fate
        simulation.add(fork)
    simulation.run()
    assert answer(fork) == undisturbed(PROMPT, 1, 5)
    found = prefix_caching and fate in (
        "aborted",
        "finished",
    )  # the prompt's last block, which is not full, in the prefix cache
    assert scheduler.stats().blocks_copied_total == found
    assert {1, 2} <= set(simulation.ended)


def test_an_aborted_fork_that_waits_for_its_parent_never_runs() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=8))
    parent = sequence(1, 20)
    forks = [sequence(number, parent.token_ids, fork_of=parent) for number in (2, 3)]
    simulation.add(parent, *forks)
    simulation.step()
    simulation.abort(2)
    assert simulation.scheduler.stats().waiting == 1
    simulation.run()
    assert simulation.computed[2] == 0
    assert simulation.ended[3] is FinishReason.LENGTH


@pytest.mark.parametrize("slots", [0, 8])
def test_a_fork_never_copies_what_its_parent_gets_in_the_same_step(slots: int) -> None:
    """The parent is swapped in or recomputed in the step that admits the fork."""
    scheduler = make_scheduler(num_swap_slots=slots, max_num_batched_tokens=64)
    simulation = Simulation(scheduler)
    parent = sequence(1, PROMPT, max_tokens=5)
    simulation.add(parent)
    simulation.step()
    simulation.preempt_all()
    simulation.add(sequence(2, PROMPT, max_tokens=5, fork_of=parent))
    batch = simulation.step()
    assert batch.sequence_ids == [1, 2]
    assert not batch.moves.copies
    simulation.run()


def test_a_fork_never_copies_what_its_parent_takes_over_in_the_same_step() -> None:
    """Half of the parent is recomputed. A HIGH one computes its next block in this step, the parent takes it over, and
    the parent's prompt seems to be complete when the fork is admitted."""
    scheduler = make_scheduler(max_num_batched_tokens=64, decode_preference=0.0)
    simulation = Simulation(scheduler)
    parent = sequence(1, PROMPT, max_tokens=9)
    simulation.add(parent)
    for _ in range(4):
        simulation.step()
    assert len(parent.token_ids) == 14
    scheduler.reset_cache()
    simulation.slots.clear()
    object.__setattr__(scheduler.config, "max_num_batched_tokens", 11)
    scheduler.max_tokens = 11
    assert simulation.step().num_tokens == 11
    simulation.add(sequence(2, parent.token_ids[:13], max_tokens=2, priority=HIGH))
    simulation.add(sequence(3, PROMPT, max_tokens=9, fork_of=parent))
    batch = simulation.step()
    assert batch.sequence_ids == [2, 1, 3]
    assert parent.num_computed_tokens == 14
    simulation.run()


# -- prefixes across classes -----------------------------------------------------------------------------------------


def test_sixteen_of_three_classes_with_one_prefix_compute_it_once() -> None:
    """The LOW ones came first and compute the prefix when the HIGH ones overtake them."""
    scheduler = make_scheduler(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=16)
    simulation = Simulation(scheduler)
    prefix = list(range(80))
    for number in range(16):
        priority = (LOW, NORMAL, HIGH)[number // 6]
        simulation.add(sequence(number, [*prefix, 1000 + number], max_tokens=2, priority=priority))
        if number in (5, 11):
            simulation.step()
    simulation.run()
    assert sum(simulation.computed.values()) == 80 + 16 * 1 + 16 * 1


def test_of_overlapped_steps_too_the_blocks_that_an_answer_fills_are_found() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64), overlap=True)
    first = sequence(1, PROMPT, max_tokens=7)
    simulation.add(first)
    simulation.run()
    assert len(simulation.scheduler.blocks.find(sequence(2, [*first.token_ids, 1, 2])).hit) == 4


def test_hits_of_a_sequence_that_is_admitted_again_are_not_counted_again() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    simulation = Simulation(scheduler)
    seq = sequence(1, PROMPT, max_tokens=4)
    simulation.add(seq)
    simulation.step()
    scheduler.recompute(seq)
    simulation.run()
    assert seq.num_preemptions == 1
    assert simulation.computed[1] < 10 + 11
    assert seq.num_cached_tokens == 0
    assert (scheduler.stats().prompt_tokens_total, scheduler.stats().prefix_hit_tokens_total) == (10, 0)


# -- the lower bound that saves lookups --------------------------------------------------------------------------------


def test_missing_blocks_are_not_looked_up_again_before_they_can_be_fewer() -> None:
    blocks = make_scheduler(num_blocks=16).blocks
    holder, waiter = sequence(1, list(range(9))), sequence(2, list(range(8)), max_tokens=9)
    blocks.start(holder, blocks.find(holder))
    assert blocks.room_for(waiter, blocks.find(waiter)) == 3
    assert blocks.least_room_for(waiter) == 3
    blocks.grow(holder, 9)
    assert blocks.least_room_for(waiter) == 3
    holder.num_computed_tokens = 9
    blocks.publish(holder)
    assert blocks.least_room_for(waiter) == 1, "two blocks were published"
    assert blocks.room_for(waiter, blocks.find(waiter)) == 2, "its last token is left to compute, so one block is found"
    assert blocks.least_room_for(waiter) == 2
    waiter.token_ids.append(8)
    assert blocks.least_room_for(waiter) <= blocks.room_for(waiter, blocks.find(waiter)) == 1, "now both are found"


def test_a_fork_is_always_looked_up() -> None:
    blocks = make_scheduler(num_blocks=16).blocks
    parent = sequence(1, PROMPT)
    fork = sequence(2, PROMPT, fork_of=parent)
    assert blocks.room_for(fork, blocks.find(fork)) == 3
    assert blocks.least_room_for(fork) == 0


def test_a_growth_that_lacks_the_block_of_its_copy_changes_nothing() -> None:
    blocks = make_scheduler(num_blocks=4, prefix_caching=False).blocks
    parent = sequence(1, PROMPT)
    blocks.start(parent, blocks.find(parent))
    blocks.grow(parent, 10)
    fork = sequence(2, PROMPT, fork_of=parent)
    fork.num_computed_tokens = blocks.start(fork, blocks.find(fork, parent))
    assert fork.kv.table is not None
    before = list(fork.kv.table.block_ids)
    with pytest.raises(OutOfBlocksError, match="2 blocks wanted, 1 free"):
        blocks.grow(fork, 4)
    assert fork.kv.table.block_ids == before
    assert blocks.pool.num_free == 1
    assert not blocks.take_moves()


# -- eviction --------------------------------------------------------------------------------------------------------


def test_the_longest_unused_prefix_goes_first_its_tail_before_its_head_and_none_in_use() -> None:
    scheduler = make_scheduler(num_blocks=20, max_num_batched_tokens=64)
    simulation = Simulation(scheduler)
    old, new, used = ([100 * n + i for i in range(17)] for n in (1, 2, 3))
    for number, prompt in enumerate((old, new)):
        simulation.add(sequence(number, prompt, max_tokens=1))
        simulation.step()
    simulation.add(sequence(3, used, max_tokens=40))
    simulation.step()
    assert scheduler.pool.usage() == BlockUsage(used=5, cached=10, free=5)

    def found(prompt: list[int]) -> int:
        return len(scheduler.blocks.find(sequence(99, prompt)).hit)

    assert [found(prompt) for prompt in (old, new, used)] == [4, 4, 4]
    scheduler.pool.evict(4)
    assert [found(prompt) for prompt in (old, new, used)] == [1, 4, 4]
    scheduler.pool.evict(3)
    assert [found(prompt) for prompt in (old, new, used)] == [0, 3, 4]
    scheduler.pool.evict(99)
    assert [found(prompt) for prompt in (old, new, used)] == [0, 0, 4]
    assert scheduler.pool.usage().used == 5


def test_beyond_85_percent_of_the_pool_cached_blocks_are_dropped() -> None:
    scheduler = make_scheduler(num_blocks=40, max_num_batched_tokens=64)
    simulation = Simulation(scheduler)
    cached = []
    for number in range(5):
        simulation.add(sequence(number, 33, max_tokens=1))
        simulation.run()
        cached.append(scheduler.pool.usage().cached)
    assert cached == [9, 18, 27, 34, 34], "the fourth and the fifth, with 9 blocks each, leave room for 25 others"
    simulation.add(sequence(9, 13, max_tokens=4))
    simulation.step()
    assert scheduler.pool.usage() == BlockUsage(used=4, cached=30, free=6)


def test_a_cleared_cache_finds_nothing_and_running_sequences_continue() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    simulation = Simulation(scheduler)
    running = sequence(1, PROMPT, max_tokens=9)
    simulation.add(running, sequence(2, 9, max_tokens=1))
    simulation.step()
    assert scheduler.prefix_cache is not None
    scheduler.prefix_cache.clear()
    assert len(scheduler.prefix_cache) == 0
    assert scheduler.pool.usage().cached == 0
    again = sequence(3, PROMPT)
    simulation.add(again)
    simulation.run()
    assert again.num_cached_tokens == 0
    assert answer(running) == undisturbed(PROMPT, 1, 9)
