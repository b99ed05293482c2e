"""The engine's steps: schedule, launch, sample, process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf

from mlxpaged.core.engine.in_flight import HostError, InFlightStep, PromptResult
from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.engine.part import Need, Part
from mlxpaged.core.engine.prompt_progress import PromptChunk, prompt_chunks
from mlxpaged.core.engine.recovery import Recovery
from mlxpaged.core.engine.request import RequestOutput
from mlxpaged.core.engine.request_rows import RequestRows
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.engine.sampler import SampledToken, Sampler
from mlxpaged.core.engine.stall import StepSize
from mlxpaged.core.engine.step_input import NO_TOKENS
from mlxpaged.core.engine.step_log import StepLog
from mlxpaged.core.engine.worker import DeviceClock
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.core.step import Row, Step
from mlxpaged.parts.memory.headroom import Headroom
from mlxpaged.parts.memory.pool_resizer import PoolResizer
from mlxpaged.parts.ranks.ranks import RankLostError
from mlxpaged.process_memory import is_out_of_memory

logger = logging.getLogger(__name__)


class StepLoop:
    """Runs the requests of a model. One call of `step` launches at most one forward pass, unless it recovers from a
    failure. clock: seconds. parts: in the order in which they are asked. waits_for_memory: whether the last step was
    empty because the pool has to grow, and cannot yet, and no part is busy. prompt_chunks: of the step that was
    processed last."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        resizer: PoolResizer,
        sampler: Sampler,
        rows: RequestRows,
        headroom: Headroom,
        requests: RequestTable,
        clock: Callable[[], float],
        parts: ListOf[Part] = (),
    ) -> None:
        self._parts = parts
        self._scheduler = scheduler
        self._runner = runner
        self._resizer = resizer
        self._sampler = sampler
        self._headroom = headroom
        self._requests = requests
        self._rows = rows
        self._clock = clock
        self._recovery = Recovery(scheduler, runner, sampler, headroom, resizer, requests, self._run)
        self._in_flight: InFlightStep | None = None
        self._undelivered: dict[int, list[SampledToken]] = {}  # by sequence: tokens that are committed
        self._log = StepLog()
        self.device = DeviceClock()
        self.num_steps = 0
        self.waits_for_memory = False
        self.prompt_chunks: tuple[PromptChunk, ...] = ()

    def join(self, device: DeviceClock) -> None:
        """Share the device with other models."""
        self.device = device

    @property
    def has_step_in_flight(self) -> bool:
        return self._in_flight is not None

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule and launch one step, after a part of the KV pools is resized if they are to grow or shrink. Returns
        the outputs of the step that ended, and writes a line into the debug log.

        A request that makes its step fail ends with an error. An exception that leaves this method means that the
        engine's own state is wrong, or that a rank is lost: the engine cannot go on.
        """
        started = self._clock()
        self.resize_pools()
        for part in self._parts:
            self._prepare(part)
        scheduled = self._schedule()
        for part in self._parts:
            part.after_schedule()
        try:
            if not self._move_blocks(scheduled):
                self._finish_in_flight()
                self._recovery.run_rows(scheduled.rows)
            elif self._runner.overlaps:
                self.overlap_step(scheduled)
            elif scheduled.rows:
                self._run(scheduled)
        except HostError as error:
            self._recover(scheduled, error)
        except DeviceError as error:
            self._rebuild_pools(error, scheduled)
        self._deliver()
        self._log.write(self.num_steps, self._clock() - started, self._scheduler)
        return self._requests.take_outputs()

    def _run(self, scheduled: Step) -> None:
        """Run a step to its end: forward pass, sampler, tokens, text. No other step may be in flight."""
        step = self._launch(scheduled)
        self._sample(step)
        self._runner.finish_step(*step.results)
        self._process(step)

    def overlap_step(self, scheduled: Step) -> None:
        """Launch a step, and process the previous step's tokens while the device works.

        Sampled tokens go from one forward pass into the next on the device. Only the sampler of grammars, penalties and
        thinking budgets waits for the host. The host then knows all earlier tokens, so they are exact in every step.
        What was sampled for a sequence that the previous token has ended is dropped.
        """
        step = self._launch(scheduled, self._in_flight) if scheduled.rows else None
        self._deliver()
        self._finish_in_flight()
        if step is not None:
            self._sample(step)
        self._in_flight = step

    def _prepare(self, part: Part) -> None:
        """Let a part do what comes before the next step. COMMITTED leaves the text of the step in flight to `_deliver`
        where the next step does not depend on it."""
        try:
            while (need := part.before_step(self._in_flight)) is not Need.NOTHING:
                assert self._in_flight is not None
                self._process(self._in_flight, delivers=need is Need.FINISHED)
                self._in_flight = None
        except DeviceError as error:
            self._rebuild_pools(error)

    def _deliver(self) -> None:
        """Turn committed tokens into outputs."""
        tokens, self._undelivered = self._undelivered, {}
        self._requests.advance(tokens)

    def _can_wait(self, sequence_id: int, sampled: ListOf[SampledToken]) -> bool:
        """Whether the next step can be launched before the text of these tokens is made: no grammar or limit on
        thinking follows them, and they do not end the answer. If a stop string ends it, the next step's are dropped."""
        running = self._requests.by_sequence.get(sequence_id)
        if running is None or running.matcher is not None or running.thinking is not None:
            return False
        sequence = running.sequence
        ends = sequence.finish_reason_after(sampled[-1].token_id, sequence.num_output_tokens)
        return ends is None and sequence.num_step_failures == 0

    def _schedule(self) -> Step:
        """The next step. It may be empty while sequences wait for the pool to grow."""
        self._scheduler.max_tokens = self._headroom.tokens(self._requests.longest)
        scheduled = self._scheduler.schedule()
        cannot_grow = self._is_stuck(scheduled) and not self._resizer.is_due
        gives_way = cannot_grow and any(part.give_way() for part in self._parts)
        if gives_way and not scheduled.moves:
            scheduled = self._scheduler.schedule()
        self._log.start_step(scheduled, self._requests.by_sequence, self._clock())
        if scheduled.rows:
            self.num_steps += 1
        is_busy = any(part.is_busy for part in self._parts)
        self.waits_for_memory = self._is_stuck(scheduled) and not self._resizer.is_due and not is_busy
        if self._is_stuck(scheduled) and not self._resizer.can_wait and not gives_way:
            raise RuntimeError(f"nothing can be scheduled: {self._scheduler.stats()}")
        return scheduled

    def _is_stuck(self, scheduled: Step) -> bool:
        """Whether no sequence runs, although some could if they had room."""
        return self._scheduler.num_runnable > 0 and not scheduled.rows and self._in_flight is None

    def _move_blocks(self, scheduled: Step) -> bool:
        """Swap and copy the blocks of a step. Returns False if that failed: sequences that need them are preempted."""
        if not scheduled.moves:
            return True
        try:
            self._runner.move_blocks(scheduled.moves)
        except RankLostError:
            raise
        except Exception as error:
            logger.exception("KV blocks could not be moved; the sequences that need them are recomputed")
            if is_out_of_memory(error):
                self._recovery.run_short(scheduled)
            self._scheduler.undo_moves(scheduled)
            self._runner.finish_step()  # raises DeviceError if the device caused the failure
            return False
        return True

    def _launch(self, scheduled: Step, previous: InFlightStep | None = None) -> InFlightStep:
        """Launch the forward pass, and the sampler if it needs no token that is on the device. The sampled tokens of
        the previous step replace the pending ones there."""
        started, traced = self._clock(), self._runner.num_traced
        try:
            self._headroom.require(scheduled.num_tokens, lambda: max(scheduled.context_lens))
            running = {each.sequence_id for each in self._scheduler.running} if self._runner.is_recurrent else set()
            logits = self._runner.forward(scheduled, NO_TOKENS if previous is None else previous.tokens, running)
            prompts, top = self._rows.of_prompts(scheduled, logits.shape[0], self._runner.least_top)
            step = InFlightStep(scheduled, started, logits, prompts, top, self._sampler.absent)
            step.is_usual = not scheduled.moves and self._runner.num_traced == traced
            sampling = [row for row in scheduled.rows if row.num_sampled]
            if not self._rows.need_tokens(sampling):
                self._launch_sampler(step, sampling)
        except (DeviceError, RankLostError):
            raise
        except Exception as error:
            raise HostError from error
        self._runner.start_step(*step.results)
        waited = self._clock() - self.device.read_at
        for part in self._parts:
            part.launched(scheduled, waited)
        return step

    def _sample(self, step: InFlightStep) -> None:
        """Leave out the sequences that the previous step has ended, and launch the sampler if it has waited for the
        tokens of that step. The device may still compute the logits."""
        step.rows = self._scheduler.running_rows(step.scheduled.rows)
        if step.is_sampled:
            return
        try:
            self._launch_sampler(step, [row for row in step.rows if row.samples])
        except Exception as error:
            raise HostError from error
        self._runner.start_step(*step.results)

    def _launch_sampler(self, step: InFlightStep, rows: ListOf[Row]) -> None:
        ids = [row.sequence_id for row in rows for _ in range(row.num_sampled)]
        sampling = self._rows.sampled(rows)
        samples = self._sampler.sample(step.logits_of(ids), sampling) if rows else None
        step.set_samples(ids, samples)
        for part in self._parts:
            part.sampled(step, sampling, None if samples is None else samples.tokens)

    def _process(self, step: InFlightStep, delivers: bool = True) -> None:
        """Commit the tokens of a step, and turn them into outputs. delivers: whether all at once; otherwise those that
        can wait are left to `_deliver`."""
        self._deliver()  # the tokens before these
        tokens, invalid, prompt_logprobs = step.read()
        for part in self._parts:
            tokens = part.accept(step.rows, tokens)
        now = self._clock()
        # The device began the step when it was launched, or when the previous step was done if that was later.
        if step.is_usual:
            seconds = now - max(step.started, self.device.read_at)
            for part in self._parts:
                part.timed(step.scheduled, seconds)
            self._scheduler.times.observe(step.scheduled, seconds)
        self.device.note_read(now)
        self._headroom.note_success()
        self._scheduler.resume_admission()
        discarded = self._recovery.fail_invalid(step.rows, invalid) if invalid else set[int]()
        for sequence_id in discarded:
            tokens.pop(sequence_id, None)
        token_ids = {sequence_id: [token.token_id for token in sampled] for sequence_id, sampled in tokens.items()}
        self._scheduler.update(Step(step.rows), token_ids)
        # A step that only decodes samples every row, and pays nothing for prompts.
        self.prompt_chunks = ()
        if invalid:
            self._discard()
        if prompt_logprobs or len(tokens) < len(step.rows):
            self._process_prompts(step.rows, prompt_logprobs, discarded)
        if not delivers:
            self._undelivered = {each: found for each, found in tokens.items() if self._can_wait(each, found)}
        self._requests.advance({each: found for each, found in tokens.items() if each not in self._undelivered})
        for part in self._parts:
            part.committed(step, tokens)

    def _process_prompts(
        self, rows: ListOf[Row], prompt_logprobs: Mapping[int, PromptResult], discarded: set[int]
    ) -> None:
        """Commit what a step computed of prompts, except for sampled tokens. discarded: ids of preempted sequences."""
        self.prompt_chunks = prompt_chunks(rows, self._scheduler.sequences)
        # What a sequence computed in this step is discarded too if a failure of the previous step preempted it.
        requests = self._requests.by_sequence
        valid = {row.sequence_id for row in rows} & requests.keys() - discarded
        for sequence_id, (positions, computed) in prompt_logprobs.items():
            if sequence_id in valid:
                requests[sequence_id].add_prompt_logprobs(positions, computed)
        for row in rows:
            if row.sequence_id in valid and requests[row.sequence_id].sequence.ends_after(row):
                self._requests.outputs.append(self._requests.end(row.sequence_id, FinishReason.LENGTH, None))

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

    def give_back(self) -> None:
        """Shrink the KV pools, after the step in flight, to what running requests and their least size need."""
        try:
            self._finish_in_flight()
            self._resizer.shrink_to_least()
        except DeviceError as error:
            self._rebuild_pools(error)

    def step_size(self) -> StepSize:
        """The size of the step that was scheduled last, and the time of all that run. The watchdog asks on its own
        thread while a step runs, so this only reads what does not change."""
        last, in_flight = self._log.scheduled, self._in_flight
        seconds = self._scheduler.times.expected_seconds(last)
        if in_flight is not None and in_flight.scheduled is not last and seconds is not None:
            before = self._scheduler.times.expected_seconds(in_flight.scheduled)
            seconds = None if before is None else before + seconds
        rows = last.rows if in_flight is None else [*last.rows, *in_flight.scheduled.rows]
        request_ids = frozenset(row.request_id for row in rows)
        return StepSize(len(last), last.num_tokens, seconds, request_ids)

    def _discard(self) -> None:
        for part in self._parts:
            part.discard()

    def _finish_in_flight(self) -> None:
        if self._in_flight is not None:
            self._process(self._in_flight)
            self._in_flight = None

    def _recover(self, scheduled: Step, error: HostError) -> None:
        self._deliver()
        self._discard()
        try:
            self._finish_in_flight()
            self._recovery.recover(scheduled.rows, error)
        except DeviceError as device_error:
            self._rebuild_pools(device_error, scheduled)

    def _rebuild_pools(self, error: DeviceError, *steps: Step) -> None:
        self._deliver()
        if self._runner.is_shared:  # another rank may be in another step: only all of them can begin anew
            raise RankLostError(f"a step of several ranks failed: {error}") from error
        self._discard()
        in_flight, self._in_flight = self._in_flight, None
        self._recovery.rebuild_pools([*([in_flight.scheduled] if in_flight is not None else ()), *steps], error)
