"""The order of service: classes, aging, preemption for a higher class, the starvation bound."""

from __future__ import annotations

import logging
import random

import pytest

from mlxpaged.core.scheduling.admission import PromptTooLongError
from mlxpaged.core.scheduling.scheduler import LOOK_AHEAD, STARVATION_BOUND
from mlxpaged.core.scheduling.sequence import FinishReason, Priority, Sequence, SequenceStatus
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


# -- preemption for a higher class -----------------------------------------------------------------------------------


def filled(priority: Priority, count: int, **options: int | bool) -> Simulation:
    """`count` sequences of 3 blocks each in a pool of as many, decoding."""
    scheduler = make_scheduler(num_blocks=3 * count, max_num_batched_tokens=64, **options)
    simulation = Simulation(scheduler)
    simulation.add(*(sequence(number, 9, max_tokens=4, priority=priority) for number in range(1, count + 1)))
    simulation.step()
    return simulation


def test_a_higher_class_preempts_no_more_of_a_lower_one_than_it_needs() -> None:
    simulation = filled(LOW, 4)
    simulation.add(sequence(9, 20, max_tokens=2, priority=HIGH))
    simulation.step()
    assert [seq.sequence_id for seq in simulation.scheduler.running] == [9, 1, 2], "the newest two were preempted"
    simulation.run()
    assert len(simulation.ended) == 5


@pytest.mark.parametrize(("running", "fresh", "at"), [(NORMAL, NORMAL, 0.0), (NORMAL, LOW, 0.0), (LOW, HIGH, 20.0)])
def test_no_sequence_is_preempted_for_its_own_or_a_lower_class_or_for_one_after_it(
    running: Priority, fresh: Priority, at: float
) -> None:
    simulation = filled(running, 2)
    simulation.add(sequence(9, 9, max_tokens=4, priority=fresh, arrival_time=at))
    simulation.run()
    assert simulation.scheduler.stats().preemptions_total == 0


def test_no_sequence_is_preempted_in_vain() -> None:
    """Two LOW ones could be preempted, but the running HIGH one holds what the waiting one would still lack."""
    scheduler = make_scheduler(num_blocks=12, max_num_batched_tokens=64)
    simulation = Simulation(scheduler)
    simulation.add(
        sequence(1, 20, max_tokens=8, priority=HIGH), sequence(2, 9, priority=LOW), sequence(3, 5, priority=LOW)
    )
    simulation.step()
    assert len(scheduler.running) == 3
    simulation.add(sequence(4, 28, max_tokens=4, priority=HIGH))
    simulation.step()
    assert scheduler.stats().preemptions_total == 0
    simulation.run()
    assert len(simulation.ended) == 4


def test_blocks_that_two_victims_share_count_when_both_are_preempted() -> None:
    """Each of the LOW ones holds 10 shared blocks and one of its own: preempting one frees a single block."""
    scheduler = make_scheduler(num_blocks=14, max_num_batched_tokens=64)
    simulation = Simulation(scheduler)
    prompt = list(range(40))
    simulation.add(*(sequence(number, [*prompt, 100 + number], max_tokens=2, priority=LOW) for number in (1, 2)))
    simulation.step()
    assert scheduler.pool.usage().used == 12
    simulation.add(sequence(3, [200 + i for i in range(20)], max_tokens=1, priority=HIGH))
    simulation.step()
    assert [seq.sequence_id for seq in scheduler.running] == []
    assert scheduler.stats().preemptions_total == 2
    simulation.run()


def test_a_prefix_that_only_victims_hold_is_no_room_for_a_sequence_that_shares_it() -> None:
    """HIGH shares the prefix of the LOW one, so preempting that one frees 1 block for it, not 11."""
    scheduler = make_scheduler(num_blocks=13, max_num_batched_tokens=64)
    simulation = Simulation(scheduler)
    prompt = list(range(40))
    simulation.add(sequence(1, 8, max_tokens=1))
    simulation.add(sequence(2, [*prompt, 100], max_tokens=8, priority=LOW))
    simulation.step()
    simulation.add(sequence(3, 5, max_tokens=3, priority=HIGH))
    simulation.step()
    assert scheduler.pool.num_free == 0
    simulation.add(sequence(4, [*prompt, *range(200, 208)], max_tokens=2, priority=HIGH))
    assert 4 not in simulation.step().sequence_ids
    assert scheduler.sequences[2].num_preemptions == 0
    assert scheduler.sequences[3].num_preemptions == 0
    simulation.run()


def test_a_higher_class_preempts_for_a_sequence_slot_too() -> None:
    simulation = Simulation(make_scheduler(max_num_seqs=2))
    simulation.add(sequence(1, 4, priority=LOW), sequence(2, 4, priority=LOW))
    simulation.step()
    simulation.add(sequence(3, 4, priority=HIGH))
    simulation.step()
    assert [seq.sequence_id for seq in simulation.scheduler.running] == [3, 1]


def test_a_sequence_that_room_was_made_for_gets_its_blocks_before_others_grow() -> None:
    """The blocks of the preempted LOW one must not go to the LOW one that stays."""
    for prompt in range(5, 13):
        scheduler = make_scheduler(num_blocks=9, max_num_batched_tokens=64)
        simulation = Simulation(scheduler)
        simulation.add(*(sequence(number, 12, max_tokens=3, priority=LOW) for number in (1, 2)))
        simulation.step()
        simulation.add(sequence(3, prompt, priority=HIGH))
        batch = simulation.step()
        assert 3 in batch.sequence_ids
        simulation.run()


def test_the_last_in_order_is_preempted_lowest_class_first_then_the_newest() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=64)
    simulation = Simulation(scheduler)
    simulation.add(
        sequence(1, 7, max_tokens=9, priority=LOW),
        sequence(2, 7, max_tokens=9, priority=HIGH),
        sequence(3, 7, max_tokens=9, priority=NORMAL),
        sequence(4, 7, max_tokens=9, priority=NORMAL),
    )
    gone = []
    while scheduler.has_unfinished():
        before = {seq.sequence_id: seq.num_preemptions for seq in [*scheduler.running, *scheduler.waiting]}
        simulation.step()
        gone += [seq.sequence_id for seq in scheduler.waiting if seq.num_preemptions > before[seq.sequence_id]]
    assert gone[:2] == [1, 4]


def test_the_last_decoding_sequence_keeps_its_blocks_while_it_waits_for_one_more() -> None:
    """The first answer ends with the token in flight: one step later it frees the block that the second waits for."""
    simulation = Simulation(make_scheduler(num_blocks=4), overlap=True)
    simulation.add(sequence(1, 6, max_tokens=3), sequence(2, 7, max_tokens=6))
    simulation.run()
    assert simulation.scheduler.stats().preemptions_total == 0


# -- admission -------------------------------------------------------------------------------------------------------


def admitted(scheduler_options: dict[str, int], running: list[Sequence], new: Sequence) -> bool:
    """Whether a sequence that arrives one step after others is in the next step."""
    simulation = Simulation(make_scheduler(**scheduler_options))
    if running:
        simulation.add(*running)
        simulation.step()
    simulation.add(new)
    return new.sequence_id in simulation.step().sequence_ids


def test_admission_is_ok_later_or_impossible() -> None:
    options = {"num_blocks": 6, "max_num_seqs": 2, "max_num_batched_tokens": 64}

    def beside_another(new: Sequence) -> bool:
        return admitted(options, [sequence(1, 8, max_tokens=5)], new)

    assert admitted(options, [], sequence(2, 20, max_tokens=5))
    with pytest.raises(PromptTooLongError):
        admitted(options, [], sequence(2, 20, max_tokens=6))
    assert beside_another(sequence(2, 11, max_tokens=9)), "3 blocks, and 1 for the first one's next token"
    assert not beside_another(sequence(2, 12, max_tokens=9)), "no room for its first answer token"
    assert beside_another(sequence(2, 12, max_tokens=1)), "it needs none"
    two = [sequence(1, 8, max_tokens=5), sequence(3, 1, max_tokens=5)]
    assert not admitted(options, two, sequence(4, 1, max_tokens=1)), "no sequence slot"


def test_a_new_sequence_leaves_to_running_prompts_what_they_still_need() -> None:
    options = {"num_blocks": 12, "max_num_batched_tokens": 20}

    def beside_a_low_prompt(length: int, priority: Priority, arrival_time: float = 0.0) -> bool:
        low = sequence(1, 32, max_tokens=4, priority=LOW)
        return admitted(options, [low], sequence(2, length, 2, priority=priority, arrival_time=arrival_time))

    assert beside_a_low_prompt(11, HIGH, 60.0)
    assert not beside_a_low_prompt(12, HIGH, 60.0), "the LOW one is before it in order"
    assert beside_a_low_prompt(12, HIGH), "the LOW one would be preempted"


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
