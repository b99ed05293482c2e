"""Chat completions, completions, embeddings and models, as OpenAI's reference and its package define them."""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
from typing import Any
from urllib.parse import quote

from .case import CASES, PNG, SCHEMA, Case, Check, before, case, expect, fits_schema, long_text, middle_word, same
from .target import ABSENT, COUNT, USER, Fields, Reply, Target

SYSTEM: Fields = {"role": "system", "content": "Be kind. Speak of the sea and of the wind."}
SAMPLED: Fields = {"temperature": 1, "seed": 7}
FORMAT: Fields = {"type": "json_schema", "json_schema": {"name": "light", "strict": True, "schema": SCHEMA}}
OBJECT: Fields = {
    "response_format": {"type": "json_object"},
    "messages": [{"role": "user", "content": "Answer in JSON."}],
    "max_tokens": 200,
}
TOOLS: list[Fields] = [
    {"type": "function", "function": {"name": "set_light", "description": "Set a light", "parameters": SCHEMA}}
]
REQUIRED: Fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
FORCED: Fields = REQUIRED | {"tool_choice": {"type": "function", "function": {"name": "set_light"}}}
IMAGE: Fields = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
SEES: list[Fields] = [{"role": "user", "content": [{"type": "text", "text": COUNT}, IMAGE]}]


def refused(reply: Reply, *statuses: int) -> Any:
    """The error, in OpenAI's form."""
    expect(reply.status in statuses, f"status {reply.status}: {reply.text[:200]}")
    error = reply.json["error"]
    expect(isinstance(error, dict) and isinstance(error.get("message"), str) and error["message"], reply.text)
    expect(isinstance(error.get("type"), str) and {"param", "code"} <= error.keys(), f"error without a field: {error}")
    return error


def is_refused(*statuses: int) -> Check:
    return lambda _, reply: refused(reply, *statuses) and None


def refusals(endpoint: str, rows: list[tuple[str, str, Fields, tuple[int, ...]]]) -> None:
    """Cases of requests that are refused: (id, what defines it, fields, statuses)."""
    CASES.extend(Case(f"{endpoint}.{name}", why, fields, is_refused(*statuses)) for name, why, fields, statuses in rows)


BAD = (400, 422)
"""BadRequestError and UnprocessableEntityError of openai-python."""


def content(reply: Reply) -> str:
    text = reply.ok["choices"][0]["message"]["content"]
    expect(isinstance(text, str), f"content: {text!r}")
    return str(text)


def chunks(reply: Reply) -> list[Any]:
    """Of a stream, without its end mark."""
    *found, last = [data for _, data in reply.events]
    same("the last event", last, "[DONE]")
    return [json.loads(data) for data in found]


def deltas(reply: Reply, index: int = 0) -> list[Any]:
    """The choices of one index."""
    return [choice for chunk in chunks(reply) for choice in chunk["choices"] if choice["index"] == index]


def joined(choices: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@case("chat.form", "chat.completion object: id, object, created, model, choices.message")
def _(target: Target, reply: Reply) -> None:
    answer = reply.ok
    same("object", answer["object"], "chat.completion")
    expect(isinstance(answer["id"], str) and isinstance(answer["created"], int) and answer["model"], reply.text)
    same("role, index", (answer["choices"][0]["message"]["role"], answer["choices"][0]["index"]), ("assistant", 0))
    expect(content(reply), "an empty answer")


def fits_usage(usage: Any, prompt: str = "prompt", answer: str = "completion") -> None:
    expect(usage[f"{prompt}_tokens"] > 0 and usage[f"{answer}_tokens"] > 0, usage)
    same("total_tokens", usage["total_tokens"], usage[f"{prompt}_tokens"] + usage[f"{answer}_tokens"])


@case("chat.usage", "usage: total_tokens is the sum of prompt_tokens and completion_tokens")
def _(target: Target, reply: Reply) -> None:
    fits_usage(reply.ok["usage"])


def ends_at_3(target: Target, reply: Reply) -> None:
    answer = reply.ok
    same("finish_reason", answer["choices"][0]["finish_reason"], "length")
    same("completion_tokens", answer["usage"]["completion_tokens"], 3)


case("chat.max-tokens", "max_tokens; finish_reason length", max_tokens=3)(ends_at_3)
case("chat.max-completion-tokens", "max_completion_tokens", max_tokens=ABSENT, max_completion_tokens=3)(ends_at_3)


@case("chat.finish-reason", "finish_reason: length if the maximum was reached, stop at a natural end", max_tokens=200)
def _(target: Target, reply: Reply) -> None:
    tokens, reason = reply.ok["usage"]["completion_tokens"], reply.ok["choices"][0]["finish_reason"]
    same(f"finish_reason after {tokens} of 200 tokens", reason, "length" if tokens == 200 else "stop")


@case("chat.max-tokens-0", "max_tokens: no more tokens than that, so none", max_tokens=0)
def _(target: Target, reply: Reply) -> None:
    if reply.status == 200:
        same("completion_tokens", reply.ok["usage"]["completion_tokens"], 0)
    else:
        refused(reply, *BAD)


@case("chat.stop", "stop: a string; the text does not contain it; finish_reason stop")
def _(target: Target, reply: Reply) -> None:
    stop = middle_word(content(reply))
    stopped = target.ask("chat", stop=stop)
    same(f"the text before {stop!r}", content(stopped).rstrip(), before(content(reply), stop))
    same("finish_reason", stopped.ok["choices"][0]["finish_reason"], "stop")


@case("chat.stop-list", "stop: up to 4 sequences; the one that comes first ends the answer")
def _(target: Target, reply: Reply) -> None:
    first, stop = content(reply).split()[1], middle_word(content(reply))
    stopped = content(target.ask("chat", stop=["never there", stop, first])).rstrip()
    same("the text", stopped, min(before(content(reply), each) for each in (first, stop)))


@case("chat.stop-stream", "stop, with stream", stream=True)
def _(target: Target, reply: Reply) -> None:
    text = joined(deltas(reply))
    stop = middle_word(text)
    stopped = deltas(target.ask("chat", stop=stop, stream=True))
    same(f"the text before {stop!r}", joined(stopped).rstrip(), before(text, stop))
    same("finish_reason", stopped[-1]["finish_reason"], "stop")


@case("chat.stream-form", "chat.completion.chunk object; data: lines that end with [DONE]", stream=True)
def _(target: Target, reply: Reply) -> None:
    found = chunks(reply)
    same("objects", {chunk["object"] for chunk in found}, {"chat.completion.chunk"})
    same("number of ids", len({chunk["id"] for chunk in found}), 1)
    same("role of the first delta", found[0]["choices"][0]["delta"].get("role"), "assistant")


@case("chat.stream-text", "stream: the deltas are the answer", stream=True)
def _(target: Target, reply: Reply) -> None:
    same("the text", joined(deltas(reply)), content(target.ask("chat")))


@case("chat.stream-finish", "chunk.choices.finish_reason: null until the last", stream=True, max_tokens=3)
def _(target: Target, reply: Reply) -> None:
    *earlier, last = [choice["finish_reason"] for choice in deltas(reply)]
    same("finish_reasons", (set(earlier) - {None}, last), (set(), "length"))


@case("chat.stream-usage", "stream_options.include_usage", stream=True, stream_options={"include_usage": True})
def _(target: Target, reply: Reply) -> None:
    *earlier, last = chunks(reply)
    same("choices of the chunk with usage", last["choices"], [])
    expect(all(chunk.get("usage") is None for chunk in earlier), "usage in an earlier chunk")
    whole = target.ask("chat").ok["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        same(name, last["usage"][name], whole[name])


@case("chat.n", "n; choices.index; usage of all choices", n=2)
def _(target: Target, reply: Reply) -> None:
    one = target.ask("chat")
    same("indexes", sorted(choice["index"] for choice in reply.ok["choices"]), [0, 1])
    same("texts", {choice["message"]["content"] for choice in reply.ok["choices"]}, {content(one)})
    wanted = 2 * one.ok["usage"]["completion_tokens"]
    same("completion_tokens", reply.ok["usage"]["completion_tokens"], wanted)


@case("chat.logprobs", "logprobs.content: token, logprob, bytes of each token of the content", logprobs=True)
def _(target: Target, reply: Reply) -> None:
    tokens = reply.ok["choices"][0]["logprobs"]["content"]
    expect(all(token["logprob"] <= 0 for token in tokens), "a logprob above 0")
    text = bytes(itertools.chain.from_iterable(token["bytes"] or () for token in tokens)).decode(errors="replace")
    expect(text.strip().startswith(content(reply).strip()), f"tokens: {text!r}, content: {content(reply)!r}")


@case("chat.top-logprobs", "top_logprobs: the most likely tokens", top_logprobs=5, logprobs=True)
def _(target: Target, reply: Reply) -> None:
    for token in reply.ok["choices"][0]["logprobs"]["content"]:
        top = [each["logprob"] for each in token["top_logprobs"]]
        same("number of top_logprobs", len(top), 5)
        expect(sum(map(math.exp, top)) <= 1.001, f"probabilities of {sum(map(math.exp, top))} together")
        expect(abs(max(top) - token["logprob"]) < 1e-3, f"at temperature 0: {token['logprob']}, not {max(top)}")


@case("chat.seed", "seed: the same request with the same seed has the same answer", **SAMPLED)
def _(target: Target, reply: Reply) -> None:
    same("the second answer", content(target.ask("chat", **SAMPLED)), content(reply))


@case("chat.system", "messages: a system message is a part of the prompt", messages=[SYSTEM, *USER])
def _(target: Target, reply: Reply) -> None:
    short = target.ask("chat", messages=[SYSTEM | {"content": "Be kind."}, *USER]).ok["usage"]["prompt_tokens"]
    expect(reply.ok["usage"]["prompt_tokens"] > short, "it is not in the prompt")


@case("chat.json-schema", "response_format json_schema with strict", response_format=FORMAT, max_tokens=100)
def _(target: Target, reply: Reply) -> None:
    fits_schema(json.loads(content(reply)))


@case("chat.json-object", "response_format json_object", **OBJECT)
def _(target: Target, reply: Reply) -> None:
    if reply.ok["choices"][0]["finish_reason"] == "length":  # "may be partially cut off"
        expect(content(reply).lstrip().startswith("{"), content(reply))
    else:
        expect(isinstance(json.loads(content(reply)), dict), content(reply))


def fits_call(call: Any) -> None:
    expect(isinstance(call["id"], str) and call["id"], f"id: {call['id']!r}")
    same("type, name", (call["type"], call["function"]["name"]), ("function", "set_light"))
    fits_schema(json.loads(call["function"]["arguments"]))


@case("chat.tool-forced", "tool_choice of a function; tool_calls: id, type, function", **FORCED)
def _(target: Target, reply: Reply) -> None:
    [call] = reply.ok["choices"][0]["message"]["tool_calls"]
    fits_call(call)


@case("chat.tool-required", "tool_choice required; finish_reason tool_calls", **REQUIRED)
def _(target: Target, reply: Reply) -> None:
    [choice] = reply.ok["choices"]
    for call in choice["message"]["tool_calls"]:
        fits_call(call)
    same("finish_reason", choice["finish_reason"], "tool_calls")


@case("chat.tool-stream", "delta.tool_calls: id and name first, arguments in pieces", **FORCED, stream=True)
def _(target: Target, reply: Reply) -> None:
    calls = [call for choice in deltas(reply) for call in choice["delta"].get("tool_calls") or ()]
    expect(calls, "no call")
    same("indexes", {call["index"] for call in calls}, {0})
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    function = {"name": calls[0]["function"]["name"], "arguments": arguments}
    fits_call({"id": calls[0]["id"], "type": calls[0]["type"], "function": function})


CALL: Fields = {"id": "call00001", "type": "function", "function": {"name": "set_light", "arguments": "{}"}}
RESULT: Fields = {"role": "tool", "tool_call_id": "call00001", "content": "The light is red now."}
CALLED: list[Fields] = [*USER, {"role": "assistant", "content": "I set it.", "tool_calls": [CALL]}]


@case("chat.tool-result", "messages: the role tool with a tool_call_id", tools=TOOLS, messages=[*CALLED, RESULT])
def _(target: Target, reply: Reply) -> None:
    short = target.ask("chat", tools=TOOLS, messages=[*CALLED, RESULT | {"content": "Red."}])
    expect(reply.ok["usage"]["prompt_tokens"] > short.ok["usage"]["prompt_tokens"], "the result is not in the prompt")


@case("chat.image", "messages.content image_url, for a model of text only", messages=SEES)
def _(target: Target, reply: Reply) -> None:
    if reply.status == 200:  # a model that sees: the image has tokens
        expect(reply.ok["usage"]["prompt_tokens"] > target.ask("chat").ok["usage"]["prompt_tokens"], "it is dropped")
    else:
        refused(reply, *BAD)


@case("chat.too-long", "an input over the context is a BadRequestError")
def _(target: Target, reply: Reply) -> None:
    refused(target.ask("chat", messages=[{"role": "user", "content": long_text(target)}]), *BAD)


refusals(
    "chat",
    [
        ("unknown-model", "NotFoundError: the model does not exist", {"model": "no-such-model"}, (404,)),
        ("empty-messages", "messages: at least 1 item", {"messages": []}, BAD),
        ("temperature-type", "temperature: number", {"temperature": "hot"}, BAD),
        ("n-range", "n: at least 1", {"n": 0}, BAD),
        ("stream-refused", "an error before the stream has its status", {"stream": True, "temperature": "hot"}, BAD),
    ],
)


def text_of(reply: Reply) -> str:
    return str(reply.ok["choices"][0]["text"])


@case("completions.form", "text_completion object; usage")
def _(target: Target, reply: Reply) -> None:
    answer = reply.ok
    same("object", answer["object"], "text_completion")
    same("index", answer["choices"][0]["index"], 0)
    fits_usage(answer["usage"])


case("completions.max-tokens", "max_tokens; finish_reason length", max_tokens=3)(ends_at_3)


@case("completions.stream", "stream: chunks of text_completion, [DONE]", stream=True)
def _(target: Target, reply: Reply) -> None:
    found = "".join(choice["text"] for chunk in chunks(reply) for choice in chunk["choices"])
    same("the text", found, text_of(target.ask("completions")))


@case("completions.echo", "echo: the prompt before the answer", echo=True)
def _(target: Target, reply: Reply) -> None:
    same("the text", text_of(reply), COUNT + text_of(target.ask("completions")))


@case("completions.logprobs", "logprobs: tokens, token_logprobs, top_logprobs, text_offset", logprobs=3)
def _(target: Target, reply: Reply) -> None:
    logprobs = reply.ok["choices"][0]["logprobs"]
    lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    expect(len(lengths) == 1 and lengths != {0}, f"lists of other lengths: {lengths}")
    expect(all(value <= 0 for value in logprobs["token_logprobs"]), logprobs["token_logprobs"])
    expect(all(sum(map(math.exp, top.values())) <= 1.001 for top in logprobs["top_logprobs"]), "more than 1 together")


@case("completions.prompts", "prompt: an array of strings; choices in their order", prompt=["Repeat: blue", COUNT])
def _(target: Target, reply: Reply) -> None:
    texts = {choice["index"]: choice["text"] for choice in reply.ok["choices"]}
    alone = [text_of(target.ask("completions", prompt=prompt)) for prompt in ("Repeat: blue", COUNT)]
    same("texts", texts, dict(enumerate(alone)))


@case("completions.max-tokens-0", "max_tokens: at least 0; echo", max_tokens=0, echo=True)
def _(target: Target, reply: Reply) -> None:
    same("text, completion_tokens", (text_of(reply), reply.ok["usage"]["completion_tokens"]), (COUNT, 0))


@case("embeddings.form", "CreateEmbeddingResponse: object, data.embedding, data.index, usage")
def _(target: Target, reply: Reply) -> None:
    answer = reply.ok
    same(
        "objects", (answer["object"], answer["data"][0]["object"], answer["data"][0]["index"]), ("list", "embedding", 0)
    )
    expect(all(isinstance(number, float) for number in answer["data"][0]["embedding"]), "no floats")
    expect(answer["usage"]["prompt_tokens"] > 0, answer["usage"])


@case("embeddings.inputs", "input: an array; data.index", input=["red", "blue river"])
def _(target: Target, reply: Reply) -> None:
    both, alone = reply.ok["data"], target.ask("embeddings").ok["data"][0]["embedding"]
    same("indexes", [each["index"] for each in both], [0, 1])
    expect(
        max(abs(a - b) for a, b in zip(both[1]["embedding"], alone, strict=True)) < 1e-3, "another vector than alone"
    )


@case("embeddings.base64", "encoding_format base64: floats of 32 bits, little-endian", encoding_format="base64")
def _(target: Target, reply: Reply) -> None:
    data = base64.b64decode(reply.ok["data"][0]["embedding"], validate=True)
    floats = struct.unpack(f"<{len(data) // 4}f", data)
    plain = target.ask("embeddings", encoding_format="float").ok["data"][0]["embedding"]
    expect(
        len(floats) == len(plain) and max(abs(a - b) for a, b in zip(floats, plain, strict=True)) < 1e-3,
        "other numbers",
    )


@case("models.list", "list object; model object: id, created, owned_by")
def _(target: Target, reply: Reply) -> None:
    answer = reply.ok
    same("object", answer["object"], "list")
    expect(any(model["id"] == target.model for model in answer["data"]), f"{target.model} is not in it")
    for model in answer["data"]:
        same("object", model["object"], "model")
        expect(isinstance(model["created"], int) and isinstance(model["owned_by"], str), model)


@case("models.retrieve", "GET /models/{model}")
def _(target: Target, reply: Reply) -> None:
    answer = target.send(f"/v1/models/{quote(target.model, safe='')}", None).ok
    same("id, object", (answer["id"], answer["object"]), (target.model, "model"))


@case("models.unknown", "GET /models/{model}: NotFoundError")
def _(target: Target, reply: Reply) -> None:
    refused(target.send("/v1/models/no-such-model", None), 404)
