"""Chat templates that take tools, or the calls of earlier turns, only in a form of their own."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.models.text.tokenizer import Tokenizer
from tests.api.helpers import post, raw
from tests.support import RunningServer

DEEPSEEK = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}{% endfor %}
{%- endfor %}"""
LLAMA = """{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('Only one call!') }}{% endif %}
<|python_tag|>{{ m.tool_calls[0].function | tojson }}{% endif %}{% endfor %}"""
GPT_OSS = """{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('Not both!') }}{% endif %}
<|channel|>analysis<|message|>{{ m.content or m.thinking }}
<|channel|>commentary<|message|>{{ m.tool_calls[0].function | tojson }}
{%- else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"""
R1_DISTILL = """{% for m in messages %}<{{ m.role }}>{% if m.content is none %}{% for c in m.tool_calls %}
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name }}{% endfor %}{% else %}{{ m.content }}
{%- endif %}{% endfor %}"""

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": {"type": "object"}}}
    for name in ("weather", "clock")
]


def call(call_id: str, name: str, city: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": f'{{"city": "{city}"}}'}}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


QUESTION = {"role": "user", "content": "How is it there?"}
CALLS: dict[str, Any] = {"role": "assistant", "content": None}
CALLS |= {"tool_calls": [call("a", "weather", "Rome"), call("b", "clock", "Oslo")]}


def prompt_of(
    monkeypatch: pytest.MonkeyPatch, server: RunningServer, template: str, messages: list[Any], tools: list[Any] = TOOLS
) -> str:
    """What a model with this chat template is shown."""
    wrapped = load_tokenizer(DEMO_PATH)
    wrapped.chat_template = template
    tokenizer, add = Tokenizer(wrapped), server.core.requests.add
    prompts: list[str] = []

    def watched(request: Any) -> Any:
        prompts.append(tokenizer.text_with_specials(request.prompt_token_ids))
        return add(request)

    monkeypatch.setattr(server.engine.info, "tokenizer", tokenizer)
    monkeypatch.setattr(server.core.requests, "add", watched)
    post(server, {"messages": messages, "max_tokens": 1, "tools": tools})
    return prompts[-1]


@pytest.mark.parametrize("template", [DEEPSEEK, LLAMA, GPT_OSS, R1_DISTILL])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_two_calls_and_their_results_are_shown(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer, template: str, order: str
) -> None:
    results = [result(each, {"a": "21 degrees", "b": "4 o'clock"}[each]) for each in order]
    again = {"role": "user", "content": "And now?"}
    shown = prompt_of(monkeypatch, demo_server, template, [QUESTION, CALLS, *results, again])
    one_call = template in (LLAMA, GPT_OSS)
    found = ["Rome", "21 degrees", "Oslo", "4 o'clock"] if one_call else ["Rome", "Oslo", "21 degrees", "4 o'clock"]
    places = [shown.find(text, shown.find("How is it there?")) for text in (*found, "And now?")]
    assert places == sorted(places), "results are in the order of their calls: without ids, nothing else tells"
    assert min(places) > 0


def test_gpt_oss_is_shown_a_thought_and_a_text_before_a_call(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer
) -> None:
    said = CALLS | {"content": "I will ask.", "reasoning_content": "Two cities."}
    messages = [QUESTION, said, result("a", "21 degrees"), result("b", "4 o'clock")]
    shown = prompt_of(monkeypatch, demo_server, GPT_OSS, messages)
    assert shown.count("<|channel|>analysis<|message|>Two cities.\n\nI will ask.") == 1
    assert shown.count("I will ask.") == 1


DESCRIBED = """<|tool_call>call:<tool_call|>{% for tool in tools %}{{ '// ' + tool.function.description }}
{%- for key in tool.function.parameters.properties.items() %}{{ key }}{% endfor %}{{ tool.function.name }}{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}"""


@pytest.mark.parametrize("fields", [{}, {"description": "A tool."}, {"parameters": {}}])
def test_tools_need_only_a_name(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer, fields: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "weather"} | fields}]
    shown = prompt_of(monkeypatch, demo_server, DESCRIBED, [QUESTION], tools)
    assert f"// {fields.get('description', '')}weather" in shown


LAST_SYSTEM = """{% for m in messages if m.role == 'system' %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}
{%- for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"""


def test_a_late_system_message_does_not_replace_the_first(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer
) -> None:
    """As in DeepSeek R1's template, and in those of its distills."""
    first, late = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
    messages = [first, QUESTION, {"role": "assistant", "content": "Warm."}, late, QUESTION]
    shown = prompt_of(monkeypatch, demo_server, LAST_SYSTEM, messages)
    assert "Be brief." in shown
    assert "<user><system>\nBe kind.\n</system>\nHow is it there?" in shown


MISTRAL = """{{ tools | tojson }}{% set ns = namespace(count=0) %}{% for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.count = ns.count + 1 %}{% endif %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function | tojson }}{% endfor %}{% endfor %}"""


def test_what_a_user_says_after_a_result_is_shown(monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer) -> None:
    """Claude Code puts reminders there."""
    reminder, more = {"role": "user", "content": "Be brief."}, {"role": "user", "content": "In French."}
    first = [QUESTION, more, CALLS, result("a", "21 degrees"), result("b", "4 o'clock"), reminder, more]
    answer = {"role": "assistant", "content": "Warm."}
    shown = prompt_of(monkeypatch, demo_server, MISTRAL, [*first, answer, reminder])
    assert "<user>How is it there?\nIn French.<assistant>" in shown
    assert "<tool>21 degrees<tool>4 o'clock\nBe brief.\nIn French.<assistant>Warm.<user>Be brief." in shown
    tolerant = MISTRAL.replace("{{ raise_exception('roles must alternate') }}", "")
    plain = prompt_of(monkeypatch, demo_server, tolerant, [*first, answer, reminder])
    assert "<tool>4 o'clock" in plain
    assert "<user>Be brief." in plain


GEMMA = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"""


def test_messages_are_tokenized_as_in_a_chat(monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer) -> None:
    system = {"role": "system", "content": "Be brief."}
    messages = [system, QUESTION, QUESTION]
    shown = prompt_of(monkeypatch, demo_server, GEMMA, messages, [])
    assert shown == "<user>Be brief.\n\nHow is it there?\nHow is it there?"
    with raw(demo_server) as client:
        response = client.post("/tokenize", json={"messages": messages})
    assert response.status_code == 200, response.text
    assert demo_server.engine.info.tokenizer.text_with_specials(response.json()["tokens"]) == shown


KIMI = """{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}
<|tool_call_begin|>{{ c.id }}{{ c.function.arguments }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"""


def test_kimi_is_shown_the_ids_that_it_writes(monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer) -> None:
    """It writes no other name of a tool, and copies an id that has none."""
    again = CALLS | {"tool_calls": [call("functions.clock:0", "clock", "Bonn")]}
    first = [QUESTION, CALLS, result("b", "4 o'clock"), result("a", "21 degrees")]
    shown = prompt_of(monkeypatch, demo_server, KIMI, [*first, again, result("functions.clock:0", "5 o'clock")])
    assert "begin|>functions.weather:0{'city': 'Rome'}" in shown
    assert "begin|>functions.clock:1{'city': 'Oslo'}" in shown
    assert "<tool>21 degreesfunctions.weather:0<tool>4 o'clockfunctions.clock:1<" in shown
    assert "begin|>functions.clock:2{'city': 'Bonn'}" in shown
    assert shown.endswith("<tool>5 o'clockfunctions.clock:2")


def test_kimi_is_shown_calls_that_a_client_gave_the_same_id(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer
) -> None:
    calls = CALLS | {"tool_calls": [call("x", "weather", "Rome"), call("x", "clock", "Oslo")]}
    results = [result("x", "21 degrees"), result("x", "4 o'clock")]
    shown = prompt_of(monkeypatch, demo_server, KIMI, [QUESTION, calls, *results])
    assert "begin|>functions.weather:0{'city': 'Rome'}" in shown
    assert "begin|>functions.clock:1{'city': 'Oslo'}" in shown
    assert shown.endswith("<tool>21 degreesfunctions.weather:0<tool>4 o'clockfunctions.clock:1")


LLAMA_3 = """{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls %}
{{- (m.reasoning_content or '') + '<|python_tag|>' + m.tool_calls[0].function | tojson }}
{%- else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("takes_turns", [False, True])
def test_what_is_said_before_a_call_is_shown(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer, takes_turns: bool
) -> None:
    """Templates that show the calls alone show it as a message of its own, unless they take turns."""
    refusing = MISTRAL.replace("{{ m.role }}>{{ m.content }}", "{{ m.role }}>{{ m.content if not m.tool_calls }}")
    said = CALLS | {"content": "I will ask.", "reasoning_content": "Two cities."}
    messages = [QUESTION, said, result("a", "21 degrees"), result("b", "4 o'clock")]
    shown = prompt_of(monkeypatch, demo_server, refusing if takes_turns else LLAMA_3, messages)
    assert ("<assistant>I will ask.Two cities.<|python_tag|>" in shown) is not takes_turns
    assert "Rome" in shown
    assert "4 o'clock" in shown


GREETING = {"role": "assistant", "content": "Good day."}
QWEN = """{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
{{- raise_exception('No user query found') }}{% endif %}{{ tools | tojson }}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (GEMMA, [GREETING, QUESTION], "<user><assistant>Good day.<user>How is it there?"),
        (GEMMA, [{"role": "system", "content": "Be brief."}, GREETING], "<user>Be brief.<assistant>Good day."),
        (QWEN, [{"role": "system", "content": "Greet."}], "<system>Greet.<user>"),
        (QWEN, [CALLS, result("a", "21 degrees"), result("b", "4 o'clock")], "<user><assistant><tool_call>"),
    ],
)
def test_the_user_need_not_speak_first(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer, template: str, messages: list[Any], expected: str
) -> None:
    """Clients that play roles begin with a greeting, and agents that run out of context keep no more than results."""
    assert expected in prompt_of(monkeypatch, demo_server, template, messages, TOOLS if template is QWEN else [])


PLAIN = """{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
TOOLS_WITH_USER = """{% if tools and (messages | rejectattr('role', 'equalto', 'system') | list | length == 0) %}
{{- raise_exception('no first user message') }}{% endif %}{% if tools %}<tools>{{ tools | tojson }}{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "tools", "expected"),
    [
        (QWEN, TOOLS, "<assistant>Good day.<user>How is it there?"),
        (PLAIN, [], "<assistant>Good day.<user>How is it there?"),
        (TOOLS_WITH_USER, [], "<assistant>Good day.<user>How is it there?"),
        (TOOLS_WITH_USER, TOOLS, "<user><assistant>Good day.<user>How is it there?"),
    ],
)
def test_a_greeting_is_shown_as_it_is_if_the_template_takes_it(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer, template: str, tools: list[Any], expected: str
) -> None:
    shown = prompt_of(monkeypatch, demo_server, template, [GREETING, QUESTION], tools)
    assert shown[shown.rfind("]") + 1 :] == expected


SMALL = """{% for m in messages[(messages[0].role == 'system') | int:] %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'assistant' and not m.content %}{{ raise_exception('empty') }}{% endif %}
{{- '<' + m.role + '>' + m.content }}{% endfor %}"""


def test_a_late_system_message_is_no_turn(monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer) -> None:
    """Mistral Small's template counts it as one."""
    first, late = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
    shown = prompt_of(monkeypatch, demo_server, SMALL, [first, QUESTION, GREETING, late, QUESTION], [])
    assert "<assistant>Good day.<user><system>\nBe kind.\n</system>\nHow is it there?" in shown


def test_an_answer_without_text_is_no_turn(monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer) -> None:
    """Clients keep one that the user has stopped."""
    empty = {"role": "assistant", "content": ""}
    system = {"role": "system", "content": "Be brief."}
    shown = prompt_of(monkeypatch, demo_server, SMALL, [system, QUESTION, empty, QUESTION], [])
    assert shown == "<system>Be brief.<user>How is it there?\nHow is it there?"
    shown = prompt_of(monkeypatch, demo_server, GEMMA, [QUESTION, empty, QUESTION], [])
    assert shown == "<user>How is it there?<assistant><user>How is it there?"


TYPED = """<|tool_call>call:<tool_call|>{% for tool in tools %}
{%- if 'city' in tool.function.parameters.get('required', []) %}city: {% endif %}
{%- for name, each in tool.function.parameters.properties.items() %}{{ name + ': ' + each.type }}
{%- if each.enum %}{{ ' = ' + each.default }}{% endif %}{% endfor %}{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% endfor %}"""


def test_a_template_that_cannot_write_a_schema_is_shown_less_of_it(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer
) -> None:
    level = {"type": "integer", "enum": [1, 2], "default": 1}
    properties = {"city": {"type": ["string", "null"]}, "level": level}
    schema = {"type": "object", "properties": properties, "required": None}
    tools = [{"type": "function", "function": {"name": "weather", "description": "A tool.", "parameters": schema}}]
    shown = prompt_of(monkeypatch, demo_server, TYPED, [QUESTION], tools)
    assert "city: stringlevel: integer = 1<user>" in shown


NEMO = """{{ tools | tojson }}{% for m in messages %}
{%- if m.role == 'user' and loop.previtem and loop.previtem.role == 'tool' %}
{{- raise_exception('no user after a result') }}{% endif %}{% if m.role != 'system' %}<{{ m.role }}>
{%- if m.role == 'user' and loop.last %}{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function | tojson }}{% endfor %}{% endif %}{% endfor %}"""


def test_a_system_message_is_shown_after_a_result(monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer) -> None:
    """Mistral Nemo's template shows it with what the user says last, if that comes last."""
    messages = [{"role": "system", "content": "Be brief."}, QUESTION]
    assert "<user>Be brief.\n\nHow is it there?" in prompt_of(monkeypatch, demo_server, NEMO, messages)
    after = [*messages, CALLS, result("a", "21 degrees"), result("b", "4 o'clock")]
    for more in ([], [QUESTION]):  # the template takes the second as part of the result
        assert "<user>Be brief.\n\nHow is it there?" in prompt_of(monkeypatch, demo_server, NEMO, [*after, *more])


def test_a_prompt_with_results_begins_with_the_prompt_before(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer
) -> None:
    """Or else all of a long conversation is computed again for each call."""
    system = {"role": "system", "content": "Be brief."}
    messages = [system, QUESTION, {"role": "assistant", "content": "Where?"}, {"role": "user", "content": "In Rome."}]
    asked = prompt_of(monkeypatch, demo_server, NEMO, messages)
    assert asked.endswith("<user>Be brief.\n\nIn Rome.")
    after = [*messages, CALLS, result("a", "21 degrees"), result("b", "4 o'clock")]
    assert prompt_of(monkeypatch, demo_server, NEMO, after).startswith(asked)


MINISTRAL = """{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{% if part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function | tojson }}{% endfor %}{% endfor %}"""
REASONING = """{% for m in messages %}<{{ m.role }}>{{ '<|think|>' + m.reasoning if m.reasoning }}{{ m.content }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("template", "expected"),
    [(MINISTRAL, "[THINK]Two cities.[/THINK]I will ask.[TOOL_CALLS]"), (REASONING, "<|think|>Two cities.I will ask.")],
)
def test_thoughts_are_shown_where_the_template_looks_for_them(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer, template: str, expected: str
) -> None:
    said = CALLS | {"content": "I will ask.", "reasoning_content": "Two cities."}
    messages = [QUESTION, said, result("a", "21 degrees"), result("b", "4 o'clock")]
    assert expected in prompt_of(monkeypatch, demo_server, template, messages)


def test_a_thought_without_an_answer_is_shown(monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer) -> None:
    """The user has stopped the model while it thought."""
    template = """{% for m in messages %}{% if not m.content or (m.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('refused') }}{% endif %}{% endfor %}"""
    stopped = {"role": "assistant", "content": "", "reasoning_content": "Two cities."}
    shown = prompt_of(monkeypatch, demo_server, template + MINISTRAL, [QUESTION, stopped, QUESTION], [])
    assert "<assistant>[THINK]Two cities.[/THINK]<user>" in shown


def test_what_a_user_says_in_place_of_results_is_shown(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer
) -> None:
    """Agents leave a call without a result if the user stops it."""
    stop = {"role": "user", "content": "Stop."}
    answer = {"role": "assistant", "content": "Well."}
    shown = prompt_of(monkeypatch, demo_server, MISTRAL, [QUESTION, CALLS, stop, answer, QUESTION])
    assert "<tool><tool>Stop.<assistant>Well.<user>How is it there?" in shown


HUNYUAN = """{{ '<tool_calls><tool_sep></tool_calls>' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if tools %}{{ m.tool_calls }}{% endif %}{% endfor %}"""


def test_calls_are_shown_without_tools(monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer) -> None:
    """Agents send none if they ask for a summary."""
    messages = [QUESTION, CALLS, result("a", "21 degrees"), result("b", "4 o'clock"), QUESTION]
    assert "'arguments': {'city': 'Rome'}" in prompt_of(monkeypatch, demo_server, HUNYUAN, messages)
    assert '"arguments": {"city": "Rome"}' in prompt_of(monkeypatch, demo_server, HUNYUAN, messages, [])
