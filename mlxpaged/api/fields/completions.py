"""Fields of completions."""

from __future__ import annotations

from mlxpaged.api.fields import shared
from mlxpaged.api.fields.table import Table, alias, refused

TABLE = Table(
    *shared.SAMPLING,
    *shared.EVERYWHERE,
    *shared.ALIASES,
    alias("max_completion_tokens", 2, "max_tokens", max_tokens=None),
    *shared.HINTS,
    refused("add_special_tokens", False, "the tokenizer adds its special tokens; send token ids", (True,)),
    refused("prompt_embeds", "x", "a prompt is text or token ids"),
    refused("system", "Be brief.", "put it into the prompt", ("",)),
    refused("response_format", {"type": "json_object"}, "use `structured_outputs`", ({"type": "text"},)),
    refused("tools", [{"type": "function", "function": {"name": "f"}}], "use `/v1/chat/completions`", ([],)),
    *shared.REFUSALS,
)
