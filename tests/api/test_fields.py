"""What clients send: each field is honoured, ignored and named, or refused with the reason; nothing silently changes an
answer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from mlxpaged.api.anthropic import translation as anthropic
from mlxpaged.api.anthropic.schema import MessagesRequest
from mlxpaged.api.body import validate
from mlxpaged.api.errors import ApiError
from mlxpaged.api.ignored_fields import MAX_LOGGED, IgnoredFields
from mlxpaged.api.openai import chat, completions
from mlxpaged.api.openai.embeddings import EmbeddingsRequest
from mlxpaged.api.openai.responses import translation as responses
from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.schema import ChatRequest, CompletionRequest
from mlxpaged.api.reading import MAX_NAME, MAX_NAMES, Reading
from mlxpaged.api.schema import LIKELIEST_ONLY
from tests.api.helpers import ask, events, post, raw, run_on, stream_events
from tests.support import RunningServer

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
USER: dict[str, Any] = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "y"}
OLD_RESULT = {"role": "function", "name": "f", "content": "z"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}

SMALLEST: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    CHAT: (ChatRequest, {"messages": [USER]}),
    COMPLETIONS: (CompletionRequest, {"prompt": "x"}),
    RESPONSES: (ResponseRequest, {"input": "x"}),
    MESSAGES: (MessagesRequest, {"model": "m", "max_tokens": 5, "messages": [USER]}),
    EMBEDDINGS: (EmbeddingsRequest, {"input": "x"}),
}


class Honoured(NamedTuple):
    """The value of an attribute of the neutral request, or of an embeddings body."""

    path: str
    value: Any


class Ignored(NamedTuple):
    """The name in the header; none for a field whose value changes nothing."""

    name: str | None


class Refused(NamedTuple):
    reason: str


One = Honoured | Ignored | Refused
Expected = One | list[One]
Case = tuple[str, str, dict[str, Any], Expected]

NOTHING = Ignored(None)


def param(name: str, value: Any) -> Honoured:
    return Honoured(f"params.{name}", value)


def effort(level: str | None, budget: int | None, enabled: bool | None) -> list[One]:
    """What becomes of the fields about thinking."""
    return [
        Honoured("prompt.effort", level),
        Honoured("prompt.enable_thinking", enabled),
        param("thinking_budget", budget),
    ]


def both(client: str, fields: dict[str, Any], expected: Expected) -> list[Case]:
    return [(client, path, fields, expected) for path in (CHAT, COMPLETIONS)]


def said(**fields: Any) -> dict[str, Any]:
    """A conversation with an answer that has these fields."""
    return {"messages": [USER, {"role": "assistant"} | fields, USER]}


def content(text: str) -> Honoured:
    return Honoured("prompt.messages.1.content", text)


def medium(place: str) -> Honoured:
    """The model decides what becomes of an image."""
    return Honoured("prompt.media.0.param", place)


SAMPLERS: list[Case] = [
    *both("OpenAI", {"temperature": 0.5}, param("temperature", 0.5)),
    *both("OpenAI", {"max_tokens": 7}, param("max_tokens", 7)),
    *both("LM Studio", {"max_tokens": -1}, param("max_tokens", None)),
    *both("Open WebUI", {"max_tokens": None}, param("max_tokens", None)),
    *both("n8n", {"max_tokens": "7"}, param("max_tokens", 7)),
    *both("n8n", {"max_tokens": 7.0}, param("max_tokens", 7)),
    *both("n8n", {"temperature": "0.5"}, param("temperature", 0.5)),
    *both("n8n", {"seed": "-3"}, param("seed", -3)),
    *both("n8n", {"max_tokens": "seven"}, Refused("max_tokens: must be a whole number")),
    *both("n8n", {"max_tokens": "7.5"}, Refused("max_tokens: must be a whole number")),
    *both("n8n", {"max_tokens": 7.5}, Refused("max_tokens: must be a whole number")),
    *both("n8n", {"temperature": "nan"}, Refused("temperature: must be a number")),
    *both("n8n", {"temperature": "9" * 5000}, Refused("temperature: must be a number")),
    *both("n8n", {"stream": "1"}, Refused("stream: must be true or false")),
    *both("Ollama", {"num_predict": 7, "max_tokens": 8}, [param("max_tokens", 8), Ignored("num_predict")]),
    *both("Ollama", {"num_predict": 7, "max_tokens": 7}, param("max_tokens", 7)),
    *both("Ollama", {"options": {"top_k": "5", "num_predict": 7}}, [param("top_k", 5), param("max_tokens", 7)]),
    *both("Ollama", {"options": {"top_k": 5}, "top_k": 6}, [param("top_k", 6), Ignored("options.top_k")]),
    *both("Ollama", {"options": {"top_k": 6}, "top_k": 6}, param("top_k", 6)),
    *both("Ollama", {"options": {"colour": 6}}, Ignored("colour")),
    *both("Ollama", {"options": {"options": {"top_k": 5}}}, Ignored("options.options")),
    *both("Ollama", {"options": {"mirostat": 2}}, Refused("mirostat")),
    *both("Ollama", {"options": None}, NOTHING),
    *both("Ollama", {"options": 3}, Refused("options: must be an object")),
    *both("OpenAI", {"top_p": 0}, param("top_p", LIKELIEST_ONLY)),
    *both("OpenAI", {"top_p": -1}, Refused("top_p")),
    *both("OpenAI", {"max_tokens": -7}, Refused("max_tokens")),
    ("LiteLLM", CHAT, {"max_completion_tokens": -1}, param("max_tokens", None)),
    ("LiteLLM", CHAT, {"max_completion_tokens": 9, "max_tokens": 9}, param("max_tokens", 9)),
    ("LiteLLM", CHAT, {"max_completion_tokens": 9, "max_tokens": 8}, Refused("differs from max_completion_tokens")),
    *both("text-generation-webui", {"max_new_tokens": 7}, param("max_tokens", 7)),
    *both("Responses", {"max_output_tokens": 7}, param("max_tokens", 7)),
    ("LiteLLM", COMPLETIONS, {"max_completion_tokens": 7}, param("max_tokens", 7)),
    *both("SGLang", {"max_new_tokens": 7, "max_tokens": 8}, Refused("max_new_tokens: differs from max_tokens")),
    *both("SGLang", {"max_new_tokens": 7, "max_tokens": 7}, param("max_tokens", 7)),
    *both("Ollama", {"num_predict": 7}, param("max_tokens", 7)),
    *both("Ollama", {"num_predict": -1}, param("max_tokens", None)),
    *both("llama.cpp", {"n_predict": 7}, param("max_tokens", 7)),
    *both("llama.cpp", {"n_predict": "many"}, Refused("max_tokens")),
    *both("LM Studio", {"repeat_penalty": 1.1}, param("repetition_penalty", 1.1)),
    *both("LM Studio", {"repeat_penalty": 1.1, "repetition_penalty": 1.2}, Refused("repeat_penalty: differs from")),
    *both("mlx-lm", {"repetition_penalty": 0.0}, param("repetition_penalty", 1.0)),
    *both("mlx-lm", {"repetition_context_size": 20}, param("repetition_context_size", 20)),
    *both("llama.cpp", {"repeat_last_n": 64}, param("repetition_context_size", 64)),
    *both("llama.cpp", {"repeat_last_n": -1}, param("repetition_context_size", None)),
    *both("SillyTavern", {"repetition_penalty_range": 0}, NOTHING),
    *both("SillyTavern", {"repetition_penalty_range": 100}, param("repetition_context_size", 100)),
    *both("mlx-lm", {"presence_context_size": 20}, NOTHING),
    *both("mlx-lm", {"presence_context_size": 20, "presence_penalty": 1}, Refused("counts the whole answer")),
    *both("mlx-lm", {"xtc_probability": 0.0, "xtc_threshold": 0.1}, Ignored("xtc_threshold")),
    *both("SillyTavern", {"xtc_probability": 0.5}, Refused("xtc_probability")),
    *both("SillyTavern", {"typical_p": 1}, NOTHING),
    *both("SillyTavern", {"typical_p": 0.9}, Refused("top_p, top_k and min_p")),
    *both("llama.cpp", {"tfs_z": 1.0}, NOTHING),
    *both("llama.cpp", {"tfs_z": 0.9}, Refused("tfs_z")),
    *both("SillyTavern", {"top_a": 0}, NOTHING),
    *both("SillyTavern", {"min_p": 0.05}, param("min_p", 0.05)),
    *both("Ollama", {"mirostat": 0, "mirostat_tau": 5}, Ignored("mirostat_tau")),
    *both("Ollama", {"mirostat": 2}, Refused("mirostat")),
    *both("llama.cpp", {"dry_multiplier": 0.0}, NOTHING),
    *both("llama.cpp", {"dry_multiplier": 0.8}, Refused("dry_multiplier")),
    *both("llama.cpp", {"dynatemp_range": 0.5}, Refused("one temperature")),
    *both("llama.cpp", {"samplers": ["top_k", "temperature"]}, Refused("order of the samplers")),
    *both("llama.cpp", {"seed": -1}, param("seed", None)),
    *both("Mistral", {"random_seed": 7}, param("seed", 7)),
    *both("vLLM", {"top_k": -1}, param("top_k", 0)),
    *both("vLLM", {"best_of": 1}, NOTHING),
    ("vLLM", CHAT, {"best_of": 2}, Refused("use n")),
    *both("vLLM", {"use_beam_search": False, "length_penalty": 1.0}, NOTHING),
    *both("vLLM", {"use_beam_search": True}, Refused("beam search")),
    *both("vLLM", {"length_penalty": 1.5}, Ignored("length_penalty")),
    *both("vLLM", {"logits_processors": ["p"]}, Refused("logit_bias")),
    *both("vLLM", {"allowed_token_ids": [1]}, Refused("allowed_token_ids")),
    *both("vLLM", {"bad_words": []}, NOTHING),
    *both("HF", {"do_sample": True}, NOTHING),
    *both("HF", {"do_sample": False}, Refused("temperature 0")),
    *both("aider", {"stop": [""]}, param("stop", ())),
    *both("Continue", {"stop": ""}, param("stop", ())),
    *both("Continue", {"stop": []}, param("stop", ())),
    *both("Continue", {"stop": ["", "a"]}, param("stop", ("a",))),
    *both("SillyTavern", {"stop": ["a"], "stopping_strings": ["a"]}, param("stop", ("a",))),
    *both("Anthropic-like", {"stop_sequences": ["a"]}, param("stop", ("a",))),
    *both("text-generation-webui", {"ban_eos_token": True}, param("ignore_eos", True)),
]
FORMS: list[Case] = [
    *both("llama.cpp", {"json_schema": {"type": "integer"}}, param("constraint.kind", "json_schema")),
    *both("llama.cpp", {"grammar": 'root ::= "a"'}, param("constraint.kind", "grammar")),
    *both("llama.cpp", {"grammar": ""}, param("constraint", None)),
    *both("SGLang", {"regex": "a+"}, param("constraint.kind", "regex")),
    *both("SGLang", {"ebnf": "root ::= x"}, Refused("guided_grammar")),
    *both("vLLM", {"guided_decoding_backend": "outlines"}, Ignored("guided_decoding_backend")),
    *both("vLLM", {"structured_outputs": {"structural_tag": "{}"}}, Refused("structural_tag")),
    *both("vLLM", {"structured_outputs": {"regex": "a", "backend": "x"}}, Ignored("structured_outputs.backend")),
    (
        "llama.cpp",
        CHAT,
        {"response_format": {"type": "json_object", "schema": {"type": "object", "required": ["a"]}}},
        param("constraint.param", "response_format.schema"),
    ),
    (
        "llama.cpp",
        CHAT,
        {"response_format": {"type": "json_object", "schema": {}}},
        param("constraint.text", '{"type":"object"}'),
    ),
    ("llama.cpp", CHAT, {"response_format": {"type": "text", "schema": {}}}, Refused("schema")),
    ("vLLM", COMPLETIONS, {"response_format": {"type": "json_object"}}, Refused("structured_outputs")),
    ("vLLM", COMPLETIONS, {"response_format": {"type": "text"}}, NOTHING),
    *both("text-generation-webui", {"grammar_string": 'root ::= "a"'}, param("constraint.kind", "grammar")),
    *both("SillyTavern", {"grammar_string": "", "banned_strings": [], "custom_token_bans": "", "nsigma": 0}, NOTHING),
    ("LangChain", CHAT, {"response_format": {"type": "text", "x": 1}}, Ignored("response_format.x")),
    ("Ollama", CHAT, {"format": "json"}, Refused("response_format")),
]
HINTS: list[Case] = [
    *both("Open WebUI", {"num_ctx": 8192}, Ignored("num_ctx")),
    *both("Open WebUI", {"keep_alive": "5m"}, Ignored("keep_alive")),
    *both("Ollama", {"options": {"temperature": 0}}, param("temperature", 0)),
    *both("LM Studio", {"ttl": 60}, Ignored("ttl")),
    *both("LM Studio", {"draft_model": "d"}, Ignored("draft_model")),
    *both("llama.cpp", {"cache_prompt": True}, NOTHING),
    *both("llama.cpp", {"cache_prompt": False}, Ignored("cache_prompt")),
    *both("llama.cpp", {"id_slot": 2}, Ignored("id_slot")),
    *both("llama.cpp", {"lora": [{"id": 0, "scale": 1}]}, Refused("adapters")),
    *both("llama.cpp", {"n_probs": 2}, Refused("logprobs")),
    *both("mlx-lm", {"adapters": None}, NOTHING),
    *both("mlx-lm", {"adapters": "pirate"}, Honoured("adapters", "pirate")),
    *both("SGLang", {"lora_path": "pirate"}, Honoured("adapters", "pirate")),
    *both("vLLM", {"priority": 3}, Ignored("priority")),
    *both("vLLM", {"skip_special_tokens": True}, NOTHING),
    *both("vLLM", {"skip_special_tokens": False}, Refused("special tokens")),
    *both("vLLM", {"spaces_between_special_tokens": False}, Ignored("spaces_between_special_tokens")),
    *both("vLLM", {"include_stop_str_in_output": True}, Refused("stop string")),
    *both("vLLM", {"truncate_prompt_tokens": 9}, Refused("never cut")),
    *both("vLLM", {"cache_salt": "s"}, Honoured("cache_salt", "s")),
    ("OpenAI", COMPLETIONS, {"prediction": {"type": "content", "content": "x"}}, Ignored("prediction")),
    ("OpenAI", CHAT, {"prediction": {"type": "content", "content": "x"}}, NOTHING),
    ("OpenAI", CHAT, {"prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]}}, NOTHING),
    ("OpenAI", CHAT, {"prediction": {"type": "text", "content": "x"}}, Refused("prediction")),
    *both("OpenAI", {"user": 3}, NOTHING),
    *both("OpenAI", {"user": {"id": 3}}, NOTHING),
    *both("OpenAI", {"metadata": {"a": 1, "b": {"c": [None]}}}, NOTHING),
    *both("OpenAI", {"metadata": 1}, Refused("metadata: must be an object")),
    *both("vLLM", {"return_token_ids": True}, Ignored("return_token_ids")),
    *both("raw HTTP", {"extra_body": {"top_k": 1}}, Refused("OpenAI's client")),
    *both("raw HTTP", {"maxTokens": 3}, Ignored("maxTokens")),
    *both("raw HTTP", {"größe": 3}, Ignored("gr??e")),
    *both("raw HTTP", {"": 3}, Ignored("?")),
    *both("raw HTTP", {"__class__": {}}, Ignored("__class__")),
    *both("raw HTTP", {"nothing": None}, NOTHING),
    *both(
        "guidellm",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        Ignored("stream_options.include_obfuscation"),
    ),
    *both("raw HTTP", {"stream": True, "stream_options": {"colour": 1}}, Ignored("stream_options.colour")),
    *both("raw HTTP", {"stream_options": {"include_usage": True}}, NOTHING),
    ("OpenAI", CHAT, {"store": True}, Ignored("store")),
    ("OpenAI", CHAT, {"store": False}, NOTHING),
    ("OpenAI", CHAT, {"verbosity": "low"}, Ignored("verbosity")),
    ("OpenAI", CHAT, {"verbosity": "medium"}, NOTHING),
    ("OpenAI", CHAT, {"modalities": ["text"]}, NOTHING),
    ("OpenAI", CHAT, {"modalities": ["text", "audio"]}, Refused("audio is not supported by this server")),
    ("OpenAI", CHAT, {"audio": {"voice": "v"}}, Refused("audio is not supported by this server")),
    ("OpenAI", CHAT, {"web_search_options": {}}, Ignored("web_search_options")),
    ("OpenAI", CHAT, {"functions": []}, NOTHING),
    ("OpenAI", CHAT, {"functions": [{"name": "f"}]}, Refused("replaced by tools")),
    ("OpenAI", CHAT, {"tools": []}, Honoured("prompt.tools", [])),
    ("Qwen", CHAT, {"enable_thinking": False}, Honoured("prompt.chat_template_kwargs", {"enable_thinking": False})),
    ("Open WebUI", CHAT, {"think": False}, Honoured("prompt.chat_template_kwargs", {"enable_thinking": False})),
    (
        "Qwen",
        CHAT,
        {"enable_thinking": False, "chat_template_kwargs": {"a": 1}},
        Honoured("prompt.chat_template_kwargs", {"a": 1, "enable_thinking": False}),
    ),
    ("Qwen", CHAT, {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, Refused("differs")),
    ("Qwen", CHAT, {"enable_thinking": False, "chat_template_kwargs": 3}, Refused("chat_template_kwargs")),
    ("vLLM", CHAT, {"thinking_token_budget": 9}, param("thinking_budget", 9)),
    ("OpenRouter", CHAT, {"reasoning": {"effort": "low"}}, effort("low", 1024, None)),
    ("OpenRouter", CHAT, {"reasoning": {"effort": "none"}}, effort("none", None, False)),
    ("OpenRouter", CHAT, {"reasoning": {"max_tokens": 9}}, effort(None, 9, None)),
    ("OpenRouter", CHAT, {"reasoning": {"enabled": False}}, effort("none", None, False)),
    ("OpenRouter", CHAT, {"reasoning": {"enabled": True}}, effort(None, None, True)),
    ("OpenRouter", CHAT, {"reasoning": {"effort": "low"}, "reasoning_effort": "medium"}, effort("medium", 4096, None)),
    ("OpenRouter", CHAT, {"reasoning": {"exclude": True}}, Ignored("reasoning.exclude")),
    ("OpenRouter", CHAT, {"reasoning": {"effort": "much"}}, Ignored("reasoning.effort")),
    ("Groq", CHAT, {"reasoning_effort": "default"}, effort(None, None, None)),
    ("GLM", CHAT, {"thinking": {"type": "disabled"}}, effort("none", None, False)),
    ("GLM", CHAT, {"thinking": {"type": "enabled"}}, effort(None, None, True)),
    ("GLM", CHAT, {"thinking": {"type": "enabled", "clear_thinking": False}}, Ignored("thinking.clear_thinking")),
    ("LiteLLM", CHAT, {"thinking": {"type": "enabled", "budget_tokens": 9}}, effort(None, 9, True)),
    ("LiteLLM", CHAT, {"thinking": {"type": "auto"}}, effort(None, None, None)),
    ("LiteLLM", CHAT, {"thinking": True}, effort(None, None, True)),
    ("LiteLLM", CHAT, {"thinking": False}, effort("none", None, False)),
    ("LiteLLM", CHAT, {"thinking": "yes"}, Refused("thinking")),
    ("OpenRouter", CHAT, {"include_reasoning": True}, NOTHING),
    ("OpenRouter", CHAT, {"provider": {"order": []}}, Ignored("provider")),
    ("OpenRouter", CHAT, {"usage": {"include": True}}, Ignored("usage")),
    ("llama.cpp", CHAT, {"reasoning_format": "auto"}, NOTHING),
    ("vLLM", CHAT, {"chat_template": "x"}, Refused("own template")),
    ("Anthropic-like", CHAT, {"system": "Be brief."}, Refused("into a message")),
    ("vLLM", CHAT, {"documents": [{"a": "b"}]}, Refused("into a message")),
    ("mlx-lm", CHAT, {"role_mapping": {"user": "U"}}, Refused("roles")),
    ("OpenAI", COMPLETIONS, {"suffix": ""}, NOTHING),
    ("Continue", COMPLETIONS, {"suffix": "x"}, Honoured("suffix", "x")),
    ("vLLM", COMPLETIONS, {"add_special_tokens": True}, NOTHING),
    ("vLLM", COMPLETIONS, {"add_special_tokens": False}, Refused("token ids")),
]
HISTORY: list[Case] = [
    ("OpenAI", CHAT, said(content=None), content("")),
    ("LiteLLM", CHAT, said(), content("")),
    ("LiteLLM", CHAT, said(content=[]), content("")),
    ("OpenAI", CHAT, said(content=None, refusal="No."), content("No.")),
    ("OpenAI", CHAT, said(content="y", refusal=None, audio=None, function_call=None, annotations=[]), content("y")),
    ("OpenAI", CHAT, said(content="y", annotations=[{"type": "url_citation"}]), content("y")),
    ("OpenAI", CHAT, said(content=[{"type": "refusal", "refusal": "No."}]), content("No.")),
    ("OpenAI", CHAT, said(content=[{"type": "output_text", "text": "y"}]), content("y")),
    ("OpenAI", CHAT, said(content="y", tool_calls=[]), content("y")),
    ("OpenAI", CHAT, said(content="y", name="n", id="i", status="completed"), Honoured("prompt.messages.1.name", "n")),
    ("vLLM", CHAT, said(content="y", reasoning="Hm."), Honoured("prompt.messages.1.reasoning_content", "Hm.")),
    ("vLLM", CHAT, said(content="y", reasoning="a", reasoning_content="b"), Refused("differs from reasoning_content")),
    (
        "Open WebUI",
        CHAT,
        said(content="y", reasoning_content="Hm."),
        Honoured("prompt.messages.1.reasoning_content", "Hm."),
    ),
    (
        "OpenRouter",
        CHAT,
        said(content="y", reasoning="Hm.", reasoning_details=[{}]),
        Ignored("messages.reasoning_details"),
    ),
    ("LiteLLM", CHAT, said(content="y", provider_specific_fields={"a": 1}), NOTHING),
    ("LiteLLM", CHAT, said(content="y", thinking_blocks=[{}]), Ignored("messages.thinking_blocks")),
    ("OpenAI", CHAT, said(content="y", audio={"id": "a"}), [content("y"), Ignored("messages.audio")]),
    (
        "OpenAI",
        CHAT,
        said(content=None, audio={"id": "a", "transcript": "y"}),
        [content("y"), Ignored("messages.audio")],
    ),
    (
        "OpenAI",
        CHAT,
        {"messages": [*said(content=None, function_call=CALL["function"])["messages"][:2], OLD_RESULT]},
        [
            Honoured("prompt.messages.1.tool_calls.0.function", {"name": "f", "arguments": {"a": 1}}),
            Honoured("prompt.messages.2", {"role": "tool", "name": "f", "content": "z"}),
        ],
    ),
    (
        "raw HTTP",
        CHAT,
        said(role="user", content="y", function_call={"name": "f"}),
        Refused("only messages of the role"),
    ),
    ("Mistral", CHAT, said(content="y", prefix=True), Honoured("prompt.continue_final_message", False)),
    (
        "Mistral",
        CHAT,
        {"messages": said(content="y", prefix=True)["messages"][:2]},
        Honoured("prompt.continue_final_message", True),
    ),
    ("raw HTTP", CHAT, said(content="y", colour="red"), Ignored("messages.colour")),
    (
        "OpenAI",
        CHAT,
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}]}, RESULT]},
        Honoured("prompt.messages.1.tool_calls.0.function.arguments", {"a": 1}),
    ),
    (
        "smolagents",
        CHAT,
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT | {"content": None, "name": "f"}]},
        Honoured("prompt.messages.2.content", ""),
    ),
    (
        "LiteLLM",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "any"}}]}]},
        NOTHING,
    ),
    ("raw HTTP", CHAT, {"messages": [{"role": "user", "content": None}]}, Refused("content: is required")),
    (
        "raw HTTP",
        CHAT,
        {"messages": [USER | {"content": [{"type": "text", "text": "x", "y": 1}]}]},
        Ignored("messages.content.y"),
    ),
    ("OpenAI", CHAT, {"messages": [USER | {"content": [IMAGE]}]}, medium("messages.0.content.0")),
    (
        "LiteLLM",
        CHAT,
        {"messages": [USER | {"content": [{"type": "image_url", "image_url": "data:,"}]}]},
        Honoured("prompt.media.0.part.image.data", "data:,"),
    ),
    (
        "OpenAI",
        CHAT,
        {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"detail": "low"}}]}]},
        Refused("messages.0.content.0.image_url.url: is required"),
    ),
    (
        "OpenAI",
        CHAT,
        {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "x", "detail": "most"}}]}]},
        Ignored("messages.content.image_url.detail"),
    ),
    (
        "OpenAI",
        CHAT,
        {"messages": [USER | {"content": [{"type": "image_url", "image_url": 5}]}]},
        Refused("messages.0.content.0.image_url: must be an object"),
    ),
    (
        "OpenAI",
        CHAT,
        {"messages": [USER | {"content": [{"type": "input_audio", "input_audio": {}}]}]},
        Refused("audio is not supported by this server"),
    ),
    (
        "OpenAI",
        CHAT,
        {"messages": [USER | {"content": [{"type": "file", "file": {}}]}]},
        Refused("files are not supported by this server"),
    ),
    (
        "Open WebUI",
        CHAT,
        {"tools": [{"type": "function", "x": 1, "function": {"name": "f"}}]},
        Ignored("tools.x"),
    ),
    (
        "LiteLLM",
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "cache_control": {}}}]},
        Honoured("prompt.tools.0.name", "f"),
    ),
    (
        "raw HTTP",
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
        Ignored("tools.function.x"),
    ),
]
OTHERS: list[Case] = [
    ("Codex", RESPONSES, {"max_output_tokens": -1}, param("max_tokens", None)),
    ("Codex", RESPONSES, {"reasoning": {"summary": "detailed"}}, Ignored("reasoning.summary")),
    ("Codex", RESPONSES, {"reasoning": {"summary": "auto"}}, NOTHING),
    ("Codex", RESPONSES, {"text": {"verbosity": "low"}}, Ignored("text.verbosity")),
    ("Codex", RESPONSES, {"truncation": "auto"}, Ignored("truncation")),
    ("Codex", RESPONSES, {"prompt_cache_retention": "24h"}, Ignored("prompt_cache_retention")),
    ("OpenAI", RESPONSES, {"background": False}, NOTHING),
    ("OpenAI", RESPONSES, {"background": True}, Refused("background")),
    ("OpenAI", RESPONSES, {"conversation": "c"}, Refused("previous_response_id")),
    ("OpenAI", RESPONSES, {"colour": 1}, Ignored("colour")),
    ("OpenAI", RESPONSES, {"response_format": {"type": "json_object"}}, Refused("use text.format")),
    ("OpenAI", RESPONSES, {"max_tokens": 7}, Refused("use max_output_tokens")),
    ("OpenAI", RESPONSES, {"stop": ["a"]}, Refused("stop: this parameter is not supported")),
    ("OpenAI", RESPONSES, {"seed": 7}, Refused("chat completions have it")),
    ("OpenAI", RESPONSES, {"n": 1, "stop": []}, NOTHING),
    ("OpenAI", RESPONSES, {"input": [USER | {"colour": 1}]}, Ignored("input.colour")),
    (
        "OpenAI",
        RESPONSES,
        {"input": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "id": "m"}]},
        content("No."),
    ),
    (
        "OpenAI",
        RESPONSES,
        {"input": [USER | {"content": [{"type": "input_image", "image_url": "x"}]}]},
        medium("input.0.content.0"),
    ),
    (
        "OpenAI",
        RESPONSES,
        {"input": [USER | {"content": [{"type": "input_file", "file_id": "f"}]}]},
        Refused("files are not supported by this server"),
    ),
    ("Claude Code", MESSAGES, {"max_tokens": -1}, param("max_tokens", None)),
    ("Claude Code", MESSAGES, {"stop_sequences": [""]}, param("stop", ())),
    ("Claude Code", MESSAGES, {"stop_sequences": ["a"]}, param("stop", ("a",))),
    ("LiteLLM", MESSAGES, {"response_format": {"type": "json_object"}}, Refused("use output_config.format")),
    ("LiteLLM", MESSAGES, {"stop": ["a"]}, Refused("use stop_sequences")),
    ("LiteLLM", MESSAGES, {"presence_penalty": 0.5}, Refused("chat completions have it")),
    ("Claude Code", MESSAGES, {"messages": [USER | {"content": []}]}, Honoured("prompt.messages.0.content", "")),
    ("Claude Code", MESSAGES, {"betas": ["b"]}, Ignored("betas")),
    ("Claude Code", MESSAGES, {"speed": "fast"}, Ignored("speed")),
    ("Claude Code", MESSAGES, {"container": "c"}, Ignored("container")),
    ("Claude Code", MESSAGES, {"mcp_servers": []}, NOTHING),
    ("Claude Code", MESSAGES, {"mcp_servers": [{"url": "x"}]}, Refused("runs no tools itself")),
    ("Claude Code", MESSAGES, {"context_management": {"edits": [{"type": "x"}]}}, Ignored("context_management")),
    (
        "Claude Code",
        MESSAGES,
        {"system": [{"type": "text", "text": "S", "cache_control": {"type": "x"}}]},
        Honoured("prompt.messages.0.content", "S"),
    ),
    ("Claude Code", MESSAGES, {"messages": [USER, {"role": "assistant", "content": []}, USER]}, content("")),
    ("Claude Code", MESSAGES, {"messages": [USER | {"id": "m"}]}, Ignored("messages.id")),
    (
        "Claude Code",
        MESSAGES,
        {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]}, USER]},
        Honoured("prompt.messages.1.reasoning_content", "Hm."),
    ),
    (
        "Claude Code",
        MESSAGES,
        {"messages": [USER | {"content": [{"type": "text", "text": "x", "citations": [{}]}]}]},
        NOTHING,
    ),
    (
        "Claude Code",
        MESSAGES,
        {"messages": [USER | {"content": [{"type": "image", "source": {}}]}]},
        medium("messages.0.content.0"),
    ),
    (
        "Claude Code",
        MESSAGES,
        {"messages": [USER | {"content": [{"type": "document", "source": {}}]}]},
        Refused("documents are not supported by this server"),
    ),
    ("vLLM", EMBEDDINGS, {"truncate_prompt_tokens": 9}, Refused("never cut")),
    ("TEI", EMBEDDINGS, {"truncate": True}, Ignored("truncate")),
    ("TEI", EMBEDDINGS, {"normalize": True}, NOTHING),
    ("TEI", EMBEDDINGS, {"normalize": False}, Refused("always normalized")),
    ("LlamaIndex", EMBEDDINGS, {"input_type": "query"}, Refused("default prompt")),
    ("LiteLLM", EMBEDDINGS, {"encoding_format": "float"}, Honoured("encoding_format", "float")),
    ("LiteLLM", EMBEDDINGS, {"colour": 1}, Ignored("colour")),
    ("Ollama", EMBEDDINGS, {"keep_alive": 1}, Ignored("keep_alive")),
]
CASES = SAMPLERS + FORMS + HINTS + HISTORY + OTHERS


@pytest.fixture(scope="module")
def tokenizer(demo_server: RunningServer) -> Any:
    assert demo_server.engine.info is not None
    return demo_server.engine.info.tokenizer


def read(path: str, fields: dict[str, Any], strict: bool = False) -> tuple[Any, list[str]]:
    """The checked body, and the fields of it that were ignored."""
    model, smallest = SMALLEST[path]
    reading = Reading(model, strict)
    return validate(smallest | fields, model, reading), reading.ignored


def translated(body: Any, tokenizer: Any) -> Any:
    match body:
        case ChatRequest():
            return chat.translate(body)
        case CompletionRequest():
            return completions.translate(body)
        case ResponseRequest():
            return responses.translate(body, body.items)  # type: ignore[arg-type]
        case MessagesRequest():
            return anthropic.translate(body, tokenizer)
    return body


def attribute(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else value[int(name)] if name.isdigit() else getattr(value, name)
    return value


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [case[1:] for case in CASES],
    ids=[
        f"{client}-{path.split('/')[2]}-{next(iter(fields))}-{i}" for i, (client, path, fields, _) in enumerate(CASES)
    ],
)
def test_a_field_of_a_client(path: str, fields: dict[str, Any], expected: Expected, tokenizer: Any) -> None:
    if isinstance(expected, Refused):
        with pytest.raises(ApiError) as caught:
            translated(read(path, fields)[0], tokenizer)
        assert caught.value.status == 400
        assert expected.reason in caught.value.message
        return
    body, ignored = read(path, fields)
    request = translated(body, tokenizer)
    outcomes = expected if isinstance(expected, list) else [expected]
    assert ignored == [each.name for each in outcomes if isinstance(each, Ignored) and each.name is not None]
    if ignored:
        with pytest.raises(ApiError):
            read(path, fields, strict=True)
    for each in outcomes:
        if isinstance(each, Honoured):
            assert attribute(request, each.path) == each.value


def test_the_table_has_the_rows_that_it_should() -> None:
    assert len({(client, path, str(fields)) for client, path, fields, _ in CASES}) >= 200


# Over HTTP


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ask("x", max_tokens=1)),
        (COMPLETIONS, run_on("x", 1)),
        (RESPONSES, {"input": "x", "max_output_tokens": 1}),
        (MESSAGES, ask("x", max_tokens=1)),
    ],
)
def test_the_response_names_what_was_ignored(
    demo_server: RunningServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    fields = {"model": "demo", "stream": stream, "num_ctx": 9, "größe": 1, "a\r\nset-cookie: b": 1}
    with raw(demo_server) as client:
        response = client.post(path, json=body | fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-mlxpaged-ignored"] == "num_ctx, gr??e, a??set-cookie??b"
    assert "set-cookie" not in response.headers
    with raw(demo_server) as client:
        assert "x-mlxpaged-ignored" not in client.post(path, json=body | {"model": "demo"}).headers


def test_a_strict_server_refuses_them_by_their_paths(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = demo_server.app.state.server
    monkeypatch.setattr(server, "http", dataclasses.replace(server.http, strict=True))
    part = {"type": "text", "text": "x", "colour": 1, "shape": 2}
    with raw(demo_server) as client:
        for fields, param in (
            ({"num_ctx": 9}, "num_ctx"),
            ({"größe": 9}, "größe"),
            ({"store": True}, "store"),
            ({"messages": [USER, USER | {"content": [part]}]}, "messages.1.content.0.colour"),
        ):
            error = client.post(CHAT, json=ask("x", max_tokens=1) | fields).json()["error"]
            assert (error["param"], error["code"]) == (param, "unsupported_parameter")
        for fields in ({"store": False}, {"user": "u"}, {"max_tokens": None, "n_predict": 1}, {"functions": None}):
            assert client.post(CHAT, json=ask("x", max_tokens=1) | fields).status_code == 200


def test_the_log_names_a_field_once_for_each_client(
    demo_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlxpaged.api.ignored_fields")
    with raw(demo_server) as client:
        for agent, fields in (
            ("OpenWebUI/0.6 (x)", ["once_a"]),
            ("OpenWebUI/0.7", ["once_a", "once_b"]),
            ("aider/1", ["once_a"]),
            ("aider/1", ["once_a"]),
        ):
            body = run_on("x", 1) | dict.fromkeys(fields, 1)
            assert client.post(COMPLETIONS, json=body, headers={"User-Agent": agent}).status_code == 200
    assert [record.getMessage() for record in caplog.records if "once" in record.getMessage()] == [
        "fields of OpenWebUI are ignored: once_a",
        "fields of OpenWebUI are ignored: once_b",
        "fields of aider are ignored: once_a",
    ]


def test_the_log_does_not_grow_with_names_that_a_client_makes_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fields = IgnoredFields()
    for i in range(2 * MAX_LOGGED):
        fields.note("client", [f"field{i}"])
    assert len(caplog.records) == MAX_LOGGED


def test_a_hundred_thousand_unknown_fields_are_named_briefly() -> None:
    many = {f"{i}{'x' * 100}": {} for i in range(50_000)}
    body, ignored = read(CHAT, {"messages": [USER | many]} | many)
    assert len(ignored) == MAX_NAMES + 1
    assert ignored[-1] == "..."
    assert max(map(len, ignored)) <= MAX_NAME
    assert body == ChatRequest(**SMALLEST[CHAT][1])


def test_usage_so_far_is_in_every_chunk_if_asked_for(demo_server: RunningServer) -> None:
    for path, body in ((CHAT, ask("What is 17 + 25?", max_tokens=4)), (COMPLETIONS, run_on("Once upon", 4))):
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, done = stream_events(demo_server, path, body | {"stream_options": options})
        assert done == "[DONE]"
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == post(demo_server, body)["usage"]["completion_tokens"]
        assert len(set(counts)) >= 3
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ask("What is 17 + 25?", max_tokens=10**9)),
        (CHAT, ask("What is 17 + 25?", max_completion_tokens=10**30)),
        (CHAT, ask("What is 17 + 25?", max_tokens=-1)),
        (RESPONSES, {"input": "What is 17 + 25?", "max_output_tokens": 10**6}),
        (MESSAGES, ask("What is 17 + 25?", max_tokens=32_000)),
    ],
)
def test_a_limit_beyond_the_context_is_cut_to_what_is_left(
    demo_server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    with raw(demo_server) as client:
        response = client.post(path, json={"model": "demo", "temperature": 0} | body)
    assert response.status_code == 200, response.text


def test_a_stream_that_names_what_was_ignored_is_whole(demo_server: RunningServer) -> None:
    with (
        raw(demo_server) as client,
        client.stream("POST", CHAT, json=ask("What is 17 + 25?", stream=True, num_ctx=9)) as response,
    ):
        received: Iterator[Any] = events(response.iter_lines())
        assert list(received)[-1] == "[DONE]"
        assert response.headers["x-mlxpaged-ignored"] == "num_ctx"
