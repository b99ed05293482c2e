"""How deep and how large a JSON schema is for llguidance, found before that sees it, and without recursion.

Its compiler calls itself for each schema in a schema, also through references: each of them once, and with it all to
which it leads. Too many of them, one in another, overflow the stack, which ends the process. And it copies what a
reference names into a schema that says more than the reference: copies of copies double in size with each reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from pydantic_core import from_json

MAX_NESTING = 120
"""Objects and lists, one in another, of a schema's text. The parser of llguidance takes 128, with some of its own."""

MAX_DEPTH = 1_000
"""Schemas, one in another, with those that references name. llguidance 1.9.1 takes 3 to 5 kB of stack for each
(x86-64): at most a sixth of the stack of the process that checks it, and a thirteenth of the stack in this one."""

MAX_RESOLVED = 10_000
"""Schemas of the whole, after what references name is copied to where it is needed. llguidance takes about 0.1 ms and
7 kB for each. A text of MAX_CHARS has room for about 6,000 that are not copied."""

SINGLE = ("items", "additionalItems", "additionalProperties")
LISTS = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
NAMED = ("properties", "patternProperties")
"""Keywords whose values llguidance compiles: a schema, schemas, and schemas by name."""
IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Those whose schemas are for the same value as the schema that has them."""

VALIDATING = {*SINGLE, *LISTS, *NAMED, "$ref", "type", "const", "enum", "required", "format", "pattern", "multipleOf"}
VALIDATING |= {"minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"}
VALIDATING |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
"""The keywords with a meaning for llguidance. A reference beside one of them is copied, beside others it is not."""


def parsed(text: str) -> Any:
    """Reads JSON. Raises ValueError."""
    try:
        return from_json(text, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise too_deep() if "recursion" in str(error) else ValueError(f"is not valid JSON: {error}") from None


def too_deep() -> ValueError:
    return ValueError(f"is nested too deeply: the limit is {MAX_NESTING} objects and lists, one in another")


def check_limits(schema: dict[str, Any]) -> None:
    """Raises ValueError for a schema that is nested too deeply, or that is too large with what its references name."""
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))]
        level = [each for values in inner for each in values]
    if any(isinstance(each, (dict, list)) for each in level):
        raise too_deep()
    check_references(schema)


@dataclass
class _Visit:
    """A schema that is visited. reference: that led to it. copies: whether a reference for the same value is copied.
    size: of it and those of its parts that were visited."""

    schema: Any
    copies: bool
    reference: str | None = None
    size: int = 1
    parts: Iterator[tuple[Any, bool, str | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = parts_of(self.schema, self.copies)


def check_references(root: Any) -> None:
    """Visits what llguidance compiles, in the same way: what a reference names once, when it is first met. Raises
    ValueError."""
    sizes: dict[str, int] = {}  # of what references name; 1 until all of it was visited
    path = [_Visit(root, copies=False)]
    while path:
        visit = path[-1]
        part = next(visit.parts, None)
        if part is not None:
            schema, copies, reference = part
            if reference is None:
                path.append(_Visit(schema, copies))
            elif reference in sizes:
                visit.size += sizes[reference] if copies else 1
            else:
                sizes[reference] = 1
                path.append(_Visit(target(reference, root), copies, reference))
            if len(path) > MAX_DEPTH:
                raise ValueError(f"has more than {MAX_DEPTH} schemas in one another, with those that references name")
        else:
            path.pop()
            if visit.reference is not None:
                sizes[visit.reference] = visit.size
            if path:
                path[-1].size += visit.size if visit.reference is None or visit.copies else 1
        if visit.size > MAX_RESOLVED:
            raise ValueError(f"has more than {MAX_RESOLVED} schemas, with what its references copy")


def parts_of(schema: Any, copies: bool) -> Iterator[tuple[Any, bool, str | None]]:
    """The schemas in a schema, each with whether a reference for the same value is copied there, and with the reference
    if it is one that leads to it. copies: whether another schema is for the same value as this one."""
    if not isinstance(schema, dict):
        return
    says_more = copies or len(VALIDATING & schema.keys()) > 1
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            yield from ((each, False, None) for each in value.values())
        elif key in LISTS and isinstance(value, list):
            in_place = key in IN_PLACE and (says_more or (key == "allOf" and len(value) > 1))
            yield from ((each, in_place, None) for each in value)
        elif key in SINGLE and isinstance(value, dict):
            yield value, False, None
        elif key == "$ref" and isinstance(value, str):
            yield None, says_more, value


def target(reference: str, root: Any) -> Any:
    """What a JSON pointer names in a schema; None if there is nothing, and for references of other kinds."""
    pointer = unquote(reference.removeprefix("#"))
    if not reference.startswith("#") or (pointer and not pointer.startswith("/")):
        return None
    found = root
    for part in pointer.split("/")[1:]:
        if isinstance(found, list) and part.isascii() and part.isdigit():
            found = found[int(part)] if len(part) < 10 and int(part) < len(found) else None
        else:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
