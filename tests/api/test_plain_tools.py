"""Tools on a model whose chat template shows none: the demo model. They are described in the system message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from mlx_lm.utils import load_tokenizer
from openai import OpenAI

from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.models.text.tokenizer import Tokenizer
from tests.api.helpers import DEADLINE, ask, chat_tokens, post, raw, tokens_of
from tests.api.test_tools import streamed
from tests.scripted import follow
from tests.support import RunningServer

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Zürich"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather in a city.", "parameters": CITY}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "clock"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SAYS = {
    "Zürich?": f"I look.\n{CALL}",
    "21 degrees": "It is 21 degrees.",
    "King?": '<tool_call>\n{"name": "king", "arguments": {}}\n</tool_call>',
}
TOO_MANY: list[Any] = [
    {"type": "function", "function": {**WEATHER, "name": f"weather_{i}", "description": "It says what it does. " * 8}}
    for i in range(30)
]


@pytest.fixture
def scripted(demo_server: RunningServer) -> Iterator[OpenAI]:
    """The client of the demo model, which writes what the script says, letter by letter."""
    runner = demo_server.core.runner
    forward = runner.forward
    follow(demo_server, SAYS)
    with demo_server.client(timeout=DEADLINE) as client:
        yield client
    demo_server.wait_idle(DEADLINE)
    runner.forward = forward  # type: ignore[method-assign]
    demo_server.run(demo_server.engine.clear_cache()).result(DEADLINE)  # the model has not filled its blocks


def with_template(monkeypatch: pytest.MonkeyPatch, server: RunningServer, template: str) -> None:
    """Until the test ends, prompts are rendered by another chat template."""
    wrapped = load_tokenizer(DEMO_PATH)
    wrapped.chat_template = template
    monkeypatch.setattr(server.engine.info, "tokenizer", Tokenizer(wrapped))


def test_a_call_in_the_text_and_its_result_make_an_answer(scripted: OpenAI) -> None:
    body: dict[str, Any] = ask("Zürich?", tools=TOOLS)
    choice = scripted.chat.completions.create(**body).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    (call,) = choice.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Zürich"})
    written = streamed(scripted, body)
    assert (written["content"], "".join(written["calls"][0]["pieces"])) == ("I look.", call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    body["messages"] += [choice.message.model_dump(exclude_unset=True), result]
    second = scripted.chat.completions.create(**body)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is 21 degrees.", "stop")
    third = scripted.chat.completions.create(**ask("King?", tools=TOOLS)).choices[0]
    assert (third.message.content, third.message.tool_calls) == (SAYS["King?"], None)


def test_the_next_turn_finds_the_whole_call_in_the_prefix_cache(scripted: OpenAI) -> None:
    body: dict[str, Any] = ask("And in Zürich?", tools=TOOLS)
    first = scripted.chat.completions.create(**body)
    message = first.choices[0].message
    assert first.usage is not None
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"}
    body["messages"] += [message.model_dump(exclude_unset=True), result]
    usage = scripted.chat.completions.create(**body).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1


def test_tools_calls_and_results_are_text_in_the_prompt(demo_server: RunningServer) -> None:
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "weather", "arguments": f'{{"city":"{city}"}}'}}
        for i, city in enumerate(("Zürich", "Rome"))
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Both?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "21 degrees"},
        {"role": "tool", "tool_call_id": "1", "content": "30 degrees"},
        {"role": "user", "content": "And?"},
    ]
    system = f"""Be brief.

# Tools

You can call these tools. Each line is one tool in JSON: its name, what it does, and the JSON schema of its arguments.

{json.dumps(WEATHER, ensure_ascii=False)}
{{"name": "clock"}}

To call a tool, write its name and its arguments as JSON between two tags. Then end your answer:

<tool_call>
{{"name": "the tool's name", "arguments": {{"argument": "value"}}}}
</tool_call>

For several calls, write several such blocks. The next message has the results, each between <tool_response> and
</tool_response>. If you need no tool, answer without these tags."""
    results = "<tool_response>\n21 degrees\n</tool_response>\n<tool_response>\n30 degrees\n</tool_response>\nAnd?"
    shown = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Both?"},
        {"role": "assistant", "content": f"I look.\n{CALL}\n{CALL.replace('Zürich', 'Rome')}"},
        {"role": "user", "content": results},
    ]
    body = {"model": "demo", "messages": messages, "tools": TOOLS, "max_tokens": 1}
    assert post(demo_server, body)["usage"]["prompt_tokens"] == len(chat_tokens(demo_server, shown))
    shown[0]["content"] = "Be brief."
    for none in ({"tools": []}, {"tool_choice": "none"}):
        assert post(demo_server, body | none)["usage"]["prompt_tokens"] == len(chat_tokens(demo_server, shown))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call_is_made_by_a_model_that_never_saw_one(client: OpenAI, choice: Any) -> None:
    body: dict[str, Any] = ask("Who are you?", tools=TOOLS[:1], tool_choice=choice, parallel_tool_calls=False)
    message = client.chat.completions.create(**body).choices[0].message
    (call,) = message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)["city"] in ("Rome", "Zürich")) == ("weather", True)
    assert "".join(streamed(client, body)["calls"][0]["pieces"]) == call.function.arguments


def test_calls_over_the_other_apis(client: OpenAI, demo_server: RunningServer) -> None:
    response = client.responses.create(
        model="demo",
        input="Who are you?",
        tools=[{"type": "function", **WEATHER}],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )  # type: ignore[call-overload]
    assert [(item.type, item.name) for item in response.output] == [("function_call", "weather")]
    with Anthropic(base_url=demo_server.url, api_key="none", max_retries=0, timeout=DEADLINE) as anthropic:
        tool: Any = {"name": "weather", "input_schema": CITY}
        asked: Any = {"model": "demo", "messages": [{"role": "user", "content": "Who are you?"}], "tools": [tool]}
        forced = {"type": "tool", "name": "weather"}
        answer = anthropic.messages.create(**asked, max_tokens=200, tool_choice=forced)
        (block,) = answer.content
        assert block.type == "tool_use"
        assert block.input["city"] in ("Rome", "Zürich")
        num_tokens = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        assert anthropic.messages.count_tokens(**asked).input_tokens == num_tokens
        asked["messages"][0]["content"] = []
        assert anthropic.messages.count_tokens(**asked).input_tokens < num_tokens


def test_the_calls_of_strict_tools_fit_their_schema(scripted: OpenAI) -> None:
    """The script wants a city that the schema does not have."""
    other = {**CITY, "properties": {"city": {"enum": ["Oslo", "Rome"]}}}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": other, "strict": True}}]
    message = scripted.chat.completions.create(**ask("Zürich?", tools=tools)).choices[0].message
    (call,) = message.tool_calls or []
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


IGNORES = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + IGNORES


@pytest.mark.parametrize("template", [REFUSES, IGNORES])
def test_without_a_place_for_system_messages_the_user_tells_of_tools(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    with_template(monkeypatch, demo_server, template)
    told = "You are a clerk."
    body = ask("Who are you?", tools=TOOLS, max_tokens=5)
    system = body | {"messages": [{"role": "system", "content": told}, *body["messages"]]}
    by_user = ask(f"{told}\n\nWho are you?", tools=TOOLS, max_tokens=5)
    with raw(demo_server) as client:
        for given, same in ((system, by_user), (system | {"tools": []}, by_user | {"tools": []})):
            answers = [client.post("/v1/chat/completions", json=each) for each in (given, same)]
            assert [answer.headers.get("x-mlxpaged-ignored") for answer in answers] == [None, None]
            if not given["tools"]:  # the tools stand after the system message
                sizes = {answer.json()["usage"]["prompt_tokens"] for answer in answers}
                assert len(sizes) == 1
        clock = {"type": "function", "function": {"name": "clock"}}
        (choice,) = client.post("/v1/chat/completions", json=body | {"tool_choice": clock, "max_tokens": 99}).json()[
            "choices"
        ]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "clock"
        shown = client.get("/v1/models/demo").json()
    assert shown["capabilities"]["tools"]
    assert shown["tool_calls"]["shown_by"] == "user_message"


def test_a_conversation_that_begins_with_an_answer_gets_a_user_who_tells(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(monkeypatch, demo_server, REFUSES)
    messages = [{"role": role, "content": "x"} for role in ("system", "assistant", "user")]
    with raw(demo_server) as client:
        response = client.post("/v1/chat/completions", json=ask("x", max_tokens=1) | {"messages": messages})
    assert response.json()["usage"]["prompt_tokens"] == len(tokens_of(demo_server, "xxx"))


def test_tools_that_fill_half_of_the_context_are_ignored_by_name(demo_server: RunningServer) -> None:
    """As the first chat of Open WebUI sends them."""
    with raw(demo_server) as client:
        for tools, ignored in ((TOO_MANY, "tools"), (TOOLS, None)):
            response = client.post("/v1/chat/completions", json=ask("Who are you?", tools=tools, max_tokens=5))
            assert response.status_code == 200
            assert response.headers.get("x-mlxpaged-ignored") == ignored
        response = client.post("/v1/chat/completions", json=ask("x", tools=TOO_MANY, tool_choice="required"))
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("template", ["{{ messages }}{{ tools }}", "{{ messages }}{{ tools }}{{ tool_calls }}"])
def test_a_template_whose_calls_nothing_reads_shows_tools_as_text_too(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    with_template(monkeypatch, demo_server, template)
    body = ask("Who are you?", tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False)
    (call,) = post(demo_server, body)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"


def test_a_template_that_shows_calls_but_no_tools_has_the_tools_told_in_its_own_format(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSeek V3.1's does."""
    begin, end = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    call = "{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}"
    shown = f"{{% for c in m.tool_calls or [] %}}{begin}{call}{end}{{% endfor %}}"
    template = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{shown}{{% endfor %}}"
    with_template(monkeypatch, demo_server, template)
    prompts: list[str] = []
    tokenizer, add = demo_server.engine.info.tokenizer, demo_server.core.requests.add

    def watched(request: Any) -> Any:
        prompts.append(tokenizer.text_with_specials(request.prompt_token_ids))
        return add(request)

    monkeypatch.setattr(demo_server.core.requests, "add", watched)
    body = ask("Rome?", tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, max_tokens=100)
    message = post(demo_server, body)["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21 degrees"}
    post(
        demo_server, {**body, "messages": [*body["messages"], message, result], "max_tokens": 1, "tool_choice": "auto"}
    )
    first, second = prompts
    assert first.startswith("<system># Tools")
    assert f"{begin}the tool's name<｜tool▁sep｜>" in first
    assert "<tool_call>" not in first
    arguments = json.dumps(json.loads(message["tool_calls"][0]["function"]["arguments"]))
    assert second == f"{first}<assistant>{begin}weather<｜tool▁sep｜>{arguments}{end}<tool>21 degrees"
