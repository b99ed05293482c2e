"""A program in child processes: bytes follow the lines of requests and replies, and a child that ends is one error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpaged.watched_program import LimitError, Limits, WatchedProgram

LIMITS = Limits(60, 2**30)
ECHO = """
import sys
print(flush=True)
for line in sys.stdin.buffer:
    sent, kept = map(int, line.split())
    data = sys.stdin.buffer.read(sent)
    sys.stdout.buffer.write(b"%d\\n" % sent + data[:kept])
    sys.stdout.buffer.flush()
    if kept < sent:
        break
"""
ENDS = """
print(flush=True)
"""


@pytest.fixture
def watched() -> Iterator[WatchedProgram]:
    watched = WatchedProgram("repeats it", max_idle=1)
    yield watched
    watched.end()


def asked(watched: WatchedProgram, program: Path, source: str, line: str, data: bytes) -> tuple[bytes, bytearray]:
    program.write_text(source)
    return watched.ask(program, line.encode() + b"\n" + data, LIMITS, following=int)


@pytest.mark.parametrize("size", [0, 1, 2**16 + 1, 2**23 + 5])
def test_bytes_follow_a_request_and_its_reply(watched: WatchedProgram, tmp_path: Path, size: int) -> None:
    """Even those that are line feeds, and more than the system keeps before they are read."""
    data = (b"\n\0abc" * (size // 5 + 1))[:size]
    for _ in range(2):
        assert asked(watched, tmp_path / "p.py", ECHO, f"{size} {size}", data) == (b"%d\n" % size, data)


def test_a_child_that_ends_amid_the_bytes_is_an_error(watched: WatchedProgram, tmp_path: Path) -> None:
    with pytest.raises(LimitError, match=r"^the process that repeats it ended with status 0$"):
        asked(watched, tmp_path / "p.py", ECHO, "100 99", bytes(100))


def test_a_child_that_ends_before_it_has_read_a_request_is_an_error(watched: WatchedProgram, tmp_path: Path) -> None:
    """The request is more than the system keeps before it is read."""
    with pytest.raises(LimitError, match=r"^the process that repeats it ended with status 0$"):
        asked(watched, tmp_path / "p.py", ENDS, "", bytes(2**22))
