"""The models of a soak, of every kind that a server has: tiny ones, and the bundled one that sees."""

from __future__ import annotations

import json
from pathlib import Path

from mlxpaged.models.sources.resolve import resolve
from tests.models.architectures import ARCHITECTURES
from tests.support import demo_vocab_size, make_adapter, make_embedding_model, make_tiny_model


def make_models(root: Path) -> dict[str, Path]:
    """Directories by name: attention only and an adapter for it, recurrent and attention layers, a model that is loaded
    and unloaded, one that sees, a reranker, and an embedding model."""
    recurrent = ARCHITECTURES["qwen3_next"]
    small = make_tiny_model(root / "small", "llama", 1)
    return {
        "small": small,
        "adapter": make_adapter(small, root / "adapter", 5),
        "seeing": resolve("demo-vision").directory,
        "hybrid": make_tiny_model(root / "hybrid", "qwen3_next", 2, **recurrent.config),
        "other": make_tiny_model(root / "other", "qwen3", 3),
        "judge": make_reranker(root / "Tiny-Qwen3-Reranker"),
        "vectors": make_embedding_model(root / "vectors"),
    }


def make_reranker(directory: Path) -> Path:
    """A tiny Qwen3 whose vocabulary has "yes" beside the demo model's "no"."""
    size = demo_vocab_size()
    make_tiny_model(directory, "qwen3", 4, vocab_size=size + 1)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": size, "content": "yes", "special": False})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory
