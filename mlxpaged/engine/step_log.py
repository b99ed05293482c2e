"""The debug log's line for each step, and the timelines of the requests in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mlxpaged.engine.running_request import RunningRequest
from mlxpaged.engine.timeline import TimelineRecorder
from mlxpaged.scheduler import Batch, SchedulerStats

logger = logging.getLogger(__name__)


class StepLog:
    """Hears of every step that starts and every sequence that ends."""

    def __init__(self) -> None:
        self._batch = Batch(())
        self._timelines: dict[int, TimelineRecorder] = {}  # of sequences in the batch

    def start_step(self, batch: Batch, requests: Mapping[int, RunningRequest], now: float) -> None:
        """Note which sequences run in the step, and which were preempted since the last one."""
        self._batch = batch
        for sequence_id in [i for i, timeline in self._timelines.items() if timeline.check_preempted(now)]:
            del self._timelines[sequence_id]
        for row in batch.rows:
            sequence_id = row.sequence.sequence_id
            timeline = requests[sequence_id].timeline
            if timeline is not None:
                self._timelines[sequence_id] = timeline
                timeline.schedule(row, now)

    def forget(self, sequence_id: int) -> None:
        self._timelines.pop(sequence_id, None)

    def wants_line(self) -> bool:
        """Whether the step that started last goes to the debug log."""
        return bool(self._batch.rows) and logger.isEnabledFor(logging.DEBUG)

    def write(self, number: int, seconds: float, stats: SchedulerStats) -> None:
        """Write the line of the step that started last."""
        batch = self._batch
        decodes = sum(row.num_tokens == 1 and row.start >= row.sequence.num_prompt_tokens for row in batch.rows)
        logger.debug(
            "step %d: rows=%d decode_rows=%d prompt_tokens=%d tokens=%d running=%d waiting=%d "
            "blocks_used=%d blocks_cached=%d blocks_free=%d seconds=%.6f",
            number,
            len(batch),
            decodes,
            batch.num_tokens - decodes,
            batch.num_tokens,
            stats.running,
            stats.waiting,
            stats.blocks.used,
            stats.blocks.cached,
            stats.blocks.free,
            seconds,
        )
