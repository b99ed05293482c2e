"""Fields of embeddings."""

from __future__ import annotations

from mlxpaged.api.fields import shared
from mlxpaged.api.fields.table import Table, honoured, ignored, label, refused

ONE_PROMPT = "the model's default prompt is put before every input; put another one into the input"

TABLE = Table(
    honoured("model", "vectors", "the model that makes embeddings"),
    refused("model", "demo", "this model only generates text"),
    honoured("input", ["one", "two"], "text, token ids, or a list of either, up to 2,048"),
    honoured("encoding_format", "base64", "the default is `float`"),
    honoured("dimensions", 64, "the model's own size, or those that its `config.json` states"),
    refused("dimensions", 63),
    honoured("timeout", 60, "seconds; then a 408"),
    label("user", "u"),
    *shared.EVERYWHERE,
    ignored("truncate", True, "an input that is too long is refused", (False,)),
    ignored("priority", 1, "use the key's tier"),
    ignored("request_id", "r", "use the header `X-Request-Id`"),
    ignored("keep_alive", "5m", "the model stays loaded"),
    refused("truncate_prompt_tokens", 10, "inputs are never cut", (-1,)),
    refused("add_special_tokens", False, "the tokenizer adds its special tokens; send token ids", (True,)),
    refused("input_type", "query", ONE_PROMPT),
    refused("prompt_name", "query", ONE_PROMPT),
    refused("task", "retrieval", ONE_PROMPT),
    refused("instruction", "Find it.", ONE_PROMPT, ("",)),
    refused("normalize", False, "embeddings are always normalized", (True,)),
    refused("embedding_types", ["int8"], "use `encoding_format`", (["float"],)),
    refused("output_dtype", "int8", "use `encoding_format`", ("float",)),
)
