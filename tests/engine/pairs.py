"""Which optional parts of an engine work together: test_pairs.py tries this table, and docs/scheduling.md shows it.

python -m tests.engine.pairs     # writes the table into the page
"""

from __future__ import annotations

import itertools
from pathlib import Path

PARTS = {
    "images": "images",
    "text drafts": "drafts from the text (`--speculative ngram`)",
    "draft head": "a draft head (`--speculative mtp`)",
    "recurrent": "layers with recurrent states",
    "disk": "prefixes on a disk (`--prefix-cache-dir`)",
    "int8": "a quantized KV cache (`--kv-cache-dtype`)",
    "adapters": "LoRA adapters (`--adapter`)",
    "invariant": "`--batch-invariant`",
    "swap": "a swap space (`--swap-space`)",
    "grammar": "structured output",
}
"""Names for people, by the names of the tests."""

REFUSED = {
    ("draft head", "invariant"): "the head is not used: its passes have other shapes",
    ("recurrent", "invariant"): "the start is refused: how rows are grouped changes the bits of a state",
}
"""Pairs that do not work, and what happens. All others are tried."""

PAIRS = [pair for pair in itertools.combinations(PARTS, 2) if pair not in REFUSED]

PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"
BEGIN, END = "<!-- pairs: begin -->\n", "<!-- pairs: end -->\n"


def table() -> str:
    """The table of the page. A line has the pairs with the parts of later lines."""
    names = list(PARTS)
    lines = ["| | " + " | ".join(str(number) for number in range(2, len(names) + 1)) + " |", "|---" * len(names) + "|"]
    notes: dict[str, str] = {}
    for row, first in enumerate(names[:-1]):
        cells = []
        for column in range(1, len(names)):
            pair = first, names[column]
            if column <= row:
                cells.append("")
            elif pair in REFUSED:
                mark = notes.setdefault(REFUSED[pair], "abc"[len(notes)])
                cells.append(f"no ({mark})")
            else:
                cells.append("yes")
        lines.append(f"| {row + 1} {PARTS[first]} | " + " | ".join(cells) + " |")
    said = "; ".join(f"({mark}) {reason}" for reason, mark in notes.items())
    return "\n".join([*lines, "", f"{len(names)} is {PARTS[names[-1]]}.", f"{said}.", ""])


def written(page: str) -> str:
    """The page with the table of today."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
