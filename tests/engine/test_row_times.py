"""At the start, steps are timed by their rows: the scheduler knows them, and requests notice nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.row_times import RECURRENT_ROWS, ROWS, TOTAL_SECONDS, time_rows
from mlxpaged.core.step import Step
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import load_model
from mlxpaged.models.states.states import RecurrentLayer
from tests.models.architectures import make_architecture
from tests.support import run_requests

PROMPTS = [[5, 6, 7, 8], [9] * 40]


class Device:
    """A step takes so many milliseconds for each row, and the first step of each number of rows ten times as long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, name: str, milliseconds: float = 1.0) -> None:
        self.now = 0.0
        self.rows: list[int] = []
        served = load_model(str(make_architecture(path, name)))
        self.core = build_engine(EngineConfig(kv_cache_bytes=1_000_000, max_step_ms=0), served, lambda: self.now)
        run = self.core.runner.run

        def timed(step: Step, *args: object) -> object:
            rows = len(step)
            self.now += rows * milliseconds / 1000 * (1 if rows in self.rows else 10)
            self.rows.append(rows)
            return run(step, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(self.core.runner, "run", timed)


def answers(core: EngineCore) -> list[list[int]]:
    return run_requests(core, PROMPTS, max_tokens=4)


def test_the_scheduler_knows_the_steps_that_were_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, tmp_path / "model", "llama", milliseconds=0.01)
    found = time_rows(device.core)
    assert found == pytest.approx({rows: rows / 100_000 for rows in ROWS})
    known = device.core.scheduler.times.row_seconds()
    assert all(known[rows] == pytest.approx(found[rows]) for rows in ROWS if rows not in (32, 33)), "these count as one"


def test_timing_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are not begun if three as long as the longest would end too late: they have more rows, and take longer."""
    device = Device(monkeypatch, tmp_path / "model", "llama", milliseconds=10.0)
    assert set(time_rows(device.core)) == {1, 2}
    assert device.now <= TOTAL_SECONDS + 0.1


def test_other_models_take_a_turn_before_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their time is none of the steps'."""
    device = Device(monkeypatch, tmp_path / "model", "llama", milliseconds=0.01)
    turns = []

    def take_turn() -> None:
        turns.append(len(device.rows))
        device.now += 1.0

    assert time_rows(device.core, take_turn) == pytest.approx({rows: rows / 100_000 for rows in ROWS})
    assert turns == [*range(len(device.rows))]


@pytest.mark.parametrize("name", ["llama", "lfm2", "gemma3_text"])
def test_requests_notice_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = answers(Device(monkeypatch, tmp_path / "untimed", name).core)
    device = Device(monkeypatch, tmp_path / "timed", name, milliseconds=0.01)
    found = time_rows(device.core)
    stats = device.core.stats()
    assert (stats.model_calls_total, stats.attention_calls_total, stats.steps_total) == (0, 0, 0)
    assert stats.scheduler.blocks.used == stats.scheduler.blocks.cached == 0
    assert answers(device.core) == expected
    if device.core.runner.is_recurrent:
        assert set(found) == {rows for rows in ROWS if rows <= RECURRENT_ROWS}, "each row takes a state"


def test_the_states_of_these_rows_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = Device(monkeypatch, tmp_path / "model", "lfm2", milliseconds=0.01).core
    layers: list[RecurrentLayer] = []
    commit = RecurrentLayer.commit

    def noting(layer: RecurrentLayer, running: set[int]) -> None:
        layers.append(layer)
        commit(layer, running)

    monkeypatch.setattr(RecurrentLayer, "commit", noting)
    time_rows(core)
    assert layers
    assert all(layer.arrays == [] for layer in layers)


def test_a_step_that_moves_blocks_or_is_traced_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = Device(monkeypatch, tmp_path / "model", "llama").core
    traced = SimpleNamespace(count=0)
    monkeypatch.setattr(type(core.runner), "num_traced", property(lambda runner: traced.count))
    run, observe, learned = core.runner.run, core.scheduler.times.observe, []

    def tracing(step: Step, *args: object) -> object:
        traced.count += len(step) == 2
        return run(step, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(core.runner, "run", tracing)
    monkeypatch.setattr(
        core.scheduler.times, "observe", lambda batch, seconds: (learned.append(len(batch)), observe(batch, seconds))
    )
    run_requests(core, [[1, 2, 3]], max_tokens=3)
    run_requests(core, PROMPTS, max_tokens=3)
    assert learned == [1, 1, 1]
