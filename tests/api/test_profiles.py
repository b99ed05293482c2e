"""Profiles: one set of weights under several names, each with defaults of its own; and limits on thoughts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from mlxpaged.core.text.thinking_limit import ThinkingLimit
from mlxpaged.engine_config import EngineConfig
from mlxpaged.registry.model import Model
from mlxpaged.registry.profile import Profile
from mlxpaged.registry.registry import registry_of
from tests.api.helpers import raw
from tests.scripted import follow, make_scripted_model
from tests.support import RunningServer, running_server

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
NO_THOUGHT = "<think>\n\n</think>"
SYSTEM = "You are a pirate."
THOUGHT = 500
PROFILES = [
    Profile("fast", "scripted", {"temperature": 0.0, "top_k": -1}, max_tokens=120, thinking=False),
    Profile("pirate", "alias", system=SYSTEM),
    Profile("brief-thoughts", "scripted", thinking_limit=ThinkingLimit(40), thinking=True),
    Profile("plain", "scripted", chat_template="PLAIN{% for m in messages %}{{ m.content }}{% endfor %}"),
    Profile("broken", "scripted", chat_template="{{ raise_exception('never') }}"),
]


def seen(prompt: str) -> str:
    """What the model has been shown, or a long thought."""
    if "Think!" in prompt and NO_THOUGHT not in prompt:
        return f"<think>{'a' * THOUGHT}</think>{'b' * THOUGHT}"
    shown = {
        "system": SYSTEM if SYSTEM in prompt else "Be kind." if "Be kind." in prompt else "",
        "thinks": NO_THOUGHT not in prompt,
        "plain": prompt.startswith("PLAIN"),
    }
    return json.dumps(shown)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted_model(tmp_path_factory.mktemp("model"), "json_tools")


def config_of(model: Path, **options: Any) -> EngineConfig:
    own: dict[str, Any] = {"served_model_name": "scripted", "kv_cache_bytes": 16_000_000, "speculative": "off"}
    return EngineConfig(model=str(model), max_step_ms=0, **own | options)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    config = config_of(model)
    profiles = {profile.name: profile for profile in PROFILES}
    registry = registry_of([Model("scripted", config)], config, aliases={"alias": "scripted"}, profiles=profiles)
    with running_server(registry) as server:
        follow(server, seen)
        yield server


def posted(server: RunningServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    with raw(server) as http:
        response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def asked(name: str, question: str = "What?", **fields: Any) -> dict[str, Any]:
    return {"model": name, "messages": [{"role": "user", "content": question}]} | fields


def chat(server: RunningServer, name: str, question: str = "What?", **fields: Any) -> Any:
    answer = posted(server, CHAT, asked(name, question, **fields))
    assert answer["model"] == name
    return answer


def shown_to(server: RunningServer, name: str, **fields: Any) -> Any:
    return json.loads(chat(server, name, **fields)["choices"][0]["message"]["content"])


def test_the_lists_of_all_apis_have_the_profiles(server: RunningServer) -> None:
    names = ["scripted", *(profile.name for profile in PROFILES)]
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [each.id for each in client.models.list()][: len(names)] == names
    assert client.models.retrieve("fast").id == "fast"
    of_anthropic = Anthropic(base_url=server.url, api_key="none")
    assert [each.id for each in of_anthropic.models.list()][: len(names)] == names
    assert of_anthropic.models.retrieve("pirate").id == "pirate"
    with raw(server) as http:
        fast = http.get("/v1/models/fast").json()
        tags = http.get("/api/tags").json()["models"]
        loaded = http.get("/api/ps").json()["models"]
        shown = http.post("/api/show", json={"model": "fast"}).json()
        xcode = http.get("/v1/models?").json()["data"]
    assert (fast["parent"], fast["state"], fast["memory_bytes"]) == ("scripted", "loaded", None)
    assert fast["profile"] == {"temperature": 0.0, "top_k": -1, "max_tokens": 120, "thinking": False}
    assert fast["sampling_defaults"]["temperature"] == 0
    assert [each["name"] for each in tags][: len(names)] == [f"{name}:latest" for name in names]
    assert [each["name"] for each in loaded] == [f"{name}:latest" for name in names]
    assert (shown["details"]["parent_model"], shown["model_info"]["general.basename"]) == ("scripted", "fast")
    assert [each["id"] for each in xcode][: len(names)] == names
    assert SYSTEM not in json.dumps(xcode)


def test_a_profile_turns_the_thinking_off_unless_the_client_says_otherwise(server: RunningServer) -> None:
    assert shown_to(server, "scripted")["thinks"]
    assert not shown_to(server, "fast")["thinks"]
    assert shown_to(server, "fast", chat_template_kwargs={"enable_thinking": True})["thinks"]
    assert shown_to(server, "fast", reasoning_effort="low")["thinks"]
    assert shown_to(server, "fast", thinking={"type": "enabled"})["thinks"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/api/chat", "/api/generate"])
def test_each_api_has_the_defaults_of_a_profile(server: RunningServer, path: str) -> None:
    texts = {
        CHAT: lambda body: body["choices"][0]["message"]["content"],
        MESSAGES: lambda body: body["content"][0]["text"],
        RESPONSES: lambda body: body["output"][0]["content"][0]["text"],
        "/api/chat": lambda body: body["message"]["content"],
        "/api/generate": lambda body: body["response"],
    }
    prompt: dict[str, Any] = asked("")
    if path == RESPONSES:
        prompt = {"input": "What?"}
    elif path == "/api/generate":
        prompt = {"prompt": "What?"}
    elif path == MESSAGES:
        prompt = asked("", max_tokens=300)
    for name, key, value in (("fast", "thinks", False), ("pirate", "system", SYSTEM), ("plain", "plain", True)):
        answer = posted(server, path, prompt | {"model": name, "stream": False})
        assert answer["model"] == name
        assert json.loads(texts[path](answer))[key] == value, name


def test_a_system_text_is_for_conversations_without_one(server: RunningServer) -> None:
    assert shown_to(server, "scripted")["system"] == ""
    assert shown_to(server, "pirate")["system"] == SYSTEM
    own = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What?"}]
    assert shown_to(server, "pirate", messages=own)["system"] == "Be kind."
    body = asked("pirate", max_tokens=1)
    counts = [posted(server, f"{MESSAGES}/count_tokens", body | {"model": name}) for name in ("scripted", "pirate")]
    assert counts[1]["input_tokens"] - counts[0]["input_tokens"] > len(SYSTEM)


def test_max_tokens_is_that_of_the_profile_or_of_the_client(server: RunningServer) -> None:
    long = chat(server, "fast", "Think!", thinking={"type": "enabled"})
    assert (long["usage"]["completion_tokens"], long["choices"][0]["finish_reason"]) == (120, "length")
    assert chat(server, "fast", max_tokens=7)["usage"]["completion_tokens"] == 7


def test_ollamas_tag_and_a_stream_name_the_profile(server: RunningServer) -> None:
    answer = posted(server, "/api/chat", asked("fast:latest", stream=False))
    assert not json.loads(answer["message"]["content"])["thinks"]
    with raw(server) as http:
        lines = http.post(CHAT, json=asked("fast", stream=True)).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"fast"}


def test_an_unknown_name_is_told_of_the_profiles(server: RunningServer) -> None:
    error = posted(server, CHAT, asked("faster"), 404)["error"]
    assert "'fast'" in error["message"]


def test_a_template_that_refuses_everything_is_a_400_for_its_profile_alone(server: RunningServer) -> None:
    posted(server, CHAT, asked("broken"), 400)
    assert shown_to(server, "scripted")["thinks"]


def thoughts(answer: Any) -> tuple[int, str]:
    """The tokens of the thoughts, and the text after them."""
    usage = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return usage, answer["choices"][0]["message"]["content"]


def test_the_limit_of_a_profile_is_a_default_of_thoughts(server: RunningServer) -> None:
    count, text = thoughts(chat(server, "scripted", "Think!"))
    assert count > THOUGHT
    assert text
    count, text = thoughts(chat(server, "brief-thoughts", "Think!"))
    assert 40 <= count <= 44
    assert text
    count, text = thoughts(chat(server, "brief-thoughts", "Think!", max_tokens=60))
    assert 30 <= count <= 34, "it leaves half of the tokens"
    assert text
    count, _ = thoughts(chat(server, "brief-thoughts", "Think!", thinking_budget=100))
    assert 100 <= count <= 104


def test_the_limit_of_the_server_holds_for_profiles_too(model: Path) -> None:
    config = dataclasses.replace(config_of(model), thinking_limit=ThinkingLimit(64))
    deep = Profile("deep", "scripted", thinking_limit=ThinkingLimit(120))
    with running_server(registry_of([Model("scripted", config)], config, profiles={"deep": deep})) as server:
        follow(server, seen)
        count, text = thoughts(chat(server, "deep", "Think!", max_tokens=300))
        assert 64 <= count <= 68
        assert text


def test_two_profiles_of_a_model_share_its_weights_and_greedy_is_greedy() -> None:
    config = EngineConfig("demo", kv_cache_bytes=16_000_000, max_step_ms=0)
    profiles = {name: Profile(name, "demo", {"temperature": value}) for name, value in (("cold", 0.0), ("hot", 2.0))}
    with running_server(registry_of([Model("demo", config)], config, profiles=profiles)) as server:
        body = {"prompt": "The engine", "max_tokens": 24}
        path = "/v1/completions"
        greedy = posted(server, path, body | {"model": "demo", "temperature": 0})["choices"][0]["text"]
        cold = [posted(server, path, body | {"model": "cold"})["choices"][0]["text"] for _ in range(2)]
        assert cold == [greedy, greedy]
        assert posted(server, path, body | {"model": "hot"})["choices"][0]["text"] != greedy
        assert posted(server, path, body | {"model": "hot", "temperature": 0})["choices"][0]["text"] == greedy
        with raw(server) as http:
            assert len(http.get("/api/ps").json()["models"]) == 3
        assert len(server.app.state.server.registry.loaded) == 1
