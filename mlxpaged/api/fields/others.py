"""Fields of the remaining endpoints: tokenize, detokenize, files and batches."""

from __future__ import annotations

from dataclasses import replace

from mlxpaged.api.fields import chat
from mlxpaged.api.fields.table import Outcome, Row, Table, honoured, label, refused

STAY = "files stay until they are deleted"
NOT_HERE = "the whole prompt of a chat is tokenized, as the template writes it by default"

TOKENIZE = Table(
    honoured("model", "demo"),
    honoured("prompt", "x"),
    honoured("messages", [{"role": "user", "content": "x"}], prompt=None),
    *(replace(row, example={**row.example, "prompt": None}) for row in chat.MESSAGES if row.field != "messages"),
    honoured("add_special_tokens", False, "for `prompt`"),
    honoured("split_special_tokens", True, "for `prompt`: [control tokens](security.md#control-tokens) in it are text"),
    honoured("return_token_strs", True),
    refused("add_generation_prompt", False, NOT_HERE, (True,)),
    refused("continue_final_message", True, NOT_HERE, (False,)),
    refused("chat_template", "{{ messages }}", NOT_HERE),
    refused("chat_template_kwargs", {"a": 1}, NOT_HERE, ({},)),
    refused("enable_thinking", False, NOT_HERE),
    refused("tools", [{}], NOT_HERE, ([],)),
)

DETOKENIZE = Table(honoured("model", "demo"), honoured("tokens", [20, 21]))

FILES = Table(
    honoured("file", "{}", "up to 200 MiB"),
    honoured("purpose", "batch"),
    refused("purpose", "assistants"),
    Row("expires_after", Outcome.REFUSED, {"expires_after[seconds]": "3600"}, STAY),
)

BATCHES = Table(
    Row("input_file_id", Outcome.HONOURED, {}),
    honoured("endpoint", "/v1/completions", "or `/v1/chat/completions`, `/v1/responses`"),
    refused("endpoint", "/v1/embeddings"),
    honoured("completion_window", "24h", "minutes, hours or days"),
    label("metadata", {"a": "b"}, "returned with the batch"),
    refused("output_expires_after", {"anchor": "created_at", "seconds": 3600}, STAY),
)
