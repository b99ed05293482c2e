"""The table of types: what happens to each kind of item, content part, call and tool, in all APIs.

One rule made it, and holds for types that it does not have:
- What is history is never a reason for a 400: it is read, shown to the model as text, or left out. What is shown as
  text or left out is named in the response's header.
- A tool that the server would have to run is ignored by name beside tools that the client runs. Alone, it is refused.
- A part of the user's newest turn that cannot be shown is refused: the answer would be about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Handling(Enum):
    READ = "read"  # it has its meaning
    MEDIA = "by the model"  # shown if the model takes it; otherwise refused in the newest turn, left out before it
    SHOWN = "shown as text"
    LEFT_OUT = "left out"
    OFFERED = "offered"  # the tools in it can be called
    IGNORED = "ignored"  # a tool: the model does not see it, if there are others
    REFUSED = "refused"


@dataclass(frozen=True)
class Kind:
    """fields: what is shown of it, in an API that does not read it too."""

    handling: Handling
    fields: tuple[str, ...] = ()


READ, MEDIA, LEFT_OUT = Kind(Handling.READ), Kind(Handling.MEDIA), Kind(Handling.LEFT_OUT)
OFFERED, IGNORED, REFUSED = Kind(Handling.OFFERED), Kind(Handling.IGNORED), Kind(Handling.REFUSED)


def shown(*fields: str) -> Kind:
    return Kind(Handling.SHOWN, fields)


UNKNOWN = shown("name", "input", "arguments", "action", "text", "transcript", "content", "summary", "output")
"""A type that a table does not have. If it has none of these fields, it is left out."""

ITEMS: Mapping[str, Kind] = {
    "message": READ,
    "function_call": READ,
    "function_call_output": READ,
    "custom_tool_call": READ,
    "custom_tool_call_output": READ,
    "reasoning": READ,
    "item_reference": READ,
    "additional_tools": OFFERED,
    "tool_search_output": OFFERED,
    "tool_search_call": shown("arguments"),
    "web_search_call": shown("action"),
    "file_search_call": shown("queries", "results"),
    "code_interpreter_call": shown("code", "outputs"),
    "image_generation_call": shown("revised_prompt"),
    "computer_call": shown("action", "actions"),
    "computer_call_output": LEFT_OUT,
    "local_shell_call": shown("action"),
    "local_shell_call_output": shown("output"),
    "shell_call": shown("action"),
    "shell_call_output": shown("output"),
    "apply_patch_call": shown("operation"),
    "apply_patch_call_output": shown("output"),
    "mcp_call": shown("name", "arguments", "output", "error"),
    "mcp_approval_request": shown("name", "arguments"),
    "mcp_approval_response": LEFT_OUT,
    "mcp_list_tools": LEFT_OUT,
    "program": shown("code"),
    "program_output": shown("result"),
    "compaction": LEFT_OUT,
    "compaction_trigger": LEFT_OUT,
    "configuration_update": LEFT_OUT,
}
"""Items of OpenAI's responses."""

CHAT_PARTS: Mapping[str, Kind] = {
    "text": READ,
    "refusal": READ,
    "thinking": READ,
    "reasoning": READ,
    "image_url": MEDIA,
    "input_audio": MEDIA,
    "file": MEDIA,
}
"""Content parts of chat completions."""

CHAT_CALLS: Mapping[str, Kind] = {"function": READ, "custom": READ}
"""Calls in messages of chat completions."""

RESPONSES_PARTS: Mapping[str, Kind] = {
    "input_text": READ,
    "output_text": READ,
    "refusal": READ,
    "input_image": MEDIA,
    "input_file": MEDIA,
}
"""Content parts of responses."""

BLOCKS: Mapping[str, Kind] = {
    "text": READ,
    "thinking": READ,
    "redacted_thinking": LEFT_OUT,
    "image": MEDIA,
    "document": MEDIA,
    "search_result": READ,
    "tool_use": Kind(Handling.READ, ("name", "input")),
    "tool_result": Kind(Handling.READ, ("content",)),
    "tool_reference": READ,
    "server_tool_use": shown("name", "input"),
    "web_search_tool_result": shown("content"),
    "web_fetch_tool_result": shown("content"),
    "code_execution_tool_result": shown("content"),
    "bash_code_execution_tool_result": shown("content"),
    "text_editor_code_execution_tool_result": shown("content"),
    "advisor_tool_result": shown("content"),
    "mcp_tool_use": shown("name", "input"),
    "mcp_tool_result": shown("content"),
    "tool_search_tool_result": OFFERED,
    "tool_addition": OFFERED,
    "tool_removal": LEFT_OUT,
    "mcp_tool_listing": LEFT_OUT,
    "container_upload": LEFT_OUT,
    "compaction": shown("content"),
    "fallback": LEFT_OUT,
    "browser_state": shown("tabs", "state_changes"),
}
"""Content blocks of Anthropic's messages."""

RESPONSES_TOOLS: Mapping[str, Kind] = {
    "function": READ,
    "custom": READ,
    "namespace": READ,
    "web_search": IGNORED,
    "web_search_2025_08_26": IGNORED,
    "web_search_preview": IGNORED,
    "web_search_preview_2025_03_11": IGNORED,
    "file_search": IGNORED,
    "code_interpreter": IGNORED,
    "image_generation": IGNORED,
    "computer": IGNORED,
    "computer_use_preview": IGNORED,
    "local_shell": IGNORED,
    "shell": IGNORED,
    "apply_patch": IGNORED,
    "mcp": IGNORED,
    "tool_search": IGNORED,
    "programmatic_tool_calling": IGNORED,
}
"""Tools of responses."""

CHAT_TOOLS: Mapping[str, Kind] = {"function": READ, "custom": REFUSED}
"""Tools of chat completions."""

MESSAGES_TOOLS: Mapping[str, Kind] = {
    "custom": READ,
    "bash_20241022": READ,
    "bash_20250124": READ,
    "text_editor_20241022": READ,
    "text_editor_20250124": READ,
    "text_editor_20250429": READ,
    "text_editor_20250728": READ,
    "computer_20241022": IGNORED,
    "computer_20250124": IGNORED,
    "computer_20251124": IGNORED,
    "computer_toolset_20260801": IGNORED,
    "browser_toolset_20260801": IGNORED,
    "memory_20250818": READ,
    "code_execution_20250522": IGNORED,
    "code_execution_20250825": IGNORED,
    "code_execution_20260120": IGNORED,
    "code_execution_20260521": IGNORED,
    "web_search_20250305": IGNORED,
    "web_search_20260209": IGNORED,
    "web_search_20260318": IGNORED,
    "web_fetch_20250910": IGNORED,
    "web_fetch_20260209": IGNORED,
    "web_fetch_20260309": IGNORED,
    "web_fetch_20260318": IGNORED,
    "advisor_20260301": IGNORED,
    "tool_search_tool_bm25": IGNORED,
    "tool_search_tool_bm25_20251119": IGNORED,
    "tool_search_tool_regex": IGNORED,
    "tool_search_tool_regex_20251119": IGNORED,
    "mcp_toolset": IGNORED,
}
"""Tools of Anthropic's messages."""

OLLAMA_TOOLS: Mapping[str, Kind] = {"function": READ}
"""Tools of Ollama's chat."""

PARTS: Mapping[str, Kind] = {**CHAT_PARTS, **RESPONSES_PARTS, **BLOCKS}
"""Content of all APIs: each takes the parts of the others, so that a session can go on in another API."""
