"""The table of families in docs/models.md is up to date, and each of its cells is proven."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxpaged.formats import FORMATS
from tests.formats.families import FAMILIES, OK, Family, documented, with_own_template, with_their_templates

TEMPLATES = os.environ.get("MLXPAGED_TEMPLATES")
BY_NAME = {family.name: family for family in FAMILIES}


def check(family: Family) -> None:
    own = with_own_template(family)
    assert all(cell.startswith((OK, "-")) for cell in own[2:]), own
    assert documented()[family.name][:-1] == own, "run `make families`"


def test_every_family_has_a_row_and_every_format_a_family() -> None:
    assert list(documented()) == list(BY_NAME)
    assert {family.form for family in FAMILIES} == FORMATS.keys()


@pytest.mark.parametrize("name", ["Qwen3", "Mistral Small 3.2", "DeepSeek V3.1"])
def test_a_row_is_proven(name: str) -> None:
    check(BY_NAME[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_all_rows_are_proven(name: str) -> None:
    check(BY_NAME[name])


@pytest.mark.slow
@pytest.mark.skipif(not TEMPLATES, reason="MLXPAGED_TEMPLATES names no directory with the makers' templates")
@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.theirs])
def test_the_rows_hold_with_the_makers_templates(name: str) -> None:
    row = documented()[name]
    assert with_their_templates(BY_NAME[name], Path(str(TEMPLATES)), row[:-1]) == row[-1], "run `make families`"
