"""The engine without its thread: requests in, one step at a time, outputs out."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as ListOf

from mlxpaged.attention import Limits, choose_backend, choose_tunings
from mlxpaged.cache import blocks_for
from mlxpaged.engine.config import EngineConfig
from mlxpaged.engine.deadlines import Deadlines
from mlxpaged.engine.embedder import NO_EMBEDDINGS, Embedder
from mlxpaged.engine.grammar import Grammars
from mlxpaged.engine.memory import kv_blocks, swap_slots
from mlxpaged.engine.model_runner import ModelRunner
from mlxpaged.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.engine.running_request import RunningRequest
from mlxpaged.engine.sampler import SampledToken, Sampler
from mlxpaged.engine.status import EngineStats, EngineStatus, engine_status
from mlxpaged.engine.step import InFlightStep, StepDispatcher
from mlxpaged.engine.step_log import StepLog
from mlxpaged.models import ServedModel
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.scheduler import (
    Batch,
    FinishReason,
    ScheduledSequence,
    Scheduler,
    Sequence,
    SequenceStatus,
)

logger = logging.getLogger(__name__)


class EngineCore:
    """Everything that runs on the engine thread. One call of `step` is one forward pass of the model.

    clock: seconds; that of the arrival times of requests. embedder: None where no model makes embeddings; it has steps
    of its own."""

    def __init__(
        self,
        config: EngineConfig,
        served: ServedModel,
        clock: Callable[[], float] = time.monotonic,
        embedder: Embedder | None = None,
        no_embedder_because: str = "",
    ) -> None:
        per_block = bytes_per_token(served.layers) * config.block_size
        per_sequence = blocks_for(served.context_length, config.block_size)
        reserved = 0 if embedder is None else embedder.model.kv_bytes
        num_blocks = kv_blocks(per_block, config.kv_cache_bytes, per_sequence, config.max_num_seqs, reserved)
        kv_type = ",".join(sorted({str(spec.dtype) for spec in served.layers}))
        self.served = served
        self.clock = clock
        self.embedder = embedder
        self.no_embedder_because = no_embedder_because
        self.kv_cache_bytes = num_blocks * per_block
        slots = swap_slots(per_block, config.swap_space_bytes) if config.swap_space_bytes else 0
        seed = f"{served.name}|{kv_type}".encode()
        self.scheduler = Scheduler(config.scheduler_config(num_blocks, slots, seed), clock)
        shapes = [spec.attention_shape(config.block_size) for spec in served.layers]
        backend = choose_backend(config.attention_backend, shapes)
        limits = Limits(served.context_length, config.max_num_seqs)
        tunings = choose_tunings(backend, config.attention_tuning, shapes, limits, config.retune)
        self.runner = ModelRunner(served, num_blocks, config.block_size, backend, tunings, slots, config.swap_dir)
        self.sampler = Sampler(served.vocab_size)
        self.grammars = Grammars(served.tokenizer, served.vocab_size)
        self._dispatcher = StepDispatcher(self.runner, self.sampler, self.grammars, clock)
        self._ids = itertools.count()
        self._requests: dict[int, RunningRequest] = {}
        self._sequence_of: dict[str, int] = {}
        self._under_way: InFlightStep | None = None
        self._steps = 0
        self._generated = 0
        self._deadlines = Deadlines()
        self._log = StepLog()
        self._read_at = -math.inf  # the last overlapped step's tokens

    def add(self, request: Request) -> None:
        """Queue a request that fits the context and the pool. Raises PromptTooLongError where it does not, and
        GrammarError for a constraint that cannot be enforced."""
        params = request.params
        assert params.max_tokens is not None
        matcher = None
        if params.constraint is not None:
            matcher = self.grammars.start(params.constraint, params.ignore_eos)
        runs_past_eos = params.ignore_eos and matcher is None  # with a grammar, it is drawn only at the very end
        stop_ids = params.stop_token_ids | (frozenset() if runs_past_eos else self.served.tokenizer.eos_token_ids)
        sequence = Sequence(
            next(self._ids),
            request.prompt_token_ids,
            params.max_tokens,
            stop_ids,
            request.priority,
            request.arrival_time,
        )
        sequence.request_id = request.request_id
        parent = self._sequence_of.get(request.fork_of) if request.fork_of is not None else None
        sequence.fork_of = None if parent is None else self._requests[parent].sequence
        sequence.needs_last_token = matcher is not None
        self.scheduler.add(sequence)
        self._requests[sequence.sequence_id] = RunningRequest(request, sequence, self.served.tokenizer, matcher)
        self._deadlines.watch(sequence.sequence_id, request)
        self._sequence_of[request.request_id] = sequence.sequence_id

    def refusal(self, request: Request, error: str) -> RequestOutput:
        """The only output of a request that `add` would not take."""
        return RequestOutput(request.request_id, self.clock(), finish_reason=FinishReason.ERROR, error=error)

    def abort(self, request_id: str, error: str | None = None) -> list[RequestOutput]:
        """End a request and free all it holds; an unknown id (it may just have finished) is no error."""
        sequence_id = self._sequence_of.get(request_id)
        if sequence_id is None:
            return []
        return [self._end(sequence_id, FinishReason.ABORT if error is None else FinishReason.ERROR, error)]

    def abort_all(self, error: str) -> list[RequestOutput]:
        if self.embedder is not None:
            self.embedder.abort_all(error)
        return [output for request_id in list(self._sequence_of) for output in self.abort(request_id, error)]

    def cancel(self, request_ids: ListOf[str]) -> tuple[list[EndedRequest], list[RequestOutput]]:
        """End requests on somebody's word. What was ended, and the last output of each; ids that are unknown, because
        they have just finished, are passed over."""
        ended = [] if self.embedder is None else self.embedder.cancel(request_ids)
        outputs = []
        for request_id in request_ids:
            sequence_id = self._sequence_of.get(request_id)
            if sequence_id is not None:
                sequence = self._requests[sequence_id].sequence
                ended.append(EndedRequest(request_id, sequence.status, sequence.num_output_tokens))
                outputs.append(self._end(sequence_id, FinishReason.CANCELLED, "the request was cancelled"))
        return ended, outputs

    def expire(self) -> list[RequestOutput]:
        """End the requests whose deadline has passed."""
        now, outputs = self.clock(), []
        for deadline in self._deadlines.pop_passed(now):
            running = self._requests[deadline.sequence_id]
            if not (deadline.of_first_token and running.sequence.num_output_tokens > 0):
                message = deadline.message(running.sequence, now)
                outputs.append(self._end(deadline.sequence_id, FinishReason.TIMEOUT, message))
        return outputs

    def _end(self, sequence_id: int, reason: FinishReason, error: str | None) -> RequestOutput:
        """In whatever state it is."""
        self.scheduler.finish(sequence_id, reason)
        return self._forget(self._requests[sequence_id], error)

    def clear_cache(self) -> int:
        """Empty the prefix cache; running sequences keep their blocks. Returns the number of blocks that were in it."""
        cache = self.scheduler.prefix_cache
        if cache is None:
            return 0
        dropped = len(cache)
        cache.clear()
        return dropped

    def status(self) -> EngineStatus:
        sequences = ((running.request.request_id, running.sequence) for running in self._requests.values())
        return engine_status(self.scheduler, sequences, self._steps, self.clock())

    def logged_step(self) -> list[RequestOutput]:
        """`step`, with a line in the debug log."""
        started = self.clock()
        outputs = self.step()
        if self._log.wants_line():
            self._log.write(self._steps, self.clock() - started, self.scheduler.stats())
        return outputs

    def has_work(self) -> bool:
        return self.scheduler.has_unfinished() or self._under_way is not None

    def step(self) -> list[RequestOutput]:
        """Run one batch. A failing forward pass ends the requests that cause it; everything else raised here means that
        the engine's own books are wrong, and is for the caller to treat as the end of the engine."""
        batch = self.scheduler.schedule()
        self._log.start_step(batch, self._requests, self.clock())
        if batch.rows:
            self._steps += 1
        elif self._under_way is None:
            raise RuntimeError(f"nothing can be scheduled: {self.scheduler.stats()}")
        if batch.moves and not self._move(batch):
            return self.finish_in_flight_step() + self._plain_step(batch)
        if any(self._may_force(row) for row in batch.rows):
            return self.finish_in_flight_step() + self._plain_step(batch)
        return self._overlapped_step(batch) if self.runner.overlaps else self._plain_step(batch)

    def _may_force(self, row: ScheduledSequence) -> bool:
        """Whether the token of this step may turn out to be forced, which no step behind it can know in time."""
        thinking = self._requests[row.sequence.sequence_id].thinking
        return thinking is not None and thinking.may_force_after_next()

    def _force(self, tokens: dict[int, SampledToken]) -> None:
        """In place of those drawn, the tokens that have to come."""
        for sequence_id in tokens:
            running = self._requests.get(sequence_id)
            forced = running.forced() if running is not None else None
            if forced is not None:
                tokens[sequence_id] = SampledToken(forced)
                self.sampler.forget(sequence_id)  # the token drawn is among its counts

    def _plain_step(self, batch: Batch) -> list[RequestOutput]:
        """Run a batch to its end."""
        failures: list[RequestOutput] = []
        tokens = self._run(batch.rows, failures)
        for row in batch.rows:
            if row.sequence.status is SequenceStatus.PREEMPTED and row.sequence.sequence_id in tokens:
                del tokens[row.sequence.sequence_id]  # its values were lost after it had run: it runs again
                self.sampler.forget(row.sequence.sequence_id)
        self._force(tokens)
        return failures + self._settle(batch, tokens)

    def _overlapped_step(self, batch: Batch) -> list[RequestOutput]:
        """Start a batch, then end the one before it: its tokens are read and turned into text behind the device's work.

        The tokens go from one step into the next on the device. A sequence that turns out to have ended has a row in
        the step that was started already; what it draws is dropped. Where a step fails, both are run again, one after
        the other, to find out which request is to blame.
        """
        before = self._under_way
        try:
            self._under_way = self._dispatch(batch, before) if batch.rows else None
            tokens = {} if before is None else before.read()
        except Exception:
            return self._repeat([*([before.batch] if before else ()), batch])
        return [] if before is None else self._settle_overlapped(before, tokens)

    def finish_in_flight_step(self) -> list[RequestOutput]:
        """Wait for the step that the device works on, if it does."""
        before, self._under_way = self._under_way, None
        if before is None:
            return []
        try:
            tokens = before.read()
        except Exception:
            return self._repeat([before.batch])
        return self._settle_overlapped(before, tokens)

    def _repeat(self, batches: ListOf[Batch]) -> list[RequestOutput]:
        """Run batches of which one failed under way.

        What a sequence computed that gave way or ended since then is not computed again by that: its blocks may be
        somebody else's by now, and those that it published are findable without ever having been written. Then
        everything starts over.
        """
        logger.exception("a step failed, it is run again")
        self._under_way = None
        rows = [row for batch in batches for row in batch.rows]
        for row in rows:
            self.sampler.forget(row.sequence.sequence_id)  # the tokens of failed steps are among its counts
        outputs = []
        if not self.runner.recover():
            message = "the step failed and the KV pools were lost"
            outputs = [self._fail(row, message) for row in rows if not row.sequence.finish_reason]
            self._lose_pools()
        elif any(row.sequence.status is not SequenceStatus.RUNNING for row in rows):
            self.scheduler.reset_cache()
        for row in rows:
            if row.sequence.status in (SequenceStatus.PREEMPTED, SequenceStatus.SWAPPED):
                self.scheduler.start_over(row.sequence)
        return outputs + [output for batch in batches for output in self._plain_step(batch)]

    def _move(self, batch: Batch) -> bool:
        """Swap and copy blocks for a batch. False where that failed: whoever needs them starts over."""
        try:
            self.runner.move_blocks(batch.moves)
            return True
        except Exception:
            logger.exception("KV blocks could not be moved, they are computed again")
            intact = self.runner.recover()
            self.scheduler.undo_moves(batch)
            if not intact:
                self._lose_pools()
            return False

    def _settle_overlapped(self, step: InFlightStep, tokens: dict[int, SampledToken]) -> list[RequestOutput]:
        """The device began with the step once it was sent, and the one before was done."""
        now = self.clock()
        self.scheduler.observe(step.batch, now - max(step.started, self._read_at))
        self._read_at = now
        return self._settle(step.batch, tokens)

    def _settle(self, batch: Batch, tokens: dict[int, SampledToken]) -> list[RequestOutput]:
        """Book the tokens of a batch that is done, and make text of them."""
        token_ids = {sequence_id: token.token_id for sequence_id, token in tokens.items()}
        self.scheduler.update(batch, token_ids)
        alive = [(self._requests[number], token) for number, token in tokens.items() if number in self._requests]
        return [self._output_of(running, token) for running, token in alive]

    def close(self) -> None:
        """Give back what lies outside the process's memory, or as much as it."""
        self.runner.close()

    def stats(self) -> EngineStats:
        return EngineStats(
            self.scheduler.stats(),
            self._steps,
            self.runner.model_calls,
            self.runner.attention_calls,
            self._generated,
            NO_EMBEDDINGS if self.embedder is None else self.embedder.stats(),
        )

    def _run(self, rows: ListOf[ScheduledSequence], failures: list[RequestOutput]) -> dict[int, SampledToken]:
        """Sampled tokens by sequence id, of the given rows of a step's batch.

        Rows that fail together are run again in halves, down to the request that causes it: writing the same keys and
        values twice changes nothing, and nobody is lost for a neighbour's failure.
        """
        rows = [row for row in rows if row.sequence.status is SequenceStatus.RUNNING]
        if not rows:
            return {}
        try:
            step = self._dispatch(Batch(tuple(rows)))
            self.runner.finish_step(*step.results)
            tokens = step.read()
            self.scheduler.observe(step.batch, self.clock() - step.started)
            return tokens
        except Exception as error:
            logger.exception("a step of %s failed", ", ".join(row.sequence.request_id for row in rows))
            for row in rows:
                self.sampler.forget(row.sequence.sequence_id)
            intact = self.runner.recover()
            if len(rows) == 1 or not intact:
                message = f"the step failed: {type(error).__name__}: {error}"
                failures += [self._fail(row, message) for row in rows if not row.sequence.finish_reason]
                if not intact:
                    self._lose_pools()
                return {}
        half = len(rows) // 2
        return {**self._run(rows[:half], failures), **self._run(rows[half:], failures)}

    def _dispatch(self, batch: Batch, before: InFlightStep | None = None) -> InFlightStep:
        tables = self.scheduler.get_block_tables(batch.sequence_ids)
        return self._dispatcher.dispatch(batch, tables, self._requests, before)

    def _lose_pools(self) -> None:
        logger.error("the KV pools were lost: every running sequence starts over")
        self.scheduler.reset_cache()

    def _fail(self, row: ScheduledSequence, message: str) -> RequestOutput:
        sequence_id = row.sequence.sequence_id
        if row.sequence.status is SequenceStatus.RUNNING:
            self.scheduler.fail(sequence_id)
        else:  # preempted, because it shared blocks with a row that failed just before
            self.scheduler.finish(sequence_id, FinishReason.ERROR)
        return self._forget(self._requests[sequence_id], message)

    def _output_of(self, running: RunningRequest, sampled: SampledToken) -> RequestOutput:
        """Text is a matter of one request: where making it fails, that request ends."""
        self._generated += 1
        try:
            output = running.advance(sampled, self.clock())
        except Exception as error:
            logger.exception("no text for token %d of %s", sampled.token_id, running.request.request_id)
            if running.sequence.finish_reason is None:
                self.scheduler.finish(running.sequence.sequence_id, FinishReason.ERROR)
            running.sequence.finish_reason = FinishReason.ERROR
            return self._forget(running, f"no text could be made: {type(error).__name__}: {error}")
        if output.finish_reason is not None:
            if running.sequence.finish_reason is None:
                self.scheduler.finish(running.sequence.sequence_id, FinishReason.STOP)
            self._release(running)
        return output

    def _forget(self, running: RunningRequest, error: str | None) -> RequestOutput:
        """The last output of a request that ended without completing its answer."""
        self._release(running)
        return running.output(self.clock(), running.sequence.finish_reason, error=error)

    def _release(self, running: RunningRequest) -> None:
        sequence_id = running.sequence.sequence_id
        del self._requests[sequence_id]
        del self._sequence_of[running.request.request_id]
        self._deadlines.forget(sequence_id)
        self._log.forget(sequence_id)
        self.sampler.forget(sequence_id)
