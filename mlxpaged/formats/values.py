"""Makes JSON of values that are written without quotes."""

from __future__ import annotations

import json
import math
from typing import Any

from mlxpaged.formats.literals import PYTHON
from mlxpaged.formats.schemas import TYPES, Schema, as_string, enumerated, loads, types_of
from mlxpaged.formats.source import NotACall, Source

CONSTANTS = {"true": "true", "false": "false", "none": "null"}


def json_of(text: str, schema: Any, root: Schema) -> str:
    """Returns the JSON of a value. What may be a string is one. A text that is no such value is a string too: the tool
    says what is wrong with it. Raises NotACall where the value must be an object or a list."""
    values, types = enumerated(schema, root), types_of(schema, root)
    if values is not None and text not in values:
        types = (types or set()) - {"string"} or types
    value = text.strip()
    if types is not None and "string" in types:
        is_null = value == "null" and "null" in types and (values is None or "null" not in values)
        return "null" if is_null else as_string(text)
    try:
        parsed = loads(value)
    except NotACall:
        parsed = None
        other = CONSTANTS.get(value.lower())
        if other is not None and types is not None and TYPES[type(json.loads(other))] in types:
            return other
        return as_string(text) if types is None or not types & {"array", "object"} else python_value(value)
    if types is None:
        return as_string(text) if isinstance(parsed, str) else value
    if isinstance(parsed, float) and "number" not in types and "integer" in types and parsed.is_integer():
        return str(int(parsed))
    own = TYPES[type(parsed)]
    fitting = own in types or (own == "integer" and "number" in types)
    return value if fitting and (not isinstance(parsed, float) or math.isfinite(parsed)) else as_string(text)


def python_value(text: str) -> str:
    """Returns the JSON of a list or a dictionary that is written in Python. Raises NotACall."""
    source = Source(text=text)
    source.ended = True
    try:
        next(reading := PYTHON.value(source))
    except StopIteration as result:
        if source.at < len(text) or text[:1] not in "[{(":
            raise NotACall from None
        return str(result.value)
    raise AssertionError(reading)  # it waits for nothing
