"""Fields of chat completions."""

from __future__ import annotations

from typing import Any

from mlxpaged.api.fields import shared
from mlxpaged.api.fields.table import Row, Table, alias, ignored, label, refused

USER: dict[str, Any] = {"role": "user", "content": "x"}
IN_CONTENT = "the thinking is always `reasoning_content`"


def said(**fields: Any) -> list[dict[str, Any]]:
    """Returns a conversation with an answer that has these fields."""
    return [USER, {"role": "assistant", "content": "y"} | fields, USER]


MESSAGES: tuple[Row, ...] = (
    alias("messages.reasoning", said(reasoning="Hm."), "reasoning_content", "vLLM, OpenRouter"),
    ignored("messages.reasoning_details", said(reasoning_details=[{}]), "use `reasoning_content`", ([],)),
    ignored("messages.thinking_blocks", said(thinking_blocks=[{}]), "use `reasoning_content`", ([],)),
    label("messages.annotations", said(annotations=[{}]), "of an earlier answer"),
    label("messages.provider_specific_fields", said(provider_specific_fields={"a": 1}), "LiteLLM's notes"),
    label("messages.id", said(id="i"), "of an earlier answer"),
    label("messages.status", said(status="completed"), "of an earlier answer"),
)

TABLE = Table(
    *MESSAGES,
    *shared.SAMPLING,
    *shared.EVERYWHERE,
    *shared.ALIASES,
    alias("enable_thinking", True, "chat_template_kwargs.enable_thinking", "Qwen's"),
    alias("think", True, "chat_template_kwargs.enable_thinking", "Ollama, Open WebUI; true or false"),
    alias("thinking_token_budget", 100, "thinking_budget", "vLLM"),
    ignored("store", True, "nothing is stored", (False,)),
    ignored("verbosity", "low", "no chat template has such a variable", ("medium",)),
    *shared.HINTS,
    ignored("include_reasoning", False, IN_CONTENT, (True,)),
    ignored("separate_reasoning", False, IN_CONTENT, (True,)),
    ignored("reasoning_format", "none", IN_CONTENT, ("auto", "deepseek")),
    refused("modalities", ["text", "audio"], "audio is not supported by this server", (["text"],)),
    refused("audio", {"voice": "alloy", "format": "wav"}, "audio is not supported by this server"),
    refused("functions", [{"name": "f"}], "replaced by `tools`", ([],)),
    refused("function_call", "auto", "replaced by `tool_choice`"),
    refused("moderation", {"model": "m"}, "there is no moderation"),
    refused("best_of", 2, "use `n`", (1,)),
    refused("echo", True, "use `/v1/completions`", (False,)),
    refused("add_special_tokens", True, "the chat template adds them", (False,)),
    refused(
        "chat_template", "{{ messages }}", "the server uses the model's own template, or that of `--chat-template`"
    ),
    refused("documents", [{"text": "x"}], "put them into a message", ([],)),
    refused("system", "Be brief.", "put it into a message", ("",)),
    refused("instructions", "Be brief.", "put it into a message", ("",)),
    refused("role_mapping", {"user": "U"}, "the chat template writes the roles"),
    refused("safe_prompt", True, "put it into a message", (False,)),
    *shared.REFUSALS,
)
