"""Values that a prompt dictates, as JSON, and whether answers that a server enforces have them: in all APIs, with every
escape of RFC 8259.

A small model miscopies some values by itself. So each question is asked without a schema too: a value that the model
copies then, and not with the schema, is the server's fault.
"""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .schemas import Schema, answer_to, problem_of

LONGEST, MAX_TOKENS = 28, 250
"""Characters of a text, and tokens of an answer: a model that repeats one character to the end has fewer."""

TEXT: Schema = {"type": "string", "maxLength": LONGEST}

NAMES = ("city", "name", "note", "title", "path", "owner", "street", "word", "größe", "last name")
WORDS = ("red", "green", "Paris", "Oslo", "open", "closed", "house", "river", "Rome", "seven", "Ann", "old")
MARKED = (
    *('"', "\\", "/", "\n", "\t", "\r", "\b", "\f", "\x01", "\x1f", "\x7f"),
    *("é", "ü", "ñ", "\u2019", "\u2026", "日本", "Привет", "\U0001f600", "\u00a0", "</b>"),
)
"""Characters that JSON escapes, and such of several bytes."""

EXAMPLES = (
    {"city": 'the "big" one', "count": 3},
    {"note": "a\\b\nc", "name": "café"},
)
"""Values that the model has copied in earlier turns, as the prompt has it."""


@dataclass(frozen=True)
class Case:
    """text: the value as the prompt spells it. api: one of APIS."""

    seed: int
    api: str
    schema: Schema
    value: dict[str, Any]
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The question after two that are answered."""
        said = []
        for number, example in enumerate(EXAMPLES):
            spelled = json.dumps(example, ensure_ascii=number == self.seed % 2)
            said += [{"role": "user", "content": asked(spelled)}, {"role": "assistant", "content": spelled}]
        return [*said, {"role": "user", "content": asked(self.text)}]


@dataclass(frozen=True)
class Dictated:
    """answer: with the schema. problem: why that is not valid, or empty. copied, copied_free: whether the value is the
    dictated one, with the schema and without it."""

    case: Case
    answer: str
    problem: str
    copied: bool
    copied_free: bool

    @property
    def is_lost(self) -> bool:
        """Whether the model copies the value only without the schema."""
        return self.copied_free and not self.copied


def asked(text: str) -> str:
    return f"Copy this JSON exactly: {text}"


# -- values and their schemas ------------------------------------------------------------------------------------------


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    makers = (make_text, make_text, make_listed, make_matching, make_optional, make_number, make_list, make_part)
    properties, value = {}, {}
    for name in rng.sample(NAMES, rng.randint(1, 2)):
        properties[name], value[name] = rng.choice(makers)(rng)
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.3:
        text = text.replace("/", "\\/")
    return Case(seed, list(APIS)[seed % len(APIS)], schema, value, text)


def text_of(rng: random.Random) -> str:
    """A few words with a character that is not plain."""
    words = rng.sample(WORDS, rng.randint(1, 3))
    place = rng.randrange(len(words))
    words[place] = rng.choice(("{1}{0}", "{0}{1}", "{1}{0}{1}", "{0}{1}{0}")).format(words[place], rng.choice(MARKED))
    return " ".join(words)


def make_text(rng: random.Random) -> tuple[Schema, Any]:
    return rng.choice((TEXT, TEXT | {"minLength": 1})), text_of(rng)


def make_listed(rng: random.Random) -> tuple[Schema, Any]:
    values = [text_of(rng) for _ in range(rng.randint(1, 4))]
    return {"const": values[0]} if len(values) == 1 else {"enum": values}, values[0]


def make_matching(rng: random.Random) -> tuple[Schema, Any]:
    return {"type": "string", "pattern": "^[a-zA-Z]{1,9} ?.?[0-9]{2}$"}, f"{rng.choice(WORDS)}é{rng.randint(10, 99)}"


def make_optional(rng: random.Random) -> tuple[Schema, Any]:
    return {"anyOf": [TEXT, {"type": "null"}]}, rng.choice((None, "null", text_of(rng)))


def make_number(rng: random.Random) -> tuple[Schema, Any]:
    return rng.choice(
        (
            ({"type": "integer", "minimum": -(10**6), "maximum": 10**6}, rng.randint(-999, 99_999)),
            ({"type": "integer", "minimum": 0, "maximum": 10**18}, rng.randint(2**53, 2**53 + 999)),
            ({"type": "number", "minimum": -100, "maximum": 100}, round(rng.uniform(-100, 100), 2)),
            ({"type": "boolean"}, rng.random() < 0.5),
        )
    )


def make_list(rng: random.Random) -> tuple[Schema, Any]:
    return {"type": "array", "items": TEXT, "maxItems": 2}, [text_of(rng) for _ in range(2)]


def make_part(rng: random.Random) -> tuple[Schema, Any]:
    schema, value = make_text(rng)
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}, {
        "a": value
    }


# -- the APIs: a path, the body of a request, and the JSON of its answer -----------------------------------------------

Body = dict[str, Any]
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
LIMITS: Body = {"temperature": 0, "max_tokens": MAX_TOKENS}
RESPONSE_LIMITS: Body = {"temperature": 0, "max_output_tokens": MAX_TOKENS}
OLLAMA_LIMITS: Body = {"stream": False, "options": {"temperature": 0, "num_predict": MAX_TOKENS}}
NAMED = {"type": "tool", "name": "copy"}
CALL, CALL_END = '<tool_call>\n{"name": "copy", "arguments":', "</tool_call>"


@dataclass(frozen=True)
class Api:
    """path: of the endpoint. fields, free: those of a request with the schema, and without it; the model has written
    the same before. read: the JSON of an answer. messages: the name of the conversation's field."""

    path: str
    fields: Callable[[Case], Body]
    free: Callable[[Case], Body]
    read: Callable[[Body], str]
    messages: str = "messages"


def chat_form(case: Case) -> Body:
    form = {"name": "record", "strict": True, "schema": case.schema}
    return LIMITS | {"response_format": {"type": "json_schema", "json_schema": form}}


def chat_tool(case: Case) -> Body:
    tool = {"type": "function", "function": {"name": "copy", "parameters": case.schema}}
    return LIMITS | {"tools": [tool], "parallel_tool_calls": False}


def begun(case: Case) -> Body:
    """The model has begun a call, as the grammar of calls makes it do."""
    return {"messages": [*case.messages, {"role": "assistant", "content": CALL}]}


def response_form(case: Case) -> Body:
    form = {"type": "json_schema", "name": "record", "strict": True, "schema": case.schema}
    return RESPONSE_LIMITS | {"text": {"format": form}}


def message_tool(case: Case) -> Body:
    return LIMITS | {"tools": [{"name": "copy", "input_schema": case.schema}]}


def message_form(case: Case) -> Body:
    return LIMITS | {"output_config": {"format": {"type": "json_schema", "schema": case.schema}}}


def read_chat(answer: Body) -> str:
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls")
    return str(calls[0]["function"]["arguments"] if calls else message["content"])


def read_response(answer: Body) -> str:
    return "".join(part["text"] for item in answer["output"] for part in item["content"])


def read_message(answer: Body) -> str:
    calls = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
    return json.dumps(calls[0]) if calls else "".join(block["text"] for block in answer["content"])


def read_ollama(answer: Body) -> str:
    return str(answer["message"]["content"])


APIS = {
    "chat completions, `response_format`": Api(CHAT, chat_form, lambda case: LIMITS, read_chat),
    "chat completions, required call": Api(
        CHAT,
        lambda case: chat_tool(case) | {"tool_choice": "required"},
        lambda case: chat_tool(case) | begun(case) | {"continue_final_message": True, "stop": CALL_END},
        read_chat,
    ),
    "responses, `text.format`": Api(RESPONSES, response_form, lambda case: RESPONSE_LIMITS, read_response, "input"),
    "messages, named tool": Api(
        MESSAGES,
        lambda case: message_tool(case) | {"tool_choice": NAMED},
        lambda case: message_tool(case) | begun(case) | {"stop_sequences": [CALL_END]},
        read_message,
    ),
    "messages, `output_config.format`": Api(MESSAGES, message_form, lambda case: LIMITS, read_message),
    "Ollama, `format`": Api(
        OLLAMA, lambda case: OLLAMA_LIMITS | {"format": case.schema}, lambda case: OLLAMA_LIMITS, read_ollama
    ),
}


def answer_of(url: str, model: str, case: Case, fields: Body) -> str:
    """The JSON of an answer. Raises HTTPError."""
    api = APIS[case.api]
    body = json.dumps({"model": model, api.messages: case.messages} | fields).encode()
    request = urllib.request.Request(f"{url}{api.path}", body, {"Content-Type": "application/json"})
    return api.read(answer_to(request))


def dictate(url: str, model: str, seed: int) -> Dictated:
    case = make_case(seed)
    api = APIS[case.api]
    free = answer_of(url, model, case, api.free(case))
    try:
        answer = answer_of(url, model, case, api.fields(case))
    except urllib.error.HTTPError as error:
        problem = f"status {error.code}: {error.read(500).decode(errors='replace')}"
        return Dictated(case, "", problem, False, is_value(free, case))
    return Dictated(case, answer, problem_of(case.schema, answer), is_value(answer, case), is_value(free, case))


def is_value(answer: str, case: Case) -> bool:
    """Whether an answer begins with the dictated value. 1 and true are different."""
    try:
        found, _ = json.JSONDecoder().raw_decode(answer.strip())
    except ValueError:
        return False
    return json.dumps(found, sort_keys=True) == json.dumps(case.value, sort_keys=True)


def dictate_all(url: str, model: str, seeds: Sequence[int], concurrent: int = 8) -> list[Dictated]:
    with ThreadPoolExecutor(concurrent) as pool:
        return list(pool.map(lambda seed: dictate(url, model, seed), seeds))
