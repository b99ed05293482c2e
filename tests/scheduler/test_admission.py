"""Which sequences may run now, later or never."""

from __future__ import annotations

import pytest

from mlxpaged.core.scheduling.admission import PromptTooLongError
from mlxpaged.core.scheduling.sequence import Priority, Sequence
from tests.scheduler.simulation import Simulation, make_scheduler, sequence

HIGH, _, LOW = Priority


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


def test_what_could_never_fit_is_refused_at_once_with_size_and_limit() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(sequence(1, 10, max_tokens=7))
    with pytest.raises(PromptTooLongError, match=r"\(5 blocks\).* pool .*\(4 blocks\).*--kv-cache-memory"):
        scheduler.add(sequence(2, 10, max_tokens=8))
    assert scheduler.stats().waiting == 1


def test_what_does_not_fit_now_waits_and_runs_later() -> None:
    simulation = Simulation(make_scheduler(num_blocks=4, max_num_batched_tokens=32))
    simulation.add(sequence(1, 12, max_tokens=3), sequence(2, 12, max_tokens=3))
    simulation.step()
    assert simulation.batches[-1] == [(1, 12)]
    simulation.run()
    assert set(simulation.ended) == {1, 2}
