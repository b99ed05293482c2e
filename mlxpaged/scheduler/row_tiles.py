"""How many rows of a step a GPU's matrix kernels compute at once."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_CHUNK = 24
"""The time limit never cuts a chunk of a prompt below this many tokens: fewer leave a GPU idle, and every prompt must
make progress. By default, the next steps make up for the time beyond the limit."""


@dataclass(frozen=True)
class RowTiles:
    """rows: of a tile. A step of one row more takes as long as one with a whole tile more. least: rows of a step below
    which a chunk of a prompt wastes what is read for it."""

    rows: int = 1
    least: int = 1

    def padded(self, before: int, tokens: int) -> int:
        """Returns how many tokens after `before` rows take as long as these."""
        return -(-(before + tokens) // self.rows) * self.rows - before

    def chunk(self, before: int, tokens: int) -> int:
        """Returns the size of a chunk of about `tokens` that fills its last tile, after `before` rows of the step."""
        least = -(-max(before + LEAST_CHUNK, self.least) // self.rows) * self.rows
        return max((before + tokens) // self.rows * self.rows, least) - before


ANY_ROWS = RowTiles()
"""Of a device on which a row costs the same in any number."""
