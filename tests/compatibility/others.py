"""Fields of the remaining endpoints: tokenize, detokenize, files and batches."""

from __future__ import annotations

from dataclasses import replace

from tests.compatibility import chat
from tests.compatibility.claims import HONOURED, REFUSED, Claim, honoured, label, refused


def without_prompt(claim: Claim) -> Claim:
    """The smallest body of /tokenize has a prompt, which does not go together with messages."""
    return replace(claim, example={**claim.example, "prompt": None}) if "messages" in claim.example else claim


TOKENIZE: tuple[Claim, ...] = (
    honoured("model", "demo"),
    honoured("prompt", "x"),
    honoured("messages", [{"role": "user", "content": "x"}], prompt=None),
    *(without_prompt(claim) for claim in chat.MESSAGES if claim.field != "messages"),
    honoured("add_special_tokens", False, "for `prompt`"),
    honoured("split_special_tokens", True, "for `prompt`: [control tokens](security.md#control-tokens) in it are text"),
    honoured("return_token_strs", True),
)

DETOKENIZE: tuple[Claim, ...] = (honoured("model", "demo"), honoured("tokens", [20, 21]))

FILES: tuple[Claim, ...] = (
    honoured("file", "{}", "up to 200 MiB"),
    honoured("purpose", "batch"),
    refused("purpose", "assistants"),
    Claim("expires_after", REFUSED, {"expires_after[seconds]": "3600"}, "files stay until they are deleted"),
)

BATCHES: tuple[Claim, ...] = (
    Claim("input_file_id", HONOURED, {}),
    honoured("endpoint", "/v1/completions", "or `/v1/chat/completions`, `/v1/responses`, `/v1/decisions`"),
    refused("endpoint", "/v1/embeddings"),
    honoured("completion_window", "24h", "minutes, hours or days"),
    label("metadata", {"a": "b"}, "returned with the batch"),
)
