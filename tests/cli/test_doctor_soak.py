"""`mlxpaged doctor --soak`: streams of prompts of all lengths, and what is left of it after a panic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.cli.client import Client, ServerError
from mlxpaged.cli.doctor.soak import STREAMS
from mlxpaged.engine_config import EngineConfig
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
    found = json.loads(report.read_text())
    assert result.status == 0, result.stderr
    assert f"{found['answers']} answers, {found['prompt_tokens']} tokens in" in result.stdout.splitlines()[-1]
    assert found["answers"] >= STREAMS
    assert found["prompt_tokens"] > STREAMS
    assert found["answer_tokens"] >= 16 + 3 * 32, "no answer is longer than half of the context"
    assert (found["model"], found["errors"], found["ended"]) == ("demo", [], True)


def test_a_failed_request_is_counted_and_ends_with_status_1(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ServerError("the device has failed")

    monkeypatch.setattr(Client, "stream", fail)
    with running_server(CONFIG) as server:
        result = run("doctor", "--soak", SHORTEST, "--url", server.url, "--json")
    found = json.loads(result.stdout)
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
