"""Fields of decisions, in all dialects."""

from __future__ import annotations

from mlxpaged.api.fields import shared
from mlxpaged.api.fields.table import Outcome, Row, Table, label, refused

ONE_ANSWER = "an answer is one object"

COMMON: tuple[Row, ...] = (
    *shared.EVERYWHERE,
    refused("stream", True, ONE_ANSWER, (False,)),
)

DECISIONS = Table(
    label("prompt_cache_options", {"mode": "implicit"}, shared.CACHED),
    Row(
        "*.prompt_cache_breakpoint",
        Outcome.LABEL,
        {"prompt_cache_breakpoint": {"mode": "explicit"}},
        shared.CACHED,
    ),
    refused("audio", "x", "audio is not supported by this server"),
    *COMMON,
)

SYSTEM_ONE = Table(
    refused("videos", [["x"]], "videos are not supported by this server", ([],)),
    *COMMON,
)
