"""No client keeps all blocks or all sequence slots from another one. Waits are counted in steps."""

from __future__ import annotations

import pytest

from mlxpaged.core.scheduling.preemption import Preemption
from mlxpaged.core.scheduling.scheduler import STARVATION_BOUND
from mlxpaged.core.scheduling.sequence import Priority, Sequence, SequenceStatus
from mlxpaged.core.scheduling.shut_out import SHUT_OUT_BOUND
from tests.scheduler.simulation import FakeClock, Simulation, make_scheduler, sequence, undisturbed

STEP_SECONDS = 0.02
NEW = 500


def flooded(num_long: int, prompt: int, answer: int, steps: int = 30, **options: object) -> Simulation:
    """One client's long requests fill a pool of 64 blocks of 4 tokens, and many of them wait."""
    clock = FakeClock()
    options = {"max_num_seqs": 24, "max_num_batched_tokens": 64, **options}
    simulation = Simulation(make_scheduler(clock=clock, **options))
    simulation.add(*(sequence(i, prompt, answer, client="flood") for i in range(1, num_long + 1)))
    run(simulation, steps)
    return simulation


def run(simulation: Simulation, steps: int) -> None:
    clock = simulation.scheduler.clock
    assert isinstance(clock, FakeClock)
    for _ in range(steps):
        clock.now += STEP_SECONDS
        if simulation.has_work:
            simulation.step()


def preemption_of(simulation: Simulation) -> Preemption:
    scheduler = simulation.scheduler
    return Preemption(scheduler.blocks, scheduler.running, scheduler.waiting, scheduler.clock)


def steps_until_first_token(simulation: Simulation, new: Sequence, most: int) -> int:
    for count in range(most + 1):
        if new.num_output_tokens:
            return count
        run(simulation, 1)
    raise AssertionError(f"no token after {most} steps")


def new_request(simulation: Simulation, number: int = NEW, prompt: int = 8, client: str = "other") -> Sequence:
    new = sequence(number, prompt, client=client, arrival_time=simulation.scheduler.clock())
    simulation.add(new)
    return new


@pytest.mark.parametrize(("num_long", "prompt", "answer"), [(16, 16, 200), (16, 40, 200), (8, 60, 180), (64, 30, 200)])
@pytest.mark.parametrize("growth_steps", [0, 3])
def test_a_short_request_waits_few_steps_for_a_pool_that_another_client_has_filled(
    num_long: int, prompt: int, answer: int, growth_steps: int
) -> None:
    """Behind as many waiting requests of the other client as there are. By their order alone it would wait for most of
    them, hundreds of steps."""
    simulation = flooded(num_long, prompt, answer)
    simulation.growth_steps = growth_steps
    new = new_request(simulation)
    assert steps_until_first_token(simulation, new, SHUT_OUT_BOUND + 3) <= SHUT_OUT_BOUND + 3
    assert [seq for seq in simulation.unfinished if seq.client == "flood"], "the flood is not over"


def test_a_client_that_has_all_slots_leaves_one_to_another() -> None:
    simulation = flooded(8, 8, 100, max_num_seqs=4)
    assert len(simulation.scheduler.running) == 4
    new = new_request(simulation)
    assert steps_until_first_token(simulation, new, SHUT_OUT_BOUND + 2) > SHUT_OUT_BOUND, "slots may become free first"


def test_no_client_goes_before_sequences_of_a_failed_step_that_run_again() -> None:
    """It would be done, and its next request might fail beside them: their second failure would end them."""
    simulation = flooded(8, 8, 100, max_num_seqs=4)
    new = new_request(simulation)
    failed = next(seq for seq in simulation.unfinished if seq.status is SequenceStatus.WAITING and seq is not new)
    failed.num_step_failures = 1
    run(simulation, SHUT_OUT_BOUND + 3)
    assert new.steps_shut_out == new.num_output_tokens == 0
    failed.num_step_failures = 0
    assert steps_until_first_token(simulation, new, SHUT_OUT_BOUND + 2) > SHUT_OUT_BOUND


def test_several_clients_that_come_together_are_let_in_one_after_the_other() -> None:
    simulation = flooded(32, 16, 200)
    new = [new_request(simulation, NEW + i, client=f"other {i}") for i in range(3)]
    run(simulation, SHUT_OUT_BOUND + 5)
    assert all(each.num_output_tokens for each in new)


def test_the_answers_are_those_of_each_request_alone_and_every_one_ends() -> None:
    simulation = flooded(12, 20, 60)
    numbers = range(NEW, NEW + 20)
    for number in numbers:
        new_request(simulation, number)
        run(simulation, 10)
    simulation.run(20_000)
    assert not simulation.unfinished
    for each in simulation.added:
        prompt = each.token_ids[: each.num_prompt_tokens]
        assert each.token_ids[each.num_prompt_tokens :] == undisturbed(prompt, each.sequence_id, each.max_tokens)


def test_the_only_sequence_of_a_client_is_not_preempted_for_one_that_has_several() -> None:
    """Neither for a waiting request of the other client nor for the growth of a running one."""
    simulation = flooded(16, 16, 200)
    new = new_request(simulation)
    new.max_tokens = 40
    steps_until_first_token(simulation, new, SHUT_OUT_BOUND + 3)
    while new.status is not SequenceStatus.FINISHED:
        run(simulation, 1)
        assert new.num_preemptions == 0


def test_each_client_keeps_its_first_running_request() -> None:
    """However often another client asks."""
    simulation = flooded(8, 40, 150)
    for number in range(NEW, NEW + 40):
        new = new_request(simulation, number)
        for _ in range(5):
            candidates = preemption_of(simulation).candidates_of_others(new)
            firsts = {seq.client: seq for seq in reversed(simulation.scheduler.running)}
            assert not set(candidates) & set(firsts.values())
            run(simulation, 1)


def test_a_request_of_a_lower_class_preempts_none_of_a_higher_one() -> None:
    simulation = flooded(16, 16, 200)
    low, normal = (
        sequence(NEW + i, 8, client="batch", priority=priority, arrival_time=simulation.scheduler.clock())
        for i, priority in enumerate((Priority.LOW, Priority.NORMAL))
    )
    candidates = preemption_of(simulation).candidates_of_others
    assert candidates(low) == []
    assert candidates(normal) != []
    for each in simulation.added:
        each.priority = Priority.HIGH
    assert candidates(normal) == []


def test_while_a_higher_class_waits_no_client_is_shut_out() -> None:
    """So a batch takes no free blocks from the requests before it."""
    simulation = flooded(16, 16, 200)
    low = sequence(NEW, 8, client="batch", priority=Priority.LOW, arrival_time=simulation.scheduler.clock())
    simulation.add(low)
    run(simulation, SHUT_OUT_BOUND + 4)
    assert low.steps_shut_out == 0


def test_a_client_with_one_request_that_has_the_whole_pool_is_preempted_at_the_starvation_bound() -> None:
    """Not before: its work would be lost again and again. But it is next when that one ends."""
    simulation = flooded(8, 150, 100, steps=10)
    assert len(simulation.scheduler.running) == 1
    new = new_request(simulation, prompt=120)
    assert steps_until_first_token(simulation, new, STARVATION_BOUND + 3) > SHUT_OUT_BOUND + 3


def test_a_client_is_next_when_the_only_request_of_another_one_ends() -> None:
    """Of which many wait, and have reached the starvation bound before."""
    simulation = flooded(8, 150, 100, steps=STARVATION_BOUND + 5)
    [running] = simulation.scheduler.running
    assert running.admitted_by_starvation_bound
    new = new_request(simulation, prompt=120)
    while running.status is not SequenceStatus.FINISHED:
        run(simulation, 1)
        assert new.num_output_tokens == 0
    steps_until_first_token(simulation, new, 4)


def test_requests_of_one_client_keep_their_order() -> None:
    simulation = flooded(16, 40, 200)
    new = new_request(simulation, client="flood")
    run(simulation, 20)
    assert new.num_output_tokens == 0
    assert new.steps_shut_out == 0
