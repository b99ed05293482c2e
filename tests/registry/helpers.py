"""Registries of small models, and what a server says of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.engine import builder
from mlxpaged.engine_config import EngineConfig
from mlxpaged.registry.model import Model
from mlxpaged.registry.registry import Registry, registry_of
from tests.api.helpers import raw
from tests.support import RunningServer

POOL = 2_000_000


def models(paths: dict[str, Path], *names: str, **options: Any) -> Registry:
    """A registry of the demo model and of others, which are loaded on first use."""
    base = EngineConfig(kv_cache_bytes=POOL)
    found = [Model("demo", base)]
    for name in names:
        config = EngineConfig(str(paths[name]), name, kv_cache_bytes=POOL, only_embeds=name == "vectors")
        found.append(Model(name, config))
    return registry_of(found, base, **options)


def states(server: RunningServer) -> dict[str, str]:
    with raw(server) as client:
        return {model["id"]: model["state"] for model in client.get("/v1/models").json()["data"]}


def refusal(server: RunningServer, path: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any]:
    with raw(server) as client:
        response = client.post(path, json=body, headers=headers)
    assert response.status_code >= 400, response.text
    return response.status_code, response.json()["error"]


def hold_loads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on, the load of a model goes on after the event only. Other models take turns meanwhile."""
    go_on, load_model = threading.Event(), builder.load_model

    def slow_load(*args: Any) -> Any:
        args[2].report(1_200_000_000, 3_400_000_000)
        while not go_on.wait(0.01):
            args[2].take()
        return load_model(*args)

    monkeypatch.setattr(builder, "load_model", slow_load)
    return go_on


def downloaded(cache: Path, name: str) -> Path:
    """The directory of a repository of org in the hub's cache, empty, as a download makes it."""
    repository = cache / f"models--org--{name}"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return snapshot
