"""The pool grows before anything is evicted or preempted, and shrinks without losing what is used or used last."""

from __future__ import annotations

import os
import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from mlxpaged.core.blocks.block_pool import BlockPool, OutOfBlocksError
from mlxpaged.core.scheduling.admission import PromptTooLongError
from mlxpaged.core.scheduling.scheduler import LOOK_AHEAD, Scheduler
from mlxpaged.core.scheduling.sequence import FinishReason, Priority
from tests.scheduler.simulation import FakeClock, Simulation, answer, make_scheduler, sequence, undisturbed

LONG = bool(os.environ.get("MLXPAGED_LONG"))


def growing(start_blocks: int = 4, num_blocks: int = 64, growth_steps: int = 0, **options: object) -> Simulation:
    return Simulation(make_scheduler(num_blocks, start_blocks=start_blocks, **options), growth_steps=growth_steps)


def test_the_pool_grows_before_a_running_sequence_is_preempted() -> None:
    sim = growing(growth_steps=3)
    sim.add(*(sequence(number, 6, max_tokens=30) for number in range(1, 5)))
    sim.run()
    assert sim.num_growths > 1
    assert sim.scheduler.stats().preemptions_total == 0
    for number in range(1, 5):
        assert answer(sim.added[number - 1]) == undisturbed(6, number, 30)


@pytest.mark.parametrize(("cached_blocks", "expected"), [(None, 64), (16, 16), (31, 16), (32, 32)])
def test_for_blocks_that_are_only_cached_the_pool_grows_up_to_a_limit_of_their_own(
    cached_blocks: int | None, expected: int
) -> None:
    sim = growing(start_blocks=8, cached_blocks=cached_blocks)
    for number in range(1, 30):
        sim.add(sequence(number, 14, max_tokens=2))
        sim.run()
    assert sim.scheduler.pool.num_blocks == expected
    sim.add(*(sequence(number, 60, max_tokens=60) for number in range(30, 32)))  # running ones need more
    sim.run()
    assert sim.scheduler.pool.num_blocks == 64
    assert sim.scheduler.stats().preemptions_total == 0


def test_decoding_goes_on_while_the_pool_grows_if_it_grows_in_time() -> None:
    sim = growing(start_blocks=16, growth_steps=4)
    sim.add(*(sequence(number, 4, max_tokens=60) for number in range(1, 3)))
    sim.run()
    assert sim.num_growths
    assert all(len(batch) == 2 for batch in sim.batches[2:-2])


def test_a_prompt_that_fits_only_a_larger_pool_waits_until_the_pool_has_grown() -> None:
    sim = growing(start_blocks=4, num_blocks=20, growth_steps=2)
    sim.add(sequence(1, 70, max_tokens=4))
    for _ in range(2):
        assert not sim.step().rows
    sim.run()
    assert sim.ended == {1: FinishReason.LENGTH}
    assert sim.scheduler.pool.num_blocks == 20


def test_a_prompt_that_fits_runs_while_larger_ones_wait_for_a_pool_that_cannot_grow() -> None:
    sim = growing(start_blocks=4)
    sim.scheduler.blocks.size.may_grow = False
    number_of_large = sim.scheduler.config.max_num_seqs + LOOK_AHEAD
    sim.add(*(sequence(number, 40) for number in range(number_of_large)), sequence(number_of_large, 6))
    assert sim.step().sequence_ids == [number_of_large]


def test_a_prompt_that_fits_preempts_a_lower_class_while_a_larger_one_waits_for_a_pool_that_cannot_grow() -> None:
    sim = growing(start_blocks=8)
    sim.scheduler.blocks.size.may_grow = False
    sim.add(sequence(1, 24, priority=Priority.LOW))
    sim.step()
    sim.add(*(sequence(number, 40, priority=Priority.HIGH) for number in range(2, LOOK_AHEAD + 2)))
    sim.add(sequence(LOOK_AHEAD + 2, 20, priority=Priority.HIGH))
    assert sim.step().sequence_ids == [LOOK_AHEAD + 2]


def test_a_chat_that_fits_with_what_is_cached_preempts_a_lower_class_while_the_pool_cannot_grow() -> None:
    """Without its cached blocks, the window of its second prompt would take 7 blocks at once, and with them 4."""
    sim = growing(start_blocks=17, windows=(None, 8), max_num_batched_tokens=16)
    sim.scheduler.blocks.size.may_grow = False
    sim.add(sequence(1, 38, max_tokens=1))
    sim.run()
    sim.add(sequence(2, 8, max_tokens=20, priority=Priority.LOW))
    sim.step()
    sim.add(sequence(3, [*sim.added[0].token_ids, 1, 2, 3], priority=Priority.HIGH))
    assert sim.step().sequence_ids == [3]
    sim.run()
    assert len(sim.ended) == 3


@pytest.mark.parametrize("swap", [0, 8])
def test_a_sequence_that_outgrows_a_pool_that_cannot_grow_keeps_no_other_from_running(swap: int) -> None:
    sim = growing(start_blocks=8, num_swap_slots=swap)
    sim.scheduler.blocks.size.may_grow = False
    sim.add(sequence(1, 24, max_tokens=20), sequence(2, 4, max_tokens=12))
    for number in range(24):
        if number == 12:
            sim.add(sequence(3, 6))
        sim.step()
    assert sim.ended == {2: FinishReason.LENGTH, 3: FinishReason.LENGTH}
    assert sim.scheduler.stats().preemptions_total == 1
    sim.scheduler.blocks.size.may_grow = True
    sim.run()
    assert answer(sim.added[0]) == undisturbed(24, 1, 20)


def test_a_sequence_that_outgrows_a_pool_that_cannot_grow_keeps_its_blocks_if_no_other_could_run() -> None:
    sim = growing(start_blocks=8)
    sim.scheduler.blocks.size.may_grow = False
    sim.add(sequence(1, 24, max_tokens=20), sequence(2, 40))
    for _ in range(20):
        sim.step()
    sim.scheduler.blocks.size.may_grow = True
    sim.run()
    assert sim.scheduler.stats().preemptions_total == 0
    assert len(sim.ended) == 2


def test_only_what_the_largest_pool_cannot_hold_is_refused() -> None:
    sim = growing(start_blocks=2, num_blocks=10)
    sim.add(sequence(1, 37, max_tokens=4))
    with pytest.raises(PromptTooLongError, match=r"holds 40 tokens \(10 blocks\)"):
        sim.add(sequence(2, 38, max_tokens=4))


def test_cached_blocks_are_kept_while_the_pool_can_grow() -> None:
    sim = growing(start_blocks=8)
    for number in range(1, 9):
        sim.add(sequence(number, 8, max_tokens=1))
        sim.run()
    assert sim.scheduler.pool.usage().cached == 8 * 2
    assert sim.scheduler.pool.num_blocks >= 16


def test_without_memory_to_grow_sequences_are_preempted_as_before() -> None:
    sim = growing(start_blocks=6)
    sim.scheduler.blocks.size.may_grow = False
    sim.add(*(sequence(number, 4, max_tokens=16) for number in range(1, 4)))
    sim.run()
    assert sim.num_growths == 0
    assert sim.scheduler.stats().preemptions_total > 0
    assert sim.scheduler.pool.num_blocks == 6


def test_a_higher_class_waits_for_the_pool_to_grow_and_preempts_if_it_cannot() -> None:
    for may_grow in (True, False):
        sim = growing(start_blocks=8, growth_steps=1)
        sim.scheduler.blocks.size.may_grow = may_grow
        sim.add(sequence(1, 8, max_tokens=20, priority=Priority.LOW))
        sim.step()
        sim.add(sequence(2, 24, max_tokens=4, priority=Priority.HIGH))
        sim.run()
        assert bool(sim.scheduler.stats().preemptions_total) is not may_grow


def test_a_shrunk_pool_keeps_what_was_used_last() -> None:
    sim = growing(start_blocks=32)
    for number in range(1, 7):
        sim.add(sequence(number, 13, max_tokens=1))
        sim.run()
    sim.shrink(8)
    for number in (6, 5, 1):
        sim.add(sequence(10 + number, sim.added[number - 1].token_ids[:13], max_tokens=1))
        sim.run()
    assert [seq.num_cached_tokens for seq in sim.added[6:]] == [12, 12, 0]


def test_blocks_in_use_are_not_given_back() -> None:
    pool: BlockPool[None] = BlockPool(8, 4)
    pool.allocate(5)
    with pytest.raises(OutOfBlocksError, match="5 blocks are in use, so the pool cannot shrink to 4"):
        pool.moves_to(4)
    assert pool.moves_to(5) == {}


def test_forks_share_their_blocks_and_copy_them_on_a_write_after_these_have_moved() -> None:
    sim = growing(start_blocks=40, num_blocks=40, max_num_seqs=8)
    sim.add(sequence(9, 40, max_tokens=60))  # takes the first blocks, and leaves them
    sim.step()
    parent = sequence(1, 10, max_tokens=12)
    sim.add(parent, *(sequence(number, parent.token_ids[:10], 12, fork_of=parent) for number in (2, 3)))
    for _ in range(4):
        sim.step()
    sim.abort(9)
    sim.scheduler.prefix_cache.clear()  # type: ignore[union-attr]
    tables = [list(seq.kv.table.block_ids) for seq in sim.added[1:] if seq.kv.table]
    sim.shrink(12)
    assert tables != [list(seq.kv.table.block_ids) for seq in sim.added[1:] if seq.kv.table]
    sim.run()
    assert [answer(seq) for seq in sim.added[1:]] == [undisturbed(parent.token_ids[:10], 1, 12)] * 3


@settings(max_examples=1000 if LONG else 15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    windows=st.sampled_from([(None,), (None,), (None, 6), (1, 8)]),
    swap=st.sampled_from([0, 0, 60]),
    overlap=st.booleans(),
    growth_steps=st.sampled_from([0, 2, 5]),
)
def test_any_load_is_served_while_the_pool_grows_and_shrinks(
    seed: int, windows: tuple[int | None, ...], swap: int, overlap: bool, growth_steps: int
) -> None:
    """Prompts begin alike and are forked; the pool shrinks at any step, and sometimes it cannot grow for a while."""
    rng = random.Random(seed)
    scheduler: Scheduler = make_scheduler(
        30 * len(windows),
        4,
        FakeClock(),
        windows=windows,
        start_blocks=rng.randint(1, 10),
        num_swap_slots=swap,
        max_num_seqs=rng.randint(1, 6),
    )
    sim = Simulation(scheduler, overlap, growth_steps)
    number = 0
    for _ in range(60):
        while rng.random() < 0.4:
            number += 1
            prompt = [7] * rng.choice((0, 12, 20)) + [rng.randrange(9) for _ in range(rng.randint(1, 16))]
            parent = sequence(number, prompt, rng.randint(1, 14), priority=rng.choice(list(Priority)))
            sim.add(parent)
            if rng.random() < 0.3:
                number += 1
                sim.add(sequence(number, prompt, 6, None, parent.priority, fork_of=parent))
        if rng.random() < 0.15:
            sim.shrink(rng.randint(1, 30))
        scheduler.blocks.size.may_grow = rng.random() < 0.8
        if sim.has_work:
            sim.step()
    scheduler.blocks.size.may_grow = True
    sim.run(2_000)
    assert set(sim.ended.values()) <= {FinishReason.LENGTH}
    assert len(sim.ended) == number
    assert scheduler.pool.usage().used == scheduler.stats().swap.used == 0
    for seq in sim.added:
        assert answer(seq) == undisturbed(seq.token_ids[: seq.num_prompt_tokens], seq.sequence_id, seq.max_tokens)
    sim.shrink(1)
    assert scheduler.pool.num_blocks == 1
