"""The formats in which models write tool calls and thoughts. Nothing here imports mlx."""

from __future__ import annotations

from collections.abc import Container

from mlxpaged.addons import Table
from mlxpaged.formats.format import Format, new_call_id
from mlxpaged.formats.harmony import HARMONY
from mlxpaged.formats.hermes import HERMES
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.thoughts import THOUGHTS, ThoughtTags, thought_tags
from mlxpaged.formats.tools import Call, Tools

__all__ = [
    "FORMATS",
    "HARMONY",
    "HERMES",
    "THOUGHTS",
    "Call",
    "Format",
    "NotACall",
    "Reading",
    "Source",
    "ThoughtTags",
    "Tools",
    "format_of",
    "new_call_id",
    "thought_tags",
]

FORMATS: Table[Format] = Table(
    "formats", Format, lambda name, form: None if form.name == name else f"its own name is {form.name!r}"
)
"""The formats by name, in the order in which they are searched."""


def format_of(template: str, vocabulary: Container[str]) -> Format | None:
    """Returns the format that a chat template shows, or else the one that a vocabulary is for; None for neither."""
    return next((each for each in FORMATS.values() if each.is_of(template, vocabulary)), None)
