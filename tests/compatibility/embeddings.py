"""Fields of embeddings."""

from __future__ import annotations

from tests.compatibility.claims import Claim, honoured, ignored, label, refused

TABLE: tuple[Claim, ...] = (
    honoured("model", "vectors", "the model that makes embeddings"),
    refused("model", "demo", "this model only generates text"),
    honoured("input", ["one", "two"], "text, token ids, or a list of either, up to 2,048"),
    honoured("encoding_format", "base64", "the default is `float`"),
    honoured("dimensions", 64, "the model's own size, or those that its `config.json` states"),
    refused("dimensions", 63),
    honoured("prompt_name", "query", "of a prompt in the model's `config_sentence_transformers.json`"),
    honoured("timeout", 60, "seconds; then a 408"),
    label("user", "u"),
    ignored("priority", 1, "use the key's tier"),
    ignored("request_id", "r", "use the header `X-Request-Id`"),
    ignored("keep_alive", "5m", "the model stays loaded"),
)
