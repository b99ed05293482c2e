"""Parts of encodings have their first size in each test."""

from __future__ import annotations

import pytest

from mlxpaged.vision.blocks import MOST, pace


@pytest.fixture(autouse=True)
def _first_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "patches", {"heads": MOST, "rest": MOST})
