"""Ollama's API over real HTTP, with bodies as Ollama's own Python package sends them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.api.app import create_app
from mlxpaged.api.body import Model, validate
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation.history import adapted
from mlxpaged.api.generation.request import Chat
from mlxpaged.api.ollama import schema
from mlxpaged.api.ollama.translation import messages_of, translate_chat
from mlxpaged.api.reading import Reading
from tests.api.helpers import StepGate, chat_tokens, raw, tokens_of, within_one_step, write_keys
from tests.api.test_tools import WEATHER
from tests.support import RunningServer

REPLY = '{"city": "Rome", "degrees": 21}'
THOUGHT = "I should look."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2.5}}\n</tool_call>'
SEPARATED = "one\x85two\u2028three\u2029\n\v\f\x1c\x1d\x1efour"
SCRIPT = {
    "Hello": "Hello there.",
    "Ponder": f"<think>\n{THOUGHT}\n</think>\nHello there.",
    "Weather in Rome?": f"Let me see.\n{CALL}",
    "21 degrees": "It is 21 degrees in Rome.",
    "Describe Rome": REPLY,
    "The answer is": " 42.",
    "is<|im_end|>\n<|im_start|>assistant\n": "A new turn.",
    "Separate": SEPARATED,
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
}


def asked(text: str, **fields: Any) -> dict[str, Any]:
    """What the package sends for `chat`, without `stream`, which it always sends."""
    return {"model": "scripted", "tools": [], "messages": [{"role": "user", "content": text}]} | fields


def prompted(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "prompt": text, "suffix": "", "system": "", "template": ""} | fields


def read(body: dict[str, Any], model: type[Model]) -> Model:
    return validate(body, model, Reading(model, strict=True))


def whole(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with raw(server) as client:
        response = client.post(path, json=body | {"stream": False})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def lines(server: RunningServer, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    with raw(server) as client, client.stream("POST", path, json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def refused(server: RunningServer, path: str, body: Any, method: str = "POST") -> tuple[int, str]:
    with raw(server) as client:
        response = client.request(method, path, json=body)
    assert list(response.json()) == ["error"]
    return response.status_code, response.json()["error"]


def test_an_answer_is_streamed_by_default_and_ends_with_counts_and_times(server: RunningServer) -> None:
    *pieces, last = lines(server, "/api/chat", asked("Hello"))
    assert "".join(piece["message"]["content"] for piece in pieces) == "Hello there."
    assert {piece["message"]["role"] for piece in pieces} == {"assistant"}
    assert [piece["done"] for piece in pieces] == [False] * len(pieces)
    assert len(pieces) > 1
    prompt = chat_tokens(server, [{"role": "user", "content": "Hello"}])
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert (last["prompt_eval_count"], last["eval_count"]) == (len(prompt), len("Hello there.") + 1)
    parts = [last[f"{part}_duration"] for part in ("load", "prompt_eval", "eval")]
    assert all(type(part) is int and part > 0 for part in parts)
    assert last["total_duration"] == pytest.approx(sum(parts), abs=5)
    assert "timeline" not in last


def test_no_character_of_an_answer_ends_a_line_for_a_client_that_splits_as_python_does(server: RunningServer) -> None:
    pieces = lines(server, "/api/chat", asked("Separate"))
    assert "".join(piece["message"]["content"] for piece in pieces) == SEPARATED
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Separate"}], "stream": True}
    with raw(server) as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        found = [line for line in response.iter_lines() if line not in ("", "data: [DONE]")]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in found]
    assert "".join(delta.get("content") or "" for delta in deltas) == SEPARATED


def test_a_client_that_asks_for_its_timeline_gets_it_too(server: RunningServer) -> None:
    *_, last = lines(server, "/api/chat", asked("Hello"), **{"X-Mlxpaged-Timeline": "1"})
    assert last["timeline"]["total_seconds"] == pytest.approx(last["total_duration"] / 1e9)


def test_whole_answers_and_prompts_have_the_same_text(server: RunningServer) -> None:
    answer = whole(server, "/api/chat", asked("Hello"))
    assert answer["message"] == {"role": "assistant", "content": "Hello there."}
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("scripted", True, "stop")
    answer = whole(server, "/api/generate", prompted("Hello"))
    assert (answer["response"], answer["done_reason"]) == ("Hello there.", "stop")
    pieces = lines(server, "/api/generate", prompted("Hello"))
    assert "".join(piece["response"] for piece in pieces) == "Hello there."


def test_the_last_message_is_continued_if_it_is_the_assistants(server: RunningServer) -> None:
    said = {"role": "assistant", "content": "The answer is"}
    body = {"model": "scripted", "messages": [{"role": "user", "content": "And?"}, said]}
    assert whole(server, "/api/chat", body)["message"]["content"] == " 42."
    assert "".join(piece["message"]["content"] for piece in lines(server, "/api/chat", body)) == " 42."


def test_a_prompt_is_a_message_unless_it_is_raw(server: RunningServer) -> None:
    spoken = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    body = prompted("Hello", system="Be brief.")
    assert whole(server, "/api/generate", body)["prompt_eval_count"] == len(chat_tokens(server, spoken))
    body = prompted("Hello", raw=True)
    assert whole(server, "/api/generate", body)["prompt_eval_count"] == len(tokens_of(server, "Hello"))


@pytest.mark.parametrize(("path", "body"), [("/api/chat", asked("Ponder")), ("/api/generate", prompted("Ponder"))])
def test_thinking_is_apart_from_the_answer(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    answer = whole(server, path, body | {"think": True})
    found = answer.get("message", answer)
    assert (found["thinking"], found.get("content", found.get("response"))) == (THOUGHT, "Hello there.")
    pieces = [piece.get("message", piece) for piece in lines(server, path, body | {"think": True})]
    assert "".join(piece.get("thinking", "") for piece in pieces) == THOUGHT
    assert "".join(piece.get("content", piece.get("response")) for piece in pieces) == "Hello there."


def test_a_tool_call_is_one_line_and_its_result_is_answered(server: RunningServer) -> None:
    body = asked("Weather in Rome?", tools=[WEATHER])
    *pieces, last = lines(server, "/api/chat", body)
    assert last["done_reason"] == "stop"
    assert "".join(piece["message"]["content"] for piece in pieces) == "Let me see."
    [call] = [call for piece in pieces for call in piece["message"].get("tool_calls", ())]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Rome", "days": 2.5}}
    answer = whole(server, "/api/chat", body)["message"]
    assert [each["function"] for each in answer["tool_calls"]] == [call["function"]]
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": call["function"]}]}
    result = {"role": "tool", "content": "21 degrees", "tool_name": "weather"}
    body["messages"] = [*body["messages"], said, result]
    assert whole(server, "/api/chat", body)["message"]["content"] == "It is 21 degrees in Rome."


@pytest.mark.parametrize("form", ["json", SCHEMA], ids=["json", "schema"])
def test_an_answer_has_the_form_that_was_asked_for(server: RunningServer, form: Any) -> None:
    answer = whole(server, "/api/chat", asked("Describe Rome", format=form))
    assert json.loads(answer["message"]["content"]) == json.loads(REPLY)
    status, error = refused(server, "/api/chat", asked("Hello", format="xml"))
    assert (status, error.split(":")[0]) == (400, "format")
    status, error = refused(server, "/api/chat", asked("Hello", format={"type": "no such"}))
    assert (status, error.split(":")[0]) == (400, "format")


def test_options_limit_the_answer(server: RunningServer) -> None:
    answer = whole(server, "/api/chat", asked("Hello", options={"num_predict": 3, "num_ctx": 4096, "num_gpu": 1}))
    assert (answer["message"]["content"], answer["done_reason"], answer["eval_count"]) == ("Hel", "length", 3)
    with raw(server) as client:
        body = asked("Hello", stream=False, options={"num_predict": 3, "num_ctx": 4096, "num_gpu": 1})
        assert client.post("/api/chat", json=body).headers["x-mlxpaged-ignored"] == "options.num_ctx, options.num_gpu"
    answer = whole(server, "/api/chat", asked("Hello", options={"num_predict": -1, "stop": [" t"]}))
    assert (answer["message"]["content"], answer["done_reason"]) == ("Hello", "stop")


def test_log_probabilities_are_those_of_the_tokens(server: RunningServer) -> None:
    body = asked("Hello", logprobs=True, top_logprobs=2)
    found = whole(server, "/api/chat", body)["logprobs"]
    assert "".join(each["token"] for each in found[:-1]) == "Hello there."
    assert [len(each["top_logprobs"]) for each in found] == [2] * len(found)
    streamed = [each for line in lines(server, "/api/chat", body) for each in line.get("logprobs", ())]
    assert [each["token"] for each in streamed] == [each["token"] for each in found]


OPTIONS = [
    ({"temperature": 0, "top_k": 5, "top_p": 0.5}, {"temperature": 0, "top_k": 5, "top_p": 0.5}),
    ({"seed": 7, "stop": "a", "min_p": 0.1}, {"seed": 7, "stop": ("a",), "min_p": 0.1}),
    ({"seed": -1, "top_k": -1}, {"seed": None, "top_k": 0}),
    ({"repeat_penalty": 1.2, "repeat_last_n": 64}, {"repetition_penalty": 1.2, "repetition_context_size": 64}),
    ({"repeat_penalty": 1.2, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
    ({"presence_penalty": 1, "frequency_penalty": -1.5}, {"presence_penalty": 1, "frequency_penalty": -1.5}),
    ({"num_predict": -2}, {"max_tokens": None}),
    ({"typical_p": 1.0, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5.0}, {"temperature": 1.0}),
]


@pytest.mark.parametrize(("options", "params"), OPTIONS)
def test_options_become_sampling_parameters(options: dict[str, Any], params: dict[str, Any]) -> None:
    request = translate_chat(read(asked("x", options=options), schema.OllamaChatRequest), "scripted")
    request = request.with_defaults({"repetition_penalty": 1.05})
    assert {name: getattr(request.params, name) for name in params} == params


EFFORTS = [("low", True, True, 1024), ("high", True, True, None), ("max", True, True, None)]


@pytest.mark.parametrize(
    ("think", "enabled", "needed", "budget"),
    [(None, None, False, None), (False, False, False, None), (True, True, True, None), *EFFORTS],
)
def test_think_is_the_switch_of_the_template_or_a_limit(
    think: Any, enabled: bool | None, needed: bool, budget: int | None
) -> None:
    request = translate_chat(read(asked("x", think=think), schema.OllamaChatRequest), "scripted")
    assert isinstance(request.prompt, Chat)
    assert (request.prompt.enable_thinking, request.prompt.needs_thinking) == (enabled, needed)
    assert request.prompt.effort == (think if isinstance(think, str) else None)  # gpt-oss knows no switch, but efforts
    assert request.params.thinking_budget == budget


def test_results_without_ids_belong_to_the_calls_that_have_none_yet(server: RunningServer) -> None:
    """Chat templates expect OpenAI's form, in which a result names its call, and most show results in their order."""
    functions = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    given: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "thinking": "hm", "tool_calls": functions},
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of the first a"},
        {"role": "tool", "content": "of the second a", "tool_name": "a"},
    ]
    assert server.engine.info is not None
    said, *results = adapted(messages_of([read(each, schema.Message) for each in given]), server.engine.info.tokenizer)
    ids = [call["id"] for call in said["tool_calls"]]
    assert (said["content"], said["reasoning_content"]) == ("", "hm")
    assert len(set(ids)) == 3
    assert [result["tool_call_id"] for result in results] == ids
    assert [result["content"] for result in results] == ["of the first a", "of b", "of the second a"]
    assert [result["name"] for result in results] == ["a", "b", "a"]


@pytest.mark.parametrize("options", [{"typical_p": 0.5}, {"tfs_z": 2.0}, {"mirostat": 2}])
def test_a_way_of_sampling_that_is_missing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=rf"options\.{next(iter(options))}: .*does not sample in this way"):
        read(asked("x", options=options), schema.OllamaChatRequest)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"model": "scripted", "messages": [{"role": "user", "images": ["aGk="]}]}, 400, "images are not"),
        ("/api/generate", prompted("x", images=["aGk="]), 400, "images are not supported by this model"),
        ("/api/generate", prompted("x", images=["aGk="], raw=True), 400, "images: cannot be combined with raw"),
        ("/api/generate", prompted("x", suffix="y"), 400, "suffix: "),
        ("/api/generate", prompted("x", template="{{ .Prompt }}"), 400, "template: "),
        ("/api/generate", prompted("x", context=[1]), 400, "context: "),
        ("/api/generate", prompted("x", raw=True, system="y"), 400, "system: "),
        ("/api/generate", prompted("x", raw=True, think=True), 400, "think: "),
        ("/api/chat", asked("x" * 10_000), 400, "context length"),
        ("/api/chat", asked("x", model="other"), 404, "'other' does not exist"),
        ("/api/chat", {"messages": []}, 400, "model: "),
        ("/api/chat", asked("x", options={"temperature": -1}), 400, "options.temperature: "),
        ("/api/show", {}, 400, "model: "),
        ("/api/show", {"model": "other"}, 404, "'other' does not exist"),
        ("/api/embed", {"model": "scripted", "input": "x"}, 400, "cannot be used for embeddings"),
        ("/api/pull", {}, 400, "model: "),
        ("/api/pull", {"model": "llama3.2", "stream": True}, 403, "--allow-downloads, or use `mlxpaged pull`"),
        ("/api/create", {"model": "m", "from": "scripted"}, 400, "cannot make or delete models"),
        ("/api/nothing", {}, 404, "nothing at /api/nothing"),
        ("/api/tags", {}, 405, "POST is not allowed at /api/tags"),
    ],
)
def test_errors_have_ollamas_form(
    server: RunningServer, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    found, error = refused(server, path, body)
    assert found == status
    assert words in error


@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (0, "unload"), ("0s", "unload")])
def test_without_messages_or_a_prompt_nothing_is_generated(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, keep_alive: Any, reason: str
) -> None:
    monkeypatch.setattr(server.registry.default, "pinned", True)  # the other tests need it
    fields = {"model": "scripted:latest", "keep_alive": keep_alive}
    with raw(server) as client:
        chat = client.post("/api/chat", json=fields | {"messages": []}).json()
        generate = client.post("/api/generate", json=fields).json()
        embed = client.post("/api/embed", json=fields | {"input": []}).json()
        embeddings = client.post("/api/embeddings", json=fields).json()
    assert (chat["message"]["content"], chat["done"], chat["done_reason"]) == ("", True, reason)
    assert (generate["response"], generate["done"], generate["done_reason"]) == ("", True, reason)
    assert (embed["embeddings"], embeddings) == ([], {"embedding": []})


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"])
def test_a_keep_alive_of_another_kind_is_refused_with_examples(server: RunningServer, path: str) -> None:
    for keep_alive in (True, [5], {}, "soon"):
        status, error = refused(server, path, {"model": "scripted", "keep_alive": keep_alive})
        assert (status, error) == (
            400,
            'keep_alive: must be a number of seconds, or a duration such as "5m", "1h30m", "500ms" or "-1m"',
        )


def test_an_error_in_a_stream_is_its_last_line(server: RunningServer) -> None:
    stream: Any = {"method": "POST", "url": "/api/chat", "json": asked("Hello"), "headers": {"X-Request-Id": "stopped"}}
    with StepGate(server) as gate, raw(server) as client, client.stream(**stream) as response:
        assert within_one_step(server, gate, "DELETE", "/v1/requests/stopped").status_code == 200
        *_, last = [json.loads(line) for line in response.iter_lines()]
    assert last == {"error": "the request was cancelled"}


def test_a_stream_without_news_has_lines_without_text(server: RunningServer) -> None:
    stream: Any = {
        "method": "POST",
        "url": "/api/chat",
        "json": asked("Hello"),
        "headers": {"X-Mlxpaged-Progress": "1"},
    }
    with StepGate(server) as gate, raw(server) as client, client.stream(**stream) as response:
        received = response.iter_lines()
        first = json.loads(next(received))
        gate.open()
        rest = [json.loads(line) for line in received]
    assert (first["message"]["content"], first["done"]) == ("", False)
    assert first["prompt_progress"]["total"] > 0
    assert "".join(line["message"]["content"] for line in rest) == "Hello there."


def test_the_served_model_is_listed_shown_and_running(server: RunningServer) -> None:
    with raw(server) as client:
        listed, running = (client.get(path).json()["models"] for path in ("/api/tags", "/api/ps"))
        shown = client.post("/api/show", json={"model": "scripted:latest"}).json()
        assert client.post("/api/show", json={"name": "scripted"}).json() == shown
        version = client.get("/api/version").json()["version"]
    [model], [loaded] = listed, running
    info = server.engine.info
    assert info is not None
    assert model["name"] == model["model"] == "scripted:latest"
    assert (model["size"], len(model["digest"])) == (server.registry.default.size_bytes, 64)
    assert model["details"]["family"] == "llama"
    assert model["details"]["quantization_level"] == "float32"
    assert {name: loaded[name] for name in model} == model
    taken = server.registry.default.memory_bytes
    assert (loaded["size_vram"], loaded["context_length"]) == (taken, info.max_model_len)
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    for moment in (model["modified_at"], shown["modified_at"], loaded["expires_at"]):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", moment)  # OllamaKit reads no other form
    assert shown["model_info"]["llama.context_length"] == info.max_model_len
    assert shown["model_info"]["general.basename"] == "scripted"
    assert "tools" in shown["template"]
    assert shown["details"] == model["details"]
    assert [int(part) for part in version.split(".")] > [0, 6, 4]


def call_app(app: Any, base: str, *requests: tuple[str, str], **headers: str) -> list[httpx.Response]:
    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=base, headers=headers) as client:
            return [await client.request(method, path) for method, path in requests]

    return asyncio.run(send())


def test_only_ollamas_port_says_that_ollama_runs() -> None:
    app = create_app(None, http=HttpConfig(ollama_port=11434))
    probes = (("GET", "/"), ("HEAD", "/"))
    found, probed = call_app(app, "http://localhost:11434", *probes)
    assert (found.status_code, found.text, probed.status_code, probed.text) == (200, "Ollama is running", 200, "")
    for other in (app, create_app(None)):
        page, _ = call_app(other, "http://localhost:8080", *probes)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")


def test_keys_and_hosts_are_checked_as_on_other_paths(tmp_path: Path) -> None:
    key = write_keys(tmp_path / "keys.json", anna={})["anna"]
    app = create_app(None, http=HttpConfig(api_keys=tmp_path / "keys.json", ollama_port=11434))
    base, probe = "http://localhost:11434", ("GET", "/api/tags")
    [missing] = call_app(app, base, probe)
    assert (missing.status_code, list(missing.json())) == (401, ["error"])
    [known] = call_app(app, base, probe, Authorization=f"Bearer {key}")
    assert (known.status_code, known.json()) == (200, {"models": []})
    [foreign] = call_app(app, "http://evil.example:11434", probe)
    assert (foreign.status_code, list(foreign.json())) == (403, ["error"])
