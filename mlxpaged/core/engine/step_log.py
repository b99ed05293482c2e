"""Writes the debug log's line for each step, and records steps in the timelines of their requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.engine.timeline import TimelineRecorder
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.step import Step

logger = logging.getLogger(__name__)


class StepLog:
    """The core calls `start_step` when it has scheduled a step, and `write` after it."""

    def __init__(self) -> None:
        self.scheduled = Step(())  # of the step that started last
        self._num_decodes = 0  # rows of it, known if the debug log is on
        self._timelines: set[TimelineRecorder] = set()  # of sequences that were in an earlier step and may still run

    def start_step(self, step: Step, requests: Mapping[int, RunningRequest], now: float) -> None:
        """Note which sequences run in the step, and which were preempted since the last one."""
        self.scheduled = step
        self._timelines = {timeline for timeline in self._timelines if not timeline.check_preempted(now)}
        for row in step.rows:
            timeline = requests[row.sequence_id].timeline
            if timeline is not None:
                self._timelines.add(timeline)
                timeline.schedule(row, now)
        if logger.isEnabledFor(logging.DEBUG):
            starts = ((row, requests[row.sequence_id].sequence.num_prompt_tokens) for row in step.rows)
            self._num_decodes = sum(row.decodes and row.start >= num_prompt_tokens for row, num_prompt_tokens in starts)

    def write(self, number: int, seconds: float, scheduler: Scheduler) -> None:
        """Write the line of the step that started last to the debug log."""
        step = self.scheduled
        if not step.rows or not logger.isEnabledFor(logging.DEBUG):
            return
        stats = scheduler.stats()
        blocks = stats.blocks
        decodes = self._num_decodes
        logger.debug(
            f"step {number}: rows={len(step)} decode_rows={decodes} prompt_tokens={step.num_tokens - decodes} "
            f"tokens={step.num_tokens} running={stats.running} waiting={stats.waiting} "
            f"blocks_used={blocks.used} blocks_cached={blocks.cached} blocks_free={blocks.free} seconds={seconds:.6f}"
        )
