"""Chat templates that lose a part of a conversation, or show it in another place: what the server shows instead."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.responses.translation import messages_of
from tests.api.test_template_forms import CALLS, GPT_OSS, GREETING, QUESTION, call, prompt_of, result
from tests.support import RunningServer

AGAIN = {"role": "user", "content": "And now?"}


def test_gpt_oss_is_shown_a_text_before_a_call_after_its_answer(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer
) -> None:
    """Its template drops the thoughts before an answer. The text is none, for the user has read it."""
    drops = GPT_OSS.replace(
        "{%- if m.content and m.thinking %}",
        """{%- set later = namespace(answer=false) %}{% for each in messages[loop.index:] %}
        {%- if each.role == 'assistant' and not each.tool_calls %}{% set later.answer = true %}{% endif %}{% endfor %}
        {%- if m.content and m.thinking %}""",
    ).replace("{{ m.content or m.thinking }}", "{{ (m.content or m.thinking) if not later.answer }}")
    assert drops.count("later.answer") == 2
    said = CALLS | {"content": "I will ask.", "reasoning_content": "Two cities."}
    turn = [QUESTION, said, result("a", "21 degrees"), result("b", "4 o'clock")]
    now = prompt_of(monkeypatch, demo_server, drops, turn)
    assert "<|channel|>analysis<|message|>Two cities.\n\nI will ask." in now
    later = prompt_of(monkeypatch, demo_server, drops, [*turn, GREETING, AGAIN])
    assert "<assistant>I will ask.<|channel|>analysis" in later
    assert "Two cities." not in later


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ("", ["Rome Oslo", "Stopped."]),
        ("a", ["Stopped. Rome Oslo", "21 degrees"]),
        ("b", ["Stopped. Rome Oslo", "4 o'clock"]),
        ("ba", ["Stopped. Rome Oslo", "4 o'clock", "21 degrees"]),
    ],
)
def test_what_is_said_after_stopped_calls_comes_after_them(results: str, expected: list[str]) -> None:
    """In the responses API, where the items of an answer follow each other. With results, they belong to one answer."""
    items: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": each["id"], **each["function"]}
        for each in (call("a", "weather", "Rome"), call("b", "clock", "Oslo"))
    ]
    items.append({"role": "assistant", "content": "Stopped."})
    texts = {"a": "21 degrees", "b": "4 o'clock"}
    items += [{"type": "function_call_output", "call_id": each, "output": texts[each]} for each in results]
    body = ResponseRequest.model_validate({"model": "demo", "input": [QUESTION, *items, AGAIN]})
    shown = [
        " ".join(
            filter(None, (each["content"], *(c["function"]["arguments"]["city"] for c in each.get("tool_calls", ()))))
        )
        for each in messages_of(None, body.items)
    ]
    assert shown == [QUESTION["content"], *expected, AGAIN["content"]]
