"""What becomes of the results of a step: tokens are committed, and become text and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf

from mlxpaged.core.engine.in_flight import InFlightStep, PromptResult
from mlxpaged.core.engine.part import Part
from mlxpaged.core.engine.prompt_progress import PromptChunk, prompt_chunks
from mlxpaged.core.engine.recovery import Recovery
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.engine.sampler import SampledToken
from mlxpaged.core.engine.worker import DeviceClock
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.core.step import Row, Step


class Results:
    """Belongs to the engine thread. clock: seconds. prompt_chunks: of the step that was processed last. num_prefilled:
    tokens that were computed and not sampled from."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: RequestTable,
        recovery: Recovery,
        parts: ListOf[Part],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._recovery = recovery
        self._parts = parts
        self._clock = clock
        self._undelivered: dict[int, list[SampledToken]] = {}  # by sequence: tokens that are committed
        self.device = DeviceClock()
        self.prompt_chunks: tuple[PromptChunk, ...] = ()
        self.num_prefilled = 0

    def join(self, device: DeviceClock) -> None:
        """Share the device with other models."""
        self.device = device

    def deliver(self) -> None:
        """Turn committed tokens into outputs."""
        tokens, self._undelivered = self._undelivered, {}
        self._requests.advance(tokens)

    def process(self, step: InFlightStep, delivers: bool = True) -> None:
        """Commit the tokens of a step, and turn them into outputs. delivers: whether all at once; otherwise those that
        can wait are left to `deliver`. Raises DeviceError."""
        self.deliver()  # the tokens before these
        tokens, invalid, prompt_logprobs = step.read()
        for part in self._parts:
            tokens = part.accept(step.rows, tokens)
        self._note_time(step)
        self._scheduler.resume_admission()
        discarded = self._recovery.fail_invalid(step.rows, invalid) if invalid else set[int]()
        for sequence_id in discarded:
            tokens.pop(sequence_id, None)
        token_ids = {sequence_id: [token.token_id for token in sampled] for sequence_id, sampled in tokens.items()}
        self._scheduler.update(Step(step.rows), token_ids)
        self.num_prefilled += sum(len(row.token_ids) - row.num_sampled for row in step.rows)
        if invalid:
            self.discard()
        # A step that only decodes samples every row, and pays nothing for prompts.
        self.prompt_chunks = ()
        if prompt_logprobs or len(tokens) < len(step.rows):
            self._process_prompts(step.rows, prompt_logprobs, discarded)
        if not delivers:
            self._undelivered = {each: found for each, found in tokens.items() if self._can_wait(each, found)}
        self._requests.advance({each: found for each, found in tokens.items() if each not in self._undelivered})
        for part in self._parts:
            part.committed(step, tokens)

    def discard(self) -> None:
        """What was computed lately may be wrong."""
        for part in self._parts:
            part.discard()

    def _note_time(self, step: InFlightStep) -> None:
        """The device began the step when it was launched, or when the previous step was done if that was later."""
        now = self._clock()
        if step.is_usual:
            seconds = now - max(step.started, self.device.read_at)
            for part in self._parts:
                part.timed(step.scheduled, seconds)
            self._scheduler.times.observe(step.scheduled, seconds)
        self.device.note_read(now)

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

    def _can_wait(self, sequence_id: int, sampled: ListOf[SampledToken]) -> bool:
        """Whether the next step can be launched before the text of these tokens is made: no grammar or limit on
        thinking follows them, and they do not end the answer. If a stop string ends it, the next step's are dropped."""
        running = self._requests.by_sequence.get(sequence_id)
        if running is None or running.matcher is not None or running.thinking is not None:
            return False
        sequence = running.sequence
        ends = sequence.finish_reason_after(sampled[-1].token_id, sequence.num_output_tokens)
        return ends is None and sequence.num_step_failures == 0
