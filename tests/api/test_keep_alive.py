"""A stream is never silent for long: it says how far its request is, in a form that every client reads."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from mlxpaged.api.openai.chat import ChatRenderer
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.core.engine.prompt_progress import PromptProgress
from tests.api.helpers import DEADLINE, StepGate, answer_text, ask, random_tokens, raw, run_on, text_of, within_one_step
from tests.support import RunningServer

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
SILENCE = 0.05
MOST_LINES = 500
"""A stream that waits has comments without end."""
QUESTION = "What is 17 + 25?"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: ask(QUESTION, max_tokens=8),
    COMPLETIONS: run_on(QUESTION, 8),
    MESSAGES: ask(QUESTION, max_tokens=8),
    RESPONSES: {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 16},
}


@pytest.fixture(autouse=True)
def _impatient(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    state = server.app.state.server
    monkeypatch.setattr(state, "http", dataclasses.replace(state.http, keep_alive_seconds=SILENCE))
    yield
    server.wait_idle(DEADLINE)


def stream(client: httpx.Client, path: str, body: dict[str, Any], **headers: str) -> Any:
    return client.stream("POST", path, json=body | {"stream": True}, headers=headers)


def until(lines: Iterator[str], wanted: str) -> list[str]:
    """The lines up to the first that matches, without empty ones."""
    found = []
    for line in itertools.islice(filter(None, lines), MOST_LINES):
        found.append(line)
        if re.fullmatch(wanted, line):
            return found
    raise AssertionError(f"{wanted!r} is not in {found}")


def test_a_stream_says_how_many_are_before_it_how_far_its_prompt_is_and_what_it_has_generated(
    server: RunningServer,
) -> None:
    long, short = run_on(random_tokens(2100, 2100), 50), run_on("x", 1)
    with StepGate(server) as gate, raw(server) as client, stream(client, COMPLETIONS, long) as first:
        gate.wait_held()  # before its first step is done
        with stream(client, COMPLETIONS, short) as second:
            ours, others = first.iter_lines(), second.iter_lines()
            assert set(until(ours, ": waiting, 0 before it")) == {": waiting, 0 before it"}
            assert set(until(others, ": waiting, 1 before it")) == {": waiting, 1 before it"}
            gate.allow(1)  # a chunk of the first prompt
            until(ours, r": prefill \d+/2100")
            until(others, ": waiting, 0 before it")
            gate.allow(1)  # the rest
            until(ours, r": decode \d+")
            gate.open()
            text = text_of([json.loads(line[6:]) for line in ours if line.startswith("data: {")])
            assert "data: [DONE]" in list(others)
    assert answer_text(server, long).endswith(text)


@pytest.mark.parametrize("path", BODIES)
def test_nothing_of_a_stream_is_sent_before_its_first_token_unless_the_silence_is_long(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    state = server.app.state.server
    monkeypatch.setattr(state, "http", dataclasses.replace(state.http, keep_alive_seconds=DEADLINE))
    with StepGate(server) as gate, raw(server) as client, stream(client, path, BODIES[path]) as response:
        gate.wait_held()
        opened = threading.Event()
        threading.Timer(0.1, lambda: (opened.set(), gate.open())).start()
        next(response.iter_lines())
        assert opened.is_set()


def added_text(event: str) -> str:
    """The text that an event adds to an answer, on any route."""
    found = [json.loads(line[6:]) for line in event.splitlines() if line.startswith("data: {")]
    deltas = [each["delta"] for each in found if "delta" in each]
    return text_of(found) + "".join(each if isinstance(each, str) else each.get("text", "") for each in deltas)


@pytest.mark.parametrize("path", BODIES)
def test_an_event_comes_with_each_comment(server: RunningServer, path: str) -> None:
    """Dify drops an event that begins with a comment, and the limits of Codex and LangChain count events only."""
    with StepGate(server) as gate, raw(server) as client, stream(client, path, BODIES[path]) as response:
        gate.wait_held()
        lines = response.iter_lines()
        until(lines, ": waiting, 0 before it")
        assert next(lines).startswith(("data: ", "event: "))
        gate.open()
        events = "\n".join(lines).split("\n\n")
    assert any(map(added_text, events))
    assert not [event for event in events if event.startswith(":") and added_text(event)]


def test_the_event_is_of_a_choice_that_has_not_ended() -> None:
    """Clients take the finish_reason of each chunk."""
    context = SimpleNamespace(request_id="r", service_tier="default")
    answers: Any = SimpleNamespace(context=context, model="demo", num_choices=3)
    renderer = ChatRenderer(answers, ChatRequest.model_validate(ask(QUESTION, n=3)), None)
    progress = PromptProgress(waiting_before=None, prompt=9, cached=0, computed=9, output=4, seconds=11.0)
    for ended, index in ((1, 0), (0, 2)):
        renderer.chunk({"index": ended, "delta": {}, "finish_reason": "stop"})
        _, data = renderer.keep_alive(progress).strip().split("\n")
        (choice,) = json.loads(data.removeprefix("data: "))["choices"]
        assert (choice["index"], choice["delta"], choice["finish_reason"]) == (index, {}, None)


def test_a_silence_after_the_first_output_does_not_repeat_the_echoed_prompt(server: RunningServer) -> None:
    body = run_on(QUESTION, 3, echo=True, logprobs=1)
    with StepGate(server) as gate, raw(server) as client, stream(client, COMPLETIONS, body) as response:
        gate.wait_held()
        gate.allow(1)
        lines = (line for line in response.iter_lines() if line.startswith(("data: {", ": decode")))
        first = next(line for line in lines if line.startswith("data: {") and '"text":""' not in line)
        assert next(lines) == ": decode 1"
        gate.open()
        chunks = [json.loads(line[6:]) for line in (first, *lines) if line.startswith("data: {")]
    assert text_of(chunks) == answer_text(server, body)


def test_an_anthropic_stream_starts_its_message_and_then_pings(server: RunningServer) -> None:
    with StepGate(server) as gate, raw(server) as client, stream(client, MESSAGES, BODIES[MESSAGES]) as response:
        gate.wait_held()
        lines = response.iter_lines()
        before = until(lines, "event: ping")
        assert "event: message_start" in before
        assert ": waiting, 0 before it" in before
        assert next(lines) == 'data: {"type":"ping"}'
        gate.open()
        started = [line for line in lines if "message_start" in line]
    assert not started  # twice


def chat(client: OpenAI, body: dict[str, Any]) -> Iterator[str]:
    for chunk in client.chat.completions.create(**body, stream=True):
        yield chunk.choices[0].delta.content or ""


def completion(client: OpenAI, body: dict[str, Any]) -> Iterator[str]:
    fields = {name: value for name, value in body.items() if name != "ignore_eos"}
    for chunk in client.completions.create(**fields, extra_body={"ignore_eos": True}, stream=True):
        yield chunk.choices[0].text


def response(client: OpenAI, body: dict[str, Any]) -> Iterator[str]:
    for event in client.responses.create(**body, stream=True):
        yield event.delta if event.type == "response.output_text.delta" else ""


def message(client: OpenAI, body: dict[str, Any]) -> Iterator[str]:
    base = str(client.base_url).removesuffix("/v1/")
    fields = {name: value for name, value in body.items() if name != "temperature"}
    with (
        Anthropic(base_url=base, api_key="none", max_retries=0, timeout=DEADLINE) as theirs,
        theirs.messages.stream(**fields, extra_body={"temperature": 0}) as events,
    ):
        yield from events.text_stream
        usage = events.get_final_message().usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > 10
    assert usage.output_tokens > 0


READERS = {CHAT: chat, COMPLETIONS: completion, RESPONSES: response, MESSAGES: message}


@pytest.mark.parametrize("path", READERS)
def test_official_clients_read_a_stream_that_was_silent(server: RunningServer, client: OpenAI, path: str) -> None:
    read: Callable[[OpenAI, dict[str, Any]], Iterator[str]] = READERS[path]
    expected = "".join(read(client, BODIES[path]))
    with StepGate(server) as gate:
        threading.Timer(6 * SILENCE, gate.open).start()
        text = "".join(read(client, BODIES[path]))
    assert text == expected
    assert text


@pytest.mark.parametrize("path", READERS)
def test_a_client_that_asks_for_progress_gets_it_as_data(server: RunningServer, path: str) -> None:
    body, headers = BODIES[path], {}
    if path == MESSAGES:
        headers = {"X-Mlxpaged-Progress": "1"}
    else:
        body = body | {"return_progress": True}
    found: list[dict[str, Any]] = []
    with StepGate(server) as gate, raw(server) as client, stream(client, path, body, **headers) as answer:
        gate.wait_held()
        for line in answer.iter_lines():
            assert not line.startswith(":")
            if line.startswith("data: {"):
                found.append(json.loads(line[6:]))
            if "prompt_progress" in line:
                gate.open()
    told = [event for event in found if "prompt_progress" in event]
    progress = told[0]["prompt_progress"]
    assert progress["total"] > 3
    assert progress["time_ms"] >= 1000 * SILENCE * 0.9
    assert {name: progress[name] for name in ("processed", "waiting_before")} == {"processed": 0, "waiting_before": 0}
    kinds = {CHAT: "chat.completion.chunk", COMPLETIONS: "text_completion"}
    assert (
        told[0].get("type", told[0].get("object"))
        == ({MESSAGES: "ping", RESPONSES: "response.in_progress"} | kinds)[path]
    )
    if path == RESPONSES:
        assert [event["sequence_number"] for event in found] == list(range(len(found)))


def test_the_header_of_progress_must_be_1_or_0(server: RunningServer) -> None:
    with raw(server) as client:
        refused = client.post(CHAT, json=BODIES[CHAT], headers={"X-Mlxpaged-Progress": "yes"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Mlxpaged-Progress")
        off = client.post(CHAT, json=BODIES[CHAT] | {"return_progress": True}, headers={"X-Mlxpaged-Progress": "0"})
        assert off.status_code == 200


def test_a_request_that_is_cancelled_while_it_waits_has_its_error_after_the_comments(server: RunningServer) -> None:
    with StepGate(server) as gate, raw(server) as client, stream(client, COMPLETIONS, run_on("x", 2)):
        gate.wait_held()
        with stream(client, COMPLETIONS, run_on("y", 2), **{"X-Request-Id": "mine"}) as waiting:
            assert waiting.status_code == 200  # it was accepted, and the headers came at once
            lines = waiting.iter_lines()
            until(lines, ": waiting, 1 before it")
            assert within_one_step(server, gate, "DELETE", "/v1/requests/mine").status_code == 200
            *chunks, last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        gate.open()
    assert last["error"]["code"] == "request_cancelled"
    assert not text_of(chunks)
