"""The engine's steps: schedule, launch, sample, process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf

from mlxpaged.engine.grammar import Grammars
from mlxpaged.engine.headroom import Headroom
from mlxpaged.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.engine.pool_resizer import PoolResizer
from mlxpaged.engine.prompt_logits import INVARIANT_TOP
from mlxpaged.engine.prompt_progress import PromptChunk, prompt_chunks
from mlxpaged.engine.ranks import RankLostError
from mlxpaged.engine.recovery import Recovery
from mlxpaged.engine.request import RequestOutput
from mlxpaged.engine.request_table import RequestTable
from mlxpaged.engine.sampler import Sampler, SamplingRow
from mlxpaged.engine.stall import StepSize
from mlxpaged.engine.step import HostError, InFlightStep, PromptResult
from mlxpaged.engine.step_log import StepLog
from mlxpaged.engine.worker import DeviceClock
from mlxpaged.process_memory import is_out_of_memory
from mlxpaged.scheduler.batch import Batch, ScheduledSequence
from mlxpaged.scheduler.scheduler import Scheduler
from mlxpaged.scheduler.sequence import FinishReason, SequenceStatus

logger = logging.getLogger(__name__)


class StepLoop:
    """Runs the requests of a model. One call of `step` launches at most one forward pass, unless it recovers from a
    failure. clock: seconds. waits_for_memory: whether the last step was empty because the pool has to grow, and cannot
    yet. prompt_chunks: of the step that was processed last."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        resizer: PoolResizer,
        sampler: Sampler,
        grammars: Grammars,
        headroom: Headroom,
        requests: RequestTable,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._resizer = resizer
        self._sampler = sampler
        self._grammars = grammars
        self._headroom = headroom
        self._requests = requests
        self._clock = clock
        self._recovery = Recovery(scheduler, runner, sampler, headroom, resizer, requests, self._run)
        self._in_flight: InFlightStep | None = None
        self._log = StepLog()
        self.device = DeviceClock()
        self.num_steps = 0
        self.waits_for_memory = False
        self.prompt_chunks: tuple[PromptChunk, ...] = ()

    @property
    def has_step_in_flight(self) -> bool:
        return self._in_flight is not None

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule and launch one batch, after a part of the KV pools is resized if they are to grow or shrink. Returns
        the outputs of the step that ended, and writes a line into the debug log.

        A request that makes its step fail ends with an error. An exception that leaves this method means that the
        engine's own state is wrong, or that a rank is lost: the engine cannot go on.
        """
        started = self._clock()
        self.resize_pools()
        batch = self._schedule()
        try:
            if not self._move_blocks(batch):
                self._finish_in_flight()
                self._recovery.run_rows(batch.rows)
            elif self._runner.overlaps:
                self.overlap_step(batch)
            elif batch.rows:
                self._run(batch)
        except HostError as error:
            self._recover(batch, error)
        except DeviceError as error:
            self._rebuild_pools(error, batch)
        self._log.write(self.num_steps, self._clock() - started, self._scheduler)
        return self._requests.take_outputs()

    def _run(self, batch: Batch) -> None:
        """Run a batch to its end: forward pass, sampler, tokens, text. No other step may be in flight."""
        step = self._launch(batch)
        self._sample(step)
        self._runner.finish_step(*step.results)
        self._process(step)

    def overlap_step(self, batch: Batch) -> None:
        """Launch a batch, and process the previous step's tokens while the device works.

        Sampled tokens go from one forward pass into the next on the device. Only the sampler of grammars, penalties and
        thinking budgets waits for the host. The host then knows all earlier tokens, so they are exact in every step.
        What was sampled for a sequence that the previous token has ended is dropped.
        """
        step = self._launch(batch, self._in_flight) if batch.rows else None
        self._finish_in_flight()
        if step is not None:
            self._sample(step)
        self._in_flight = step

    def _schedule(self) -> Batch:
        """The next batch. It may be empty while sequences wait for the pool to grow."""
        self._scheduler.max_tokens = self._headroom.tokens(self._requests.longest)
        batch = self._scheduler.schedule()
        self._log.start_step(batch, self._requests.by_sequence, self._clock())
        if batch.rows:
            self.num_steps += 1
        nothing_runs = self._scheduler.has_unfinished() and not batch.rows and self._in_flight is None
        self.waits_for_memory = nothing_runs and not self._resizer.is_due
        if nothing_runs and not self._resizer.can_wait:
            raise RuntimeError(f"nothing can be scheduled: {self._scheduler.stats()}")
        return batch

    def _move_blocks(self, batch: Batch) -> bool:
        """Swap and copy the blocks of a batch. Returns False if that failed: sequences that need them are preempted."""
        if not batch.moves:
            return True
        try:
            self._runner.move_blocks(batch.moves)
        except RankLostError:
            raise
        except Exception as error:
            logger.exception("KV blocks could not be moved; the sequences that need them are recomputed")
            if is_out_of_memory(error):
                self._recovery.run_short(batch)
            self._scheduler.undo_moves(batch)
            self._runner.finish_step()  # raises DeviceError if the device caused the failure
            return False
        return True

    def _launch(self, batch: Batch, previous: InFlightStep | None = None) -> InFlightStep:
        """Launch the forward pass, and the sampler if it needs no token that is on the device. The sampled tokens of
        the previous step replace the pending ones there."""
        started, tables = self._clock(), self._scheduler.get_block_tables(batch.sequence_ids)
        traced = self._runner.num_traced
        try:
            self._headroom.require(batch.num_tokens, lambda: max(row.context_len for row in batch.rows))
            running = {each.sequence_id for each in self._scheduler.running} if self._runner.is_recurrent else set()
            logits = self._runner.forward(batch, tables, None if previous is None else previous.tokens, running)
            requests = self._requests.by_sequence
            tops = (requests[row.sequence.sequence_id].num_top for row in batch.rows if row.prompt_logprobs)
            top = max(tops, default=None)
            if top is not None and self._runner.tile_size is not None:
                top = max(top, INVARIANT_TOP)  # of equal logits, which are the best depends on it
            step = InFlightStep(batch, started, logits, top)
            step.is_usual = not batch.moves and self._runner.num_traced == traced
            sampling = [row for row in batch.rows if row.samples]
            if not any(requests[row.sequence.sequence_id].needs_tokens for row in sampling):
                self._launch_sampler(step, sampling)
        except (DeviceError, RankLostError):
            raise
        except Exception as error:
            raise HostError from error
        self._runner.start_step(*step.results)
        return step

    def _sample(self, step: InFlightStep) -> None:
        """Leave out the sequences that the previous step has ended, and launch the sampler if it has waited for the
        tokens of that step. The device may still compute the logits."""
        step.rows = [row for row in step.batch.rows if row.sequence.status is SequenceStatus.RUNNING]
        if step.is_sampled:
            return
        try:
            self._launch_sampler(step, [row for row in step.rows if row.samples])
        except Exception as error:
            raise HostError from error
        self._runner.start_step(*step.results)

    def _launch_sampler(self, step: InFlightStep, rows: ListOf[ScheduledSequence]) -> None:
        samples = self._sampler.sample(step.logits_of(rows), self._sampling_rows(rows)) if rows else None
        step.set_samples([row.sequence.sequence_id for row in rows], samples)

    def _sampling_rows(self, rows: ListOf[ScheduledSequence]) -> list[SamplingRow]:
        running = [(self._requests.by_sequence[row.sequence.sequence_id], row.context_len) for row in rows]
        constrained = [(each.matcher, each.forbidden(at)) for each, at in running if each.matcher is not None]
        masks = iter(self._grammars.masks(constrained) if constrained else ())
        return [each.sampling_row(at, None if each.matcher is None else next(masks)) for each, at in running]

    def _process(self, step: InFlightStep) -> None:
        """Commit the tokens of a step, and turn them into outputs."""
        tokens, invalid, prompt_logprobs = step.read()
        now = self._clock()
        # The device began the step when it was launched, or when the previous step was done if that was later.
        if step.is_usual:
            self._scheduler.observe(step.batch, now - max(step.started, self.device.read_at))
        self.device.read_at = now
        self._headroom.note_success()
        self._scheduler.admits = True
        discarded: set[int] = set()
        requests = self._requests.by_sequence
        for sequence_id in invalid & requests.keys():
            preempted = self._requests.fail(requests[sequence_id].sequence, "the model's logits are not finite")
            for sequence in preempted:
                tokens.pop(sequence.sequence_id, None)
                discarded.add(sequence.sequence_id)
                self._sampler.forget(sequence.sequence_id)
        for row in step.rows if invalid else ():
            if row.sequence.status is SequenceStatus.SWAPPED:  # it may have shared blocks with one that failed
                self._scheduler.recompute(row.sequence)
        self._scheduler.update(Batch(step.rows), {sequence_id: token.token_id for sequence_id, token in tokens.items()})
        # A step that only decodes samples every row, and pays nothing for prompts.
        self.prompt_chunks = ()
        if prompt_logprobs or len(tokens) < len(step.rows):
            self._process_prompts(step.rows, prompt_logprobs, discarded)
        self._requests.advance(tokens)

    def _process_prompts(
        self, rows: ListOf[ScheduledSequence], prompt_logprobs: Mapping[int, PromptResult], discarded: set[int]
    ) -> None:
        """Commit what a step computed of prompts, except for sampled tokens. discarded: ids of preempted sequences."""
        self.prompt_chunks = prompt_chunks(rows)
        # What a sequence computed in this step is discarded too if a failure of the previous step preempted it.
        requests = self._requests.by_sequence
        valid = {row.sequence.sequence_id for row in rows} & requests.keys() - discarded
        for sequence_id, (positions, computed) in prompt_logprobs.items():
            if sequence_id in valid:
                requests[sequence_id].add_prompt_logprobs(positions, computed)
        for row in rows:
            if row.ends_sequence and row.sequence.sequence_id in valid:
                output = self._requests.end(row.sequence.sequence_id, FinishReason.LENGTH, None)
                self._requests.outputs.append(output)

    # -- between steps -----------------------------------------------------------------------------------------------

    def finish_in_flight(self) -> None:
        """Wait for the step in flight, if there is one, and process its tokens."""
        try:
            self._finish_in_flight()
        except DeviceError as error:
            self._rebuild_pools(error)

    def resize_pools(self, is_idle: bool = False, device_is_idle: bool = False) -> bool:
        """Resize a part of the KV pools if they are to grow or shrink, after the step in flight. Returns whether."""
        num_blocks = self._resizer.poll(is_idle, device_is_idle)
        if num_blocks is None and not self._resizer.is_due:
            return False
        try:
            self._finish_in_flight()
            if num_blocks is not None:
                self._resizer.shrink(num_blocks)
        except DeviceError as error:
            self._rebuild_pools(error)
        if self._resizer.is_due:
            self._resizer.advance()
        return True

    def step_size(self) -> StepSize:
        """The size of the step that was scheduled last, and the time of all that run. The watchdog asks on its own
        thread while a step runs, so this only reads what does not change."""
        last, in_flight = self._log.batch, self._in_flight
        seconds = self._scheduler.expected_seconds(last)
        if in_flight is not None and in_flight.batch is not last and seconds is not None:
            before = self._scheduler.expected_seconds(in_flight.batch)
            seconds = None if before is None else before + seconds
        rows = last.rows if in_flight is None else [*last.rows, *in_flight.batch.rows]
        request_ids = frozenset(row.sequence.request_id for row in rows)
        return StepSize(len(last), last.num_tokens, seconds, request_ids)

    def _finish_in_flight(self) -> None:
        if self._in_flight is not None:
            self._process(self._in_flight)
            self._in_flight = None

    def _recover(self, batch: Batch, error: HostError) -> None:
        try:
            self._finish_in_flight()
            self._recovery.recover(batch.rows, error)
        except DeviceError as device_error:
            self._rebuild_pools(device_error, batch)

    def _rebuild_pools(self, error: DeviceError, *batches: Batch) -> None:
        if self._runner.ranks is not None:  # another rank may be in another step: only all of them can begin anew
            raise RankLostError(f"a step of several ranks failed: {error}") from error
        in_flight, self._in_flight = self._in_flight, None
        self._recovery.rebuild_pools([*([in_flight.batch] if in_flight is not None else ()), *batches], error)
