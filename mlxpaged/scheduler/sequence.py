"""One sequence of tokens on its way through the engine, and the states it may be in."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

from mlxpaged.cache import BlockTable


class Priority(IntEnum):
    """Lower is served first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


AGING_RATE = 0.1
"""Priority classes that a second of age is worth: after 10 s a sequence stands beside a fresh one of the next class."""


class SequenceStatus(Enum):
    """WAITING has never run. PREEMPTED ran and gave its blocks back, SWAPPED did and has their contents in swap space;
    all three wait for admission to RUNNING."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


class FinishReason(str, Enum):
    """Why a sequence ended. STOP: end of sequence, stop token or stop string. LENGTH: max_tokens reached. ABORT: its
    client left. CANCELLED: somebody asked for its end. TIMEOUT: its deadline passed."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


LEGAL_TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.PREEMPTED, SequenceStatus.SWAPPED, SequenceStatus.FINISHED}),
    SequenceStatus.SWAPPED: frozenset({SequenceStatus.RUNNING, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


PENDING = -1
"""Stands for a token that the device draws and the host has not read yet, while the next step is under way."""


class LastLook(NamedTuple):
    """What the prefix cache was last seen to spare a waiting sequence: blocks that were missing, and when."""

    num_tokens: int
    room: int
    num_gains: int


class IllegalTransitionError(RuntimeError):
    """A sequence was moved along an edge that its state machine does not have."""


class Sequence:
    """Tokens, progress and blocks of one request.

    `num_computed_tokens` counts the leading tokens whose KV lies in the blocks of `block_table`, or will once the steps
    under way are done; the last token of a decoding sequence was sampled but not yet run through the model, so exactly
    one is uncomputed. A token that a step under way will draw has its place already, as PENDING.
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
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self.sequence_id = sequence_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self.priority = priority
        self.arrival_time = arrival_time  # seconds, on the clock of the caller's choice
        self.request_id = ""  # whose it is, for the log
        self.arrival = -1  # place in the order of arrival, given by the scheduler
        self.block_table: BlockTable | None = None  # set while it holds blocks
        self.block_keys: list[bytes] = []  # hashes of its full blocks, for the prefix cache
        self.num_computed_tokens = 0
        self.num_committed_tokens = 0  # of those, the ones that no step under way still has to compute
        self.num_pending_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when it was first admitted
        self.num_preemptions = 0
        self.num_swaps_out = 0
        self.num_swaps_in = 0
        self.num_device_failures = 0  # device errors since its last sampled token (engine)
        self.swap_slots: list[int] = []  # of its blocks, in order, while it is swapped out
        self.num_swapped_tokens = 0  # whose values they hold
        self.fork_of: Sequence | None = None  # has the same prompt, and blocks to share
        self.num_passes = 0  # steps in a row that had no room for it
        self.last_look: LastLook | None = None
        self.rescued = False  # it runs because it was passed over too often
        self.finish_reason: FinishReason | None = None
        self._status = SequenceStatus.WAITING

    @property
    def label(self) -> str:
        """In the log."""
        return f"sequence {self.sequence_id}{f' of {self.request_id}' if self.request_id else ''}"

    def __repr__(self) -> str:
        progress = f"{self.num_computed_tokens}/{len(self.token_ids)}"
        return f"Sequence({self.sequence_id}, {self._status.value}, {progress} computed)"

    @property
    def order(self) -> tuple[float, int]:
        """Its place among all others, the smallest first, kept through preemption: by effective priority, then arrival.

        All age at the same rate, so the order of `effective_priority` at any one time is that of this constant.
        """
        return self.priority + AGING_RATE * self.arrival_time, self.arrival

    def effective_priority(self, now: float) -> float:
        """Its class less what its age is worth; the lowest is served first."""
        return self.priority - AGING_RATE * (now - self.arrival_time)

    def standing(self, now: float) -> str:
        """In the log, where it gains or loses its place."""
        return (
            f"priority {self.priority.name}, effective {self.effective_priority(now):.2f}, "
            f"{now - self.arrival_time:.1f} s old, preemption {self.num_preemptions}"
        )

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
    def awaits_last_token(self) -> bool:
        """The answer is as long as it may be once the pending token is read: there is nothing left to run."""
        return len(self.token_ids) - self.num_prompt_tokens >= self.max_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV it will ever hold: the last token of an answer is never run through the model."""
        return self.num_prompt_tokens + self.max_tokens - 1

    def transition(self, to: SequenceStatus) -> None:
        """Raises IllegalTransitionError where the state machine has no such edge."""
        if to not in LEGAL_TRANSITIONS[self._status]:
            raise IllegalTransitionError(
                f"sequence {self.sequence_id} cannot go from {self._status.value} to {to.value}"
            )
        self._status = to

    def expect_token(self) -> None:
        """A step was given the task to draw the next token."""
        self.token_ids.append(PENDING)
        self.num_pending_tokens += 1

    def fill_token(self, token_id: int) -> None:
        """The first pending token is read. It is that of the step that finishes now."""
        self.token_ids[self.num_known_tokens] = token_id
        self.num_pending_tokens -= 1

    def drop_pending_tokens(self) -> None:
        """Nobody will read them: their step failed."""
        del self.token_ids[self.num_known_tokens :]
        self.num_pending_tokens = 0

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Whether the answer ends with `token_id`, its last known token."""
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= self.max_tokens:
            return FinishReason.LENGTH
        return None
