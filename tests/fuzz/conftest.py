"""Servers with everything that a request can reach: a model that generates and reranks, embeddings, files, keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import make_embedding_model, make_reranker

CONTEXT = 256
"""Tokens of a prompt and its answer: no answer is long, whatever a request asks for."""


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
    return make_reranker(tmp_path_factory.mktemp("models") / "qwen3-reranker", **sizes)


@pytest.fixture(scope="package")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedding_model(tmp_path_factory.mktemp("models") / "vectors", num_hidden_layers=1)
