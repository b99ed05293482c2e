"""Fields of rerank and score."""

from __future__ import annotations

from tests.compatibility.claims import Claim, honoured, ignored, label, refused

WHOLE = "a document is judged as a whole, or refused if it is too long"

JUDGED: tuple[Claim, ...] = (
    honoured("model", "demo", "the served model, if it is a [reranker](embeddings-batches.md#reranking)"),
    honoured(
        "instruction",
        "Find answers",
        "an addition to these APIs; Qwen3-Reranker's own by default, a cross-encoder takes none",
    ),
    honoured("timeout", 60, "seconds; then a 408"),
    label("user", "u"),
    ignored("priority", 1, "use the key's tier"),
)

RERANK: tuple[Claim, ...] = (
    honoured("query", "y"),
    honoured("documents", ["x", {"text": "y"}], "up to 1,000, and as many as the queue takes"),
    refused("documents", [{"image": "x"}], "only text"),
    honoured("top_n", 1),
    honoured("return_documents", False, "the default is true"),
    ignored("max_tokens_per_doc", 100, WHOLE),
    ignored("max_chunks_per_doc", 10, WHOLE),
    *JUDGED,
)

SCORE: tuple[Claim, ...] = (
    honoured("text_1", ["y"], "one text, or as many as `text_2` has"),
    honoured("text_2", ["x", "y"]),
    *JUDGED,
)
