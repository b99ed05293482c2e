"""What coding agents add to the Messages API: late system messages, deferred tools, effort, thinking that is not shown,
and errors that they read."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, beta_tool

from mlxpaged.api.anthropic.schema import MessagesRequest
from mlxpaged.api.anthropic.translation import EFFORT_TOKENS, translate
from mlxpaged.api.generation.request import Chat
from tests.api.helpers import DEADLINE, raw
from tests.api.test_anthropic import THOUGHT, body, both_ways
from tests.scripted import TEMPLATE, scripted_server
from tests.support import RunningServer

SCRIPT = {
    "Rome?": f"<think>\n{THOUGHT}\n</think>\nIt is 21 degrees.",
    "Long?": f"<think>{'so ' * 60}</think>Yes.",
    "Title?": '{"title": "Rome"}',
    "Call?": '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
    "Forecast?": '<tool_call>\n{"name": "forecast", "arguments": {"city": "Rome"}}\n</tool_call>',
    "sunny in Rome": "Take a hat.",
    "Hello": "Hello.",
}
TOOLS: list[Any] = [
    {"name": "search", "input_schema": {"type": "object"}},
    {"name": "weather", "input_schema": {"type": "object"}, "defer_loading": True},
]
USER: Any = {"role": "user", "content": "Hello"}


@pytest.fixture
def client(server: RunningServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
        yield client
    server.wait_idle(DEADLINE)


def prompt_of(client: Anthropic, server: RunningServer, **fields: Any) -> str:
    """The text that the model was shown."""
    prompts: list[Any] = []
    engine = server.engine
    submit = engine.submit
    engine.submit = lambda requests, *rest: (prompts.extend(requests), submit(requests, *rest))[1]  # type: ignore[method-assign]
    try:
        client.messages.create(**{"model": "scripted", "max_tokens": 1, "messages": [USER]} | fields)
    finally:
        engine.submit = submit  # type: ignore[method-assign]
    assert engine.info is not None
    return engine.info.tokenizer.text_with_specials(prompts[0].prompt_token_ids)


def test_a_system_message_between_the_turns_is_shown_where_it_stands(client: Anthropic, server: RunningServer) -> None:
    messages = [USER, {"role": "system", "content": [{"type": "text", "text": "Use French."}]}]
    prompt = prompt_of(client, server, messages=messages, system="Be brief.")
    assert "user\nHello<|im_end|>\n<|im_start|>system\nUse French.<|im_end|>\n<|im_start|>assistant" in prompt


def test_a_template_that_refuses_it_gets_it_in_the_users_turn(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "{% if message.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    loop = "{%- for message in messages %}"
    monkeypatch.setattr("tests.scripted.TEMPLATE", TEMPLATE.replace(loop, loop + refusal))
    with (
        scripted_server(tmp_path, "json_tools", SCRIPT) as server,
        Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE) as client,
    ):
        messages = [USER, {"role": "system", "content": "Use French."}]
        prompt = prompt_of(client, server, messages=messages, system="Be brief.")
    assert "user\nHello\n<system>\nUse French.\n</system><|im_end|>" in prompt


def test_the_billing_header_is_not_for_the_model(client: Anthropic, server: RunningServer) -> None:
    texts = ["x-anthropic-billing-header: cc_version=1; cc_entrypoint=cli;", "Be brief."]
    prompt = prompt_of(client, server, system=[{"type": "text", "text": text} for text in texts])
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_a_deferred_tool_is_unknown_until_a_result_refers_to_it(client: Anthropic, server: RunningServer) -> None:
    prompt = prompt_of(client, server, tools=TOOLS)
    assert '"search"' in prompt
    assert '"weather"' not in prompt
    unknown = both_ways(client, body("Call?", tools=TOOLS))
    assert unknown.stop_reason == "end_turn"
    use = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "weather"}]}
    messages: list[Any] = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
    prompt = prompt_of(client, server, tools=TOOLS, messages=messages)
    assert '"weather"' in prompt
    assert "tool\nThe tool weather can be called now.<|im_end|>" in prompt
    messages.append({"role": "user", "content": "Call?"})
    assert both_ways(client, body("", messages=messages, tools=TOOLS)).stop_reason == "tool_use"
    found["content"] = [{"type": "tool_reference", "tool_name": "clock"}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.2\.content\.0\.content: .*'clock'"):
        client.messages.create(**body("", messages=messages, tools=TOOLS))


def test_thinking_that_is_omitted_comes_back_in_its_signature(client: Anthropic, server: RunningServer) -> None:
    message = both_ways(client, body("Rome?", thinking={"type": "adaptive", "display": "omitted"}))
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, text.text.strip()) == ("thinking", "", "It is 21 degrees.")
    assert thinking.signature
    turns = [{"role": "user", "content": "Rome?"}, {"role": "assistant", "content": message.to_dict()["content"]}, USER]
    assert f"<think>\n{THOUGHT}" in prompt_of(client, server, messages=turns)
    for foreign in ("EqQBCkYIBxgCKkDs", "thinking:no base64", "thinking:/w=="):
        turns[1]["content"][0]["signature"] = foreign
        assert "<think>" not in prompt_of(client, server, messages=turns)
    shown = prompt_of(client, server, messages=turns)
    turns[1]["content"][0] = {"type": "redacted_thinking", "data": "EmwKAhgB"}  # a conversation that began elsewhere
    assert prompt_of(client, server, messages=turns) == shown


def test_effort_limits_the_thinking_and_nothing_else(client: Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EFFORT_TOKENS["low"] < EFFORT_TOKENS["medium"]
    monkeypatch.setitem(EFFORT_TOKENS, "low", 50)

    def thought(**fields: Any) -> int:
        return len(both_ways(client, body("Long?", **fields)).content[0].thinking)

    assert thought(output_config={"effort": "low"}) == 50
    assert thought(output_config={"effort": "high"}) == thought(output_config={"effort": "max"}) == thought() == 179
    for budget, shown in ((20, 20), (100, 50)):
        thinking = {"type": "enabled", "budget_tokens": budget}
        assert thought(thinking=thinking, output_config={"effort": "low"}) == shown


@pytest.mark.parametrize(
    ("thinks", "thinking", "effort"),
    [(True, None, "xhigh"), (True, {"type": "disabled"}, None), (False, {"type": "adaptive"}, None)],
)
def test_templates_that_know_an_effort_get_it(thinks: bool, thinking: Any, effort: str | None) -> None:
    """gpt-oss writes "medium" otherwise."""
    fields = {"output_config": {"effort": "xhigh"}} | ({} if thinking is None else {"thinking": thinking})
    request = MessagesRequest.model_validate(body("Why?", **fields))
    tokenizer: Any = SimpleNamespace(tags=SimpleNamespace(thinks=thinks))
    chat = translate(request, tokenizer).prompt
    assert isinstance(chat, Chat)
    assert chat.effort == effort


def test_a_model_that_does_not_think_takes_any_effort(demo_server: RunningServer) -> None:
    with Anthropic(base_url=demo_server.url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
        fields: Any = {"output_config": {"effort": "low"}, "thinking": {"type": "adaptive", "display": "omitted"}}
        message = client.messages.create(model="demo", max_tokens=9, messages=[USER], **fields)
    assert [block.type for block in message.content] == ["text"]


def test_a_format_is_enforced_and_its_schema_refused_by_its_name(client: Anthropic) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    config = {"output_config": {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}}
    (block,) = both_ways(client, body("Title?", **config)).content
    assert block.text == '{"title": "Rome"}'
    schema["properties"] = {"title": {"type": "no such"}}
    config["output_config"]["format"]["schema"] = schema
    older = {"extra_body": {"output_format": config["output_config"]["format"]}}  # in Anthropic's packages of 2025
    for fields in (config, older):
        with pytest.raises(anthropic.BadRequestError, match=r"message': 'output_config\.format\.schema: "):
            client.messages.create(**body("Title?", **fields))


def test_the_beta_client_may_ask_for_its_edits(client: Anthropic) -> None:
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    fields = body("Hello", context_management=edits, betas=["context-management-2025-06-27"])
    assert client.beta.messages.create(**fields).stop_reason == "end_turn"
    edits["edits"][0]["type"] = "clear_tool_uses_20250919"
    response = client.beta.messages.with_raw_response.create(**fields)
    assert response.headers["x-mlxpaged-ignored"] == "context_management"


def test_what_is_too_long_is_said_in_anthropics_words(client: Anthropic) -> None:
    """Claude Code reads the numbers, and asks again with a shorter conversation."""
    assert client.messages.create(**body("Hello", max_tokens=32_000)).stop_reason == "end_turn"
    for size in (8200, 300_000):  # counted; refused before it is tokenized
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8192 maximum"):
            client.messages.create(**body("x" * size))


TURNS = """{%- set ns = namespace(index=0) %}{% for message in messages if message.role in ('user', 'assistant') %}
{%- if not message.tool_calls %}{% if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"""


def test_a_template_that_takes_turns_only_gets_what_agents_say_in_a_row(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Mistral's. Agents add texts to the results of tools, and send several messages of the user in a row."""
    monkeypatch.setattr("tests.scripted.TEMPLATE", TURNS + TEMPLATE)
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "21 degrees"}
    reminder = {"type": "text", "text": "Use the list."}
    said = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]
    messages = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result, reminder]}]
    with (
        scripted_server(tmp_path, "json_tools", SCRIPT) as server,
        Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE) as client,
        raw(server) as http,
    ):
        prompt = prompt_of(client, server, messages=[*messages, *said, USER], tools=TOOLS)
        counts = [
            http.post("/v1/responses/input_tokens", json={"input": given}).json()["input_tokens"]
            for given in ([USER, {"role": "user", "content": "Go on."}], "Hello\nGo on.")
        ]
    assert "tool\n21 degrees\nUse the list.<|im_end|>\n<|im_start|>assistant\nOne.\nTwo.<|im_end|>" in prompt
    assert counts[0] == counts[1]


@beta_tool
def forecast(city: str) -> str:
    """The weather of tomorrow."""
    return f"sunny in {city}"


@pytest.mark.parametrize("stream", [False, True])
def test_the_packages_tool_runner_goes_on_without_a_thread(client: Anthropic, stream: bool) -> None:
    asked: list[Any] = [{"role": "user", "content": "Forecast?"}]
    fields: dict[str, Any] = {"model": "scripted", "max_tokens": 200, "messages": asked, "tools": [forecast]}
    runner = client.beta.messages.tool_runner(**fields, stream=stream)
    assert runner.until_done().content[0].text == "Take a hat."  # type: ignore[union-attr]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_thread_is_refused_in_the_words_that_clients_read(
    server: RunningServer, path: str, thread: dict[str, str]
) -> None:
    fields = body("Hello") | {"thread": thread}
    with raw(server) as http:
        answer = http.post(path, json=fields)
        assert http.post(path, json=fields | {"thread": None}).status_code == 200
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "send all messages" in error["message"]
