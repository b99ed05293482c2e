"""The requests inside an engine: takes them, ends them, and turns their tokens into outputs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf

from mlxpaged.core.blocks.prefix_cache import salted
from mlxpaged.core.engine.constraint import GrammarError
from mlxpaged.core.engine.deadlines import Deadlines, set_deadlines
from mlxpaged.core.engine.matcher import Matchers
from mlxpaged.core.engine.part import Part
from mlxpaged.core.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.engine.sampler import SampledToken, Sampler
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import FinishReason, Priority, Sequence, SequenceStatus
from mlxpaged.library_errors import public_reason
from mlxpaged.models.loader import ServedModel
from mlxpaged.process_memory import is_out_of_memory

logger = logging.getLogger(__name__)

WEIGHTS = {Priority.HIGH: 4.0, Priority.NORMAL: 2.0, Priority.LOW: 1.0}
"""A model gets device time in proportion to these while others have work."""


class RequestTable:
    """The requests that have not ended, in the scheduler and as text.

    by_sequence: the requests by their sequences' ids. clock: seconds. parts: are told of each sequence, and may let it
    wait. outputs: of the running step; `take_outputs` empties it.
    """

    def __init__(
        self,
        served: ServedModel,
        scheduler: Scheduler,
        grammars: Matchers,
        sampler: Sampler,
        clock: Callable[[], float],
        parts: ListOf[Part] = (),
    ) -> None:
        self._parts = parts
        self._served = served
        self._scheduler = scheduler
        self._grammars = grammars
        self._clock = clock
        self._sampler = sampler
        self.by_sequence: dict[int, RunningRequest] = {}
        self.outputs: list[RequestOutput] = []
        self.num_generated_tokens = 0
        self._ids = itertools.count()
        self._sequence_of: dict[str, int] = {}
        self._num_by_priority = dict.fromkeys(Priority, 0)
        self._deadlines = Deadlines(scheduler)

    @property
    def weight(self) -> float:
        """The share of the device while other models have work too, by the highest priority among the requests."""
        highest = (priority for priority, count in self._num_by_priority.items() if count)
        return WEIGHTS[next(highest, Priority.NORMAL)]

    @property
    def next_check(self) -> float:
        """When `expire` has something to do; inf if never."""
        return self._deadlines.next_check

    def take_outputs(self) -> list[RequestOutput]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLongError if it could never run, and GrammarError if its constraint cannot
        be enforced."""
        params = request.params
        assert params.max_tokens is not None
        matcher = None
        if params.constraint is not None:
            matcher = self._grammars.start(params.constraint, params.ignore_eos)
        runs_past_eos = params.ignore_eos and matcher is None  # a grammar allows the end token only at its end
        stop_ids = params.stop_token_ids | (frozenset() if runs_past_eos else self._served.tokenizer.eos_token_ids)
        prompt, arrival_time = request.prompt_token_ids, request.arrival_time
        sequence = Sequence(next(self._ids), prompt, params.max_tokens, stop_ids, request.priority, arrival_time)
        sequence.request_id, sequence.client = request.request_id, request.client
        sequence.adapter = request.adapter
        sequence.cache_seed = salted(self._served.adapters.cache_seed(request.adapter), request.cache_salt)
        parent_id = self._sequence_of.get(request.fork_of) if request.fork_of is not None else None
        parent = None if parent_id is None else self.by_sequence[parent_id]
        sequence.fork_of = None if parent is None else parent.sequence
        set_deadlines(sequence, request)
        running = RunningRequest(request, sequence, self._served.tokenizer, matcher, parent)
        running.resume(request.resumed, self._clock())
        try:
            for part in self._parts:
                part.admit(request, sequence)
            self._scheduler.add(sequence, [wait for part in self._parts if (wait := part.wait_of(request, sequence))])
        except BaseException:
            self._forget(sequence.sequence_id)
            raise
        self.by_sequence[sequence.sequence_id] = running
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
                now, reason = self._clock(), reason_of(error)
                refusals.append(RequestOutput(request.request_id, now, finish_reason=reason, error=str(error)))
        return refusals

    def abort(self, request_id: str, error: str | None = None) -> list[RequestOutput]:
        """End a request and free all that it holds. An unknown id is no error: the request may just have finished."""
        sequence_id = self._sequence_of.get(request_id)
        if sequence_id is None:
            return []
        return [self.end(sequence_id, FinishReason.ABORT if error is None else FinishReason.ERROR, error)]

    def abort_all(self, error: str) -> list[RequestOutput]:
        return [output for request_id in list(self._sequence_of) for output in self.abort(request_id, error)]

    def cancel(self, request_ids: ListOf[str]) -> tuple[list[EndedRequest], list[RequestOutput]]:
        """Cancel requests. Returns the requests that were ended, and the last output of each. Unknown ids are skipped:
        these requests may just have finished."""
        ended, outputs = [], []
        for request_id in request_ids:
            sequence_id = self._sequence_of.get(request_id)
            if sequence_id is not None:
                sequence = self.by_sequence[sequence_id].sequence
                ended.append(EndedRequest(request_id, sequence.status, sequence.num_output_tokens))
                outputs.append(self.end(sequence_id, FinishReason.CANCELLED, "the request was cancelled"))
        return ended, outputs

    def expire(self) -> list[RequestOutput]:
        """End the requests whose deadline has passed or cannot be met."""
        missed = self._deadlines.missed(self._clock())
        return [self.end(sequence_id, FinishReason.TIMEOUT, message) for sequence_id, message in missed]

    def end(self, sequence_id: int, reason: FinishReason, error: str | None) -> RequestOutput:
        """End a request that has not completed its answer. Returns its last output."""
        self._scheduler.finish(sequence_id, reason)
        return self._last_output(self.by_sequence[sequence_id], error)

    def complete(self, sequence_id: int, cause: str) -> RequestOutput:
        """End an answer, although its model would have gone on. All of its known tokens must have become text. Returns
        its last output, with the text that was held back. cause: as in RequestOutput."""
        running = self.by_sequence[sequence_id]
        output = running.complete(self._clock(), cause)
        assert output.finish_reason is not None
        self._scheduler.finish(sequence_id, output.finish_reason)
        self._release(running)
        return output

    def end_held(self, sequence: Sequence, reason: FinishReason, error: str) -> None:
        """End a request that has not run yet, with an error."""
        self.outputs.append(self.end(sequence.sequence_id, reason, error))

    def fail(self, sequence: Sequence, message: str, reason: FinishReason = FinishReason.ERROR) -> list[Sequence]:
        """End a request with an error. Returns the sequences that shared blocks which the failed step should have
        written: they are preempted and recompute these blocks."""
        preempted: list[Sequence] = []
        if sequence.status is SequenceStatus.RUNNING:
            preempted = self._scheduler.fail(sequence.sequence_id, reason)
        else:  # it was preempted since then, and its published blocks can no longer be identified
            self._scheduler.finish(sequence.sequence_id, reason)
            self._scheduler.clear_cache()
        self.outputs.append(self._last_output(self.by_sequence[sequence.sequence_id], message))
        return preempted

    def advance(self, tokens: Mapping[int, ListOf[SampledToken]]) -> None:
        """Make the outputs of sampled tokens, by sequence id, of the requests that have not ended."""
        for sequence_id, sampled in tokens.items():
            for token in sampled:
                if (running := self.by_sequence.get(sequence_id)) is not None:
                    self.outputs.append(self._output_of(running, token))

    def _output_of(self, running: RunningRequest, sampled: SampledToken) -> RequestOutput:
        """The output for a sampled token. If its text cannot be made, or its constraint cannot be enforced any further,
        the request ends with an error."""
        self.num_generated_tokens += 1
        running.sequence.num_step_failures = 0
        try:
            output = running.advance(sampled, self._clock())
        except GrammarError as error:
            return self.end(running.sequence.sequence_id, FinishReason.CONSTRAINT, str(error))
        except Exception as error:
            logger.exception("token %d of %s cannot be decoded to text", sampled.token_id, running.request.request_id)
            message = f"a token cannot be decoded to text: {type(error).__name__}: {public_reason(error)}"
            return self.end(running.sequence.sequence_id, reason_of(error), message)
        if output.finish_reason is not None:
            self._scheduler.finish(running.sequence.sequence_id, output.finish_reason)
            self._release(running)
        return output

    def _last_output(self, running: RunningRequest, error: str | None) -> RequestOutput:
        self._release(running)
        return running.output(self._clock(), running.sequence.finish_reason, error=error)

    def _release(self, running: RunningRequest) -> None:
        sequence_id = running.sequence.sequence_id
        del self.by_sequence[sequence_id]
        self._num_by_priority[running.request.priority] -= 1
        del self._sequence_of[running.request.request_id]
        self._deadlines.forget(sequence_id)
        self._forget(sequence_id)

    def _forget(self, sequence_id: int) -> None:
        self._sampler.forget(sequence_id)
        for part in self._parts:
            part.forget(sequence_id)


def reason_of(error: Exception) -> FinishReason:
    """How a request ends because of this error."""
    return FinishReason.MEMORY if is_out_of_memory(error) else FinishReason.ERROR
