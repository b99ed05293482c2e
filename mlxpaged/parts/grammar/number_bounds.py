"""Reads the bounds of numbers in JSON schemas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlxpaged.parts.grammar.json_schema import is_double
from mlxpaged.parts.grammar.schema_merge import OtherSchemaError, Schema

Bounds = Mapping[str, int | float]
"""The bounds that a schema has, by their keywords."""

MAX_MULTIPLE = 10**18
"""Largest number with `multipleOf`, in both directions. llguidance takes no bounds from 2^63 on, and writes any number
of digits if there is none."""


def bounds_of(schema: Schema) -> Bounds:
    """Raises OtherSchemaError if a bound is no number."""
    keywords = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    found: dict[str, Any] = {key: schema[key] for key in keywords if key in schema}
    if not all(type(each) is int or (type(each) is float and math.isfinite(each)) for each in found.values()):
        raise OtherSchemaError("has a bound that is no number")
    return found


def check_doubles(bounds: Bounds) -> None:
    """Raises ValueError if a bound is an integer that no double is."""
    if any(isinstance(each, int) and not is_double(each) for each in bounds.values()):
        raise ValueError("has a bound above 2^53 that is not one of integers only")


def of_integers(bounds: Bounds) -> tuple[int | None, int | None]:
    """The least and the largest integer."""
    low = [math.ceil(bounds[key]) for key in ("minimum",) if key in bounds]
    low += [math.floor(bounds[key]) + 1 for key in ("exclusiveMinimum",) if key in bounds]
    high = [math.floor(bounds[key]) for key in ("maximum",) if key in bounds]
    high += [math.ceil(bounds[key]) - 1 for key in ("exclusiveMaximum",) if key in bounds]
    return max(low, default=None), min(high, default=None)


def of_doubles(bounds: Bounds) -> tuple[float | None, float | None]:
    """The least and the largest double."""
    low = [bounds[key] for key in ("minimum",) if key in bounds]
    low += [math.nextafter(bounds[key], math.inf) for key in ("exclusiveMinimum",) if key in bounds]
    high = [bounds[key] for key in ("maximum",) if key in bounds]
    high += [math.nextafter(bounds[key], -math.inf) for key in ("exclusiveMaximum",) if key in bounds]
    return max(low, default=None), min(high, default=None)


def of_multiples(bounds: Bounds) -> Bounds:
    """The same bounds, within those that llguidance takes."""
    low, high = bounds.get("minimum", -MAX_MULTIPLE), bounds.get("maximum", MAX_MULTIPLE)
    return {**bounds, "minimum": max(low, -MAX_MULTIPLE), "maximum": min(high, MAX_MULTIPLE)}
