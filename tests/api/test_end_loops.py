"""Answers that repeat themselves end with the word of each API for a complete answer, and the reason is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import metrics, raw
from tests.api.test_batches import ended, jsonl, lines_of
from tests.api.test_batches import submit as submit_batch
from tests.scripted import follow, make_scripted_model, scripted_server
from tests.support import RunningServer, running_server

HEADER = "X-Mlxpaged-Stop-Cause"
TIMED = {"X-Mlxpaged-Timeline": "1"}
LINE = "round and round it goes, "
LOOP = LINE * 60
CALL = '<tool_call>\n{"name": "say", "arguments": {"text": "hello"}}\n</tool_call>\n'
SCRIPT = {
    "Text?": LOOP,
    "Thought?": f"<think>{LOOP}",
    "Arguments?": f'<tool_call>\n{{"name": "say", "arguments": {{"text": "{LOOP}',
    "Calls?": f"Well. {CALL * 30}",
    "List?": "".join(f"{number}. {LINE}\n" for number in range(30)),
    "Short?": "That is all.",
}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
SAY = {"type": "function", "function": {"name": "say", "parameters": TEXT}}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
MOST = 50 + 6 * len(LINE)
"""Each character of the scripted model is a token."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", SCRIPT) as server:
        yield server


def asked(question: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": question}], "tools": [SAY]} | fields


def posted(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    with raw(server) as http:
        response = http.post(path, json=body, headers=TIMED)
    assert response.status_code == 200, response.text
    return response


def chat(server: RunningServer, question: str, **fields: Any) -> tuple[dict[str, Any], str | None]:
    """The choice, and the cause of its end."""
    response = posted(server, CHAT, asked(question, **fields))
    return response.json()["choices"][0], response.headers.get(HEADER)


def is_cause(cause: str | None) -> bool:
    return cause is not None and cause.startswith(f"repetition; period={len(LINE)}; copies=")


def test_a_text_that_repeats_itself_ends_with_stop_and_the_cause_in_a_header(server: RunningServer) -> None:
    choice, cause = chat(server, "Text?")
    text = choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert LOOP.startswith(text)
    assert 4 * len(LINE) < len(text) <= MOST
    assert is_cause(cause)


def test_a_thought_that_repeats_itself_ends_and_stays_a_thought(server: RunningServer) -> None:
    choice, cause = chat(server, "Thought?")
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == ""
    assert LOOP.startswith(choice["message"]["reasoning_content"])
    assert is_cause(cause)


def test_a_call_whose_arguments_repeat_themselves_is_no_call(server: RunningServer) -> None:
    choice, cause = chat(server, "Arguments?")
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert is_cause(cause)


def test_a_call_that_its_grammar_wants_whole_is_cut_as_by_a_limit(server: RunningServer) -> None:
    choice, cause = chat(server, "Arguments?", tool_choice="required")
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert LINE in choice["message"]["content"]
    assert is_cause(cause)


CUT_WORDS = {RESPONSES: ("status", "incomplete"), MESSAGES: ("stop_reason", "max_tokens")}


@pytest.mark.parametrize("path", CUT_WORDS)
def test_each_api_has_its_own_word_for_a_call_that_is_cut(server: RunningServer, path: str) -> None:
    choice: dict[str, Any] = {"tool_choice": {"type": "any"} if path == MESSAGES else "required"}
    body = json.loads(json.dumps(BODIES[path]).replace("Text?", "Arguments?"))
    response = posted(server, path, {"model": "scripted"} | body | choice)
    key, word = CUT_WORDS[path]
    assert response.json()[key] == word
    assert is_cause(response.headers[HEADER])


def test_calls_that_repeat_themselves_end_as_calls(server: RunningServer) -> None:
    choice, cause = chat(server, "Calls?")
    assert choice["finish_reason"] == "tool_calls"
    assert 4 <= len(choice["message"]["tool_calls"]) <= 6
    assert str(cause).startswith("repetition; ")


@pytest.mark.parametrize("question", ["List?", "Short?"])
def test_other_answers_are_whole_and_have_no_cause(server: RunningServer, question: str) -> None:
    response = posted(server, CHAT, asked(question))
    choice = response.json()["choices"][0]
    assert choice["message"]["content"].strip() == SCRIPT[question].strip()
    assert HEADER not in response.headers
    assert "stop_cause" not in response.json()["timeline"]


def test_without_tools_only_a_request_that_asks_for_it_is_ended(server: RunningServer) -> None:
    choice, cause = chat(server, "Text?", tools=None)
    assert (choice["message"]["content"].strip(), cause) == (LOOP.strip(), None)
    assert is_cause(chat(server, "Text?", tools=None, end_loops=True)[1])
    assert chat(server, "Text?", end_loops=False)[1] is None
    with raw(server) as http:
        body = {"model": "scripted", "prompt": "Text?", "max_tokens": 2000}
        assert HEADER not in http.post(COMPLETIONS, json=body).headers
        response = http.post(COMPLETIONS, json=body | {"end_loops": True})
    assert is_cause(response.headers[HEADER])
    assert response.json()["choices"][0]["finish_reason"] == "stop"


BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "Text?", "tools": [{"type": "function", "name": "say", "parameters": TEXT}]},
    MESSAGES: {
        "messages": [{"role": "user", "content": "Text?"}],
        "tools": [{"name": "say", "input_schema": TEXT}],
        "max_tokens": 2000,
    },
    "/api/chat": {"messages": [{"role": "user", "content": "Text?"}], "tools": [SAY]},
}
WORDS = {
    RESPONSES: ("status", "completed"),
    MESSAGES: ("stop_reason", "end_turn"),
    "/api/chat": ("done_reason", "stop"),
}


@pytest.mark.parametrize("path", BODIES)
def test_each_api_has_its_own_word_for_the_end_and_the_same_header(server: RunningServer, path: str) -> None:
    body = {"model": "scripted", "stream": False} | BODIES[path]
    response = posted(server, path, body)
    key, word = WORDS[path]
    assert response.json()[key] == word
    assert LINE in response.text
    assert is_cause(response.headers[HEADER])
    assert is_cause(response.json()["timeline"]["stop_cause"])
    field: dict[str, Any] = {"options": {"end_loops": False}} if path == "/api/chat" else {"end_loops": False}
    assert HEADER not in posted(server, path, body | field).headers


@pytest.mark.parametrize("path", [CHAT, *BODIES])
def test_a_stream_ends_where_the_whole_answer_does_and_has_the_cause_in_its_timeline(
    server: RunningServer, path: str
) -> None:
    body = {"model": "scripted", **(BODIES[path] if path in BODIES else asked("Text?"))}
    whole = posted(server, path, body | {"stream": False})
    streamed = posted(server, path, body | {"stream": True})
    assert HEADER not in streamed.headers
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.text.splitlines()
        if line[:7] in ("data: {", '{"model')
    ]

    def timelines(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            yield from [value["timeline"]] if "timeline" in value else []
            for each in value.values():
                yield from timelines(each)

    [timeline] = [each for event in events for each in timelines(event)]
    assert timeline["stop_cause"] == whole.headers[HEADER]
    said = {
        CHAT: lambda event: "".join(each["delta"].get("content") or "" for each in event.get("choices", ())),
        RESPONSES: lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        MESSAGES: lambda event: event.get("delta", {}).get("text", ""),
        "/api/chat": lambda event: event["message"]["content"],
    }[path]
    text = "".join(map(said, events))
    assert text
    assert json.dumps(text)[1:-1] in whole.text


def test_of_several_choices_the_header_names_those_that_were_ended(server: RunningServer) -> None:
    response = posted(server, CHAT, asked("Text?", n=3))
    causes = response.headers[HEADER].split(", ")
    assert [is_cause(cause) and cause.partition("choice=")[2] for cause in causes] == ["0", "1", "2"]
    texts = {choice["message"]["content"] for choice in response.json()["choices"]}
    assert len(texts) == 1
    assert [is_cause(each["stop_cause"]) for each in response.json()["timeline"]] == [True] * 3


def test_the_log_probabilities_are_those_of_the_text(server: RunningServer) -> None:
    choice, cause = chat(server, "Text?", logprobs=True)
    assert is_cause(cause)
    assert "".join(each["token"] for each in choice["logprobs"]["content"]).startswith(choice["message"]["content"])


def test_metrics_and_the_log_count_the_loops(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    before = metrics(server)["mlxpaged_loops_ended_total"]
    with caplog.at_level("INFO"):
        _, cause = chat(server, "Text?")
    assert metrics(server)["mlxpaged_loops_ended_total"] == before + 1
    assert metrics(server)["mlxpaged_loop_tokens_total"] >= (before + 1) * 4 * len(LINE)
    assert f"finish_reason=stop ({cause})" in caplog.text


def test_with_on_the_loops_of_all_requests_and_of_batches_end(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = make_scripted_model(tmp_path / "model", "json_tools")
    options: dict[str, Any] = {"served_model_name": "scripted", "kv_cache_bytes": 16_000_000, "speculative": "off"}
    config = EngineConfig(model=str(model), end_loops="on", **options)
    with running_server(config, data_dir=tmp_path / "data") as server:
        follow(server, SCRIPT)
        assert is_cause(chat(server, "Text?", tools=None)[1])
        assert chat(server, "Text?", tools=None, ignore_eos=True, max_tokens=900)[1] is None
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        body = {"model": "scripted", "prompt": "Text?", "max_tokens": 2000}
        batch = ended(client, submit_batch(client, jsonl([body, body | {"end_loops": False}])))
        found = lines_of(client, batch.output_file_id)
        texts = sorted(len(line["response"]["body"]["choices"][0]["text"]) for line in found.values())
        assert texts[0] <= MOST < len(LOOP) == texts[1]


@pytest.mark.parametrize("value", ["yes", 1, []])
def test_a_value_that_is_none_is_refused_by_name(server: RunningServer, value: Any) -> None:
    with raw(server) as http:
        response = http.post(CHAT, json=asked("Text?", end_loops=value))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "end_loops"
