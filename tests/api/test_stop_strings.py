"""Stop strings end the text of an answer. What the model thinks, calls or writes around them is no text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.helpers import post, raw, stream_events
from tests.scripted import SPELLED, scripted_server
from tests.support import RunningServer

CALL = '<tool_call>\n{"name": "say", "arguments": {"text": "A STOP B"}}\n</tool_call>'
SCRIPT = {
    "Thought?": "<think>I say STOP to it.</think>A B STOP C",
    "Blank lines?": "<think>First,\n\nsecond.\n\n</think>\n\nOne.\n\nTwo.",
    "Open?<|im_end|>\n<|im_start|>assistant\n<think>\n": "I say STOP to it.</think>A B STOP C",
    "Spelled?": f"<{SPELLED}think>I say STOP to it.<{SPELLED}/think>A B STOP C",
    "Across?": "<think>I say ST</think>OP and STOP.",
    "Call?": f"A ST{CALL}",
    "Call at first?": f"<think>STOP?</think>{CALL}",
    "After a call?": f"{CALL}OP STOP C",
    "No call?": "A <tool_call> is a tag STOP C",
    "JSON?": '<think>STOP?</think>{"a": "A STOP B"}',
    "Never?": "<think>STOP</think>A ST",
    "Two?": "<think>one two</think>A two B one C",
}
SAY = {
    "type": "function",
    "function": {"name": "say", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("stop"), "json_tools", SCRIPT, max_num_seqs=4) as server:
        yield server


HARMONY = {
    "Thought?": "<|channel|>analysis<|message|>The assistant says STOP.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>A assistant B STOP C<|return|>",
    "Call?": "<|channel|>commentary<|message|>I STOP<|end|><|start|>assistant<|channel|>commentary to=functions.say"
    '<|message|>{"text": "A STOP B"}<|call|>',
}


def body(question: str, stop: Any = "STOP", **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": question}], "stop": stop} | fields


def said(message: dict[str, Any]) -> tuple[str, str, list[str]]:
    calls = [each["function"]["arguments"] for each in message.get("tool_calls") or []]
    return message.get("reasoning_content") or "", message["content"] or "", calls


def streamed(server: RunningServer, request: dict[str, Any], choice: int = 0) -> tuple[str, str, list[str]]:
    thought, text, calls = "", "", dict[int, str]()
    *chunks, _ = stream_events(server, CHAT, request)
    for chunk in chunks:
        for each in chunk["choices"]:
            if each["index"] == choice:
                delta = each["delta"]
                thought += delta.get("reasoning_content") or ""
                text += delta.get("content") or ""
                for call in delta.get("tool_calls") or []:
                    calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
    return thought, text, list(calls.values())


CASES: list[tuple[str, Any, tuple[str, str, list[str]], dict[str, Any]]] = [
    ("Thought?", "STOP", ("I say STOP to it.", "A B ", []), {}),
    ("Thought?", ["to it", "B"], ("I say STOP to it.", "A ", []), {}),
    ("Thought?", ["</think>", "think"], ("I say STOP to it.", "A B STOP C", []), {}),
    ("Blank lines?", "\n\n", ("First,\n\nsecond.", "One.", []), {}),
    ("Open?", "STOP", ("I say STOP to it.", "A B ", []), {"chat_template_kwargs": {"always_think": True}}),
    ("Spelled?", "STOP", ("I say STOP to it.", "A B ", []), {}),
    ("Across?", "STOP", ("I say ST", "OP and ", []), {}),
    ("Call?", "STOP", ("", "A ST", ['{"text": "A STOP B"}']), {"tools": [SAY]}),
    ("Call at first?", ["STOP", "</tool_call>"], ("STOP?", "", ['{"text": "A STOP B"}']), {"tools": [SAY]}),
    ("After a call?", "STOP", ("", "OP ", ['{"text": "A STOP B"}']), {"tools": [SAY]}),
    ("No call?", "STOP", ("", "A <tool_call> is a tag ", []), {"tools": [SAY]}),
    ("No call?", "STOP", ("", "A <tool_call> is a tag ", []), {}),
    ("Never?", "STOP", ("STOP", "A ST", []), {}),
    ("Two?", ["one", "two"], ("one two", "A ", []), {}),
]


@pytest.mark.parametrize(("question", "stop", "expected", "fields"), CASES)
def test_a_stop_string_is_looked_for_in_the_text_alone(
    server: RunningServer, question: str, stop: Any, expected: tuple[str, str, list[str]], fields: dict[str, Any]
) -> None:
    request = body(question, stop, n=2, **fields)
    answer = post(server, request)
    for choice in answer["choices"]:
        assert said(choice["message"]) == expected
        assert choice["finish_reason"] == ("tool_calls" if expected[2] else "stop")
    assert [streamed(server, request, choice) for choice in (0, 1)] == [expected, expected]


def test_anthropic_and_ollama_name_the_same_text(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Thought?"}]
    asked = {"model": "scripted", "messages": messages, "max_tokens": 100, "stop_sequences": ["C", "STOP"]}
    with raw(server) as http:
        message = http.post("/v1/messages", json=asked).json()
        lines = http.post("/v1/messages", json=asked | {"stream": True}).text.splitlines()
        options = {"options": {"stop": ["STOP"]}, "stream": False}
        chat = http.post("/api/chat", json={"model": "scripted", "messages": messages} | options).json()
        generated = http.post("/api/generate", json={"model": "scripted", "prompt": "Thought?"} | options).json()
    assert [block.get("text", block.get("thinking")) for block in message["content"]] == ["I say STOP to it.", "A B "]
    [last] = [json.loads(line[6:]) for line in lines if line.startswith("data: ") and "message_delta" in line]
    for each in (message, last["delta"]):
        assert (each["stop_reason"], each["stop_sequence"]) == ("stop_sequence", "STOP")
    assert (chat["message"]["thinking"], chat["message"]["content"]) == ("I say STOP to it.", "A B ")
    assert (generated["thinking"], generated["response"], generated["done_reason"]) == (
        *("I say STOP to it.", "A B "),
        "stop",
    )


def test_completions_have_no_thoughts(server: RunningServer) -> None:
    with raw(server) as http:
        asked = {"model": "scripted", "prompt": "Thought?", "stop": "STOP", "max_tokens": 100}
        assert http.post("/v1/completions", json=asked).json()["choices"][0]["text"] == "<think>I say "


def test_enforced_text_is_text(server: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    request = body("JSON?", response_format=form)
    expected = ("STOP?", '{"a": "A ', [])
    assert said(post(server, request)["choices"][0]["message"]) == expected
    assert streamed(server, request) == expected


def test_min_tokens_hold_back_stop_strings_in_the_text(server: RunningServer) -> None:
    least = 2 + len("I say STOP to it.A B S")  # a token for each tag and for each character
    texts = [
        post(server, body("Thought?", min_tokens=count))["choices"][0]["message"]["content"]
        for count in (least, least + 1)
    ]
    assert texts == ["A B ", "A B STOP C"]


def test_log_probabilities_end_with_the_text(server: RunningServer) -> None:
    request = body("Thought?", logprobs=True)
    entries = post(server, request)["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in entries) == "<think>I say STOP to it.</think>A B "
    *chunks, _ = stream_events(server, CHAT, request)
    sent = [each for chunk in chunks for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert sent == entries


def test_headers_of_harmony_are_no_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    with scripted_server(tmp_path_factory.mktemp("harmony"), "harmony", HARMONY, plain=()) as server:
        for question, stop, expected, fields in (
            ("Thought?", "assistant", ("The assistant says STOP.", "A ", []), {}),
            ("Thought?", ["STOP", "final"], ("The assistant says STOP.", "A assistant B ", []), {}),
            (
                "Call?",
                ["commentary", "A STOP"],
                ("", "I STOP", ['{"text": "A STOP B"}']),
                {"tools": [SAY]},
            ),
            ("Call?", "STOP", ("", "I ", []), {"tools": [SAY]}),
        ):
            assert said(post(server, body(question, stop, **fields))["choices"][0]["message"]) == expected
            assert streamed(server, body(question, stop, **fields)) == expected
