"""How many rows of a step a GPU's matrix kernels compute at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_CHUNK = 24
"""The time limit never cuts a chunk of a prompt below this many tokens: fewer leave a GPU idle, and every prompt must
make progress. By default, the next steps make up for the time beyond the limit."""

LEAST_RATE = 0.75
"""Steps of so few rows that they compute less than this share of the rows per second that others do are too small."""


@dataclass(frozen=True)
class RowTiles:
    """rows: of a tile. A step of one row more takes as long as one with a whole tile more. least: rows of a step below
    which a chunk of a prompt wastes what is read for it."""

    rows: int = 1
    least: int = 1

    def padded(self, rows: int) -> int:
        """Returns how many rows a step of so many computes. With less than a tile, other kernels compute them."""
        return rows if rows < self.rows else -(-rows // self.rows) * self.rows

    def chunk(self, before: int, tokens: int) -> int:
        """Returns the size of a chunk of about `tokens` that fills its last tile, after `before` rows of the step."""
        least = -(-max(before + LEAST_CHUNK, self.least) // self.rows) * self.rows
        return max((before + tokens) // self.rows * self.rows, least) - before

    def measured(self, seconds: Mapping[int, float]) -> RowTiles:
        """Returns the tiles that the seconds of steps of so many rows show, or these as far as they show none clearly.
        A device whose rows cost the same in any number has none."""
        if self.rows == 1 or not seconds.keys() >= {1, 32, 33, 64}:
            return self
        tile, least = self.rows, self.least
        if seconds[33] > 1.4 * seconds[32] and seconds[64] < 1.15 * seconds[33]:
            tile = 32
        elif seconds[33] < 1.1 * seconds[32]:
            tile = 64 if seconds[64] < 1.15 * seconds[32] else 1
        rates = {rows: rows / max(seconds[rows] - seconds[1], 1e-9) for rows in (32, 64, 128) if rows in seconds}
        if max(rates) >= least:
            least = next(rows for rows, rate in rates.items() if rate >= LEAST_RATE * max(rates.values()))
        return RowTiles(tile, least)


ANY_ROWS = RowTiles()
"""The tiles of a device on which a row costs the same in any number."""
