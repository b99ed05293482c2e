"""Clients whose schemas are ever new ones."""

from __future__ import annotations

import itertools
from typing import Any

from tests.faults.fault import Context, must
from tests.faults.streams import chat

_numbers = itertools.count()


def new_schema(size: int) -> dict[str, Any]:
    """A schema that no request had."""
    number = next(_numbers)
    return {
        "type": "object",
        "properties": {
            f"p{i}": {"type": "string", "maxLength": 20 + i, "enum": [f"{number} {i}"]} for i in range(size)
        },
        "required": [f"p{i}" for i in range(size)],
    }


async def ask_new_schemas(context: Context, count: int, key: str = "victim", size: int = 200) -> None:
    """Each is answered, or refused because the client asks too often."""
    for _ in range(count):
        path, body = chat("x", 1, stream=False, structured_outputs={"json": new_schema(size)})
        reply = await context.post(path, body, key)
        must(reply.status == 200 or (reply.status == 503 and reply.json["error"]["code"] == "engine_busy"), reply)
