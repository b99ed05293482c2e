"""Makes steps smaller after one for which memory was short, or that took the device too long."""

from __future__ import annotations

import logging

import mlx.core as mx

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.part import Need, Part, Tokens
from mlxpaged.core.scheduling.row_tiles import LEAST_CHUNK
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.step import Step

logger = logging.getLogger(__name__)

STEPS_IN_TIME = 1000
"""After so many steps in time, steps may have twice as many tokens again: another program may have used the GPU. Each
further timeout costs the KV pools."""


class StepLimit(Part):
    """After an allocation that failed, steps have half the tokens, and twice as many after each step that succeeds.
    They have LEAST_CHUNK or more, because fewer take little less memory or time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._most = scheduler.config.max_num_batched_tokens
        self._fitting = self._most  # tokens of a step that memory is expected to suffice for
        self._longest = self._most  # tokens of a step that the device computes in time
        self._num_in_time = 0

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        self._scheduler.limit_tokens(min(self._longest, self._fitting))
        return Need.NOTHING

    def committed(self, step: InFlightStep, tokens: Tokens) -> None:
        self._fitting = min(self._most, 2 * self._fitting)
        self._num_in_time += 1
        if self._num_in_time >= STEPS_IN_TIME:
            self._longest, self._num_in_time = min(self._most, 2 * self._longest), 0

    def ran_long(self, tokens: int) -> bool:
        if tokens <= LEAST_CHUNK:
            return False
        self._longest, self._num_in_time = max(LEAST_CHUNK, min(self._longest, tokens) // 2), 0
        logger.warning("a step of %d tokens took the device too long: steps have at most %d", tokens, self._longest)
        return True

    def ran_short(self, step: Step) -> None:
        self._fitting = max(LEAST_CHUNK, step.num_tokens // 2)
        logger.warning("memory is short: the next step has at most %d tokens", self._fitting)
        mx.clear_cache()
