"""Fields of embeddings."""

from __future__ import annotations

from mlxpaged.api.fields import shared
from mlxpaged.api.fields.table import Table, ignored, refused

ONE_PROMPT = "the model's default prompt is put before every input; use `prompt_name` or put another one into the input"

TABLE = Table(
    *shared.EVERYWHERE,
    ignored("truncate", True, "an input that is too long is refused", (False,)),
    refused("truncate_prompt_tokens", 10, "inputs are never cut", (-1,)),
    refused("add_special_tokens", False, "the tokenizer adds its special tokens; send token ids", (True,)),
    refused("input_type", "query", ONE_PROMPT),
    refused("task", "retrieval", ONE_PROMPT),
    refused("instruction", "Find it.", ONE_PROMPT, ("",)),
    refused("normalize", False, "embeddings are always normalized", (True,)),
    refused("embedding_types", ["int8"], "use `encoding_format`", (["float"],)),
    refused("output_dtype", "int8", "use `encoding_format`", ("float",)),
)
