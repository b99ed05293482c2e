"""The process of the command, where Ctrl-C comes at a bad moment of an import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import environment

IN_A_DEL = """class Freed:
    def __del__(self): raise KeyboardInterrupt
freed = Freed(); del freed; print("went on")"""
IN_AN_EXTENSION = """try: raise KeyboardInterrupt
except KeyboardInterrupt as error: raise ImportError("the extension has failed") from error"""
START = """import sys
from mlxpaged import __main__, cli
def main(): exec({!r})
cli.main = main
sys.exit(__main__.main())"""


@pytest.mark.parametrize("code", [IN_A_DEL, IN_AN_EXTENSION])
def test_an_interrupt_that_python_or_an_extension_hides_ends_the_command(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", START.format(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_other_errors_are_shown() -> None:
    code = "raise ImportError('no such module')"
    done = subprocess.run([sys.executable, "-c", START.format(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no such module" in done.stderr


def test_memory_that_is_missing_is_said_in_a_line() -> None:
    """Under `ulimit -v`, the first thread may find no room."""
    code = 'raise RuntimeError("can\'t start new thread")'
    done = subprocess.run([sys.executable, "-c", START.format(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "mlxpaged: there is too little memory: can't start new thread\n")


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`mlxpaged` in a command stands for this one."""
    line = command.replace("mlxpaged", f"{sys.executable} -m mlxpaged")
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, env=environment(variables))


@pytest.mark.parametrize("given", [{}, {"TRANSFORMERS_NO_ADVISORY_WARNINGS": ""}])
def test_what_a_library_advises_is_not_said_unless_the_user_wants_it(tmp_path: Path, given: dict[str, str]) -> None:
    """transformers advises to install PyTorch, which is not needed here."""
    (tmp_path / "session.jsonl").write_text('{"type": "user", "message": {"role": "user", "content": "Hi."}}\n')
    done = shell(f"mlxpaged doctor --session {tmp_path}/session.jsonl", HOME=str(tmp_path), **given)
    assert (done.returncode, "it goes on here" in done.stdout) == (0, True)
    assert ("PyTorch" in done.stderr) == bool(given)


@pytest.mark.parametrize("streams", ["<&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["rm someone/absent", "chat"])
def test_a_closed_standard_stream_is_no_traceback(tmp_path: Path, command: str, streams: str) -> None:
    done = shell(f"mlxpaged {command} {streams}", HOME=str(tmp_path), HF_HOME=str(tmp_path))
    said = {"rm someone/absent": "is not a downloaded model", "chat": "chat needs a terminal"}[command]
    assert (done.returncode, done.stdout) == (1, "")
    assert ("2>&-" in streams and done.stderr == "") or (done.stderr.count("\n") == 1 and said in done.stderr)


def test_a_reader_that_leaves_is_no_error_message(tmp_path: Path) -> None:
    env = environment({"HOME": str(tmp_path), "PYTHONUNBUFFERED": ""})
    for words in (["--help"], ["completion", "bash"]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "mlxpaged", *words]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=env)
        os.close(writer)
        assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_said_in_a_line(tmp_path: Path, unbuffered: str) -> None:
    done = shell("mlxpaged completion bash > /dev/full", HOME=str(tmp_path), PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (1, "mlxpaged: No space left on device\n")


def test_a_terminal_that_lacks_a_letter_shows_a_question_mark() -> None:
    code = "print('42 \u2192 x')"
    done = subprocess.run(
        [sys.executable, "-c", START.format(code)],
        capture_output=True,
        text=True,
        check=False,
        env=environment({"PYTHONIOENCODING": "latin-1"}),
    )
    assert (done.stdout, done.stderr) == ("42 ? x\n", "")


def test_an_interrupt_during_heavy_imports_ends_the_process_before_an_extension_sees_it() -> None:
    """An extension's panic is a BaseException, which names no KeyboardInterrupt."""
    code = """import os, signal
from mlxpaged.cli.parser import heavy_imports
with heavy_imports():
    try: os.kill(os.getpid(), signal.SIGINT); print("went on")
    except KeyboardInterrupt: raise BaseException("panic") from None"""
    done = subprocess.run([sys.executable, "-c", START.format(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
