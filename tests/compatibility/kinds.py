"""Makes the table of docs/api.md of `mlxpaged/api/fields/kinds.py`."""

from __future__ import annotations

from collections.abc import Mapping

from mlxpaged.api.fields import kinds
from mlxpaged.api.fields.kinds import Handling, Kind

BEGIN, END = "<!-- Made of mlxpaged/api/fields/kinds.py -->\n", "<!-- The end of the table -->\n"

TABLES: dict[str, Mapping[str, Kind]] = {
    "items of responses": kinds.ITEMS,
    "parts of responses": kinds.RESPONSES_PARTS,
    "tools of responses": kinds.RESPONSES_TOOLS,
    "parts of chat completions": kinds.CHAT_PARTS,
    "calls of chat completions": kinds.CHAT_CALLS,
    "tools of chat completions": kinds.CHAT_TOOLS,
    "blocks of messages": kinds.BLOCKS,
    "tools of messages": kinds.MESSAGES_TOOLS,
    "tools of Ollama": kinds.OLLAMA_TOOLS,
}


def markdown() -> str:
    lines = ["", "| Types | What happens | Names |", "|---|---|---|"]
    for name, table in TABLES.items():
        for handling in Handling:
            found = sorted(kind for kind, row in table.items() if row.handling is handling)
            if found:
                lines.append(f"| {name} | {handling.value} | `{'`, `'.join(found)}` |")
    return "\n".join(lines) + "\n\n"


def with_table(page: str) -> str:
    """Returns the page with the table in its place."""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + markdown() + END + rest.partition(END)[2]
