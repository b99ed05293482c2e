"""JSON schemas of a seed, and whether a server's enforced answers are valid."""

from __future__ import annotations

import json
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from typing import Any

import jsonschema  # type: ignore[import-untyped]

Schema = dict[str, Any]

DEPTH = 3
"""Of objects, arrays and alternatives in each other, at most."""

MAX_TOKENS = 1500
"""Of an answer. Every schema bounds its strings, arrays and numbers, so that an answer of a small model ends."""

NAMES = (
    *("name", "title", "city", "country", "colour", "kind", "status", "note", "id", "count", "price", "size", "weight"),
    *("tags", "items", "owner", "address", "created at", "größe", "a/b", 'with "quotes"', "x_1", "$id", "é"),
)
PATTERNS = (
    r"^[A-Z]{2}[0-9]{4}$",
    r"^#[0-9a-f]{6}$",
    r"^(low|medium|high)$",
    r"^v[0-9]{1,2}\.[0-9]{1,3}$",
    r"^\+?[0-9 ]{5,12}$",
)
FORMATS = ("date", "date-time", "time", "email", "ipv4", "uuid")
WORDS = ("red", "green", "blue", "Paris", "Oslo", "open", "closed", "a b", "naïve", "N/A", "", 'a "quote"', "日本")


def make_schema(seed: int) -> Schema:
    """An object; some schemas have a definition that they refer to."""
    rng = random.Random(seed)
    schema = make_object(rng, DEPTH)
    if rng.random() < 0.25:
        schema["properties"]["ref"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema["required"], "ref"]
        schema["$defs"] = {"part": make_object(rng, 1)}
    return schema


def make_value(rng: random.Random, depth: int) -> Schema:
    simple = (make_string, make_integer, make_number, make_fixed, make_nullable)
    nested = (make_object, make_array, make_tuple, make_choice)
    return rng.choice(simple + nested if depth else simple)(rng, depth)


def make_string(rng: random.Random, _: int) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 40}
    shortest = rng.choice((0, 0, 1, 5))
    return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(1, 30)}


def make_integer(rng: random.Random, _: int) -> Schema:
    least = rng.randint(-1000, 1000)
    bounds = rng.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")))
    return {"type": "integer", bounds[0]: least, bounds[1]: least + rng.choice((2, 9, 100, 12345))}


def make_number(rng: random.Random, _: int) -> Schema:
    kind = rng.randrange(3)
    if kind == 0:
        return {"enum": sorted({round(rng.uniform(-9, 9), 2) for _ in range(4)})}
    if kind == 1:
        return {"type": "integer", "multipleOf": rng.choice((2, 5, 10)), "minimum": 0, "maximum": 100}
    least = round(rng.uniform(-100, 100), 1)
    return {"type": "number", "minimum": least, "maximum": least + rng.choice((0.5, 10, 1000))}


def make_fixed(rng: random.Random, _: int) -> Schema:
    values = rng.sample((*WORDS, *range(-2, 3), True, False, None), rng.randint(1, 5))
    kind = rng.randrange(3)
    return {"type": "boolean"} if kind == 0 else {"const": values[0]} if kind == 1 else {"enum": values}


def make_nullable(rng: random.Random, _: int) -> Schema:
    return {"type": [rng.choice(("string", "boolean")), "null"], "maxLength": rng.randint(1, 20)}


def make_object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 5))
    return {
        "type": "object",
        "properties": {name: make_value(rng, depth - 1) for name in names},
        "required": sorted(name for name in names if rng.random() < 0.7),
        "additionalProperties": False,
    }


def make_array(rng: random.Random, depth: int) -> Schema:
    least = rng.choice((0, 0, 1, 2))
    return {
        "type": "array",
        "items": make_value(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randint(1, 3),
    }


def make_tuple(rng: random.Random, depth: int) -> Schema:
    first = [make_value(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}


def make_choice(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [make_value(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


FORMAT_CHECKER = jsonschema.FormatChecker(("date", "email", "ipv4", "uuid"))
"""The times of RFC 3339 are added: jsonschema itself knows `date-time` only with another package, and its `time` is
that of draft 3."""

TIME = re.compile(r"(?ai:([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d))")


def is_time(value: object) -> bool:
    return not isinstance(value, str) or TIME.fullmatch(value) is not None


def is_date_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    date.fromisoformat(value[:10])
    return value[10:11] in ("T", "t", " ") and is_time(value[11:])


FORMAT_CHECKER.checks("time")(is_time)
FORMAT_CHECKER.checks("date-time", raises=ValueError)(is_date_time)


MOST_TRIES = 20
"""Requests for one answer. A busy machine compiles grammars so slowly that some are told to come again."""


@dataclass(frozen=True)
class Verdict:
    """problem: empty if the answer is valid."""

    seed: int
    answer: str
    problem: str


def ask(url: str, model: str, seed: int) -> Verdict:
    schema = make_schema(seed)
    question = f"Make up a record of this form, as JSON: {', '.join(schema['properties'])}"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "record", "strict": True, "schema": schema}},
        "temperature": 1.0 if seed % 2 else 0.0,
        "seed": seed,
        "max_tokens": MAX_TOKENS,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        [choice] = answer_to(request)["choices"]
    except urllib.error.HTTPError as error:
        return Verdict(seed, "", f"status {error.code}: {error.read(500).decode(errors='replace')}")
    answer = choice["message"]["content"]
    if choice["finish_reason"] != "stop":
        return Verdict(seed, answer, f"ended by {choice['finish_reason']}")
    return Verdict(seed, answer, problem_of(schema, answer))


def answer_to(request: urllib.request.Request) -> Any:
    """The JSON of an answer. A server that is busy is asked again. Raises HTTPError."""
    for _ in range(MOST_TRIES - 1):
        try:
            with urllib.request.urlopen(request, timeout=1800) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(float(error.headers["Retry-After"]))
    with urllib.request.urlopen(request, timeout=1800) as response:
        return json.load(response)


def problem_of(schema: Schema, answer: str) -> str:
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMAT_CHECKER)
    try:
        validator.validate(json.loads(answer))
    except ValueError as error:
        return f"no JSON: {error}"
    except jsonschema.ValidationError as error:
        return f"invalid: {error.message}"
    return ""


def ask_all(url: str, model: str, seeds: Sequence[int], concurrent: int = 8) -> list[Verdict]:
    with ThreadPoolExecutor(concurrent) as pool:
        return list(pool.map(lambda seed: ask(url, model, seed), seeds))
