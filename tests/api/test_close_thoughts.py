"""A model may end within its thought. With --close-thoughts, the thought is closed once, and the answer begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.helpers import raw, stream_events
from tests.scripted import END, scripted_server
from tests.support import RunningServer

CALL = '<tool_call>{"name": "say", "arguments": {}}</tool_call>'
SCRIPT = {
    "Ended?": f"<think>I think{END}It is so.",
    "Twice?": f"<think>I think{END}So <think>again{END}and more.",
    "Closed?": f"<think>I think</think>{END}It is so.",
    "Call?": f"<think>I call{CALL}{END}It is so.",
    "Plain?": f"It is{END} so.",
    "Open?<|im_end|>\n<|im_start|>assistant\n<think>\n": f"I think{END}It is so.",
}
SAY = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {}}}}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", SCRIPT, close_thoughts=True) as server:
        yield server


def post(server: RunningServer, path: str, **body: Any) -> Any:
    with raw(server) as http:
        response = http.post(path, json={"model": "scripted", "stream": False} | body)
    assert response.status_code == 200, response.text
    return response.json()


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize(
    ("question", "fields", "thought", "text"),
    [
        ("Ended?", {}, "I think", "It is so."),
        ("Ended?", {"temperature": 1, "seed": 3, "top_p": 0.9}, "I think", "It is so."),
        ("Ended?", {"thinking_budget": 500, "stop": "so"}, "I think", "It is "),
        ("Twice?", {}, "I think", "So <think>again"),
        ("Closed?", {}, "I think", ""),
        ("Plain?", {}, "", "It is"),
        ("Open?", {"chat_template_kwargs": {"always_think": True}}, "I think", "It is so."),
    ],
)
def test_an_end_in_the_first_thought_closes_it(
    server: RunningServer, question: str, fields: dict[str, Any], thought: str, text: str
) -> None:
    body = {"messages": asked(question), "n": 2} | fields
    answer = post(server, CHAT, **body)
    for choice in answer["choices"]:
        assert (choice["message"].get("reasoning_content", ""), choice["message"]["content"]) == (thought, text)
        assert choice["finish_reason"] == "stop"
    *chunks, _ = stream_events(server, CHAT, {"model": "scripted", **body})
    deltas = [each["delta"] for chunk in chunks for each in chunk["choices"] if each["index"] == 1]
    assert "".join(each.get("content", "") for each in deltas) == text


def test_every_api_has_the_answer_and_counts_its_tokens(server: RunningServer) -> None:
    """The closing tag is a token, in place of the end token."""
    count = len("I thinkIt is so.") + 3
    answer = post(server, CHAT, messages=asked("Ended?"))
    assert answer["usage"]["completion_tokens"] == count
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("I think") + 2
    response = post(server, "/v1/responses", input="Ended?")
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["usage"]["output_tokens"] == count
    message = post(server, "/v1/messages", messages=asked("Ended?"), max_tokens=100)
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert post(server, "/api/chat", messages=asked("Ended?"))["message"]["content"] == "It is so."
    assert post(server, "/api/generate", prompt="Ended?")["response"] == "It is so."


def test_a_call_in_a_thought_may_end_the_answer(server: RunningServer) -> None:
    [choice] = post(server, CHAT, messages=asked("Call?"), tools=[SAY])["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["say"]
    assert choice["message"]["reasoning_content"] == "I call"


def test_texts_to_continue_end_as_they_are(server: RunningServer) -> None:
    [choice] = post(server, "/v1/completions", prompt="Ended?", max_tokens=100)["choices"]
    assert choice["text"] == "<think>I think"


def test_without_the_flag_the_answer_ends(tmp_path: Path) -> None:
    with scripted_server(tmp_path, "json_tools", SCRIPT) as server:
        [choice] = post(server, CHAT, messages=asked("Ended?"))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
