"""The size of the next step follows the memory that is free now."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxpaged.core.scheduling.row_tiles import LEAST_CHUNK
from mlxpaged.parts.memory import headroom
from mlxpaged.parts.memory.headroom import GIVE_BACK_SECONDS, LOOK_SECONDS, OVERRUN, Headroom, hold_to
from mlxpaged.process_memory import MARGIN

TOKENS, PER_TOKEN, PER_KEY = 1000, 10_000, 100


class Machine:
    """free: bytes of the system. left: of the address space."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.left, self.kept, self.now = 10**12, None, 0, 0.0
        self.trims: list[float] = []
        monkeypatch.setattr(headroom.sys, "platform", "linux")
        monkeypatch.setattr(headroom, "system_free_memory", lambda _: self.free)
        monkeypatch.setattr(headroom, "address_space_left", lambda: self.left)
        self.waits: list[int | None] = []
        monkeypatch.setattr(headroom, "can_allocate", lambda nbytes: nbytes <= self.kept)
        monkeypatch.setattr(headroom, "hold_to", self.waits.append)
        monkeypatch.setattr(headroom.mx, "clear_cache", lambda: None)
        monkeypatch.setattr(headroom, "return_freed_memory", lambda: self.trims.append(self.now))
        self.headroom = Headroom(TOKENS * PER_TOKEN, TOKENS, lambda: self.now, PER_KEY)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_with_enough_memory_a_step_has_all_tokens(machine: Machine) -> None:
    assert machine.headroom.tokens(lambda: 0) == TOKENS
    machine.headroom.require(TOKENS)
    assert not machine.trims


def test_a_limit_on_the_address_space_holds_at_once(machine: Machine) -> None:
    machine.headroom.tokens(lambda: 0)
    machine.left = MARGIN + 100 * PER_TOKEN
    assert machine.headroom.tokens(lambda: 0) == 100
    machine.headroom.require(100)
    with pytest.raises(MemoryError, match=r"a step of 101 tokens may take 1\.0 MB, but only 1\.0 MB are free"):
        machine.headroom.require(101)
    assert len(machine.trims) == 1, "freed memory is given back, but not in every step"
    machine.now += GIVE_BACK_SECONDS
    machine.headroom.tokens(lambda: 0)
    assert len(machine.trims) == 2


def test_freed_memory_that_is_still_mapped_counts(machine: Machine) -> None:
    machine.left, machine.kept = MARGIN, 260 * PER_TOKEN
    assert machine.headroom.tokens(lambda: 0) == 250


def test_a_long_context_takes_memory_too(machine: Machine) -> None:
    machine.left = MARGIN + 100 * PER_TOKEN
    assert machine.headroom.tokens(lambda: 1000) == 90
    machine.headroom.require(90, lambda: 1000)
    with pytest.raises(MemoryError, match=r"a step of 90 tokens may take 1\.1 MB"):
        machine.headroom.require(90, lambda: 2000)


def test_while_memory_is_short_mlx_waits_before_it_allocates_more_than_estimated(machine: Machine) -> None:
    machine.left = MARGIN + 100 * PER_TOKEN
    machine.headroom.require(machine.headroom.tokens(lambda: 0))
    machine.left = None
    machine.headroom.require(machine.headroom.tokens(lambda: 0))
    assert machine.waits == [100 * PER_TOKEN, None]


@pytest.mark.parametrize(("times", "waits"), [(OVERRUN - 0.1, [TOKENS * PER_TOKEN]), (OVERRUN, [None])])
def test_mlx_is_held_to_the_estimate_unless_a_step_fits_several_times(
    machine: Machine, times: float, waits: list[int | None]
) -> None:
    machine.free = int(MARGIN + times * TOKENS * PER_TOKEN)
    machine.headroom.require(machine.headroom.tokens(lambda: 0))
    assert machine.waits == waits


def test_while_mlx_is_held_it_keeps_no_freed_buffers() -> None:
    hold_to(None)  # an engine of another test may have been held when it ended
    usual, limit = mx.set_cache_limit(10**9), mx.set_memory_limit(10**12)
    try:
        hold_to(10**6)
        hold_to(10**7)
        assert mx.set_cache_limit(0) == 0
        hold_to(None)
        hold_to(None)
        assert (mx.set_cache_limit(usual), mx.set_memory_limit(limit)) == (10**9, 10**12)
    finally:
        mx.set_cache_limit(usual)
        mx.set_memory_limit(limit)


def test_before_a_step_with_prompts_the_systems_memory_is_always_looked_at(machine: Machine) -> None:
    assert machine.headroom.tokens(lambda: 0) == TOKENS
    machine.free = MARGIN
    machine.headroom.require(LEAST_CHUNK)
    with pytest.raises(MemoryError):
        machine.headroom.require(LEAST_CHUNK + 1)


def test_the_systems_memory_is_looked_at_a_few_times_a_second(machine: Machine) -> None:
    machine.headroom.tokens(lambda: 0)
    machine.free = MARGIN + 64 * PER_TOKEN
    assert machine.headroom.tokens(lambda: 0) == TOKENS
    machine.now += LOOK_SECONDS
    assert machine.headroom.tokens(lambda: 0) == 64
    machine.free = MARGIN + 32 * PER_TOKEN
    assert machine.headroom.tokens(lambda: 0) == 32, "in every step while it is short"
    machine.kept = 10**9
    assert machine.headroom.tokens(lambda: 0) == 32, "what is mapped may have no pages"
    machine.free = 10**12
    assert machine.headroom.tokens(lambda: 0) == TOKENS


def test_a_step_has_at_least_a_small_chunk_and_is_then_refused(machine: Machine) -> None:
    machine.left = 0
    assert machine.headroom.tokens(lambda: 0) == LEAST_CHUNK
    with pytest.raises(MemoryError):
        machine.headroom.require(1)


def test_after_a_failure_steps_are_smaller_until_they_succeed(machine: Machine) -> None:
    machine.headroom.note_failure(400)
    assert machine.trims == [0.0]
    assert machine.headroom.tokens(lambda: 0) == 200
    machine.headroom.note_failure(200)
    assert machine.headroom.tokens(lambda: 0) == 100
    for expected in (200, 400, 800, 1000, 1000):
        machine.headroom.note_success()
        assert machine.headroom.tokens(lambda: 0) == expected
