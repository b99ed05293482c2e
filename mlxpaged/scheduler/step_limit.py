"""How long prompts may make a step."""

from __future__ import annotations

from collections.abc import Iterable

from mlxpaged.scheduler.batch import Batch, StepPlan
from mlxpaged.scheduler.config import DECODE_MULTIPLE, LEAST_STEP_SECONDS
from mlxpaged.scheduler.step_cost import StepCost


class StepLimit:
    """max_seconds: of the scheduler's config. What steps cost is learned from those that ended."""

    def __init__(self, max_seconds: float | None) -> None:
        self._max_seconds = max_seconds
        self._cost = StepCost()

    def observe(self, batch: Batch, seconds: float) -> None:
        """The device took `seconds` for these rows, and for nothing else."""
        contexts = [row.context_len for row in batch.rows if row.num_tokens == 1]
        chunks = [(row.start, row.num_tokens) for row in batch.rows if row.num_tokens > 1]
        self._cost.observe(contexts, chunks, seconds)

    def apply(self, plan: StepPlan, decoding: Iterable[int]) -> None:
        """Limit the chunks of prompts that the step may take on beside its rows. decoding: the contexts of all that
        decode, who wait for the step where it has no rows of theirs."""
        limit = self._max_seconds
        contexts = [row.context_len for row in plan.rows]
        waited_for = contexts or list(decoding)
        costs = None if limit == 0 or not (waited_for or limit) else self._cost.costs()
        if costs is None:
            return
        if limit is None:
            limit = max(DECODE_MULTIPLE * costs.decode_seconds(waited_for), LEAST_STEP_SECONDS)
        plan.limit(costs, limit - costs.decode_seconds(contexts))
