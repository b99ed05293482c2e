"""Makes one JSON schema of two that a value must fit both, and says which keywords the grammar of a schema knows."""

from __future__ import annotations

import json
from typing import Any

from mlxpaged.formats.schemas import required

Schema = dict[str, Any]

ANNOTATIONS = {"$anchor", "$defs", "definitions", "$schema", "$comment", "title", "description", "default", "readOnly"}
ANNOTATIONS |= {"writeOnly", "examples", "example", "deprecated", "contentMediaType", "contentEncoding", "x-guidance"}
"""Keywords that forbid nothing."""

KNOWN = {"$ref", "allOf", "anyOf", "type", "const", "enum", "properties", "required", "additionalProperties"}
KNOWN |= {"patternProperties", "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"}
KNOWN |= {"additionalItems"}
KNOWN |= {"minLength", "maxLength", "pattern", "format", "multipleOf"}
KNOWN |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}

UNENFORCED = {"not", "uniqueItems", "propertyNames", "if", "then", "else", "contains", "minContains", "maxContains"}
UNENFORCED |= {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"}
UNENFORCED |= {"$dynamicRef", "$recursiveRef"}
"""Keywords that forbid something, and that no grammar expresses. llguidance refuses them too."""

LEAST = {"minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"}
MOST = {"maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"}


class OtherSchemaError(ValueError):
    """A schema has what this package leaves to llguidance: it compiles the schema, or says what is wrong with it."""


class Unsatisfiable(OtherSchemaError):
    """No value fits a schema."""


def validating(schema: Any) -> Schema:
    """The keywords of a schema that forbid something. Raises OtherSchemaError for others than the known ones."""
    if not isinstance(schema, dict):
        raise OtherSchemaError("a schema must be an object or a truth value")
    found = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    if unknown := found.keys() - KNOWN:
        raise OtherSchemaError(f"has {sorted(unknown)}")
    return found


def merged(first: Schema, second: Schema) -> Schema:
    """A schema for the values that fit both, of their validating keywords without references. The properties are in
    the order of the first schema. Raises Unsatisfiable, and OtherSchemaError if it cannot be written."""
    if not first or not second:
        return first or second
    if "type" in first and "type" in second and not _common_types(first["type"], second["type"]):
        raise Unsatisfiable("no type fits")
    result = {**first, **second}
    for key in first.keys() & second.keys():
        one, other = first[key], second[key]
        if key in LEAST or key in MOST:
            if type(one) not in (int, float) or type(other) not in (int, float):
                raise OtherSchemaError(f"has {key} that is no number")
            result[key] = max(one, other) if key in LEAST else min(one, other)
        elif key == "required":
            result[key] = list(dict.fromkeys([*required(first), *required(second)]))
        elif key == "type":
            result[key] = _common_types(one, other)
        elif key == "enum":
            texts = {json.dumps(each, sort_keys=True) for each in _list(other)}
            result[key] = [each for each in _list(one) if json.dumps(each, sort_keys=True) in texts]
        elif key == "pattern":
            result[key] = [*_patterns(one), *_patterns(other)]
        elif key == "additionalProperties":
            result[key] = False if False in (one, other) else all_of(one, other)
        elif key == "anyOf" or (key != "properties" and json.dumps(one) != json.dumps(other)):
            raise OtherSchemaError(f"has {key} twice for one value")
    if "properties" in result or "additionalProperties" in result:
        _check_properties(first, second)
        result["properties"] = _merged_properties(first, second)
    if ("items" in first and "prefixItems" in second) or ("prefixItems" in first and "items" in second):
        raise OtherSchemaError("has items of two schemas")
    if "const" in result and "enum" in result:
        raise OtherSchemaError("has const and enum")
    return result


def all_of(*schemas: Any) -> Any:
    rest = [each for each in schemas if each is not True and each != {}]
    return True if not rest else rest[0] if len(rest) == 1 else {"allOf": rest}


def _check_properties(*schemas: Schema) -> None:
    for schema in schemas:
        if "patternProperties" in schema or not isinstance(schema.get("properties", {}), dict):
            raise OtherSchemaError("has properties that cannot be merged")


def _merged_properties(first: Schema, second: Schema) -> Schema:
    """A property that only one of the schemas has is an additional one for the other."""
    some, others = first.get("properties", {}), second.get("properties", {})
    return {
        name: all_of(
            some.get(name, first.get("additionalProperties", True)),
            others.get(name, second.get("additionalProperties", True)),
        )
        for name in {**some, **others}
    }


def _common_types(one: Any, other: Any) -> list[str]:
    some, others = types_of(one), types_of(other)
    common = [each for each in some if each in others or (each == "integer" and "number" in others)]
    return common + [each for each in others if each == "integer" and "number" in some and each not in some]


def types_of(given: Any) -> list[str]:
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise OtherSchemaError("type must be a string or a list of strings")
    return found


def _patterns(given: Any) -> list[str]:
    return given if isinstance(given, list) else [given]


def _list(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise OtherSchemaError("has an object where a list must be")
    return given
