"""What several ranks cannot do is refused before a model is loaded."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.engine.builder import load_core
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.sharding import Share
from mlxpaged.parts.ranks.ranks import Ranks
from tests.support import make_embedding_model, make_tiny_model


def load_on_ranks(config: EngineConfig) -> None:
    group: Any = Share(0, 2)  # the model is refused before the ranks have to talk
    load_core(config, time.monotonic, lambda progress: None, Ranks(group))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"only_embeds": True}, "several ranks make no embeddings"),
        ({"adapters": (AdapterPath("red", Path("/no/adapter")),)}, "several ranks cannot serve adapters"),
        ({"batch_invariant": True}, "several ranks are not batch-invariant"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load_on_ranks(EngineConfig(**options))


@pytest.mark.parametrize("name", ["vectors", "Tiny-Qwen3-Reranker"])
def test_models_that_are_not_for_generating_text_are_refused_on_several_ranks(name: str, tmp_path: Path) -> None:
    make = make_embedding_model if name == "vectors" else partial(make_tiny_model, model_type="qwen3")
    make(tmp_path / name)
    with pytest.raises(UnsupportedModelError, match="several ranks make no embeddings and rerank nothing"):
        load_on_ranks(EngineConfig(model=str(tmp_path / name)))
