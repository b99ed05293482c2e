"""Sessions that begin on what another provider's service has streamed, as its official package reads that, and go on
here for five turns with the same package. The streams have the documented forms of the services."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.api.helpers import DEADLINE, raw
from tests.scripted import follow, scripted_server
from tests.support import RunningServer

IGNORED = "x-mlxpaged-ignored"
TURNS = 5
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather in a city."}
CHAT_TOOL = {"type": "function", "function": WEATHER | {"parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SECRET = "gAAAAABpK3Zl"
"""Stands for what only the other service can read. No prompt may have it."""
ADDRESS = "https://weather.example/rome"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = {"context_length": 32768, "kv_cache_bytes": 32_000_000}
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", {"": ""}, **options) as server:
        yield server


@pytest.fixture
def prompts(server: RunningServer) -> list[str]:
    """What the model is shown. It thinks and calls the tool if the user speaks, and then tells the result."""
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        asked = prompt.rindex("<|im_start|>user") > prompt.rfind("<|im_start|>tool")
        return f"<think>\nI ask.\n</think>\n{CALL}" if asked else "It is 21 degrees."

    follow(server, answer)
    return prompts


@pytest.fixture
def ours(server: RunningServer) -> Iterator[OpenAI]:
    with openai_of(server.url) as client:
        yield client


@contextlib.contextmanager
def service(*answers: str) -> Iterator[str]:
    """Another provider's service, which gives these answers, one after the other. Yields its URL."""
    waiting = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = waiting.pop(0).encode()
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()


def openai_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)


def names(headers: httpx.Headers) -> set[str]:
    return set(filter(None, headers.get(IGNORED, "").split(", ")))


# OpenAI's responses


CITED = {"type": "url_citation", "start_index": 0, "end_index": 12, "url": ADDRESS, "title": "Rome"}
OUTPUT: list[dict[str, Any]] = [
    {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "I look it up."}],
        "encrypted_content": SECRET,
    },
    {
        "id": "ws_1",
        "type": "web_search_call",
        "status": "completed",
        "action": {"type": "search", "query": "weather Rome", "sources": [{"type": "url", "url": ADDRESS}]},
    },
    {
        "id": "fs_1",
        "type": "file_search_call",
        "status": "completed",
        "queries": ["Rome"],
        "results": [{"file_id": "file-1", "filename": "rome.md", "score": 0.9, "text": "It was 19.", "attributes": {}}],
    },
    {
        "id": "ci_1",
        "type": "code_interpreter_call",
        "status": "completed",
        "code": "print(19 + 1)",
        "container_id": "cntr_1",
        "outputs": [{"type": "logs", "logs": "20\n"}],
    },
    {
        "id": "mcpl_1",
        "type": "mcp_list_tools",
        "server_label": "maps",
        "tools": [{"name": "find", "input_schema": {"type": "object"}, "description": None, "annotations": None}],
    },
    {
        "id": "mcp_1",
        "type": "mcp_call",
        "server_label": "maps",
        "name": "find",
        "arguments": '{"city": "Rome"}',
        "output": "41.9 N",
        "error": None,
        "approval_request_id": None,
    },
    {"id": "ig_1", "type": "image_generation_call", "status": "completed", "result": SECRET},
    {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "phase": "final_answer",
        "content": [{"type": "output_text", "text": "It was 20 [1].", "annotations": [CITED], "logprobs": []}],
    },
]
OF_RESPONSES = {
    "input.reasoning.encrypted_content",
    *(f"input.{item['type']}" for item in OUTPUT if item["type"] not in ("reasoning", "message")),
}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "mcp", "server_label": "maps", "server_url": "https://maps.example", "require_approval": "never"},
]


def responses_stream() -> str:
    """Each item is added, grows and is done."""
    numbers = itertools.count()
    response: dict[str, Any] = {"id": "resp_1", "object": "response", "created_at": 1, "model": "other", "tools": []}
    response |= {"parallel_tool_calls": True, "tool_choice": "auto", "output": [], "status": "in_progress"}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": response}]
    for i, item in enumerate(OUTPUT):
        place = {"output_index": i, "item_id": item["id"]}
        begun = item | {key: [] for key in ("summary", "content", "outputs") if key in item}
        events.append({"type": "response.output_item.added", "output_index": i, "item": begun})
        if item["type"] == "message":
            part, place = item["content"][0], place | {"content_index": 0}
            empty = part | {"text": "", "annotations": []}
            events += [
                {"type": "response.content_part.added", "part": empty, **place},
                {"type": "response.output_text.delta", "delta": part["text"][:6], "logprobs": [], **place},
                {"type": "response.output_text.delta", "delta": part["text"][6:], "logprobs": [], **place},
                {"type": "response.output_text.annotation.added", "annotation_index": 0, "annotation": CITED, **place},
                {"type": "response.output_text.done", "text": part["text"], "logprobs": [], **place},
                {"type": "response.content_part.done", "part": part, **place},
            ]
        if item["type"] == "reasoning":
            [part], place = item["summary"], place | {"summary_index": 0}
            events += [
                {"type": "response.reasoning_summary_part.added", "part": part | {"text": ""}, **place},
                {"type": "response.reasoning_summary_text.delta", "delta": part["text"], **place},
                {"type": "response.reasoning_summary_part.done", "part": part, **place},
            ]
        events.append({"type": "response.output_item.done", "output_index": i, "item": item})
    events.append({"type": "response.completed", "response": response | {"output": OUTPUT, "status": "completed"}})
    return "".join(
        f"event: {event['type']}\ndata: {json.dumps(event | {'sequence_number': next(numbers)})}\n\n"
        for event in events
    )


@pytest.mark.parametrize("store", [False, True])
def test_responses(ours: OpenAI, prompts: list[str], store: bool) -> None:
    items: list[Any] = [{"role": "user", "content": "The weather in Rome?"}]
    fields: Any = {"model": "scripted", "tools": [{"type": "function", **WEATHER, "parameters": PARAMETERS}, *HOSTED]}
    fields |= {"store": store, "include": ["reasoning.encrypted_content", "web_search_call.action.sources"]}
    with (
        service(responses_stream()) as url,
        openai_of(url) as other,
        other.responses.stream(input=items, **fields) as begun,
    ):
        items += begun.get_final_response().output
    assert [item.type for item in items[1:]] == [item["type"] for item in OUTPUT]
    ignored = {"include.web_search_call.action.sources", *(f"tools.{tool['type']}" for tool in HOSTED)}
    for number in range(TURNS):
        items.append({"role": "user", "content": f"And on day {number}?"})
        for made in (["reasoning", "function_call"], ["message"]):
            if number % 2:
                with ours.responses.stream(input=items, **fields) as stream:
                    answer = stream.get_final_response()
            else:
                whole = ours.responses.with_raw_response.create(input=items, **fields)
                assert names(whole.headers) == OF_RESPONSES | ignored
                answer = whole.parse()
            assert [item.type for item in answer.output] == made
            items += answer.output
            if made[-1] == "function_call":
                items.append({"type": "function_call_output", "call_id": items[-1].call_id, "output": "21"})
        assert answer.output_text == "It is 21 degrees."
    shown = (
        "I look it up.",
        "weather Rome",
        ADDRESS,
        "It was 19.",
        "print(19 + 1)",
        "20\\n",
        "41.9 N",
        "It was 20 [1].",
    )
    assert [text for text in shown if text not in prompts[-1]] == []
    assert not any(SECRET in prompt for prompt in prompts)


# Anthropic's messages


SEARCH_RESULT = {
    "type": "web_search_result",
    "url": ADDRESS,
    "title": "Rome",
    "encrypted_content": SECRET,
    "page_age": "1 day",
}
CITATION = {
    "type": "web_search_result_location",
    "url": ADDRESS,
    "title": "Rome",
    "encrypted_index": SECRET,
    "cited_text": "Twenty degrees.",
}
CONTENT: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "I look it up.", "signature": SECRET},
    {"type": "redacted_thinking", "data": SECRET},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "weather Rome"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [SEARCH_RESULT]},
    {"type": "server_tool_use", "id": "srvtoolu_2", "name": "bash_code_execution", "input": {"command": "echo 20"}},
    {
        "type": "bash_code_execution_tool_result",
        "tool_use_id": "srvtoolu_2",
        "content": {
            "type": "bash_code_execution_result",
            "stdout": "twenty\n",
            "stderr": "",
            "return_code": 0,
            "content": [],
        },
    },
    {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "find", "input": {"city": "Rome"}, "server_name": "maps"},
    {
        "type": "mcp_tool_result",
        "tool_use_id": "mcptoolu_1",
        "is_error": False,
        "content": [{"type": "text", "text": "41.9 N"}],
    },
    {"type": "text", "text": "It was 20.", "citations": [CITATION]},
]
OF_MESSAGES = {f"messages.content.{block['type']}" for block in CONTENT if block["type"] not in ("thinking", "text")}
SERVER_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "code_execution_20250825", "name": "code_execution"},
]


def messages_stream() -> str:
    """Each block starts, grows and stops."""
    usage = {"input_tokens": 9, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "other", "content": [], "usage": usage}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message | {"stop_reason": None, "stop_sequence": None}},
        {"type": "ping"},
    ]
    for i, block in enumerate(CONTENT):
        deltas: list[dict[str, Any]] = []
        start = dict(block)
        if block["type"] == "thinking":
            start |= {"thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "text":
            start |= {"text": "", "citations": []}
            deltas = [{"type": "citations_delta", "citation": CITATION}, {"type": "text_delta", "text": block["text"]}]
        elif block["type"] in ("server_tool_use", "mcp_tool_use"):
            start["input"], text = {}, json.dumps(block["input"])
            deltas = [{"type": "input_json_delta", "partial_json": part} for part in ("", text[:5], text[5:])]
        events.append({"type": "content_block_start", "index": i, "content_block": start})
        events += [{"type": "content_block_delta", "index": i, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": i})
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    used = {"output_tokens": 40, "server_tool_use": {"web_search_requests": 1}}
    events += [{"type": "message_delta", "delta": end, "usage": used}, {"type": "message_stop"}]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def test_messages(server: RunningServer, prompts: list[str]) -> None:
    messages: list[Any] = [{"role": "user", "content": "The weather in Rome?"}]
    fields: Any = {"model": "scripted", "max_tokens": 500, "thinking": {"type": "adaptive"}}
    fields["tools"] = [WEATHER | {"input_schema": PARAMETERS}, *SERVER_TOOLS]
    options: Any = {"api_key": "none", "max_retries": 0, "timeout": DEADLINE}
    with (
        service(messages_stream()) as url,
        Anthropic(base_url=url, **options) as other,
        other.beta.messages.stream(messages=messages, **fields) as begun,
    ):
        content = begun.get_final_message().content
    assert [block.type for block in content] == [block["type"] for block in CONTENT]
    messages.append({"role": "assistant", "content": content})
    ignored = {f"tools.{tool['type']}" for tool in SERVER_TOOLS}
    with Anthropic(base_url=server.url, **options) as client:
        for number in range(TURNS):
            messages.append({"role": "user", "content": f"And on day {number}?"})
            for made in (["thinking", "tool_use"], ["text"]):
                if number % 2:
                    with client.beta.messages.stream(messages=messages, **fields) as stream:
                        answer: Any = stream.get_final_message()
                else:
                    whole = client.beta.messages.with_raw_response.create(messages=messages, **fields)
                    assert names(whole.headers) == OF_MESSAGES | ignored
                    answer = whole.parse()
                assert [block.type for block in answer.content] == made
                messages.append({"role": "assistant", "content": answer.content})
                if made[-1] == "tool_use":
                    result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "21"}
                    messages.append({"role": "user", "content": [result]})
            assert answer.content[0].text == "It is 21 degrees."
    shown = ("I look it up.", "weather Rome", ADDRESS, "echo 20", "twenty", "41.9 N", "It was 20.")
    assert [text for text in shown if text not in prompts[-1]] == []
    assert not any(SECRET in prompt for prompt in prompts)


# Chat completions, of OpenAI and of services that speak its API


def chat_stream(*deltas: dict[str, Any], end: str = "stop") -> str:
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "other"}
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in ({"role": "assistant"}, *deltas)]
    choices.append({"index": 0, "delta": {}, "finish_reason": end})
    events = [json.dumps(chunk | {"choices": [choice]}) for choice in choices]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])


SPOKEN = {"id": "audio_1", "expires_at": 1, "data": SECRET, "transcript": "It was nineteen."}
DETAILS = [{"type": "reasoning.encrypted", "data": SECRET, "id": "rs_1", "format": "openai-responses-v1", "index": 0}]
SIGNED = {"google": {"thought_signature": SECRET}}
GEMINI_CALL = {
    "index": 0,
    "id": "function-call-7301",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
    "extra_content": SIGNED,
}
CHATS: dict[str, tuple[list[str], set[str], list[str]]] = {
    # what was streamed, what is named here, what the prompt has of it
    "audio": ([chat_stream({"audio": SPOKEN})], {"messages.audio"}, ["It was nineteen."]),
    "annotations": (
        [chat_stream({"content": "It was "}, {"content": "20.", "annotations": [{"type": "url_citation"}]})],
        set(),
        ["It was 20."],
    ),
    "refusal": ([chat_stream({"refusal": "I cannot "}, {"refusal": "say."})], set(), ["I cannot say."]),
    "reasoning": (
        [
            chat_stream({"reasoning_content": "I look"}, {"reasoning_content": " it up."}, {"content": "It was 20."}),
            chat_stream({"reasoning": "Hm.", "reasoning_details": DETAILS}, {"content": "Yes."}),
        ],
        {"messages.reasoning_details"},
        ["I look it up.", "It was 20.", "Hm.", "Yes."],
    ),
    "Gemini": (
        [
            chat_stream({"content": "Let me see.", "extra_content": SIGNED}),
            chat_stream({"tool_calls": [GEMINI_CALL]}, end="tool_calls"),
            chat_stream({"content": "It was 20.", "extra_content": SIGNED}),
        ],
        {"messages.extra_content", "messages.tool_calls.extra_content"},
        ["Let me see.", '{"city": "Rome"}', "tool\n20", "It was 20."],
    ),
}


@pytest.mark.parametrize("case", CHATS)
def test_chat(ours: OpenAI, prompts: list[str], case: str) -> None:
    streams, ignored, shown = CHATS[case]
    messages: list[Any] = [{"role": "user", "content": "The weather in Rome?"}]
    fields: Any = {"model": "scripted", "tools": [CHAT_TOOL]}
    with service(*streams) as url, openai_of(url) as other:
        for _ in streams:
            with other.chat.completions.stream(messages=messages, **fields) as begun:
                messages.append(begun.get_final_completion().choices[0].message)
            for call in messages[-1].tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "20"})
    completions = ours.chat.completions
    for number in range(TURNS):
        messages.append({"role": "user", "content": f"And on day {number}?"})
        for calls in (True, False):
            if number % 2:
                with completions.stream(messages=messages, **fields) as stream:
                    message: Any = stream.get_final_completion().choices[0].message
            else:
                whole = completions.with_raw_response.create(messages=messages, **fields)
                assert names(whole.headers) == ignored
                message = whole.parse().choices[0].message
            assert bool(message.tool_calls) == calls
            messages.append(message)
            if calls:
                messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"})
        assert message.content == "It is 21 degrees."
    assert [text for text in shown if text not in prompts[-1]] == []
    assert not any(SECRET in prompt for prompt in prompts)


# Ollama


OLLAMA_LINES: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "thinking": "I look "},
    {"role": "assistant", "content": "", "thinking": "it up."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}},
            {"id": "call_2", "function": {"index": 1, "name": "web_search", "arguments": {"query": "weather Rome"}}},
        ],
    },
    {"role": "assistant", "content": ""},
]
"""The messages of a stream. Ollama's package is tested by `make test-clients`."""


def whole_message(lines: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    for line in lines:
        for name in ("content", "thinking", "tool_calls"):
            message[name] += line.get(name) or type(message[name])()
    return message


def test_ollama(server: RunningServer, prompts: list[str]) -> None:
    messages = [
        {"role": "user", "content": "The weather in Rome?"},
        whole_message(OLLAMA_LINES),
        {"role": "tool", "tool_name": "weather", "content": "20"},
        {"role": "tool", "tool_name": "web_search", "content": f"See {ADDRESS}."},
        {"role": "assistant", "content": "It was 20.", "thinking": "Hm."},
    ]
    body = {"model": "scripted", "tools": [CHAT_TOOL], "think": True}
    for number in range(TURNS):
        messages.append({"role": "user", "content": f"And on day {number}?"})
        for calls in (True, False):
            with raw(server) as client:
                answer = client.post("/api/chat", json=body | {"messages": messages, "stream": bool(number % 2)})
            assert answer.status_code == 200, answer.text
            assert names(answer.headers) == set()
            message = whole_message([json.loads(line)["message"] for line in answer.text.splitlines()])
            assert bool(message["tool_calls"]) == calls
            messages.append(message)
            if calls:
                messages.append({"role": "tool", "tool_name": "weather", "content": "21"})
        assert message["content"] == "It is 21 degrees."
    shown = ("I look it up.", '{"query": "weather Rome"}', "tool\n20", ADDRESS, "It was 20.")
    assert [text for text in shown if text not in prompts[-1]] == []
