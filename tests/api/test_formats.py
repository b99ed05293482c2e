"""Calls in every format, on every API, whole and streamed; and earlier turns as clients send them back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.formats import FORMATS
from tests.api.helpers import raw, stream_events
from tests.api.test_tools import CLOCK, WEATHER
from tests.formats.written import WRITTEN
from tests.scripted import follow, scripted_server
from tests.support import RunningServer, every

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
ROME = {"city": "Rome"}
TALK = "I would rather talk."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", {"21 degrees": "Warm."}) as server:
        yield server


def chat(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "scripted", "messages": messages, "tools": [WEATHER, CLOCK], "temperature": 0} | fields


def post(server: RunningServer, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    with raw(server) as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chat_calls(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = answer["choices"][0]["message"].get("tool_calls") or ()
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def by_api(server: RunningServer, question: str) -> dict[str, list[tuple[str, Any]]]:
    """The calls that each API has for a question."""
    function = WEATHER["function"]
    found = {"chat": chat_calls(post(server, chat(question)))}
    pieces = []
    for chunk in stream_events(server, CHAT, chat(question)):
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            pieces += [call["function"] for call in choice["delta"].get("tool_calls") or ()]
    found["streamed"] = [(pieces[0]["name"], json.loads("".join(piece["arguments"] for piece in pieces)))]
    tool = {"type": "function", **function}  # type: ignore[dict-item]
    items = post(server, {"model": "scripted", "input": question, "tools": [tool]}, RESPONSES)["output"]
    found["responses"] = [(i["name"], json.loads(i["arguments"])) for i in items if i["type"] == "function_call"]
    claude = {"name": "weather", "input_schema": function["parameters"]}  # type: ignore[index]
    body = chat(question, tools=[claude], max_tokens=500)
    blocks = post(server, body, MESSAGES)["content"]
    found["messages"] = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    message = post(server, chat(question, stream=False), OLLAMA)["message"]
    found["ollama"] = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return found


@pytest.mark.parametrize("form", every(7, FORMATS))
def test_every_api_has_the_call_and_can_enforce_one(tmp_path: Path, form: str) -> None:
    script = {"Rome?": WRITTEN[form]("weather", ROME), "Talk?": TALK}
    with scripted_server(tmp_path, form, script, tool_parser="kimi_k3" if form == "kimi_k3" else None) as server:
        calls = by_api(server, "Rome?")
        assert calls == {api: [("weather", ROME)] for api in ("chat", "streamed", "responses", "messages", "ollama")}
        limited: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
        limited |= {"required": ["city"], "additionalProperties": False}
        tool = {"type": "function", "function": {"name": "weather", "parameters": limited, "strict": True}}
        must: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
        must |= {"thinking_budget": 8} if form == "harmony" else {}  # this model would think for ever
        forced = post(server, chat("Talk?", tools=[tool], max_tokens=400, **must))
        [(name, arguments)] = chat_calls(forced)
        assert name == "weather"
        assert arguments["city"] in ("Rome", "Oslo")
        assert forced["choices"][0]["message"]["content"] in (None, "")
        if form != "harmony":
            free = post(server, chat("Talk?", tools=[tool]))["choices"][0]
            assert (free["finish_reason"], free["message"].get("tool_calls")) == ("stop", None)


HARMONY = {
    "Rome?": "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant" + WRITTEN["harmony"]("weather", ROME),
    "Why?": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>",
}


def test_harmonys_channels_are_thoughts_calls_and_text(tmp_path: Path) -> None:
    with scripted_server(tmp_path, "harmony", HARMONY) as server:
        message = post(server, chat("Why?", tools=[], reasoning_effort="low"))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "So.")
        answer = post(server, chat("Rome?"))
        assert answer["choices"][0]["message"]["reasoning_content"] == "I look."
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
        message = post(server, chat("Why?", tools=[], response_format=form))["choices"][0]["message"]
        assert (message["reasoning_content"], json.loads(message["content"])) == ("Hm.", {"a": 1})
        usage = post(server, {"model": "scripted", "input": "Why?"}, RESPONSES)["usage"]
        assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
        blocks = post(server, chat("Why?", tools=[], max_tokens=100), MESSAGES)["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"]


def test_every_api_has_a_call_whose_word_has_no_quotes(tmp_path: Path) -> None:
    with scripted_server(tmp_path, "gemma4", {"Rome?": "<|tool_call>call:weather{city:Rome}<tool_call|>"}) as server:
        calls = by_api(server, "Rome?")
        assert calls == {api: [("weather", ROME)] for api in ("chat", "streamed", "responses", "messages", "ollama")}


OPEN_THOUGHTS = {
    "kimi_k3": {
        "Why?": "<|open|>think<|sep|>Hm.<|open|>response<|sep|>So.<|close|>response<|sep|><|close|>message<|sep|>",
        "Rome?": f"<|open|>think<|sep|>Hm.{WRITTEN['kimi_k3']('weather', ROME)}<|close|>message<|sep|>",
        "Closed?": "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>message<|sep|>",
    },
    "command_r": {
        "Why?": "<|START_THINKING|>Hm.<|START_RESPONSE|>So.<|END_RESPONSE|>",
        "Rome?": f"<|START_THINKING|>Hm.{WRITTEN['command_r']('weather', ROME)}",
        "Closed?": "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>So.<|END_RESPONSE|>",
    },
    "harmony": {
        "Why?": "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>So.<|return|>",
        "Rome?": f"<|channel|>analysis<|message|>Hm.{WRITTEN['harmony']('weather', ROME)}",
        "Closed?": HARMONY["Why?"],
    },
}
MORE = ("<|end_of_msg|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")


@pytest.mark.parametrize("form", OPEN_THOUGHTS)
def test_the_next_channel_ends_a_thought_that_is_not_closed(tmp_path: Path, form: str) -> None:
    more = MORE[:1] if form == "kimi_k3" else MORE[1:]
    with scripted_server(tmp_path, form, OPEN_THOUGHTS[form], plain=(), more=more) as server:
        assert by_api(server, "Rome?") == {
            api: [("weather", ROME)] for api in ("chat", "streamed", "responses", "messages", "ollama")
        }
        for question in ("Why?", "Closed?"):
            for fields in ({}, {"tools": []}, {"thinking_budget": 30}):
                message = post(server, chat(question, **fields))["choices"][0]["message"]
                assert (message["reasoning_content"], message["content"]) == ("Hm.", "So.")
            *chunks, _ = stream_events(server, CHAT, chat(question, stop="o."))
            texts = [each["delta"] for chunk in chunks for each in chunk["choices"]]
            assert "".join(each.get("reasoning_content", "") for each in texts) == "Hm."
            assert "".join(each.get("content", "") for each in texts) == "S"
            blocks = post(server, chat(question, tools=[], max_tokens=100), MESSAGES)["content"]
            assert [(block["type"], block.get("text")) for block in blocks] == [("thinking", None), ("text", "So.")]
            said = post(server, chat(question, stream=False), OLLAMA)["message"]
            assert (said["thinking"], said["content"]) == ("Hm.", "So.")


# -- earlier turns -----------------------------------------------------------------------------------------------------


def earlier(arguments: Any, call_id: str = "call_1", **fields: Any) -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call]} | fields,
        {"role": "tool", "tool_call_id": call_id, "content": "21 degrees"},
    ]


def prompt_of(server: RunningServer, messages: list[dict[str, Any]]) -> str:
    """What the model is shown of a conversation."""
    shown: list[str] = []
    tokenizer = server.core.served.tokenizer
    forward = server.core.runner.forward

    def watched(batch: Any, *args: Any) -> Any:
        for row in batch.rows:
            sequence = server.core.scheduler.sequences[row.sequence_id]
            shown.append(tokenizer.text_with_specials(sequence.token_ids[: sequence.num_prompt_tokens]))
        return forward(batch, *args)

    server.core.runner.forward = watched  # type: ignore[method-assign]
    try:
        post(server, chat("", messages=messages, max_tokens=1))
    finally:
        server.core.runner.forward = forward  # type: ignore[method-assign]
    return shown[-1]


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"city": "Rome"}', '{"city": "Rome"}'),
        ({"city": "Rome"}, '{"city": "Rome"}'),
        ("", "{}"),
        ("null", "{}"),
        (None, "{}"),
        ("{bad", '{"arguments": "{bad"}'),
        ("[1]", '{"arguments": "[1]"}'),
        ('{"city": "\\ud83d"}', '{"city": "\ufffd"}'),
        ('{"city": "\\ud83d\\ude00"}', '{"city": "\U0001f600"}'),
    ],
)
def test_arguments_of_earlier_calls_are_objects(server: RunningServer, arguments: Any, rendered: str) -> None:
    assert f'"arguments": {rendered}}}\n</tool_call>' in prompt_of(server, earlier(arguments))


def test_mistral_gets_ids_that_its_templates_take(tmp_path: Path) -> None:
    with scripted_server(tmp_path, "mistral", {"Rome?": WRITTEN["mistral"]("weather", ROME)}) as server:
        [call] = post(server, chat("Rome?"))["choices"][0]["message"]["tool_calls"]
        assert (len(call["id"]), call["id"].isalnum()) == (9, True)
    fit = FORMATS["mistral"].fit_id
    assert fit("abcdefghi", "weather", 0) == "abcdefghi"
    one, other = fit("call_0123456789abcdef", "weather", 0), fit("call_1", "weather", 0)
    assert fit("call_0123456789abcdef", "weather", 1) == one != other
    assert (len(other), other.isalnum()) == (9, True)


LATE = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Hello."},
    {"role": "system", "content": "In French."},
    {"role": "user", "content": "Rome?"},
]


def test_late_system_messages_are_shown_where_the_template_takes_none(tmp_path: Path) -> None:
    with scripted_server(tmp_path, "json_tools", {"Rome?": "Oui."}) as server:
        served = server.core.served
        assert served.tokenizer.takes_late_system
        served.tokenizer.takes_late_system = False
        shown = prompt_of(server, LATE)
        assert "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>" in shown
        assert "<|im_start|>user\n<system>\nIn French.\n</system>\nRome?<|im_end|>" in shown
        follow(server, {"Rome?": "Oui."})
        items = [{"type": "message", **message} for message in LATE]
        assert post(server, {"model": "scripted", "input": items}, RESPONSES)["status"] == "completed"


def test_tools_that_are_no_functions_are_ignored_beside_functions(server: RunningServer) -> None:
    function = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    other = {"type": "file_search", "vector_store_ids": ["x"]}
    body = {"model": "scripted", "input": "21 degrees", "tools": [function, {"type": "image_generation"}, other]}
    with raw(server) as client:
        answer = client.post(RESPONSES, json=body)
        alone = client.post(RESPONSES, json=body | {"tools": [other]})
    assert (answer.status_code, answer.headers["x-mlxpaged-ignored"]) == (
        200,
        "tools.image_generation, tools.file_search",
    )
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function"]
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "tools.0.type")
