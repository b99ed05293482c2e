"""Writes the JSON schemas in a client's grammar in Lark's notation, so that their strings have every escape."""

from __future__ import annotations

import json
import re

from mlxpaged.parts.grammar.json_grammar import lark_of_schema
from mlxpaged.parts.grammar.json_schema import enforceable
from mlxpaged.parts.grammar.schema_merge import OtherSchemaError

LARK_PART = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|%json\s*')
"""A comment, a string or a regular expression of a grammar in Lark's notation, or what is before a JSON schema."""
ANY_WHITESPACE = r"[\x20\x0A\x0D\x09]+"
"""White space of the JSON in such a grammar, as llguidance allows it."""


def with_own_json(grammar: str) -> str:
    """The grammar, with its schemas as grammars of their own. A schema with options for llguidance stays, and so does
    one that llguidance has to compile, or refuse. Raises ValueError."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while (part := LARK_PART.search(grammar, at)) is not None:
        found.append(grammar[at : part.end()])
        at = part.end()
        if part[0].startswith("%json"):
            try:
                schema, end = decoder.raw_decode(grammar, at)
                if isinstance(schema, dict) and "x-guidance" not in schema:
                    inner = lark_of_schema(enforceable(schema), ANY_WHITESPACE)
                    found[-1] = found[-1].removesuffix(part[0]) + f"%lark {{\n{inner}}}"
                    at = end
            except (json.JSONDecodeError, OtherSchemaError, RecursionError):
                continue
    return "".join(found) + grammar[at:]
