"""The neural accelerators of an M5: which Macs have them, whether MLX uses them, and what is said if not."""

from __future__ import annotations

import logging
from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged import macos
from mlxpaged.attention import neural_accelerators, precision
from mlxpaged.attention.neural_accelerators import advice, advice_for, built_for, log_advice
from mlxpaged.cli.doctor import machine
from mlxpaged.engine.builder import load_core
from mlxpaged.engine_config import EngineConfig


class Mac:
    """A Mac with an M5. rounds: whether MLX computes products on its accelerators."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        self.set("applegpu_g17s", (26, 2), rounds=True)

    def set(self, architecture: str, release: tuple[int, int], rounds: bool, built: int | None = 26) -> None:
        self._patch.setattr(mx, "device_info", lambda: {"architecture": architecture})
        self._patch.setattr(macos, "release", lambda: release)
        self._patch.setattr(neural_accelerators, "built_for", lambda: built)
        self._patch.setattr(neural_accelerators, "rounds_products", lambda: rounds)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Mac:
    return Mac(monkeypatch)


@pytest.mark.parametrize(
    ("architecture", "release", "expected"),
    [
        ("applegpu_g17s", (26, 2), True),
        ("applegpu_g17g", (27, 0), True),
        ("applegpu_g17p", (26, 2), False),
        ("applegpu_g18p", (26, 3), True),
        ("applegpu_g16s", (26, 4), False),
        ("applegpu_g17s", (26, 1), False),
        ("air64_v27", (26, 2), False),  # a hosted macOS runner
    ],
)
def test_an_m5_has_them_from_macos_26_2_on(
    mac: Mac, architecture: str, release: tuple[int, int], expected: bool
) -> None:
    mac.set(architecture, release, rounds=False)
    assert neural_accelerators.has_neural_accelerators() == expected


@pytest.mark.parametrize(
    ("architecture", "release", "rounds", "setting", "used"),
    [
        ("applegpu_g17s", (26, 2), True, None, True),
        ("applegpu_g17s", (26, 2), False, None, False),  # MLX is built without them
        ("applegpu_g17s", (26, 1), True, None, True),  # although the system lacks them
        ("applegpu_g17s", (26, 2), False, "0", True),  # the product does not show it
        ("applegpu_g17s", (26, 1), False, "0", False),
        ("applegpu_g16s", (26, 2), True, None, False),
    ],
)
def test_what_runs_says_whether_they_are_used(
    mac: Mac,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    release: tuple[int, int],
    rounds: bool,
    setting: str | None,
    used: bool,
) -> None:
    mac.set(architecture, release, rounds)
    if setting is not None:
        monkeypatch.setenv("MLX_ENABLE_TF32", setting)
    assert neural_accelerators.uses_neural_accelerators() == used
    assert precision.rounds_float32() == (used and setting is None)


def test_a_product_on_this_cpu_is_not_rounded() -> None:
    assert not neural_accelerators.rounds_products()
    assert not precision.rounds_float32()


def test_a_rounded_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    full = mx.full
    monkeypatch.setattr(mx, "full", lambda shape, value: full(shape, round(value, 3)))
    assert neural_accelerators.rounds_products()


@pytest.mark.parametrize(
    ("release", "used", "built", "said"),
    [
        ((26, 2), True, 26, None),
        ((26, 2), False, 15, "pip took MLX's build for macOS 15. Install it again with SYSTEM_VERSION_COMPAT=0 python"),
        ((26, 3), False, None, "built without them, as Homebrew's is. Install the server with pip or uv"),
        ((26, 2), False, 26, "although it is built for macOS 26"),
        ((26, 1), True, 26, "update macOS: MLX uses the neural accelerators of this M5, which may give wrong results"),
        ((26, 0), False, 15, "update macOS: with 26.2 or later, MLX uses"),
        ((0, 0), False, 15, None),
    ],
)
def test_the_advice_names_the_remedy(release: tuple[int, int], used: bool, built: int | None, said: str | None) -> None:
    found = advice_for(release, used, built)
    assert found == said if said is None else said in str(found)


def test_without_such_a_gpu_there_is_no_advice(mac: Mac) -> None:
    mac.set("applegpu_g16s", (26, 2), rounds=False)
    assert advice() is None


def test_a_start_says_it_once(mac: Mac, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    mac.set("applegpu_g17s", (26, 2), rounds=False, built=15)
    log_advice.cache_clear()
    for _ in range(2):
        log_advice()
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "prompts take 2 to 4 times as long" in warnings[0]
    log_advice.cache_clear()


def test_it_is_said_when_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr("mlxpaged.engine.builder.log_advice", lambda: said.append(True))
    load_core(EngineConfig(kv_cache_bytes=4_000_000), lambda: 0.0, lambda progress: None).close()
    assert said == [True]


@pytest.mark.parametrize(
    ("wheel", "built"),
    [
        ("Wheel-Version: 1.0\nTag: py3-none-macosx_15_0_arm64\n", 15),
        ("Wheel-Version: 1.0\nTag: py3-none-macosx_26_0_arm64\n", 26),
        ("Wheel-Version: 1.0\n", None),
        (None, None),
    ],
)
def test_the_wheel_says_for_which_macos_it_is_built(
    wheel: str | None, built: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wheel is not None:
        directory = tmp_path / "mlx_metal-0.32.4.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-metal\nVersion: 0.32.4\n")
        (directory / "WHEEL").write_text(wheel)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert built_for() == built


@pytest.mark.parametrize(
    ("architecture", "release", "rounds", "built", "said"),
    [
        ("applegpu_g16s", (26, 2), False, 26, "none: an M5 or later has them"),
        ("applegpu_g17s", (26, 2), True, 26, "used"),
        ("applegpu_g17s", (26, 1), True, 26, "used: update macOS"),
        ("applegpu_g17s", (26, 2), False, 15, "not used: MLX does not use"),
    ],
)
def test_the_doctor_says_what_runs_and_the_remedy(
    mac: Mac, architecture: str, release: tuple[int, int], rounds: bool, built: int, said: str
) -> None:
    mac.set(architecture, release, rounds, built)
    assert machine.neural_accelerators().startswith(said)


def test_the_doctor_does_not_know_it_if_products_are_not_rounded(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert machine.neural_accelerators().startswith("not known")
