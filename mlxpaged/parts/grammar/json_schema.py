"""Rewrites JSON schemas if that makes them enforceable, and refuses those that the compiler would not finish.

A `oneOf` whose branches exclude each other means the same as `anyOf`, which a grammar can express. Pydantic writes a
union with a discriminator like that. Any other `oneOf` stays, and the compiler refuses it.

For llguidance, exclusive bounds of numbers become inclusive ones next to them, because version 1.9.1 takes 0 for a
number that is above 0 and at most 0.5.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from mlxpaged.formats.string_formats import STRING_FORMATS
from mlxpaged.parts.grammar.property_names import with_listed_names
from mlxpaged.parts.grammar.schema_limits import check_limits, target

NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose value maps names to schemas."""

NAMES = {"$dynamicAnchor", "$recursiveAnchor"}
"""Keywords that only name a place. llguidance refuses them."""

DATA = {"const", "enum", "default", "examples", "example"}
"""Keywords whose value is not a schema."""

MAX_PATTERN_CHARS = 8 * 1024
"""Most characters of all regular expressions of a schema. Compiling takes quadratic time: half a second for these."""

MAX_MULTIPLE = 10_000
"""Largest least common multiple of all `multipleOf`, in units of their last decimal. The compiler builds a state for
each remainder, 100,000 a second, and stops only in some cases: a million were not done after 8 seconds."""

MAX_BRANCHES = 64
"""Most branches of a `oneOf` that are compared with each other."""

MAX_COMPARED = 250_000
"""Most values, properties and pairs of branches that are compared for all `oneOf` of a schema: 0.3 seconds. References
lead to the same branches again, and what was compared once is known."""

NEAR = 1e-9
MAX_EXCLUSIVE = 10**6
"""How far an inclusive bound is from an exclusive one that is an integer below MAX_EXCLUSIVE. The compiler rounds
numbers of 16 digits."""

TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}


def check_schema(schema: Any) -> None:
    """Raises ValueError if a schema is not an object, or if the compiler would not finish it."""
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    check_limits(schema)
    nodes = list(_nodes(schema))
    length = sum(map(len, patterns(schema)))
    if length > MAX_PATTERN_CHARS:
        raise ValueError(f"has patterns of {length} characters; the limit is {MAX_PATTERN_CHARS}")
    if not _has_common_multiple([node["multipleOf"] for node in nodes if type(node.get("multipleOf")) in (int, float)]):
        raise ValueError(f"the least common multiple of all multipleOf is above {MAX_MULTIPLE}")


def check_integers(schema: Any) -> None:
    """Raises ValueError if a schema has an integer that no double is: llguidance would enforce another one."""
    waiting = [schema]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict | list):
            waiting += found.values() if isinstance(found, dict) else found
        elif isinstance(found, int) and not is_double(found):
            raise ValueError(f"has the integer {found}, which cannot be enforced beside other keywords of the schema")


def is_double(number: int) -> bool:
    """Whether a double has this value."""
    try:
        return int(float(number)) == number
    except OverflowError:
        return False


def has_limited_strings(schema: Any) -> bool:
    """Whether llguidance writes some strings of a schema as a regular expression."""
    return any({"pattern", "format", "patternProperties", "enum", "const"} & node.keys() for node in _nodes(schema))


def _has_common_multiple(numbers: Sequence[float]) -> bool:
    """Whether one is at most MAX_MULTIPLE. It is found step by step: that of all numbers may have a million digits."""
    multiples = [Decimal(str(number)) for number in numbers]
    decimals = max([0, *(-int(value.as_tuple().exponent) for value in multiples)])
    common = 1
    for value in multiples:
        if decimals > 20 or value.adjusted() > 20:
            return False
        common = math.lcm(common, int(abs(value).scaleb(decimals)))
        if common > MAX_MULTIPLE:
            return False
    return True


def patterns(schema: Any) -> list[str]:
    """The regular expressions of a schema."""
    found = [text for node in _nodes(schema) for text in (node.get("pattern"), *_object(node.get("patternProperties")))]
    return [text for text in found if isinstance(text, str)]


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in a schema, including objects that are not schemas."""
    waiting = [schema]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            yield found
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found


def _object(value: Any) -> dict[str, Any]:
    """The value if it is an object, else an empty object."""
    return value if isinstance(value, dict) else {}


def enforceable(schema: Any, root: Any = None) -> Any:
    """The schema, with `oneOf` written as `anyOf` if its branches exclude each other: by their types, or by a required
    property that has different constants. Names of properties are listed. What forbids nothing is left out. root: what
    references lead to, if it is another schema. Raises ValueError if the branches are too many to compare."""
    return _rewritten(schema, _Branches(schema if root is None else root))


def _rewritten(schema: Any, branches: _Branches) -> Any:
    """Calls itself for each level of the schema, of which `check_limits` allows MAX_NESTING."""
    if isinstance(schema, list):
        return [_rewritten(item, branches) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if key in DATA:
            result[key] = value
        elif key in NAMES or (key == "uniqueItems" and value is False) or (key == "not" and value is False):
            continue
        elif key == "not" and value in (True, {}):
            return False
        elif key == "format" and (not isinstance(value, str) or value not in STRING_FORMATS):
            continue
        elif key in NAMED and isinstance(value, dict):
            result[key] = {name: _rewritten(item, branches) for name, item in value.items()}
        elif key == "oneOf" and "anyOf" not in schema and branches.exclude_each_other(value):
            result["anyOf"] = _rewritten(value, branches)
        else:
            result[key] = _rewritten(value, branches)
    if "propertyNames" in result:
        result = with_listed_names(result, branches.root)
    return result


def with_inclusive_bounds(schema: Any) -> Any:
    """The schema for llguidance, with inclusive bounds of numbers in place of exclusive ones that are integers. Calls
    itself as `_rewritten` does."""
    if isinstance(schema, list):
        return [with_inclusive_bounds(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: value if key in DATA else with_inclusive_bounds(value) for key, value in schema.items()}
    if schema.get("type") == "integer":
        return result
    bound: Any
    for exclusive, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        bound, other = schema.get(exclusive), schema.get(inclusive)
        are_numbers = type(bound) in (int, float) and type(other) in (int, float, type(None))
        if are_numbers and abs(bound) < MAX_EXCLUSIVE and bound == int(bound):
            del result[exclusive]
            near = bound + sign * NEAR
            result[inclusive] = near if other is None else sign * max(sign * near, sign * other)
    return result


class _Branches:
    """Compares the branches of the `oneOf` of a schema."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._constants: dict[int, dict[str, set[str]]] = {}  # by the id of a branch
        self._types: dict[int, set[str]] = {}  # by the id of a branch
        self._pairs: dict[tuple[int, int], bool] = {}  # whether two exclude each other, by the ids of their constants
        self._num_compared = 0

    def exclude_each_other(self, branches: Any) -> bool:
        """Raises ValueError if too many were compared."""
        if not isinstance(branches, list) or len(branches) > MAX_BRANCHES:
            return False
        resolved = [self._resolved(branch) for branch in branches]
        types = list(map(self._types_of, resolved))
        shared = {name for name, count in Counter(itertools.chain(*types)).items() if count > 1}
        if shared - {"object"} or any("object" in each and len(each) > 1 for each in types if shared):
            return False
        objects = [self._constants_of(branch) for branch, each in zip(resolved, types, strict=True) if "object" in each]
        return not shared or self._one_tells_apart(objects) or self._tell_apart_in_pairs(objects)

    def _one_tells_apart(self, objects: list[dict[str, set[str]]]) -> bool:
        """Whether one property has different constants in all of them, as in what Pydantic writes."""
        for name in min(objects, key=len):
            values = [each.get(name) for each in objects]
            self._note(len(values) + sum(len(each or ()) for each in values))
            if all(values) and sum(len(each or ()) for each in values) == len(set().union(*filter(None, values))):
                return True
        return False

    def _tell_apart_in_pairs(self, objects: list[dict[str, set[str]]]) -> bool:
        return all(self._exclude(a, b) for a, b in itertools.combinations(objects, 2))

    def _exclude(self, a: dict[str, set[str]], b: dict[str, set[str]]) -> bool:
        self._note(1)
        found = self._pairs.get((id(a), id(b)))
        if found is None:
            shared = a.keys() & b.keys()
            self._note(min(len(a), len(b)) + sum(min(len(a[name]), len(b[name])) for name in shared))
            found = self._pairs[id(a), id(b)] = any(a[name].isdisjoint(b[name]) for name in shared)
        return found

    def _note(self, count: int) -> None:
        self._num_compared += count
        if self._num_compared > MAX_COMPARED:
            raise ValueError("has too many branches of oneOf to compare them; use anyOf if they exclude each other")

    def _constants_of(self, branch: dict[str, Any]) -> dict[str, set[str]]:
        """The values that required properties may have, as JSON, of those whose values are listed."""
        found = self._constants.get(id(branch))
        if found is None:
            values = {name: _values(branch, name) for name in sorted(_strings(branch.get("required")))}
            found = self._constants[id(branch)] = {name: each for name, each in values.items() if each}
        return found

    def _types_of(self, branch: dict[str, Any]) -> set[str]:
        found = self._types.get(id(branch))
        if found is None:
            given = branch.get("type", list(TYPES))
            found = _strings([given] if isinstance(given, str) else given)
            found = found if found <= TYPES else TYPES  # unknown ones exclude none, and may be thousands
            found = self._types[id(branch)] = found | {"integer"} if "number" in found else found
        return found

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """The schema that `schema` refers to, or `schema` itself."""
        reference = _object(schema).get("$ref")
        return _object(target(reference, self.root) if isinstance(reference, str) else schema)


def _values(schema: dict[str, Any], name: str) -> set[str]:
    """The texts, integers, booleans and null that a property may be, as JSON. Empty if the schema does not list them,
    or lists others: 1 and 1.0 are one value."""
    found = _object(_object(schema.get("properties")).get(name))
    values = [found["const"]] if "const" in found else found.get("enum")
    if not isinstance(values, list) or not all(value is None or isinstance(value, str | int) for value in values):
        return set()
    return {json.dumps(value) for value in values}


def _strings(values: Any) -> set[str]:
    return {value for value in values if isinstance(value, str)} if isinstance(values, list) else set()
