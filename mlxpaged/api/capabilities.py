"""Says what a served model can do, for the APIs that list models."""

from __future__ import annotations

from mlxpaged.engine import EngineInfo


def capabilities(info: EngineInfo, name: str) -> dict[str, bool]:
    """name: of a served model. Tools and thinking are derived from its chat template and vocabulary."""
    tags = info.tokenizer.tags
    generates = name in info.generating
    chats = generates and info.tokenizer.has_chat_template
    return {
        "chat": chats,
        "completions": generates,
        "rerank": generates and info.reranker is not None,
        "embeddings": info.embedding_model is not None and info.embedding_model.name == name,
        "tools": chats and (info.tokenizer.shows_tools or info.tokenizer.takes_system),
        "thinking": chats and bool(tags.think_start),
    }
