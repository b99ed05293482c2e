"""Defines a row of docs/compatibility.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxpaged.api.fields.table import Outcome, Row

HONOURED = "honoured"
MODEL = "model"  # honoured if the model can do it, otherwise refused
ALIAS, LABEL = Outcome.ALIAS.value, Outcome.LABEL.value
IGNORED, REFUSED = Outcome.IGNORED.value, Outcome.REFUSED.value


MOST_VALUE_CHARS = 24
"""Of an example's value that stands on the page. Longer ones are in the tests alone."""


@dataclass(frozen=True)
class Claim:
    """One field, or one kind of its values.

    field: its path, without the indices of lists; "*.name" is a field of any object in the body. example: these fields,
    added to the smallest body, have this outcome. note: why. of: the path of the field that an alias sets. neutral:
    values that change nothing.
    """

    field: str
    outcome: str
    example: Mapping[str, Any]
    note: str = ""
    of: str = ""
    neutral: tuple[Any, ...] = ()

    def shown(self, with_value: bool) -> str:
        """The field and its neutral values, in Markdown. with_value: the outcome depends on the value; a short one is
        shown."""
        value = json.dumps(self.example.get(self.field), ensure_ascii=False)
        field = f"`{self.field}: {value}`" if with_value and len(value) <= MOST_VALUE_CHARS else f"`{self.field}`"
        return f"{field} (`{'`, `'.join(map(json.dumps, self.neutral))}`)" if self.neutral else field

    @property
    def remark(self) -> str:
        """The note, in Markdown. Empty if the outcome says all."""
        return "; ".join(filter(None, (f"of `{self.of}`" if self.of else "", self.note)))


def of_row(row: Row) -> Claim:
    """What a row of the server's tables says."""
    notes = (row.note, f"if `{row.only_with}` is not 0" if row.only_with else "")
    return Claim(row.field, row.outcome.value, row.example, "; ".join(filter(None, notes)), row.of, row.neutral)


def claim(outcome: str, field: str, value: Any, note: str, also: Mapping[str, Any]) -> Claim:
    """value, also: the example has this value of the body's field, and these other fields."""
    return Claim(field, outcome, {field.split(".")[0]: value, **also}, note)


def honoured(field: str, value: Any, note: str = "", **also: Any) -> Claim:
    return claim(HONOURED, field, value, note, also)


def by_model(field: str, value: Any, note: str = "", **also: Any) -> Claim:
    return claim(MODEL, field, value, note, also)


def label(field: str, value: Any, note: str = "", **also: Any) -> Claim:
    return claim(LABEL, field, value, note, also)


def ignored(field: str, value: Any, note: str, **also: Any) -> Claim:
    return claim(IGNORED, field, value, note, also)


def refused(field: str, value: Any, note: str = "", **also: Any) -> Claim:
    return claim(REFUSED, field, value, note, also)
