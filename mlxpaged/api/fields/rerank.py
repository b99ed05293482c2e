"""Fields of rerank and score."""

from __future__ import annotations

from mlxpaged.api.fields import shared
from mlxpaged.api.fields.table import Row, Table, ignored, refused

WHOLE = "a document is judged as a whole, or refused if it is too long"

JUDGED: tuple[Row, ...] = (
    *shared.EVERYWHERE,
    refused("truncate_prompt_tokens", 10, WHOLE, (-1,)),
)

RERANK = Table(
    ignored("truncation", True, WHOLE, (False,)),
    refused("rank_fields", ["text"], "give each document as one text", ([],)),
    *JUDGED,
)

SCORE = Table(*JUDGED)
