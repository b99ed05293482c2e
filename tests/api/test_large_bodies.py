"""Large request bodies do not block the event loop, and the streams of other requests, while they are read."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from mlxpaged.api import body as reading
from mlxpaged.api.anthropic import messages
from mlxpaged.api.anthropic.schema import MessagesRequest
from mlxpaged.api.errors import ApiError, from_validation
from mlxpaged.api.generation import prompt
from mlxpaged.api.openai import chat
from mlxpaged.api.openai.responses import routes as responses
from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.api.reading import Reading
from mlxpaged.api.schema import MAX_LIST
from mlxpaged.api.server import LARGE_BODY_BYTES
from tests.api.helpers import DEADLINE, Background, answer_text, ask, raw
from tests.support import RunningServer, wait_until

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def user(words: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "word " * words}]


def bodies(words: int) -> dict[str, dict[str, Any]]:
    return {
        CHAT: {"messages": user(words)},
        "/v1/completions": {"prompt": "word " * words},
        "/v1/embeddings": {"input": "word " * words},
        RESPONSES: {"input": user(words)},
        "/v1/responses/input_tokens": {"input": user(words)},
        MESSAGES: {"model": "demo", "max_tokens": 1, "messages": user(words)},
        "/v1/messages/count_tokens": {"model": "demo", "messages": user(words)},
        "/tokenize": {"prompt": "word " * words},
        "/detokenize": {"tokens": [20] * words},
        "/v1/batches": {"input_file_id": "word " * words, "endpoint": CHAT, "completion_window": "24h"},
    }


LARGE = bodies(words=100_000)


@dataclass
class Gate:
    """Large bodies are not parsed before `open` is set. threads: on which bodies were parsed."""

    open: threading.Event = field(default_factory=threading.Event)
    threads: list[str] = field(default_factory=list)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, parse = Gate(), reading.parse

    def gated(data: bytes, model: type[BaseModel], context: Reading) -> BaseModel:
        gate.threads.append(threading.current_thread().name)
        assert len(data) <= LARGE_BODY_BYTES or gate.open.wait(DEADLINE)
        return parse(data, model, context)

    monkeypatch.setattr(reading, "parse", gated)
    yield gate
    gate.open.set()


@pytest.mark.parametrize("path", LARGE)
def test_others_are_answered_while_a_large_body_is_read(demo_server: RunningServer, gate: Gate, path: str) -> None:
    with raw(demo_server) as client:
        pending = Background.post(demo_server, path, LARGE[path])
        wait_until(lambda: gate.threads)
        assert client.get("/health").status_code == 200
        assert answer_text(demo_server, ask("What is 17 + 25?")) == "42"
        assert pending.thread.is_alive()
        gate.open.set()
        assert pending.result().status_code == (200 if path in ("/tokenize", "/detokenize") else 400)


def test_small_bodies_are_read_at_once_and_two_large_ones_side_by_side(demo_server: RunningServer, gate: Gate) -> None:
    pending = [Background.post(demo_server, path, LARGE[path]) for path in (CHAT, RESPONSES)]
    wait_until(lambda: len(gate.threads) == 2)
    assert answer_text(demo_server, ask("What is 17 + 25?")) == "42"
    gate.open.set()
    assert [each.result().status_code for each in pending] == [400, 400]
    assert [name.rpartition("_")[0] for name in gate.threads[:2]] == ["mlxpaged-body"] * 2
    assert not gate.threads[2].startswith("mlxpaged-body")


def test_huge_bodies_are_read_one_at_a_time_with_a_rest_between(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing holds the interpreter lock. The streams of others need it too."""
    parse, spans = reading.parse, []

    def slow(*args: Any) -> Any:
        begun = time.monotonic()
        time.sleep(0.1)
        try:
            return parse(*args)
        finally:
            spans.append((begun, time.monotonic()))

    monkeypatch.setattr(reading, "parse", slow)
    huge = {"messages": user(300_000)}
    pending = [Background.post(demo_server, CHAT, huge) for _ in range(2)]
    assert [each.result().status_code for each in pending] == [400, 400]
    (first, end), (second, _) = spans
    assert second - end >= 0.9 * (end - first)


@pytest.mark.parametrize(
    ("module", "function", "path"),
    [
        (chat, "translate", CHAT),
        (prompt, "rendering", CHAT),
        (responses, "translate", RESPONSES),
        (messages, "translate", MESSAGES),
    ],
)
@pytest.mark.parametrize("words", [10, 100_000])
def test_what_is_made_of_a_large_body_is_made_elsewhere_too(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch, module: Any, function: str, path: str, words: int
) -> None:
    original, threads = getattr(module, function), []

    def recorded(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(*args)

    monkeypatch.setattr(module, function, recorded)
    with raw(demo_server) as client:
        limits = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
        response = client.post(path, json=bodies(words)[path] | {limits[path]: 1})
    assert response.status_code == (200 if words == 10 else 400), response.text
    assert [name.startswith("mlxpaged-body") for name in threads] == [words > 10]


MANY = {f"field{i}": 0 for i in range(1000)}
MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("model", "value", "param"),
    [
        (ChatRequest, {"messages": [MESSAGE]} | MANY, "field0"),
        (ChatRequest, {"messages": [MESSAGE | MANY]}, "messages.0.field0"),
        (ChatRequest, {"messages": [MESSAGE], "logit_bias": {str(i): 101 if i else 1 for i in range(999)}}, None),
        (ChatRequest, {"messages": [MESSAGE], "response_format": {"type": "text"} | MANY}, "response_format.field0"),
        (ResponseRequest, {"input": "x", "include": [0] * 1000}, "include.0"),
        (MessagesRequest, {"model": "x", "max_tokens": 1, "messages": [MESSAGE | MANY]}, "messages.0.field0"),
    ],
)
def test_of_a_thousand_faults_of_a_kind_the_first_is_looked_at(
    model: type[BaseModel], value: dict[str, Any], param: str | None
) -> None:
    """pydantic describes each, in one go: of a body of 16 MiB, for ten seconds and more, while nothing else runs."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(value)
    assert caught.value.error_count() == 1
    assert from_validation(caught.value).param == (param or "logit_bias.1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "the body: must be an object"),
        ('{"messages": {}}', "messages: must be an array"),
        ('{"messages": [1]}', "messages.0: must be an object"),
        ('{"messages": [{"role": "user", "content": "x"}], "metadata": 1}', "metadata: must be an object"),
        ('{"messages": [{"role": "user", "content": 1}]}', "messages.0.content: must be a string or an array"),
    ],
)
def test_a_complaint_is_about_json_not_about_python(content: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        reading.parse(content.encode(), ChatRequest)
    assert caught.value.message == message


TOO_MANY = [{"type": "text", "text": "x"}] * (MAX_LIST + 1)


@pytest.mark.parametrize(
    ("model", "value", "field"),
    [
        (ResponseRequest, {"input": [MESSAGE] * (MAX_LIST + 1)}, "input"),
        (ResponseRequest, {"input": [MESSAGE | {"content": TOO_MANY}]}, "input.0.content"),
        (ChatRequest, {"messages": [MESSAGE | {"content": TOO_MANY}]}, "messages.0.content"),
        (MessagesRequest, {"model": "x", "max_tokens": 1, "messages": [MESSAGE], "system": TOO_MANY}, "system"),
    ],
)
def test_a_list_that_is_too_long_is_refused_with_the_limit(
    model: type[BaseModel], value: dict[str, Any], field: str
) -> None:
    """Also where a text may be in its place."""
    with pytest.raises(ApiError) as caught:
        reading.validate(value, model)
    assert caught.value.message == f"{field}: must have {MAX_LIST} or fewer items"


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("content", ["{", json.dumps({"messages": [MESSAGE]})])
def test_the_garbage_collector_is_left_as_it_was(collects: bool, content: str) -> None:
    (gc.enable if collects else gc.disable)()
    try:
        with contextlib.suppress(ApiError):
            reading.parse(content.encode(), ChatRequest)
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_the_garbage_collector_does_not_see_the_values_of_a_refused_body() -> None:
    """It would traverse them while the error is answered, and block all threads, longer than parsing took."""
    body = json.dumps({"messages": [MESSAGE], "metadata": [{"a": []}] * 50_000}).encode()
    before = len(gc.get_objects())
    try:
        reading.parse(body, ChatRequest)
    except ApiError:
        seen = len(gc.get_objects()) - before
    assert seen < 10_000
