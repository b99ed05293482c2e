"""POST /api/pull over real HTTP, with the stand-in for the hub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from mlxpaged.api import downloadable
from mlxpaged.api.app import create_app
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.downloads import MAX_DOWNLOADS
from mlxpaged.api.ollama import pull
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models import device_memory, disk
from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.models.sources import local
from mlxpaged.models.sources.downloads import downloads
from mlxpaged.models.sources.short_names import short_names
from tests.api.helpers import DEADLINE, bearer, raw, write_keys
from tests.cli.helpers import hub
from tests.models.test_preflight import point_to, requested_weights, sizes_of
from tests.support import RunningServer, running_server, wait_until

NAME = "mlx-community/Qwen3-4B-4bit"
WEIGHTS = "model.safetensors"
ALLOWED = HttpConfig(allow_downloads=True)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(EngineConfig(kv_cache_bytes=16_000_000), http=ALLOWED) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no proxy between the library and the stand-in."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pull, "PROGRESS_SECONDS", 0.01)
    return tmp_path / "cache"


@contextlib.contextmanager
def online(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[list[str]]:
    """The stand-in, which has the demo model as NAME. Yields the requests that it got."""
    with hub(NAME, DEMO_PATH, options.pop("sizes", sizes_of(DEMO_PATH)), **options) as (address, requests):
        point_to(address, monkeypatch)
        yield requests


def lines(client: httpx.Client, model: str) -> list[dict[str, Any]]:
    with client.stream("POST", "/api/pull", json={"model": model}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


@pytest.mark.usefixtures("cache")
def test_a_model_is_downloaded_with_its_progress_and_then_answers(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with online(monkeypatch) as requests, raw(server) as client:
        first, *layers, last = lines(client, "Qwen3:4B")
        assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
        total = sum(size for file, size in sizes_of(DEMO_PATH).items() if not file.endswith(".md"))
        for layer in layers:
            assert layer["status"] == f"pulling {layer['digest'].removeprefix('sha256:')[:12]}"
            assert 0 <= layer["completed"] <= layer["total"] == total
        if layers:
            assert layers[-1]["completed"] == total
        assert [download.name for download in downloads()] == [NAME]
        assert client.post("/api/pull", json={"name": NAME, "stream": False}).json() == {"status": "success"}
        assert sum("GET" in request and requested_weights([request]) for request in requests) == 1
        assert NAME in [model["id"] for model in client.get("/v1/models").json()["data"]]
        [tagged] = [model for model in client.get("/api/tags").json()["models"] if model["name"] == f"{NAME}:latest"]
        assert tagged["size"] == sizes_of(DEMO_PATH)[WEIGHTS]
        for name in ("qwen3:4b", tagged["model"]):  # as `ollama run` asks after it has pulled a model
            assert client.post("/api/show", json={"model": name}).json()["modelfile"] == f"FROM {NAME}\n"
        body = {"model": "qwen3:4b", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "stream": False}
        answer = client.post("/api/chat", json=body, timeout=DEADLINE).json()
        assert answer["message"]["content"] == "42"


@pytest.mark.parametrize("model", ["demo", "demo:latest"])
def test_the_bundled_model_is_there_already(server: RunningServer, model: str) -> None:
    with raw(server) as client:
        assert lines(client, model)[-1] == {"status": "success"}
        assert client.post("/api/pull", json={"model": model, "stream": False}).json() == {"status": "success"}


@pytest.mark.usefixtures("cache")
def test_one_download_serves_all_who_ask_and_goes_on_without_them(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(requests: list[str]) -> int:
        return sum("GET" in request and requested_weights([request]) for request in requests)

    with contextlib.ExitStack() as stack:
        requests = stack.enter_context(online(monkeypatch, stalls=WEIGHTS))
        clients = [stack.enter_context(raw(server)) for _ in range(2)]
        for client in clients:
            with client.stream("POST", "/api/pull", json={"model": NAME}) as response:
                for line in response.iter_lines():
                    completed = json.loads(line).get("completed", 0)
                    if weights(requests) and completed:
                        break
        assert weights(requests) == 1
        pulling = [thread for thread in threading.enumerate() if thread.name == "mlxpaged-download"]
        assert len(pulling) == 1, "it goes on, and there is only one"
    wait_until(lambda: not pulling[0].is_alive(), DEADLINE)


def test_other_files_of_the_repository_are_no_progress(
    server: RunningServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = cache / f"models--{NAME.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "another").write_bytes(bytes(sum(sizes_of(DEMO_PATH).values())))
    with online(monkeypatch, stalls=WEIGHTS), raw(server) as client:
        with client.stream("POST", "/api/pull", json={"model": NAME}) as response:
            found = next(found for line in response.iter_lines() if (found := json.loads(line)).get("completed"))
        assert found["completed"] < found["total"]
        pulling = [thread for thread in threading.enumerate() if thread.name == "mlxpaged-download"]
    wait_until(lambda: not any(thread.is_alive() for thread in pulling), DEADLINE)


def held_downloads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """All downloads end, without files, when the event is set."""
    ended = threading.Event()
    monkeypatch.setattr(
        "mlxpaged.models.sources.hub.download_small_files", lambda name, **_: ended.wait(DEADLINE) and None
    )
    monkeypatch.setattr("mlxpaged.models.sources.hub.download_weights", lambda name, files: Path(name))
    return ended


@pytest.mark.usefixtures("cache")
def test_only_so_many_repositories_are_downloaded_at_once(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = held_downloads(monkeypatch)
    with contextlib.ExitStack() as stack:
        stack.callback(ended.set)
        client = stack.enter_context(raw(server))
        running = [
            stack.enter_context(client.stream("POST", "/api/pull", json={"model": f"someone/model-{number}"}))
            for number in range(MAX_DOWNLOADS)
        ]
        refused = client.post("/api/pull", json={"model": "someone/other"})
        assert refused.status_code == 503
        assert list(refused.json()) == ["error"]
        ended.set()
        for response in running:  # their streams end with the downloads
            assert b'"success"' in response.read()
    with raw(server) as client:
        assert lines(client, "someone/other")[-1] == {"status": "success"}


@pytest.mark.usefixtures("cache")
def test_the_end_of_the_server_ends_those_who_wait_for_a_download(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = held_downloads(monkeypatch)
    monkeypatch.setattr(server.app.state.server, "is_ending", True)
    with raw(server) as client:
        assert failing(client, "someone/slow")[1].startswith("the server is shutting down")
    ended.set()


def failing(client: httpx.Client, model: str) -> tuple[int, str]:
    """The status and the error without a stream. A stream has the same error as its last line."""
    whole = client.post("/api/pull", json={"model": model, "stream": False})
    assert list(whole.json()) == ["error"]
    assert lines(client, model)[-1] == whole.json()
    return whole.status_code, whole.json()["error"]


@pytest.mark.usefixtures("cache")
def test_what_cannot_be_downloaded_is_said_in_ollamas_form(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raw(server) as client:
        with online(monkeypatch) as requests:
            status, error = failing(client, "someone/absent")
            assert (status, "someone/absent is neither" in error) == (404, True)
            with monkeypatch.context() as patch:
                patch.setattr(disk, "free_disk", lambda directory: 0)
                status, error = failing(client, NAME)
                assert (status, "but the disk has 0.0 GB" in error) == (507, True)
            with monkeypatch.context() as patch:
                patch.setattr(local, "free_device_memory", lambda: -(10**12))
                status, error = failing(client, NAME)
                assert (status, "of memory are free" in error) == (507, True)
            assert not requested_weights(requests)
        point_to("http://127.0.0.1:9", monkeypatch)  # nothing listens there
        status, error = failing(client, "someone/other")
        assert (status, "could not be fetched from the hub" in error) == (502, True)


@pytest.mark.parametrize(
    ("model", "words"),
    [("qwen3:5b", "did you mean qwen3:0.6b, "), ("/etc", "OWNER/NAME"), ("a/b/c", "OWNER/NAME"), ("a\nb/c", "OWNER")],
)
def test_a_name_that_no_repository_can_have_is_a_404(server: RunningServer, model: str, words: str) -> None:
    with raw(server) as client:
        response = client.post("/api/pull", json={"model": model})
    assert response.status_code == 404
    assert words in response.json()["error"]


@pytest.mark.usefixtures("cache")
def test_the_list_has_the_short_names_for_who_may_download(
    server: RunningServer, demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with online(monkeypatch), raw(server) as client:
        assert lines(client, NAME)[-1] == {"status": "success"}
        monkeypatch.setattr(device_memory, "system_free_memory", lambda: 10**9)
        found = client.get("/v1/downloads").json()
    assert found["allowed"]
    rows = {row["id"]: row for row in found["data"]}
    assert rows.keys() == short_names().keys()
    assert {name for name, row in rows.items() if row["downloaded"]} == {"qwen3:4b"}
    assert rows["qwen3:4b"]["repository"] == NAME
    kinds = {name: (rows[name]["kind"], rows[name]["source"]) for name in ("qwen3:4b", "gemma3:4b", "all-minilm:22m")}
    assert list(kinds.values()) == [("text", "mlx-lm"), ("vision", "mlx-lm"), ("embedding", "mlxpaged")]
    assert all(row["source"] for row in rows.values())
    assert all(row["good_for"] for row in rows.values())
    assert rows["qwen3:4b"]["parameters"] == 4_000_000_000
    assert rows["qwen3:0.6b"]["size_bytes"] < found["memory_bytes"] < rows["qwen3:235b"]["size_bytes"]
    assert rows["qwen3:0.6b"]["fits"]
    assert not rows["qwen3:235b"]["fits"]
    with raw(demo_server) as client:
        seen = client.get("/v1/downloads").json()
        assert (seen["allowed"], seen["data"][0]["id"]) == (False, "qwen3:0.6b"), "what fits is shown without the flag"
        monkeypatch.setattr(downloadable, "is_local", lambda request: False)
        assert client.get("/v1/downloads").json() == {"allowed": False, "memory_bytes": None, "data": []}


def test_without_the_flag_the_refusal_names_it(demo_server: RunningServer) -> None:
    with raw(demo_server) as client:
        response = client.post("/api/pull", json={"model": "qwen3:4b"})
    assert response.status_code == 403
    assert "--allow-downloads" in response.json()["error"]


def asked_from(address: str, http: HttpConfig, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(None, http=http), client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            return await client.post("/api/pull", json={"model": "demo", "stream": False})

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("address", "status"),
    [("127.0.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200), ("10.0.0.7", 403), ("::ffff:10.0.0.7", 403)],
)
def test_without_keys_only_this_machine_may_download(address: str, status: int) -> None:
    response = asked_from(address, ALLOWED)
    assert response.status_code == status
    assert status == 200 or "admin key" in response.json()["error"]


@pytest.mark.parametrize(("name", "status"), [("anna", 200), ("ben", 403)])
@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7"])
def test_with_keys_only_an_admin_key_may_download(tmp_path: Path, address: str, name: str, status: int) -> None:
    keys = write_keys(tmp_path / "keys.json", anna={"admin": True}, ben={})
    http = HttpConfig(allow_downloads=True, api_keys=tmp_path / "keys.json")
    response = asked_from(address, http, **bearer(keys[name]))
    assert response.status_code == status
    assert status == 200 or "needs an admin key" in response.json()["error"]
