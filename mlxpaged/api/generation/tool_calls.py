"""The arguments of calls for APIs that do not write them as text."""

from __future__ import annotations

import json
import sys
from typing import Any


def call_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a complete call as an object, for APIs that do not write them as text."""
    arguments: dict[str, Any] = json.loads(text, parse_float=finite)
    return arguments


def finite(number: str) -> float:
    """Returns a finite number, because JSON has no infinity."""
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))
