"""What is said of a model is the same before it is loaded, while it is, and after it was: clients ask first."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models import file_facts as module
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.file_facts import file_facts
from mlxpaged.models.loader import DEMO_PATH, MODELS
from mlxpaged.registry.catalog import Catalog
from mlxpaged.registry.facts import expected_facts
from mlxpaged.registry.model import Model
from mlxpaged.registry.registry import registry_of
from tests.api.helpers import raw
from tests.api.test_rerank import make_judge
from tests.models.encoders import make_encoder
from tests.models.gguf_models import as_gguf
from tests.registry.helpers import hold_loads
from tests.scripted import make_scripted_model
from tests.support import (
    RunningServer,
    make_adapter,
    make_embedding_model,
    make_tiny_model,
    quantize,
    running_server,
    wait_until,
    write_modules,
)

OF_STATE = {"state", "memory_bytes", "last_used", "running", "waiting", "progress"}
"""Fields of a model that say what it does now."""
PLAIN_TEMPLATE = "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"
TOOL_TEMPLATE = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + PLAIN_TEMPLATE

CLUMSY_TEMPLATE = "{% if tools %}{{ tools | map('upper') | tojson }}<tool_call>{% endif %}" + PLAIN_TEMPLATE
"""It fails with any tools: what `map` makes is no list."""


def with_template(path: Path, template: Any) -> Path:
    """The template in the settings of the tokenizer, as transformers 4 writes it."""
    (path / "chat_template.jinja").unlink()
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return path


def make_models(root: Path) -> None:
    """Models of all kinds, in directories whose names say what they are."""
    make_tiny_model(root / "text", "qwen3", 1)
    quantize(make_tiny_model(root / "quantized", "llama", 2), 4)
    shutil.copytree(MODELS / "demo_vision", root / "seeing")
    blind = Path(shutil.copytree(MODELS / "demo_vision", root / "blind"))
    weights: Any = mx.load(str(blind / "model.safetensors"))
    kept = {name: array for name, array in weights.items() if "vision" not in name and "projector" not in name}
    mx.save_safetensors(str(blind / "model.safetensors"), kept)
    for name in ("json_tools", "harmony", "mistral"):
        (root / name).mkdir()
        make_scripted_model(root / name, name)
    (root / "short").mkdir()
    make_scripted_model(root / "short", "json_tools", 64, plain=())
    with_template(make_tiny_model(root / "blunt", "qwen3", 3), PLAIN_TEMPLATE)
    with_template(make_tiny_model(root / "clumsy", "qwen3", 6), CLUMSY_TEMPLATE)
    pair = [{"name": "default", "template": PLAIN_TEMPLATE}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
    with_template(make_tiny_model(root / "pair", "qwen3", 4), pair)
    (make_tiny_model(root / "silent", "llama", 5) / "chat_template.jinja").unlink()
    make_embedding_model(root / "vectors")
    both = Path(shutil.copytree(DEMO_PATH, root / "both-found"))
    write_modules(both, "mean", ("Transformer", "Pooling"))
    make_encoder(root / "bert", "bert")
    make_encoder(root / "judge", "bert", pairs=True)
    (root / "gguf").mkdir()
    as_gguf(root / "text", root / "gguf" / "text.gguf")
    templates = {"tokenizer.chat_template": PLAIN_TEMPLATE, "tokenizer.chat_template.tool_use": TOOL_TEMPLATE}
    as_gguf(root / "text", root / "gguf" / "pair.gguf", change=lambda metadata, _: metadata.update(templates))


FOUND = (
    *("text", "quantized", "seeing", "blind", "json_tools", "harmony", "mistral", "short", "blunt"),
    *("clumsy", "pair", "silent", "vectors", "both-found", "bert", "judge", "gguf/text.gguf", "gguf/pair.gguf"),
)
SERVED = ("first", "first:pirate", "bare", "both", "tool-less", "judging", "small", "other-name")
"""Models of the command line, with an adapter and an alias."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("facts")
    make_models(root)
    return root


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("others")
    base = EngineConfig("demo", kv_cache_bytes=20_000_000, embedding_max_model_len=100)
    adapters = (AdapterPath("pirate", make_adapter(DEMO_PATH, directory / "pirate", 1)),)
    (template := directory / "own.jinja").write_text(PLAIN_TEMPLATE)

    def copied(name: str) -> str:
        return str(shutil.copytree(root / name, directory / name))

    configs: dict[str, dict[str, Any]] = {
        "demo": {},
        "first": {"adapters": adapters},
        "bare": {"model": copied("vectors")},
        "both": {"model": copied("both-found")},
        "tool-less": {"model": copied("json_tools"), "chat_template": template},
        "judging": {"model": str(make_judge(directory / "judge")), "reranker": True, "tool_parser": "mistral"},
        "small": {"model": copied("seeing"), "max_image_pixels": 0, "max_model_len": 100, "default_top_k": 7},
    }
    models = [Model(name, EngineConfig(**vars(base) | fields)) for name, fields in configs.items()]  # type: ignore[arg-type]
    aliases = {"other-name": "small"}
    with running_server(registry_of(models, base, aliases=aliases, catalog=Catalog((root,)))) as server:
        yield server


def said_of(server: RunningServer, name: str) -> dict[str, Any]:
    """What the APIs say of a model, but for its state."""
    with raw(server) as client:
        entry = client.get(f"/v1/models/{name}").json()
        listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
        tags = {each["name"]: each for each in client.get("/api/tags").json()["models"]}
        shown = client.post("/api/show", json={"model": name}).json()
    own = entry["id"]
    assert listed[own] == entry
    tag = tags[own if ":" in own else f"{own}:latest"]
    assert (shown["capabilities"], shown["details"]) == (tag["capabilities"], tag["details"])
    assert shown["modified_at"] == tag["modified_at"]
    facts = {field: value for field, value in entry.items() if field not in OF_STATE}
    return {"models": facts, "tags": tag, "show": shown}


@pytest.mark.parametrize("name", [*FOUND, *SERVED])
def test_a_model_is_described_before_its_load_as_after_it(server: RunningServer, name: str) -> None:
    before = said_of(server, name)
    model = before["models"]
    assert model["context_length"] > 0
    assert any(model["capabilities"].values())
    assert before["tags"]["details"]["family"] == model["family"] != ""
    assert model["parameters"] > 0
    assert model["created"] > 1_600_000_000
    with raw(server) as client:
        parent = model.get("parent", name)
        assert client.post(f"/v1/models/{parent}/load").json()["state"] == "loaded"
        assert said_of(server, name) == before
        running = {each["name"]: each for each in client.get("/api/ps").json()["models"]}
        loaded = running[before["tags"]["name"]]
        assert {field: loaded[field] for field in before["tags"]} == before["tags"]
        assert loaded["context_length"] == model["max_model_len"]
        assert client.post(f"/v1/models/{parent}/unload").json()["state"] == "available"
    assert said_of(server, name) == before


def test_what_is_said_is_true(server: RunningServer) -> None:
    with raw(server) as client:
        found = {each["id"]: each for each in client.get("/v1/models").json()["data"]}

    def can(name: str) -> set[str]:
        return {what for what, yes in found[name]["capabilities"].items() if yes}

    assert can("text") == {"chat", "completions", "decisions", "tools"}
    assert can("judging") == {"chat", "completions", "decisions", "tools", "rerank"}
    assert can("seeing") == {"chat", "completions", "decisions", "tools", "vision"}
    assert [found[name]["kind"] for name in ("seeing", "blind", "small")] == ["vision", "text", "text"]
    assert can("json_tools") == can("harmony") == {"chat", "completions", "decisions", "tools", "thinking"}
    assert can("short") == {"chat", "completions", "decisions", "tools"}
    assert can("silent") == {"completions", "decisions"}
    assert can("vectors") == can("bare") == can("bert") == {"embeddings"}
    assert can("judge") == {"rerank"}
    assert can("both") == {"chat", "completions", "decisions", "tools", "embeddings"}
    assert can("both-found") == {"embeddings"}
    assert [found[name]["quantization"] for name in ("text", "quantized", "gguf/text.gguf")] == [
        *("float32", "4-bit", "F32")
    ]
    info = server.engine.info  # of the demo model
    assert info is not None
    assert found["demo"]["parameters"] == info.num_parameters
    assert (found["small"]["context_length"], found["small"]["max_model_len"]) == (4096, 100)
    assert found["small"]["sampling_defaults"]["top_k"] == 7
    assert (found["bert"]["context_length"], found["bert"]["max_model_len"]) == (128, 100)
    assert found["harmony"]["tool_calls"] == {"parser": "harmony", "shown_by": "chat_template"}
    assert found["clumsy"]["tool_calls"] == {"parser": "json_tools", "shown_by": "user_message"}
    assert found["blunt"]["tool_calls"] == {"parser": "json_tools", "shown_by": "user_message"}


def test_while_a_model_is_loaded_the_same_is_said(
    root: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = said_of(server, "json_tools")
    go_on = hold_loads(monkeypatch)
    with raw(server) as client:
        thread = threading.Thread(target=client.post, args=("/v1/models/json_tools/load",))
        thread.start()
        with raw(server) as other:
            wait_until(lambda: other.get("/v1/models/json_tools").json()["state"] == "loading")
        try:
            assert said_of(server, "json_tools") == before
        finally:
            go_on.set()
            thread.join()
        client.post("/v1/models/json_tools/unload")


@pytest.mark.parametrize("bits", [2, 3, 6, 8])
def test_parameters_of_a_quantized_model_are_those_of_its_original(tmp_path: Path, bits: int) -> None:
    path = make_tiny_model(tmp_path / "m", "qwen3")
    before = file_facts("m", path)
    after = file_facts("m", quantize(path, bits))
    assert after.num_parameters == before.num_parameters
    assert (before.quantization, after.quantization) == ("float32", f"{bits}-bit")


def test_files_are_read_again_only_if_they_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = make_tiny_model(tmp_path / "m", "qwen3"), 0
    read_facts = module.read_facts

    def counted(*args: Any) -> Any:
        nonlocal reads
        reads += 1
        return read_facts(*args)

    monkeypatch.setattr(module, "read_facts", counted)
    first = file_facts("m", path)
    assert file_facts("m", path) is first
    assert reads == 1
    (path / "chat_template.jinja").unlink()
    second = file_facts("m", path)
    assert (first.chat.chats, second.chat.chats) == (True, False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 77}))
    assert (second.context_length, file_facts("m", path).context_length) == (512, 77)
    (path / "additional_chat_templates").mkdir()
    (extra := path / "additional_chat_templates" / "tool_use.jinja").write_text(PLAIN_TEMPLATE)
    assert file_facts("m", path).chat.template == PLAIN_TEMPLATE
    extra.write_text(TOOL_TEMPLATE)
    assert file_facts("m", path).chat.template == TOOL_TEMPLATE


DAMAGES: dict[str, tuple[str, Any]] = {
    "no object": ("config.json", "[]"),
    "no JSON": ("config.json", "{"),
    "no type": ("config.json", "{}"),
    "odd values": (
        "config.json",
        json.dumps({"model_type": [], "vision_config": {"model_type": []}, "text_config": 7}),
    ),
    "odd sizes": ("config.json", json.dumps({"model_type": "qwen3", "max_position_embeddings": {}, "quantization": 4})),
    "an unknown type": ("config.json", json.dumps({"model_type": "nothing_has_it", "max_position_embeddings": 9})),
    "a damaged tokenizer": ("tokenizer.json", "{"),
    "odd templates": ("tokenizer_config.json", json.dumps({"chat_template": [{"name": 1}, 7]})),
    "a broken template": ("chat_template.jinja", "{% if"),
    "damaged weights": ("model.safetensors", "x"),
    "odd modules": ("modules.json", "[7]"),
    "odd sampling": ("generation_config.json", "[]"),
    "a damaged GGUF": ("m.gguf", "GGUF"),
}


def test_a_model_with_damaged_files_is_listed_with_what_is_known(tmp_path: Path) -> None:
    for name, (file, content) in DAMAGES.items():
        if file == "m.gguf":
            (tmp_path / name).mkdir()
        else:
            make_tiny_model(tmp_path / name, "qwen3")
        (tmp_path / name / file).write_text(content)
        if name == "odd templates":
            (tmp_path / name / "chat_template.jinja").unlink()
    os.utime(tmp_path / "no type" / "config.json", (1e12, 1e12))
    base = EngineConfig(kv_cache_bytes=2_000_000)
    registry = registry_of([Model("demo", base)], base, catalog=Catalog((tmp_path,)))
    with running_server(registry) as server, raw(server) as client:
        listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
        tags = {each["name"]: each for each in client.get("/api/tags").json()["models"]}
        for name in (f"{name}/m.gguf" if file == "m.gguf" else name for name, (file, _) in DAMAGES.items()):
            assert client.get(f"/v1/models/{name}").json() == listed[name]
            shown = client.post("/api/show", json={"model": name})
            assert (shown.status_code, shown.json()["details"]) == (200, tags[f"{name}:latest"]["details"])
    for name in ("no object", "no JSON", "no type", "odd values", "an unknown type", "a damaged GGUF/m.gguf"):
        assert "capabilities" not in listed[name]  # it cannot be loaded
        assert tags[f"{name}:latest"]["capabilities"] == []
    assert listed["odd sampling"]["capabilities"]["chat"]
    assert listed["a broken template"]["context_length"] == 512
    assert listed["damaged weights"]["parameters"] is None
    assert listed["odd templates"]["capabilities"]["chat"] is False


def test_weights_that_are_no_file_are_not_opened(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "qwen3")
    (weights := path / "model.safetensors").unlink()
    os.mkfifo(weights)
    other_end = os.open(weights, os.O_RDWR | os.O_NONBLOCK)  # with it, to open them would not take for ever
    os.write(other_end, bytes(8))
    assert file_facts("m", path).num_parameters is None
    assert os.read(other_end, 8) == bytes(8)
    os.close(other_end)


def test_what_cannot_be_known_is_left_open(tmp_path: Path) -> None:
    base = EngineConfig(kv_cache_bytes=2_000_000)
    missing = Model("missing", EngineConfig("someone/not-downloaded", "missing"))
    with running_server(registry_of([Model("demo", base), missing], base)) as server, raw(server) as client:
        entry = client.get("/v1/models/missing").json()
        assert (entry["state"], entry["created"], entry["size_bytes"]) == ("available", 0, None)
        assert "capabilities" not in entry
        shown = client.post("/api/show", json={"model": "missing"}).json()
        assert (shown["capabilities"], shown["details"]["family"]) == ([], "")
    facts = file_facts("m", make_embedding_model(tmp_path / "m", pooling="max"))
    assert expected_facts(facts, EngineConfig(only_embeds=True)) is None
