"""Says what a loaded model can do, for the APIs that list models."""

from __future__ import annotations

from mlxpaged.engine.info import EmbeddingInfo, EngineInfo


def capabilities(info: EngineInfo | EmbeddingInfo) -> dict[str, bool]:
    """Every model that chats can be told of tools. Thinking is derived from the vocabulary."""
    generates = isinstance(info, EngineInfo)
    chats = generates and info.tokenizer.has_chat_template
    return {
        "chat": chats,
        "completions": generates,
        "rerank": (info.reranker if isinstance(info, EngineInfo) else info.cross_encoder) is not None,
        "embeddings": info.embedding_model is not None,
        "tools": chats,
        "vision": chats and isinstance(info, EngineInfo) and info.images is not None,
        "thinking": chats and info.tokenizer.tags.thinks,
    }
