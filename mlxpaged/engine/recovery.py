"""Recovers from failed steps: finds the request that the host cannot run, or rebuilds KV pools that the device lost."""

from __future__ import annotations

import logging
from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING

from mlxpaged.engine.step import HostError
from mlxpaged.process_memory import is_out_of_memory
from mlxpaged.scheduler import Batch, FinishReason, ScheduledSequence, Sequence, SequenceStatus

if TYPE_CHECKING:
    from mlxpaged.engine.core import EngineCore
    from mlxpaged.engine.model_runner import DeviceError

logger = logging.getLogger(__name__)

MAX_STEP_FAILURES = 2
"""A request ends after this many failures of its steps, of those that cannot be repeated, without a sampled token in
between."""


def run_rows(core: EngineCore, rows: ListOf[ScheduledSequence], before: HostError | None = None) -> None:
    """Run those rows to their end whose sequences still run. before: the failure of the step that they repeat."""
    running = running_rows(core, rows)
    if running:
        try:
            core.normal_step(Batch(running))
        except HostError as error:
            recover(core, running, error, before)


def recover(
    core: EngineCore, rows: ListOf[ScheduledSequence], error: HostError, before: HostError | None = None
) -> None:
    """Recover from a step of these rows that the host could not run. If memory was short, a request that fails alone is
    recomputed in smaller steps before it is ended. before: as for `run_rows`."""
    is_short = is_out_of_memory(error)
    if is_short:
        core.run_short(Batch(tuple(rows)))
    log_failure(rows, error, before)
    (recompute if core.runner.is_recurrent or (is_short and len(rows) == 1) else isolate)(core, rows, error)


def isolate(core: EngineCore, rows: ListOf[ScheduledSequence], error: HostError) -> None:
    """Repeat a failed step in halves until the request that makes it fail is alone, and end that request.

    Writing the same keys and values twice changes nothing, so the other requests lose only time.
    """
    cause = error.__cause__
    for row in rows:
        core.sampler.forget(row.sequence.sequence_id)  # the token counts may contain a token of the failed step
    if len(rows) > 1:
        half = len(rows) // 2
        run_rows(core, rows[:half], error)
        run_rows(core, rows[half:], error)
    else:
        for row in running_rows(core, rows):
            core.fail(row.sequence, f"the step failed: {type(cause).__name__}: {cause}")


def recompute(core: EngineCore, rows: ListOf[ScheduledSequence], error: HostError) -> None:
    """Recompute the sequences of a failed step one at a time, because the step may have changed their recurrent states:
    it cannot be repeated. A sequence whose step fails again is ended."""
    cause = error.__cause__
    clear_cache_of_ended(core, rows)
    for row in rows:
        core.sampler.forget(row.sequence.sequence_id)
        core.scheduler.recompute(row.sequence)
    core.scheduler.update(Batch(tuple(rows)), {})
    blame(core, [row.sequence for row in rows], f"the step failed: {type(cause).__name__}: {cause}", error)


def log_failure(rows: ListOf[ScheduledSequence], error: HostError, before: HostError | None) -> None:
    """The stack says nothing of why an allocation failed, and nothing new if the repeated step fails as before: a
    request that fails in a step of 128 would have its stack in the log eight times."""
    cause = error.__cause__
    labels = ", ".join(row.sequence.label for row in rows)
    is_known = before is not None and repr(before.__cause__) == repr(cause)
    if is_known or is_out_of_memory(error):
        logger.error("a step of %s failed: %s: %s", labels, type(cause).__name__, cause)
    else:
        logger.error("a step of %s failed", labels, exc_info=cause)


def blame(core: EngineCore, sequences: ListOf[Sequence], message: str, error: Exception) -> None:
    """Count a failure of a step for its sequences. Those that have failed before end with an error; the others are
    admitted again one at a time."""
    for sequence in sequences:
        sequence.num_step_failures += 1
        if sequence.num_step_failures >= MAX_STEP_FAILURES and sequence.finish_reason is None:
            core.fail(sequence, message, FinishReason.MEMORY if is_out_of_memory(error) else FinishReason.ERROR)


def running_rows(core: EngineCore, rows: ListOf[ScheduledSequence]) -> tuple[ScheduledSequence, ...]:
    """The rows whose sequences still run. Preempted sequences lose their pending tokens here."""
    clear_cache_of_ended(core, rows)
    running = tuple(row for row in rows if row.sequence.status is SequenceStatus.RUNNING)
    core.scheduler.update(Batch(tuple(row for row in rows if row not in running)), {})
    return running


def clear_cache_of_ended(core: EngineCore, rows: ListOf[ScheduledSequence]) -> None:
    """Empty the prefix cache if a sequence of a failed step has ended: the last token of its answer may have published
    a block that is not computed."""
    if any(row.sequence.status is SequenceStatus.FINISHED for row in rows):
        core.clear_cache()


def rebuild_pools(core: EngineCore, batches: ListOf[Batch], error: DeviceError) -> None:
    """Replace the KV pools after a device error, and recompute the running sequences from their known tokens.

    MLX reports a failed command buffer late and at another call (mlx PR 3523), so the failure cannot be attributed to
    a row. batches: those in flight, the oldest first; none if it failed between two steps. The sequences of the oldest
    one are admitted again one at a time, each after the previous one has sampled a token. If the device fails again,
    the sequence that runs then is ended.
    """
    logger.error("a step failed on the device; KV pools are rebuilt, running sequences are recomputed: %s", error)
    if is_out_of_memory(error):
        core.run_short(Batch(tuple(row for batch in batches for row in batch.rows)))
    core.runner.rebuild_pools()
    core.runner.wire_memory()
    core.sampler.reset()
    core.scheduler.reset_cache()
    for batch in batches:
        core.scheduler.undo_moves(batch)
        core.scheduler.update(batch, {})  # no token of it will be read
    message = f"the step failed on the device {MAX_STEP_FAILURES} times: {error}"
    blame(core, [row.sequence for batch in batches[:1] for row in batch.rows], message, error)
