"""What mlxpaged sets in the environment before mlx is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mlxpaged import mlx_settings


@pytest.mark.parametrize(
    ("chip", "expected"),
    [
        ("Apple M1", "1000"),
        ("Apple M2 Pro", "1000"),
        ("Apple M4 Max", "1000"),
        ("Apple M5", None),
        ("Apple M10 Ultra", None),
        ("Apple processor", None),
        ("", None),
    ],
)
def test_command_buffers_are_long_on_chips_up_to_m4(
    monkeypatch: pytest.MonkeyPatch, chip: str, expected: str | None
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(mlx_settings, "chip", lambda: chip)
    monkeypatch.setattr(os, "environ", {})
    mlx_settings.prepare()
    assert os.environ.get("MLX_MAX_OPS_PER_BUFFER") == expected


def test_a_value_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(mlx_settings, "chip", lambda: "Apple M1")
    monkeypatch.setattr(os, "environ", {"MLX_MAX_OPS_PER_BUFFER": "7"})
    mlx_settings.prepare()
    assert os.environ == {"MLX_MAX_OPS_PER_BUFFER": "7"}


@pytest.mark.skipif(sys.platform == "darwin", reason="on a Mac it may be set")
def test_nothing_is_set_on_other_systems() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MLX_MAX_OPS_PER_BUFFER"}
    code = "import os, sys, mlxpaged; sys.exit('MLX_MAX_OPS_PER_BUFFER' in os.environ or 'mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
