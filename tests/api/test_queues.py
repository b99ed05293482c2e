"""What the server does for a few clients at a time: a flood of one client's requests delays no other one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlxpaged.api import body, tokenizer_lanes
from mlxpaged.api.server import HUGE_BODY_BYTES
from mlxpaged.api.tokenizer_lanes import TokenizerLanes
from mlxpaged.api.turns import Turns
from mlxpaged.parts.grammar.grammar import Grammars
from tests.api.helpers import DEADLINE, Background, raw, run_on
from tests.support import RunningServer, wait_until

CHAT, COMPLETIONS, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat"
WAIT = 3
"""Requests of a flood that wait."""


class Held:
    """A function whose calls end as permitted. name_of: what `begun` has of a call."""

    def __init__(self, function: Callable[..., Any], name_of: Callable[..., str]) -> None:
        self.begun: list[str] = []
        self._function, self._name_of = function, name_of
        self._permits = threading.Semaphore(0)

    def __call__(self, *args: Any, **fields: Any) -> Any:
        self.begun.append(self._name_of(*args))
        assert self._permits.acquire(timeout=DEADLINE)
        return self._function(*args, **fields)

    def allow(self, count: int) -> None:
        self._permits.release(count)


def check_turns(turns: Callable[[], Turns], held: Held, ask: Callable[[str], Background]) -> None:
    """A flood takes all turns, and more wait. The next one is another client's. ask: makes a request of the client with
    this name, whose calls of `held` are named after it."""

    def num_waiting() -> int:
        return sum(map(len, list(turns().waiting.values())))

    pending = [ask("flood")]
    wait_until(lambda: held.begun)
    at_once = turns().rules.at_once
    pending += [ask("flood") for _ in range(at_once - 1 + WAIT)]
    wait_until(lambda: len(held.begun) == at_once and num_waiting() == WAIT)
    pending.append(ask("other"))
    wait_until(lambda: num_waiting() == WAIT + 1)
    held.allow(1)
    wait_until(lambda: len(held.begun) == at_once + 1)
    assert held.begun[-1] == "other"
    held.allow(at_once + WAIT)
    for each in pending:
        each.result()
    assert len(held.begun) == at_once + WAIT + 1


@pytest.mark.parametrize("path", ["/tokenize", CHAT, "/v1/messages/count_tokens", "/detokenize"])
def test_a_flood_of_texts(demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    server, info = demo_server.app.state.server, demo_server.engine.info
    assert info is not None
    monkeypatch.setattr(server, "tokenizer_lanes", TokenizerLanes())
    tokens = {"flood": 20, "other": 21}
    method, name_of = {
        "/tokenize": ("encode", lambda text, *_: text),
        "/detokenize": ("text_with_specials", lambda ids: "flood" if ids[0] == tokens["flood"] else "other"),
    }.get(path, ("apply_chat_template", lambda messages, *_: messages[0]["content"]))
    held = Held(getattr(info.tokenizer, method), name_of)
    monkeypatch.setattr(info.tokenizer, method, held)

    def ask(client: str) -> Background:
        chat = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": client}]}
        asked = {"/tokenize": {"prompt": client}, "/detokenize": {"tokens": [tokens[client]]}}.get(path, chat)
        return Background.post(demo_server, path, asked, User_Agent=client)

    check_turns(lambda: server.tokenizer_lanes.lanes[info.tokenizer].short, held, ask)
    demo_server.wait_idle()


def test_a_flood_of_grammars(demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server, grammars = demo_server.app.state.server, demo_server.core.grammars
    assert isinstance(grammars, Grammars)
    held = Held(grammars.compile_here, lambda constraint, *_: constraint.text.split("-")[0])
    monkeypatch.setattr(grammars, "compile_here", held)
    monkeypatch.setattr(server, "grammar_turns", Turns(replace(server.grammar_turns.rules, rests=False)))
    numbers = iter(range(100))

    def ask(client: str) -> Background:
        asked = run_on("x", 1, guided_regex=f"{client}-{next(numbers)}")
        return Background.post(demo_server, COMPLETIONS, asked, User_Agent=client)

    check_turns(lambda: server.grammar_turns, held, ask)
    demo_server.wait_idle()


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", MESSAGES, OLLAMA])
def test_a_client_whose_places_are_taken_gets_a_503_in_the_form_of_each_api(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Another client is answered, after those before it."""
    server, info = demo_server.app.state.server, demo_server.engine.info
    assert info is not None
    monkeypatch.setattr(tokenizer_lanes, "TEXTS", replace(tokenizer_lanes.TEXTS, places=1))
    monkeypatch.setattr(server, "tokenizer_lanes", TokenizerLanes())
    held = Held(info.tokenizer.apply_chat_template, lambda messages, *_: messages[0]["content"])
    monkeypatch.setattr(info.tokenizer, "apply_chat_template", held)
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    messages = "input" if path == "/v1/responses" else "messages"
    asked: dict[str, Any] = {"model": "demo", messages: [{"role": "user", "content": "x"}]}
    asked |= {"options": {"num_predict": 1}, "stream": False} if path == OLLAMA else {limit: 1}
    pending = [Background.post(demo_server, path, asked, User_Agent="flood")]
    wait_until(lambda: held.begun)
    pending += [Background.post(demo_server, path, asked, User_Agent=name) for name in ("flood", "other")]
    turns = server.tokenizer_lanes.lanes[info.tokenizer].short
    wait_until(lambda: len(turns.waiting) == 2)
    with raw(demo_server) as client:
        refused = client.post(path, json=asked, headers={"User-Agent": "flood"})
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    error = refused.json()["error"]
    message = error if path == OLLAMA else error["message"]
    assert message == "1 texts of this client wait already; try again later"
    if path == MESSAGES:
        assert error["type"] == "overloaded_error"
    elif path != OLLAMA:
        assert error["code"] == "engine_busy"
    held.allow(3)
    assert [each.result().status_code for each in pending] == [200] * 3
    demo_server.wait_idle()


@pytest.mark.parametrize("size", [100_000, 1_500_000])
def test_a_flood_of_large_bodies(demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    server = demo_server.app.state.server
    name = "body_turns" if size < HUGE_BODY_BYTES else "huge_body_turns"
    monkeypatch.setattr(server, name, Turns(getattr(server, name).rules))
    held = Held(body.parse, lambda data, *_: "other" if b"other" in data[:100] else "flood")
    monkeypatch.setattr(body, "parse", held)

    def ask(client: str) -> Background:
        return Background.post(demo_server, "/tokenize", {"prompt": client + "x" * size}, User_Agent=client)

    check_turns(lambda: getattr(server, name), held, ask)
