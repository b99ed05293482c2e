"""Errors of the system are said in words: no user sees the number of one."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.cli.os_errors import sentence
from tests.cli.helpers import Result


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.png"), "a.png: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("the file is another one"), "the file is another one"),
        (ValueError("it is no chat"), "it is no chat"),
        (ValueError(), "ValueError"),
    ],
)
def test_the_sentence_of_an_error(error: Exception, said: str) -> None:
    assert sentence(error) == said


@pytest.mark.parametrize(
    "command",
    [
        "serve none --port 0 --api-keys NOTHING",
        "serve none --port 0 --data-dir FILE/data",
        "serve --port 0 --chat-template NOTHING",
        "serve --port 0 --hosts NOTHING",
        "serve --port 0 --profile NOTHING",
        "run demo hello --json-schema NOTHING",
        "run demo hello --image NOTHING",
        "keys list --api-keys NOTHING",
        "keys add anna --api-keys FILE/keys.json",
        "cache ls NOTHING",
        "doctor --session NOTHING",
        "bench --output FILE/out.json",
        "--config NOTHING ps",
    ],
)
def test_a_missing_file_is_said_in_words(
    run: Callable[..., Result], home: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # --hosts sets it, for the process
    (tmp_path / "file").touch()
    words = command.replace("NOTHING", str(tmp_path / "nothing")).replace("FILE", str(tmp_path / "file")).split()
    result = run(*words)
    assert result.status in (1, 2)
    assert result.stderr
    assert "Errno" not in result.stderr
    assert "Traceback" not in result.stderr
