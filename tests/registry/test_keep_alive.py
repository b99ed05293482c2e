"""`keep_alive` of Ollama's API: how long a model stays loaded after its last request, and what `/api/ps` says."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.api.config import HttpConfig
from mlxpaged.api.ollama.durations import stay_of
from mlxpaged.api.ollama.models import NEVER
from mlxpaged.registry import registry as module
from mlxpaged.registry.occupants import Limits
from tests.api.helpers import Background, FakeClock, StepGate, bearer, post, raw, run_on, within_one_step, write_keys
from tests.registry.helpers import models, states
from tests.support import RunningServer, running_server, wait_until

OPTIONS = {"num_predict": 3, "temperature": 0}
SAID = [{"role": "user", "content": "x"}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/api/chat", {"model": "small", "messages": SAID, "options": OPTIONS, "stream": False}),
    "stream": ("/api/chat", {"model": "small", "messages": SAID, "options": OPTIONS}),
    "generate": ("/api/generate", {"model": "small", "prompt": "x", "options": OPTIONS, "stream": False}),
    "raw": ("/api/generate", {"model": "small", "prompt": "x", "options": OPTIONS, "raw": True}),
    "embed": ("/api/embed", {"model": "vectors", "input": "x"}),
    "embeddings": ("/api/embeddings", {"model": "vectors", "prompt": "x"}),
}
EMPTY: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/api/chat", {"model": "small", "messages": []}),
    "generate": ("/api/generate", {"model": "small"}),
    "embed": ("/api/embed", {"model": "vectors", "input": []}),
    "embeddings": ("/api/embeddings", {"model": "vectors"}),
}


@pytest.fixture(autouse=True)
def _watches_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.01)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(paths: dict[str, Path], clock: FakeClock) -> Iterator[RunningServer]:
    registry = models(paths, "small", "vectors", clock=clock, limits=Limits(idle_unload=1000.0))
    with running_server(registry, clock=clock) as server:
        yield server


def ask(server: RunningServer, asked: tuple[str, dict[str, Any]], keep_alive: Any, **headers: str) -> httpx.Response:
    path, body = asked
    with raw(server) as client:
        response = client.post(path, json=body | {"keep_alive": keep_alive}, headers=headers)
    assert response.status_code == 200, response.text
    return response


def expiry(server: RunningServer, name: str) -> str:
    with raw(server) as client:
        found = {each["name"]: each["expires_at"] for each in client.get("/api/ps").json()["models"]}
    return str(found[f"{name}:latest"])


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *((0, 0), (30, 30), (0.5, 0.5), (-1, math.inf), (-0.1, math.inf), (1e30, math.inf)),
        *((10**400, math.inf), (-(10**400), math.inf)),
        *(("0", 0), ("0s", 0), ("0.0s", 0), ("0h0m0s", 0), ("1s", 1), ("1h30m", 5400), ("1.5h", 5400)),
        *(("500ms", 0.5), ("2m0.5s", 120.5), (".5s", 0.5), ("1.s", 1), ("+3m", 180), ("-1m", math.inf)),
        *(("-0s", 0), ("250us", 0.00025), ("1\u00b5s", 1e-6), ("3ns", 3e-9), ("9999999h", math.inf)),
    ],
)
def test_durations_are_those_of_go(given: Any, seconds: float) -> None:
    assert stay_of(given) == pytest.approx(seconds)


BAD = ["", "5", "-1", "s", "5 m", "5d", "1m 3s", "m5", "1e3s", "forever", "\u0665m", "1" * 200 + "s", ".s", "--1s"]


def test_what_is_no_duration_is_refused(server: RunningServer) -> None:
    for given in BAD:
        with pytest.raises(ValueError, match="must be a number of seconds"):
            stay_of(given)
    for i, (path, body) in enumerate((*ASKED.values(), *EMPTY.values())):
        with raw(server) as client:
            response = client.post(path, json=body | {"keep_alive": BAD[i]})
        assert response.status_code == 400
        assert response.json()["error"].startswith("keep_alive: must be a number of seconds, or a duration such as")
    assert states(server)["small"] == "available"


@pytest.mark.parametrize("kind", ASKED)
def test_a_model_that_is_not_to_stay_is_unloaded_after_the_answer(server: RunningServer, kind: str) -> None:
    name = ASKED[kind][1]["model"]
    answers = []
    for keep_alive in (0, "0h0m0s"):  # it comes back
        answers.append(ask(server, ASKED[kind], keep_alive))
        wait_until(lambda: states(server)[name] == "available")
    assert "x-mlxpaged-ignored" not in answers[0].headers
    post(server, run_on("x", 1, model="small"))
    assert server.registry.seconds_left(server.registry.models["small"]) == 1000.0  # what was asked for is forgotten


@pytest.mark.parametrize("kind", ASKED)
def test_a_model_stays_for_as_long_as_the_last_request_says(server: RunningServer, clock: FakeClock, kind: str) -> None:
    model = server.registry.models[ASKED[kind][1]["model"]]
    ask(server, ASKED[kind], "30m")
    before = time.time()
    ask(server, ASKED[kind], 60)
    wait_until(lambda: server.registry.seconds_left(model) == 60.0)
    moment = datetime.fromisoformat(expiry(server, model.name).replace("Z", "+00:00")).timestamp()
    assert before + 59 < moment <= time.time() + 60
    clock.advance(59)
    ask(server, ASKED[kind], None)  # another request, which does not say anything
    wait_until(lambda: server.registry.seconds_left(model) == 60.0)
    clock.advance(59)
    assert (states(server)[model.name], server.registry.seconds_left(model)) == ("loaded", 1.0)
    clock.advance(1)
    wait_until(lambda: states(server)[model.name] == "available")


def test_a_model_stays_for_ever_if_a_request_says_so(server: RunningServer, clock: FakeClock) -> None:
    ask(server, ASKED["chat"], "-1s")
    post(server, run_on("x", 1))
    assert expiry(server, "small") == NEVER
    assert expiry(server, "demo") != NEVER
    clock.advance(5000)
    wait_until(lambda: states(server) == {"demo": "available", "small": "loaded", "vectors": "available"})
    ask(server, ASKED["generate"], "1ms")
    clock.advance(0.01)
    wait_until(lambda: states(server)["small"] == "available")


@pytest.mark.parametrize("kind", EMPTY)
def test_without_a_prompt_a_model_is_loaded_or_unloaded(server: RunningServer, clock: FakeClock, kind: str) -> None:
    name = EMPTY[kind][1]["model"]
    ask(server, EMPTY[kind], "10s")
    assert (states(server)[name], server.registry.seconds_left(server.registry.models[name])) == ("loaded", 10.0)
    clock.advance(10)
    wait_until(lambda: states(server)[name] == "available")
    ask(server, EMPTY[kind], 0)  # it is not loaded for that
    assert states(server)[name] == "available"
    ask(server, EMPTY[kind], None)
    ask(server, EMPTY[kind], "0.0s")
    assert states(server)[name] == "available"


def test_a_model_of_the_command_line_is_unloaded_too_and_comes_back(server: RunningServer) -> None:
    path, body = ASKED["chat"]
    ask(server, (path, body | {"model": "demo"}), 0)
    wait_until(lambda: states(server)["demo"] == "available")
    assert post(server, run_on("x", 2))["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("asked", [ASKED["chat"], EMPTY["chat"]], ids=["prompt", "empty"])
def test_requests_that_run_are_not_ended(server: RunningServer, asked: tuple[str, dict[str, Any]]) -> None:
    path, body = asked
    with StepGate(server) as gate:
        running = Background.post(server, "/v1/completions", run_on("x", 5))
        gate.wait_held()
        ending = Background.post(server, path, body | {"model": "demo", "keep_alive": 0})
        if not body["messages"]:
            assert ending.result().json()["done_reason"] == "unload"
            assert states(server)["demo"] == "loaded"
        gate.open()
        assert running.result().json()["usage"]["completion_tokens"] == 5
        assert ending.result().status_code == 200
    wait_until(lambda: states(server)["demo"] == "available")


def test_a_request_that_is_cancelled_counts(server: RunningServer) -> None:
    body = {"model": "demo", "messages": SAID, "keep_alive": 0}
    with StepGate(server) as gate:
        stream = Background.post(server, "/api/chat", body, **{"X-Request-Id": "left"})
        gate.wait_held()
        assert within_one_step(server, gate, "DELETE", "/v1/requests/left").status_code == 200
        stream.result()
    wait_until(lambda: states(server)["demo"] == "available")


def test_pins_and_keys_without_rights_are_above_it(paths: dict[str, Path], tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", boss={"admin": True}, anna={})
    http, registry = HttpConfig(api_keys=tmp_path / "keys.json"), models(paths, "small", pinned=["demo"])
    boss, anna = bearer(keys["boss"]), bearer(keys["anna"])
    path, body = ASKED["chat"]
    demo = path, body | {"model": "demo"}
    with running_server(registry, http=http) as server:
        for asked, caller in ((demo, boss), (demo, anna), (ASKED["chat"], anna), (EMPTY["chat"], anna)):
            assert ask(server, asked, 0, **caller).headers["x-mlxpaged-ignored"] == "keep_alive"
        assert [model.state.value for model in registry.models.values()] == ["loaded", "loaded"]
        assert all(registry.seconds_left(model) == math.inf for model in registry.models.values())
        assert "x-mlxpaged-ignored" not in ask(server, ASKED["chat"], 0, **boss).headers
        wait_until(lambda: registry.models["small"].state.value == "available")
