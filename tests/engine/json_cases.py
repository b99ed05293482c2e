"""Random JSON schemas with values that fit them and values that may not, written with every escape of RFC 8259; and a
vocabulary with tokens of several bytes, some of which begin or end in an escape."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.parts.grammar.grammar import LIMITS, grammar_text

MERGED = (
    *("\\u", "\\u0", "\\u00", "00e", "e9", "\\/", '\\"', "\\\\", "\\n", "\\ud83d", "\\ude42", "\\u20", "19", "u00"),
    *('":', '", "', '"}', '{"', '["', ', "', ' "', "\n  ", "://", "true", "null", "12", "99"),
    *("é", 'é"', "ca", "caf", "café", "ß", "日", "日本", "🙂", '🙂"', "ab", "cat"),
)
"""Tokens of the vocabulary in addition to those of one byte."""
TEXTS = (
    *("", "a", "cat", "café", "it's", "it\u2019s", "日本", "🙂", "a/b", 'say "hi"', "back\\slash", "tab\tnew\n"),
    *("\x00\x1f", "ß", "\x7f", "𝄞x", "</tag>", "\u2028", "abc", "12", "null"),
)
PATTERNS: dict[str, tuple[str, ...]] = {
    "^[a-z]{1,5}$": ("a", "abc", "zzzzz"),
    "^cat|dog$": ("cat", "catx", "hotdog", "dog"),
    "é": ("é", "café", "xéy"),
    "^[^x]{0,4}$": ("", "🙂é/", '"\\', "\n\t"),
    r"^\d{3}-\d{2}$": ("123-45",),
    "a/b": ("a/b", "xa/b!", "é a/b"),
    r"^\w+[ \t]?\w*$": ("ab cd", "a_1"),
    "^(ab|cd){1,3}$": ("ab", "cdab"),
    "^.{2}$": ("éé", "🙂🙂", 'a"', "\\/"),
    r"^\p{Lu}": ("Éa", "Z"),
    r"^[\u00e0-\u00ff]+$": ("é", "àÿ"),
    "🙂|日": ("x🙂", "日"),
    "^a?$": ("", "a"),
    "(^x|y$)": ("xa", "ay"),
    "(^a|b)c$": ("ac", "xbc"),
    "^(x|y$)": ("xz", "y"),
    "^$": ("",),
    "": ("", "é"),
}
"""With texts in a part of which each is found."""
KEYS = ("city", "größe", "a/b", 'quo"te', "x y", "日", "type", "properties", "🙂", "back\\", "n")


class Vocabulary:
    """As llguidance wants it. It cuts texts as the generator says."""

    def __init__(self) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [text.encode() for text in dict.fromkeys(MERGED)] + [b"<eos>"]
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def cut(self, text: str, rng: random.Random) -> list[int]:
        """The tokens of a text, one of many ways to cut it."""
        rest, found = text.encode(), []
        while rest:
            fitting = [i for i, token in enumerate(self.tokens[:-1]) if rest.startswith(token)]
            found.append(rng.choice(fitting))
            rest = rest[len(self.tokens[found[-1]]) :]
        return found

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.tokens[token] for token in tokens).decode()


VOCABULARY = Vocabulary()


def matcher_of(schema: Any, tokenizer: LLTokenizer) -> LLMatcher:
    text = grammar_text(Constraint("json_schema", json.dumps(schema)))
    return LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))


def spelled(text: str, rng: random.Random) -> str:
    """A string in JSON, each character in one of its spellings."""
    short = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}

    def one(char: str) -> str:
        units = [char.encode("utf-16-be")[i : i + 2] for i in range(0, len(char.encode("utf-16-be")), 2)]
        digits = "".join(f"\\u{unit.hex() if rng.random() < 0.5 else unit.hex().upper()}" for unit in units)
        if char.isascii() and char.isprintable() and char not in "\"\\/<>&'+=`":
            return char  # a key, or a listed text, is written like this
        ways = [
            digits,
            *([f"\\{short[char]}"] if char in short else []),
            *([char] * 3 if char >= " " and char not in '"\\' else []),
        ]
        return rng.choice(ways)

    return f'"{"".join(map(one, text))}"'


def written(value: Any, rng: random.Random, spell: Callable[[str, random.Random], str] = spelled) -> str:
    """JSON of a value, with the white space that grammars allow."""

    def space() -> str:
        return rng.choice(["", "", "", " ", "\n", "\n  "])

    if isinstance(value, str):
        return spell(value, rng)
    if value in ([], {}):
        return f"{space()}".join("[]" if isinstance(value, list) else "{}")
    if isinstance(value, list):
        return "[" + space() + f"{space()},{space()}".join(written(each, rng, spell) for each in value) + space() + "]"
    if isinstance(value, dict):
        members = (f"{spell(key, rng)}{space()}:{space()}{written(each, rng, spell)}" for key, each in value.items())
        return "{" + space() + f"{space()},{space()}".join(members) + space() + "}"
    return json.dumps(value)


def reordered(value: Any) -> Iterator[Any]:
    """The same value with the members of its objects in each order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*(list(reordered(each)) for each in value)))
    elif isinstance(value, dict):
        members = [[(key, each) for each in reordered(inner)] for key, inner in value.items()]
        for order in itertools.permutations(members):
            yield from map(dict, itertools.product(*order))
    else:
        yield value


class Case:
    """A random schema, and values for it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.root: dict[str, Any] = {}
        self.has_node = self.rng.random() < 0.2
        self.root = self.schema(self.rng.randint(0, 3))
        if self.has_node:
            self.root = {"type": "object", "properties": {"tree": {"$ref": "#/$defs/node"}, "rest": self.root},
                         "required": ["tree"], "additionalProperties": False,
                         "$defs": {"node": self.node()}}  # fmt: skip

    def node(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"value": self.string(), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }

    # -- schemas -------------------------------------------------------------------------------------------------------

    def schema(self, depth: int) -> dict[str, Any]:
        makers = [self.string, self.string, self.string, self.integer, self.listed, self.simple]
        if depth and self.rng.random() < 0.75:
            return self.rng.choice([self.object, self.object, self.array, self.union, self.joined])(depth - 1)
        return self.rng.choice(makers)()

    def string(self) -> dict[str, Any]:
        kind = self.rng.randrange(4)
        if kind == 0:
            return {"type": "string"}
        if kind == 1:
            least = self.rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + self.rng.randint(0, 5)}
        if kind == 2:
            return {"type": "string", "pattern": self.rng.choice(list(PATTERNS))}
        return {"type": ["string", "null"], "maxLength": self.rng.randint(0, 4)}

    def integer(self) -> dict[str, Any]:
        low = self.rng.choice([-5, 0, 7, -(2**60), 2**53 + 1, 10**18 + 3])
        high = low + self.rng.choice([0, 1, 9, 1234])
        return {"type": "integer", "minimum": low, "maximum": high}

    def listed(self) -> dict[str, Any]:
        values = [*self.rng.sample(TEXTS, 3), self.rng.choice([1, 2**53 + 1, None, True, 0.5, [1, "é"], {"ß/": "🙂"}])]
        return {"const": values[0]} if self.rng.random() < 0.3 else {"enum": values}

    def simple(self) -> dict[str, Any]:
        return {"type": self.rng.choice(["boolean", "null", ["boolean", "null"]])}

    def object(self, depth: int) -> dict[str, Any]:
        names = self.rng.sample(KEYS, self.rng.randint(0, 4))
        more: Any = self.rng.choice([False, False, True, None, {"type": "boolean"}])
        found: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        found["required"] = [name for name in names if self.rng.random() < 0.5]
        if self.rng.random() < 0.2:
            found["patternProperties"] = {self.rng.choice(["^t", "y", "é|/"]): self.string()}
        if self.rng.random() < 0.2 and len(found["required"]) in (0, len(names)):
            found["minProperties"] = 1
        return found if more is None else found | {"additionalProperties": more}

    def array(self, depth: int) -> dict[str, Any]:
        least = self.rng.randint(0, 2)
        limits = {"minItems": least, "maxItems": least + self.rng.randint(0, 2)}
        if self.rng.random() < 0.3:
            first = [self.schema(depth) for _ in range(least + 1)]
            return {"type": "array", "prefixItems": first, "items": {"type": "boolean"}, **limits}
        return {"type": "array", "items": self.schema(depth), **limits}

    def union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.schema(depth) for _ in range(self.rng.randint(1, 3))]}

    def joined(self, depth: int) -> dict[str, Any]:
        """As Pydantic and others write what extends another schema."""
        some, others = self.rng.sample(KEYS, 2)
        return {
            "allOf": [{"type": "object", "properties": {some: self.schema(depth)}}],
            "properties": {others: self.schema(depth)},
            "required": [some],
        }

    # -- values --------------------------------------------------------------------------------------------------------

    def value(self, schema: Any, depth: int = 0) -> Any:
        """A value that fits in most cases. Of an object, listed members come first."""
        rng = self.rng
        if schema is True or not schema:
            return rng.choice([*TEXTS, 1, None, ["é"], {"a/": "ß"}])
        if "$ref" in schema:
            return self.value(self.root["$defs"]["node"], depth + 1)
        if "anyOf" in schema:
            options = schema["anyOf"]
            return self.value(options[-1] if depth > 3 else rng.choice(options), depth)
        if "allOf" in schema:
            [part] = schema["allOf"]
            merged = {"properties": {**part["properties"], **schema["properties"]}, "required": schema["required"]}
            return self.value({"type": "object", **merged}, depth)
        if "enum" in schema or "const" in schema:
            return rng.choice(schema.get("enum", [schema.get("const")]))
        kind = schema["type"] if isinstance(schema["type"], str) else rng.choice(schema["type"])
        if rng.random() < 0.02:
            kind = rng.choice(["string", "integer", "null", "boolean"])
            schema = {"minimum": 0, "maximum": 9}
        match kind:
            case "string":
                if "pattern" in schema and rng.random() < 0.8:
                    return rng.choice(PATTERNS[schema["pattern"]])
                return rng.choice(TEXTS)
            case "integer":
                return rng.randint(schema["minimum"] - rng.randint(0, 1), schema["maximum"] + rng.randint(0, 1))
            case "null":
                return None
            case "boolean":
                return rng.random() < 0.5
            case "array":
                first, rest = schema.get("prefixItems", []), schema.get("items", True)
                count = rng.randint(schema["minItems"], schema["maxItems"])
                return [self.value(first[i] if i < len(first) else rest, depth) for i in range(count)]
            case _:
                return self.members(schema, depth)

    def members(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        names = [key for key in schema["properties"] if key in schema["required"] or self.rng.random() < 0.5]
        found = {name: self.value(schema["properties"][name], depth) for name in names}
        if self.rng.random() < 0.3:
            key = self.rng.choice([*KEYS, "more", "é"])
            if key not in schema["properties"]:
                found[key] = self.value(schema.get("additionalProperties") or True, depth)
        return found
