"""Fields of Anthropic's messages, and of counting their tokens."""

from __future__ import annotations

from mlxpaged.api.fields import shared
from mlxpaged.api.fields.table import Row, Table, alias, ignored, label, refused

THREAD_REFUSED = "thread_unsupported_request"
"""The code with which Anthropic refuses a thread. Its packages then send the whole conversation, without `thread`."""
ONLY_BESIDE = f"{shared.NO_TOOLS}; beside `tools` it is ignored"
HERE = "the model runs on this machine"

PROMPT: tuple[Row, ...] = (
    *shared.EVERYWHERE,
    label(
        "messages.content.citations", [{"role": "user", "content": [{"type": "text", "text": "x", "citations": []}]}]
    ),
    label("tools.eager_input_streaming", [], "a call is sent when it is complete"),
    alias(
        "output_format",
        {"type": "json_schema", "schema": {"type": "integer"}},
        "output_config.format",
        "Anthropic's packages of 2025",
    ),
    ignored(
        "context_management",
        {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "the model sees the whole conversation; one that is too long is refused",
        ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    ignored("speed", "fast", HERE, ("standard",)),
    ignored("betas", ["b"], "it is a header", ([],)),
    ignored("anthropic_beta", ["b"], "it is a header", ([],)),
    label("anthropic_version", "v"),
    refused(
        "thread",
        {"type": "create"},
        "the server keeps no conversations; send all messages, as tool runners then do, and threads with "
        "unsupported_request_behavior='continue_unthreaded'",
        code=THREAD_REFUSED,
    ),
    refused("mcp_servers", [{"type": "url"}], ONLY_BESIDE, ([],), beside="tools"),
)

COUNT = Table(*PROMPT)

TABLE = Table(
    *PROMPT,
    refused("response_format", {"type": "json_object"}, "use `output_config.format`", ({"type": "text"},)),
    refused("reasoning_effort", "low", "use `output_config.effort`"),
    refused("logprobs", True, shared.ONLY_COMPLETIONS, (False,)),
    refused("stop", ["a"], "use `stop_sequences`", ("", [], [""])),
    *shared.OF_COMPLETIONS,
)
