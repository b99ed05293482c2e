"""Settings of the engine that are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpaged.engine_config import EngineConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"swap_space_bytes": -1}, "swap_space_bytes must not be negative, got -1"),
        ({"swap_dir": Path("/")}, "swap_dir needs swap_space_bytes"),
    ],
)
def test_a_swap_space_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_there_is_no_swap_space_unasked() -> None:
    assert EngineConfig().swap_space_bytes == 0
    assert EngineConfig(swap_space_bytes=1, swap_dir=Path("/")).swap_dir == Path("/")
