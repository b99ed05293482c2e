"""The engine of a model that only makes embeddings: commands and steps as EngineCore has them, around an embedder."""

from __future__ import annotations

import time
from collections.abc import Sequence as ListOf

from mlxpaged.cache import BlockUsage
from mlxpaged.engine.embedder import Embedder, EmbeddingRequest
from mlxpaged.engine.pool_resizer import REST_SECONDS
from mlxpaged.engine.request import EndedRequest, RequestOutput
from mlxpaged.engine.stall import StepSize
from mlxpaged.engine.status import EngineSnapshot, EngineStats, EngineStatus
from mlxpaged.scheduler import SchedulerStats

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


class EmbeddingCore:
    """It keeps nothing between two requests."""

    weight = 1.0
    waits_for_memory = False

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        self.step_bytes = embedder.model.kv_bytes  # that the next step may take again

    def embed(self, request: EmbeddingRequest) -> list[RequestOutput]:
        self.embedder.add(request)
        return []

    def cancel(self, request_ids: ListOf[str]) -> tuple[list[EndedRequest], list[RequestOutput]]:
        return self.embedder.cancel(request_ids), []

    def abort_all(self, error: str) -> list[RequestOutput]:
        self.embedder.abort_all(error)
        return []

    def expire(self) -> list[RequestOutput]:
        """The event loop watches the deadlines of embeddings."""
        return []

    def has_work(self) -> bool:
        """Whether text is to be generated."""
        return False

    def embeds(self) -> bool:
        return self.embedder.has_work()

    def step_size(self) -> StepSize | None:
        """It generates no text."""
        return None

    def embedding_size(self) -> StepSize | None:
        return self.embedder.step_size

    def pause(self) -> float:
        return 0.0 if self.embeds() else REST_SECONDS

    def rest(self, device_is_idle: bool) -> bool:
        return False

    def give_back(self) -> int:
        """There is no pool."""
        return 0

    def clear_cache(self) -> int:
        return 0

    def stats(self) -> EngineStats:
        return EngineStats(NO_SEQUENCES, embeddings=self.embedder.stats())

    def status(self) -> EngineStatus:
        return EngineStatus(NO_SEQUENCES, 0, (), ())

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(self.status(), block_states=b"", seconds=0.0)

    def close(self) -> None:
        """It has no files."""


class EmbeddingInfo:
    """Facts about such an engine that do not change while it lives."""

    def __init__(self, core: EmbeddingCore) -> None:
        self.embedding_model = core.embedder.model.facts
        self.model = self.embedding_model.name
        self.tokenizer = self.embedding_model.tokenizer
        self.context_length = self.embedding_model.context_length
        self.max_model_len = self.embedding_model.max_tokens  # of an input
        self.weight_bytes = self.embedding_model.weight_bytes
        self.created = int(time.time())  # Unix time
        self.no_embeddings_because = ""
