"""The variables by which chat templates turn the thinking on and off, limit it, and set its effort."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Switch:
    """on, off: its values; on is None if the template thinks where the variable is not set."""

    variable: str
    on: Any = True
    off: Any = False


SWITCHES = (
    Switch("enable_thinking"),
    Switch("thinking"),  # DeepSeek V3.1, Kimi, Granite
    Switch("reasoning"),  # Command A
    Switch("thinking_mode", "enabled", "disabled"),  # MiniMax M3
    Switch("reasoning_effort", "high", "no_think"),  # Hunyuan Hy3
    Switch("thinking_budget", None, 0),  # Seed-OSS
)
NAMES = ("enable_thinking", "thinking")
"""Names under which requests may give the switch of any template."""
BUDGET = "thinking_budget"
EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
NEAREST = {
    "minimal": ("minimal", "low"),
    "low": ("low",),
    "medium": ("medium", "high"),
    "high": ("high",),
    "xhigh": ("xhigh", "max", "high"),
    "max": ("max", "xhigh", "high"),
}
"""Maps an effort of a request to those for a template, the best one first."""
COMMON = ("low", "medium", "high")
"""Efforts that templates write without a look at them. Others have to be in the template."""


def quoted(value: str, source: str) -> bool:
    return re.search(rf"""(["']){re.escape(value)}\1""", source) is not None


def switch_of(reads: Callable[[str], bool], source: str) -> Switch | None:
    """reads: whether the template uses a variable. source: its text."""
    for switch in SWITCHES:
        if reads(switch.variable) and (not isinstance(switch.off, str) or quoted(switch.off, source)):
            return switch
    return None


def efforts_of(
    reads: Callable[[str], bool], source: str, renders: Callable[[Mapping[str, Any]], bool]
) -> dict[str, dict[str, str]]:
    """Returns the variable for each effort of a request; none if the template knows no effort. renders: whether the
    template takes variables."""
    variable = next((name for name in EFFORTS if reads(name)), None)
    if variable is None:
        return {}
    values = {value for nearest in NEAREST.values() for value in nearest}
    known: Container[str] = {
        value for value in values if (value in COMMON or quoted(value, source)) and renders({variable: value})
    }
    found = {effort: next(filter(known.__contains__, nearest), None) for effort, nearest in NEAREST.items()}
    return {effort: {variable: value} for effort, value in found.items() if value is not None}
