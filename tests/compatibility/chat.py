"""Fields of chat completions."""

from __future__ import annotations

from typing import Any

from tests.compatibility import shared
from tests.compatibility.claims import Claim, by_model, honoured, ignored, label, refused

USER: dict[str, Any] = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def said(**fields: Any) -> list[dict[str, Any]]:
    """Returns a conversation with an answer that has these fields."""
    return [USER, {"role": "assistant", "content": "y"} | fields, USER]


MESSAGES: tuple[Claim, ...] = (
    honoured(
        "messages",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "roles `system`, `developer`, `user`, `assistant`, `tool`, `function`; text, or text parts",
    ),
    honoured(
        "messages",
        [
            *said(content=None, function_call={"name": "f", "arguments": "{}"})[:2],
            {"role": "function", "name": "f", "content": "z"},
        ],
        "OpenAI's calls before tools",
    ),
    honoured(
        "messages",
        [*said(tool_calls=[CALL])[:2], {"role": "tool", "content": "z"}],
        "a result without an id belongs to the first open call; one with an unknown id is shown as it is",
    ),
    honoured("messages", said(content=None), "an assistant's or a tool's empty content is an empty text"),
    honoured("messages", said(content=None, refusal="No."), "the refusal is the text"),
    ignored(
        "messages.audio",
        said(content=None, audio={"id": "a", "transcript": "y"}),
        "of an earlier answer; its `transcript` is the text if there is no other",
    ),
    honoured("messages", said(reasoning_content="Hm.", tool_calls=[]), "goes to the chat template"),
    by_model(
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}]}],
        f"{shared.IMAGES}; with `low`, at most 512 pixels a side",
    ),
    refused(
        "messages",
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        "audio, videos and files are not supported; in earlier turns they are left out",
    ),
    ignored(
        "messages.content.image_url",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, *said()],
        shared.LEFT_OUT,
    ),
    label("messages.tool_calls.index", [USER], "of a stream; the list has the order"),
    honoured("messages", [*said(prefix=True)[:2]], "`prefix` of the last message: as `continue_final_message`"),
)

TABLE: tuple[Claim, ...] = (
    *MESSAGES,
    honoured("model", "demo", "another model is a 404"),
    honoured("max_tokens", 2, "the default, `null` and -1 are no limit; it is cut to what is left of the context"),
    honoured("max_tokens", 0, "only the prompt is computed"),
    honoured("max_completion_tokens", 2, max_tokens=None),
    *shared.SAMPLING,
    honoured(
        "prediction",
        {"type": "content", "content": "x"},
        "draft tokens with [`--speculative auto`](scheduling.md#speculative-decoding); else it changes nothing",
    ),
    honoured("logprobs", True, "in streams too"),
    honoured("top_logprobs", 2, "up to 20", logprobs=True),
    *shared.PROMPT_LOGPROBS,
    label("response_format", {"type": "text"}),
    honoured("response_format", {"type": "json_object"}, "with `schema` too, as llama.cpp has it"),
    honoured(
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
        "always enforced, `strict` or not",
    ),
    refused(
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "no such"}}},
        "with the reason",
    ),
    label("tools", []),
    honoured(
        "tools",
        [FUNCTION],
        "if the chat template shows none, the [system message](structured-output.md#models-without-a-format-for-tools) "
        "does; ignored if that cannot be, and no call is required",
    ),
    label("tool_choice", "none"),
    honoured(
        "tool_choice",
        "required",
        "named ones too; needs `tools`, and calls in a format that a grammar can enforce",
        tools=[FUNCTION],
    ),
    refused(
        "tool_choice",
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTION]}},
        "honoured if the request has these tools; `mode` may be `required` too; the model sees no other tools",
    ),
    honoured("parallel_tool_calls", True),
    ignored("reasoning_effort", "low", "if the model does not think; else it limits the thinking"),
    honoured(
        "reasoning_effort",
        "none",
        "turns the thinking off by the template's switch; if it has none, the server closes the thought at once",
    ),
    ignored("thinking_budget", 100, "tokens; ignored if the model does not think"),
    ignored("thinking", {"type": "enabled", "budget_tokens": 100}, "GLM, DeepSeek, Kimi; as the two fields before"),
    ignored("reasoning", {"effort": "low"}, "OpenRouter's `effort`, `max_tokens` and `enabled`; likewise"),
    honoured(
        "chat_template_kwargs",
        {"enable_thinking": True},
        "also if the template's switch has another name; ignored, and named, if the model does not think",
    ),
    by_model(
        "chat_template_kwargs",
        {"documents": True},
        "the chat template must know the name",
    ),
    honoured("add_generation_prompt", True),
    honoured("continue_final_message", True, messages=[USER, {"role": "assistant", "content": "y"}]),
    *shared.DEADLINES,
    shared.PROGRESS,
    *shared.LABELS,
    *shared.CACHE_HINTS,
    *shared.HINTS,
    ignored("parse_tool_calls", True, "calls are always parsed"),
    ignored("web_search_options", {}, "the server runs no tools itself"),
    *shared.OTHERS,
)
