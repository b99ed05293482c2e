"""Statistics of the engine, and the state of each sequence."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from mlxpaged.core.engine.prompt_progress import PromptChunk
from mlxpaged.core.engine.timeline import Phase
from mlxpaged.core.scheduling.queue import ORDER
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import Priority, Sequence, SequenceStatus
from mlxpaged.core.scheduling.stats import SchedulerStats

MAX_WAITING_LISTED = 1000
MAX_WAITING_WATCHED = 100
"""Waiting requests in a snapshot, which is taken twice a second."""

S = TypeVar("S")


@dataclass(frozen=True)
class EngineStats:
    """A snapshot after a step. Counters (`total`) only increase."""

    scheduler: SchedulerStats
    steps_total: int = 0
    model_calls_total: int = 0
    attention_calls_total: int = 0
    generated_tokens_total: int = 0
    kv_cache_bytes: int = 0  # of the KV pools now
    max_kv_cache_bytes: int = 0  # that they can grow to
    state_bytes: int = 0  # reserved for recurrent states, of sequences and of checkpoints
    prompt_chunks: tuple[PromptChunk, ...] = ()  # of the step, without the last ones of their prompts
    parts: tuple[object, ...] = ()  # what the parts and the embedder say
    prefilled_tokens_total: int = 0  # computed without a sample: prompts without their last tokens, recomputed ones too
    swap_written_total: int = 0  # bytes that went into the swap file; 0 if the swap space is memory
    swap_written_today: int = 0

    def of(self, absent: S) -> S:
        """What the part says whose statistics have the type of `absent`; `absent` if the model has no such part."""
        return next((each for each in self.parts if isinstance(each, type(absent))), absent)


@dataclass(frozen=True)
class SequenceState:
    request_id: str
    status: SequenceStatus
    phase: Phase | None  # PREFILL or DECODE; None if it is not running
    priority: Priority
    effective_priority: float
    age_seconds: float  # since arrival
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    output_tokens: int
    computed_tokens: int  # tokens with KV in its blocks
    blocks: int
    shared_blocks: int  # those of its blocks that other sequences hold too
    max_ref_count: int  # largest reference count of its blocks, 0 without blocks
    preemptions: int


@dataclass(frozen=True)
class EngineStatus:
    """Taken on the engine thread between two steps. Sequences are in the order in which they are served."""

    scheduler: SchedulerStats
    steps_total: int
    running: tuple[SequenceState, ...]
    waiting: tuple[SequenceState, ...]  # the first ones in the queue, preempted and swapped ones included
    step_seconds: Mapping[int, float]  # of decoding steps, by their rows


@dataclass(frozen=True)
class EngineSnapshot:
    """What a watcher sees. block_states: as `BlockPool.states`. seconds: CPU time of
    the engine thread, to make it."""

    status: EngineStatus
    block_states: bytes
    seconds: float


def engine_status(
    scheduler: Scheduler, sequences: Iterable[Sequence], steps_total: int, now: float, max_waiting: int
) -> EngineStatus:
    """sequences: all unfinished ones."""
    waiting = [sequence for sequence in sequences if sequence.status is not SequenceStatus.RUNNING]
    first = heapq.nsmallest(max_waiting, waiting, ORDER)
    return EngineStatus(
        scheduler.stats(),
        steps_total,
        running=tuple(sequence_state(scheduler, sequence, now) for sequence in scheduler.running),
        waiting=tuple(sequence_state(scheduler, sequence, now) for sequence in first),
        step_seconds=scheduler.times.row_seconds(),
    )


def sequence_state(scheduler: Scheduler, sequence: Sequence, now: float) -> SequenceState:
    block_ids = sequence.kv.table.block_ids if sequence.kv.table is not None else []
    shared = scheduler.pool.shared(block_ids)
    return SequenceState(
        request_id=sequence.request_id,
        status=sequence.status,
        phase=phase(sequence) if sequence.status is SequenceStatus.RUNNING else None,
        priority=sequence.priority,
        effective_priority=sequence.effective_priority(now),
        age_seconds=now - sequence.arrival_time,
        prompt_tokens=sequence.num_prompt_tokens,
        cached_tokens=sequence.num_cached_tokens,
        output_tokens=sequence.num_output_tokens,
        computed_tokens=sequence.num_computed_tokens,
        blocks=len(block_ids),
        shared_blocks=len(shared),
        max_ref_count=max(map(scheduler.pool.ref_count, shared), default=min(1, len(block_ids))),
        preemptions=sequence.num_preemptions,
    )


def phase(sequence: Sequence) -> Phase:
    """PREFILL or DECODE. After a preemption, the output so far belongs to the prefill."""
    missing = sequence.num_known_tokens - sequence.num_committed_tokens  # tokens whose KV is not computed yet
    return Phase.DECODE if sequence.num_output_tokens > 0 and missing == 1 else Phase.PREFILL
