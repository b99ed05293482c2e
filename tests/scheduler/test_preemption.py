"""Which running sequences are preempted, for which sequence, and in which order."""

from __future__ import annotations

import pytest

from mlxpaged.core.scheduling.sequence import Priority
from tests.scheduler.simulation import Simulation, make_scheduler, sequence

HIGH, NORMAL, LOW = Priority


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
