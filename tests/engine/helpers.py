"""What tests of engines share: one of few blocks, steps that fail, texts to the end, and what a store notes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.core.engine.part import Part
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.journal import suspects_in
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import ServedModel
from mlxpaged.parts.disk.disk_journal import FILE
from mlxpaged.parts.disk.disk_tier import DiskTier
from tests.support import poison_new_blocks


def make_core(served: ServedModel, blocks: int = 100, swap_blocks: int = 0, **options: Any) -> EngineCore:
    """Blocks are poisoned whenever they are handed out. Steps are not limited by time, so they are the same on any
    machine."""
    block = 32 * bytes_per_token(served.layers)
    memory = {"kv_cache_bytes": blocks * block or None, "swap_space_bytes": swap_blocks * block}
    core = build_engine(EngineConfig(**memory, max_step_ms=0, **options), served)
    poison_new_blocks(core)
    return core


def let_steps_fail(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, every tenth step of several rows fails on the device, by chance. No request is hit twice without a
    token in between: that would end it."""
    rng, read = random.Random(1), InFlightStep.read

    def sometimes_failing(step: InFlightStep) -> Any:
        hit_before = any(each.num_step_failures for each in core.scheduler.sequences.values())
        if len(step.scheduled.rows) > 1 and not hit_before and rng.random() < 0.1:
            raise DeviceError("injected")
        return read(step)

    monkeypatch.setattr(InFlightStep, "read", sometimes_failing)


def finish(core: EngineCore) -> tuple[dict[str, str], dict[str, FinishReason | None]]:
    """Step until nothing is left. Returns texts and finish reasons, by request."""
    texts: dict[str, str] = {}
    reasons: dict[str, FinishReason | None] = {}
    while core.has_work():
        for output in core.step():
            assert output.error is None, output.error
            texts[output.request_id] = texts.get(output.request_id, "") + output.text
            reasons[output.request_id] = output.finish_reason
    assert core.scheduler.pool.usage().used == 0
    return texts, reasons


def lines_run(function: Callable[[], object]) -> int:
    """How many lines of Python a call runs, with those of all that it calls. It is the same on any machine."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def being_read(core: EngineCore) -> set[str]:
    """The blocks that the store notes as being read, after all that it was told before."""
    tier = core.part(DiskTier)
    if tier is None:
        return set()
    store = tier.share.store
    store.clear("another model").result()
    return set(suspects_in((store.directory / FILE).read_bytes()))


P = TypeVar("P", bound=Part)


def part_of(core: EngineCore, kind: type[P]) -> P:
    """The part of this type, which the engine has."""
    part = core.part(kind)
    assert part is not None
    return part
