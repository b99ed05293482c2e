"""Several models behind one server: loaded on first use, unloaded for each other, each answering as if alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.api import streaming
from mlxpaged.api.config import HttpConfig
from mlxpaged.engine import builder
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.device_memory import limit_memory
from mlxpaged.registry.catalog import Catalog, model_paths
from mlxpaged.registry.model import Model, ModelState
from mlxpaged.registry.occupants import Limits
from mlxpaged.registry.registry import registry_of
from tests.api.helpers import (
    DEADLINE,
    Background,
    FakeClock,
    StepGate,
    answer_text,
    ask,
    bearer,
    post,
    random_tokens,
    raw,
    run_on,
    sample_name,
    samples,
    write_keys,
)
from tests.models.gguf_models import as_gguf
from tests.models.test_other_apps import pull
from tests.registry.helpers import POOL, downloaded, hold_loads, models, refusal, states
from tests.support import RunningServer, running_server, wait_until


def metrics_of(server: RunningServer, model: str) -> dict[str, float]:
    """Sample name, with the values of its other labels, -> value."""
    return {sample_name(each): each.value for each in samples(server) if each.labels.get("model") == model}


@pytest.fixture
def server(paths: dict[str, Path]) -> Iterator[RunningServer]:
    with running_server(models(paths, "small", "hybrid", "vectors", aliases={"gpt-4o": "small"})) as server:
        yield server


# -- names and first use -----------------------------------------------------------------------------------------------


def test_a_model_is_loaded_when_a_request_names_it_and_others_go_on(server: RunningServer) -> None:
    assert states(server) == {"demo": "loaded", "small": "available", "hybrid": "available", "vectors": "available"}
    with raw(server) as client:
        assert all(model["size_bytes"] > 0 for model in client.get("/v1/models").json()["data"])
    with raw(server) as client, ThreadPoolExecutor(1) as thread:
        stream = run_on("x", 200, stream=True)
        with client.stream("POST", "/v1/completions", json=stream) as response:
            lines = response.iter_lines()
            next(lines)
            loading = thread.submit(post, server, run_on("x", 5, model="small"))
            received = sum(line.startswith("data: {") for line in lines)
        assert received >= 199
        assert loading.result()["usage"]["completion_tokens"] == 5
    assert states(server) == {"demo": "loaded", "small": "loaded", "hybrid": "available", "vectors": "available"}
    assert answer_text(server, ask("What is 17 + 25?", model="gpt-4o:latest")) is not None
    with raw(server) as client:
        entry = client.get("/v1/models/gpt-4o").json()
        status = client.get("/v1/status").json()
    assert (entry["id"], entry["kind"], entry["pinned"], entry["running"]) == ("small", "text", False, 0)
    assert entry["memory_bytes"] > entry["size_bytes"] > 0
    assert [(model["id"], model["memory_bytes"] > 0) for model in status["models"]] == [("demo", True), ("small", True)]
    demo, small, hybrid = (metrics_of(server, model) for model in ("demo", "small", "hybrid"))
    assert (demo["mlxpaged_requests_finished_total|length"], demo["mlxpaged_requests_finished_total|error"]) == (1, 0)
    assert demo["mlxpaged_time_to_first_token_seconds_count"] == 1
    assert small["mlxpaged_time_to_first_token_seconds_count"] == 2
    assert small["mlxpaged_model_memory_bytes"] == entry["memory_bytes"]
    assert hybrid == {f"mlxpaged_model_state|{state.value}": state.value == "available" for state in ModelState}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_stream_says_how_far_its_load_is(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with running_server(models(paths, "small")) as server, raw(server) as client:
        go_on = hold_loads(monkeypatch)
        body = ask("x", model="small", stream=True, max_tokens=4)
        with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            if path != "/api/chat":  # lines of JSON have no comments
                assert ": loading 1.2 of 3.4 GB" in itertools.islice(lines, 100)
            assert answer_text(server, ask("What is 17 + 25?")) == "42"  # while the other one loads
            go_on.set()
            rest = [line for line in lines if line and not line.startswith(":")]
        assert len(rest) > 2
        if path != "/api/chat":  # its answers have no id
            assert response.headers["x-request-id"] in "".join(rest)


@pytest.mark.parametrize("fails", [False, True])
def test_a_response_has_events_while_its_model_is_loaded(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(streaming, "LOADING_SECONDS", 0.01)
    http = HttpConfig(keep_alive_seconds=0)
    with running_server(models(paths, "small"), http=http) as server, server.client() as client:
        go_on = hold_loads(monkeypatch)
        sent: dict[str, Any] = {"model": "small", "input": "x" * (1 if not fails else 100_000), "max_output_tokens": 2}
        with client.responses.stream(**sent) as stream:
            first, second = itertools.islice(stream, 2)
            go_on.set()
            events = [first, second, *stream]
    assert [each.type for each in events[:2]] == ["response.created", "response.in_progress"]
    assert "response.created" not in [each.type for each in events[1:]]
    assert events[-1].type == ("response.failed" if fails else "response.incomplete")
    assert [each.sequence_number for each in events] == [*range(len(events))]
    responses = [each.response for each in events if hasattr(each, "response")]
    assert len({(each.id, each.created_at, each.model) for each in responses}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/api/chat", "/api/generate"])
def test_chunks_and_lines_without_text_come_while_the_model_is_loaded(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    fields: dict[str, Any] = {"model": "alias", "stream": True}
    said: dict[str, Any] = ask("x", max_tokens=2) if "chat" in path else {"prompt": "x", "max_tokens": 2}
    registry = models(paths, "small", aliases={"alias": "small"})
    with running_server(registry, http=HttpConfig(keep_alive_seconds=0)) as server, raw(server) as client:
        go_on = hold_loads(monkeypatch)
        with client.stream("POST", path, json=said | fields) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines())
            found = (json.loads(line) for line in lines if line.startswith("{"))
            first = next(found)
            monkeypatch.setattr("time.time", lambda: 1e9)  # the load takes long
            go_on.set()
            rest = list(found)
    if path.startswith("/v1"):
        [choice] = first["choices"]
        assert choice.get("delta", choice.get("text")) in ({}, "")
        assert {each["id"] for each in (first, *rest)} == {response.headers["x-request-id"]}
        assert {each["created"] for each in rest} == {first["created"]}
    else:
        assert first.get("response", first.get("message", {}).get("content")) == ""
    assert {each["model"] for each in (first, *rest)} == {"small" if path.startswith("/v1") else "alias"}
    assert not first.get("done")
    assert first.keys() <= rest[0].keys()


@pytest.mark.parametrize(
    ("path", "begin"),
    [
        ("/v1/completions", 'data: {"error":'),
        ("/v1/responses", "event: response.failed"),
        ("/v1/messages", "event: error"),
        ("/api/chat", '{"error":'),
    ],
)
def test_a_stream_whose_model_cannot_be_loaded_ends_with_the_error(tmp_path: Path, path: str, begin: str) -> None:
    base = EngineConfig(kv_cache_bytes=POOL)
    broken = Model("broken", EngineConfig(str(tmp_path / "nothing"), "broken"))
    with running_server(registry_of([Model("demo", base), broken], base)) as server, raw(server) as client:
        bodies = {"/v1/completions": run_on("x", 3), "/v1/responses": {"input": "x"}}
        body = bodies.get(path, ask("x", max_tokens=3)) | {"model": "broken"}
        text = client.post(path, json=body | {"stream": True}).text
        assert any(line.startswith(begin) and "no such directory" in text for line in text.splitlines()), text
        assert refusal(server, path, body | {"stream": False})[0] == 500
        assert states(server) == {"demo": "loaded", "broken": "failed"}
        assert answer_text(server, ask("What is 17 + 25?")) == "42"


def test_openais_client_reads_why_a_model_cannot_be_loaded(tmp_path: Path) -> None:
    base = EngineConfig(kv_cache_bytes=POOL)
    broken = Model("broken", EngineConfig(str(tmp_path / "nothing"), "broken"))
    with (
        running_server(registry_of([Model("demo", base), broken], base)) as server,
        server.client() as client,
        client.responses.stream(model="broken", input="x") as stream,
    ):
        begun, failed = stream
    assert (begun.type, failed.type) == ("response.created", "response.failed")
    assert failed.response.error is not None
    assert "no such directory" in failed.response.error.message


def test_a_response_keeps_its_id_although_a_request_with_the_same_waited_for_its_model(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(models(paths, "small")) as server, raw(server) as client:
        go_on = hold_loads(monkeypatch)
        body, headers = {"input": "x", "max_output_tokens": 1}, {"X-Request-Id": "resp-mine"}
        late = Background.post(server, "/v1/responses", body | {"model": "small"}, **headers)
        wait_until(lambda: states(server)["small"] == "loading")
        first = client.post("/v1/responses", json=body, headers=headers)
        go_on.set()
        assert (first.status_code, late.result().status_code) == (200, 409)
        assert client.get("/v1/responses/resp-mine").json() == first.json()


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_request_that_waits_for_its_model_can_be_cancelled(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, all_of_them: bool
) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", ask("x", max_tokens=2, model="small")),
        ("/v1/chat/completions", ask("x", max_tokens=2, model="small", stream=True)),
        ("/v1/embeddings", {"input": "x", "model": "small"}),
    ]
    with running_server(models(paths, "small")) as server, raw(server) as client:
        go_on = hold_loads(monkeypatch)
        late = [
            Background.post(server, path, body, **{"X-Request-Id": f"late-{i}"})
            for i, (path, body) in enumerate(bodies)
        ]
        wait_until(lambda: len(list(server.app.state.server.open_requests)) == 3)
        if all_of_them:
            ended = client.delete("/v1/requests").json()["data"]
        else:
            ended = [client.delete(f"/v1/requests/late-{i}").json() for i in range(3)]
        assert {each["id"]: each["cancelled"] for each in ended} == {f"late-{i}": True for i in range(3)}
        whole, stream, embeddings = [each.result() for each in late]
        assert (whole.status_code, embeddings.status_code) == (499, 499)
        assert "the request was cancelled" in stream.text
        assert client.delete("/v1/requests/late-0").status_code == 404
        go_on.set()
        answer = client.post("/v1/chat/completions", json=ask("x", max_tokens=2, model="small"))
        assert answer.status_code == 200  # the load went on


def test_a_stream_that_its_client_has_left_does_not_wait_for_its_model(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = ask("x", max_tokens=2, model="small")
    with running_server(models(paths, "small")) as server, raw(server) as client:
        go_on, waiting = hold_loads(monkeypatch), server.app.state.server.open_requests
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}):
            wait_until(lambda: len(list(waiting)) == 1)
        wait_until(lambda: not list(waiting))
        assert client.delete("/v1/requests").json()["data"] == []
        assert states(server)["small"] == ModelState.LOADING.value
        go_on.set()
        assert client.post("/v1/chat/completions", json=body).status_code == 200  # the load went on


def test_all_requests_of_a_key_with_an_id_that_wait_for_their_model_are_cancelled(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.json", anna={}, otto={})
    http = HttpConfig(api_keys=tmp_path / "keys.json")
    with running_server(models(paths, "small"), http=http) as server, raw(server) as client:
        go_on, late = hold_loads(monkeypatch), []
        for name in ("anna", "otto", "otto"):
            headers = bearer(keys[name]) | {"X-Request-Id": "mine"}
            late.append(Background.post(server, "/v1/completions", run_on("x", 2, model="small"), **headers))
            wait_until(lambda: len(list(server.app.state.server.open_requests)) == len(late))
        ended = client.delete("/v1/requests/mine", headers=bearer(keys["otto"]))
        assert (ended.status_code, ended.json()["cancelled"]) == (200, True)
        assert [each.result().status_code for each in late[1:]] == [499, 499]
        assert client.delete("/v1/requests/mine", headers=bearer(keys["otto"])).status_code == 404
        go_on.set()
        assert late[0].result().status_code == 200


def test_directories_and_downloaded_repositories_are_served_by_name(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(paths["small"], downloaded(tmp_path, "hubbed"), dirs_exist_ok=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    root = paths["other"].parent
    with running_server(models(paths, catalog=Catalog((root,)))) as server:
        listed = states(server)
        assert {name: listed[name] for name in ("demo", "other", "org/hubbed")} == {
            "demo": "loaded",
            "other": "available",
            "org/hubbed": "available",
        }
        with raw(server) as client:
            assert client.get("/v1/models/org/hubbed:latest").json()["id"] == "org/hubbed"
            assert client.get("/v1/models/other").json()["state"] == "available"
        for name in ("other", "org/hubbed", str(paths["hybrid"])):
            assert post(server, run_on("x", 3, model=name))["model"] == name
        with raw(server) as client:
            loaded = client.post("/api/embed", json={"model": "vectors", "input": ""})
            assert (loaded.status_code, states(server)["vectors"]) == (200, "loaded")
            assert client.post("/api/embed", json={"model": "nothing", "input": ""}).status_code == 404
            vectors = client.post("/v1/embeddings", json={"model": "vectors", "input": "x"})
        assert vectors.status_code == 200, vectors.text
        before = states(server)
        for name in ("./other", "other/.", "other:latest", str(paths["other"]), f"{paths['other']}/../other"):
            assert post(server, run_on("x", 3, model=name))["model"] == "other"
        for name in ("../other", "org/other", "nothing", "org/..", "a//b", "x" * 5000, "~no-such-user/x", "é\0", "~\0"):
            assert refusal(server, "/v1/completions", run_on("x", 3, model=name))[0] == 404, name
        assert states(server) == before  # no directory is served twice


def test_a_download_that_was_interrupted_between_two_files_is_no_model(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    snapshot = downloaded(tmp_path, "hubbed")
    shutil.copytree(paths["small"], snapshot, dirs_exist_ok=True)
    assert [found.name for found in Catalog().all()] == ["org/hubbed"]
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (snapshot / "model.safetensors").rename(snapshot / parts[0])
    index: dict[str, dict[str, Any]] = {"weight_map": {"model.norm.weight": parts[0], "lm_head.weight": parts[1]}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copytree(snapshot, tmp_path / ".lmstudio" / "models" / "someone" / "mlx")
    assert (Catalog().all(), Catalog().find("org/hubbed")) == ([], None)
    index["weight_map"] = {"model.norm.weight": [parts[0]], "lm_head.weight": 300 * "x", "a": "\0"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Catalog().all() == []


def test_a_model_whose_weights_were_joined_is_served_in_spite_of_its_old_index(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(paths["small"], tmp_path / "joined")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "joined" / "model.safetensors.index.json").write_text(json.dumps(index))
    with running_server(models(paths, catalog=Catalog((tmp_path,)))) as server:
        assert states(server)["joined"] == ModelState.AVAILABLE.value
        assert post(server, run_on("x", 2, model="joined"))["model"] == "joined"


def test_links_in_a_directory_of_models_are_listed_as_they_are_found(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "models"
    shutil.copytree(paths["small"], root / "someone" / "small")
    (root / "other").symlink_to(paths["other"])
    (root / "again").symlink_to(root / "someone")
    (root / "someone" / "back").symlink_to(root)
    catalog = Catalog((root, paths["hybrid"]))  # a directory that is itself a model has no name
    names = [found.name for found in catalog.all()]
    assert names == ["other", "someone/small"]
    assert all(catalog.find(name) is not None for name in [*names, "again/small", "someone/back/other"])


def test_a_model_to_which_a_link_leads_is_listed_by_its_own_name(tmp_path: Path) -> None:
    """The order of a directory's entries is any."""
    for name in "abcdefgh":
        (tmp_path / f"{name}-models" / "m").mkdir(parents=True)
        (tmp_path / f"{name}-models" / "m" / "config.json").touch()
        (tmp_path / f"{name}-links").mkdir()
        (tmp_path / f"{name}-links" / "m").symlink_to(tmp_path / f"{name}-models" / "m")
    assert model_paths(tmp_path) == {tmp_path / f"{name}-models" / "m" for name in "abcdefgh"}


def test_a_link_to_a_large_tree_is_searched_near_its_top(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mlxpaged.registry.catalog.MAX_SEARCHED", 10)
    (tmp_path / "large" / Path(*"abcdefghijklmnop")).mkdir(parents=True)
    for path in [*(tmp_path / "large").rglob("*"), tmp_path / "other"]:
        path.mkdir(exist_ok=True)
        (path / "config.json").touch()
    (root := tmp_path / "models").mkdir()
    for name in ("large", "other"):
        (root / name).symlink_to(tmp_path / name)
    found = model_paths(root)
    assert {root / "other", root / "large" / "a" / "b"} <= found
    assert len(found) < 10


LONG = "lmstudio:someone/" + 300 * "x"
"""A name that no file can have."""


def test_models_of_ollama_and_lm_studio_are_served_by_name(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = as_gguf(paths["small"], tmp_path / "tiny-F32.gguf")
    pull(tmp_path / ".ollama" / "models", "registry.ollama.ai/library/tiny/latest", file)
    folder = tmp_path / ".lmstudio" / "models" / "someone"
    shutil.copytree(paths["small"], folder / "mlx")
    shutil.copytree(paths["small"], folder / "odd")
    (folder / "odd" / "config.json").write_text('{"model_type": []}')
    (folder / "gguf").mkdir()
    shutil.copy(file, folder / "gguf")
    names = ["ollama:tiny:latest", "lmstudio:someone/gguf/tiny-F32.gguf", "lmstudio:someone/mlx"]
    others = ("ollama:tiny", "lmstudio:someone/gguf/tiny-F32.gguf", "lmstudio:someone/mlx:latest")
    assert [found.name for name in others if (found := Catalog().find(name))] == names
    with running_server(models(paths)) as server:
        assert {name: states(server)[name] for name in names} == dict.fromkeys(names, "available")
        with raw(server) as client:
            facts = {name: client.get(f"/v1/models/{name}").json() for name in names}
        assert [facts[name]["source"] for name in names] == ["gguf", "gguf", "mlx-lm"]
        assert all(facts[name]["size_bytes"] > 0 for name in names)
        asked = [run_on("x", 8, model=name) for name in ("ollama:tiny", *names[1:])]
        assert len({post(server, each)["choices"][0]["text"] for each in asked}) == 1
        odd = refusal(server, "/v1/completions", run_on("x", 1, model="lmstudio:someone/odd"))
        assert "its config.json has no model_type" in odd[1]["message"]
        assert "ollama:tiny" not in states(server)  # it is served by its whole name
        for name in ("ollama:absent", "ollama:../x", "lmstudio:/etc", "lmstudio:a/b", f"lmstudio:{folder}/mlx", LONG):
            assert refusal(server, "/v1/completions", run_on("x", 1, model=name))[0] == 404
    named = EngineConfig("ollama:tiny", kv_cache_bytes=POOL)
    with running_server(registry_of([Model("ollama:tiny", named)], named)) as server:
        assert "ollama:tiny:latest" not in states(server)
        with raw(server) as client:
            assert client.get("/v1/models/ollama:tiny").json()["source"] == "gguf"


def test_a_gguf_file_with_and_without_its_quantization_is_one_model(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    snapshot = downloaded(tmp_path, "tiny-GGUF")
    as_gguf(paths["small"], snapshot / "tiny-F32.gguf")
    config = EngineConfig("org/tiny-GGUF:F32", kv_cache_bytes=POOL)
    registry = registry_of([Model("org/tiny-GGUF:F32", config)], config, num_at_start=0)
    with running_server(registry) as server:
        found = [
            server.run(registry.names.find(name, True)).result(DEADLINE) for name in ("org/tiny-GGUF", str(snapshot))
        ]
        assert found == [registry.default] * 2
        assert list(states(server)) == ["org/tiny-GGUF:F32"]


def test_a_model_that_another_app_replaces_or_deletes_is_not_served_as_it_was(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    apps, place = tmp_path / ".ollama" / "models", "registry.ollama.ai/library/tiny/latest"
    old = pull(apps, place, as_gguf(paths["small"], tmp_path / "old.gguf"))
    name, asked = "ollama:tiny:latest", run_on("x", 8, model="ollama:tiny")
    with running_server(models(paths)) as server, raw(server) as client:
        before = post(server, asked)["choices"][0]["text"]
        new = pull(apps, place, as_gguf(paths["other"], tmp_path / "new.gguf"), "0b" * 32)
        old.unlink()
        assert post(server, asked)["choices"][0]["text"] == before  # it is loaded
        assert client.post(f"/v1/models/{name}/unload").json()["state"] == "available"
        assert states(server)[name] == "available"
        assert post(server, asked)["choices"][0]["text"] != before
        assert client.post(f"/v1/models/{name}/unload").json()["state"] == "available"
        new.unlink()
        assert refusal(server, "/v1/completions", asked)[0] == 404
        assert name not in states(server)


# -- together ----------------------------------------------------------------------------------------------------------


@pytest.mark.more
def test_32_mixed_streams_of_two_models_and_embeddings_are_answered_as_each_alone(server: RunningServer) -> None:
    generating = [
        run_on(random_tokens(20 + 7 * i, i), 12 + i % 5, model=("demo", "hybrid")[i % 2], stream=i % 3 == 0)
        for i in range(24)
    ]
    embedding = [{"model": "vectors", "input": [random_tokens(5 + 9 * i, i)]} for i in range(8)]
    alone = [Background.post(server, "/v1/completions", body).text for body in generating]
    vectors = [Background.post(server, "/v1/embeddings", body).result().json()["data"] for body in embedding]
    with raw(server) as client:
        client.post("/v1/cache/clear")
    together = [Background.post(server, "/v1/completions", body) for body in generating]
    beside = [Background.post(server, "/v1/embeddings", body) for body in embedding]
    assert [pending.text for pending in together] == alone
    for pending, expected in zip(beside, vectors, strict=True):
        for one, other in zip(pending.result().json()["data"], expected, strict=True):
            assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-5)
    assert states(server) == {"demo": "loaded", "small": "available", "hybrid": "loaded", "vectors": "loaded"}


@pytest.mark.parametrize(("priority", "share"), [("normal", 10), ("high", 20)])
def test_models_take_turns_by_the_device_time_that_they_have_used(
    paths: dict[str, Path], tmp_path: Path, priority: str, share: int
) -> None:
    """A step of one model takes ten times as long as one of the other. That model has a queue of normal priority."""
    clock = FakeClock()
    keys = write_keys(tmp_path / "keys.json", anna={"tier": priority}, otto={})
    http = HttpConfig(api_keys=tmp_path / "keys.json")
    turns: list[str] = []
    all_queued = threading.Event()

    def timed(name: str, seconds: float, forward: Any, *args: Any) -> Any:
        turns.append(name)
        all_queued.wait(DEADLINE)
        clock.advance(seconds)
        return forward(*args)

    with running_server(models(paths, "small", clock=clock), clock=clock, http=http) as server:
        with raw(server) as client:
            client.post("/v1/completions", json=run_on("x", 1, model="small"), headers=bearer(keys["anna"]))
        for name, seconds in (("demo", 1.0), ("small", 0.1)):
            core: Any = server.core_of(name)
            core.runner.forward = partial(timed, name, seconds, core.runner.forward)
        queue = [
            Background.post(server, "/v1/completions", run_on(random_tokens(9, i), 40), **bearer(keys["otto"]))
            for i in range(3)
        ]
        wait_until(lambda: "demo" in turns)
        one = Background.post(server, "/v1/completions", run_on("x", 120, model="small"), **bearer(keys["anna"]))
        wait_until(lambda: server.registry.num_unfinished == 4)
        server.run(asyncio.sleep(0)).result(DEADLINE)  # the event loop has submitted the last one
        all_queued.set()
        assert one.text
        assert [pending.text for pending in queue]
    first, last = turns.index("small"), len(turns) - turns[::-1].index("small")
    runs = [len(list(run)) for name, run in itertools.groupby(turns[first:last]) if name == "small"]
    assert len(runs) >= 120 // share
    assert all(share - 1 <= run <= share + 1 for run in runs[1:-1]), runs
    demo_runs = [len(list(run)) for name, run in itertools.groupby(turns[first:last]) if name == "demo"]
    assert set(demo_runs) == {1}  # the small model waits for one step of the queue


# -- room --------------------------------------------------------------------------------------------------------------


def test_the_idle_model_that_was_used_least_recently_makes_room(paths: dict[str, Path]) -> None:
    registry = models(paths, "small", "hybrid", "other", limits=Limits(max_loaded=3), pinned=["demo"])
    with running_server(registry) as server:
        for name in ("small", "hybrid", "small"):
            post(server, run_on("x", 2, model=name))
        post(server, run_on("x", 2, model="other"))
        assert states(server) == {"demo": "loaded", "small": "loaded", "hybrid": "available", "other": "loaded"}
        prompt = random_tokens(100, 1)
        post(server, run_on(prompt, 2, model="small"))
        post(server, run_on("x", 2, model="hybrid"))  # instead of "other"
        again = post(server, run_on(prompt, 2, model="small"))
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96  # its prefix cache has stayed


@pytest.fixture
def _no_limit() -> Iterator[None]:
    yield
    limit_memory(None)


@pytest.mark.usefixtures("_no_limit")
def test_a_model_that_does_not_fit_is_refused_with_both_numbers(paths: dict[str, Path]) -> None:
    with running_server(models(paths, "small", "other", pinned=["demo"])) as server:
        post(server, run_on("x", 2, model="small"))
        with StepGate(server) as gate:
            busy = Background.post(server, "/v1/completions", run_on("x", 3))
            gate.wait_held()
            # "small" is idle and is unloaded, and the pool of "demo" shrinks. That does not suffice.
            limit_memory(1)
            blocked = Background.post(server, "/v1/completions", run_on("x", 2, model="other"))
            gate.open()
            answer = blocked.result()
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (507, "insufficient_memory")
            assert "GB" in error["message"]
            assert busy.text is not None
        assert states(server) == {"demo": "loaded", "small": "available", "other": "available"}
        limit_memory(None)
        assert post(server, run_on("x", 2, model="other"))["usage"]["completion_tokens"] == 2


def test_of_requests_for_models_with_room_for_one_none_is_refused(paths: dict[str, Path]) -> None:
    """A model that was just loaded is not unloaded before the request for which it was loaded."""
    with running_server(models(paths, "small", "other", limits=Limits(max_loaded=1))) as server:
        names = {"a": "demo", "b": "small", "c": "other"}
        pending = [Background.post(server, "/v1/completions", run_on("x", 2, model=names[each])) for each in "abaacabc"]
        assert [each.result().status_code for each in pending] == [200] * 8


def test_a_model_that_runs_requests_is_not_unloaded_and_others_wait_for_it(paths: dict[str, Path]) -> None:
    with running_server(models(paths, "small", limits=Limits(max_loaded=1))) as server, StepGate(server) as gate:
        busy = Background.post(server, "/v1/completions", run_on("x", 3))
        gate.wait_held()
        with (
            raw(server) as client,
            client.stream("POST", "/v1/completions", json=run_on("x", 3, model="small", stream=True)) as answer,
        ):
            lines = answer.iter_lines()
            assert ": waiting for small, 1 ahead" in itertools.islice((line for line in lines if line), 2)
            status, error = refusal(server, "/v1/models/demo/unload")
            assert (status, error["code"]) == (409, "model_busy")
            gate.open()
            assert busy.text is not None
            assert "data: [DONE]" in list(lines)
        assert states(server) == {"demo": "available", "small": "loaded"}


def test_a_request_that_waits_for_room_and_leaves_is_not_waited_for(paths: dict[str, Path]) -> None:
    with running_server(models(paths, "small", limits=Limits(max_loaded=1))) as server, StepGate(server) as gate:
        busy = Background.post(server, "/v1/completions", run_on("x", 3))
        gate.wait_held()
        body = run_on("x", 3, model="small", stream=True)
        with raw(server) as client, client.stream("POST", "/v1/completions", json=body) as answer:
            assert next(line for line in answer.iter_lines() if line).startswith(": waiting for small")
        wait_until(lambda: len(list(server.app.state.server.open_requests)) == 1)
        gate.open()
        assert busy.text is not None
        assert post(server, run_on("x", 3))["usage"]["completion_tokens"] == 3
        assert states(server) == {"demo": "loaded", "small": "available"}


def test_a_pinned_model_makes_no_room_for_another(paths: dict[str, Path]) -> None:
    limits = Limits(max_loaded=1)
    with running_server(models(paths, "small", limits=limits, pinned=["demo"])) as server, StepGate(server) as gate:
        busy = Background.post(server, "/v1/completions", run_on("x", 3))
        gate.wait_held()
        status, error = refusal(server, "/v1/completions", run_on("x", 3, model="small"))
        assert (status, error["code"]) == (507, "insufficient_memory")
        assert "'demo' run requests or are pinned, and --max-loaded-models is 1" in error["message"]
        gate.open()
        assert busy.text is not None


def test_an_idle_model_is_unloaded_after_a_time_and_comes_back(paths: dict[str, Path]) -> None:
    with running_server(models(paths, "small", limits=Limits(idle_unload=0.3), pinned=["demo"])) as server:
        before = mx.get_active_memory()
        expected = answer_text(server, run_on("x", 3, model="small"))
        wait_until(lambda: states(server) == {"demo": "loaded", "small": "available"})
        wait_until(lambda: mx.get_active_memory() <= before + 100_000)  # its weights alone take more
        assert answer_text(server, run_on("x", 3, model="small")) == expected
        assert answer_text(server, ask("What is 17 + 25?")) == "42"


def test_a_model_is_not_unloaded_while_others_of_the_start_are_loaded(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, load_model = threading.Event(), builder.load_model

    def slow_load(*args: Any) -> Any:
        while args[0] == str(paths["small"]) and not go_on.wait(0.01):
            args[2].take()
        return load_model(*args)

    monkeypatch.setattr(builder, "load_model", slow_load)
    registry = models(paths, "small", num_at_start=2, limits=Limits(idle_unload=0.05))
    with running_server(registry, wait_loaded=False) as server:
        wait_until(lambda: registry.default.is_loaded)
        assert {states(server)["demo"] for _ in range(100)} == {"loaded"}
        go_on.set()
        wait_until(lambda: states(server) == {"demo": "available", "small": "available"})


def test_models_are_loaded_and_unloaded_on_demand_by_admins_only(paths: dict[str, Path], tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", boss={"admin": True}, anna={"models": ("demo",)})
    http = HttpConfig(api_keys=tmp_path / "keys.json")
    with running_server(models(paths, "small"), http=http) as server, raw(server) as client:
        boss, anna = bearer(keys["boss"]), bearer(keys["anna"])
        assert client.post("/v1/models/small/load", headers=anna).status_code == 403
        loaded = client.post("/v1/models/small/load", headers=boss).json()
        assert (loaded["id"], loaded["state"]) == ("small", "loaded")
        refused = client.post("/v1/completions", json=run_on("x", 2, model="small"), headers=anna)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        assert client.post("/v1/completions", json=run_on("x", 2), headers=anna).status_code == 200
        assert [model["id"] for model in client.get("/v1/models", headers=anna).json()["data"]] == ["demo"]
        unloaded = client.post("/v1/models/small/unload", headers=boss).json()
        assert (unloaded["state"], unloaded["memory_bytes"]) == ("available", None)
        assert client.post("/v1/models/nothing/load", headers=boss).status_code == 404


@pytest.mark.parametrize("broken", ["schedule", "stats"])
def test_the_engine_of_one_model_fails_and_the_others_answer(paths: dict[str, Path], broken: str) -> None:
    with running_server(models(paths, "small", "other", limits=Limits(max_loaded=2))) as server:
        check_failure(server, broken)


def check_failure(server: RunningServer, broken: str) -> None:
    post(server, run_on("x", 2, model="small"))
    core: Any = server.core_of("small")

    def fail() -> Any:
        raise ZeroDivisionError("injected")

    setattr(core.scheduler, broken, fail)
    status, error = refusal(server, "/v1/completions", run_on("x", 2, model="small"))
    assert (status, "ZeroDivisionError: injected" in error["message"]) == (503, True)
    assert states(server)["small"] == "failed"
    shown = metrics_of(server, "small")
    assert (shown["mlxpaged_model_state|failed"], shown["mlxpaged_model_state|loaded"]) == (1, 0)
    assert answer_text(server, ask("What is 17 + 25?")) == "42"
    post(server, run_on("x", 2, model="other"))
    assert states(server)["demo"] == "loaded"  # a model that failed does not count as loaded
    with raw(server) as client:
        client.post("/v1/models/other/unload")
        assert client.post("/v1/models/small/load", timeout=DEADLINE).json()["state"] == "loaded"
    assert post(server, run_on("x", 2, model="small"))["usage"]["completion_tokens"] == 2


def test_a_model_whose_engine_failed_can_be_unloaded(paths: dict[str, Path]) -> None:
    with running_server(models(paths, "small")) as server:
        post(server, run_on("x", 2, model="small"))
        core: Any = server.core_of("small")
        core.scheduler.schedule = lambda: 1 / 0
        refusal(server, "/v1/completions", run_on("x", 2, model="small"))
        assert states(server)["small"] == "failed"
        with raw(server) as client:
            assert client.post("/v1/models/small/unload").json()["state"] == "available"
        assert post(server, run_on("x", 2, model="small"))["usage"]["completion_tokens"] == 2


def test_names_that_cannot_be_served_are_refused_at_the_start(paths: dict[str, Path]) -> None:
    base = EngineConfig()
    for found, options, words in (
        ([Model("a", base), Model("a", base)], {}, "two models cannot both be named 'a'"),
        ([Model("a", base)], {"aliases": {"a": "a"}}, "is a model's name already"),
        ([Model("a", base)], {"aliases": {"b": "c"}}, "stands for 'c'"),
        ([Model("a", base)], {"pinned": ["c"]}, "no such model"),
    ):
        with pytest.raises(ValueError, match=words):
            registry_of(found, base, **options)  # type: ignore[arg-type]


# -- leaks -------------------------------------------------------------------------------------------------------------


def switch(server: RunningServer, count: int, names: list[str]) -> None:
    for i in range(count):
        post(server, run_on(random_tokens(40, i), 3, model=names[i % len(names)]))


def held() -> tuple[int, int, int]:
    """Bytes of MLX, threads, open files."""
    return int(mx.get_active_memory()), threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("count", [6, pytest.param(501, marks=pytest.mark.slow)])
def test_switching_between_models_leaks_nothing(paths: dict[str, Path], count: int) -> None:
    names = ["small", "hybrid", "other"]
    registry = models(paths, *names, limits=Limits(max_loaded=2), pinned=["demo"])
    with running_server(registry) as server:
        switch(server, 3, names)
        memory, threads, files = held()
        switch(server, count, names)
        limits = (memory + 100_000, threads, files)
        wait_until(lambda: all(now <= limit for now, limit in zip(held(), limits, strict=True)))
