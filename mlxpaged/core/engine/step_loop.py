"""The engine's steps: schedule, launch, sample, process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as ListOf

from mlxpaged.core.engine.errors import RankLostError
from mlxpaged.core.engine.in_flight import HostError, InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.engine.part import Need, Part, Room
from mlxpaged.core.engine.recovery import Recovery
from mlxpaged.core.engine.request import RequestOutput
from mlxpaged.core.engine.request_rows import RequestRows
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.engine.results import Results
from mlxpaged.core.engine.sampler import Sampler
from mlxpaged.core.engine.stall import StepSize
from mlxpaged.core.engine.step_input import NO_TOKENS
from mlxpaged.core.engine.step_log import StepLog
from mlxpaged.core.engine.worker import DeviceClock
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.step import Row, Step
from mlxpaged.process_memory import is_out_of_memory

logger = logging.getLogger(__name__)


class StepLoop:
    """Runs the requests of a model. One call of `step` launches at most one forward pass, unless it recovers from a
    failure. clock: seconds. parts: in the order in which they are asked. waits_for_memory: whether the last step was
    empty because the pool has to grow, and cannot yet, and no part is busy."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        rows: RequestRows,
        requests: RequestTable,
        clock: Callable[[], float],
        parts: ListOf[Part] = (),
    ) -> None:
        self._parts = parts
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._requests = requests
        self._rows = rows
        self._clock = clock
        self._recovery = Recovery(scheduler, runner, sampler, requests, parts, self._run)
        self.results = Results(scheduler, requests, self._recovery, parts, clock)
        self._in_flight: InFlightStep | None = None
        self._log = StepLog()
        self.num_steps = 0
        self.waits_for_memory = False

    def join(self, device: DeviceClock) -> None:
        """Share the device with other models."""
        self.results.join(device)

    @property
    def has_step_in_flight(self) -> bool:
        return self._in_flight is not None

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule and launch one step. Returns the outputs of the step that ended, and writes a line into the debug
        log.

        A request that makes its step fail ends with an error. An exception that leaves this method means that the
        engine's own state is wrong, or that a rank is lost: the engine cannot go on.
        """
        started = self._clock()
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
        self.results.deliver()
        self._log.write(self.num_steps, self._clock() - started, self._scheduler)
        return self._requests.take_outputs()

    def _run(self, scheduled: Step) -> None:
        """Run a step to its end: forward pass, sampler, tokens, text. No other step may be in flight."""
        step = self._launch(scheduled)
        self._sample(step)
        self._runner.finish_step(*step.results)
        self.results.process(step)

    def overlap_step(self, scheduled: Step) -> None:
        """Launch a step, and process the previous step's tokens while the device works.

        Sampled tokens go from one forward pass into the next on the device. Only the sampler of grammars, penalties and
        thinking budgets waits for the host. The host then knows all earlier tokens, so they are exact in every step.
        What was sampled for a sequence that the previous token has ended is dropped.
        """
        step = self._launch(scheduled, self._in_flight) if scheduled.rows else None
        self.results.deliver()
        self._finish_in_flight()
        if step is not None:
            self._sample(step)
        self._in_flight = step

    def _prepare(self, part: Part) -> None:
        """Let a part do what comes before the next step. COMMITTED leaves the text of the step in flight for later, if
        the next step does not depend on it."""
        try:
            while (need := part.before_step(self._in_flight)) is not Need.NOTHING:
                assert self._in_flight is not None
                self.results.process(self._in_flight, delivers=need is Need.FINISHED)
                self._in_flight = None
        except DeviceError as error:
            self._rebuild_pools(error)

    def _schedule(self) -> Step:
        """The next step. It may be empty while sequences wait for the pool to grow."""
        scheduled = self._scheduler.schedule()
        room = self._room(scheduled)
        gives_way = room < Room.NEXT and any(part.give_way() for part in self._parts)
        if gives_way and not scheduled.moves:
            scheduled = self._scheduler.schedule()
            room = self._room(scheduled)
        self._log.start_step(scheduled, self._requests.by_sequence, self._clock())
        if scheduled.rows:
            self.num_steps += 1
        is_busy = any(part.is_busy for part in self._parts)
        self.waits_for_memory = room < Room.NEXT and not is_busy
        if room is Room.NEVER and not gives_way:
            raise RuntimeError(f"nothing can be scheduled: {self._scheduler.stats()}")
        return scheduled

    def _room(self, scheduled: Step) -> Room:
        """NEXT if a sequence runs, or none could if it had room. Else whether one will have room."""
        if scheduled.rows or self._in_flight is not None or self._scheduler.num_runnable == 0:
            return Room.NEXT
        return max((part.room for part in self._parts), default=Room.NEVER)

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
        waited = self._clock() - self.results.device.read_at
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

    # -- between steps -----------------------------------------------------------------------------------------------

    def finish_in_flight(self) -> None:
        """Wait for the step in flight, if there is one, and process its tokens."""
        try:
            self._finish_in_flight()
        except DeviceError as error:
            self._rebuild_pools(error)

    def rest(self, device_is_idle: bool) -> bool:
        """Let the parts do what they do while no step can run. Returns whether any did something."""
        self.finish_in_flight()
        done = [self._does(part.rest, device_is_idle) for part in self._parts]
        return any(done)

    def give_back(self) -> None:
        """Free what running requests do not need, after the step in flight."""
        self.finish_in_flight()
        for part in self._parts:
            self._does(part.give_back)

    def _does(self, act: Callable[..., object], *arguments: object) -> bool:
        try:
            return bool(act(*arguments))
        except DeviceError as error:
            self._rebuild_pools(error)
            return True

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

    def _finish_in_flight(self) -> None:
        if self._in_flight is not None:
            self.results.process(self._in_flight)
            self._in_flight = None

    def _recover(self, scheduled: Step, error: HostError) -> None:
        self.results.deliver()
        self.results.discard()
        try:
            self._finish_in_flight()
            self._recovery.recover(scheduled.rows, error)
        except DeviceError as device_error:
            self._rebuild_pools(device_error, scheduled)

    def _rebuild_pools(self, error: DeviceError, *steps: Step) -> None:
        self.results.deliver()
        if self._runner.is_shared:  # another rank may be in another step: only all of them can begin anew
            raise RankLostError(f"a step of several ranks failed: {error}") from error
        self.results.discard()
        in_flight, self._in_flight = self._in_flight, None
        self._recovery.rebuild_pools([*([in_flight.scheduled] if in_flight is not None else ()), *steps], error)
