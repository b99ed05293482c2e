"""Writes `propertyNames` of JSON schemas, which a grammar cannot express, as properties or as a pattern of their names.

zod writes it for each record, and pydantic for dictionaries whose keys are no plain texts.
"""

from __future__ import annotations

import json
from typing import Any

from mlxpaged.formats.schemas import enumerated, resolved
from mlxpaged.formats.string_formats import STRING_FORMATS
from mlxpaged.parts.grammar.schema_merge import ANNOTATIONS, Schema

MAX_COPIED = 2**17
"""Most characters of the schema that is written for each of the names."""
TYPES = {"minLength": int, "maxLength": int, "pattern": str, "format": str}
"""Keywords that a pattern can say, and the types of their values."""


def with_listed_names(schema: Schema, root: Any) -> Schema:
    """The schema of an object, without `propertyNames` if other keywords can say the same."""
    given = schema["propertyNames"]
    condition = {} if given is True else resolved(given, root)
    if given is not True and not condition and given != {}:
        return schema
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    others = schema.get("additionalProperties", True)
    if (names := enumerated(condition, root)) is not None:
        texts = [name for name in names if isinstance(name, str)]
        is_long = len(texts) * len(json.dumps(others)) > MAX_COPIED
        properties = schema.get("properties", {})
        if is_long or "patternProperties" in schema or not isinstance(properties, dict):
            return schema
        listed = {name: properties.get(name, others) for name in texts}
        return {**rest, "properties": listed, "additionalProperties": False}
    says = {key: value for key, value in condition.items() if key not in ANNOTATIONS}
    if says.pop("type", "string") != "string":
        return schema
    pattern = _pattern(says)
    if pattern == "":
        return rest
    if pattern is None or schema.keys() & {"properties", "patternProperties"}:
        return schema
    return {**rest, "patternProperties": {pattern: others}, "additionalProperties": False}


def _pattern(says: Schema) -> str | None:
    """A pattern for texts that fit all keywords; None if there is none, and empty if any text fits."""
    if any(type(value) is not TYPES.get(key) for key, value in says.items()):
        return None
    wholes = []
    if says.keys() & {"minLength", "maxLength"}:
        wholes.append(rf"[\s\S]{{{says.get('minLength', 0)},{says.get('maxLength', '')}}}$")
    if says.get("format") in STRING_FORMATS:
        wholes.append(STRING_FORMATS[says["format"]].removeprefix("^"))
    pattern = says.get("pattern", "")
    if not pattern:
        wholes, pattern = wholes[:-1], f"^{wholes[-1]}" if wholes else ""
    ahead = "".join(f"(?={text})" for text in wholes)
    rest = pattern.removeprefix("^") if pattern.startswith("^") else rf"[\s\S]*(?:{pattern})"
    return f"^{ahead}{rest}" if ahead else pattern
