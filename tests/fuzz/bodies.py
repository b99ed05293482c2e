"""Requests to every endpoint, with mutated bodies. A request depends on the seed and its number alone."""

from __future__ import annotations

import functools
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlxpaged.api.endpoints import ENDPOINTS
from tests.api.test_compatibility import SMALLEST
from tests.api.test_recorded import RECORDED
from tests.compatibility.page import tables

IDS = ("response_id", "file_id", "batch_id", "request_id", "model")
"""Parameters of paths. The client puts in the ids that the server has named last."""

MAX_RECORDED = 12_000  # bytes of a body of tests/api/recorded/: the longer ones have thousands of tokens
MAX_STEPS = 3

NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**63, 2**64, -(2**70), 10**400, float("nan"), float("-inf"))
TEXTS = (
    *("", " ", "x", "demo", "none", "auto", "\0", "\ud800", "\udc00x", "é\u0301\u202e", "\U0001f469\u200d\U0001f680"),
    *("<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>{"),
    *("{{ messages }}", "{% for x in range(10**9) %}", "{% raw %}", "{{ ''.__class__.__mro__ }}"),
    *("../../etc/passwd", "/dev/zero", "file:///etc/passwd", "http://127.0.0.1:1/x", "data:image/png;base64,AAAA"),
    *("[", "{", "(a{1,100}){1,100}", "(", "\\", "(?=a)", "[^", "a" * 300, "\n\r\t\v", "%s%n%00", "NaN", "1e999"),
    *('start: "a" start', "start: start", "root ::= root", "true", "null", "0", "-1", "2**3", "°" * 2000),
)
STRUCTURES: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [None], {"": ""}, {"a": {"b": []}}, [{}], [1, "a", None], {"type": "text"}),
    *({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "object"}, {"role": "user"}),
    *([{"type": "text", "text": "x"}], [{"type": "text"}], {"__proto__": {}}, {"$ref": "#"}, list(range(600))),
)

DEEP: dict[str, Any] = {"type": "string"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}

SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"},
    {"$ref": "#/$defs/none"},
    {"$ref": "http://127.0.0.1:1/schema"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(800)}},
    {"type": "string", "pattern": "(a{1,100}){1,100}"},
    {"type": "string", "pattern": ".?" * 400},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "["},
    {"type": "string", "minLength": 10**9},
    {"type": "string", "minLength": 3, "maxLength": 1},
    {"type": "string", "format": "nothing"},
    {"type": "array", "items": {}, "minItems": 10**12},
    {"type": "array", "prefixItems": [{"type": "integer"}] * 300, "items": False},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"type": "integer", "multipleOf": 0},
    {"type": "number", "minimum": float("nan")},
    {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
    {"enum": [f"value {i}" for i in range(1500)]},
    {"enum": []},
    {"const": {"a": ["\ud800", None]}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"anyOf": [{"type": "object", "properties": {"a": {"const": i}}} for i in range(60)]},
    {"oneOf": [{"type": "string"}, {"type": "string"}]},
    {"not": {}},
    {"if": {"type": "string"}, "then": False, "else": True},
    {"patternProperties": {"^(a+)+$": {"type": "null"}}, "type": "object"},
    {"propertyNames": {"pattern": "^a"}, "type": "object"},
    {"type": "object", "required": ["b"], "properties": {"a": {}}, "additionalProperties": False},
    {"type": ["string", 3]},
    {"type": "objct"},
    {"items": [True]},
    {"x-guidance": {"whitespace_flexible": "no"}},
    DEEP,
    True,
    False,
    3,
    "{",
)
"""Schemas that are wrong, cannot be fulfilled, or cost much."""

MESSAGES: tuple[Any, ...] = (
    [{"role": "assistant", "content": "x"}],
    [{"role": "system", "content": "x"}, {"role": "system", "content": "y"}],
    [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}, {"role": "user", "content": "x"}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a", "tool_calls": []}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}],
    [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}],
        },
        {"role": "tool", "tool_call_id": "b", "content": "x"},
    ],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text"}]}]}],
    [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": []}]}],
    [{"role": "user", "content": ""}, {"role": "user", "content": " "}],
    [{"role": "user", "content": "x", "name": "\0"}, {"role": "developer", "content": []}],
    [{"role": "user", "content": "x"}] * 200,
)

FORMATS: tuple[Callable[[Any], dict[str, Any]], ...] = (
    lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
    lambda schema: {"guided_json": schema},
    lambda schema: {"structured_outputs": {"json": schema}},
    lambda schema: {"format": schema},
    lambda schema: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
    lambda schema: {"output_format": {"type": "json_schema", "schema": schema}},
    lambda schema: {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
    lambda schema: {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}},
    lambda schema: {"tools": [{"type": "function", "name": "f", "parameters": schema}], "tool_choice": "required"},
    lambda schema: {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}],
        "tool_choice": "required",
    },
)
"""The places in which the APIs take a schema."""


@dataclass(frozen=True)
class Case:
    """A request. path: may have the name of a parameter in braces. steps: how many mutations were made."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    steps: int


@dataclass(frozen=True)
class Base:
    """A request before its mutations. fields: of an endpoint that reads a body."""

    method: str
    path: str
    fields: Any = None


@functools.cache
def bases() -> list[list[Base]]:
    """Valid requests of each endpoint: the smallest one, each with an example of the table of fields, and what clients
    were recorded to send."""
    found: dict[tuple[str, str], list[Base]] = {}
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace(":path", "")
        fields = SMALLEST.get(f"{endpoint.method} {endpoint.path}")
        if endpoint.path == "/v1/batches" and fields is not None:
            fields = fields | {"input_file_id": "{file_id}"}
        found[endpoint.method, endpoint.path] = [Base(endpoint.method, path, fields)]
    for name, claims in tables().items():
        method, path = name.split()
        group = found[method, path]
        group += [Base(method, path, group[0].fields | dict(claim.example)) for claim in claims]
    for file in sorted(RECORDED.glob("*.json")):
        for record in json.loads(file.read_text())["requests"]:
            body = record.get("body")
            key = (record["method"], record["path"])
            if body is not None and key in found and len(json.dumps(body)) < MAX_RECORDED:
                found[key].append(Base(*key, short_answer(body)))
    return list(found.values())


def short_answer(body: dict[str, Any]) -> dict[str, Any]:
    limits = {"max_tokens", "max_completion_tokens", "max_output_tokens"} & body.keys()
    return body | {"model": "demo"} | (dict.fromkeys(limits, 3) or {"max_tokens": 3})


def case(seed: int, number: int, most_steps: int = MAX_STEPS) -> Case:
    """most_steps: with fewer mutations, the rest of the case is the same."""
    source = random.Random(f"{seed} body {number}")
    base = source.choice(weighted(source))
    steps = min(source.choice((1, 1, 1, 2, MAX_STEPS)), most_steps)
    headers = [("Content-Type", "application/json")] if base.fields is not None else []
    path, fields = base.path, base.fields
    if source.random() < 0.03:
        headers.append(source.choice(HEADERS))
    is_form = base.path == "/v1/files" and base.fields is not None
    if source.random() < (0.5 if fields is None else 0.03):
        for _ in range(steps):
            path = mutated_path(path, source)
    if fields is None:
        return Case(base.method, path, tuple(headers), b"", steps)
    if is_form:
        content_type, body = form(fields, source, steps)
        return Case(base.method, path, (("Content-Type", content_type), *headers[1:]), body, steps)
    as_text = source.random() < 0.15  # the last mutation is of the text, not of the values
    for _ in range(steps - as_text):
        fields = mutated(fields, source)
    body = written(fields)
    if as_text and steps:
        more, body = mutated_text(body, source)
        headers += more
    return Case(base.method, path, tuple(headers), body, steps)


def weighted(source: random.Random) -> list[Base]:
    """An endpoint's requests. Those with bodies come more often."""
    while True:
        group = source.choice(bases())
        if group[0].fields is not None or source.random() < 0.25:
            return group


HEADERS = (
    *(("X-Request-Id", text) for text in ("x", "a" * 300, "%0d%0a", "same")),
    *(("Authorization", text) for text in ("Bearer", "Bearer x", "Basic AAAA", "Bearer " + "x" * 5000)),
    *(("Content-Encoding", text) for text in ("gzip", "br", "identity")),
    *(("Accept", text) for text in ("text/plain", "*/*;q=x", "text/event-stream")),
    *(("Origin", text) for text in ("http://localhost:3000", "null", "http://example.com")),
    *(("Range", text) for text in ("bytes=0-0", "bytes=5-2", "bytes=0-1,2-3", "bytes=" + "0-1," * 200)),
    *(("anthropic-version", "x"), ("If-Range", "x"), ("X-Forwarded-For", "\x7f" * 3), ("Cookie", "a=b; c")),
)


def mutated_path(path: str, source: random.Random) -> str:
    way = source.randrange(6)
    if way == 0:
        return path + source.choice(("/", "//", "/x", "/..", "/%2e%2e/", "%00", "%ff%fe", ";a=b", "/load", "/content"))
    if way == 1:
        query = source.choice(("limit", "after", "order", "purpose", "model", "x", "[]", "%00"))
        value = source.choice(("0", "-1", "1", "9" * 40, "asc", "%ff", "a%00b", "", "NaN", "true", "x" * 3000))
        return f"{path}{'&' if '?' in path else '?'}{query}={value}"
    if way == 2:
        return path.replace("{", "", 1).replace("}", "", 1)
    if way == 3:
        return path.replace("/v1", "", 1) or "/"
    if way == 4:
        return path.replace("/", "//", 1)
    at = source.randrange(1, len(path) + 1)
    return path[:at] + source.choice(("%2F", "%25", "é".encode("latin-1").hex(), "a" * 2000, ".", "?", "#")) + path[at:]


# -- values ------------------------------------------------------------------------------------------------------------


def places(value: Any, parent: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    if parent is not None:
        yield parent, key
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for inner_key, inner in items:
        yield from places(inner, value, inner_key)


def hostile(source: random.Random) -> Any:
    way = source.random()
    if way < 0.3:
        return source.choice(NUMBERS)
    if way < 0.6:
        return source.choice(TEXTS)
    if way < 0.63:
        return source.choice(TEXTS) * source.choice((10, 100, 2000))
    if way < 0.66:
        return nested(source.choice((20, 100, 250)), source)
    if way < 0.75:
        return source.choice(SCHEMAS)
    return source.choice(STRUCTURES)


def nested(depth: int, source: random.Random) -> Any:
    value: Any = 1
    name = source.choice(("a", "properties", "content", "items", ""))
    for _ in range(depth):
        value = [value] if source.random() < 0.5 else {name: value}
    return value


def mutated(fields: Any, source: random.Random) -> Any:
    """The value, changed in one place."""
    if not isinstance(fields, dict) or source.random() < 0.005:
        return hostile(source)
    if len(json.dumps(fields)) > 200_000:
        return fields
    fields = json.loads(json.dumps(fields))
    way = source.random()
    if way < 0.10:
        return fields | dict(source.choice(source.choice(examples())))
    if way < 0.16:
        return fields | source.choice(FORMATS)(source.choice(SCHEMAS))
    if way < 0.20:
        return fields | {source.choice(("messages", "input")): source.choice(MESSAGES)}
    if way < 0.24:
        return fields | {source.choice(("stream", "logprobs", "echo", "ignore_eos", "think")): True, "n": 2}
    found = list(places(fields))
    if not found:
        return fields | {source.choice(TEXTS): hostile(source)}
    container, key = source.choice(found)
    if way < 0.60:
        container[key] = hostile(source)
    elif way < 0.70:
        del container[key]
    elif way < 0.80 and isinstance(container, dict):
        container[source.choice((str(key).upper(), f"{key}s", f" {key}", "x", *TEXTS[:6]))] = container.pop(key)
    elif way < 0.86:
        container[key] = [container[key]] * source.choice((0, 1, 2, 17, 200))
    elif way < 0.92:
        other, other_key = source.choice(found)
        container[key] = json.loads(json.dumps(other[other_key]))
    elif isinstance(container[key], str):
        at = source.randrange(len(container[key]) + 1)
        container[key] = container[key][:at] + source.choice(TEXTS) + container[key][at:]
    else:
        container[key] = str(container[key])
    return fields


@functools.cache
def examples() -> list[list[dict[str, Any]]]:
    return [[dict(claim.example) for claim in claims] for claims in tables().values()]


# -- texts -------------------------------------------------------------------------------------------------------------


def written(value: Any) -> bytes:
    """Lone surrogates are written as escapes. NaN and Infinity are written, although they are no JSON."""
    return json.dumps(value).encode()


def mutated_text(body: bytes, source: random.Random) -> tuple[list[tuple[str, str]], bytes]:
    """Headers that fit, and the body."""
    at = source.randrange(len(body) + 1)
    match source.randrange(16):
        case 0:
            return [], body[:at]
        case 1:
            return [], body[:at] + bytes([source.randrange(256)]) + body[at + 1 :]
        case 2:
            return [], body[:at] + source.choice((b"\xff", b"\xed\xa0\x80", b"\x00", b"\xc0\xaf", b"\\u12")) + body[at:]
        case 3:
            return [("Content-Encoding", "gzip")], gzip.compress(body, mtime=0)
        case 4:
            return [], gzip.compress(body, mtime=0)
        case 5:
            return [], body.decode(errors="replace").encode(
                source.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7", "cp037"))
            )
        case 6:  # a key twice
            return [], body[:1] + b'"model": 3, "stream": true, "messages": [], "prompt": 1, ' + body[1:]
        case 7:
            return [], body + source.choice((b"}", b"x", body, b"\x00", b" " * 100_000))
        case 8:
            return [], body.replace(b'"', b"'")
        case 9:
            return [], source.choice((b"[", b'{"a":', b'{"messages":[')) * source.choice((10, 1000, 50_000))
        case 10:
            return [], body.replace(b"1", b"1" * source.choice((20, 400, 5000)))
        case 11:
            return [], source.choice(
                (b"", b" ", b"null", b"[]", b'"x"', b"0", b"NaN", b"{}", b"[1,", b"\xef\xbb\xbf{}")
            )
        case 12:
            return [("Content-Type", source.choice(TYPES))], body
        case 13:
            return [], body.replace(b",", source.choice((b",,", b";", b", /* x */", b",\n// x\n")), 1)
        case 14:
            return [], body.replace(b":", b': 1e400, "a":', 1)
        case _:
            start = source.randrange(len(body) + 1)
            return [], body[: max(at, start)] + body[min(at, start) :]


TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json; charset=x", "x")


def form(fields: dict[str, Any], source: random.Random, steps: int) -> tuple[str, bytes]:
    """The content type and the body of an upload."""
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": SMALLEST["POST /v1/completions"]}
    name, file_name, boundary = "file", "f.jsonl", "xyz"
    parts: dict[str, Any] = {"purpose": fields["purpose"], "file": None}
    content_type = f"multipart/form-data; boundary={boundary}"
    content, text = written(line), None
    for _ in range(steps):
        match source.randrange(12):
            case 0:
                parts[source.choice(TEXTS[:9])] = source.choice(TEXTS)
            case 1:
                parts["purpose"] = source.choice(TEXTS)
            case 2:
                del parts[source.choice(list(parts))]
                parts.setdefault("x", "x")
            case 3:
                file_name = source.choice((*TEXTS, "a" * 5000, 'a"b', "a\r\nb: c", "a;b=c"))
            case 4:
                charset = source.choice(("x", "utf-16", "idna", "rot13", "utf-8", "us-ascii", "punycode", "é", ""))
                content_type += f"; charset={charset}"
            case 5:
                content_type = source.choice(
                    (*TYPES, "multipart/form-data; boundary=", "multipart/mixed; boundary=xyz")
                )
            case 6:
                content_type = f"multipart/form-data; boundary={source.choice(('abc', 'x' * 300, 'é', chr(34), 'a b'))}"
            case 7:
                line = mutated(line, source)
                content = written(line)
            case 8:
                content = b"\n".join(written(mutated(line, source)) for _ in range(3))
            case 9:
                _, content = mutated_text(content, source)
            case 10:
                name = source.choice((*TEXTS, "file[]", "files"))
            case _:
                text = source.randrange(2**30)
    pieces = []
    for key, value in parts.items():
        if key == "file":
            head = f'Content-Disposition: form-data; name="{name}"; filename="{file_name}"\r\n'
            inside = content
        else:
            head, inside = f'Content-Disposition: form-data; name="{key}"\r\n', str(value).encode("utf-8", "replace")
        pieces.append(f"--{boundary}\r\n{head}\r\n".encode("utf-8", "surrogatepass") + inside + b"\r\n")
    body = b"".join(pieces) + f"--{boundary}--\r\n".encode()
    if text is not None:
        _, body = mutated_text(body, random.Random(text)) if is_text(body) else ([], body[: text % len(body)])
    return content_type, body


def is_text(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
