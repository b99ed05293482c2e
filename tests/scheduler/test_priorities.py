"""The order of service: classes, aging, the starvation bound. Who is preempted: test_preemption.py."""

from __future__ import annotations

import logging
import random

import pytest

from mlxpaged.core.scheduling.scheduler import LOOK_AHEAD, STARVATION_BOUND
from mlxpaged.core.scheduling.sequence import FinishReason, Priority, SequenceStatus
from tests.scheduler.simulation import FakeClock, Simulation, answer, make_scheduler, sequence, undisturbed

HIGH, NORMAL, LOW = Priority


def order_of_service(simulation: Simulation) -> list[int]:
    simulation.run()
    first_seen: dict[int, None] = {}
    for batch in simulation.batches:
        first_seen.update(dict.fromkeys(number for number, _ in batch))
    return list(first_seen)


# -- classes and age -------------------------------------------------------------------------------------------------


def test_the_higher_class_goes_first_and_within_a_class_the_first_to_come() -> None:
    simulation = Simulation(make_scheduler(max_num_seqs=1))
    for number, priority in enumerate((LOW, NORMAL, HIGH, LOW, NORMAL, HIGH)):
        simulation.add(sequence(number, 4, priority=priority))
    assert order_of_service(simulation) == [2, 5, 1, 4, 0, 3]


@pytest.mark.parametrize(
    ("old", "age", "fresh", "old_first"),
    [
        (LOW, 20.0, HIGH, True),
        (LOW, 19.9, HIGH, False),
        (LOW, 10.0, NORMAL, True),
        (LOW, 9.9, NORMAL, False),
        (NORMAL, 10.0, HIGH, True),
        (NORMAL, 9.9, HIGH, False),
        (HIGH, 0.0, HIGH, True),
    ],
)
def test_a_lower_class_goes_first_after_ten_seconds_a_class_and_not_before(
    old: Priority, age: float, fresh: Priority, old_first: bool
) -> None:
    simulation = Simulation(make_scheduler(max_num_seqs=1))
    simulation.add(sequence(1, 4, priority=old, arrival_time=100.0))
    simulation.add(sequence(2, 4, priority=fresh, arrival_time=100.0 + age))
    assert order_of_service(simulation) == ([1, 2] if old_first else [2, 1])


def test_effective_priority_falls_by_a_tenth_a_second() -> None:
    seq = sequence(1, 4, priority=LOW, arrival_time=5.0)
    assert [seq.effective_priority(now) for now in (5.0, 15.0, 25.0, 35.0)] == [2.0, 1.0, 0.0, -1.0]


def test_age_survives_preemption() -> None:
    """The older LOW is preempted, and is still before a HIGH that comes 20 s after it."""
    clock = FakeClock()
    scheduler = make_scheduler(clock=clock, max_num_seqs=1, max_num_batched_tokens=32)
    simulation = Simulation(scheduler)
    old = sequence(1, 4, max_tokens=20, priority=LOW, arrival_time=0.0)
    simulation.add(old)
    simulation.step()
    clock.now = 5.0
    simulation.add(sequence(2, 4, max_tokens=3, priority=HIGH, arrival_time=5.0))
    simulation.step()
    assert old.status is SequenceStatus.PREEMPTED
    assert old.arrival_time == 0.0
    simulation.add(sequence(3, 4, priority=LOW, arrival_time=5.0), sequence(4, 4, priority=HIGH, arrival_time=21.0))
    assert [seq.sequence_id for seq in scheduler.waiting] == [1, 4, 3]


def test_log_lines_carry_priority_and_effective_value(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    simulation = Simulation(make_scheduler(clock=clock, max_num_seqs=1))
    with caplog.at_level(logging.DEBUG, logger="mlxpaged.core.scheduling"):
        simulation.add(sequence(1, 4, priority=LOW))
        clock.now = 12.5
        simulation.step()
        simulation.add(sequence(2, 4, priority=HIGH, arrival_time=12.5))
        simulation.step()
    messages = [record.getMessage() for record in caplog.records]
    assert "admitted sequence 1: priority LOW, effective 0.75, 12.5 s old, preempted 0 times" in messages
    assert "preempted sequence 1: priority LOW, effective 0.75, 12.5 s old, preempted 1 times" in messages
    assert "admitted sequence 2: priority HIGH, effective 0.00, 0.0 s old, preempted 0 times" in messages


# -- the starvation bound --------------------------------------------------------------------------------------------


def blocked_queue(num_swap_slots: int = 0) -> tuple[Simulation, int]:
    """One sequence decodes for long in half of the pool; a large one waits."""
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=256, num_swap_slots=num_swap_slots)
    simulation = Simulation(scheduler)
    simulation.add(sequence(1, 128, max_tokens=100))
    simulation.step()
    simulation.add(sequence(2, 200, max_tokens=2))
    return simulation, 2


@pytest.mark.parametrize("num_swap_slots", [0, 100])
def test_a_blocked_sequence_runs_in_step_65_its_victim_is_queued_again_and_the_pool_balances(
    num_swap_slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    simulation, number = blocked_queue(num_swap_slots)
    for _ in range(STARVATION_BOUND):
        assert number not in simulation.step().sequence_ids
    victim, large = simulation.scheduler.sequences[1], simulation.scheduler.sequences[number]
    assert (large.skipped_steps, simulation.scheduler.stats().starvation_admissions_total) == (STARVATION_BOUND, 0)
    with caplog.at_level(logging.INFO, logger="mlxpaged.core.scheduling"):
        batch = simulation.step()
    assert batch.sequence_ids == [number]
    assert victim.status is (SequenceStatus.SWAPPED if num_swap_slots else SequenceStatus.PREEMPTED)
    assert list(simulation.scheduler.waiting) == [victim]
    assert simulation.scheduler.stats().starvation_admissions_total == 1
    assert any(
        "preempted sequences for sequence 2, which reached the starvation bound" in record.getMessage()
        for record in caplog.records
    )
    assert large.skipped_steps == 0
    simulation.run()
    assert simulation.ended == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
    assert answer(victim) == undisturbed(128, 1, 100)
    assert simulation.scheduler.pool.usage().used == simulation.scheduler.stats().swap.used == 0


@pytest.mark.parametrize("prompt", [125, 126, 127, 128])
def test_the_next_block_of_a_victim_counts_as_room_too(prompt: int) -> None:
    """The waiting one needs the whole pool. At one of these lengths the running one is about to take one more block."""
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=256)
    simulation = Simulation(scheduler)
    simulation.add(sequence(1, prompt, max_tokens=100))
    simulation.step()
    simulation.add(sequence(2, 254, max_tokens=2))
    for _ in range(STARVATION_BOUND):
        simulation.step()
    assert simulation.step().sequence_ids == [2]


def test_no_starvation_admission_is_counted_if_no_sequence_is_preempted() -> None:
    simulation, large = blocked_queue()
    for _ in range(STARVATION_BOUND):
        simulation.step()
    simulation.abort(1)
    assert simulation.step().sequence_ids == [large]
    assert simulation.scheduler.stats().starvation_admissions_total == 0


def test_a_preempted_sequence_loses_the_protection_of_the_starvation_bound() -> None:
    simulation, large = blocked_queue()
    simulation.scheduler.sequences[large].max_tokens = 9
    for _ in range(STARVATION_BOUND + 1):
        simulation.step()
    simulation.scheduler.reset_cache()
    simulation.slots.clear()
    simulation.abort(1)
    assert simulation.step().sequence_ids == [large]
    simulation.add(sequence(3, 200, max_tokens=1, priority=HIGH))
    assert simulation.step().sequence_ids == [3]
    simulation.run()


def test_small_sequences_overtake_a_large_one_for_64_steps() -> None:
    simulation, large = blocked_queue()
    for number in range(10, 10 + STARVATION_BOUND):
        simulation.add(sequence(number, 8, max_tokens=1, arrival_time=1.0))
        assert number in simulation.step().sequence_ids
    simulation.add(sequence(99, 8, max_tokens=1, arrival_time=1.0))
    assert simulation.step().sequence_ids[0] == large


def test_a_step_considers_no_more_than_a_few_sequences_without_room() -> None:
    simulation, _ = blocked_queue()
    simulation.add(*(sequence(number, 200) for number in range(3, 2 + LOOK_AHEAD)))
    simulation.add(sequence(98, 200), sequence(99, 4, arrival_time=1.0))
    assert 99 not in simulation.step().sequence_ids
    assert [seq.skipped_steps for seq in simulation.scheduler.waiting][:LOOK_AHEAD] == [1] * LOOK_AHEAD


def test_several_sequences_at_the_starvation_bound_do_not_preempt_each_other() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=32)
    simulation = Simulation(scheduler)
    simulation.add(sequence(1, 128, max_tokens=120))
    for _ in range(5):
        simulation.step()
    simulation.add(*(sequence(number, 200, max_tokens=20, priority=LOW) for number in (2, 3, 4)))
    simulation.run(2_000)
    assert simulation.scheduler.stats().preemptions_total == 1
    assert len(simulation.ended) == 4


def test_a_sequence_admitted_by_the_starvation_bound_is_not_preempted_for_a_higher_class() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=256)
    simulation = Simulation(scheduler)
    first, low = sequence(1, 128, max_tokens=100, priority=HIGH), sequence(2, 200, max_tokens=9, priority=LOW)
    simulation.add(first)
    simulation.step()
    simulation.add(low)
    simulation.run()
    assert low.num_preemptions == 0
    assert answer(first) == undisturbed(128, 1, 100)


def test_the_starvation_bound_admits_the_first_in_order_first() -> None:
    simulation, _ = blocked_queue()
    simulation.add(sequence(3, 200))
    for _ in range(STARVATION_BOUND):
        simulation.step()
    assert simulation.step().sequence_ids == [2]


# -- under steady arrivals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode_preference", [0.0, 0.5, 0.75])
def test_a_storm_of_long_prompts_leaves_every_running_stream_its_token_a_step(decode_preference: float) -> None:
    scheduler = make_scheduler(
        num_blocks=4096, max_num_seqs=12, max_num_batched_tokens=64, decode_preference=decode_preference
    )
    simulation = Simulation(scheduler)
    streams = [sequence(number, 4, max_tokens=120) for number in range(8)]
    simulation.add(*streams)
    simulation.step()
    for number in range(100, 200):
        simulation.add(sequence(number, 200, max_tokens=2))
        decoding = {seq.sequence_id for seq in scheduler.running if seq.num_output_tokens}
        batch = simulation.step()
        tokens = {row.sequence_id: row.num_tokens for row in batch.rows}
        assert decoding <= set(tokens)
        assert {tokens[number] for number in decoding} == {1}
        assert batch.num_tokens <= 64
        prompts = sum(count for number, count in tokens.items() if number not in decoding)
        assert prompts == min(64 - len(decoding), int((1 - decode_preference) * 64)), "all that they may have, no more"


def test_a_prompt_gets_a_token_a_step_however_much_decoding_is_preferred() -> None:
    simulation = Simulation(make_scheduler(max_num_seqs=2, max_num_batched_tokens=8, decode_preference=0.95))
    simulation.add(sequence(1, 4, max_tokens=40))
    simulation.step()
    simulation.add(sequence(2, 6))
    assert [simulation.step().num_tokens for _ in range(3)] == [2, 2, 2]


def test_low_is_served_within_a_bound_under_a_steady_load_of_high() -> None:
    """HIGH alone asks for more than there is. Each LOW still gets its turn about 20 s after it came."""
    clock = FakeClock()
    scheduler = make_scheduler(num_blocks=64, clock=clock, max_num_seqs=2, max_num_batched_tokens=16)
    simulation = Simulation(scheduler)
    rng = random.Random(0)
    waits: dict[Priority, list[float]] = {priority: [] for priority in Priority}
    pending = {}
    for number in range(1200):
        if number % 10 == 0:
            pending[number] = sequence(number, 8, max_tokens=8, priority=LOW if number % 50 == 0 else HIGH)
            pending[number].arrival_time = clock.now
            simulation.add(pending[number])
        elif rng.random() < 0.2:
            pending[number] = sequence(number, 8, max_tokens=8, priority=HIGH, arrival_time=clock.now)
            simulation.add(pending[number])
        if simulation.has_work:
            simulation.step()
        clock.now += 0.1
        for each in [each for each, seq in pending.items() if seq.num_output_tokens]:
            seq = pending.pop(each)
            waits[seq.priority].append(clock.now - seq.arrival_time)
    assert len(waits[LOW]) > 10
    backlog = max(waits[HIGH])
    assert max(waits[LOW]) <= backlog + 21.0, "20 s after a HIGH that came with it, and no more"


# -- one at a time ---------------------------------------------------------------------------------------------------


def test_what_one_sequence_is_granted_or_refused_is_not_so_for_the_next() -> None:
    """Skipped steps are a sequence's own, and so is the protection of the starvation bound."""
    simulation, large = blocked_queue()
    small = sequence(3, 8, max_tokens=1)
    simulation.add(small)
    assert 3 in simulation.step().sequence_ids
    assert (simulation.scheduler.sequences[large].skipped_steps, small.skipped_steps) == (1, 0)
    for _ in range(STARVATION_BOUND):
        simulation.step()
    protected = {seq.sequence_id: seq.admitted_by_starvation_bound for seq in simulation.unfinished}
    assert protected == {1: False, large: True}
    simulation.add(sequence(4, 200, max_tokens=2))
    for _ in range(3):
        simulation.step()
    assert large in simulation.ended
    assert not any(seq.admitted_by_starvation_bound for seq in simulation.scheduler.running)
