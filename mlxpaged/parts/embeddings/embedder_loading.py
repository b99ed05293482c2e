"""Makes the embedder of a model, or an engine that makes nothing but embeddings."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.device_memory import free_device_memory
from mlxpaged.models.encoders.embedding import EmbeddingModel
from mlxpaged.models.encoders.encoder_model import EncoderModel
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import ServedModel, load_embedding_model, own_embedding_model
from mlxpaged.models.sources.preflight import Reserved
from mlxpaged.models.turns import Turns
from mlxpaged.parts.embeddings.embedder import Embedder
from mlxpaged.parts.embeddings.embedding_core import EmbeddingCore
from mlxpaged.parts.memory.fitting import least_step

logger = logging.getLogger(__name__)


def load_embedding_core(config: EngineConfig, clock: Callable[[], float], turns: Turns) -> EmbeddingCore:
    """An engine that generates no text. Raises ModelNotFoundError, UnsupportedModelError or MemoryError."""
    step = Reserved(step=least_step())
    options = config.embedding_max_model_len, turns, step, config.cpu_dtype
    model = load_embedding_model(config.model, config.served_model_name, *options)
    embedder = make_embedder(model, config)
    check_room(embedder)
    return EmbeddingCore(embedder, clock)


def check_room(embedder: Embedder) -> None:
    """Raises MemoryError if the largest step does not fit."""
    free = free_device_memory()
    if embedder.step_bytes > free:
        raise MemoryError(
            f"{embedder.model.name}: the longest input takes {embedder.step_bytes / 1e6:.1f} MB, but only "
            f"{free / 1e6:.1f} MB are free (--embedding-max-model-len)"
        )


def build_embedder(config: EngineConfig, served: ServedModel) -> tuple[Embedder | None, str]:
    """Make the embedder of a model that generates. Returns None and the reason if its directory does not state that it
    makes embeddings."""
    try:
        return make_embedder(own_embedding_model(served, config.embedding_max_model_len), config), ""
    except UnsupportedModelError as error:
        return None, str(error)


def make_embedder(model: EmbeddingModel | EncoderModel, config: EngineConfig) -> Embedder:
    embedder = Embedder(model, config.max_num_batched_tokens)
    logger.info(
        "%s by %s: %d dimensions, %s pooling, inputs up to %d tokens; %.1f MB are reserved for a step",
        "scores" if model.is_reranker else "embeddings",
        model.name,
        model.dimensions,
        model.spec.pooling.value,
        model.max_tokens,
        embedder.step_bytes / 1e6,
    )
    return embedder
