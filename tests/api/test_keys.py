"""API keys: who is let in, what a tier is worth, whose requests one may end, and a file that changes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from mlxpaged.api.access.key_file import KeyEntry, KeyFileError, digest, make_key
from mlxpaged.api.app import create_app
from mlxpaged.api.config import HttpConfig
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    DEADLINE,
    Background,
    FakeClock,
    StepGate,
    ask,
    bearer,
    check_failure,
    raw,
    run_on,
    start,
    within_one_step,
    write_keys,
)
from tests.support import RunningServer, running_server, wait_until

CHAT, COMPLETIONS, REQUESTS, STATUS = "/v1/chat/completions", "/v1/completions", "/v1/requests", "/v1/status"
MESSAGES: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
PEOPLE: dict[str, dict[str, Any]] = {
    "high": {"tier": "high"},
    "normal": {},
    "low": {"tier": "low"},
    "riser": {"tier": "low", "max_priority": "high"},
    "admin": {"admin": True},
    "scraper": {"metrics": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, str]:
    return write_keys(folder / "keys.json", **PEOPLE)


@pytest.fixture(scope="module")
def server(folder: Path, keys: dict[str, str]) -> Iterator[RunningServer]:
    http = HttpConfig(api_keys=folder / "keys.json")
    with running_server(EngineConfig(kv_cache_bytes=16_000_000, max_num_seqs=1), http=http) as server:
        yield server


@contextlib.contextmanager
def official(server: RunningServer, key: str, **options: Any) -> Iterator[OpenAI]:
    options = {"max_retries": 0, "timeout": DEADLINE} | options
    with OpenAI(base_url=f"{server.url}/v1", api_key=key, **options) as client:
        yield client


def check_refused(response: httpx.Response, code: str) -> None:
    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", code)
    challenge = 'Bearer realm="mlxpaged"' + (', error="invalid_token"' if code == "invalid_api_key" else "")
    assert response.headers["www-authenticate"] == challenge
    assert response.headers["x-request-id"].startswith("req-")


# -- who is let in ---------------------------------------------------------------------------------------------------


def test_the_official_client_is_answered_with_a_key_and_refused_without(
    server: RunningServer, keys: dict[str, str]
) -> None:
    with official(server, keys["normal"]) as client:
        answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
        assert answer.choices[0].message.content == "42"
        stream = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "42"
        assert [model.id for model in client.models.list()] == ["demo"]
    for wrong in ("sk-wrong", make_key()[0], keys["normal"][:-1], keys["normal"] + "0", keys["normal"].upper()):
        with official(server, wrong) as client, pytest.raises(openai.AuthenticationError) as error:
            client.chat.completions.create(model="demo", messages=MESSAGES)
        check_refused(error.value.response, "invalid_api_key")
        assert wrong not in str(error.value)


def test_either_header_will_do(server: RunningServer, keys: dict[str, str]) -> None:
    key = keys["normal"]
    good: list[list[tuple[str, str]]] = [
        [("Authorization", f"Bearer {key}")],
        [("authorization", f"bearer  {key}")],
        [("x-api-key", key)],
        [("X-Api-Key", key), ("Authorization", "Bearer unused")],
        [("X-Api-Key", "unused"), ("Authorization", f"Bearer {key}")],
    ]
    missing: list[list[tuple[str, str]]] = [
        [],
        [("Authorization", "")],
        [("Authorization", "Bearer")],
        [("Authorization", f"Basic {key}")],
        [("Authorization", key)],
        [("x-api-key", "")],
        [("api-key", key)],
    ]
    unknown = [
        [("Authorization", "Bearer x")],
        [("x-api-key", f"Bearer {key}")],
        [("x-api-key", "é" * 100)],
        [("x-api-key", "x" * 30_000)],
        [*[("x-api-key", "unused")] * 2, ("Authorization", f"Bearer {key}")],  # at most two keys are tried
    ]
    with raw(server) as client:
        for headers in good:
            assert client.get("/v1/models", headers=headers).status_code == 200, headers
        for headers in missing:
            check_refused(client.get("/v1/models", headers=headers), "missing_api_key")
        for headers in unknown:
            encoded = [(name.encode(), value.encode()) for name, value in headers]
            check_refused(client.get("/v1/models", headers=encoded), "invalid_api_key")
        check_refused(client.get(f"/v1/models?api_key={key}&key={key}"), "missing_api_key")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", COMPLETIONS),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/demo"),
        ("GET", "/metrics"),
        ("GET", STATUS),
        ("POST", "/v1/cache/clear"),
        ("DELETE", REQUESTS),
        ("DELETE", f"{REQUESTS}/x"),
        ("GET", "/nothing"),
        ("GET", "/health/"),
        ("GET", "//health"),
        ("PUT", CHAT),
        ("OPTIONS", CHAT),
    ],
)
def test_everything_but_health_and_the_page_needs_a_key(server: RunningServer, method: str, path: str) -> None:
    with raw(server) as client:
        check_refused(client.request(method, server.url + path), "missing_api_key")  # httpx would drop a double slash
        assert client.get("/health").json()["status"] == "ok"


def test_operators_need_an_admin_key(server: RunningServer, keys: dict[str, str]) -> None:
    with raw(server) as client:
        for method, path in (("GET", STATUS), ("POST", "/v1/cache/clear")):
            response = client.request(method, path, headers=bearer(keys["high"]))
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "admin_key_required"
            assert client.request(method, path, headers=bearer(keys["admin"])).status_code == 200


def test_only_admins_and_keys_for_metrics_see_the_load_of_all_keys(server: RunningServer, keys: dict[str, str]) -> None:
    with raw(server) as client:
        for name, status in {"admin": 200, "scraper": 200, "high": 403, "low": 403}.items():
            assert client.get("/metrics", headers=bearer(keys[name])).status_code == status, name
        assert client.get(STATUS, headers=bearer(keys["scraper"])).status_code == 403


def test_a_body_that_is_refused_does_not_spoil_the_connection(server: RunningServer, keys: dict[str, str]) -> None:
    with raw(server) as client:
        check_refused(client.post(CHAT, content=b" " * 3_000_000), "missing_api_key")
        refused = client.post(CHAT, content=b"x", headers={"Expect": "100-continue"})
        check_refused(refused, "missing_api_key")
        assert refused.headers["connection"] == "close"
        assert client.get("/v1/models", headers=bearer(keys["normal"])).status_code == 200


def test_many_clients_at_once_keep_their_own_keys(server: RunningServer, keys: dict[str, str]) -> None:
    import asyncio

    async def one(name: str, key: str, number: int) -> str:
        async with (
            httpx.AsyncClient(timeout=DEADLINE, trust_env=False, verify=False) as http,
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, http_client=http) as client,
        ):
            try:
                answer = await client.chat.completions.create(
                    model="demo", messages=MESSAGES, temperature=0, service_tier="priority"
                )
            except openai.APIStatusError as error:
                return f"{name} {error.status_code}"
            return f"{name} {answer.choices[0].message.content} {answer.service_tier}"

    async def together() -> list[str]:
        people = [(name, keys[name]) for name in ("high", "normal", "riser")] + [("unknown", "sk-unknown")]
        return await asyncio.gather(*(one(name, key, i) for i in range(4) for name, key in people))

    expected = ["high 42 priority", "normal 400", "riser 42 priority", "unknown 401"]
    assert asyncio.run(together()) == expected * 4


# -- tiers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "asked", "priority", "said"),
    [
        ("high", None, "high", "default"),
        ("high", "priority", "high", "priority"),
        ("high", "flex", "low", "flex"),
        ("normal", None, "normal", "default"),
        ("normal", "auto", "normal", "default"),
        ("normal", "flex", "low", "flex"),
        ("low", "default", "low", "default"),
        ("riser", None, "low", "default"),
        ("riser", "priority", "high", "priority"),
    ],
)
def test_the_tier_of_the_key_is_the_priority_of_the_request(
    server: RunningServer, keys: dict[str, str], who: str, asked: str | None, priority: str, said: str
) -> None:
    with StepGate(server) as gate:
        pending = start(server, run_on("x", 3, service_tier=asked), "it", **bearer(keys[who]))
        status = within_one_step(server, gate, "GET", STATUS, headers=bearer(keys["admin"])).json()
        assert [each["priority"] for each in status["running"]["sequences"]] == [priority]
        gate.open()
        assert pending.result().json()["service_tier"] == said


def test_the_tier_decides_who_runs_first(server: RunningServer, keys: dict[str, str]) -> None:
    with StepGate(server) as gate:
        pending = [start(server, run_on("x", 3), name, **bearer(keys[name])) for name in ("admin", "low", "high")]
        status = within_one_step(server, gate, "GET", STATUS, headers=bearer(keys["admin"])).json()
        order = [each["request_id"] for each in status["running"]["sequences"] + status["waiting"]["sequences"]]
        assert order.index("high") < order.index("low")
        gate.open()
        assert [each.result().status_code for each in pending] == [200, 200, 200]


@pytest.mark.parametrize("who", ["normal", "low"])
def test_a_tier_cannot_be_exceeded_by_a_field(server: RunningServer, keys: dict[str, str], who: str) -> None:
    with official(server, keys[who]) as client, pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="demo", messages=MESSAGES, service_tier="priority")
    assert (error.value.param, error.value.code) == ("service_tier", "service_tier_not_allowed")


def test_of_the_keys_that_a_request_presents_two_are_tried(
    server: RunningServer, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is compared with the hashes of all keys: 90 of them, with a thousand, took longer than an answer."""
    tried: list[str] = []
    matches = KeyEntry.matches

    def noted(entry: KeyEntry, presented: str) -> bool:
        tried.append(presented)
        return matches(entry, presented)

    monkeypatch.setattr(KeyEntry, "matches", noted)
    with raw(server) as client:
        for before, status in ((0, 200), (1, 200), (2, 401), (90, 401)):
            tried.clear()
            presented = [*(f"unknown-{i}" for i in range(before)), keys["normal"]]
            response = client.get("/v1/models", headers=[("x-api-key", key) for key in presented])
            assert response.status_code == status, before
            assert list(dict.fromkeys(tried)) == presented[:2]
        bearers = [("authorization", f"Bearer {key}") for key in presented]
        tried.clear()
        assert client.get("/v1/models", headers=[*bearers, ("x-api-key", "first")]).status_code == 401
        assert list(dict.fromkeys(tried)) == ["first", "unknown-0"]


def test_the_engine_knows_whose_requests_it_has(
    server: RunningServer, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client keeps all blocks from another one."""
    seen: list[str] = []
    submit = server.engine.host.submit

    def noting(slot: Any, requests: Any) -> None:
        seen.extend(request.client for request in requests)
        submit(slot, requests)

    monkeypatch.setattr(server.engine.host, "submit", noting)
    with raw(server) as client:
        for key in ("low", "normal"):
            body = run_on("x", 3) | {"n": 2, "max_tokens": 1}
            assert client.post("/v1/completions", json=body, headers=bearer(keys[key])).status_code == 200
    assert seen == ["low", "low", "normal", "normal"]


def test_no_key_fills_the_queue(server: RunningServer, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 6 places. A key that asks for more gets half of them while it is alone."""
    monkeypatch.setattr(server.engine, "config", replace(server.engine.config, max_queue=5))
    pending: list[Background] = []

    def accepted(key: str) -> None:
        pending.append(start(server, run_on("x", 3), f"{key}-{len(pending)}", **bearer(keys[key])))
        wait_until(lambda: server.engine.num_unfinished == len(pending))

    with StepGate(server) as gate, raw(server) as client:

        def refused(key: str) -> None:
            response = client.post("/v1/completions", json=run_on("x", 3), headers=bearer(keys[key]))
            assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")

        for _ in range(3):
            accepted("low")
        refused("low")
        accepted("normal")
        refused("normal")
        accepted("high")
        refused("low")
        gate.open()
        assert [each.result().status_code for each in pending] == [200] * 5


# -- one's own requests ----------------------------------------------------------------------------------------------


def test_a_key_ends_its_own_requests_only(server: RunningServer, keys: dict[str, str]) -> None:
    with StepGate(server) as gate, raw(server) as client:
        low = start(server, run_on("x", 3), "theirs", **bearer(keys["low"]))
        other = start(server, run_on("x", 3), "other", **bearer(keys["normal"]))
        for path in (f"{REQUESTS}/theirs", f"{REQUESTS}/unknown"):  # the answers do not differ
            response = client.delete(path, headers=bearer(keys["normal"]))
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "request_not_found"
        ended = within_one_step(server, gate, "DELETE", REQUESTS, headers=bearer(keys["normal"])).json()["data"]
        assert [each["id"] for each in ended] == ["other"]
        check_failure(other, 499, "request_cancelled", "request_cancelled")
        ended = within_one_step(server, gate, "DELETE", f"{REQUESTS}/theirs", headers=bearer(keys["admin"])).json()
        assert ended["id"] == "theirs"
        check_failure(low, 499, "request_cancelled", "request_cancelled")


def test_an_admin_ends_the_requests_of_all_keys(server: RunningServer, keys: dict[str, str]) -> None:
    with StepGate(server) as gate:
        pending = [start(server, run_on("x", 3), name, **bearer(keys[name])) for name in ("low", "high")]
        ended = within_one_step(server, gate, "DELETE", REQUESTS, headers=bearer(keys["admin"])).json()["data"]
        assert {each["id"] for each in ended} == {"low", "high"}
        for each in pending:
            check_failure(each, 499, "request_cancelled", "request_cancelled")


# -- the file --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def changing(path: Path) -> Iterator[tuple[RunningServer, FakeClock]]:
    clock = FakeClock()
    with running_server(None, clock=clock, http=HttpConfig(api_keys=path)) as server:
        yield server, clock


def status_with(server: RunningServer, key: str) -> int:
    with raw(server) as client:
        return client.get("/v1/models", headers=bearer(key)).status_code


def test_the_file_is_read_again_when_it_changes_and_at_most_once_a_second(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    old = write_keys(path, someone={})["someone"]
    with changing(path) as (server, clock):
        assert status_with(server, old) == 200
        new = write_keys(path, someone={})["someone"]
        assert (status_with(server, old), status_with(server, new)) == (200, 401)
        clock.advance(1)
        assert (status_with(server, old), status_with(server, new)) == (401, 200)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"keys": [{"name": "a"}]}', '{"keys": 1}', "\udcff"])
def test_a_broken_file_keeps_the_old_keys_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    path = tmp_path / "keys.json"
    key = write_keys(path, someone={})["someone"]
    with changing(path) as (server, clock):
        if content is None:
            path.unlink()
        else:
            path.write_text(content, errors="surrogateescape")
        for _ in range(3):
            clock.advance(2)
            assert status_with(server, key) == 200
            assert status_with(server, "sk-other") == 401
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1
        assert str(path) in errors[0]
        assert "were loaded before stay in use" in errors[0]
        mended = write_keys(path, someone={})["someone"]
        clock.advance(2)
        assert (status_with(server, mended), status_with(server, key)) == (200, 401)


def test_a_file_that_gets_its_old_time_back_is_read_again(tmp_path: Path) -> None:
    """So is one that only gets other permissions, as by `chown` after a `sudo mlxpaged keys add`."""
    path = tmp_path / "keys.json"
    key = write_keys(path, someone={})["someone"]
    content, time = path.read_bytes(), path.stat().st_mtime_ns

    def write(content: bytes) -> None:
        before = path.stat().st_ctime_ns
        while path.stat().st_ctime_ns == before:  # the clock of a file system has steps of some milliseconds
            path.write_bytes(content)
            os.utime(path, ns=(time, time))

    with changing(path) as (server, clock):
        write(b"{" * len(content))
        clock.advance(2)
        assert status_with(server, key) == 200
        other = write_keys(tmp_path / "other.json", someone={})["someone"]
        write((tmp_path / "other.json").read_bytes())
        clock.advance(2)
        assert (status_with(server, other), status_with(server, key)) == (200, 401)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tier": "best"}, "keys.0.tier"),
        ({"tier": "low", "max_priority": "low", "requests_per_minute": 0}, "keys.0.requests_per_minute"),
        ({"max_priority": "low"}, "max_priority low must not be lower than tier normal"),
        ({"salt": "00"}, "keys.0.salt"),
        ({"key": "sk-mlxpaged-written-by-hand"}, "keys.0.key"),
        ({"name": "a b"}, "keys.0.name"),
        ({"admin": "yes"}, "keys.0.admin"),
    ],
)
def test_a_broken_file_is_an_error_at_start(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, someone={})
    content = json.loads(path.read_text())
    content["keys"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(KeyFileError, match=reason) as error:
        create_app(None, http=HttpConfig(api_keys=path))
    assert "sk-mlxpaged" not in str(error.value)
    with pytest.raises(KeyFileError, match="No such file"):
        create_app(None, http=HttpConfig(api_keys=tmp_path / "nothing"))


def test_a_file_of_too_many_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, someone={})
    content = json.loads(path.read_text())
    content["keys"] = [content["keys"][0] | {"name": f"key-{i}"} for i in range(1001)]
    path.write_text(json.dumps(content))
    with pytest.raises(KeyFileError, match="at most 1000 items"):
        create_app(None, http=HttpConfig(api_keys=path))


def test_two_keys_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, someone={})
    content = json.loads(path.read_text())
    content["keys"] *= 2
    path.write_text(json.dumps(content))
    with pytest.raises(KeyFileError, match="two keys are named someone"):
        create_app(None, http=HttpConfig(api_keys=path))


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, someone={})
    create_app(None, http=HttpConfig(api_keys=path))
    assert "other users" not in caplog.text
    for mode in (0o640, 0o604):
        caplog.clear()
        os.chmod(path, mode)
        create_app(None, http=HttpConfig(api_keys=path))
        assert "can be read by other users" in caplog.text


def test_the_file_has_only_a_salted_hash_that_no_repr_shows(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = write_keys(path, a={}, b={})
    text = path.read_text()
    assert not any(key in text or key.removeprefix("sk-mlxpaged-") in text for key in keys.values())
    a, _ = entries = [KeyEntry(**entry) for entry in json.loads(text)["keys"]]
    assert len({entry.salt for entry in entries}) == len({entry.hash for entry in entries}) == 2
    assert digest(keys["a"], bytes.fromhex(a.salt)).hex() == a.hash
    assert a.hash not in repr(a)
    assert a.salt not in repr(a)


def test_the_file_may_change_while_requests_come_in(tmp_path: Path) -> None:
    """A reader sees the whole old file or the whole new one, so that a key in both is never refused."""
    path = tmp_path / "keys.json"
    keys = write_keys(path, stays={})
    entry = json.loads(path.read_text())["keys"][0]
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            other = tmp_path / "other.json"
            write_keys(other, other={})
            content = json.loads(other.read_text())
            content["keys"].append(entry)
            other.write_text(json.dumps(content))
            os.replace(other, path)

    with changing(path) as (server, clock):
        thread = threading.Thread(target=rewrite)
        thread.start()
        try:
            for _ in range(100):
                clock.advance(2)
                assert status_with(server, keys["stays"]) == 200
        finally:
            stop.set()
            thread.join(DEADLINE)


# -- what is not told ------------------------------------------------------------------------------------------------


def test_no_key_is_ever_logged_or_shown(
    server: RunningServer, keys: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = "sk-proj-another-services-key-0123456789"
    shown = []
    with caplog.at_level(logging.DEBUG), raw(server) as client:
        for key in (keys["normal"], stranger):
            for headers in (bearer(key), {"x-api-key": key}):
                shown.append(client.post(CHAT, json=ask("x", max_tokens=2), headers=headers))
                shown.append(client.post(CHAT, json=ask("x", model=key), headers=headers))
                shown.append(client.post(CHAT, json=ask("x", service_tier="priority"), headers=headers))
                shown.append(client.get(f"/v1/models?api_key={key}", headers=headers))
        monkeypatch.setattr(type(server.engine.info.tokenizer), "encode", lambda *_, **__: 1 / 0)
        shown.append(client.post(COMPLETIONS, json=run_on("x", 1), headers=bearer(keys["normal"])))
        assert shown[-1].status_code == 500
    # The client logs in this process too. What uvicorn says of accesses is switched off where the server is started.
    records = [r for r in caplog.records if not r.name.startswith(("http", "openai", "uvicorn.access"))]
    logged = "".join(logging.Formatter().format(record) + repr(record.__dict__) for record in records)
    assert "ZeroDivisionError" in logged
    assert "GET /v1/models: 401" in logged
    everything = logged + "".join(each.text + str(each.headers) for each in shown)
    assert keys["normal"] not in everything
    assert stranger not in everything
    assert not any(key in repr(vars(server.app.state.server.keys)) for key in keys.values())
