"""Sequences in the order in which they are served: short prompts of a class come first, and long ones do not starve."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlxpaged.core.scheduling.queue import MOST_SECONDS, SECONDS_PER_TOKEN, SHORT_PROMPT, SequenceQueue
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import Priority, Sequence
from tests.scheduler.simulation import Simulation, commit, make_scheduler, sequence

HIGH, NORMAL, LOW = Priority


def test_removing_a_sequence_that_is_not_in_the_queue_raises() -> None:
    queue = SequenceQueue()
    first, second, stranger = (sequence(number, 1) for number in range(3))
    for number, seq in enumerate((first, stranger, second)):
        seq.order = (0.0, number)
    queue.add(second)
    queue.add(first)
    with pytest.raises(ValueError, match="not in this queue"):
        queue.remove(stranger)
    queue.remove(first)
    with pytest.raises(ValueError, match="not in this queue"):
        queue.remove(first)
    assert list(queue) == [second]


# -- short prompts first ---------------------------------------------------------------------------------------------


def step(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Sequences and their tokens. Each sequence that samples gets a token."""
    batch = scheduler.schedule()
    commit(scheduler, batch, {row.sequence_id: 1 for row in batch.rows if row.samples})
    return [(row.sequence_id, row.num_tokens) for row in batch.rows]


def large_scheduler(**options: Any) -> Scheduler:
    return make_scheduler(num_blocks=4096, block_size=32, **{"max_num_batched_tokens": 8192, **options})


def order_of_service(sequences: list[Sequence]) -> list[int]:
    """One at a time, all queued before the first step."""
    scheduler, served = large_scheduler(max_num_seqs=1), list[int]()
    for seq in sequences:
        scheduler.add(seq)
    while scheduler.has_unfinished():
        served += [number for number, _ in step(scheduler)]
    return list(dict.fromkeys(served))


def test_short_prompts_of_a_class_come_first() -> None:
    assert order_of_service([sequence(1, 4000), sequence(2, 100), sequence(3, 900)]) == [2, 3, 1]


def test_of_prompts_that_are_equally_short_the_first_to_come_is_first() -> None:
    assert order_of_service([sequence(1, SHORT_PROMPT), sequence(2, 10), sequence(3, SHORT_PROMPT + 1)]) == [1, 2, 3]


def test_a_long_prompt_is_overtaken_only_by_those_that_come_soon_after_it() -> None:
    """By how much sooner its length decides, up to a limit."""
    wait = SECONDS_PER_TOKEN * (4000 - 100)
    soon = [sequence(1, 4000), sequence(2, 100, arrival_time=wait - 0.2)]
    late = [sequence(1, 4000), sequence(2, 100, arrival_time=wait)]
    assert order_of_service(soon) == [2, 1]
    assert order_of_service(late) == [1, 2]
    longest = [sequence(1, 30_000), sequence(2, 100, arrival_time=MOST_SECONDS)]
    assert order_of_service(longest) == [1, 2]


def test_short_prompts_do_not_change_the_order_of_classes() -> None:
    """A LOW one still goes before a HIGH one that came 20 s later, and not before that."""
    for age, expected in ((20.0, [2, 1, 3]), (19.0, [3, 2, 1])):
        old = [sequence(1, 4000, priority=LOW), sequence(2, 10, priority=LOW)]
        assert order_of_service([*old, sequence(3, 2000, priority=HIGH, arrival_time=age)]) == expected


@pytest.mark.parametrize("seed", range(10))
def test_each_class_uses_the_turns_that_it_has_when_all_prompts_are_equal(seed: int) -> None:
    rng = random.Random(seed)
    equal, mixed = [], []
    for number in range(40):
        priority, arrival = rng.choice([HIGH, NORMAL, LOW]), number * rng.choice([0.1, 1.0])
        equal.append(sequence(number, 4, 1, priority=priority, arrival_time=arrival))
        mixed.append(sequence(number, rng.choice([4, 500, 900]), 1, priority=priority, arrival_time=arrival))
    expected = [equal[number].priority for number in order_of_service(equal)]
    assert [mixed[number].priority for number in order_of_service(mixed)] == expected


def test_tokens_in_the_prefix_cache_do_not_make_a_prompt_long() -> None:
    prompt = list(range(10_000, 14_000))
    scheduler = large_scheduler(max_num_seqs=1)
    scheduler.add(sequence(1, prompt, max_tokens=1))
    step(scheduler)
    for seq in (sequence(2, 300), sequence(3, [*prompt, 1, 2, 3]), sequence(4, 100)):
        scheduler.add(seq)
    assert [seq.sequence_id for seq in scheduler.waiting] == [3, 4, 2]


def test_a_short_prompt_overtakes_one_whose_chunks_are_running() -> None:
    scheduler = large_scheduler(max_num_batched_tokens=64)
    scheduler.add(sequence(1, 1000))
    assert step(scheduler) == [(1, 64)]
    scheduler.add(sequence(2, 40, arrival_time=0.5))
    assert step(scheduler) == [(2, 40), (1, 24)]


def test_the_rest_of_a_prompt_counts_not_its_length() -> None:
    scheduler = large_scheduler(max_num_batched_tokens=64)
    scheduler.add(sequence(1, 80))
    step(scheduler)
    scheduler.add(sequence(2, 40))
    assert step(scheduler) == [(1, 16), (2, 40)]


def test_a_prompt_with_a_deadline_keeps_its_turn() -> None:
    long = sequence(1, 4000, deadline=1000.0)
    assert order_of_service([long, sequence(2, 100), sequence(3, 10)]) == [1, 3, 2]


def test_an_answer_that_was_preempted_does_not_wait_for_short_prompts() -> None:
    simulation = Simulation(make_scheduler(num_blocks=4096, max_num_batched_tokens=512, prefix_caching=False))
    simulation.add(sequence(1, 500, max_tokens=9))
    simulation.step()
    simulation.add(sequence(2, 10, arrival_time=0.1))
    simulation.preempt_all()
    assert [seq.sequence_id for seq in simulation.scheduler.waiting] == [1, 2]


@pytest.mark.parametrize("slots", [1, 8])
def test_short_prompts_without_end_do_not_starve_a_long_one(slots: int) -> None:
    """Each step has room for one short prompt, and one arrives before each step. The long prompt waits for as long as
    it may be overtaken, and then has each step until it is computed."""
    budget, length, now = 100, 3000, 0.0
    scheduler = large_scheduler(max_num_batched_tokens=budget, max_num_seqs=slots)
    long = sequence(1, length, max_tokens=1)
    scheduler.add(long)
    for number in range(2, 300):
        scheduler.add(sequence(number, budget, max_tokens=1, arrival_time=now))
        step(scheduler)
        now += 0.1
        if long.num_output_tokens:
            break
    overtaken = SECONDS_PER_TOKEN * (length - budget)
    assert overtaken < now <= overtaken + 0.1 * (length / budget + 2)
