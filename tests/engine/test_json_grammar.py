"""A string in enforced JSON has every escape of RFC 8259, and a grammar allows an answer if and only if it is valid."""

from __future__ import annotations

import ipaddress
import itertools
import json
import math
import os
import random
import re
import sys
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.formats.string_formats import STRING_FORMATS
from mlxpaged.parts.grammar import characters
from mlxpaged.parts.grammar.characters import in_json
from mlxpaged.parts.grammar.check import checker
from mlxpaged.parts.grammar.grammar import grammar_text
from mlxpaged.parts.grammar.integers import integers
from mlxpaged.parts.grammar.json_grammar import lark_of_schema
from mlxpaged.parts.grammar.schema_merge import OtherSchemaError, Unsatisfiable
from mlxpaged.watched_program import WatchedProgram
from tests.engine.json_cases import VOCABULARY, Case, matcher_of, reordered, written

SEED = int(os.environ.get("MLXPAGED_FUZZ_SEED", "1"))
FIRST = int(os.environ.get("MLXPAGED_FUZZ_FIRST", "0"))
MANY = int(os.environ.get("MLXPAGED_FUZZ_SCHEMAS", "50000"))
PARTS = 8
VALUES = 4
MOST_TOKENS = 300
MOST_ORDERS = 5000


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(VOCABULARY))


def accepts(schema: Any, text: str, tokenizer: LLTokenizer, seed: int = 0) -> bool:
    matcher = matcher_of(schema, tokenizer)
    assert not matcher.is_error(), matcher.get_error()
    tokens = VOCABULARY.cut(text, random.Random(seed))
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


STRINGS: dict[str, dict[str, Any]] = {
    "plain": {"type": "string"},
    "with a length": {"type": "string", "minLength": 1, "maxLength": 12},
    "with a pattern": {"type": "string", "pattern": "^.+$"},
    "with both": {"type": "string", "pattern": "[^x]", "minLength": 1, "maxLength": 20},
    "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "of any type": {},
}
ESCAPED = (
    r'"caf\u00e9"',
    r'"it\u2019s"',
    r'"\ud83d\ude42"',
    r'"\uD83D\uDE42!"',
    r'"a\/b"',
    r'"\"\\\/\b\f\n\r\t"',
    r'"\u0041\u000a\u001F"',
    '"caf\u00e9 \U0001f642/"',
)


@pytest.mark.parametrize("name", STRINGS)
@pytest.mark.parametrize("text", ESCAPED)
def test_a_string_may_have_every_escape(tokenizer: LLTokenizer, name: str, text: str) -> None:
    if name == "with a pattern":
        text = re.sub(r"\\n|\\r|\\u000a", "", text)  # a dot is no line feed
    for seed in range(4):
        assert accepts(STRINGS[name], text, tokenizer, seed), text
        json.loads(text)


@pytest.mark.parametrize(
    "text", [r'"\ud83d"', r'"\ude42"', r'"\ud83dx"', r'"\ud83d\u0041"', r'"\x41"', r'"\u00g0"', '"\n"']
)
def test_what_is_no_escape_or_half_of_a_pair_is_not_allowed(tokenizer: LLTokenizer, text: str) -> None:
    for schema in STRINGS.values():
        assert not accepts(schema, text, tokenizer)


def test_a_length_counts_characters_and_not_how_they_are_written(tokenizer: LLTokenizer) -> None:
    schema = {"type": "string", "minLength": 2, "maxLength": 3}
    for text in (r'"\ud83d\ude42\u00e9"', r'"\/\""', r'"🙂é\n"'):
        assert accepts(schema, text, tokenizer)
    for text in (r'"\ud83d\ude42"', r'"\u00e9"', r'"abc\/"', r'"\u0061\u0062\u0063\u0064"'):
        assert not accepts(schema, text, tokenizer)


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"pattern": "^cat|dog$"}, ['"catx"', '"hotdog"', r'"\u0063at"'], ['"xcat"', '"dogs"']),
        ({"pattern": "^[a-é]+$"}, [r'"\u00e9"', r'"\u00E0"', '"z"'], [r'"\u00ea"', r'"\u0060"', r'"\u0009"']),
        (
            {"pattern": "^[😀-🙏]$"},
            [r'"\ud83d\ude00"', '"🙂"', r'"\uD83D\uDE4F"'],
            [r'"\ud83d\udeff"', r'"\ud83e\ude00"'],
        ),
        ({"pattern": "a/b"}, [r'"xa\/b"', '"a/b"', r'"a\u002fb"'], ['"ab"']),
        ({"enum": ["café", "caf\tx"]}, [r'"caf\u00e9"', '"café"', r'"caf\tx"', r'"caf\u0009x"'], [r'"caf\u0009"']),
        ({"const": "a/b"}, [r'"a\/b"', '"a/b"'], ['"a"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], [r'"2024\u002d02-29"']),
        ({"format": "path"}, ['"no\\/where"', '""'], ["1"]),
        ({"format": "password", "minLength": 2}, ['"ab"', r'"\u0061b"'], ['"a"']),
        ({"format": "cidrv4", "pattern": "^[0-9.]+/[0-9]+$"}, [r'"10.0.0.0\/8"'], ['"10"']),
        ({"format": "regex", "maxLength": 1}, ['"("'], ['"()"']),
        ({"format": ["date"]}, ['"x"'], []),
        ({"format": "date", "pattern": "-01$"}, ['"2024-02-01"'], ['"2024-02-02"', '"x-01"']),
        ({"format": "uri", "maxLength": 6}, ['"ab:c/d"'], ['"ab:c/de"', '"abc"']),
        ({"pattern": "^(?!\\.)(?!.*\\.\\.)[a-z.]+$"}, ['"a.b"', '"a."'], ['".a"', '"a..b"', '"A"', '""']),
        ({"pattern": "^(?=.*[A-Z])(?=.*[0-9]).{3,5}"}, ['"aB1"', r'"\u0042a1xyzq"'], ['"ab1"', '"B1"', '"aBc"']),
        ({"pattern": "^(?!^[-+.]*$)[+-]?0*[0-9]*\\.?[0-9]*$"}, ['"1.5"', '"-0"'], ['"-"', '""', '"."']),
        ({"pattern": "^(?=.{1,3}$)a+(?:b|c)?$"}, ['"aab"', '"a"'], ['"aaab"', '"b"']),
        ({"pattern": "^(?!cat|dog$)"}, ['"ca"', '"dogs"', '""'], ['"cats"', '"dog"']),
    ],
)
def test_limits_hold_for_the_text_and_not_for_its_spelling(
    tokenizer: LLTokenizer, schema: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    for text in allowed:
        assert accepts({"type": "string", **schema}, text, tokenizer), text
    for text in refused:
        assert not accepts({"type": "string", **schema}, text, tokenizer), text


FORMATTED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "date": (("2024-02-29", "2000-02-29", "1999-12-31"), ("2023-02-29", "1900-02-29", "2024-04-31", "24-01-01")),
    "time": (("23:59:60Z", "12:00:00.123456789+01:00"), ("24:00:00Z", "12:00:00", "12:00:00.1234567890Z", "12:00Z")),
    "date-time": (("2024-02-29T12:00:00Z", "2024-02-29t12:00:00z"), ("2024-02-29 12:00:00Z", "2023-02-29T12:00:00Z")),
    "duration": (("P1D", "P1W", "PT1H2M3S", "P1Y2M3DT4H5M6S"), ("P", "P1YT", "PT1.5S", "P1W1D", "P1Y1D")),
    "email": (("a@b", "a.b+c@d-e.fg", "a@[127.0.0.1]"), ("a..b@c", "a@b-.c", "@b", "a", ".a@b")),
    "hostname": (("a", "xn--a.b-c.de", "a" * 63), ("-a", "a_b", "a" * 64, "a..b")),
    "ipv4": (("255.255.255.255", "0.0.0.0"), ("01.2.3.4", "256.1.1.1", "1.2.3")),
    "ipv6": (("::", "1::", "::1", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4"), ("1:2::3:4:5:6:7:8", "1::2::3", "1:2", "g::")),
    "uuid": (("0a0a0a0a-0000-4000-A000-BBBBBBBBBBBB",), ("0a0a0a0a00004000A000BBBBBBBBBBBB",)),
    "uri": (("http://a.b:80/c?d#e", "mailto:a@b", "urn:x:y", "http://[::1]/%20"), ("//a", "a", "http:// a", "a:%2")),
}


@pytest.mark.parametrize("name", STRING_FORMATS)
def test_a_format_holds_for_the_whole_text(tokenizer: LLTokenizer, name: str) -> None:
    fitting, others = FORMATTED[name]
    schema = {"type": "string", "format": name}
    for text in fitting:
        assert accepts(schema, json.dumps(text), tokenizer), text
        assert not accepts(schema, json.dumps(f"{text} "), tokenizer)
        assert not accepts(schema, json.dumps(f" {text}"), tokenizer)
    for text in others:
        assert not accepts(schema, json.dumps(text), tokenizer), text


def test_addresses_are_those_of_pythons_library() -> None:
    rng, found = random.Random(SEED), 0
    for _ in range(20_000):
        parts = [rng.choice(["", "1", "ab", "FFFF", "0"]) for _ in range(rng.randint(0, 9))]
        text = ":".join([*parts, *(["1.2.3.4"] if rng.random() < 0.1 else [])])
        try:
            ipaddress.IPv6Address(text)
            is_valid = True
        except ValueError:
            is_valid = False
        found += is_valid
        assert bool(re.match(STRING_FORMATS["ipv6"], text)) == is_valid, text
    assert found > 500


@pytest.mark.parametrize(
    ("names", "allowed", "refused"),
    [
        ({"type": "string"}, ['{"any": 1}', "{}"], ['{"any": "x"}']),
        (True, ['{"any": 1}'], ['{"any": "x"}']),
        ({"format": "path", "title": "T"}, ['{"any": 1}'], ['{"any": "x"}']),
        ({"enum": ["a", "é"]}, ['{"a": 1}', r'{"\u00e9": 2}', "{}"], ['{"b": 1}', '{"a": "x"}']),
        ({"anyOf": [{"const": "a"}, {"const": "b"}]}, ['{"a": 1, "b": 2}'], ['{"c": 1}', '{"a": 1, "a": 2}']),
        ({"$ref": "#/$defs/name"}, ['{"k1": 1, "k22": 2}'], ['{"k": 1}', '{"k1": null}']),
        ({"minLength": 2, "maxLength": 3}, ['{"ab": 1, "éé🙂": 2}'], ['{"a": 1}', '{"abcd": 1}']),
        ({"pattern": "[0-9]", "minLength": 2}, ['{"a1": 1}'], ['{"1": 1}', '{"ab": 1}']),
        ({"format": "uuid"}, ['{"0a0a0a0a-0000-4000-A000-BBBBBBBBBBBB": 1}'], ['{"0a": 1}']),
        ({"format": "email", "pattern": "^[a-c]", "maxLength": 5}, ['{"a@b.c": 1}'], ['{"d@b": 1}', '{"a@b.cd": 1}']),
    ],
)
def test_names_of_properties_fit_their_schema(
    tokenizer: LLTokenizer, names: Any, allowed: list[str], refused: list[str]
) -> None:
    record = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    schema = {"$defs": {"name": {"type": "string", "pattern": "^k[0-9]+$"}}, **record}
    for text in allowed:
        assert accepts(schema, text, tokenizer), text
    for text in refused:
        assert not accepts(schema, text, tokenizer), text


def test_a_record_of_listed_names_has_those_that_are_required(tokenizer: LLTokenizer) -> None:
    names = {"propertyNames": {"enum": ["a", "b"]}, "required": ["a"], "properties": {"a": {"const": 7}, "c": {}}}
    schema = {"type": "object", **names, "additionalProperties": {"type": "boolean"}}
    assert accepts(schema, '{"a": 7, "b": true}', tokenizer)
    for text in ('{"b": true}', '{"a": 7, "c": 1}', '{"a": 7, "b": 1}'):
        assert not accepts(schema, text, tokenizer)


@pytest.mark.parametrize("nothing", [{"uniqueItems": False}, {"not": False}, {"format": "x"}])
def test_what_forbids_nothing_is_left_out(tokenizer: LLTokenizer, nothing: dict[str, Any]) -> None:
    assert accepts({"type": "array", "items": {"type": "integer"}, **nothing}, "[1, 1]", tokenizer)


def test_what_allows_nothing_is_not_begun(tokenizer: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}, "b": {}}, "additionalProperties": False}
    assert accepts(schema, '{"b": 1}', tokenizer)
    assert not accepts(schema, '{"a": 1}', tokenizer)


def test_a_key_that_is_not_listed_is_not_a_listed_one_in_another_spelling(tokenizer: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    assert accepts(schema, r'{"city": "Rome", "caf\u00e9": 1, "a\/b": 2}', tokenizer)
    assert not accepts(schema, r'{"c\u0069ty": 1}', tokenizer)
    listed = {"type": "object", "properties": {"größe": {}}, "additionalProperties": False}
    assert accepts(listed, r'{"gr\u00f6\u00DFe": 1}', tokenizer)


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"const": 9007199254740993}, ["9007199254740993"], ["9007199254740992", "9007199254740994"]),
        ({"enum": [2**63 - 1, -(2**63)]}, ["9223372036854775807", "-9223372036854775808"], ["9223372036854775808"]),
        (
            {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**60 + 1},
            ["9007199254740993", "1152921504606846977", "99999999999999999"],
            ["9007199254740992", "1152921504606846978"],
        ),
        (
            {"type": "integer", "exclusiveMinimum": 2**53 + 1},
            ["9007199254740994", "123456789012345678901"],
            ["9007199254740993"],
        ),
        ({"type": "integer", "exclusiveMaximum": -(2**53) - 1}, ["-9007199254740994"], ["-9007199254740993", "0", "7"]),
        ({"const": [1, {"id": 2**64 + 1}]}, ['[1,{"id":18446744073709551617}]'], ['[1,{"id":18446744073709551616}]']),
    ],
)
def test_large_integers_are_exact(
    tokenizer: LLTokenizer, schema: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    assert all(accepts(schema, text, tokenizer) for text in allowed)
    assert not any(accepts(schema, text, tokenizer) for text in refused)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "maximum": 2**53 + 1},
        {"type": "integer", "minimum": 2**53 + 1, "multipleOf": 2},
        {"patternProperties": {"^a": {"const": 2**53 + 1}, "^b": {}}},
    ],
)
def test_large_integers_that_cannot_be_exact_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"above 2\^53|9007199254740993"):
        grammar_text(Constraint("json_schema", json.dumps(schema)))


NUMBERS: dict[str, dict[str, Any]] = {
    "any": {},
    "float32": {"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    "float64": {"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    "share": {"minimum": 0, "maximum": 1},
    "positive": {"exclusiveMinimum": 0},
    "negative": {"exclusiveMaximum": 0, "minimum": -1e22},
    "between tenths": {"exclusiveMinimum": 0.1, "exclusiveMaximum": 99.95},
    "around zero": {"minimum": -273.15, "maximum": 1e3},
    "small": {"minimum": 1.5e-7, "maximum": 2.5e-7},
    "tiny": {"minimum": 3e-320, "exclusiveMaximum": 1e-300},
    "large": {"minimum": 2**60, "maximum": 1e300},
    "one": {"minimum": 2.5, "maximum": 2.5},
}
EDGES = sorted({0.0, 1.0, 2.0**60, *(float(each) for schema in NUMBERS.values() for each in schema.values())})
NEAR_EDGES = [math.nextafter(edge, end) for edge in EDGES for end in (-math.inf, math.inf)]


def as_javascript_writes_it(number: float) -> str:
    """JSON.stringify's text of a double."""
    found = Decimal(repr(number))
    digits, exponent = "".join(map(str, found.as_tuple().digits)).rstrip("0"), found.adjusted()
    if number == 0 or -7 < exponent < 21:
        return format(found, "f").removesuffix(".0") if number else "0"
    point = f".{digits[1:]}" if digits[1:] else ""
    return f"{'-' if number < 0 else ''}{digits[0]}{point}e{'+' if exponent > 0 else ''}{exponent}"


@pytest.mark.parametrize("name", NUMBERS)
def test_a_double_can_be_written_if_it_is_in_the_range(tokenizer: LLTokenizer, name: str) -> None:
    schema = {"type": "number", **NUMBERS[name]}
    start, validator = matcher_of(schema, tokenizer), jsonschema.Draft202012Validator(schema)

    def allows(text: str) -> bool:
        tokens, matcher = VOCABULARY(text), start.deep_copy()
        return (
            matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    anywhere = st.floats(allow_nan=False, allow_infinity=False)
    inside = st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
    edges = st.sampled_from([each for each in (*EDGES, *NEAR_EDGES) if math.isfinite(each)])
    short = st.decimals(-1000, 1000, places=3).map(float)

    @given(anywhere | inside | edges | short, st.text("0123456789", max_size=20))
    def check(number: float, digits: str) -> None:
        plain = format(Decimal(repr(number)), "f")
        for text in (repr(number), as_javascript_writes_it(number), json.dumps(number).upper()):
            if text.strip("-0.") or not text.startswith("-"):  # a zero has a sign only beside negative numbers
                assert allows(text) == validator.is_valid(number), text
        for text in (plain, plain + ("" if "." in plain else ".") + digits, repr(number).replace("e", f"{digits}e")):
            assert not allows(text) or validator.is_valid(float(text)), text

    check()


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "number", **bounds} for bounds in NUMBERS.values()),
        *({"type": "integer", **bounds} for bounds in ({}, {"minimum": 3}, {"maximum": -3}, {"multipleOf": 5})),
        *(
            {"type": "number", "multipleOf": 0.01, **bounds}
            for bounds in ({}, {"minimum": 0}, {"exclusiveMaximum": 1e30})
        ),
    ],
    ids=str,
)
def test_a_number_ends_though_digits_are_written_as_long_as_they_may(
    tokenizer: LLTokenizer, schema: dict[str, Any]
) -> None:
    for order in itertools.product(("0123456789", "9876543210", "3120456789"), ("-.e+", ".e-+", "e-.+")):
        matcher, text = matcher_of(schema, tokenizer), ""
        while not matcher.is_stopped():
            options = [char for char in "".join(order) if matcher.validate_tokens(VOCABULARY(char))]
            if not options:
                break
            text += options[0]
            assert matcher.consume_tokens(VOCABULARY(options[0]))
            assert len(text) < 340, text
        assert matcher.is_accepting(), text
        assert math.isfinite(float(text)) or schema["type"] == "integer"


@given(st.integers(-(2**65), 2**65), st.integers(-(2**65), 2**65), st.data())
def test_integers_are_those_of_the_range(one: int, other: int, data: st.DataObject) -> None:
    low, high = min(one, other), max(one, other)
    found = re.compile(integers(low, high))
    edges = [low - 1, low, high, high + 1, 0, 2**53 + 1, 2**63, 2**64 - 1, -(2**63)]
    for number in [*edges, data.draw(st.integers(low, high)), data.draw(st.integers(-(10**21), 10**21))]:
        assert bool(found.fullmatch(str(number))) == (low <= number <= high)


def test_an_integer_without_bounds_has_as_many_digits_as_the_largest_double(tokenizer: LLTokenizer) -> None:
    for text in ("0", "-7", str(2**64 + 1), str(int(sys.float_info.max)), "-" + "9" * 309):
        assert accepts({"type": "integer"}, text, tokenizer)
    for text in ("1" + "0" * 309, "-0", "01", "1.0", "1e3"):
        assert not accepts({"type": "integer"}, text, tokenizer)


def pattern_of(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """As ECMAScript has it: Python's expressions have no categories, and find an end before the last line feed."""
    upper = value[:1] if isinstance(value, str) and unicodedata.category(value[:1] or " ") == "Lu" else "[^\\s\\S]"
    own = pattern.replace("$", r"\Z").replace(r"\p{Lu}", upper)
    if isinstance(value, str) and not re.search(own, value, re.ASCII):
        yield jsonschema.ValidationError(f"{value!r} does not match")


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern_of})


def check(seed: int, tokenizer: LLTokenizer) -> tuple[int, int]:
    """How many values of a random schema were allowed, and refused; none of a schema that is refused, or left to
    llguidance. What the grammar allows is what is valid."""
    case = Case(seed)
    validator = Validator(case.root)
    counts = [0, 0]
    where = f"seed {seed}: {json.dumps(case.root, ensure_ascii=False)}"
    try:
        matcher = matcher_of(case.root, tokenizer)
    except ValueError:  # it is left to llguidance, and has large integers
        return 0, 0
    is_own = grammar_text(Constraint("json_schema", json.dumps(case.root))).startswith("%llguidance")
    if matcher.is_error() and not is_own:
        return 0, 0
    assert not matcher.is_error(), f"{where}: {matcher.get_error()}"

    def allows(value: Any) -> bool:
        text = written(value, case.rng)
        assert json.loads(text) == value
        tokens, one = VOCABULARY.cut(text, case.rng), matcher.deep_copy()
        return one.validate_tokens(tokens) == len(tokens) and one.consume_tokens(tokens) and one.is_accepting()

    for _ in range(VALUES if is_own else 0):  # where llguidance compiles the schema, strings have fewer escapes
        value = case.value(case.root)
        valid = validator.is_valid(value)
        # Members have the order of the branch that they fit, which may be another one than they were made for.
        allowed = allows(value) or (valid and any(map(allows, itertools.islice(reordered(value), MOST_ORDERS))))
        assert allowed == valid, f"{where}: {value!r} is {'valid' if valid else 'not valid'}"
        counts[not valid] += 1
    tokens: list[int] = []
    while len(tokens) < MOST_TOKENS:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed_tokens = np.flatnonzero(mask[: len(VOCABULARY.tokens)]).tolist()
        assert allowed_tokens, f"{where}: nothing follows {VOCABULARY.text(tokens)!r}"
        options = [token for token in allowed_tokens if token != VOCABULARY.eos_token_id]
        if matcher.is_accepting() and (not options or case.rng.random() < 0.5):
            text = VOCABULARY.text(tokens)
            assert validator.is_valid(json.loads(text)), f"{where}: {text}"
            break
        closing = [token for token in allowed_tokens if VOCABULARY.tokens[token] in (b'"', b"}", b"]")]
        token = case.rng.choice(closing if closing and case.rng.random() < 0.3 else options)
        tokens.append(token)
        assert matcher.consume_token(token), f"{where}: {VOCABULARY.text(tokens)!r}"
    return counts[0], counts[1]


@pytest.mark.parametrize(
    "numbers", [range(100), *(pytest.param(range(part, MANY, PARTS), marks=pytest.mark.slow) for part in range(PARTS))]
)
def test_a_grammar_allows_what_is_valid_and_nothing_else(tokenizer: LLTokenizer, numbers: range) -> None:
    counts = [check(SEED * 1_000_000 + FIRST + number, tokenizer) for number in numbers]
    assert counts.count((0, 0)) < max(5, len(counts) // 50)
    assert sum(valid for valid, _ in counts) > 2 * len(counts)
    assert sum(invalid for _, invalid in counts) > len(counts) // 4


GRAMMAR = r"""
start: "<%json {}>" object /%json/ value  // %json {}
object: %json {"type": "object", "properties": {"a}": {"type": "string", "pattern": "[^\"]"}}, "required": ["a}"]}
value: "(" %json
{"enum": ["café", 9007199254740993]} ")"
"""


def test_a_schema_in_a_grammar_has_the_same_strings(tokenizer: LLTokenizer) -> None:
    def ends(text: str) -> bool:
        matcher = LLMatcher(tokenizer, grammar_text(Constraint("grammar", GRAMMAR)))
        assert not matcher.is_error(), matcher.get_error()
        tokens = VOCABULARY.cut(text, random.Random(0))
        return (
            matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    assert ends(r'<%json {}>{"a}":     "caf\u00e9\/"}%json("caf\u00e9")')
    assert ends(r'<%json {}>{"a}": "x"}%json(9007199254740993)')
    assert not ends(r'<%json {}>{"a}": "\""}%json("café")')
    assert not ends(r'<%json {}>{"a}": "x"}%json(9007199254740992)')


@pytest.mark.parametrize(
    "schema", ['{"x-guidance": {"whitespace_flexible": false}, "type": "object"}', '{"not": {}}', '{"a', "[]"]
)
def test_a_schema_that_is_left_to_the_compiler_stays_in_the_grammar(schema: str) -> None:
    grammar = f"start: %json {schema}"
    assert grammar_text(Constraint("grammar", grammar)) == grammar


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (
            {
                "properties": {"a": {}},
                "patternProperties": {"^[a-c]": {"type": "integer"}},
                "additionalProperties": False,
            },
            ['{"a": 1}', '{"b": 2, "c-": 3}', "{}"],
            ['{"a": "x"}', '{"d": 1}', r'{"\u0061": 1}'],
        ),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, ['{"a": 1}', '{"b": 2}', '{"c/": 1}'], ["{}"]),
        (
            {"properties": {"a": {}}, "maxProperties": 1, "additionalProperties": False},
            ["{}", '{"a": 1}'],
            ['{"b": 1}'],
        ),
        ({"minProperties": 2, "maxProperties": 3}, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a":1,"b":1,"c":1,"d":1}']),
    ],
)
def test_an_object_has_the_members_that_it_may_have(
    tokenizer: LLTokenizer, schema: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    assert grammar_text(Constraint("json_schema", json.dumps(schema))).startswith("%llguidance")
    for text in allowed:
        assert accepts({"type": "object", **schema}, text, tokenizer), text
    for text in refused:
        assert not accepts({"type": "object", **schema}, text, tokenizer), text


@pytest.mark.parametrize("must", [[], ["b"], ["a", "c"]], ids=" ".join)
def test_an_object_has_as_many_members_as_it_may_have(tokenizer: LLTokenizer, must: list[str]) -> None:
    """Each object of up to five members, for all limits, beside jsonschema."""
    objects = [dict.fromkeys(names, 1) for number in range(6) for names in itertools.combinations("abcde", number)]
    for least, most, others in itertools.product(range(4), (None, 0, 1, 2, 3), (False, True)):
        schema = {"type": "object", "properties": {key: {} for key in "abc"}, "required": must}
        schema |= {"minProperties": least, "additionalProperties": others}
        schema |= {} if most is None else {"maxProperties": most}
        fits = jsonschema.Draft202012Validator(schema).is_valid
        if not any(map(fits, objects)):
            with pytest.raises(Unsatisfiable):
                lark_of_schema(schema)
            continue
        matcher = matcher_of(schema, tokenizer)
        for each in objects:
            tokens = VOCABULARY(json.dumps(each))
            written = matcher.validate_tokens(tokens) == len(tokens)
            written = written and matcher.consume_tokens(tokens) and matcher.is_accepting()
            assert written == fits(each), (schema, each)
            matcher.reset()


def test_the_members_that_are_counted_are_limited(tokenizer: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(300)}, "minProperties": 2}
    assert accepts(schema, '{"p7": 1, "p299": 2}', tokenizer)
    assert not accepts(schema, '{"p299": 2}', tokenizer)
    with pytest.raises(OtherSchemaError, match="too many properties"):
        lark_of_schema(schema | {"minProperties": 4})


def test_a_list_of_items_is_one_of_earlier_drafts(tokenizer: LLTokenizer) -> None:
    schema = {"type": "array", "items": [{"const": "a/b"}, {"type": "integer"}], "additionalItems": {"type": "null"}}
    assert accepts(schema, r'["a\/b", 1, null, null]', tokenizer)
    assert not accepts(schema, r'["a\/b", 1, 2]', tokenizer)


@pytest.mark.parametrize(
    "impossible",
    [
        {"allOf": [{"pattern": "^[0-9]{3}$"}, {"pattern": "a"}]},
        {"pattern": "^(aa)+$", "minLength": 3, "maxLength": 3},
        {"pattern": "^abc$", "maxLength": 2},
        {"minLength": 2, "maxLength": 1},
    ],
)
def test_a_member_whose_text_is_impossible_is_not_begun(tokenizer: LLTokenizer, impossible: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", **impossible}}, "additionalProperties": False}
    assert accepts(schema, "{}", tokenizer)
    assert matcher_of(schema, tokenizer).validate_tokens(VOCABULARY('{"a')) == 1
    only_listed = {"properties": {"t": {}}, "patternProperties": {"^t$": {}}, "additionalProperties": False}
    assert matcher_of({"type": "object", **only_listed}, tokenizer).validate_tokens(VOCABULARY('{"t":1,"')) == 6


@pytest.mark.parametrize(
    "impossible",
    [
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "integer", "minimum": 2**53 + 3, "maximum": 2**53 + 1},
        {"type": "number", "minimum": 0.5, "exclusiveMaximum": 0.5},
        {"type": "string", "format": "date", "maxLength": 3},
        {"type": "string", "enum": [1, 2]},
    ],
)
def test_a_member_that_no_value_fits_is_not_begun(tokenizer: LLTokenizer, impossible: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": impossible, "b": {"type": "null"}}, "additionalProperties": False}
    assert grammar_text(Constraint("json_schema", json.dumps(schema))).startswith("%llguidance")
    assert accepts(schema, '{"b": null}', tokenizer)
    assert matcher_of(schema, tokenizer).validate_tokens(VOCABULARY('{"a')) == 2


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("^a", ["abc"]),
        ("c$", ["abc", "bac"]),
        ("^b|/", ["bac", "b12", "x/y"]),
        (r"^[a-c]\d+$", ["b12"]),
        ("", ["abc", "bac", "b12", "x/y", 'q"é']),
        (r'"\u00e9', ['q"é']),
    ],
)
def test_a_listed_name_has_the_schemas_of_the_patterns_that_are_found_in_it(
    tokenizer: LLTokenizer, pattern: str, found: list[str]
) -> None:
    names = ["abc", "bac", "b12", "x/y", 'q"é']
    schema = {"type": "object", "properties": {key: {} for key in names}, "patternProperties": {pattern: {"const": 1}}}
    for name in names:
        assert accepts(schema, json.dumps({name: 1}), tokenizer)
        assert accepts(schema, json.dumps({name: 2}), tokenizer) == (name not in found), name


def test_a_listed_control_character_is_not_left_out(tokenizer: LLTokenizer) -> None:
    """In schemas that llguidance compiles, too."""
    patterns = {"patternProperties": {"^a": {}, "^b": {}}}
    schema = {"type": "object", "properties": {"k": {"enum": ["x\x7f", "y\x01"]}}, "required": ["k"], **patterns}
    assert not grammar_text(Constraint("json_schema", json.dumps(schema))).startswith("%llguidance")
    assert accepts(schema, r'{"k": "y\u0001"}', tokenizer)
    assert not accepts(schema, '{"k": "x"}', tokenizer)
    assert not accepts(schema, '{"k": "y"}', tokenizer)


def test_the_latest_large_classes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of Unicode becomes 40 kB or more in each spelling. A client can make any number of them."""
    large = [tuple((code, code) for code in range(start, start + 19, 2)) for start in range(0x4E00, 0x4E11)]
    small = [((code, code),) for code in range(0x4E00, 0x4E11)]
    computed: list[Any] = []
    both = characters.both
    monkeypatch.setattr(characters, "both", lambda one, other: computed.append(one) or both(one, other))
    for classes, is_kept in ((large, False), (small, True)):
        for each in (*classes, classes[0], classes[-1]):
            in_json(each)
        once = computed.count(classes[1])
        assert once
        assert computed.count(classes[0]) == (once if is_kept else 2 * once)
        assert computed.count(classes[-1]) == once


def test_only_small_questions_to_the_child_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(program: WatchedProgram, path: Path, line: bytes, *limits: object) -> tuple[bytes, bytearray]:
        asked.append(len(json.loads(line)["part"]))
        return b'{"is_empty": false}\n', bytearray()

    monkeypatch.setattr(WatchedProgram, "ask", ask)
    for size in (100, checker.KEPT_CHARS + 1) * 2:
        assert not checker.is_empty(f'start: "{"k" * (size - 9)}"')
    assert asked == [100, checker.KEPT_CHARS + 1, checker.KEPT_CHARS + 1]
