"""Requests whose answer is known: greedy or seeded, over every endpoint that computes something.

The answer of each is computed alone before the load begins. Under load it must be the same, in any batch, whether
the request is preempted, and whether the answer is streamed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from tests.soak.http_client import Answer
from tests.vision.files import FORMATS, encoded, halves, text_of, url_of

Read = Callable[[Answer], Any]

TOLERANCE = 1e-3
"""Of embeddings and scores. They depend a little on how many rows a step has."""


@dataclass(frozen=True)
class Case:
    """read: what counts of a whole answer; read_stream: the same of a streamed one, None if there is no such."""

    name: str
    path: str
    body: dict[str, Any]
    read: Read
    read_stream: Read | None = None


def same(one: Any, other: Any) -> bool:
    """Whether two answers are the same: exactly, but for floats."""
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, abs_tol=TOLERANCE)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# -- what counts of an answer ------------------------------------------------------------------------------------------


def chat(answer: Answer) -> Any:
    return [(each["message"]["content"], each["finish_reason"]) for each in answer.json["choices"]]


def completion(answer: Answer) -> Any:
    return [(each["text"], each["finish_reason"]) for each in answer.json["choices"]]


def streamed(text_of: Callable[[Any], str | None]) -> Read:
    """Of chunks with choices. text_of: the text of a choice."""

    def read(answer: Answer) -> Any:
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        for event in answer.events:
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + (text_of(choice) or "")
                if choice["finish_reason"] is not None:
                    reasons[choice["index"]] = choice["finish_reason"]
        return [(texts[index], reasons[index]) for index in sorted(texts)]

    return read


def message(answer: Answer) -> Any:
    found = answer.json
    return "".join(block["text"] for block in found["content"]), found["stop_reason"]


def streamed_message(answer: Answer) -> Any:
    deltas = [event["delta"] for event in answer.events if "delta" in event]
    reasons = [delta["stop_reason"] for delta in deltas if delta.get("stop_reason")]
    return "".join(delta.get("text", "") for delta in deltas), *reasons


def response(answer: Answer) -> Any:
    return output_of(answer.json)


def streamed_response(answer: Answer) -> Any:
    return output_of(answer.events[-1]["response"])


def output_of(found: dict[str, Any]) -> Any:
    texts = [part["text"] for item in found["output"] for part in item["content"]]
    return "".join(texts), found["status"]


def lines(key: Callable[[Any], str]) -> tuple[Read, Read]:
    """Of Ollama's answers, whole and as lines. key: the text of a line."""

    def read(answer: Answer) -> Any:
        found = [json.loads(line) for line in answer.body.splitlines()]
        return "".join(map(key, found)), found[-1]["done_reason"]

    return read, read


def embeddings(answer: Answer) -> Any:
    return [each["embedding"] for each in answer.json["data"]]


def scores(answer: Answer) -> Any:
    return sorted((each["index"], each["relevance_score"]) for each in answer.json["results"])


def decisions(answer: Answer) -> Any:
    """The probabilities alone: which option is the best may change within TOLERANCE."""
    return [probabilities(each) for each in answer.json["answers"]]


def named_decisions(answer: Answer) -> Any:
    return [(name, probabilities(each)) for name, each in sorted(answer.json["answers"].items())]


def probabilities(answer: dict[str, Any]) -> list[float]:
    """Those of a choice or score in the order of the options, or the one of a predicate."""
    found = answer.get("probabilities", answer.get("probability", answer.get("noul")))
    if isinstance(found, dict):
        return list(found.values())
    return [each["probability"] for each in found] if isinstance(found, list) else [float(found)]


# -- requests ----------------------------------------------------------------------------------------------------------

WORDS = (
    "river",
    "stone",
    "blue",
    "count",
    "nine",
    "what",
    "say",
    "are",
    "you",
    "and",
    "the",
    "light",
    "of",
    "a",
    "house",
)

COLORS = ("red", "blue", "white")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["river", "stone"]}, "numbers": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name"],
    "additionalProperties": False,
}


def make_cases(rng: random.Random, models: Sequence[str], count: int, seeing: str | None = None) -> list[Case]:
    """count: of each endpoint and model that generates text. seeing: a model that is asked about images."""
    found: list[Case] = []
    for model in models:
        for index in range(count):
            found += text_cases(rng, model, f"{model}-{index}")
            found += decision_cases(rng, model, f"{model}-{index}")
    for index in range(count):
        if seeing is not None:
            found += image_cases(rng, seeing, f"{seeing}-{index}")
        inputs = [words(rng, 1, 40) for _ in range(rng.randint(1, 4))]
        found.append(Case(f"embeddings-{index}", "/v1/embeddings", {"model": "vectors", "input": inputs}, embeddings))
        documents = [words(rng, 2, 12) for _ in range(3)]
        body = {"model": "judge", "query": words(rng, 2, 6), "documents": documents}
        found.append(Case(f"rerank-{index}", "/v1/rerank", body, scores))
        tokens = {"model": models[0], "prompt": words(rng, 1, 80)}
        found.append(Case(f"tokenize-{index}", "/tokenize", tokens, lambda answer: answer.json["tokens"]))
    return found


def text_cases(rng: random.Random, model: str, name: str) -> list[Case]:
    """One for each endpoint that generates text."""
    asked = {"model": model, "messages": [{"role": "user", "content": words(rng, 1, 50)}]}
    options = sampling(rng)
    plain = {key: value for key, value in options.items() if key != "n"}
    ollama = {"num_predict": 30} | {key: plain[key] for key in ("temperature", "seed") if key in plain}
    read_chat, stream_chat = lines(lambda line: line["message"]["content"])
    read_text, stream_text = lines(lambda line: line["response"])
    chunk, delta = streamed(lambda choice: choice["text"]), streamed(lambda choice: choice["delta"].get("content"))
    schema = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA, "strict": True}}
    prompt = {"model": model, "prompt": words(rng, 1, 60)}
    item = {"model": model, "input": words(rng, 1, 30), "temperature": 0, "max_output_tokens": rng.randint(2, 40)}
    item["store"] = False
    claude = asked | {"max_tokens": rng.randint(2, 60), "temperature": 0, "stop_sequences": stop(rng)}
    return [
        Case(f"chat-{name}", "/v1/chat/completions", asked | options, chat, delta),
        Case(f"completion-{name}", "/v1/completions", prompt | options | {"ignore_eos": True}, completion, chunk),
        Case(f"schema-{name}", "/v1/chat/completions", asked | plain | {"response_format": schema}, chat, delta),
        Case(f"message-{name}", "/v1/messages", claude, message, streamed_message),
        Case(f"response-{name}", "/v1/responses", item, response, streamed_response),
        Case(f"ollama-chat-{name}", "/api/chat", asked | {"options": ollama}, read_chat, stream_chat),
        Case(f"ollama-text-{name}", "/api/generate", prompt | {"options": ollama}, read_text, stream_text),
    ]


def decision_cases(rng: random.Random, model: str, name: str) -> list[Case]:
    """Each dialect. The options have one token or several, and share some of them."""
    options = rng.sample(WORDS, rng.randint(2, 5))
    asked = [
        {"type": "predicate", "instructions": words(rng, 1, 6)},
        {"type": "choice", "instructions": words(rng, 1, 6), "choices": [{"value": each} for each in options]},
        {"type": "score", "instructions": words(rng, 1, 6), "levels": [{"label": each} for each in COLORS]},
    ]
    named = {
        "true": {"type": "noul", "instructions": words(rng, 1, 6)},
        "which": {"type": "choice", "criteria": dict.fromkeys(options)},
    }
    text = words(rng, 1, 60)
    return [
        Case(f"decision-{name}", "/v1/decisions", {"model": model, "input": text, "questions": asked}, decisions),
        Case(
            f"systemone-{name}",
            "/v1/systemone",
            {"model": model, "state": text, "questions": named},
            named_decisions,
        ),
    ]


def image_cases(rng: random.Random, model: str, name: str) -> list[Case]:
    """One for each API that takes images. Several have the same image."""
    left, right = rng.choice(COLORS), rng.choice(COLORS)
    file = encoded(halves(rng.choice((32, 64)), rng.choice((16, 48)), left, right), rng.choice(FORMATS))
    text, image = words(rng, 1, 12), text_of(file)
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": rng.randint(2, 30)}
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url_of(file)}}]
    source = {"type": "base64", "media_type": "image/png", "data": image}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    shown = {"role": "user", "content": text, "images": [image]}
    ollama = {"model": model, "messages": [shown], "options": {"temperature": 0, "num_predict": 20}}
    delta = streamed(lambda choice: choice["delta"].get("content"))
    read_chat, stream_chat = lines(lambda line: line["message"]["content"])
    return [
        Case(f"image-chat-{name}", "/v1/chat/completions", asking(parts) | options, chat, delta),
        Case(f"image-message-{name}", "/v1/messages", asking(blocks) | options, message, streamed_message),
        Case(f"image-ollama-{name}", "/api/chat", ollama, read_chat, stream_chat),
    ]


def asking(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def sampling(rng: random.Random) -> dict[str, Any]:
    """Greedy or seeded, one answer or two, with and without stop strings."""
    found: dict[str, Any] = {"max_tokens": rng.choice((1, 8, 30, 90)), "temperature": 0}
    if rng.random() < 0.5:
        found |= {"temperature": rng.choice((0.5, 1.0)), "seed": rng.randrange(1000), "top_p": rng.choice((0.8, 1.0))}
    if rng.random() < 0.3:
        found["n"] = 2
    if rng.random() < 0.5:
        found["stop"] = stop(rng)
    if rng.random() < 0.2:
        found |= {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
    return found


def stop(rng: random.Random) -> list[str]:
    """Strings that some of the random texts have."""
    return [rng.choice("abcdefghijklmnop") + rng.choice("aeiou ") for _ in range(rng.randint(1, 3))]


def words(rng: random.Random, least: int, most: int) -> str:
    """Some begin with the same words, so that they share blocks."""
    shared = "You are a river of words, count and say what you are" if rng.random() < 0.4 else ""
    return f"{shared} {' '.join(rng.choices(WORDS, k=rng.randint(least, most)))}".strip()
