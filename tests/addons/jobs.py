"""The table of add-ons in tests/README.md: their files, and their tests, which CI runs if one of these has changed.

python -m tests.addons.jobs gguf                          # the tests of an add-on
git diff --name-only main | python -m tests.addons.jobs   # the add-ons that a change touches, as JSON
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Parts(NamedTuple):
    """Patterns of paths. A * stands for anything, slashes too."""

    files: list[str]
    tests: list[str]


def table() -> dict[str, Parts]:
    """The add-ons by name."""
    rows = re.findall(r"^\| (\w+) \| (`.*`) \| (`.*`) \|$", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    return {name: Parts(*(re.findall("`(.+?)`", cell) for cell in cells)) for name, *cells in rows}


def matching(paths: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)]


def paths_of(addon: str) -> list[str]:
    paths = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py"))
    return matching(paths, table()[addon].tests)


def touched(paths: list[str]) -> list[str]:
    """The add-ons to which a changed file or test belongs."""
    return [name for name, parts in table().items() if matching(paths, (*parts.files, *parts.tests))]


if __name__ == "__main__":
    print(*paths_of(sys.argv[1])) if len(sys.argv) > 1 else print(json.dumps(touched(sys.stdin.read().split())))
