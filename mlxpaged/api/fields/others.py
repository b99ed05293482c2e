"""Fields of tokenize and batches."""

from __future__ import annotations

from mlxpaged.api.fields import chat
from mlxpaged.api.fields.table import Table, refused

NOT_HERE = "the whole prompt of a chat is tokenized, as the template writes it by default"

TOKENIZE = Table(
    *chat.MESSAGES,
    refused("add_generation_prompt", False, NOT_HERE, (True,)),
    refused("continue_final_message", True, NOT_HERE, (False,)),
    refused("chat_template", "{{ messages }}", NOT_HERE),
    refused("chat_template_kwargs", {"a": 1}, NOT_HERE, ({},)),
    refused("enable_thinking", False, NOT_HERE),
    refused("tools", [{}], NOT_HERE, ([],)),
)

BATCHES = Table(
    refused("output_expires_after", {"anchor": "created_at", "seconds": 3600}, "files stay until they are deleted"),
)
