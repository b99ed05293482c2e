"""What mlxpaged sets in the environment before mlx is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mlxpaged import mlx_settings

LONG = {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "400"}


def prepared(monkeypatch: pytest.MonkeyPatch, chip: str, environment: dict[str, str]) -> dict[str, str]:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(mlx_settings, "chip", lambda: chip)
    monkeypatch.setattr(os, "environ", environment)
    mlx_settings.prepare()
    return environment


@pytest.mark.parametrize("chip", ["Apple M1 Max", "Apple M2 Ultra", "Apple M4 Max"])
def test_command_buffers_are_long_on_large_chips_up_to_m4(monkeypatch: pytest.MonkeyPatch, chip: str) -> None:
    assert prepared(monkeypatch, chip, {}) == LONG


@pytest.mark.parametrize("chip", ["Apple M1", "Apple M2 Pro", "Apple M4"])
def test_command_buffers_of_small_chips_end_before_they_hold_up_the_display(
    monkeypatch: pytest.MonkeyPatch, chip: str
) -> None:
    assert prepared(monkeypatch, chip, {}) == LONG | {"MLX_MAX_MB_PER_BUFFER": "100"}


@pytest.mark.parametrize("chip", ["Apple M5", "Apple M5 Max", "Apple M10 Ultra", "Apple processor", ""])
def test_other_chips_have_mlxs_own_command_buffers(monkeypatch: pytest.MonkeyPatch, chip: str) -> None:
    assert prepared(monkeypatch, chip, {}) == {}


@pytest.mark.parametrize("name", LONG)
def test_a_value_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert prepared(monkeypatch, "Apple M1 Max", {name: "7"}) == LONG | {name: "7"}


def test_wired_memory_is_asked_for_again_unless_the_user_has_set_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "environ", environment := dict[str, str]())
    assert not mlx_settings.keeps_wired()
    mlx_settings.keep_wired()
    assert environment == {"MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS": "500"}
    assert mlx_settings.keeps_wired()
    environment["MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS"] = "0"
    mlx_settings.keep_wired()
    assert not mlx_settings.keeps_wired()


@pytest.mark.parametrize(("choice", "interval"), [("on", "500"), ("auto", None), ("off", None)])
@pytest.mark.parametrize("command", [["serve"], ["bench"]])
def test_the_flag_sets_the_interval_before_mlx_is_imported(
    command: list[str], choice: str, interval: str | None
) -> None:
    """The command itself is replaced: what it imports follows."""
    code = f"""
import os, sys, types
from mlxpaged import cli, mlx_settings
mlx_settings.sys = types.SimpleNamespace(platform="darwin")
def run(args):
    assert os.environ.get(mlx_settings.REFRESH) == {interval!r}
    assert "mlx.core" not in sys.modules
    return 0
parse_args = cli.Parser.parse_args
def parse(parser, argv):
    args = parse_args(parser, argv)
    args.run = run
    return args
cli.Parser.parse_args = parse
sys.exit(cli.main([*{command!r}, "--wired-memory", {choice!r}]))
"""
    environment = {name: value for name, value in os.environ.items() if name != mlx_settings.REFRESH}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="on a Mac it may be set")
def test_nothing_is_set_on_other_systems() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in LONG}
    code = f"import os, sys, mlxpaged; sys.exit(bool({set(LONG)} & os.environ.keys()) or 'mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
