"""Responses, as OpenAI's reference and its package define them. Errors have the form of its other APIs."""

from __future__ import annotations

import json
from typing import Any

from .case import PNG, SCHEMA, case, expect, fits_schema, long_text, same
from .openai import BAD, content, fits_usage, refusals, refused
from .target import COUNT, Fields, Reply, Target

TOOL: Fields = {"type": "function", "name": "set_light", "parameters": SCHEMA, "strict": True}
CHOICE: Fields = {"type": "function", "name": "set_light"}
FORCED: Fields = {"tools": [TOOL], "tool_choice": CHOICE, "max_output_tokens": 200}
FORMAT: Fields = {"format": {"type": "json_schema", "name": "light", "strict": True, "schema": SCHEMA}}
TEXT: Fields = {"type": "input_text", "text": COUNT}
IMAGE: Fields = {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{PNG}"}
PARTS: list[Fields] = [{"role": "user", "content": [TEXT]}]
SEES: list[Fields] = [{"role": "user", "content": [TEXT, IMAGE]}]


def items(answer: Any, kind: str) -> list[Any]:
    found = [item for item in answer["output"] if item["type"] == kind]
    expect(found, f"no {kind}: {answer['output']}")
    return found


def text_of(answer: Any) -> str:
    [message] = items(answer, "message")
    same("types of the content", {part["type"] for part in message["content"]}, {"output_text"})
    return "".join(part["text"] for part in message["content"])


def events(reply: Reply) -> list[Any]:
    """Their types are those of their data."""
    found = []
    for kind, data in reply.events:
        found.append(json.loads(data))
        same("type of an event", found[-1]["type"], kind)
    return found


@case("responses.form", "response object: id, object, created_at, status, output, error, incomplete_details")
def _(target: Target, reply: Reply) -> None:
    answer = reply.ok
    same("object", answer["object"], "response")
    expect(isinstance(answer["id"], str) and isinstance(answer["created_at"], int | float), reply.text)
    same("error", answer["error"], None)
    [message] = items(answer, "message")
    same("role", message["role"], "assistant")
    expect(message["id"] and text_of(answer), reply.text)
    fits_usage(answer["usage"], "input", "output")


@case("responses.same-answer", "input: one user message; temperature 0: the answer of chat/completions")
def _(target: Target, reply: Reply) -> None:
    target.require("chat")
    same("the answer", text_of(reply.ok), content(target.ask("chat")))


@case("responses.incomplete", "max_output_tokens; status; incomplete_details.reason", max_output_tokens=16)
def _(target: Target, reply: Reply) -> None:
    expect(reply.ok["usage"]["output_tokens"] <= 16, reply.ok["usage"])
    reason = (reply.ok.get("incomplete_details") or {}).get("reason")
    ended = reply.ok["usage"]["output_tokens"] < 16
    wanted = ("completed", None) if ended else ("incomplete", "max_output_tokens")
    same("status, reason", (reply.ok["status"], reason), wanted)


@case("responses.input-items", "input: an array of messages with input_text", input=PARTS)
def _(target: Target, reply: Reply) -> None:
    same("the answer", text_of(reply.ok), text_of(target.ask("responses").ok))


@case(
    "responses.instructions",
    "instructions: a system message",
    instructions="Be kind. Speak of the sea and of the wind.",
)
def _(target: Target, reply: Reply) -> None:
    short = target.ask("responses", instructions="Be kind.").ok
    expect(reply.ok["usage"]["input_tokens"] > short["usage"]["input_tokens"], "it is not in the prompt")


@case("responses.stream-order", "events: response.created first, response.completed last; sequence_number", stream=True)
def _(target: Target, reply: Reply) -> None:
    found = events(reply)
    same("the first event", found[0]["type"], "response.created")
    expect(found[-1]["type"] in ("response.completed", "response.incomplete"), f"the last event: {found[-1]['type']}")
    numbers = [event["sequence_number"] for event in found]
    expect(numbers == sorted(set(numbers)), f"sequence_number: {numbers}")


@case(
    "responses.stream-text", "events: response.output_text.delta, output_text.done, and the last response", stream=True
)
def _(target: Target, reply: Reply) -> None:
    found, whole = events(reply), target.ask("responses").ok
    joined = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    [done] = [event["text"] for event in found if event["type"] == "response.output_text.done"]
    texts = (joined, done, text_of(found[-1]["response"]))
    same("the text", texts, (text_of(whole),) * 3)
    same("usage", found[-1]["response"]["usage"]["output_tokens"], whole["usage"]["output_tokens"])


@case("responses.previous", "previous_response_id: the conversation goes on")
def _(target: Target, reply: Reply) -> None:
    usage = target.ask("responses", previous_response_id=reply.ok["id"]).ok["usage"]
    least = reply.ok["usage"]["input_tokens"] + reply.ok["usage"]["output_tokens"]
    expect(usage["input_tokens"] > least, f"{usage['input_tokens']} tokens after {least}")


@case("responses.retrieve", "GET and DELETE /responses/{response_id}")
def _(target: Target, reply: Reply) -> None:
    path = f"/v1/responses/{reply.ok['id']}"
    same("the stored output", target.send(path, None).ok["output"], reply.ok["output"])
    expect(target.send(path, None, "DELETE").status in (200, 204), "it is not deleted")
    refused(target.send(path, None), 404)


@case("responses.json-schema", "text.format json_schema with strict", text=FORMAT, max_output_tokens=100)
def _(target: Target, reply: Reply) -> None:
    fits_schema(json.loads(text_of(reply.ok)))


@case("responses.tool-forced", "tool_choice; function_call item: id, call_id, name, arguments", **FORCED)
def _(target: Target, reply: Reply) -> None:
    [call] = items(reply.ok, "function_call")
    expect(call["call_id"] and call["id"] and call["name"] == "set_light", call)
    fits_schema(json.loads(call["arguments"]))
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "The light is red."}
    after = target.ask("responses", input=[*PARTS, call, result], tools=[TOOL]).ok
    expect(after["usage"]["input_tokens"] > reply.ok["usage"]["input_tokens"], "the result is not in the prompt")


@case("responses.image", "input_image, for a model of text only", input=SEES)
def _(target: Target, reply: Reply) -> None:
    if reply.status == 200:  # a model that sees: the image has tokens
        expect(reply.ok["usage"]["input_tokens"] > target.ask("responses").ok["usage"]["input_tokens"], "it is dropped")
    else:
        refused(reply, *BAD)


@case("responses.too-long", "truncation is disabled by default: an input over the context is a BadRequestError")
def _(target: Target, reply: Reply) -> None:
    refused(target.ask("responses", input=long_text(target)), *BAD)


refusals(
    "responses",
    [
        ("unknown-model", "NotFoundError: the model does not exist", {"model": "no-such-model"}, (404,)),
        ("max-output-tokens-type", "max_output_tokens: integer", {"max_output_tokens": "many"}, BAD),
    ],
)
