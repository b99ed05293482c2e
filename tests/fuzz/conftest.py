"""Servers with everything that a request can reach: a model that generates and reranks, embeddings, files, keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import demo_vocab_size, make_embedding_model, make_tiny_model

CONTEXT = 256
"""Tokens of a prompt and its answer: no answer is long, whatever a request asks for."""


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary has the words of a reranker."""
    size = demo_vocab_size()
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3-reranker", "qwen3", vocab_size=size + 1, **sizes)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": size, "content": "yes", "special": False})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.fixture(scope="package")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedding_model(tmp_path_factory.mktemp("models") / "vectors", num_hidden_layers=1)
