"""Recovers from failed steps: finds the request that the host cannot run, or rebuilds KV pools that the device lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from collections.abc import Sequence as ListOf

from mlxpaged.core.engine.in_flight import HostError
from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.engine.part import Part
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.engine.sampler import Sampler
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import FinishReason, Sequence, SequenceStatus, label
from mlxpaged.core.step import PENDING, Row, Step
from mlxpaged.library_errors import public_reason
from mlxpaged.process_memory import is_out_of_memory

logger = logging.getLogger(__name__)

MAX_STEP_FAILURES = 2
"""A request ends after this many failures of its steps, of those that cannot be repeated, without a sampled token in
between."""


class Recovery:
    """run: runs a step to its end, while no other step is in flight; it may raise HostError and DeviceError."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        requests: RequestTable,
        parts: ListOf[Part],
        run: Callable[[Step], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._requests = requests
        self._parts = parts
        self._run = run

    def run_rows(self, rows: ListOf[Row], before: HostError | None = None) -> None:
        """Run those rows to their end whose sequences still run. before: the failure of the step that they repeat."""
        running = self._running_rows(rows)
        if running:
            try:
                self._run(Step(running))
            except HostError as error:
                self.recover(running, error, before)

    def recover(self, rows: ListOf[Row], error: HostError, before: HostError | None = None) -> None:
        """Recover from a step of these rows that the host could not run. If memory was short, a request that fails
        alone is recomputed in smaller steps before it is ended. before: as for `run_rows`."""
        is_short = is_out_of_memory(error)
        if is_short:
            self.run_short(Step(rows))
        log_failure(rows, error, before)
        if self._runner.is_recurrent or (is_short and len(rows) == 1):
            self._recompute(rows, error)
        else:
            self._isolate(rows, error)

    def fail_invalid(self, rows: ListOf[Row], invalid: Set[int]) -> set[int]:
        """End the requests whose logits are not finite. rows: of their step. Returns the sequences that are computed
        again, because they shared blocks with them: what this step computed of them is not valid."""
        discarded: set[int] = set()
        for sequence_id in invalid & self._requests.by_sequence.keys():
            failed = self._requests.by_sequence[sequence_id].sequence
            for sequence in self._requests.fail(failed, "the model's logits are not finite"):
                discarded.add(sequence.sequence_id)
                self._sampler.forget(sequence.sequence_id)
        for row in rows:
            swapped = self._scheduler.sequences.get(row.sequence_id)
            if swapped is not None and swapped.status is SequenceStatus.SWAPPED:
                self._scheduler.recompute(swapped)  # it may have shared blocks with one that failed
        return discarded

    def run_short(self, step: Step) -> None:
        """An allocation failed in this step: give back memory, run smaller steps, and admit no further request until
        one succeeds."""
        for part in self._parts:
            part.ran_short(step)
        self._scheduler.pause_admission()

    def rebuild_pools(self, steps: ListOf[Step], error: DeviceError) -> None:
        """Replace the KV pools after a device error, and recompute the running sequences from their known tokens.

        MLX reports a failed command buffer late and at another call (mlx PR 3523), so the failure cannot be attributed
        to a row. steps: those in flight, the oldest first; none if it failed between two steps. The sequences of the
        oldest one are admitted again one at a time, each after the previous one has sampled a token. If the device
        fails again, the sequence that runs then is ended. If a step took too long, the next ones are shorter, and no
        sequence is to blame as long as they can be.
        """
        logger.error("a step failed on the device; KV pools are rebuilt, running sequences are recomputed: %s", error)
        if is_out_of_memory(error):
            self.run_short(Step([row for step in steps for row in step.rows]))
        self._runner.rebuild_pools()
        self._sampler.reset()
        self._scheduler.reset_cache()
        for step in steps:
            self._scheduler.undo_moves(step)
            self._scheduler.update(step, {})  # no token of it will be read
        if error.is_timeout and self._cut_steps(steps):
            return
        message = f"the step failed on the device {MAX_STEP_FAILURES} times: {public_reason(error)}"
        self._blame([row for step in steps[:1] for row in step.rows], message, error)

    def _cut_steps(self, steps: ListOf[Step]) -> bool:
        """Let the next steps have fewer tokens than those that took too long. Returns False if none is shorter: then
        their requests are at fault."""
        tokens = max((step.num_tokens for step in steps), default=0)
        return any(part.ran_long(tokens) for part in self._parts)

    def _isolate(self, rows: ListOf[Row], error: HostError) -> None:
        """Repeat a failed step in halves until the request that makes it fail is alone, and end that request.

        Writing the same keys and values twice changes nothing, so the other requests lose only time.
        """
        for row in rows:
            self._sampler.forget(row.sequence_id)  # the token counts may contain a token of the failed step
        if len(rows) > 1:
            half = len(rows) // 2
            self.run_rows(rows[:half], error)
            self.run_rows(rows[half:], error)
        else:
            for row in self._running_rows(rows):
                self._requests.fail(self._scheduler.sequences[row.sequence_id], failure_of(error))

    def _recompute(self, rows: ListOf[Row], error: HostError) -> None:
        """Recompute the sequences of a failed step one at a time, because the step may have changed their recurrent
        states: it cannot be repeated. A sequence whose step fails again is ended."""
        self._clear_cache_of_ended(rows)
        for row in rows:
            self._sampler.forget(row.sequence_id)
        for sequence in self._unfinished(rows):
            self._scheduler.recompute(sequence)
        self._scheduler.update(Step(rows), {})
        self._blame(rows, failure_of(error), error)

    def _blame(self, rows: ListOf[Row], message: str, error: Exception) -> None:
        """Count a failure of a step for its sequences. Those that have failed before end with an error; the others are
        admitted again one at a time."""
        for sequence in self._unfinished(rows):
            sequence.num_step_failures += 1
            if sequence.num_step_failures >= MAX_STEP_FAILURES:
                reason = FinishReason.MEMORY if is_out_of_memory(error) else FinishReason.ERROR
                self._requests.fail(sequence, message, reason)

    def _running_rows(self, rows: ListOf[Row]) -> list[Row]:
        """The rows whose sequences still run, with the tokens that are known now. The others lose their pending tokens
        here."""
        self._clear_cache_of_ended(rows)
        running = self._scheduler.running_rows(rows)
        sequence_ids = {row.sequence_id for row in running}
        self._scheduler.update(Step([row for row in rows if row.sequence_id not in sequence_ids]), {})
        return [row._replace(token_ids=self._known_tokens(row)) for row in running]

    def _known_tokens(self, row: Row) -> list[int]:
        """The tokens of a row, with those that were pending when it was scheduled. Drafts stay what they are."""
        now = self._scheduler.sequences[row.sequence_id].token_ids[row.start : row.context_len]
        return [before if token == PENDING else token for token, before in zip(now, row.token_ids, strict=True)]

    def _unfinished(self, rows: ListOf[Row]) -> list[Sequence]:
        found = (self._scheduler.sequences.get(row.sequence_id) for row in rows)
        return [sequence for sequence in found if sequence is not None]

    def _clear_cache_of_ended(self, rows: ListOf[Row]) -> None:
        """Empty the prefix cache if a sequence of a failed step has ended: the last token of its answer may have
        published a block that is not computed."""
        if len(self._unfinished(rows)) < len(rows):
            self._scheduler.clear_cache()


def log_failure(rows: ListOf[Row], error: HostError, before: HostError | None) -> None:
    """The stack says nothing of why an allocation failed, and nothing new if the repeated step fails as before: a
    request that fails in a step of 128 would have its stack in the log eight times."""
    cause = error.__cause__
    labels = ", ".join(label(row.sequence_id, row.request_id) for row in rows)
    is_known = before is not None and repr(before.__cause__) == repr(cause)
    if is_known or is_out_of_memory(error):
        logger.error("a step of %s failed: %s: %s", labels, type(cause).__name__, cause)
    else:
        logger.error("a step of %s failed", labels, exc_info=cause)


def failure_of(error: HostError) -> str:
    """What the clients are told."""
    return f"the step failed: {type(error.__cause__).__name__}: {public_reason(error.__cause__)}"
