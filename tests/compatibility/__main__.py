"""Writes the tables of two pages: `python -m tests.compatibility docs/compatibility.md`, and docs/api.md beside it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.compatibility.kinds import with_table
from tests.compatibility.page import MARK, markdown

page = Path(sys.argv[1])
head, _, _ = page.read_text().partition(MARK)
page.write_text(head + MARK + markdown())
api = page.with_name("api.md")
api.write_text(with_table(api.read_text()))
