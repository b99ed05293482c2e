"""Deadlines: which sequence of a class uses a turn, and how long a prompt takes at least."""

from __future__ import annotations

import math
import random

import pytest

from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import Priority, Sequence
from mlxpaged.core.step import Row, Step
from tests.scheduler.simulation import FakeClock, Simulation, make_scheduler, sequence

HIGH, NORMAL, LOW = Priority
SECONDS_PER_TOKEN = 0.01


def order_of_service(sequences: list[Sequence], **options: int) -> list[int]:
    """One at a time, all queued before the first step."""
    simulation = Simulation(make_scheduler(max_num_seqs=1, **options))
    simulation.add(*sequences)
    simulation.run()
    return list(dict.fromkeys(number for batch in simulation.batches for number, _ in batch))


# -- the order of a class --------------------------------------------------------------------------------------------


def test_the_earliest_deadline_of_a_class_is_served_first() -> None:
    deadlines = [50.0, 10.0, 40.0, 10.0, 20.0]
    sequences = [sequence(number, 4, deadline=deadline) for number, deadline in enumerate(deadlines)]
    assert order_of_service(sequences) == [1, 3, 4, 2, 0]


def test_the_deadline_of_the_first_token_counts_like_that_of_the_answer() -> None:
    sequences = [sequence(1, 4, deadline=9.0), sequence(2, 4, deadline=50.0, ttft_deadline=5.0), sequence(3, 4)]
    assert order_of_service(sequences) == [2, 1, 3]


def test_sequences_without_deadlines_keep_their_turns() -> None:
    sequences = [sequence(1, 4), sequence(2, 4, deadline=50.0), sequence(3, 4), sequence(4, 4, deadline=10.0)]
    assert order_of_service(sequences) == [1, 4, 3, 2]


def test_deadlines_do_not_change_the_order_of_classes() -> None:
    """A LOW one with a deadline still goes before a HIGH one that came 20 s later, and not before that."""
    for age, expected in ((20.0, [2, 1, 3]), (19.0, [3, 2, 1])):
        old = [sequence(1, 4, priority=LOW, deadline=90.0), sequence(2, 4, priority=LOW, deadline=30.0)]
        fresh = sequence(3, 4, priority=HIGH, arrival_time=age)
        assert order_of_service([*old, fresh]) == expected


@pytest.mark.parametrize("seed", range(20))
def test_deadlines_only_exchange_turns_within_a_class(seed: int) -> None:
    """Classes, and sequences with and without deadlines, are served as without deadlines, those with in their order."""
    rng = random.Random(seed)
    plain, timed = [], []
    for number in range(40):
        priority, arrival = rng.choice([HIGH, NORMAL, LOW]), number * rng.choice([0.1, 1.0])
        deadline = rng.choice([math.inf, arrival + rng.uniform(1, 100)])
        plain.append(sequence(number, 4, 1, priority=priority, arrival_time=arrival))
        timed.append(sequence(number, 4, 1, priority=priority, arrival_time=arrival, deadline=deadline))
    expected = [timed[number] for number in order_of_service(plain)]
    got = [timed[number] for number in order_of_service(timed)]
    for seq, turn in zip(got, expected, strict=True):
        assert seq.priority is turn.priority
        assert seq is turn or math.inf not in (seq.deadline, turn.deadline)
    for priority in Priority:
        deadlines = [seq.deadline for seq in got if seq.priority is priority and seq.deadline < math.inf]
        assert deadlines == sorted(deadlines)


@pytest.mark.parametrize("seed", range(5))
def test_urgent_arrivals_starve_neither_sequences_without_nor_those_with_late_deadlines(seed: int) -> None:
    """More arrive than can be served, most of them urgent. A sequence without a deadline has no more before it than
    arrived before it; one with a deadline has none before it that arrived after that deadline, with one of its own."""
    rng, clock = random.Random(seed), FakeClock()
    scheduler = make_scheduler(clock=clock, max_num_seqs=1, num_blocks=512)
    simulation = Simulation(scheduler)
    late = sequence(1_000, 4, max_tokens=1, deadline=60.0)
    simulation.add(late)
    admitted: list[Sequence] = []
    patient: list[Sequence] = []
    for number in range(200):
        for new in range(rng.choice([1, 1, 2])):
            seq = sequence(2 * number + new, 4, max_tokens=1, arrival_time=clock.now)
            if rng.random() < 0.7:
                seq.deadline = clock.now + rng.uniform(1, 20)
            else:
                patient.append(seq)
            simulation.add(seq)
        served = set(simulation.step().sequence_ids)
        admitted += [seq for seq in simulation.added if seq.sequence_id in served]
        clock.now += 1.0
    before_late = admitted[: admitted.index(late)]
    assert all(seq.arrival_time <= late.deadline or seq in patient for seq in before_late)
    arrival = {seq.sequence_id: place for place, seq in enumerate(simulation.added)}
    served = [seq for seq in patient if seq in admitted]
    assert len(served) > 20
    for seq in served:
        assert admitted.index(seq) <= arrival[seq.sequence_id]


def test_a_preempted_sequence_that_had_its_first_token_is_ordered_by_its_remaining_deadline() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    old = sequence(1, 8, max_tokens=9, ttft_deadline=1.0, deadline=90.0)
    simulation.add(old)
    simulation.step()
    simulation.add(sequence(2, 8, deadline=50.0), sequence(3, 8, deadline=99.0))
    simulation.preempt_all()
    assert [seq.sequence_id for seq in simulation.scheduler.waiting] == [2, 1, 3]
    simulation.run()


def test_a_waiting_sequence_that_ends_leaves_the_others_in_order() -> None:
    simulation = Simulation(make_scheduler(max_num_seqs=1))
    simulation.add(*(sequence(number, 4, deadline=90.0 - number) for number in range(9)))
    simulation.step()
    for number in (4, 8, 0):
        simulation.abort(number)
    assert [seq.sequence_id for seq in simulation.scheduler.waiting] == [7, 6, 5, 3, 2, 1]
    simulation.run()


# -- how long a prompt takes at least --------------------------------------------------------------------------------


def teach(scheduler: Scheduler, lengths: range = range(50, 451, 50)) -> None:
    """Steps with prompts, each token of which takes the same time."""
    for length in lengths:
        row = Row(10_000, 0, range(length))
        scheduler.times.observe(Step((row,)), SECONDS_PER_TOKEN * length)


def test_deadline_estimates_count_the_remaining_tokens() -> None:
    scheduler = make_scheduler(num_blocks=512, max_num_batched_tokens=256)
    simulation = Simulation(scheduler)
    teach(scheduler)
    seq = sequence(1, 1000)
    simulation.add(seq)
    prefill = scheduler.prefill_beyond(seq, 5.0)
    assert prefill is not None
    assert prefill.num_tokens == 1000
    assert prefill.seconds == pytest.approx(10.0, rel=0.05)
    assert scheduler.prefill_beyond(seq, 11.0) is None
    for expected in (744, 488, 232):
        simulation.step()
        prefill = scheduler.prefill_beyond(seq, 0.0)
        assert prefill is not None
        assert prefill.num_tokens == expected
    simulation.step()
    assert scheduler.prefill_beyond(seq, 0.0) is None, "it decodes"
    simulation.run()


@pytest.mark.parametrize("lengths", [range(0), range(50, 351, 50)])
def test_deadline_estimates_need_several_prompts(lengths: range) -> None:
    scheduler = make_scheduler(num_blocks=512)
    teach(scheduler, lengths)
    seq = sequence(1, 1000)
    scheduler.add(seq)
    assert scheduler.prefill_beyond(seq, 0.0) is None


def test_deadline_estimates_do_not_count_tokens_far_beyond_what_was_measured() -> None:
    """What 30,000 keys cost cannot be told from prompts of 450 tokens."""
    scheduler = make_scheduler(num_blocks=10_000)
    teach(scheduler)
    seq = sequence(1, 30_000)
    scheduler.add(seq)
    prefill = scheduler.prefill_beyond(seq, 1.0)
    assert prefill is not None
    assert prefill.num_tokens == 30_000
    assert prefill.seconds == pytest.approx(4 * 450 * SECONDS_PER_TOKEN, rel=0.05)


@pytest.mark.parametrize("num_swap_slots", [0, 512])
def test_deadline_estimates_do_not_count_cached_or_swapped_tokens(num_swap_slots: int) -> None:
    scheduler = make_scheduler(num_blocks=512, max_num_batched_tokens=600, num_swap_slots=num_swap_slots)
    simulation = Simulation(scheduler)
    teach(scheduler)
    prompt = list(range(500))
    first = sequence(1, prompt, max_tokens=9)
    simulation.add(first)
    simulation.step()
    again = sequence(2, [*prompt, *range(1000, 1100)])
    scheduler.add(again)
    prefill = scheduler.prefill_beyond(again, 0.5)
    assert prefill is not None
    assert prefill.num_tokens == 100
    assert prefill.seconds == pytest.approx(100 * SECONDS_PER_TOKEN, rel=0.2)
    if num_swap_slots:
        simulation.preempt_all()
        assert first.kv.num_swapped_tokens
        assert scheduler.prefill_beyond(first, 0.0) is None


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_deadline_estimates_of_a_fork_are_those_of_its_parent(prefix_caching: bool) -> None:
    scheduler = make_scheduler(num_blocks=512, max_num_batched_tokens=256, prefix_caching=prefix_caching)
    simulation = Simulation(scheduler)
    teach(scheduler)
    parent = sequence(1, 1000)
    fork = sequence(2, parent.token_ids, fork_of=parent)
    simulation.add(parent, fork)
    for remaining in (744, 488, 232):
        simulation.step()
        prefill = scheduler.prefill_beyond(fork, 0.0)
        assert prefill is not None
        assert prefill.num_tokens == remaining
    simulation.run()
