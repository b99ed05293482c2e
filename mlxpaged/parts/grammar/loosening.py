"""Finds what is not enforced in JSON schemas, and leaves it out if a request does not insist on it."""

from __future__ import annotations

from typing import Any

from mlxpaged.formats.schemas import required
from mlxpaged.parts.grammar.characters import as_it_is
from mlxpaged.parts.grammar.json_grammar import is_too_much_to_count
from mlxpaged.parts.grammar.json_schema import DATA, NAMED, check_schema, enforceable
from mlxpaged.parts.grammar.patterns import NOT_REGULAR, OtherPatternError, whole
from mlxpaged.parts.grammar.schema_limits import target
from mlxpaged.parts.grammar.schema_merge import UNENFORCED, Schema

COUNTS = {"minProperties", "maxProperties"}


def loosened(schema: Schema) -> tuple[Schema, tuple[str, ...]]:
    """The schema without what cannot be enforced, and the keywords that are left out. A `oneOf` whose branches do not
    exclude each other becomes `anyOf`. What is too large to be read stays as it is."""
    try:
        check_schema(schema)
        root = enforceable(schema)
    except ValueError:
        return schema, ()
    found: dict[str, str] = {}
    loose = _without(root, root, "", found)
    if found:  # references into what is left out lead nowhere now
        loose = _without(loose, loose, "", found)
    return (loose, tuple(found)) if found and isinstance(loose, dict) else (schema, ())


def check_enforced(schema: Any, root: Any) -> None:
    """Raises ValueError if a schema has what cannot be enforced. root: what its references lead to."""
    try:
        rewritten = enforceable(schema, root)
    except ValueError:
        return  # it is refused for another reason
    found: dict[str, str] = {}
    _without(rewritten, root, "", found)
    for keyword, place in found.items():
        raise ValueError(f"{keyword!r} cannot be enforced; it is at {place.removeprefix('.') or 'the root'!r}")


def _without(schema: Any, root: Any, place: str, found: dict[str, str]) -> Any:
    """found: gets the keywords that are left out, each with the place of the first one."""
    if isinstance(schema, list):
        return [_without(each, root, f"{place}.{i}", found) for i, each in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    result: Schema = {}
    uncounted = COUNTS if _is_uncountable(schema) else set[str]()
    for key, value in schema.items():
        inside = f"{place}.{key}"
        if key in DATA:
            result[key] = value
        elif key in UNENFORCED or key in uncounted or (key in ("pattern", "$ref") and _is_other(key, value, root)):
            found.setdefault(key, place)
        elif key in NAMED and isinstance(value, dict):
            names = [name for name in value if key != "patternProperties" or not _is_other("pattern", name, root)]
            if len(names) < len(value):
                found.setdefault(key, place)
            result[key] = {name: _without(value[name], root, f"{inside}.{name}", found) for name in names}
        elif key == "oneOf":
            found.setdefault(key, place)
            result.setdefault("anyOf", _without(value, root, inside, found))
        else:
            result[key] = _without(value, root, inside, found)
    return result


def _is_uncountable(schema: Schema) -> bool:
    """Whether the members of an object cannot be counted, for its minProperties or maxProperties."""
    names = schema.get("properties")
    if not isinstance(names, dict) or names.keys() <= set(required(schema)):
        return False
    counts = {key: schema[key] for key in COUNTS & schema.keys() if type(schema[key]) in (int, float)}
    if counts.keys() <= {"minProperties"} and counts.get("minProperties", 0) < 2:
        return False
    by_pattern = schema.get("patternProperties")
    has_several = isinstance(by_pattern, dict) and len(by_pattern) > 1
    return has_several or is_too_much_to_count(len(names), int(max(counts.values())))


def _is_other(key: str, value: Any, root: Any) -> bool:
    """Whether a reference leads to another place, or a pattern is not regular."""
    if not isinstance(value, str):
        return False
    if key == "$ref":
        return target(value, root) is None
    if NOT_REGULAR.search(value) is None:
        return False
    try:
        whole(value, as_it_is)
    except OtherPatternError:
        return True
    return False
