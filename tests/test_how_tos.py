"""Each change of docs/afternoon.md is made in a copy of the package, works there, and opens few files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.how_tos import HOW_TOS, PAGE, HowTo, written

PACKAGE = Path(__file__).parents[1] / "mlxpaged"
MOST_FILES = 3


def copy_with(change: HowTo, directory: Path) -> None:
    """A package of links, in which the files that the change opens are files."""
    for folder, _, names in os.walk(PACKAGE):
        target = directory / "mlxpaged" / Path(folder).relative_to(PACKAGE)
        target.mkdir(parents=True)
        for name in names:
            if not name.endswith(".pyc"):
                (target / name).symlink_to(Path(folder) / name)
    (directory / "metal_kernels").symlink_to(PACKAGE.parent / "metal_kernels")
    for name, text in change.new.items():
        (directory / "mlxpaged" / name).write_text(text)
    for name, edits in change.edits.items():
        text = (PACKAGE / name).read_text()
        for found, replaced in edits:
            assert text.count(found) == 1, f"{name} has another text now: {found!r}"
            text = text.replace(found, replaced)
        (directory / "mlxpaged" / name).unlink()
        (directory / "mlxpaged" / name).write_text(text)


@pytest.mark.parametrize("change", HOW_TOS, ids=lambda each: each.title)
def test_a_change_opens_few_files_and_works(change: HowTo, tmp_path: Path) -> None:
    assert 1 <= len(change.files) <= MOST_FILES
    copy_with(change, tmp_path)
    command, variables = [sys.executable, "-c", change.check], os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_the_change_the_check_fails() -> None:
    for change in HOW_TOS:
        done = subprocess.run([sys.executable, "-c", change.check], capture_output=True, text=True, check=False)
        assert done.returncode != 0, f"{change.title}: the check shows nothing"


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert written(page) == page, "run python -m tests.how_tos"
