"""What a request may cost: keys, numbers and pieces of its body."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from mlxpaged.api.body import MAX_KEYS, MAX_VALUES, parse_json
from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation import answers
from mlxpaged.api.generation.request import MAX_LOGPROBS
from mlxpaged.api.openai.responses.translation import MAX_RESPONSE_LOGPROBS
from mlxpaged.api.openai.schema import MAX_BIASED, MAX_CHOICES, MAX_TOP_LOGPROBS
from mlxpaged.api.schema import MAX_LABELS, MAX_STOP_CHARS, MAX_STOP_LENGTH
from mlxpaged.api.server import LARGE_BODY_BYTES, Server
from mlxpaged.cli.http_protocol import MAX_PIECES, PIECE_BYTES
from tests.api.helpers import DEADLINE, ask, raw, run_on, stream_events, text_of
from tests.support import RunningServer

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
COMPLETIONS = "/v1/completions"
HUGE = "1e999"


def in_schema(text: str) -> dict[str, bytes]:
    """Bodies of each API with this JSON in the schema of a tool."""
    schema: Any = {"type": "object", "properties": {"a": {"const": "HERE"}}}
    function = {"name": "f", "parameters": schema}
    user = [{"role": "user", "content": "x"}]
    bodies: dict[str, Any] = {
        CHAT: {"messages": user, "tools": [{"type": "function", "function": function}]},
        RESPONSES: {"input": "x", "tools": [{"type": "function"} | function]},
        MESSAGES: {"max_tokens": 1, "messages": user, "tools": [{"name": "f", "input_schema": schema}]},
        OLLAMA: {"messages": user, "tools": [{"function": function}]},
    }
    return {
        path: json.dumps(body | {"model": "demo"}).replace('"HERE"', text).encode() for path, body in bodies.items()
    }


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", HUGE, f"-{HUGE}", f"[[{{}}, {HUGE}]]"])
def test_numbers_that_json_does_not_have_are_refused(server: RunningServer, path: str, number: str) -> None:
    with raw(server) as client:
        response = client.post(path, content=in_schema(number)[path])
    assert response.status_code == 400, response.text
    assert "not valid JSON" in response.text or "too large" in response.text


def test_large_numbers_that_json_has_are_taken(server: RunningServer) -> None:
    with raw(server) as client:
        response = client.post(CHAT, content=in_schema(f"[1e308, {10**400}]")[CHAT])
    assert response.status_code == 200, response.text


def keys(count: int, separator: str = ":") -> bytes:
    return f"{{{','.join(f'{chr(34)}{i}{chr(34)}{separator}1' for i in range(count))}}}".encode()


@pytest.mark.parametrize("separator", [":", "  :", "\n:"])
def test_keys_are_limited_wherever_they_are(separator: str) -> None:
    """Also those that no look at the bytes finds."""
    half = MAX_KEYS // 2
    assert len(parse_json(keys(MAX_KEYS, separator))) == MAX_KEYS
    assert len(parse_json(b"[" + keys(half, separator) + b"," + keys(half, separator) + b"]")) == 2
    for text in (
        keys(MAX_KEYS + 1, separator),
        b'[{"a":' + keys(half, separator) + b"}," + keys(half, separator) + b"]",
    ):
        with pytest.raises(ApiError) as caught:
            parse_json(text)
        assert caught.value.code == "too_many_keys"


def test_a_text_with_json_in_it_has_no_keys() -> None:
    text = json.dumps({"content": json.dumps({"a": 1}) * (2 * MAX_KEYS)})
    assert parse_json(text.encode())["content"].count('"a":') == 2 * MAX_KEYS


@pytest.mark.parametrize("item", ["1", "{}", "[]", '"a"', "[[]]", r'"\\\""'])
def test_values_are_limited_before_they_are_parsed(item: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(f"[{f'{item},' * MAX_VALUES}1]".encode())
    assert caught.value.code == "too_many_values"


@pytest.mark.parametrize("text", ["1,2 [3] {4}", r'"a","b\"', '\n,"'])
def test_a_text_with_commas_has_no_values(text: str) -> None:
    many = text * MAX_VALUES
    assert parse_json(json.dumps([many, 1]).encode()) == [many, 1]
    assert len(parse_json(f"[{'12,' * 1_000_000}1]".encode())) == 1_000_001


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_labels_are_few(server: RunningServer, path: str) -> None:
    body = ask("x", max_tokens=1) if path == CHAT else {"model": "demo", "input": "x", "max_output_tokens": 1}
    with raw(server) as client:
        for count, status in ((MAX_LABELS, 200), (MAX_LABELS + 1, 400)):
            response = client.post(path, json=body | {"metadata": {str(i): "x" for i in range(count)}})
            assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == "metadata"


def answer_to_chunks(server: RunningServer, count: int) -> bytes:
    """The answer to a request whose body comes in so many chunks of one space."""
    address = urlsplit(server.url)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {address.netloc}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=DEADLINE) as connection:
        connection.sendall(head.encode() + b"1\r\n \r\n" * count + b"0\r\n\r\n")
        return connection.makefile("rb").read()


def test_a_body_in_tiny_pieces_is_refused(server: RunningServer) -> None:
    """Each takes as long to read as a large one."""
    refused, read = answer_to_chunks(server, 2 * MAX_PIECES), answer_to_chunks(server, MAX_PIECES // 2)
    assert b"bytes of the body came in" in refused
    assert b"is not valid JSON" in read
    with raw(server) as client:
        many = client.post(CHAT, content=(b" " * PIECE_BYTES for _ in range(2 * MAX_PIECES)))
    assert "is not valid JSON" in many.text


def error_of(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with raw(server) as client:
        response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_bias_is_for_few_tokens(server: RunningServer, path: str) -> None:
    body = ask("x", max_tokens=1) if path == CHAT else run_on("x", 1)
    bias = {str(token): 1 for token in range(MAX_BIASED + 1)}
    assert error_of(server, path, body | {"logit_bias": bias})["param"] == "logit_bias"
    del bias["0"]
    with raw(server) as client:
        assert client.post(path, json=body | {"logit_bias": bias}).status_code == 200


def test_stop_strings_are_short_together(server: RunningServer) -> None:
    """The engine's thread makes an automaton of them, once for a request."""
    most = ["x" * MAX_STOP_LENGTH] * (MAX_STOP_CHARS // MAX_STOP_LENGTH)
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        CHAT: ("stop", ask("x", max_tokens=1)),
        COMPLETIONS: ("stop", run_on("x", 1)),
        MESSAGES: (
            "stop_sequences",
            {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
        ),
    }
    for path, (field, body) in bodies.items():
        with raw(server) as client:
            assert client.post(path, json=body | {field: most}).status_code == 200
            refused = client.post(path, json=body | {field: [*most, "x"]})
        assert (refused.status_code, f"{MAX_STOP_CHARS + 1} characters together" in refused.text) == (400, True)


ALL = {"n": MAX_CHOICES, "logprobs": True, "top_logprobs": MAX_TOP_LOGPROBS}
MOST = MAX_LOGPROBS // (MAX_CHOICES * (1 + MAX_TOP_LOGPROBS))
"""Tokens of each answer."""


def test_log_probabilities_are_limited_before_they_are_made(server: RunningServer) -> None:
    before = server.engine.stats.model_calls_total
    error = error_of(server, CHAT, ask("x", max_completion_tokens=MOST + 1, **ALL))
    assert (error["param"], error["code"]) == ("max_completion_tokens", "too_many_logprobs")
    assert f"at most {MOST} tokens" in error["message"]
    fields = {"n": 16, "logprobs": 20, "echo": True}
    prompt = [20] * (MOST + 1)
    error = error_of(server, COMPLETIONS, run_on(prompt, 0, **fields))
    assert (error["param"], error["code"]) == ("logprobs", "too_many_logprobs")
    error = error_of(server, COMPLETIONS, run_on(prompt, 0, n=16, prompt_logprobs=20))
    assert error["param"] == "prompt_logprobs"
    options = {"num_predict": MOST}
    ollama = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "options": options}
    assert server.engine.stats.model_calls_total == before
    with raw(server) as client:
        assert client.post(OLLAMA, json=ollama | {"stream": False}).status_code == 200


def test_an_answer_without_a_limit_of_its_own_has_room_for_its_log_probabilities(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it has for the context's rest. Nothing of a stream is kept, so it has no such limit."""
    monkeypatch.setattr("mlxpaged.api.openai.chat.MAX_LOGPROBS", 12)
    body = ask("Who are you?", logprobs=True, top_logprobs=2, ignore_eos=True)
    with raw(server) as client:
        choice = client.post(CHAT, json=body).json()["choices"][0]
        assert client.post(CHAT, json=body | {"max_tokens": 4}).status_code == 200
    assert (choice["finish_reason"], len(choice["logprobs"]["content"])) == ("length", 4)
    assert error_of(server, CHAT, body | {"max_tokens": 5})["code"] == "too_many_logprobs"
    assert error_of(server, CHAT, body | {"n": 5})["code"] == "too_many_logprobs"
    events = stream_events(server, CHAT, body | {"max_tokens": 6})
    assert text_of(events).startswith(choice["message"]["content"])


def test_a_response_keeps_fewer_log_probabilities(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_RESPONSE_LOGPROBS < MAX_LOGPROBS
    monkeypatch.setattr("mlxpaged.api.openai.responses.translation.MAX_RESPONSE_LOGPROBS", 12)
    body = {"model": "demo", "input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for stream in (False, True):
        asked = body | {"stream": stream}
        assert error_of(server, RESPONSES, asked | {"max_output_tokens": 5})["param"] == "max_output_tokens"
        with raw(server) as client:
            assert client.post(RESPONSES, json=asked | {"max_output_tokens": 4}).status_code == 200
    with raw(server) as client:
        response = client.post(RESPONSES, json=body).json()
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", 4)


def without_ids(answer: Any) -> Any:
    """An answer without what differs between two."""
    if isinstance(answer, dict):
        own = ("id", "created", "created_at", "completed_at", "item_id", "system_fingerprint")
        return {
            name: without_ids(value) for name, value in answer.items() if name not in own and "duration" not in name
        }
    return [without_ids(each) for each in answer] if isinstance(answer, list) else answer


LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: ask("Who are you?", max_tokens=9, logprobs=True, top_logprobs=2, n=2),
    COMPLETIONS: run_on("Once", 9, logprobs=2, n=2),
    RESPONSES: {
        "model": "demo",
        "input": "Who are you?",
        "max_output_tokens": 9,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
    OLLAMA: {
        "model": "demo",
        "messages": [{"role": "user", "content": "Who are you?"}],
        "options": {"num_predict": 9, "temperature": 0},
        "logprobs": True,
        "top_logprobs": 2,
    },
}


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was rendered on the thread of large answers."""
    functions: list[Any] = []
    render = Server.render

    async def counted(self: Server, function: Any) -> Any:
        functions.append(function)
        return await render(self, function)

    monkeypatch.setattr(Server, "render", counted)
    return functions


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_repeats_much_is_rendered_on_a_thread(
    server: RunningServer, rendered: list[Any], stream: bool
) -> None:
    tool = {"type": "function", "name": "f", "description": "x" * LARGE_BODY_BYTES}
    body = {"model": "demo", "input": "x", "max_output_tokens": 1, "tools": [tool], "tool_choice": "none"}
    with raw(server) as client:
        response = client.post(RESPONSES, json=body | {"stream": stream})
    assert response.status_code == 200, response.text
    assert response.text.count(str(tool["description"])) == (3 if stream else 1)
    assert len(rendered) == (2 if stream else 1)


def choice_of(event: dict[str, Any]) -> int:
    """Choices are independent of one another: events of two of them come in any order."""
    return int(event["choices"][0]["index"]) if event.get("choices") else -1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", LOGPROBS)
def test_a_large_answer_is_rendered_on_a_thread_and_is_the_same(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, rendered: list[Any], path: str, stream: bool
) -> None:
    found = []
    for most in (10_000, 20):
        monkeypatch.setattr(answers, "MANY_LOGPROBS", most)
        monkeypatch.setattr("mlxpaged.api.openai.responses.renderer.MANY_LOGPROBS", most)
        with raw(server) as client:
            response = client.post(path, json=LOGPROBS[path] | {"stream": stream})
        assert response.status_code == 200, response.text
        lines = [
            line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith(("data: {", "{"))
        ]
        found.append(sorted((without_ids(json.loads(line)) for line in lines), key=choice_of))
        assert bool(rendered) == (most == 20 and (path == RESPONSES or not stream))
    assert found[0] == found[1]
    assert found[0]
