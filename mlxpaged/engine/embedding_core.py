"""The engine of a model that only makes embeddings."""

from __future__ import annotations

from mlxpaged.engine.config import EngineConfig
from mlxpaged.engine.embedder import Embedder
from mlxpaged.engine.info import EmbeddingInfo
from mlxpaged.engine.worker import Worker


class EmbeddingCore(Worker):
    """It keeps nothing between two requests."""

    embedder: Embedder

    def __init__(self, embedder: Embedder) -> None:
        super().__init__(embedder)
        self.step_bytes = embedder.step_bytes  # that the next step may take again

    def info(self, config: EngineConfig) -> EmbeddingInfo:
        return EmbeddingInfo(self)
