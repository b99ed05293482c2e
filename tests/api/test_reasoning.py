"""Thinking apart from the answer, over chat completions, with the official client, on a model that really thinks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.api.helpers import DEADLINE, raw, side_by_side, stream_events
from tests.api.test_tools import CALL, ROME, question, streamed
from tests.support import RunningServer

THOUGHT = "They ask for 2 < 3. Simple."
SCRIPT = {
    "Why?": f"<think>\n{THOUGHT}\n</think>\n\nBecause.",
    "Rome?": f"<think>I need the weather.</think>\n{CALL}",
    "Long?": f"<think>{'so ' * 90}</think>Yes.",
    "<think>\n\n</think>": "At once.",
    "Always?<|im_end|>\n<|im_start|>assistant\n<think>\n": f"{THOUGHT}</think>Done.",
    "<think>I wonder": " a little.</think>Done.",
    "<think>I\nwonder": " a little.</think>Done.",
    "The answer is": " 42.",
    "Whole?": "It is so.",
}


def ask(client: OpenAI, text: str | list[Any], **extra: Any) -> tuple[str, str, int]:
    """(thinking, answer, completion tokens), the same whole and streamed."""
    body = question("", tools=[], extra_body=extra)
    body["messages"] = text if isinstance(text, list) else [{"role": "user", "content": text}]
    answer, got = side_by_side(lambda: client.chat.completions.create(**body), lambda: streamed(client, body))
    message = answer.choices[0].message
    thinking = getattr(message, "reasoning_content", "")
    assert (got["reasoning_content"], got["content"]) == (thinking, message.content)
    assert answer.usage is not None
    return thinking, message.content or "", answer.usage.completion_tokens


def test_thinking_is_in_a_field_of_its_own(client: OpenAI) -> None:
    assert ask(client, "Why?")[:2] == (THOUGHT, "Because.")


def test_every_api_counts_the_tokens_of_the_thinking(server: RunningServer) -> None:
    """A token for each tag and each byte. The answers to a request are counted together."""
    expected = len(f"\n{THOUGHT}\n") + 2

    def asked(text: str, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"model": "scripted", "max_tokens": 100, "messages": messages} | fields

    def usage(path: str, body: dict[str, Any]) -> Any:
        with raw(server) as http:
            return http.post(path, json=body).json()["usage"]

    chat, messages = "/v1/chat/completions", "/v1/messages"
    for text, fields, count in (
        ("Why?", {}, expected),
        ("Why?", {"stop": ["aus", "Simple"]}, expected),
        ("Why?", {"max_tokens": 10}, 10),
        ("Why?", {"n": 3}, 3 * expected),
        ("Whole?", {}, 0),
    ):
        assert usage(chat, asked(text, **fields))["completion_tokens_details"] == {"reasoning_tokens": count}
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        *chunks, _ = stream_events(server, chat, asked(text, **fields, **options))
        so_far = [each["usage"]["completion_tokens_details"]["reasoning_tokens"] for each in chunks]
        assert so_far == sorted(so_far)
        assert so_far[-1] == count
    assert usage("/v1/responses", {"model": "scripted", "input": "Why?"})["output_tokens_details"] == {
        "reasoning_tokens": expected
    }
    assert usage(messages, asked("Why?"))["output_tokens_details"] == {"thinking_tokens": expected}
    with raw(server) as http:
        events = http.post(messages, json=asked("Why?", stream=True)).text
        assert f'"output_tokens_details":{{"thinking_tokens":{expected}}}' in events.rpartition("message_delta")[2]
    assert "completion_tokens_details" not in usage("/v1/completions", {"model": "scripted", "prompt": "Why?"})


def test_an_answer_that_ends_in_thought_has_no_text(client: OpenAI) -> None:
    assert ask(client, "Why?", max_tokens=10) == (THOUGHT[:8], "", 10)


def test_thinking_before_a_call(client: OpenAI) -> None:
    message = streamed(client, question("Rome?"))
    assert (message["reasoning_content"], message["content"]) == ("I need the weather.", "")
    assert "".join(message["calls"][0]["pieces"]) == ROME
    assert message["finish_reason"] == "tool_calls"


def test_the_template_may_forbid_or_open_the_block(client: OpenAI) -> None:
    assert ask(client, "Why?", chat_template_kwargs={"enable_thinking": False})[:2] == ("", "At once.")
    assert ask(client, "Always?", chat_template_kwargs={"always_think": True})[:2] == (THOUGHT, "Done.")


def test_the_last_message_is_continued(client: OpenAI) -> None:
    asked = {"role": "user", "content": "And?"}
    for content, expected in (("The answer is", ("", " 42.")), ("<think>I wonder", (" a little.", "Done."))):
        messages = [asked, {"role": "assistant", "content": content}]
        assert ask(client, messages, continue_final_message=True)[:2] == expected


def test_a_thought_in_two_messages_is_continued(
    client: OpenAI, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates that take turns are shown one."""
    tokenizer = server.core.served.tokenizer
    monkeypatch.setattr(tokenizer, "form", dataclasses.replace(tokenizer.form, takes_turns=True))
    said = [{"role": "assistant", "content": content} for content in ("<think>I", "wonder")]
    messages = [{"role": "user", "content": "And?"}, *said]
    assert ask(client, messages, continue_final_message=True)[:2] == (" a little.", "Done.")


@pytest.mark.parametrize("said", ["", "Well,"])
@pytest.mark.parametrize("fields", [{"continue_final_message": True}, {"prefix": True}])
def test_a_message_that_is_a_whole_thought_is_continued(client: OpenAI, said: str, fields: dict[str, Any]) -> None:
    """The template takes the thought out of the text."""
    content = f"<think>I answer directly.</think>{said}"
    prefix = {"prefix": fields.pop("prefix")} if "prefix" in fields else {}
    messages = [{"role": "user", "content": "Whole?"}, {"role": "assistant", "content": content} | prefix]
    assert ask(client, messages, **fields)[:2] == ("", "It is so.")


def test_thoughts_go_back_into_the_template(client: OpenAI) -> None:
    def size(**fields: Any) -> int:
        messages: list[Any] = [{"role": "assistant", "content": "x"} | fields, {"role": "user", "content": "Why?"}]
        usage = client.chat.completions.create(model="scripted", messages=messages).usage
        assert usage is not None
        return usage.prompt_tokens

    assert size(reasoning_content="12345") == size() + len("\n12345\n\n") + 2


@pytest.mark.parametrize(("field", "limit"), [("thinking_budget", 30), ("reasoning_effort", 256)])
def test_a_budget_closes_the_block(client: OpenAI, field: str, limit: int) -> None:
    thinking, _, _ = ask(client, "Long?", **{field: "minimal" if limit == 256 else limit})
    assert thinking == ("so " * 90)[:limit].rstrip()
    assert ask(client, "Why?", **{field: "high" if limit == 256 else 1000})[0] == THOUGHT


@pytest.mark.parametrize("text", ["Why?", "Always?"])
def test_without_a_switch_the_thought_is_closed_at_once(
    client: OpenAI, server: RunningServer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    assert server.engine.info is not None
    monkeypatch.setattr(server.engine.info.tokenizer, "thinking_switch", None)
    kwargs = {"chat_template_kwargs": {"always_think": text == "Always?"}}
    for fields in ({"reasoning_effort": "none"}, {"enable_thinking": False}, {"thinking": {"type": "disabled"}}):
        assert ask(client, text, **kwargs, **fields)[0] == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"thinking_budget": 0}, "thinking_budget"),
        ({"thinking_budget": 5, "reasoning_effort": "low"}, "thinking_budget"),
        ({"thinking_budget": 5, "logprobs": True}, "logprobs"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "reasoning_effort"),
    ],
)
def test_what_cannot_be_had_is_refused(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**question("Why?", extra_body=fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_effort": "none"}, None),
        ({"thinking_budget": 5}, "thinking_budget"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}}, None),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"enable_thinking": True}, "chat_template_kwargs.enable_thinking"),
        ({"enable_thinking": False}, None),
    ],
)
def test_a_model_that_does_not_think_answers_and_says_so(
    demo_server: RunningServer, fields: dict[str, Any], named: str | None
) -> None:
    body = question("Why?", model="demo", tools=[], max_tokens=2)
    with demo_server.client(timeout=DEADLINE) as client:
        answer = client.chat.completions.with_raw_response.create(**body, extra_body=fields)
    assert answer.headers.get("x-mlxpaged-ignored") == named
