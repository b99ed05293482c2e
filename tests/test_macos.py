"""What macOS says of itself, and what an old Python makes of it."""

from __future__ import annotations

import sys

import pytest

from mlxpaged import macos


@pytest.mark.parametrize(
    ("product", "kernel", "release", "version"),
    [
        ("15.7.1", "24.6.0", (15, 7), "15.7.1"),
        ("26.2", "25.2.0", (26, 2), "26.2"),
        ("27.0.1", "26.0.0", (27, 0), "27.0.1"),
        ("16.0", "25.2.0", (26, 2), "26.2"),
        ("16.0", "25.0.0", (26, 0), "26.0"),
        ("16.0", "26.1.0", (27, 1), "27.1"),
        ("", "", (0, 0), ""),
    ],
)
def test_the_release_is_the_systems_own_also_for_a_python_that_is_told_16(
    product: str, kernel: str, release: tuple[int, int], version: str
) -> None:
    assert macos.release_of(product, kernel) == release
    assert macos.version_of(product, kernel) == version


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac says it")
def test_elsewhere_nothing_is_asked() -> None:
    assert (macos.release(), macos.version(), macos.chip()) == ((0, 0), "", "")
