"""Says what a model can do, in the words of the APIs that list models."""

from __future__ import annotations

from mlxpaged.registry.facts import Facts


def capabilities(facts: Facts) -> dict[str, bool]:
    """Every model that chats can be told of tools. Thinking and infilling are derived from the vocabulary."""
    return {
        "chat": facts.chats,
        "completions": facts.generates,
        "infill": facts.infills,
        "decisions": facts.generates,
        "rerank": facts.reranks,
        "embeddings": facts.embeds,
        "tools": facts.chats,
        "vision": facts.sees,
        "thinking": facts.thinks,
    }
