"""Loads that kill the process: which ones are refused, for how long, and what lifts it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from mlxpaged.engine.load_journal import RETRY_SECONDS, LoadJournal
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.errors import UnsupportedModelError

CONFIG = EngineConfig(model="some/model")


def die(path: Path, times: int = 2, config: EngineConfig = CONFIG) -> None:
    for _ in range(times):
        loads = LoadJournal(path)
        with loads.loading(config):
            written = path.read_bytes()
        loads.close()
        path.write_bytes(written)


def test_a_model_that_has_killed_twice_is_refused_and_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    die(path, times=1)
    loads = LoadJournal(path)
    loads.close()
    die(path, times=1)
    loads = LoadJournal(path)
    with pytest.raises(UnsupportedModelError, match="'some/model' is not loaded: the process died 2 times"):
        loads.loading(CONFIG).__enter__()
    for other in ({"model": "other"}, {"max_num_seqs": 3}):
        with loads.loading(dataclasses.replace(CONFIG, **other)):  # type: ignore[arg-type]
            pass
    loads.close()
    loads = LoadJournal(path)
    with pytest.raises(UnsupportedModelError):
        loads.loading(CONFIG).__enter__()
    loads.close()


def test_it_is_tried_again_after_an_hour_and_refused_for_another_one_if_it_kills_again(tmp_path: Path) -> None:
    path, later = tmp_path / "loads", 0.0
    die(path)
    for _ in range(2):
        loads = LoadJournal(path, lambda: time.time() + later)  # noqa: B023
        with pytest.raises(UnsupportedModelError, match="again in 60 minutes"):
            loads.loading(CONFIG).__enter__()
        later = RETRY_SECONDS
        with loads.loading(CONFIG):
            written = path.read_bytes()
        loads.close()
        path.write_bytes(written)
        later = 0.0
    loads = LoadJournal(path)
    with pytest.raises(UnsupportedModelError, match="died 4 times"):
        loads.loading(CONFIG).__enter__()
    loads.close()


def test_a_load_that_fails_with_an_error_has_not_killed(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    die(path, times=1)
    loads = LoadJournal(path)
    with pytest.raises(MemoryError), loads.loading(CONFIG):
        raise MemoryError
    loads.close()
    assert not path.exists()


def test_the_user_may_delete_the_file_of_a_server_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    die(path)
    loads = LoadJournal(path)
    path.unlink()
    with loads.loading(CONFIG):
        assert b"some/model" in path.read_bytes()
    loads.close()


def test_a_load_that_begins_while_the_server_ends_is_not_noted(tmp_path: Path) -> None:
    path = tmp_path / "loads"
    loads = LoadJournal(path)
    loads.close()
    with loads.loading(CONFIG):
        assert not path.exists()


def test_a_load_that_cannot_be_noted_takes_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = LoadJournal(tmp_path / "loads")
    with monkeypatch.context() as patch:
        patch.setattr("os.write", lambda file, data: 0)
        with loads.loading(CONFIG):
            pass
    loads.close()
