"""Writes a JSON schema as a grammar in llguidance's Lark notation.

llguidance compiles JSON schemas itself. But version 1.9.1 has no escape `\\/`, knows `\\u` in some strings for control
characters only, and reads numbers as doubles: an answer that writes such an escape becomes another text without a sign.
Here, a string has every escape of RFC 8259, integers are exact, and no number has digits without end. llguidance still
writes numbers with `multipleOf`, and it compiles, or refuses, what raises OtherSchemaError.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from mlxpaged.formats.string_formats import STRING_FORMATS
from mlxpaged.parts.grammar.characters import ALL, as_it_is, in_json, in_key, is_plain, spelled
from mlxpaged.parts.grammar.check import checker
from mlxpaged.parts.grammar.decimals import decimals
from mlxpaged.parts.grammar.integers import integers
from mlxpaged.parts.grammar.json_schema import with_inclusive_bounds
from mlxpaged.parts.grammar.number_bounds import bounds_of, check_doubles, of_doubles, of_integers, of_multiples
from mlxpaged.parts.grammar.patterns import NOT_REGULAR, OtherPatternError, Spelling, regex, terms
from mlxpaged.parts.grammar.schema_limits import target
from mlxpaged.parts.grammar.schema_merge import (
    OtherSchemaError,
    Schema,
    Unsatisfiable,
    all_of,
    merged,
    types_of,
    validating,
)

WHITESPACE = r"( |\n[ \t]{0,64})?"
"""White space between the tokens of JSON. If any amount is allowed, some models write it until max_tokens."""

JSON_OPTIONS: dict[str, Any] = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "json_allow_general_unicode_escapes": True,
}
"""What a schema may say to llguidance in `x-guidance`. A request may not: the first two would allow answers that
violate the schema."""

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_CHARS = 2**22
"""Most characters of a grammar. 128 Ki characters of a schema become half a million, if they have no large classes."""
MAX_COUNTED = 1_000
"""Rules for an object whose number of members is limited: one for each member and number of members before it."""
MAX_MERGES = 200
"""Schemas that are merged one in another."""


def lark_of_schema(schema: Schema, whitespace: str = WHITESPACE) -> str:
    """A grammar for the JSON of the values that fit a schema. whitespace: what may be between its tokens, as a regular
    expression. Raises OtherSchemaError if llguidance has to compile the schema, and ValueError."""
    return _Grammar(schema, whitespace).text()


class _Grammar:
    def __init__(self, root: Schema, whitespace: str) -> None:
        self._root = root
        self._options = {**JSON_OPTIONS, "whitespace_pattern": whitespace}
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        """Names of rules and terminals, found by their bodies."""
        self._references: dict[str, str] = {}
        self._pending: list[tuple[str, Any]] = []
        """What references name, by the names of their rules."""
        self._num_merges = 0
        self._length = 0

    def text(self) -> str:
        start = self._value(self._root)
        while self._pending:
            name, schema = self._pending.pop()
            self._rules.append(f"{name}: {self._value(schema)}")
        head = ['%llguidance {"ignore_once": true}', f"%ignore /{self._options['whitespace_pattern']}/"]
        return "\n".join([*head, f"start: {start}", *self._rules]) + "\n"

    # -- rules ---------------------------------------------------------------------------------------------------------

    def _rule(self, body: str) -> str:
        return self._named("r", body)

    def _terminal(self, body: str) -> str:
        return self._named("T", body)

    def _checked_terminal(self, parts: Sequence[str]) -> str:
        """A terminal for what fits all of these. Raises Unsatisfiable if that is nothing: an answer could begin one."""
        body = " & ".join(parts)
        if len(parts) > 1 and f"T{body}" not in self._names and checker.is_empty(f"start: T\nT: {body}\n"):
            raise Unsatisfiable("no text fits")
        return self._terminal(body)

    def _named(self, prefix: str, body: str) -> str:
        """The name of the rule, or of the terminal, with this body."""
        key = prefix + body
        if key not in self._names:
            self._length += len(body)
            if self._length > MAX_CHARS:
                raise OtherSchemaError("has too many characters as a grammar")
            self._names[key] = f"{prefix}{len(self._names)}"
            self._rules.append(f"{self._names[key]}: {body}")
        return self._names[key]

    def _any(self) -> str:
        if "any" not in self._references:
            self._references["any"] = "any"
            string, number = self._terminal(regex(f'"{in_json(ALL)}*"')), self._number("number", {})
            self._rules += [
                f'any: "null" | "true" | "false" | {number} | {string} | any_array | any_object',
                'any_array: "[" (any ("," any)*)? "]"',
                'any_object: "{" (any_pair ("," any_pair)*)? "}"',
                f'any_pair: {string} ":" any',
            ]
        return "any"

    def _leaf(self, schema: Schema) -> str:
        """A value without escapes, by llguidance."""
        if len(schema) > 1 and checker.is_empty(f"start: %json {json.dumps(schema)}\n"):
            raise Unsatisfiable("no value fits")
        options = {**self._options, "json_allowed_escapes": 'nrbtf"\\'}
        return self._rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    # -- schemas -------------------------------------------------------------------------------------------------------

    def _value(self, schema: Any) -> str:
        """The name of a rule or terminal, or a group."""
        if isinstance(schema, bool):
            if not schema:
                raise Unsatisfiable("no value fits")
            return self._any()
        schema = validating(schema)
        if not schema:
            return self._any()
        if len(schema) == 1 and "$ref" in schema:
            return self._reference(schema["$ref"])
        if schema.keys() & {"$ref", "allOf", "anyOf"}:
            return self._combined(schema)
        if "const" in schema or "enum" in schema:
            return self._listed(schema)
        kinds = types_of(schema.get("type", list(TYPES)))
        if unknown := set(kinds) - {*TYPES, "integer"}:
            raise OtherSchemaError(f"has the types {unknown}")
        kinds = [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]
        return self._either(functools.partial(self._typed, kind, schema) for kind in kinds)

    def _either(self, makers: Iterable[Callable[[], str]]) -> str:
        """One of several. Raises Unsatisfiable if there is none."""
        found: dict[str, None] = {}
        reason: Unsatisfiable | None = None
        for make in makers:
            try:
                found[make()] = None
            except Unsatisfiable as error:
                reason = error
        if not found:
            raise reason or Unsatisfiable("no value fits")
        return next(iter(found)) if len(found) == 1 else self._rule(" | ".join(found))

    def _reference(self, reference: Any) -> str:
        """What it names becomes a rule later, so that schemas in one another are not functions in one another."""
        seen = []
        while isinstance(found := self._target(reference), dict) and validating(found).keys() == {"$ref"}:
            seen.append(reference)
            reference = found["$ref"]
            if reference in seen:
                raise OtherSchemaError("refers to itself")
        if reference not in self._references:
            self._references[reference] = f"ref{len(self._references)}"
            self._pending.append((self._references[reference], found))
        return self._references[reference]

    def _target(self, reference: Any) -> Any:
        found = target(reference, self._root) if isinstance(reference, str) else None
        if found is None:
            raise OtherSchemaError("has a reference to another place")
        return found

    def _combined(self, schema: Schema) -> str:
        """A schema with `allOf`, `anyOf` or a reference, and maybe more."""
        self._num_merges += 1
        if self._num_merges > MAX_MERGES:
            raise OtherSchemaError("has too many schemas in one another")
        try:
            whole_schema = self._flat({key: value for key, value in schema.items() if key != "anyOf"})
            if "anyOf" not in schema:
                return self._value(whole_schema)
            if "anyOf" in whole_schema:
                raise OtherSchemaError("has anyOf twice for one value")
            options = _schemas(schema["anyOf"])
            return self._either(functools.partial(self._value, all_of(whole_schema, each)) for each in options)
        finally:
            self._num_merges -= 1

    def _flat(self, schema: Any, depth: int = 0) -> Schema:
        """The same schema without references and `allOf`. Properties are in the order in which the schema has them."""
        if isinstance(schema, bool):
            if not schema:
                raise Unsatisfiable("no value fits")
            return {}
        if depth > MAX_MERGES:
            raise OtherSchemaError("has too many schemas in one another")
        found = validating(schema)
        rest = {key: value for key, value in found.items() if key not in ("$ref", "allOf")}
        parts: list[Schema] = []
        for key, value in found.items():
            if key == "allOf":
                parts += (self._flat(each, depth + 1) for each in _schemas(value))
            elif key == "$ref":
                parts.append(self._flat(self._target(value), depth + 1))
            elif rest not in parts:
                parts.append(rest)
        return functools.reduce(merged, parts, {})

    def _typed(self, kind: str, schema: Schema) -> str:
        match kind:
            case "null":
                return '"null"'
            case "boolean":
                return self._rule('"true" | "false"')
            case "string":
                return self._string(schema)
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
            case _:
                return self._number(kind, schema)

    # -- values --------------------------------------------------------------------------------------------------------

    def _listed(self, schema: Schema) -> str:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list) or schema.keys() - {"enum", "const", "type"}:
            raise OtherSchemaError("has values, and limits for them")
        if "type" in schema:
            kinds = types_of(schema["type"])
            values = [each for each in values if any(is_of(each, kind) for kind in kinds)]
        if not values:
            raise Unsatisfiable("no value fits")
        texts = [each for each in values if isinstance(each, str)]
        found = [self._texts(texts)] if texts else []
        return self._rule(" | ".join([*found, *(self._literal(each) for each in values if not isinstance(each, str))]))

    def _literal(self, value: Any) -> str:
        """A value itself."""
        if isinstance(value, str):
            return self._texts([value])
        if isinstance(value, list):
            return self._rule(f'"[" {_listing(map(self._literal, value))} "]"')
        if isinstance(value, dict):
            members = (f'{self._texts([key])} ":" {self._literal(each)}' for key, each in value.items())
            return self._rule(f'"{{" {_listing(members)} "}}"')
        if isinstance(value, float):
            plain = format(Decimal(json.dumps(value)), "f")
            short = {json.dumps(value), plain, *([plain.removesuffix(".0")] if plain.endswith(".0") else [])}
            return f"({' | '.join(json.dumps(each) for each in sorted(short))})"
        return json.dumps(json.dumps(value))

    def _texts(self, texts: Sequence[str]) -> str:
        """One of these strings. Letters, digits and what JSON never escapes are written as they are."""
        if len(texts) == 1 and is_plain(texts[0]):
            return json.dumps(f'"{texts[0]}"')
        return self._terminal(regex(f'"(?:{"|".join(map(spelled, texts))})"'))

    def _number(self, kind: str, schema: Schema) -> str:
        bounds = bounds_of(schema)
        if kind == "number" or "multipleOf" in schema:
            check_doubles(bounds)
        if "multipleOf" in schema:
            rest = {"multipleOf": schema["multipleOf"], **of_multiples(bounds)}
            return self._leaf(with_inclusive_bounds({"type": kind, **rest}))
        return self._terminal(
            regex(integers(*of_integers(bounds)) if kind == "integer" else decimals(*of_doubles(bounds)))
        )

    def _string(self, schema: Schema) -> str:
        least, most = _size(schema, "minLength", 0), _size(schema, "maxLength", None)
        if most is not None and least > most:
            raise Unsatisfiable("minLength is above maxLength")
        patterns = schema.get("pattern", [])
        patterns = [patterns] if isinstance(patterns, str) else patterns
        try:
            parts = [part for pattern in patterns for part in terms(pattern, in_json, '"', '"')]
        except OtherPatternError:
            if any(NOT_REGULAR.search(pattern) for pattern in patterns):
                raise
            return self._leaf(_leaf_of(schema))
        if (expression := STRING_FORMATS.get(schema.get("format", ""))) is not None:
            parts = [*terms(expression, as_it_is, '"', '"'), *parts]
        if (least, most) != (0, None) or not parts:
            parts.append(regex(f'"{_repeated(in_json(ALL), least, most)}"'))
        return self._checked_terminal(parts)

    def _array(self, schema: Schema) -> str:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list) and "prefixItems" not in schema:  # as in earlier drafts of JSON Schema
            first, rest = rest, schema.get("additionalItems", True)
        least, most = _size(schema, "minItems", 0), _size(schema, "maxItems", None)
        if not isinstance(first, list) or isinstance(rest, list):
            raise OtherSchemaError("has a list of items")
        items: list[str] = []
        for each in first[:most]:
            try:
                items.append(self._value(each))
            except Unsatisfiable:
                most = len(items)
                break
        more = None
        if most is None or most > len(items):
            try:
                more = self._value(rest)
            except Unsatisfiable:
                most = len(items)
        if most is not None and least > most:
            raise Unsatisfiable("an item is required that does not fit")
        if not items:
            if more is None:
                return self._rule('"[" "]"')
            later = f"{more} {self._more(more, least, most)}"
            return self._rule(f'"[" {later} "]"' if least else f'"[" ({later})? "]"')
        tail = ""
        if more is not None:
            tail = self._more(more, least - len(items) + 1, None if most is None else most - len(items) + 1)
        for number in range(len(items) - 1, -1, -1):
            comma = '"," ' if number else ""
            tail = f"{comma}{items[number]} {tail}"
            tail = tail if number < least else self._rule(f"({tail})?")
        return self._rule(f'"[" {tail} "]"')

    def _more(self, item: str, least: int, most: int | None) -> str:
        """The items after the first one."""
        return _repeated(f'("," {item})', max(least - 1, 0), None if most is None else most - 1)

    # -- objects -------------------------------------------------------------------------------------------------------

    def _object(self, schema: Schema) -> str:
        given, must = schema.get("properties", {}), schema.get("required", [])
        by_pattern, others = schema.get("patternProperties", {}), schema.get("additionalProperties", True)
        if not isinstance(given, dict) or not isinstance(must, list) or not isinstance(by_pattern, dict):
            raise OtherSchemaError("has properties of another kind")
        names = list(dict.fromkeys([*given, *(name for name in must if isinstance(name, str))]))
        if len(by_pattern) > 1:
            raise OtherSchemaError("has several patterns of properties")
        items: list[tuple[bool, str]] = []
        for name, found in zip(names, self._places(by_pattern, names), strict=True):
            try:
                value = self._value(all_of(given[name], *found) if name in given else all_of(*found or [others]))
            except Unsatisfiable:
                if name in must:
                    raise Unsatisfiable(f"required property {name!r} is unsatisfiable") from None
                continue
            items.append((name in must, self._rule(f'{self._texts([name])} ":" {value}')))
        num_required = sum(required for required, _ in items)
        least, most = _size(schema, "minProperties", 0) - num_required, _size(schema, "maxProperties", None)
        most = None if most is None else most - num_required
        more = list(self._other_pairs(names, by_pattern, others))
        has_optional = num_required < len(items)
        if not more and most is not None and most >= len(items) - num_required:
            most = None
        # If none is required, `_members` can ask for one.
        if has_optional and (most is not None or least > (not num_required)):
            return self._rule(f'"{{" {self._counted(items, " | ".join(more), least, most)} "}}"')
        if most is not None and (most < 0 or (not more and least > 0) or least > most):
            raise Unsatisfiable("the properties are too many, or too few")
        if not more and least > 0 and not has_optional:
            raise Unsatisfiable("the properties are too few")
        if more and most != 0:
            pair = self._rule(" | ".join(more))
            must_follow = least > 0 and not has_optional
            items.append((must_follow, self._rule(f"{pair} {self._more(pair, least, most)}")))
        return self._rule(f'"{{" {self._members(items, is_empty=least < 1)} "}}"')

    def _places(self, by_pattern: Schema, names: Sequence[str]) -> list[list[Any]]:
        """For each name, the schemas of the patterns that are found in it. The child process finds out, by an engine
        whose time grows with the text: Python's `re` would hold the interpreter lock, and for some patterns for
        hours."""
        places: list[list[Any]] = [[] for _ in names]
        for pattern, schema in by_pattern.items() if names else ():
            fits = checker.matches(f"start: T\nT: {self._pattern(pattern, as_it_is)}\n", names)
            for place, fit in zip(places, fits, strict=True):
                place.extend([schema] if fit else [])
        return places

    def _pattern(self, pattern: str, spelling: Spelling, quote: str = "") -> str:
        """Texts in a part of which an expression is found."""
        try:
            return " & ".join(terms(pattern, spelling, quote, quote))
        except OtherPatternError:
            raise OtherSchemaError("has a pattern of another kind") from None

    def _other_pairs(self, names: Sequence[str], by_pattern: Mapping[str, Any], others: Any) -> Iterator[str]:
        """The members with keys that are not listed."""
        taken = []
        if names:
            taken.append("~" + regex(f'"(?:{"|".join(map(spelled, names))})"'))
        for pattern, schema in by_pattern.items():
            key = self._pattern(pattern, in_key if names else in_json, '"')
            with contextlib.suppress(Unsatisfiable):
                yield f'{self._checked_terminal([key, *taken])} ":" {self._value(schema)}'
            taken.append(f"~({key})")
        every = regex(f'"{(in_key if names else in_json)(ALL)}*"')
        with contextlib.suppress(Unsatisfiable):
            key = self._checked_terminal([every, *taken]) if by_pattern else self._terminal(" & ".join([every, *taken]))
            yield f'{key} ":" {self._value(others)}'

    def _counted(self, items: Sequence[tuple[bool, str]], other: str, least: int, most: int | None) -> str:
        """Members in this order, and as many as are allowed of those that need not be there. other: members that are
        not listed; "" if there are none."""
        least = max(least, 0)  # below 0 if more are required than `least` asks for
        limit = least if most is None else most
        if limit < least:
            raise Unsatisfiable("the properties are too many, or too few")
        if is_too_much_to_count(len(items), limit):
            raise OtherSchemaError("has too many properties, of which a number may be there")
        pair, after_must = self._rule(other) if other else "", any(must for must, _ in items)
        num_optional = sum(not must for must, _ in items)
        rests: list[str | None] = []
        """What may follow, by the number of members that need not be there; None if nothing can."""
        for count in range(min(num_optional, limit) + 1):
            few, many = max(least - count, 0), None if most is None else most - count
            if not pair or many == 0:
                rests.append(None if few else "")
            elif count or after_must:
                rests.append(_repeated(f'("," {pair})', few, many))
            else:
                pairs = f"{pair} {self._more(pair, few, many)}"
                rests.append(pairs if few else f"({pairs})?")
        for number in range(len(items) - 1, -1, -1):
            must, item = items[number]
            num_optional -= not must
            after_must = any(must for must, _ in items[:number])
            for count in range(min(num_optional, limit) + 1):
                with_it = count + (not must) if most is not None else min(count + (not must), limit)
                taken = rests[with_it] if with_it <= limit else None
                comma = '"," ' if count or after_must else ""
                taken = None if taken is None else f"{comma}{item} {taken}"
                left = None if must else rests[count]
                if taken is not None:
                    rests[count] = self._rule(f"({taken})?" if left == "" else " | ".join(filter(None, (taken, left))))
                else:
                    rests[count] = left
        if rests[0] is None:
            raise Unsatisfiable("the properties are too few")
        return rests[0]

    def _members(self, items: Sequence[tuple[bool, str]], is_empty: bool) -> str:
        """Members in this order. Before the first that must be there, nothing tells whether a comma is needed.
        is_empty: whether there may be none, if none must be there."""
        begin = next((number for number, (must, _) in enumerate(items) if must), len(items))
        later = " ".join(f'"," {item}' if must else f'("," {item})?' for must, item in items[begin + 1 :])
        alone = f"{items[begin][1]} {later}" if begin < len(items) else ""
        after = f'"," {alone}' if alone else ""
        for must, item in reversed(items[:begin]):
            assert not must
            after_rule = self._rule(after) if after else ""
            alone_rule = self._rule(alone) if alone else ""
            last = f"({item} {after_rule})?" if is_empty else f"{item} {after_rule}"
            alone = f"{item} {after_rule} | {alone_rule}" if alone_rule else last
            after = f'("," {item})? {after_rule}'
        return f"({alone})" if alone else ""


def is_too_much_to_count(num_members: int, limit: int) -> bool:
    """limit: of the members of an object."""
    return num_members * (limit + 1) > MAX_COUNTED


def _listing(items: Iterable[str]) -> str:
    return ' "," '.join(items)


def _repeated(text: str, least: int, most: int | None) -> str:
    """A group so many times. In Lark's notation, no count is 0."""
    if most == 0:
        return ""
    return f"{text}*" if (least, most) == (0, None) else f"{text}{{{least},{'' if most is None else most}}}"


def _size(schema: Schema, key: str, default: Any) -> Any:
    """The value of a keyword that is a count."""
    value = schema.get(key, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not default and (type(value) is not int or value < 0):
        raise OtherSchemaError(f"has {key} that is no count")
    return value


def _schemas(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise OtherSchemaError("has no list of schemas")
    return given


def _leaf_of(schema: Schema) -> Schema:
    """What a schema says of a string, for llguidance."""
    patterns = schema.get("pattern", [])
    patterns = patterns if isinstance(patterns, list) else [patterns]
    words: Schema = {key: schema[key] for key in ("minLength", "maxLength", "format") if key in schema}
    rest = {"pattern": patterns[0]} if len(patterns) == 1 else {"allOf": [{"pattern": each} for each in patterns]}
    return {"type": "string", **words, **(rest if patterns else {})}


def is_of(value: Any, kind: str) -> bool:
    """Whether a value has a type of JSON schemas."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")
