"""Generate, chat, tags and show, as Ollama's docs/api.md and its package define them."""

from __future__ import annotations

import json
from typing import Any

from .case import CASES, PNG, SCHEMA, Case, Check, before, case, expect, fits_schema, middle_word, same
from .openai import content
from .target import USER, Fields, Reply, Target

LONGER: Fields = {"temperature": 0, "num_predict": 100}
SAMPLED: Fields = {"temperature": 1, "num_predict": 24, "seed": 7}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def refused(reply: Reply, *statuses: int) -> None:
    """Whether the error has Ollama's form."""
    expect(reply.status in statuses, f"status {reply.status}: {reply.text[:200]}")
    expect(isinstance(reply.json["error"], str) and reply.json["error"], reply.text)


def is_refused(*statuses: int) -> Check:
    return lambda _, reply: refused(reply, *statuses)


def text_of(answer: Any) -> str:
    return str(answer["message"]["content"] if "message" in answer else answer["response"])


def fits_last(answer: Any) -> None:
    """The fields of a whole answer, or of the last line of a stream."""
    same("done", answer["done"], True)
    expect(isinstance(answer["created_at"], str) and answer["model"] and answer["done_reason"], answer)
    expect(all(isinstance(answer[name], int) for name in DURATIONS), f"durations in nanoseconds: {answer}")
    expect(answer["prompt_eval_count"] > 0 and answer["eval_count"] > 0, answer)


def fits_stream(target: Target, reply: Reply) -> None:
    *lines, last = reply.lines
    expect(lines and not any(line["done"] for line in lines), "done before the last line")
    fits_last(last)
    endpoint = "ollama-chat" if "message" in last else "generate"
    whole = target.ask(endpoint).ok
    same("the text", "".join(map(text_of, [*lines, last])), text_of(whole))
    for name in ("eval_count", "done_reason"):
        same(name, last[name], whole[name])


def ends_at_3(target: Target, reply: Reply) -> None:
    same("done_reason, eval_count", (reply.ok["done_reason"], reply.ok["eval_count"]), ("length", 3))


def stops(endpoint: str) -> Check:
    def check(target: Target, reply: Reply) -> None:
        stop = middle_word(text_of(reply.ok))
        stopped = target.ask(endpoint, options={"temperature": 0, "num_predict": 24, "stop": [stop]}).ok
        same(f"the text before {stop!r}", text_of(stopped).rstrip(), before(text_of(reply.ok), stop))
        same("done_reason", stopped["done_reason"], "stop")

    return check


def is_json_of_schema(target: Target, reply: Reply) -> None:
    fits_schema(json.loads(text_of(reply.ok)))


def is_loaded(target: Target, reply: Reply) -> None:
    same("text, done, done_reason", (text_of(reply.ok), reply.ok["done"], reply.ok["done_reason"]), ("", True, "load"))


def refuses_image(target: Target, reply: Reply) -> None:
    if reply.status == 200:  # a model that sees: the image has tokens
        without = target.ask("ollama-chat").ok["prompt_eval_count"]
        expect(reply.ok["prompt_eval_count"] > without, "it is dropped")
    else:
        refused(reply, 400)


ONE: Fields = {"temperature": 0, "num_predict": 3}
BOTH: list[tuple[str, str, Fields, Check]] = [
    ("form", "done, done_reason, durations, counts", {}, lambda _, reply: fits_last(reply.ok)),
    ("stream", "stream: lines of JSON, the last with done", {"stream": True}, fits_stream),
    ("num-predict", "options.num_predict; done_reason length; eval_count", {"options": ONE}, ends_at_3),
    ("format", "format: a JSON schema", {"format": SCHEMA, "options": LONGER}, is_json_of_schema),
    ("unknown-model", "status 404 and an error", {"model": "no-such-model"}, is_refused(404)),
]
OWN: list[tuple[str, str, Fields, Check]] = [
    ("generate.stop", "options.stop; done_reason stop", {}, stops("generate")),
    ("ollama-chat.stop", "options.stop; done_reason stop", {}, stops("ollama-chat")),
    ("generate.load", "an empty prompt loads the model; done_reason load", {"prompt": ""}, is_loaded),
    ("generate.options-type", "options.num_predict: int", {"options": {"num_predict": "many"}}, is_refused(400)),
    (
        "ollama-chat.image",
        "images, for a model of text only",
        {"messages": [USER[0] | {"images": [PNG]}]},
        refuses_image,
    ),
    ("show.unknown-model", "status 404 and an error", {"model": "no-such-model"}, is_refused(404)),
]
for endpoint in ("generate", "ollama-chat"):
    CASES.extend(Case(f"{endpoint}.{name}", why, fields, check) for name, why, fields, check in BOTH)
CASES.extend(Case(*row) for row in OWN)


@case("generate.seed", "options.seed: the same text for the same prompt", options=SAMPLED)
def _(target: Target, reply: Reply) -> None:
    same("the second answer", text_of(target.ask("generate", options=SAMPLED).ok), text_of(reply.ok))


@case("generate.system", "system: a system message", system="Be kind. Speak of the sea and of the wind.")
def _(target: Target, reply: Reply) -> None:
    short = target.ask("generate", system="Be kind.").ok
    expect(reply.ok["prompt_eval_count"] > short["prompt_eval_count"], "it is not in the prompt")


@case("ollama-chat.same-answer", "one user message, temperature 0: the answer of chat/completions")
def _(target: Target, reply: Reply) -> None:
    target.require("chat")
    same("the answer", text_of(reply.ok), content(target.ask("chat")))


@case("tags.form", "models: name, model, modified_at, size, digest, details")
def _(target: Target, reply: Reply) -> None:
    models = reply.ok["models"]
    names = {model["name"].removesuffix(":latest") for model in models}
    expect(target.model.removesuffix(":latest") in names, f"{target.model} is not among {names}")
    for model in models:
        expect({"model", "modified_at", "size", "digest", "details"} <= model.keys(), model)


@case("show.form", "details, model_info, template, capabilities")
def _(target: Target, reply: Reply) -> None:
    expect({"details", "model_info", "template", "capabilities"} <= reply.ok.keys(), sorted(reply.ok))
    expect("completion" in reply.ok["capabilities"], reply.ok["capabilities"])
