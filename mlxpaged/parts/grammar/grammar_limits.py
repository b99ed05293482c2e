"""What the texts of a constraint may have at most, before anything compiles them. All of it is counted in one pass."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mlxpaged.core.engine.constraint import Constraint, ConstraintKind, GrammarError, StructuredOutput
from mlxpaged.parts.grammar.json_schema import check_schema, patterns
from mlxpaged.parts.grammar.schema_limits import parsed

MAX_CHARS: dict[ConstraintKind, int] = {
    "json_schema": 128 * 1024,
    "regex": 8 * 1024,
    "choice": 64 * 1024,
    "grammar": 32 * 1024,
}
"""Most characters of a constraint. The compiler cannot be interrupted, and some of its parts take quadratic time. The
slowest case found within these limits took 2 seconds; a regular expression of 80,000 characters took a minute."""

OPTIONAL = re.compile(r"[?*{]|[(|:]\||\|\)")
"""What makes a part of a regular expression optional: a quantifier, or an alternative that is empty."""

MAX_OPTIONAL = 1_000
"""Most optional parts of all regular expressions of a request. Time and memory grow with their square: `.?` took 0.3
seconds and 17 MB for 1,000, 4.3 seconds and 300 MB for 4,000. None of llguidance's limits stops this."""

OPENING = re.compile(r"[(\[:]")
"""What begins a part of a grammar: a group, an optional group or a class, and the body of a rule."""

MAX_OPENINGS = 3_000
"""Most parts of a grammar. llguidance compiles each rule where it is first named, within those that name it, and takes
2 to 3 kB of stack for each part that it is in: a quarter of the stack of the process that checks it, for all of them.
llguidance's largest example, of 16,050 characters, has 756."""

JSON_IN_LARK = re.compile(r"%json\s*")
"""What is before a JSON schema in a grammar in Lark's notation."""


def check_size(constraint: Constraint | StructuredOutput) -> None:
    """Raises GrammarError if a constraint exceeds a limit of this module."""
    parts = constraint.parts if isinstance(constraint, StructuredOutput) else (constraint,)
    for kind, limit in MAX_CHARS.items():
        length = sum(len(part.text) for part in parts if part.kind == kind)
        if length > limit:
            raise GrammarError(f"has {length} characters of {kind}; the limit is {limit}")
    distinct = dict.fromkeys(parts)
    for part in distinct:
        if part.kind == "grammar":
            check_grammar(part)
    optional = sum(len(OPTIONAL.findall(text)) for part in distinct for text in expressions(part))
    if optional > MAX_OPTIONAL:
        raise GrammarError(f"has regular expressions with {optional} optional parts; the limit is {MAX_OPTIONAL}")


def check_grammar(part: Constraint) -> None:
    """Raises GrammarError for a grammar in Lark's or GBNF's notation that has too many parts, or a JSON schema that a
    request may not have either."""
    count = len(OPENING.findall(part.text))
    if count > MAX_OPENINGS:
        raise GrammarError(f"has {count} rules and groups; the limit is {MAX_OPENINGS}", part.param)
    for schema in schemas_in(part.text):
        try:
            check_schema(schema)
        except ValueError as error:
            raise GrammarError(f"a schema in the grammar {error}", part.param) from None


def schemas_in(grammar: str) -> Iterator[Any]:
    """The JSON schemas in a grammar in Lark's notation. What looks like one and is no JSON is left to the compiler."""
    decoder = json.JSONDecoder()
    for found in JSON_IN_LARK.finditer(grammar):
        try:
            schema, _ = decoder.raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue
        if isinstance(schema, dict):
            yield schema


def expressions(constraint: Constraint) -> list[str]:
    """The texts with regular expressions. The text of a grammar counts as one."""
    if constraint.kind != "json_schema":
        return [constraint.text] if constraint.kind in ("regex", "grammar") else []
    try:
        return patterns(parsed(constraint.text))
    except ValueError:
        return []  # what is wrong with the schema is said when it is compiled
