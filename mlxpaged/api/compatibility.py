"""Writes the tables of docs/compatibility.md: `python -m mlxpaged.api.compatibility docs/compatibility.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from mlxpaged.api.endpoint import Endpoint
from mlxpaged.api.endpoints import ENDPOINTS
from mlxpaged.api.fields.table import Row, Table

MARK = "<!-- The rest of this page is made of mlxpaged/api/fields/ -->\n"


def tables() -> Iterator[tuple[Endpoint, Table]]:
    """Yields every endpoint that reads a body, with the table of its fields."""
    for endpoint in ENDPOINTS:
        if endpoint.body is not None:
            yield endpoint, getattr(endpoint.body, "table", Table())


def markdown() -> str:
    lines = []
    for endpoint, table in tables():
        lines += ["", f"## {endpoint.method} {endpoint.path}", ""]
        lines += ["| Field | Example | Outcome | Note |", "|---|---|---|---|", *map(line, table.rows)]
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    notes = [
        f"of `{row.of}`" if row.of else "",
        row.note,
        f"`{'`, `'.join(map(json.dumps, row.neutral))}`: changes nothing" if row.neutral else "",
        f"if `{row.only_with}` is not 0" if row.only_with else "",
    ]
    example = json.dumps(row.example, ensure_ascii=False)
    return f"| `{row.field}` | `{example}` | {row.outcome.value} | {'; '.join(filter(None, notes))} |"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    head, _, _ = page.read_text().partition(MARK)
    page.write_text(head + MARK + markdown())
