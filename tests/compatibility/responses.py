"""Fields of OpenAI's responses, and of counting their tokens."""

from __future__ import annotations

from typing import Any

from tests.compatibility import shared
from tests.compatibility.claims import Claim, by_model, honoured, ignored, label, refused

USER: dict[str, Any] = {"role": "user", "content": "x"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}

PROMPT: tuple[Claim, ...] = (
    honoured(
        "input",
        [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        "text, or `message`, `function_call`, `custom_tool_call`, the results of both, `reasoning` and "
        "`item_reference` items",
    ),
    honoured(
        "input",
        [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]}, USER],
        "goes to the chat template as `reasoning_content`",
    ),
    ignored(
        "input.reasoning.encrypted_content",
        [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, USER],
        "another server encrypted this reasoning; a readable `summary` is shown",
    ),
    ignored(
        "input.web_search_call",
        [USER, {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}}, USER],
        "shown as text, or left out: see [Sessions of other services](api.md#sessions-of-other-services)",
    ),
    refused("input", [{"type": "function_call_output", "call_id": "c", "output": "x"}], "a result without its call"),
    by_model(
        "input",
        [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "low"}]}],
        f"{shared.IMAGES}; in the output of a call too",
    ),
    refused(
        "input",
        [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}],
        "audio and files are not supported; in earlier turns and results they are left out",
    ),
    ignored(
        "input.content.input_image",
        [
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
            {"role": "assistant", "content": "y"},
            USER,
        ],
        shared.LEFT_OUT,
    ),
    refused("input", [{"type": "item_reference", "id": "unknown"}], "honoured for items of stored responses"),
    honoured("model", "demo", "another model is a 404"),
    honoured(
        "instructions",
        "Be brief.",
        "not carried over to the next response; joined with the system messages that follow",
    ),
    refused("previous_response_id", "unknown", "honoured while the response is kept"),
    honoured("tools", [{"type": "function", "name": "f"}], "as in chat completions; `strict` is false by default"),
    ignored(
        "tools.output_schema", [{"type": "function", "name": "f", "output_schema": {}}], "results are shown as they are"
    ),
    ignored("reasoning.effort", {"effort": "later"}, "a level that is not known"),
    honoured(
        "reasoning",
        {"effort": "low"},
        "ignored, and named in the header, if the model does not think; `none` turns the thinking off",
    ),
    ignored("personality", "friendly", "put it into `instructions`"),
)

INPUT_TOKENS: tuple[Claim, ...] = (
    *PROMPT,
    label("text", {"format": {"type": "json_object"}}, "the format is not part of the prompt"),
    honoured("tool_choice", "none"),
    label("parallel_tool_calls", True),
)

TABLE: tuple[Claim, ...] = (
    *PROMPT,
    honoured("store", True, "in memory, the newest 1,000; in a batch only if it is true"),
    honoured("max_output_tokens", 2, "`null` and -1 are no limit; it is cut to what is left of the context"),
    honoured("temperature", 0.5),
    honoured("top_p", 0.5),
    honoured("include", ["message.output_text.logprobs"]),
    label(
        "include",
        ["reasoning.encrypted_content"],
        "nothing is encrypted: reasoning items have their text in `content`, and clients can send them back",
    ),
    ignored("include.file_search_call.results", ["file_search_call.results"], "it is for OpenAI's own tools"),
    honoured("top_logprobs", 2, include=["message.output_text.logprobs"]),
    honoured("stream", True),
    label("stream_options", {}, stream=True),
    honoured("service_tier", "flex", "low priority"),
    *shared.DEADLINES,
    shared.PROGRESS,
    shared.LOOPS,
    label("metadata", {"a": "b"}, "returned with the response"),
    label("client_metadata", {"a": "b"}, "Codex sends it"),
    label("user", "u"),
    label("safety_identifier", "s"),
    label("prompt_cache_key", "k"),
    label("text", {"format": {"type": "text"}, "verbosity": "medium"}),
    honoured("text", {"format": {"type": "json_object"}}),
    honoured(
        "text",
        {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}},
        "always enforced, `strict` or not",
    ),
    label("tools", []),
    honoured(
        "tools",
        [{"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "f"}]}],
        "the model calls the tool `n__f`; the call in the response has `namespace`",
    ),
    honoured(
        "tools",
        [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}],
        "calls are `custom_tool_call` items; a Lark grammar holds where the model's format writes texts without quotes",
    ),
    refused(
        "tools",
        [{"type": "web_search"}],
        "so are OpenAI's other tools and MCP, alone",
    ),
    ignored(
        "tools.web_search",
        [{"type": "function", "name": "f"}, {"type": "web_search"}],
        "beside functions, because agents send them to every server: the model does not see them, and the response's "
        "`tools` do not have them",
    ),
    label("tool_choice", "none"),
    honoured(
        "tool_choice",
        "required",
        "as in chat completions; named ones too",
        tools=[{"type": "function", "name": "f"}],
    ),
    refused(
        "tool_choice",
        ALLOWED,
        "honoured if the request has these tools; `mode` may be `required` too; the model sees no other tools",
    ),
    refused("tool_choice", {"type": "file_search"}),
    honoured("parallel_tool_calls", True),
    label("max_tool_calls", 1, "it limits calls of the server's own tools, and there are none"),
    *shared.CACHE_HINTS,
    ignored("access_programs", [], "they belong to OpenAI's service"),
)
