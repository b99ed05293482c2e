"""Writes the tables of the page: `python -m tests.compatibility docs/compatibility.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.compatibility.page import MARK, markdown

page = Path(sys.argv[1])
head, _, _ = page.read_text().partition(MARK)
page.write_text(head + MARK + markdown())
