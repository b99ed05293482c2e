"""Messages and count_tokens, as Anthropic's reference and its package define them."""

from __future__ import annotations

import json
from typing import Any

from .case import CASES, PNG, SCHEMA, Case, Check, before, case, expect, fits_schema, long_text, middle_word, same
from .openai import content
from .target import ABSENT, COUNT, USER, Fields, Reply, Target

TOOL: Fields = {"name": "set_light", "description": "Set a light", "input_schema": SCHEMA}
FORCED: Fields = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "set_light"}, "max_tokens": 200}
FORMAT: Fields = {"format": {"type": "json_schema", "schema": SCHEMA}}
IMAGE: Fields = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
SEES: list[Fields] = [{"role": "user", "content": [IMAGE, {"type": "text", "text": COUNT}]}]
PROMPT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def refused(reply: Reply, status: int, kind: str) -> None:
    """Whether the error has Anthropic's form."""
    expect(reply.status == status, f"status {reply.status}: {reply.text[:200]}")
    answer = reply.json
    same("type, error.type", (answer["type"], answer["error"]["type"]), ("error", kind))
    expect(isinstance(answer["error"]["message"], str) and answer["error"]["message"], reply.text)


def is_refused(status: int, kind: str) -> Check:
    return lambda _, reply: refused(reply, status, kind)


def blocks(answer: Any, kind: str) -> list[Any]:
    found = [block for block in answer["content"] if block["type"] == kind]
    expect(found, f"no block of {kind}: {answer['content']}")
    return found


def text_of(reply: Reply) -> str:
    return "".join(block["text"] for block in blocks(reply.ok, "text"))


def prompt_tokens(usage: Any) -> int:
    """What was computed, and what was cached."""
    return sum(usage.get(name) or 0 for name in PROMPT)


def events(reply: Reply, *kinds: str) -> list[Any]:
    """Of these types; without them, all but pings."""
    found = [(kind, json.loads(data)) for kind, data in reply.events]
    for kind, data in found:
        same("type of an event", data["type"], kind)
    return [data for kind, data in found if kind != "ping" and kind in (kinds or (kind,))]


@case("messages.form", "Message: id, type, role, content, model, stop_reason, stop_sequence, usage")
def _(target: Target, reply: Reply) -> None:
    answer = reply.ok
    same("type, role", (answer["type"], answer["role"]), ("message", "assistant"))
    expect(answer["id"] and answer["model"] and "stop_sequence" in answer and text_of(reply), reply.text)
    expect(prompt_tokens(answer["usage"]) > 0 and answer["usage"]["output_tokens"] > 0, answer["usage"])


@case("messages.same-answer", "one user message, temperature 0: the answer of chat/completions")
def _(target: Target, reply: Reply) -> None:
    target.require("chat")
    same("the answer", text_of(reply), content(target.ask("chat")))


@case("messages.max-tokens", "max_tokens; stop_reason max_tokens", max_tokens=3)
def _(target: Target, reply: Reply) -> None:
    answer = reply.ok
    same("stop_reason, output_tokens", (answer["stop_reason"], answer["usage"]["output_tokens"]), ("max_tokens", 3))


@case(
    "messages.stop-reason",
    "stop_reason: max_tokens if the maximum was reached, end_turn at a natural end",
    max_tokens=200,
)
def _(target: Target, reply: Reply) -> None:
    tokens, reason = reply.ok["usage"]["output_tokens"], reply.ok["stop_reason"]
    same(f"stop_reason after {tokens} of 200 tokens", reason, "max_tokens" if tokens == 200 else "end_turn")


@case("messages.max-tokens-0", "max_tokens: 0 fills the cache without generating a response", max_tokens=0)
def _(target: Target, reply: Reply) -> None:
    same("output_tokens", reply.ok["usage"]["output_tokens"], 0)


@case("messages.stop-sequence", "stop_sequences; stop_reason stop_sequence; stop_sequence has the one that was found")
def _(target: Target, reply: Reply) -> None:
    stop = middle_word(text_of(reply))
    stopped = target.ask("messages", stop_sequences=["never there", stop])
    same("reason, sequence", (stopped.ok["stop_reason"], stopped.ok["stop_sequence"]), ("stop_sequence", stop))
    same(f"the text before {stop!r}", text_of(stopped).rstrip(), before(text_of(reply), stop))


@case("messages.stop-stream", "message_delta: stop_reason and stop_sequence")
def _(target: Target, reply: Reply) -> None:
    stop = middle_word(text_of(reply))
    [last] = events(target.ask("messages", stop_sequences=[stop], stream=True), "message_delta")
    same("reason, sequence", (last["delta"]["stop_reason"], last["delta"]["stop_sequence"]), ("stop_sequence", stop))


@case(
    "messages.stream-order",
    "message_start, content_block_start, _delta, _stop, message_delta, message_stop",
    stream=True,
)
def _(target: Target, reply: Reply) -> None:
    kinds = list(dict.fromkeys(event["type"] for event in events(reply)))
    middle = [f"content_block_{name}" for name in ("start", "delta", "stop")]
    same("events", kinds, ["message_start", *middle, "message_delta", "message_stop"])


@case("messages.stream-text", "text_delta: the deltas are the answer; message_delta.usage", stream=True)
def _(target: Target, reply: Reply) -> None:
    deltas = [event["delta"] for event in events(reply, "content_block_delta")]
    text, whole = "".join(each["text"] for each in deltas if each["type"] == "text_delta"), target.ask("messages")
    same("the text", text, text_of(whole))
    [last] = events(reply, "message_delta")
    same("output_tokens", last["usage"]["output_tokens"], whole.ok["usage"]["output_tokens"])


@case("messages.system", "system: a string, or an array of text blocks", system="Be kind. Speak of the sea.")
def _(target: Target, reply: Reply) -> None:
    array = target.ask("messages", system=[{"type": "text", "text": "Be kind. Speak of the sea."}])
    same("the answer to blocks", text_of(array), text_of(reply))
    short = target.ask("messages", system="Be kind.").ok["usage"]
    expect(prompt_tokens(reply.ok["usage"]) > prompt_tokens(short), "it is not in the prompt")


@case("messages.json-schema", "output_config.format json_schema", output_config=FORMAT, max_tokens=100)
def _(target: Target, reply: Reply) -> None:
    fits_schema(json.loads(text_of(reply)))


@case("messages.tool-forced", "tool_choice tool; tool_use block: id, name, input; stop_reason tool_use", **FORCED)
def _(target: Target, reply: Reply) -> None:
    [call] = blocks(reply.ok, "tool_use")
    expect(call["id"] and call["name"] == "set_light", call)
    fits_schema(call["input"])
    same("stop_reason", reply.ok["stop_reason"], "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "The light is red."}
    turns = [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    after = target.ask("messages", messages=turns, tools=[TOOL])
    expect(prompt_tokens(after.ok["usage"]) > prompt_tokens(reply.ok["usage"]), "the result is not in the prompt")


@case("messages.tool-stream", "input_json_delta: the pieces of the input as JSON", **FORCED, stream=True)
def _(target: Target, reply: Reply) -> None:
    [start] = [event for event in events(reply, "content_block_start") if event["content_block"]["type"] == "tool_use"]
    same("the input at the start", start["content_block"]["input"], {})
    deltas = [event["delta"] for event in events(reply, "content_block_delta") if event["index"] == start["index"]]
    fits_schema(json.loads("".join(delta["partial_json"] for delta in deltas)))


@case("messages.image", "an image block, for a model of text only", messages=SEES)
def _(target: Target, reply: Reply) -> None:
    if reply.status == 200:  # a model that sees: the image has tokens
        expect(prompt_tokens(reply.ok["usage"]) > prompt_tokens(target.ask("messages").ok["usage"]), "it is dropped")
    else:
        refused(reply, 400, "invalid_request_error")


@case("messages.too-long", "an input over the context is an invalid_request_error")
def _(target: Target, reply: Reply) -> None:
    long = target.ask("messages", messages=[{"role": "user", "content": long_text(target)}])
    refused(long, 400, "invalid_request_error")


for name, why, fields in (
    ("no-max-tokens", "max_tokens is required", {"max_tokens": ABSENT}),
    ("empty-messages", "messages: at least one", {"messages": []}),
    ("max-tokens-type", "max_tokens: integer", {"max_tokens": "many"}),
):
    CASES.append(Case(f"messages.{name}", why, fields, is_refused(400, "invalid_request_error")))
UNKNOWN: Fields = {"model": "no-such-model"}
CASES.append(Case("messages.unknown-model", "404 not_found_error", UNKNOWN, is_refused(404, "not_found_error")))


@case("count_tokens.usage", "input_tokens: those that messages counts", system="Be kind.", tools=[TOOL])
def _(target: Target, reply: Reply) -> None:
    used = target.ask("messages", system="Be kind.", tools=[TOOL]).ok["usage"]
    same("input_tokens", reply.ok["input_tokens"], prompt_tokens(used))
