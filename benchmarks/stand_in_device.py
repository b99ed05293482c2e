"""A stand-in for a GPU: what is launched takes a set time on a queue of its own, while the host goes on.

MLX still computes the numbers. Only the time at which the host may read them is simulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import mlx.core as mx

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep, StepResult
from mlxpaged.core.engine.model_runner import ModelRunner


@contextlib.contextmanager
def stand_in_device(
    core: EngineCore, forward_seconds: float, sampler_seconds: float, wait_until: Callable[[float], None]
) -> Iterator[None]:
    """Let the steps of `core` overlap, on a device that takes so long for a forward pass and for its sampler.

    wait_until: returns when the engine's clock has reached a time.
    """
    free_at = 0.0
    ready_at: dict[int, float] = {}  # of steps, by the id of their first result
    start_step, read = core.runner.start_step, InFlightStep.read

    def launch(*results: mx.array) -> None:
        nonlocal free_at
        start_step(*results)
        step, *others = results
        free_at = max(free_at, core.clock())
        if id(step) not in ready_at:
            free_at += forward_seconds
        if others and others[0].ndim == 1:  # tokens, and not logits: the sampler is launched with it or later
            free_at += sampler_seconds
        ready_at[id(step)] = free_at

    def wait_and_read(step: InFlightStep) -> StepResult:
        wait_until(ready_at.pop(id(step.results[0])))
        return read(step)

    with (
        mock.patch.object(ModelRunner, "overlaps", True),
        mock.patch.object(core.runner, "start_step", launch),
        mock.patch.object(InFlightStep, "read", wait_and_read),
    ):
        yield
