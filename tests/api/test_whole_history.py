"""Chat templates that lose a part of a conversation, or show it in another place: what the server shows instead."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.responses.translation import messages_of
from tests.api.test_template_forms import CALLS, GPT_OSS, GREETING, QUESTION, call, prompt_of, result
from tests.support import RunningServer

SYSTEM = {"role": "system", "content": "Be brief."}
LATE = {"role": "system", "content": "Be kind."}
AGAIN = {"role": "user", "content": "And now?"}

FIRST_OF_ALL = """{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_late_system_message_stays_in_its_place(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer, role: str
) -> None:
    """DeepSeek's templates show all of them at the beginning. Then none of the prompt is in the prefix cache."""
    before = [SYSTEM, QUESTION, GREETING]
    shown = prompt_of(monkeypatch, demo_server, FIRST_OF_ALL, [*before, LATE | {"role": role}, AGAIN], [])
    assert shown.startswith(prompt_of(monkeypatch, demo_server, FIRST_OF_ALL, before, []))
    assert shown.endswith("<user><system>\nBe kind.\n</system>\nAnd now?")


LISTS_TOOLS = """{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}{% endfor %}"""


def test_a_template_that_needs_a_list_of_tools_gets_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer
) -> None:
    """As in Hermes 2 Pro's for tools, and in vLLM's of FunctionGemma."""
    shown = prompt_of(monkeypatch, demo_server, LISTS_TOOLS, [SYSTEM, QUESTION], [])
    assert shown == "<system>Be brief.<user>How is it there?"
    assert prompt_of(monkeypatch, demo_server, LISTS_TOOLS, [QUESTION]).startswith('{"type": "function"')


NO_TOOLS = """{% if tools %}{{ tools | map(attribute='function') | tojson }}{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}{% endfor %}"""


def test_a_template_that_fails_with_any_tools_is_shown_them_as_text(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer
) -> None:
    """As llama.cpp's of DeepSeek R1: its own Jinja takes more than that of Python."""
    shown = prompt_of(monkeypatch, demo_server, NO_TOOLS, [SYSTEM, QUESTION])
    assert shown.startswith("<system>Be brief.\n\n# Tools")
    assert '{"name": "weather", ' in shown


NO_RESULTS = """{{ tools | tojson }}{{ '<tool_call></tool_call>' }}{% for m in messages %}
{%- if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("shows_calls", [True, False])
def test_results_that_a_template_drops_are_shown_as_text(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer, shows_calls: bool
) -> None:
    """As vLLM's template of GLM-4 does."""
    template = NO_RESULTS.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}") if shows_calls else NO_RESULTS
    messages = [QUESTION, CALLS, result("a", "21 degrees"), result("b", "4 o'clock"), AGAIN]
    shown = prompt_of(monkeypatch, demo_server, template, messages)
    assert [shown.count(text) for text in ("Rome", "Oslo", "21 degrees", "4 o'clock")] == [1, 1, 1, 1]
    assert shown.rfind("Oslo") < shown.rfind("21 degrees") < shown.rfind("4 o'clock") < shown.rfind("And now?")


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
