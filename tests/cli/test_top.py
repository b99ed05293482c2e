"""`mlxpaged top`: its frames, and a frame of a real server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.cli import top
from mlxpaged.cli.top import Keys, Sample, duration, frame
from tests.cli.helpers import Result
from tests.support import RunningServer

URL = "http://127.0.0.1:8080"


def model(name: str, output: int, prefilled: int, **fields: Any) -> dict[str, Any]:
    tier = {"directory": "/disk", "written_today_bytes": 1_000_000_000, "written_bytes": 2_000_000_000}
    return {
        "id": name,
        "memory_bytes": 5_200_000_000,
        "running": {"total": 3},
        "waiting": {"total": 12},
        "tokens": {"output": output, "prefilled": prefilled},
        "blocks": {"used": 120, "cached": 40, "free": 352},
        "swap": {"written_today_bytes": 0, "written_bytes": 0},
        "prefix_cache_disk": tier,
    } | fields


def status(*models: dict[str, Any]) -> dict[str, Any]:
    return {"state": "ok", "uptime_seconds": 7385.2, "resident_bytes": 812_000_000, "models": list(models)}


VECTORS = {"id": "vectors", "memory_bytes": 9_000_000, "running": {"total": 0}, "waiting": {"total": 0}}
SWAPS = {"swap": {"written_today_bytes": 5_000_000, "written_bytes": 7_000_000}}
BEFORE = Sample(URL, status(model("qwen3:8b", 100, 1000), model("other", 900, 0), VECTORS), 10.0)
LATEST = Sample(URL, status(model("qwen3:8b", 225, 1500, **SWAPS), model("other", 5, 0), VECTORS), 12.0)


def test_a_wide_frame_is_a_table() -> None:
    assert frame(LATEST, BEFORE, 120) == [
        f"{URL}  ok  up 2 h 3 min  process 812.0 MB  writes: 1.0 GB today, 2.0 GB since start",
        "",
        "MODEL     RUN  WAIT  OUTPUT/S  PROMPT/S  KV USED  CACHED  FREE  MEMORY",
        "qwen3:8b    3    12      62.5     250.0      120      40   352  5.2 GB",
        "other       3    12         -       0.0      120      40   352  5.2 GB",
        "vectors     0     0         -         -        -       -     -  9.0 MB",
    ]


def test_a_narrow_frame_has_some_lines_for_each_model() -> None:
    assert frame(LATEST, BEFORE, 40) == [
        f"{URL}  ok  up 2 h 3 min",
        "process 812.0 MB",
        "writes: 1.0 GB today, 2.0 GB since start",
        "",
        "qwen3:8b  5.2 GB",
        "  3 running, 12 waiting",
        "  tokens/s: 62.5 out, 250.0 prompt",
        "  KV: 120 used, 40 cached, 352 free",
        "other  5.2 GB",
        "  3 running, 12 waiting",
        "  tokens/s: - out, 0.0 prompt",
        "  KV: 120 used, 40 cached, 352 free",
        "vectors  9.0 MB",
        "  0 running, 0 waiting",
        "  tokens/s: - out, - prompt",
        "  KV: - used, - cached, - free",
    ]


@pytest.mark.parametrize("columns", [1, 10, 39, 70, 71, 200])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    assert max(map(len, frame(LATEST, BEFORE, columns))) <= columns


def test_a_server_that_loads_says_how_far_it_is() -> None:
    loading = Sample(URL, {"state": "loading", "progress": "weights 2 of 5", "uptime_seconds": 3, "models": []}, 1.0)
    assert frame(loading, loading, 80) == [f"{URL}  weights 2 of 5  up 3 s", "", "no model is loaded"]


def test_names_cannot_change_the_terminal() -> None:
    named = Sample(URL, status(model("a\x1b[2Jb", 0, 0)), 1.0)
    assert not [line for line in frame(named, named, 120) if "\x1b" in line]


def test_durations_have_two_units() -> None:
    assert [duration(seconds) for seconds in (0, 59.9, 60, 3600, 90_061)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "1 h 0 min",
        "1 d 1 h",
    ]


def test_one_frame_of_a_server(demo_server: RunningServer, run: Callable[..., Result]) -> None:
    for flags in (("--once",), ()):  # the output is no terminal
        result = run("top", "--url", demo_server.url, *flags)
        assert result.status == 0
        assert re.search(r"ok +up .+ process \d", result.stdout)
        assert "\ndemo" in result.stdout
        assert "\x1b" not in result.stdout


def test_without_a_server_it_says_what_ps_says(run: Callable[..., Result], home: Path) -> None:
    said = [run(command).stderr for command in ("top", "ps")]
    assert said[0] == said[1]
    assert "no server runs" in said[0]
    assert run("top").status == 1


def test_q_is_seen_at_once_and_other_keys_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as typed, os.fdopen(writing, "w") as keyboard:
        monkeypatch.setattr(sys, "stdin", typed)
        keyboard.write("x")
        keyboard.flush()
        assert not Keys(True).wait("q", 0.05)
        threading.Timer(0.05, lambda: (keyboard.write("q"), keyboard.flush())).start()
        assert Keys(True).wait("q", 300)
    assert not Keys(False).wait("q", 0.01)


def test_frames_are_drawn_over_one_another(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    samples = iter([LATEST])
    monkeypatch.setattr(Sample, "of", lambda client: next(samples))
    monkeypatch.setattr(top.os, "get_terminal_size", lambda descriptor: os.terminal_size((120, 5)))
    ends = iter([False, True])
    monkeypatch.setattr(Keys, "wait", lambda self, key, seconds: next(ends))
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
    top.watch(None, BEFORE, Keys(False))  # type: ignore[arg-type]
    first, second = capsys.readouterr().out.split("\x1b[H")[1:]
    assert "62.5" not in first
    assert "62.5" in second
    assert second.count("\n") == 4, "the terminal does not scroll"
    assert second.endswith("\x1b[J")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(number: signal.Signals) -> None:
    code = (
        "import time\nfrom mlxpaged.cli.top import screen\nwith screen(): print('drawn', flush=True); time.sleep(9**9)"
    )
    ours, terminal = os.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as theirs:
        before = termios.tcgetattr(theirs)
        process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs)
        shown = b""
        while b"drawn" not in shown:
            shown += os.read(ours, 1024)
        assert termios.tcgetattr(theirs) != before
        process.send_signal(number)
        assert process.wait(300) == 128 + number
        assert termios.tcgetattr(theirs) == before
        assert os.read(ours, 1024).endswith(top.END.encode())
    os.close(ours)
