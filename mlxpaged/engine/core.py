"""The engine without its thread: takes requests, runs one step at a time, returns outputs."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from mlxpaged.cache.prefix_cache import salted
from mlxpaged.engine import recovery
from mlxpaged.engine.deadlines import Deadlines, set_deadlines
from mlxpaged.engine.embedder import NO_EMBEDDINGS, Embedder, EmbeddingRequest
from mlxpaged.engine.grammar import GrammarError, Grammars
from mlxpaged.engine.headroom import Headroom
from mlxpaged.engine.memory import StateMemory
from mlxpaged.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.engine.pool_resizer import POLL_SECONDS, REST_SECONDS, PoolResizer
from mlxpaged.engine.prompt_logits import INVARIANT_TOP
from mlxpaged.engine.prompt_progress import PromptChunk, prompt_chunks
from mlxpaged.engine.ranks import RankLostError
from mlxpaged.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.engine.running_request import RunningRequest
from mlxpaged.engine.sampler import SampledToken, Sampler, SamplingRow
from mlxpaged.engine.stall import StepSize
from mlxpaged.engine.status import (
    MAX_WAITING_LISTED,
    MAX_WAITING_WATCHED,
    EngineSnapshot,
    EngineStats,
    EngineStatus,
    engine_status,
)
from mlxpaged.engine.step import HostError, InFlightStep, PromptResult
from mlxpaged.engine.step_log import StepLog
from mlxpaged.models import ServedModel
from mlxpaged.models.layers import state_bytes
from mlxpaged.process_memory import is_out_of_memory
from mlxpaged.scheduler import Batch, FinishReason, Priority, ScheduledSequence, Scheduler, Sequence, SequenceStatus

logger = logging.getLogger(__name__)

WEIGHTS = {Priority.HIGH: 4.0, Priority.NORMAL: 2.0, Priority.LOW: 1.0}
"""A model gets device time in proportion to these while others have work."""


@dataclass
class DeviceClock:
    """Of the models that share a device. read_at: time at which the result of the last step of any of them was read."""

    read_at: float = -math.inf


class EngineCore:
    """Everything that runs on the engine thread. `builder.build_engine` makes one. kernels_off: as in BackendChoice.

    One call of `step` launches at most one forward pass of the model, unless it recovers from a failure. The embedder
    has steps of its own.
    """

    def __init__(
        self,
        served: ServedModel,
        scheduler: Scheduler,
        runner: ModelRunner,
        resizer: PoolResizer,
        sampler: Sampler,
        grammars: Grammars,
        headroom: Headroom,
        clock: Callable[[], float] = time.monotonic,
        embedder: Embedder | None = None,
        no_embedder_because: str = "",
        kernels_off: str | None = None,
    ) -> None:
        self.served = served
        self.scheduler = scheduler
        self.runner = runner
        self.resizer = resizer
        self.sampler = sampler
        self.grammars = grammars
        self.headroom = headroom
        self.clock = clock
        self.embedder = embedder
        self.no_embedder_because = no_embedder_because
        self.kernels_off = kernels_off
        config = scheduler.config
        self.states = StateMemory(state_bytes(served.layers), config.max_num_seqs, config.num_checkpoints)
        self._in_flight: InFlightStep | None = None
        self.waits_for_memory = False  # whether the last step was empty: the pool has to grow, and cannot yet
        self._outputs: list[RequestOutput] = []  # of the running call of `step`
        self._prompt_chunks: tuple[PromptChunk, ...] = ()  # of the step that was processed last
        self._ids = itertools.count()
        self.requests: dict[int, RunningRequest] = {}
        self._num_by_priority = dict.fromkeys(Priority, 0)  # of them
        self._sequence_of: dict[str, int] = {}
        self._deadlines = Deadlines(scheduler)
        self._log = StepLog()
        self.device = DeviceClock()
        self._num_steps = 0
        self._num_generated_tokens = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLongError if it could never run, and GrammarError if its constraint cannot
        be enforced."""
        params = request.params
        assert params.max_tokens is not None
        matcher = None
        if params.constraint is not None:
            matcher = self.grammars.start(params.constraint, params.ignore_eos)
        runs_past_eos = params.ignore_eos and matcher is None  # a grammar allows the end token only at its end
        stop_ids = params.stop_token_ids | (frozenset() if runs_past_eos else self.served.tokenizer.eos_token_ids)
        prompt, arrival_time = request.prompt_token_ids, request.arrival_time
        sequence = Sequence(next(self._ids), prompt, params.max_tokens, stop_ids, request.priority, arrival_time)
        sequence.request_id = request.request_id
        sequence.adapter = request.adapter
        sequence.cache_seed = salted(self.served.adapters.cache_seed(request.adapter), request.cache_salt)
        parent_id = self._sequence_of.get(request.fork_of) if request.fork_of is not None else None
        parent = None if parent_id is None else self.requests[parent_id]
        sequence.fork_of = None if parent is None else parent.sequence
        set_deadlines(sequence, request)
        running = RunningRequest(request, sequence, self.served.tokenizer, matcher, parent)
        running.resume(request.resumed, self.clock())
        self.scheduler.add(sequence)
        self.requests[sequence.sequence_id] = running
        self._num_by_priority[request.priority] += 1
        self._deadlines.watch(sequence)
        self._sequence_of[request.request_id] = sequence.sequence_id

    def submit(self, requests: ListOf[Request]) -> list[RequestOutput]:
        """Queue requests that arrive together. Returns an output with an error for each request that cannot run. The
        API refuses most of these earlier."""
        refusals = []
        for request in requests:
            try:
                self.add(request)
            except Exception as error:
                if not isinstance(error, ValueError) and not is_out_of_memory(error):
                    raise
                now, reason = self.clock(), reason_of(error)
                refusals.append(RequestOutput(request.request_id, now, finish_reason=reason, error=str(error)))
        return refusals

    def embed(self, request: EmbeddingRequest) -> list[RequestOutput]:
        """Queue inputs for the embedder, which must exist. The result goes to `request.reply`, not to an output."""
        assert self.embedder is not None
        self.embedder.add(request)
        return []

    def abort(self, request_id: str, error: str | None = None) -> list[RequestOutput]:
        """End a request and free all that it holds. An unknown id is no error: the request may just have finished."""
        sequence_id = self._sequence_of.get(request_id)
        if sequence_id is None:
            return []
        return [self._end(sequence_id, FinishReason.ABORT if error is None else FinishReason.ERROR, error)]

    def abort_all(self, error: str) -> list[RequestOutput]:
        if self.embedder is not None:
            self.embedder.abort_all(error)
        return [output for request_id in list(self._sequence_of) for output in self.abort(request_id, error)]

    def cancel(self, request_ids: ListOf[str]) -> tuple[list[EndedRequest], list[RequestOutput]]:
        """Cancel requests. Returns the requests that were ended, and the last output of each. Unknown ids are skipped:
        these requests may just have finished."""
        ended = [] if self.embedder is None else self.embedder.cancel(request_ids)
        outputs = []
        for request_id in request_ids:
            sequence_id = self._sequence_of.get(request_id)
            if sequence_id is not None:
                sequence = self.requests[sequence_id].sequence
                ended.append(EndedRequest(request_id, sequence.status, sequence.num_output_tokens))
                outputs.append(self._end(sequence_id, FinishReason.CANCELLED, "the request was cancelled"))
        return ended, outputs

    def expire(self) -> list[RequestOutput]:
        """End the requests whose deadline has passed or cannot be met."""
        missed = self._deadlines.missed(self.clock())
        return [self._end(sequence_id, FinishReason.TIMEOUT, message) for sequence_id, message in missed]

    def _end(self, sequence_id: int, reason: FinishReason, error: str | None) -> RequestOutput:
        self.scheduler.finish(sequence_id, reason)
        return self._last_output(self.requests[sequence_id], error)

    # -- state and statistics ------------------------------------------------------------------------------------

    def clear_cache(self) -> int:
        """Empty the prefix cache. Running sequences keep their blocks. Returns the number of blocks that it held."""
        cache = self.scheduler.prefix_cache
        if cache is None:
            return 0
        dropped = len(cache)
        cache.clear()
        return dropped

    def status(self, max_waiting: int = MAX_WAITING_LISTED) -> EngineStatus:
        sequences = (running.sequence for running in self.requests.values())
        return engine_status(self.scheduler, sequences, self._num_steps, self.clock(), max_waiting)

    def snapshot(self) -> EngineSnapshot:
        started = time.thread_time()
        status, states = self.status(MAX_WAITING_WATCHED), self.scheduler.pool.states()
        return EngineSnapshot(status, states, time.thread_time() - started)

    def stats(self) -> EngineStats:
        return EngineStats(
            self.scheduler.stats(),
            self._num_steps,
            self.runner.model_calls,
            self.runner.attention_calls,
            self._num_generated_tokens,
            self.runner.kv_cache_bytes,
            self.resizer.bytes_of(self.scheduler.config.num_blocks),
            self.states.nbytes,
            NO_EMBEDDINGS if self.embedder is None else self.embedder.stats(),
            self._prompt_chunks,
        )

    def step_size(self) -> StepSize:
        """The size of the step that was scheduled last, and the time of all that run. The watchdog asks on its own
        thread while a step runs, so this only reads what does not change."""
        last, in_flight = self._log.batch, self._in_flight
        seconds = self.scheduler.expected_seconds(last)
        if in_flight is not None and in_flight.batch is not last and seconds is not None:
            before = self.scheduler.expected_seconds(in_flight.batch)
            seconds = None if before is None else before + seconds
        rows = last.rows if in_flight is None else [*last.rows, *in_flight.batch.rows]
        request_ids = frozenset(row.sequence.request_id for row in rows)
        return StepSize(len(last), last.num_tokens, seconds, request_ids)

    def embedding_size(self) -> StepSize | None:
        return None if self.embedder is None else self.embedder.step_size

    def has_work(self) -> bool:
        return self.scheduler.has_unfinished() or self._in_flight is not None

    def pause(self) -> float:
        """Seconds for which nothing is to be done if no command arrives."""
        if self.embeds() or self.resizer.is_resizing or (self.has_work() and not self.waits_for_memory):
            return 0.0
        longest = POLL_SECONDS if self.has_work() or self.resizer.can_shrink else REST_SECONDS
        return min(longest, max(0.0, self._deadlines.next_check - self.clock()))

    def embeds(self) -> bool:
        return self.embedder is not None and self.embedder.has_work()

    @property
    def step_bytes(self) -> int:
        """Memory of the largest step."""
        return self.resizer.step_bytes

    @property
    def weight(self) -> float:
        """Its share of the device while other models have work too, by the highest priority among its requests."""
        highest = (priority for priority, count in self._num_by_priority.items() if count)
        return WEIGHTS[next(highest, Priority.NORMAL)]

    def give_back(self) -> int:
        """Shrink the pool to what running requests and the pool's least size need. Returns the bytes that are freed."""
        try:
            self._finish_in_flight()
        except DeviceError as error:
            self._rebuild_pools(error)
        before = self.runner.kv_cache_bytes
        self.resizer.shrink_to_least()
        return before - self.runner.kv_cache_bytes

    def close(self) -> None:
        """Release the swap space, which may be a file."""
        if self.runner.swap is not None:
            self.runner.swap.close()

    # -- steps ---------------------------------------------------------------------------------------------------

    def logged_step(self) -> list[RequestOutput]:
        """`step`, with a line in the debug log."""
        started = self.clock()
        outputs = self.step()
        self._log.write(self._num_steps, self.clock() - started, self.scheduler)
        return outputs

    def step(self) -> list[RequestOutput]:
        """Schedule and launch one batch, after a part of the KV pools is resized if they are to grow or shrink. Returns
        the outputs of the step that ended.

        A request that makes its step fail ends with an error. An exception that leaves this method means that the
        engine's own state is wrong, or that a rank is lost: the engine cannot go on.
        """
        self._resize_pools()
        batch = self._schedule()
        try:
            if not self._move_blocks(batch):
                self._finish_in_flight()
                recovery.run_rows(self, batch.rows)
            elif self.runner.overlaps:
                self.overlap_step(batch)
            elif batch.rows:
                self.normal_step(batch)
        except HostError as error:
            self._isolate(batch, error)
        except DeviceError as error:
            self._rebuild_pools(error, batch)
        return self._take_outputs()

    def normal_step(self, batch: Batch) -> None:
        """Run a batch to its end: forward pass, sampler, tokens, text. No other step may be in flight."""
        step = self._launch(batch)
        self._sample(step)
        self.runner.finish_step(*step.results)
        self._process(step)

    def overlap_step(self, batch: Batch) -> None:
        """Launch the forward pass of a batch, and process the previous step's tokens while the device works.

        Sampled tokens go from one forward pass into the next on the device. Only the sampler waits for the host. The
        host then knows all earlier tokens, so grammars, forced tokens and ends of answers are exact in every step.
        """
        step = self._launch(batch, self._in_flight) if batch.rows else None
        self._finish_in_flight()
        if step is not None:
            self._sample(step)
        self._in_flight = step

    def rest(self, device_is_idle: bool) -> bool:
        """What the engine does instead of a step while it has no work: it gives back memory. Returns whether it did.
        device_is_idle: whether no other model has work."""
        self.scheduler.blocks.size.missing = 0  # no request waits for more
        self.scheduler.learn()
        return self._resize_pools(is_idle=True, device_is_idle=device_is_idle)

    def finish_in_flight_step(self) -> list[RequestOutput]:
        """Wait for the step in flight, if there is one, and process its tokens."""
        try:
            self._finish_in_flight()
        except DeviceError as error:
            self._rebuild_pools(error)
        return self._take_outputs()

    def _resize_pools(self, is_idle: bool = False, device_is_idle: bool = False) -> bool:
        """Resize a part of the KV pools if they are to grow or shrink, after the step in flight. Returns whether."""
        num_blocks = self.resizer.poll(is_idle, device_is_idle)
        if num_blocks is None and not self.resizer.is_due:
            return False
        try:
            self._finish_in_flight()
            if num_blocks is not None:
                self.resizer.shrink(num_blocks)
        except DeviceError as error:
            self._rebuild_pools(error)
        if self.resizer.is_due:
            self.resizer.advance()
        return True

    def _longest(self) -> int:
        return max((len(each.sequence.token_ids) for each in self.requests.values()), default=0)

    def _schedule(self) -> Batch:
        """The next batch. It may be empty while sequences wait for the pool to grow."""
        self.scheduler.max_tokens = self.headroom.tokens(self._longest)
        batch = self.scheduler.schedule()
        self._log.start_step(batch, self.requests, self.clock())
        if batch.rows:
            self._num_steps += 1
        nothing_runs = self.scheduler.has_unfinished() and not batch.rows and self._in_flight is None
        self.waits_for_memory = nothing_runs and not self.resizer.is_due
        if nothing_runs and not self.resizer.can_wait:
            raise RuntimeError(f"nothing can be scheduled: {self.scheduler.stats()}")
        return batch

    def _move_blocks(self, batch: Batch) -> bool:
        """Swap and copy the blocks of a batch. Returns False if that failed: sequences that need them are preempted."""
        if not batch.moves:
            return True
        try:
            self.runner.move_blocks(batch.moves)
        except RankLostError:
            raise
        except Exception as error:
            logger.exception("KV blocks could not be moved; the sequences that need them are recomputed")
            if is_out_of_memory(error):
                self.run_short(batch)
            self.scheduler.undo_moves(batch)
            self.runner.finish_step()  # raises DeviceError if the device caused the failure
            return False
        return True

    def _launch(self, batch: Batch, previous: InFlightStep | None = None) -> InFlightStep:
        """Launch the forward pass. The sampled tokens of the previous step replace the pending ones on the device."""
        started, tables = self.clock(), self.scheduler.get_block_tables(batch.sequence_ids)
        try:
            self.headroom.require(batch.num_tokens, lambda: max(row.context_len for row in batch.rows))
            running = {each.sequence_id for each in self.scheduler.running} if self.runner.is_recurrent else set()
            logits = self.runner.forward(batch, tables, None if previous is None else previous.tokens, running)
            tops = (self.requests[row.sequence.sequence_id].num_top for row in batch.rows if row.prompt_logprobs)
            top = max(tops, default=None)
            if top is not None and self.runner.tile_size is not None:
                top = max(top, INVARIANT_TOP)  # of equal logits, which are the best depends on it
            step = InFlightStep(batch, started, logits, top)
        except (DeviceError, RankLostError):
            raise
        except Exception as error:
            raise HostError from error
        self.runner.start_step(logits, *step.results)
        return step

    def _sample(self, step: InFlightStep) -> None:
        """Launch the sampler for the sequences that still run: the previous step may have ended some.

        The device may still compute the logits. The host has processed all earlier tokens of these sequences, so
        grammars, forced tokens and penalties are exact.
        """
        rows = [row for row in step.batch.rows if row.sequence.status is SequenceStatus.RUNNING]
        sampling = [row for row in rows if row.samples]
        try:
            samples = self.sampler.sample(step.logits_of(sampling), self._sampling_rows(sampling)) if sampling else None
        except Exception as error:
            raise HostError from error
        step.set_samples(rows, [row.sequence.sequence_id for row in sampling], samples)
        self.runner.start_step(*step.results)

    def _sampling_rows(self, rows: ListOf[ScheduledSequence]) -> list[SamplingRow]:
        running = [(self.requests[row.sequence.sequence_id], row.context_len) for row in rows]
        constrained = [(each.matcher, each.forbidden(at)) for each, at in running if each.matcher is not None]
        masks = iter(self.grammars.masks(constrained) if constrained else ())
        return [each.sampling_row(at, None if each.matcher is None else next(masks)) for each, at in running]

    def _finish_in_flight(self) -> None:
        if self._in_flight is not None:
            self._process(self._in_flight)
            self._in_flight = None

    def _process(self, step: InFlightStep) -> None:
        """Commit the tokens of a step, and turn them into outputs."""
        tokens, invalid, prompt_logprobs = step.read()
        now = self.clock()
        # The device began the step when it was launched, or when the previous step was done if that was later.
        self.scheduler.observe(step.batch, now - max(step.started, self.device.read_at))
        self.device.read_at = now
        self.headroom.note_success()
        self.scheduler.admits = True
        discarded: set[int] = set()
        for sequence_id in invalid & self.requests.keys():
            preempted = self.fail(self.requests[sequence_id].sequence, "the model's logits are not finite")
            for sequence in preempted:
                tokens.pop(sequence.sequence_id, None)
                discarded.add(sequence.sequence_id)
                self.sampler.forget(sequence.sequence_id)
        for row in step.rows if invalid else ():
            if row.sequence.status is SequenceStatus.SWAPPED:  # it may have shared blocks with one that failed
                self.scheduler.recompute(row.sequence)
        self.scheduler.update(Batch(step.rows), {sequence_id: token.token_id for sequence_id, token in tokens.items()})
        # A step that only decodes samples every row, and pays nothing for prompts.
        self._prompt_chunks = ()
        if prompt_logprobs or len(tokens) < len(step.rows):
            self._process_prompts(step.rows, prompt_logprobs, discarded)
        for sequence_id, token in tokens.items():
            if sequence_id in self.requests:
                self._outputs.append(self._output_of(self.requests[sequence_id], token))

    def _process_prompts(
        self, rows: ListOf[ScheduledSequence], prompt_logprobs: Mapping[int, PromptResult], discarded: set[int]
    ) -> None:
        """Commit what a step computed of prompts, except for sampled tokens. discarded: ids of preempted sequences."""
        self._prompt_chunks = prompt_chunks(rows)
        # What a sequence computed in this step is discarded too if a failure of the previous step preempted it.
        valid = {row.sequence.sequence_id for row in rows} & self.requests.keys() - discarded
        for sequence_id, (positions, computed) in prompt_logprobs.items():
            if sequence_id in valid:
                self.requests[sequence_id].add_prompt_logprobs(positions, computed)
        for row in rows:
            if row.ends_sequence and row.sequence.sequence_id in valid:
                self._outputs.append(self._end(row.sequence.sequence_id, FinishReason.LENGTH, None))

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- failures ------------------------------------------------------------------------------------------------

    def _isolate(self, batch: Batch, error: HostError) -> None:
        try:
            self._finish_in_flight()
            recovery.recover(self, batch.rows, error)
        except DeviceError as device_error:
            self._rebuild_pools(device_error, batch)

    def _rebuild_pools(self, error: DeviceError, *batches: Batch) -> None:
        if self.runner.ranks is not None:  # another rank may be in another step: only all of them can begin anew
            raise RankLostError(f"a step of several ranks failed: {error}") from error
        in_flight, self._in_flight = self._in_flight, None
        recovery.rebuild_pools(self, [*([in_flight.batch] if in_flight is not None else ()), *batches], error)

    def run_short(self, batch: Batch) -> None:
        """An allocation failed in this batch: give back memory, run smaller steps, and admit no further request until
        one succeeds."""
        self.headroom.note_failure(batch.num_tokens)
        self.resizer.run_short()
        self.scheduler.admits = False

    def fail(self, sequence: Sequence, message: str, reason: FinishReason = FinishReason.ERROR) -> list[Sequence]:
        """End a request with an error. Returns the sequences that shared blocks which the failed step should have
        written: they are preempted and recompute these blocks."""
        preempted: list[Sequence] = []
        if sequence.status is SequenceStatus.RUNNING:
            preempted = self.scheduler.fail(sequence.sequence_id, reason)
        else:  # it was preempted since then, and its published blocks can no longer be identified
            self.scheduler.finish(sequence.sequence_id, reason)
            self.clear_cache()
        self._outputs.append(self._last_output(self.requests[sequence.sequence_id], message))
        return preempted

    # -- outputs -------------------------------------------------------------------------------------------------

    def _output_of(self, running: RunningRequest, sampled: SampledToken) -> RequestOutput:
        """The output for a sampled token. If its text cannot be made, or its constraint cannot be enforced any further,
        the request ends with an error."""
        self._num_generated_tokens += 1
        running.sequence.num_step_failures = 0
        try:
            output = running.advance(sampled, self.clock())
        except GrammarError as error:
            return self._end(running.sequence.sequence_id, FinishReason.CONSTRAINT, str(error))
        except Exception as error:
            logger.exception("token %d of %s cannot be decoded to text", sampled.token_id, running.request.request_id)
            message = f"a token cannot be decoded to text: {type(error).__name__}: {error}"
            return self._end(running.sequence.sequence_id, reason_of(error), message)
        if output.finish_reason is not None:
            self.scheduler.finish(running.sequence.sequence_id, output.finish_reason)
            self._release(running)
        return output

    def _last_output(self, running: RunningRequest, error: str | None) -> RequestOutput:
        """The last output of a request that ended without completing its answer."""
        self._release(running)
        return running.output(self.clock(), running.sequence.finish_reason, error=error)

    def _release(self, running: RunningRequest) -> None:
        sequence_id = running.sequence.sequence_id
        del self.requests[sequence_id]
        self._num_by_priority[running.request.priority] -= 1
        del self._sequence_of[running.request.request_id]
        self._deadlines.forget(sequence_id)
        self.sampler.forget(sequence_id)


def reason_of(error: Exception) -> FinishReason:
    """How a request ends because of this error."""
    return FinishReason.MEMORY if is_out_of_memory(error) else FinishReason.ERROR
