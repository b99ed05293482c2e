"""A call that must be made has no arguments that its tool does not list."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from mlxpaged.formats.schemas import closed

CITY = {"properties": {"city": {"type": "string"}}}
DEEP = {"properties": {"at": {"type": "object", **CITY}, "all": {"type": "array", "items": {"type": "object", **CITY}}}}
DEFS = {"$defs": {"at": {"type": "object", **CITY}}}

INVENTED: list[tuple[dict[str, Any], Any]] = [
    (CITY, {"city": "Rome", "type": "string"}),
    ({}, {"city": "Rome"}),
    (DEEP, {"at": {"city": "Rome", "properties": {}}}),
    (DEEP, {"all": [{"city": "Rome", "x": 1}]}),
    ({"properties": {"at": {"$ref": "#/$defs/at"}}, **DEFS}, {"at": {"x": 1}}),
    ({"properties": {"at": {"anyOf": [{"type": "object", **CITY}, {"type": "null"}]}}}, {"at": {"x": 1}}),
    ({"properties": {"m": {"type": "object", "additionalProperties": CITY}}}, {"m": {"any": {"x": 1}}}),
]
MEANT: list[tuple[dict[str, Any], Any]] = [
    (CITY, {"city": "Rome"}),
    (CITY | {"additionalProperties": True}, {"x": 1}),
    (CITY | {"additionalProperties": {"type": "integer"}}, {"city": "Rome", "x": 1}),
    (CITY | {"patternProperties": {"^x": {}}}, {"x-a": 1}),
    ({"properties": {"filter": {"type": "object"}}}, {"filter": {"any": {"key": 1}}}),
    ({"allOf": [CITY, {"properties": {"x": {}}}]}, {"city": "Rome", "x": 1}),
    ({"$ref": "#/$defs/at", "properties": {"x": {}}, **DEFS}, {"city": "Rome", "x": 1}),
    ({"anyOf": [CITY, {"properties": {"x": {}}}]}, {"x": 1}),
    (
        {"properties": {"at": {"allOf": [{"$ref": "#/$defs/at"}, {"properties": {"x": {}}}]}}, **DEFS},
        {"at": {"x": 1, "city": ""}},
    ),
]


@pytest.mark.parametrize(("schema", "value"), INVENTED)
def test_a_member_that_is_not_listed_does_not_fit(schema: dict[str, Any], value: Any) -> None:
    jsonschema.validate(value, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, closed(schema))


@pytest.mark.parametrize(("schema", "value"), MEANT)
def test_what_a_schema_says_of_other_members_holds(schema: dict[str, Any], value: Any) -> None:
    jsonschema.validate(value, closed(schema))
