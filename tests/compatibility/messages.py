"""Fields of Anthropic's messages, and of counting their tokens."""

from __future__ import annotations

from typing import Any

from tests.compatibility import shared
from tests.compatibility.claims import Claim, by_model, honoured, ignored, label, refused

USER: dict[str, Any] = {"role": "user", "content": "x"}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
HERE = "the model runs on this machine"

PROMPT: tuple[Claim, ...] = (
    honoured("model", "demo", "another model is a 404"),
    honoured(
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "text, `tool_use`, `tool_result` and `thinking` blocks",
    ),
    honoured(
        "messages",
        [USER, {"role": "system", "content": "Be brief."}],
        "if the chat template refuses a late system message, it goes into the user's turn",
    ),
    by_model(
        "messages",
        [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "aGk="}}]}],
        "if the model takes images; in a `tool_result` too; `source` is `base64`: PNG, JPEG, WEBP or GIF",
    ),
    honoured(
        "messages",
        [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}]}],
        "a document of text, with its title and context; `source` is `text`, or `content` with text blocks only",
    ),
    refused(
        "messages",
        [{"role": "user", "content": [{"type": "document", "source": {}}]}],
        "other documents and files are not supported; in earlier turns and results they are left out",
    ),
    ignored(
        "messages.content.image",
        [{"role": "user", "content": [{"type": "image", "source": {}}]}, {"role": "assistant", "content": "y"}, USER],
        shared.LEFT_OUT,
    ),
    honoured(
        "system",
        "Be brief.",
        "a text that begins with `x-anthropic-billing-header:` is not shown to the model; Claude Code sends it",
    ),
    honoured("tools", [TOOL], "as in chat completions"),
    honoured(
        "tools", [TOOL | {"defer_loading": True}], "hidden from the model until a `tool_reference` in a result names it"
    ),
    honoured(
        "tools",
        [{"type": "bash_20250124", "name": "bash"}],
        "`text_editor_*` and `memory_20250818` too: the model is shown functions with Anthropic's parameters",
    ),
    honoured(
        "tools",
        [{"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 1000}],
        "`max_characters` is told to the model; the client cuts",
    ),
    refused("tools", [{"type": "web_search_20250305", "name": "w"}], "so are other tools that Anthropic runs, alone"),
    ignored("tools.web_search_20250305", [TOOL, {"type": "web_search_20250305", "name": "w"}], "beside others"),
    ignored(
        "messages.content.server_tool_use",
        [
            USER,
            {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "w", "input": {"a": 1}}]},
            USER,
        ],
        "shown as text, or left out: see [Sessions of other services](api.md#sessions-of-other-services)",
    ),
    honoured("tool_choice", {"type": "auto"}, "`none` too"),
    ignored("thinking.type", {"type": "between_tools"}, "the chat template decides"),
    honoured("thinking", {"type": "disabled"}, "enabled, adaptive or disabled"),
    ignored("container", "c", "the server runs no tools itself"),
    ignored("diagnostics", {}, "`usage` tells what was cached"),
    ignored("inference_geo", "us", HERE),
    ignored("user_profile_id", "u", HERE),
    ignored("workspace_id", "w", HERE),
)

COUNT: tuple[Claim, ...] = (
    *PROMPT,
    honoured(
        "output_config",
        {"effort": "low"},
        "its level reaches chat templates that know an effort; limits are those of answers",
    ),
)

TABLE: tuple[Claim, ...] = (
    *PROMPT,
    honoured("max_tokens", 3, "-1 is no limit; it is cut to what is left of the context"),
    honoured("max_tokens", 0, "only the prompt is computed, for the prefix cache"),
    honoured("stop_sequences", ["a"], "an empty string is none"),
    honoured("stream", True),
    honoured("temperature", 0.5),
    honoured("top_k", 5),
    honoured("top_p", 0.5),
    honoured(
        "tool_choice",
        {"type": "any"},
        "`tool` too; needs `tools`, and calls in a format that a grammar can enforce",
        tools=[TOOL],
    ),
    honoured("thinking", {"type": "adaptive", "display": "omitted"}, "the signature has the text"),
    honoured("output_config", {"effort": "low"}, "`low` and `medium` limit the thinking; higher values do not"),
    honoured("output_config", {"format": {"type": "json_schema", "schema": {"type": "integer"}}}),
    label("metadata", {"user_id": "u"}),
    honoured("service_tier", "auto"),
    shared.LOOPS,
)
