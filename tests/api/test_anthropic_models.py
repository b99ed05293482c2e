"""What Anthropic's client reads of a model: only what this server can do with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.loader import DEMO_PATH, MODELS
from mlxpaged.registry.catalog import Catalog
from mlxpaged.registry.model import Model
from mlxpaged.registry.registry import registry_of
from tests.api.helpers import DEADLINE, raw
from tests.scripted import make_scripted_model
from tests.support import RunningServer, make_adapter, make_embedding_model, running_server

NAMES = ["demo", "demo:pirate", "thinking", "seeing", "vectors", "found"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("models")
    (root / "thinking").mkdir()
    base = EngineConfig(kv_cache_bytes=16_000_000)
    paths = {
        "thinking": make_scripted_model(root / "thinking", "json_tools"),
        "seeing": MODELS / "demo_vision",
        "vectors": make_embedding_model(root / "vectors"),
    }
    (root / "all" / "found").mkdir(parents=True)
    make_scripted_model(root / "all" / "found", "harmony")
    adapter = AdapterPath("pirate", make_adapter(DEMO_PATH, root / "pirate", 1))
    demo = Model("demo", EngineConfig(kv_cache_bytes=16_000_000, adapters=(adapter,)))
    others = [Model(name, EngineConfig(str(path), name, kv_cache_bytes=16_000_000)) for name, path in paths.items()]
    with running_server(registry_of([demo, *others], base, catalog=Catalog((root / "all",)))) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
        yield client


def test_all_fields_are_there_and_the_same_in_the_list(client: Anthropic) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert {*NAMES} <= {*listed}
    for name in NAMES:
        model = client.models.retrieve(name)
        assert model.to_dict() == listed[name].to_dict()
        assert (model.type, model.display_name, model.lifecycle) == ("model", name, "active")
        assert model.created_at.year > 2020
        assert model.max_input_tokens is not None
        assert model.capabilities is not None
        fields = type(model.capabilities).model_fields
        assert {*fields} == {*model.capabilities.to_dict()}


def test_the_capabilities_are_those_of_each_model(client: Anthropic) -> None:
    found = {name: client.models.retrieve(name).capabilities for name in NAMES}

    def have(what: str) -> set[str]:
        return {name for name, each in found.items() if getattr(each, what).supported}

    assert have("thinking") == have("effort") == {"thinking", "found"}
    assert have("image_input") == {"seeing"}
    assert have("structured_outputs") == {*NAMES} - {"vectors"}
    for what in ("batch", "citations", "code_execution", "context_management", "pdf_input", "server_tools"):
        assert have(what) == set()
    sizes = {name: client.models.retrieve(name).max_tokens for name in NAMES}
    assert sizes == {
        "demo": 4096,
        "demo:pirate": 4096,
        "thinking": 8192,
        "seeing": 4096,
        "vectors": None,
        "found": 8192,
    }


@pytest.mark.parametrize("name", ["thinking", "seeing", "vectors", "found"])
def test_a_model_has_them_before_it_is_loaded(server: RunningServer, client: Anthropic, name: str) -> None:
    own = {"state", "memory_bytes", "last_used"}
    before = client.models.retrieve(name).to_dict()
    with raw(server) as http:
        assert http.post(f"/v1/models/{name}/load").status_code == 200
        after = client.models.retrieve(name).to_dict()
        http.post(f"/v1/models/{name}/unload")
    assert [before["state"], after["state"]] == ["available", "loaded"]
    assert {key: value for key, value in after.items() if key not in own} == {
        key: value for key, value in before.items() if key not in own
    }


@pytest.mark.parametrize("name", ["demo", "thinking"])
def test_what_is_said_of_thinking_and_of_forms_is_what_requests_find(
    server: RunningServer, client: Anthropic, name: str
) -> None:
    can: Any = client.models.retrieve(name).capabilities
    asked: dict[str, Any] = {"model": name, "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    with raw(server) as http:
        for kind in ("disabled", "between_tools"):  # false exactly if a request gets a 400, or ignores it by name
            answer = http.post("/v1/messages", json=asked | {"thinking": {"type": kind}})
            is_ignored = "thinking.type" in answer.headers.get("x-mlxpaged-ignored", "")
            assert getattr(can.thinking.types, kind).supported is (answer.status_code != 400 and not is_ignored)
        for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 2}):
            answer = http.post("/v1/messages", json=asked | {"thinking": thinking})
            assert answer.status_code == 200
            is_ignored = "thinking" in answer.headers.get("x-mlxpaged-ignored", "")
            if getattr(can.thinking.types, thinking["type"]).supported:
                assert not is_ignored
        form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        assert http.post("/v1/messages", json=asked | {"output_config": form}).status_code == 200
        assert http.post("/v1/messages/batches", json={"requests": []}).status_code == 404


def test_an_unknown_model_is_a_404_in_anthropics_form(server: RunningServer, client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'no-such' does not exist; this server has 'demo'") as error:
        client.models.retrieve("no-such")
    body: Any = error.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")


def test_other_clients_read_our_fields_and_those_of_openai(server: RunningServer) -> None:
    with server.client() as client:
        found: Any = client.models.retrieve("thinking")
        assert (found.object, found.owned_by, found.created > 0) == ("model", "mlxpaged", True)
        assert found.capabilities["thinking"] is True
        assert (found.max_model_len, found.context_length) == (8192, 8192)
        assert found.meta == {"n_ctx": 8192, "n_ctx_train": 8192}
        assert found in list(client.models.list())
