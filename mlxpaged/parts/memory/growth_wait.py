"""Ends requests for which the KV pool is too small while it cannot grow: nothing that ends would make room for them."""

from __future__ import annotations

import math
from collections.abc import Callable

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.part import Need, Part
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.parts.memory.memory_watch import POLL_SECONDS

GROWTH_SECONDS = 30.0
"""Such a request ends after so many seconds. That is longer than pool_resizer.MAX_RETRY_SECONDS, so a growth is tried
for it at least once."""


class GrowthWait(Part):
    """Belongs to the engine thread. clock: seconds."""

    def __init__(self, scheduler: Scheduler, requests: RequestTable, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._clock = clock
        self._since: dict[int, float] = {}  # by sequence: when it was found to be too large
        self._checked_at = -math.inf

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        """End the requests that have waited for GROWTH_SECONDS."""
        self._end_overdue()
        return Need.NOTHING

    def _end_overdue(self) -> None:
        size, now = self._scheduler.blocks.size, self._clock()
        if (size.may_grow and not self._since) or now < self._checked_at + POLL_SECONDS:
            return
        self._checked_at, too_large = now, self._scheduler.too_large_for_pool()
        self._since = {sequence_id: self._since.get(sequence_id, now) for sequence_id in too_large}
        if size.may_grow:
            return  # the pool grows, or fails to, before the next step
        for sequence_id, since in list(self._since.items()):
            if now >= since + GROWTH_SECONDS:
                message = (
                    f"the request has waited {GROWTH_SECONDS:g} s for a larger KV pool: memory is short, and it stays "
                    f"at {size.num_blocks} blocks"
                )
                self._requests.outputs.append(self._requests.end(sequence_id, FinishReason.MEMORY, message))
