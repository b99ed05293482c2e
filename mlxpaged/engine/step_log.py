"""Writes the debug log's line for each step, and records steps in the timelines of their requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mlxpaged.engine.running_request import RunningRequest
from mlxpaged.engine.timeline import TimelineRecorder
from mlxpaged.scheduler.batch import Batch
from mlxpaged.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class StepLog:
    """The core calls `start_step` when it has scheduled a step, and `write` after it."""

    def __init__(self) -> None:
        self.batch = Batch(())  # of the step that started last
        self._timelines: set[TimelineRecorder] = set()  # of sequences that were in an earlier step and may still run

    def start_step(self, batch: Batch, requests: Mapping[int, RunningRequest], now: float) -> None:
        """Note which sequences run in the step, and which were preempted since the last one."""
        self.batch = batch
        self._timelines = {timeline for timeline in self._timelines if not timeline.check_preempted(now)}
        for row in batch.rows:
            timeline = requests[row.sequence.sequence_id].timeline
            if timeline is not None:
                self._timelines.add(timeline)
                timeline.schedule(row, now)

    def write(self, number: int, seconds: float, scheduler: Scheduler) -> None:
        """Write the line of the step that started last to the debug log."""
        batch = self.batch
        if not batch.rows or not logger.isEnabledFor(logging.DEBUG):
            return
        stats = scheduler.stats()
        blocks = stats.blocks
        decodes = sum(row.num_tokens == 1 and row.start >= row.sequence.num_prompt_tokens for row in batch.rows)
        logger.debug(
            f"step {number}: rows={len(batch)} decode_rows={decodes} prompt_tokens={batch.num_tokens - decodes} "
            f"tokens={batch.num_tokens} running={stats.running} waiting={stats.waiting} "
            f"blocks_used={blocks.used} blocks_cached={blocks.cached} blocks_free={blocks.free} seconds={seconds:.6f}"
        )
