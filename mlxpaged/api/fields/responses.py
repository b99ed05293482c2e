"""Fields of OpenAI's responses, and of counting their tokens."""

from __future__ import annotations

from typing import Any

from mlxpaged.api.fields import shared
from mlxpaged.api.fields.table import Row, Table, ignored, refused

USER: dict[str, Any] = {"role": "user", "content": "x"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f"}
NOT_CUT = "a conversation that is too long is refused"
NO_SUMMARY = "no summary is made: `summary` is empty, and `content` has the thoughts"

PROMPT: tuple[Row, ...] = (
    ignored("reasoning.summary", {"summary": "detailed"}, NO_SUMMARY, ("auto",)),
    ignored("reasoning.generate_summary", {"generate_summary": "detailed"}, NO_SUMMARY, ("auto",)),
    ignored("reasoning.context", {"context": "all_turns"}, "the chat template decides", ("auto",)),
    ignored("reasoning.mode", {"mode": "pro"}, "the model has one mode", ("standard",)),
    ignored("text.verbosity", {"verbosity": "low"}, "no chat template has such a variable", ("medium",)),
    ignored("truncation", "auto", NOT_CUT, ("disabled",)),
    ignored("tools.defer_loading", [FUNCTION | {"defer_loading": True}], "the model sees the tool at once", (False,)),
    ignored(
        "tools.allowed_callers",
        [FUNCTION | {"allowed_callers": ["programmatic"]}],
        "the server runs no programs",
        (["direct"],),
    ),
    refused("conversation", "c", "use `previous_response_id`"),
    *shared.EVERYWHERE,
)

INPUT_TOKENS = Table(*PROMPT)

TABLE = Table(
    *PROMPT,
    ignored(
        "stream_options.include_obfuscation", {"include_obfuscation": True}, "no padding is sent", (False,), stream=True
    ),
    ignored("context_management", [{"type": "compaction"}], NOT_CUT, ([],)),
    refused("background", True, "the response ends with the request", (False,)),
    refused("background_options", {}, "it belongs to `background`"),
    refused("image", {}, "images are not supported by this server"),
    refused("moderation", {}, "there is no moderation"),
    refused("prompt", {"id": "p"}, "the server stores no prompts"),
    refused("messages", [USER], "use `input`", ([],)),
    refused("max_tokens", 2, "use `max_output_tokens`", (-1,)),
    refused("max_completion_tokens", 2, "use `max_output_tokens`", (-1,)),
    refused("response_format", {"type": "json_object"}, "use `text.format`", ({"type": "text"},)),
    refused("reasoning_effort", "low", "use `reasoning.effort`"),
    refused("logprobs", True, "use `include`", (False,)),
    refused("stop", ["a"], shared.ONLY_COMPLETIONS, ("", [], [""])),
    refused("top_k", 5, shared.ONLY_COMPLETIONS),
    *shared.OF_COMPLETIONS,
)
