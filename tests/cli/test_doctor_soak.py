"""`mlxpaged doctor --soak`: streams of prompts of all lengths, and what is left of it after a panic."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxpaged.cli import connection
from mlxpaged.cli.background_server import BackgroundServer
from mlxpaged.cli.client import Client, ServerError
from mlxpaged.cli.doctor import soak
from mlxpaged.cli.doctor.soak import AS_STARTED, STREAMS, Runner, Soak, until_load
from mlxpaged.engine_config import EngineConfig
from mlxpaged.parts.memory.wired_memory import WIRE_AFTER_SECONDS
from tests.cli.helpers import Result
from tests.support import running_server

pytestmark = pytest.mark.usefixtures("home")
CONFIG = EngineConfig(max_model_len=64, kv_cache_bytes=4_000_000)
SHORTEST = "0.0001"
"""Minutes: each stream sends one request."""


def test_each_stream_is_answered_and_the_report_says_how_much_came(tmp_path: Path, run: Callable[..., Result]) -> None:
    report = tmp_path / "soak.json"
    with running_server(CONFIG) as server:
        result = run("doctor", "--soak", SHORTEST, "--url", server.url, "--report", str(report))
    [found] = json.loads(report.read_text())
    assert result.status == 0, result.stderr
    assert f"{found['answers']} answers, {found['prompt_tokens']} tokens in" in result.stdout.splitlines()[-1]
    assert found["answers"] >= STREAMS
    assert found["prompt_tokens"] > STREAMS
    assert found["answer_tokens"] >= 16 + 3 * 32, "no answer is longer than half of the context"
    assert (found["model"], found["errors"], found["ended"]) == ("demo", [], True)
    assert found["wired_memory"] == "as the server was started"


def test_a_mac_without_a_server_is_loaded_without_wired_memory_and_then_with_it(
    tmp_path: Path, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers are real ones. The report is written after each: a panic in the second one leaves the first."""
    report, started, reports = tmp_path / "soak.json", list[list[str]](), list[list[str]]()
    start, end = BackgroundServer.__init__, BackgroundServer.end

    def starting(self: BackgroundServer, model: str | None, config: str | None, more: Sequence[str] = ()) -> None:
        started.append(list(more))
        start(self, model, config, [*more, "--max-model-len", "64"])

    def ending(self: BackgroundServer) -> None:
        end(self)
        reports.append([each["wired_memory"] for each in json.loads(report.read_text())])

    monkeypatch.setattr(BackgroundServer, "__init__", starting)
    monkeypatch.setattr(BackgroundServer, "end", ending)
    monkeypatch.setattr(soak, "settings", lambda is_running: ("off", "on"))
    monkeypatch.setattr(soak, "found", lambda args: None)
    monkeypatch.setattr(connection, "found", lambda args: None)
    result = run("doctor", "--soak", SHORTEST, "--report", str(report))
    assert result.status == 0, result.stderr
    assert started == [["--wired-memory", "off"], ["--wired-memory", "on"]]
    assert reports == [["off"], ["off", "on"]]
    found = json.loads(report.read_text())
    assert all(each["answers"] >= STREAMS and each["ended"] and not each["errors"] for each in found)
    assert re.findall("wired memory [a-z]+", result.stdout) == ["wired memory off", "wired memory on"]


def test_only_a_mac_on_which_no_server_runs_compares_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert soak.settings(is_running=False) == ("off", "on")
    assert soak.settings(is_running=True) == (AS_STARTED,)
    monkeypatch.setattr(sys, "platform", "linux")
    assert soak.settings(is_running=False) == (AS_STARTED,)


def test_all_streams_pause_together_for_longer_than_memory_needs_to_be_wired() -> None:
    assert (until_load(0.0), until_load(119.0)) == (0.0, 0.0)
    assert (until_load(120.0), until_load(150.0), until_load(179.0)) == (60.0, 30.0, 1.0)
    assert (until_load(180.0), until_load(300.0)) == (0.0, 60.0)
    assert soak.REST_SECONDS > WIRE_AFTER_SECONDS + 20.0, "the last answers end in the pause too"


@pytest.mark.parametrize("index", range(STREAMS))
def test_the_first_answer_after_a_pause_is_timed_without_the_others(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    pauses = iter([0.0, 7.0, 1e9])
    monkeypatch.setattr(soak, "until_load", lambda since: next(pauses))
    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    found = Soak("demo", 60.0)
    with running_server(CONFIG) as server:
        Runner(Client(server.url), "demo", [found], None).stream(index, time.monotonic())
    assert found.errors == []
    assert (found.answers, len(found.first_seconds)) == ((4, 1) if index == 0 else (3, 0))
    assert slept == [7.0 if index == 0 else 7.0 + soak.AHEAD_SECONDS]


def test_a_failed_request_is_counted_and_ends_with_status_1(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ServerError("the device has failed")

    monkeypatch.setattr(Client, "stream", fail)
    with running_server(CONFIG) as server:
        result = run("doctor", "--soak", SHORTEST, "--url", server.url, "--json")
    [found] = json.loads(result.stdout)
    assert result.status == 1
    assert found["answers"] == 0
    assert len(found["errors"]) >= STREAMS
    assert result.stderr == "mlxpaged: the device has failed\n"


def test_a_model_that_the_key_may_not_load_is_said(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"id": "demo", "kind": "text", "state": "loaded"}]
    monkeypatch.setattr(Client, "get", lambda self, path: {"data": entries})
    with running_server(CONFIG) as server:
        result = run("doctor", "--soak", SHORTEST, "--url", server.url)
    said = "mlxpaged: demo is not loaded, and this key may not load it: send it a request first\n"
    assert result == Result(1, "", said)


@pytest.mark.parametrize("minutes", ["0", "-1", "inf", "long"])
def test_the_time_is_a_positive_number_of_minutes(minutes: str, run: Callable[..., Result]) -> None:
    result = run("doctor", "--soak", minutes)
    assert result.status == 2
    assert "must be a positive number of minutes" in result.stderr
