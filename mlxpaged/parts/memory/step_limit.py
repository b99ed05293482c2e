"""Keeps steps within the memory that is free when they run, and shorter than those that took the device too long."""

from __future__ import annotations

import logging
import math

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.part import Need, Part, Tokens
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.scheduling.row_tiles import LEAST_CHUNK
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.step import Step
from mlxpaged.parts.memory.headroom import Headroom

logger = logging.getLogger(__name__)

STEPS_IN_TIME = 1000
"""After so many steps in time, steps may have twice as many tokens again: another program may have used the GPU. Each
further timeout costs the KV pools."""


class StepLimit(Part):
    """The last part: what others do before a step takes memory too."""

    def __init__(self, scheduler: Scheduler, requests: RequestTable, headroom: Headroom) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self.headroom = headroom
        self._longest = math.inf  # tokens of a step that the device computes in time
        self._num_in_time = 0

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        self._scheduler.limit_tokens(int(min(self._longest, self.headroom.tokens(self._requests.longest))))
        return Need.NOTHING

    def launching(self, step: Step) -> None:
        self.headroom.require(step.num_tokens, lambda: max(step.context_lens))

    def committed(self, step: InFlightStep, tokens: Tokens) -> None:
        self.headroom.note_success()
        self._num_in_time += 1
        if self._num_in_time >= STEPS_IN_TIME and self._longest < math.inf:
            longer = 2 * self._longest
            self._longest = longer if longer < self._scheduler.config.max_num_batched_tokens else math.inf
            self._num_in_time = 0

    def ran_long(self, tokens: int) -> bool:
        if tokens <= LEAST_CHUNK:
            return False
        self._longest, self._num_in_time = max(LEAST_CHUNK, min(self._longest, tokens) // 2), 0
        logger.warning("a step of %d tokens took the device too long: steps have at most %d", tokens, self._longest)
        return True

    def ran_short(self, step: Step) -> None:
        self.headroom.note_failure(step.num_tokens)
