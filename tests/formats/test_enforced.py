"""Whatever a model would rather write, an enforced call is one of the request's tools, and its arguments are valid."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from mlxpaged.core.engine.constraint import StructuredOutput, ToolCallForm
from mlxpaged.formats import FORMATS
from mlxpaged.formats.pieces import InexpressibleError
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.parts.grammar.grammar import Grammars
from tests.formats.test_reading import calls_of, parse, said
from tests.formats.written import WRITTEN
from tests.scripted import make_scripted_model

ENFORCED = sorted(name for name, form in FORMATS.items() if form.written is not None)
MOST_TOKENS = 4000
SPELLED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of the model that are not special."""


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Without strings that have no end: what a random model writes between two tags would have none."""
    text = {"type": "string", "maxLength": rng.randint(0, 6)}
    choices: list[dict[str, Any]] = [
        text,
        text | {"minLength": 1, "maxLength": 3},
        {"type": "string", "pattern": "^[a-c]{1,4}$"},
        {"enum": ["on", "off", "a b\n"]},
        {"enum": [1, "x", None, True]},
        {"type": "integer", "minimum": -5, "maximum": 99},
        {"type": "number", "minimum": 0, "maximum": 2},
        {"type": "boolean"},
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
        {"type": ["boolean", "null"]},
    ]
    if depth < 2:
        choices += [
            {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": 2},
            random_object(rng, depth + 1),
        ]
    return rng.choice(choices)


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    keys = rng.sample(["path", "old_string", "n", "flag", "items", "mode"], rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {key: random_schema(rng, depth) for key in keys},
        "required": [key for key in keys if rng.random() < 0.6],
        "additionalProperties": False,
    }


def random_answer(grammars: Grammars, form: StructuredOutput, served: ServedModel, rng: random.Random) -> str:
    """What a model writes that takes any token that the grammar allows, and ends its answer as soon as it may."""
    matcher, tokens = grammars.start(form, ignore_eos=False), []
    ends = served.tokenizer.eos_token_ids
    while len(tokens) < MOST_TOKENS:
        [mask] = grammars.masks([(matcher, ())])
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if any(int(token) in ends for token in allowed):
            return served.tokenizer.text_with_specials(tokens)
        token = int(rng.choice(allowed))
        matcher.advance(token)
        tokens.append(token)
    raise AssertionError(served.tokenizer.text_with_specials(tokens)[:1000])


def check(
    name: str,
    served: ServedModel,
    grammars: Grammars,
    seeds: range,
    new_schema: Callable[[random.Random], Any] = random_object,
) -> None:
    form = FORMATS[name]
    assert form.written is not None
    for seed in seeds:
        rng = random.Random(seed)
        schemas = {tool: new_schema(rng) for tool in ("edit", "mcp__fs__read-file")}
        try:
            calls = tuple(ToolCallForm(form.written(tool, schema)) for tool, schema in schemas.items())
        except InexpressibleError as error:
            raise AssertionError(f"{seed}: {schemas}") from error
        held = StructuredOutput("never", "", "", None, form.call_start, calls, one_call=True)
        text = random_answer(grammars, held, served, rng)
        tools = [{"type": "function", "function": {"name": key, "parameters": each}} for key, each in schemas.items()]
        deltas = parse([text], name, tools, held=held, think=False)
        where = f"seed {seed}: {schemas} was answered by {text!r}"
        assert said(deltas) == "", where
        [(called, arguments)] = calls_of(deltas)
        errors = list(jsonschema.Draft202012Validator(schemas[called]).iter_errors(arguments))
        assert not errors, f"{where}: {arguments} {errors}"


Model = tuple[str, ServedModel, Grammars]


@pytest.fixture(scope="module", params=ENFORCED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Of a format. Tests are grouped by it: to make one takes longer than most tests."""
    served = load_model(str(make_scripted_model(tmp_path_factory.mktemp("model"), request.param)))
    return request.param, served, Grammars(served.tokenizer, served.vocab_size)


def test_enforced_arguments_are_valid(model: Model) -> None:
    check(*model, range(6))


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
REFERRING = {
    "type": "object",
    "definitions": {"digit": DIGIT},
    "properties": {
        "digit": {"$ref": "#/definitions/digit"},
        "point": {"type": "array", "items": {"$ref": "#/definitions/digit"}, "maxItems": 2},
        "other": {"$ref": "#/properties/point"},
        "inner": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    },
    "required": ["digit", "point", "other"],
    "additionalProperties": False,
}


def test_an_argument_may_refer_to_any_part_of_the_schema(model: Model) -> None:
    check(*model, range(2), lambda rng: REFERRING)


ARGUMENTS = {"path": "a b", "content": "one\n  two\n", "line": 3, "all": True}
WRITE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "line": {"type": "integer"},
        "all": {"type": "boolean"},
    },
    "required": ["path", "content", "line", "all"],
    "additionalProperties": False,
}


def test_a_grammar_allows_what_models_write(model: Model) -> None:
    """Otherwise it would force them to write what they were not trained for. Llama 3 may leave out its first tag, which
    a grammar needs to tell calls from text. In Python, texts are in double quotes. MiniCPM5's numbers are bare."""
    check_allowed(*model, WRITE, ARGUMENTS)


NULLABLE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "short": {"type": ["string", "null"], "maxLength": 3},
        "limited": {"oneOf": [{"type": "null"}, {"type": "string", "pattern": "^cat|dog$"}], "default": None},
    },
    "required": ["text", "short", "limited"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("value", [None, "cat"])
def test_an_optional_text_may_be_null(model: Model, value: str | None) -> None:
    name, *_ = model
    if name not in ("pythonic", "llama4"):  # where models write Python's null; a grammar allows that of JSON
        check_allowed(*model, NULLABLE, dict.fromkeys(NULLABLE["properties"], value))


@pytest.mark.parametrize("text", ["catx", "hotdog", "cat"])
def test_each_alternative_of_a_pattern_has_its_own_anchor(model: Model, text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^cat|dog$"}}, "required": ["a"]}
    check_allowed(*model, schema, {"a": text})


@pytest.mark.parametrize(
    ("schema", "text", "other"),
    [
        ({"format": "date-time"}, "2026-11-29T12:00:00Z", "2026-11-31T12:00:00Z"),
        ({"format": "uri", "maxLength": 14}, "http://a.b/c?d", "no link"),
        ({"format": "path"}, "/any text", None),
        ({"format": "email", "pattern": "^(?!a)"}, "b@c.de", "a@c.de"),
        ({"pattern": "^(?=.*[0-9])(?!.*x).{2,3}$"}, "a1", "x1"),
    ],
)
def test_formats_and_look_ahead_hold_in_each_format(
    model: Model, schema: dict[str, Any], text: str, other: str | None
) -> None:
    for value in ({"type": "string", **schema}, {"anyOf": [{"type": "string", **schema}, {"type": "null"}]}):
        tool = {"type": "object", "properties": {"a": value}, "required": ["a"]}
        check_allowed(*model, tool, {"a": text})
        if other is not None:
            with pytest.raises(AssertionError, match="after"):
                check_allowed(*model, tool, {"a": other})


def check_allowed(
    name: str, served: ServedModel, grammars: Grammars, schema: dict[str, Any], arguments: dict[str, Any]
) -> None:
    form = FORMATS[name]
    calls = (ToolCallForm(form.pieces("write_file", schema)),)
    held = StructuredOutput("never", "", "", None, form.call_start, calls, one_call=True)
    matcher, before = grammars.start(held, ignore_eos=False), ""
    text = WRITTEN[name]("write_file", arguments)
    text = text.replace("'", '"') if name in ("pythonic", "llama4") else text
    text = re.sub(r"<!\[CDATA\[(3|true)\]\]>", r"\1", text) if name == "minicpm5" else text
    text = text[text.index(form.call_start) :] if form.call_start in text else form.call_start + text
    for token in served.tokenizer.encode(text, add_special_tokens=False):
        [mask] = grammars.masks([(matcher, ())])
        said_now = served.tokenizer.text_with_specials([token])
        assert np.unpackbits(mask.view(np.uint8), bitorder="little")[token], f"{said_now!r} after {before!r}"
        matcher.advance(token)
        before += said_now


ODD: list[Any] = [
    *(True, False, {"type": ["string", 5]}, {"type": [{}, "null"]}, {"type": []}, {"type": 5}),
    *({"enum": []}, {"const": {}}, {"type": ["integer", "boolean"]}, {"$ref": "#/nothing"}),
]
"""Schemas of an argument that are unusual or wrong: the compiler says what is wrong, or the format has no way."""


@pytest.mark.parametrize("name", ENFORCED)
def test_any_schema_has_pieces_or_a_reason(name: str) -> None:
    for odd in ODD:
        reason = ""
        try:
            pieces: Any = FORMATS[name].pieces("edit", {"type": "object", "properties": {"a": odd}})
        except InexpressibleError as error:
            pieces, reason = (), str(error)
        assert pieces or reason, odd


@pytest.mark.parametrize("name", ENFORCED)
def test_required_need_not_be_a_list(name: str) -> None:
    assert FORMATS[name].pieces("edit", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": True})


@pytest.mark.slow
def test_enforced_arguments_of_500_schemas_are_valid(model: Model) -> None:
    check(*model, range(6, 500))


def test_tools_that_are_not_strict_can_be_beside_strict_ones() -> None:
    for name in ENFORCED:
        assert FORMATS[name].pieces("f", None), name


def test_command_r_writes_enforced_calls_as_it_was_trained() -> None:
    first, *_ = FORMATS["command_r"].pieces("f", {"type": "object"})
    assert first == '[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": '


def test_what_cannot_be_expressed_is_refused_with_the_reason() -> None:
    written = FORMATS["qwen3_coder"].written
    assert written is not None
    for schema, reason in (
        ({"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 1}, DIGIT]}}}, "in a union"),
        ({"additionalProperties": {"type": "string"}}, "any names"),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "anyOf"),
        ({"properties": {}, "required": ["a"]}, "'a' is not among the properties"),
    ):
        with pytest.raises(InexpressibleError, match=reason):
            written("f", schema)
