"""What the engine thread runs for one model: commands, and a step whenever there is work."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Any, Protocol

from mlxpaged.core.blocks.block_pool import BlockUsage
from mlxpaged.core.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.core.engine.stall import StepSize
from mlxpaged.core.engine.status import EngineSnapshot, EngineStats, EngineStatus
from mlxpaged.core.scheduling.stats import SchedulerStats

REST_SECONDS = 3600.0
"""An idle engine that has nothing to give back does not wake up more often than this without a command."""

NO_BLOCKS = BlockUsage(0, 0, 0)
NO_SEQUENCES = SchedulerStats(
    running=0,
    waiting=0,
    blocks=NO_BLOCKS,
    max_blocks=0,
    swap=NO_BLOCKS,
    checkpoints=0,
    max_checkpoints=0,
    preemptions_total=0,
    starvation_admissions_total=0,
    blocks_copied_total=0,
    blocks_swapped_out_total=0,
    blocks_swapped_in_total=0,
    prefix_hit_tokens_total=0,
    prompt_tokens_total=0,
)


@dataclass
class DeviceClock:
    """A clock of the models that share a device. read_at: time at which the result of the last step of any of them was
    read."""

    read_at: float = -math.inf

    def note_read(self, now: float) -> None:
        self.read_at = now


class Embeds(Protocol):
    """What makes embeddings, in steps of its own (parts/embeddings/embedder.py). stats: as `Part.stats`. model: what it
    runs."""

    model: Any

    @property
    def step_size(self) -> StepSize | None: ...

    def add(self, request: Any) -> None: ...

    def abort_all(self, error: str) -> None: ...

    def cancel(self, request_ids: ListOf[str]) -> list[EndedRequest]: ...

    def has_work(self) -> bool: ...

    def step(self, alone: bool) -> None: ...

    def stats(self) -> object: ...


class Worker:
    """A model that makes nothing but embeddings, if it has an `embedder`. A subclass generates text too.

    generates: whether it does. weight: its share of the device while other models have work. waits_for_memory: whether
    its last step was empty because memory was short. step_bytes: memory of its largest step.
    """

    generates = False
    weight = 1.0
    waits_for_memory = False
    step_bytes = 0

    def __init__(self, embedder: Embeds | None) -> None:
        self.embedder = embedder

    # -- commands ----------------------------------------------------------------------------------------------------

    def submit(self, requests: ListOf[Request]) -> list[RequestOutput]:
        """Queue requests that arrive together. Returns an output with an error for each one that cannot run."""
        raise NotImplementedError

    def abort(self, request_id: str, error: str | None = None) -> list[RequestOutput]:
        """End a request and free all that it holds. An unknown id is no error: the request may just have finished."""
        raise NotImplementedError

    def embed(self, request: Any) -> list[RequestOutput]:
        """Queue inputs for the embedder, which must exist. The result goes to `request.reply`, not to an output."""
        assert self.embedder is not None
        self.embedder.add(request)
        return []

    def abort_all(self, error: str) -> list[RequestOutput]:
        """End all requests with an error. Returns the last output of each."""
        if self.embedder is not None:
            self.embedder.abort_all(error)
        return []

    def cancel(self, request_ids: ListOf[str]) -> tuple[list[EndedRequest], list[RequestOutput]]:
        """Cancel requests. Returns those that were ended, and the last output of each."""
        return ([] if self.embedder is None else self.embedder.cancel(request_ids)), []

    def clear_cache(self) -> int:
        """Empty the prefix cache. Returns the number of blocks that it held."""
        return 0

    def give_back(self) -> int:
        """Give back the memory that running requests do not need. Returns the bytes that are freed."""
        return 0

    def status(self) -> EngineStatus:
        return EngineStatus(NO_SEQUENCES, 0, (), (), {})

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(self.status(), block_states=b"", seconds=0.0)

    # -- the engine thread -------------------------------------------------------------------------------------------

    def join(self, device: DeviceClock) -> None:
        """Share the device with other models."""

    def expire(self) -> list[RequestOutput]:
        """End the requests whose deadline has passed. The event loop watches those of embeddings."""
        return []

    def has_work(self) -> bool:
        """Whether text is to be generated."""
        return False

    def step(self) -> list[RequestOutput]:
        """Run a step, and return the outputs of the one that ended."""
        raise NotImplementedError

    def finish_step(self) -> list[RequestOutput]:
        """Wait for the step in flight, if there is one. Returns its outputs."""
        return []

    def embeds(self) -> bool:
        """Whether embeddings are to be made."""
        return self.embedder is not None and self.embedder.has_work()

    def pause(self) -> float:
        """Seconds for which nothing is to be done if no command arrives."""
        return 0.0 if self.embeds() else REST_SECONDS

    def rest(self, device_is_idle: bool) -> bool:
        """What is done instead of a step while there is no work: memory is given back. Returns whether it was.
        device_is_idle: whether no other model has work."""
        return False

    def stats(self) -> EngineStats:
        return EngineStats(NO_SEQUENCES, parts=self.stats_of_embedder)

    @property
    def stats_of_embedder(self) -> tuple[object, ...]:
        return () if self.embedder is None else (self.embedder.stats(),)

    def step_size(self) -> StepSize | None:
        """The size of the running step. Any thread may ask."""
        return None

    def embedding_size(self) -> StepSize | None:
        """The size of the embedder's running step."""
        return None if self.embedder is None else self.embedder.step_size

    def keep_prefixes(self) -> None:
        """The model is unloaded: store what is to outlive it. Its requests have ended."""

    def close(self) -> None:
        """Close files."""
