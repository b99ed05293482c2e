"""One sequence of tokens in the engine, and the states it may be in."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListOf
from enum import Enum, IntEnum

from mlxpaged.core.scheduling.sequence_kv import SequenceKV
from mlxpaged.core.scheduling.wait import Wait
from mlxpaged.core.step import PENDING, Row


class Priority(IntEnum):
    """Lower is served first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


AGING_RATE = 0.1
"""Priority classes per second of age. After 10 s a sequence is equal to a new one of the next higher class."""


class SequenceStatus(Enum):
    """WAITING has never run. PREEMPTED ran and lost its blocks; SWAPPED ran and has their contents in swap space. All
    three wait for admission to RUNNING."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


class FinishReason(str, Enum):
    """Why a sequence ended. STOP: end of sequence, stop token or stop string. LENGTH: max_tokens reached. ABORT: the
    client disconnected. CANCELLED: by request. TIMEOUT: a deadline passed or cannot be met. CONSTRAINT: the request's
    constraint cannot be enforced any further. MEMORY: an allocation failed. ERROR: another failure."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    CONSTRAINT = "constraint"
    MEMORY = "memory"
    ERROR = "error"


LEGAL_TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.PREEMPTED, SequenceStatus.SWAPPED, SequenceStatus.FINISHED}),
    SequenceStatus.SWAPPED: frozenset({SequenceStatus.RUNNING, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


class IllegalTransitionError(RuntimeError):
    """The state machine has no such transition."""


class Sequence:
    """Tokens, progress and blocks of one request. Each field has one writer, named below.

    The last token of a decoding sequence was sampled but has not been run through the model. So exactly one token is
    uncomputed. A token that a step in flight samples is in `token_ids` as PENDING. With max_tokens 0, the sequence ends
    when its prompt is computed, and no token is sampled.
    """

    def __init__(
        self,
        sequence_id: int,
        prompt_token_ids: list[int],
        max_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        priority: Priority = Priority.NORMAL,
        arrival_time: float = 0.0,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError("a prompt needs at least one token")
        if max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, got {max_tokens}")
        # Written by the engine, before it adds the sequence to the scheduler.
        self.sequence_id = sequence_id
        self.request_id = ""  # for the log
        self.adapter: str | None = None  # that computes it; None: the model without one
        self.cache_seed = b""  # what its KV depends on beside its tokens and the model
        self.shifts: ListOf[tuple[int, int]] = ()  # see Row
        self.spans: ListOf[tuple[int, int]] = ()  # (start, end) of the images whose tokens see one another, in order
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self.priority = priority
        self.client = ""  # whose request it is: none keeps all blocks and slots from another one
        self.arrival_time = arrival_time  # seconds on the scheduler's clock, as are the deadlines
        self.ttft_deadline = math.inf  # of the first token
        self.deadline = math.inf  # of the complete answer
        self.fork_of: Sequence | None = None  # a sequence with the same prompt, whose blocks this one shares
        # Written by the engine, while it runs.
        self.drafts: ListOf[int] = ()  # tokens that may come next, to be verified in the next step
        self.num_step_failures = 0  # since its last sampled token, of steps that cannot be repeated
        # The first prompt token whose logits are still wanted, for prompt log-probabilities; None if none are. It and
        # all tokens after it must be computed: the prefix cache has no logits.
        self.logits_from: int | None = None
        # Written by the scheduler.
        self.waits: list[Wait] = []  # what is left of it before the sequence is queued, in order
        self.token_ids = list(prompt_token_ids)
        self.num_pending_tokens = 0
        self.num_computed_tokens = 0  # leading tokens with KV in its blocks, those of the steps in flight included
        self.num_committed_tokens = 0  # leading tokens with KV in its blocks, those of the steps in flight excluded
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when it was first admitted
        self.num_preemptions = 0
        self.skipped_steps = 0  # steps in a row that had no room for it
        self.steps_shut_out = 0  # steps in which it was the first of a client that had none running
        self.admitted_by_starvation_bound = False  # and not preempted since
        self.arrival_number = -1
        self.finish_reason: FinishReason | None = None
        self._status = SequenceStatus.WAITING
        self.order = (0.0, -1)  # position among all sequences, the smallest first
        self.has_queued_deadline = False  # when it was added to the waiting queue
        self.turn = 0.0  # its next deadline then; without one, when it takes a turn of its class
        self.kv = SequenceKV()  # written by the block manager

    @property
    def label(self) -> str:
        return label(self.sequence_id, self.request_id)

    def __repr__(self) -> str:
        progress = f"{self.num_computed_tokens}/{len(self.token_ids)}"
        return f"Sequence({self.sequence_id}, {self._status.value}, {progress} computed)"

    def effective_priority(self, now: float) -> float:
        """Class minus AGING_RATE times age. The lowest is served first."""
        return self.priority - AGING_RATE * (now - self.arrival_time)

    def describe_priority(self, now: float) -> str:
        """Its priority, for the log."""
        return (
            f"priority {self.priority.name}, effective {self.effective_priority(now):.2f}, "
            f"{now - self.arrival_time:.1f} s old, preempted {self.num_preemptions} times"
        )

    @property
    def next_deadline(self) -> float:
        """The earliest deadline that it can still meet. math.inf if it has none."""
        return self.deadline if self.num_output_tokens else min(self.ttft_deadline, self.deadline)

    @property
    def status(self) -> SequenceStatus:
        return self._status

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids) - self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def awaits_last_step(self) -> bool:
        """Whether nothing is left to schedule: the pending token is the last one that max_tokens allows, or there is
        to be none and the whole prompt is computed."""
        if self.max_tokens == 0:
            return self.num_uncomputed_tokens == 0
        return len(self.token_ids) - self.num_prompt_tokens >= self.max_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV it can have. The last token of an answer is never run through the model."""
        return self.num_prompt_tokens + max(1, self.max_tokens) - 1

    def prompt_end(self, block_size: int) -> int:
        """Tokens up to the last whole block of the prompt: there, other prompts part from it."""
        return (self.num_prompt_tokens - 1) // block_size * block_size

    def transition(self, to: SequenceStatus) -> None:
        """Raises IllegalTransitionError if the state machine has no such edge."""
        if to not in LEGAL_TRANSITIONS[self._status]:
            raise IllegalTransitionError(
                f"sequence {self.sequence_id} cannot go from {self._status.value} to {to.value}"
            )
        self._status = to
        if to is not SequenceStatus.RUNNING:  # it holds no blocks
            self.num_computed_tokens = self.num_committed_tokens = 0

    def has_logits(self, end: int) -> None:
        """A step has computed the logits of the first `end` tokens of the prompt that are wanted."""
        self.logits_from = None if end == self.num_prompt_tokens else end - 1

    def ends_after(self, row: Row) -> bool:
        """Whether it is complete with this row: max_tokens is 0, and the row has the prompt's last token."""
        return self.max_tokens == 0 and row.context_len == self.num_prompt_tokens

    def compute(self, num_tokens: int, num_drafts: int = 0) -> int:
        """A scheduled step computes its next tokens, and as many drafts after its last one. Returns how many tokens the
        step samples after them: PENDING is appended for each."""
        end = self.num_computed_tokens = self.num_computed_tokens + num_tokens
        if end < len(self.token_ids) or not self.max_tokens:
            return 0
        self.num_computed_tokens += num_drafts
        self.token_ids += [PENDING] * (1 + num_drafts)
        self.num_pending_tokens += 1 + num_drafts
        return 1 + num_drafts

    def whole_chunk(self, num_tokens: int) -> int:
        """Returns the size of its next chunk of about `num_tokens`, at least one, which does not end within an image
        whose tokens see one another. A chunk that begins there is not cut before its end."""
        start = self.num_computed_tokens
        end = start + num_tokens
        for first, last in self.spans:
            if first < end < last:
                return (first if first > start else last) - start
        return num_tokens

    def fill_tokens(self, token_ids: ListOf[int]) -> None:
        """Replace the first pending tokens. Steps finish in order."""
        first, count = self.num_known_tokens, len(token_ids)
        self.token_ids[first : first + count] = token_ids
        self.num_pending_tokens -= count

    def take_back(self, count: int) -> None:
        """Remove the last pending tokens, which were rejected, and as many of the last computed ones."""
        del self.token_ids[-count:]
        self.num_pending_tokens -= count
        if self._status is SequenceStatus.RUNNING:
            self.num_computed_tokens -= count
            self.num_committed_tokens -= count

    def drop_pending_tokens(self) -> None:
        """Remove the tokens that no step in flight will sample any more."""
        del self.token_ids[self.num_known_tokens :]
        self.num_pending_tokens = 0

    def finish_reason_after(self, token_id: int, number: int) -> FinishReason | None:
        """STOP or LENGTH if the answer ends with `token_id`, its token of this number from 1 on; None if it goes on."""
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if number >= self.max_tokens:
            return FinishReason.LENGTH
        return None


def label(sequence_id: int, request_id: str) -> str:
    """Its name in the log."""
    return f"sequence {sequence_id}{f' of {request_id}' if request_id else ''}"
