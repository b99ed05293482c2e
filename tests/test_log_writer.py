"""A log that is not read stops nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlxpaged.log_writer import LogHandler, Writer
from tests.cli.helpers import DEADLINE, environment
from tests.support import wait_until

Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read_until(end: int, text: bytes) -> bytes:
    found = b""
    while text not in found:
        found += os.read(end, 65536)
    return found


def test_texts_come_in_order_and_whole(pipe: Pipe) -> None:
    writer = Writer(pipe[1])
    for i in range(1000):
        writer.write(f"line {i} ü\n")
    assert writer.flush(DEADLINE)
    assert read_until(pipe[0], b"line 999").decode().split("\n")[:1000] == [f"line {i} ü" for i in range(1000)]


def test_what_is_not_read_is_dropped_and_counted(pipe: Pipe) -> None:
    """Nothing here waits for the reader, although the pipe is full."""
    writer = Writer(pipe[1], max_bytes=300_000)
    line = f"{'x' * 999}\n"
    for _ in range(1000):
        writer.write(line)
    assert not writer.flush(0)
    found = b""
    os.set_blocking(pipe[0], False)
    while not writer.flush(0):
        with contextlib.suppress(BlockingIOError):
            found += os.read(pipe[0], 65536)
    os.set_blocking(pipe[0], True)
    writer.write("again\n")
    assert writer.flush(DEADLINE)
    found += read_until(pipe[0], b"again\n")
    dropped = [int(count) for count in re.findall(rb"\((\d+) lines of the log were dropped", found)]
    assert dropped  # more than once, if the pipe took something in between
    assert found.count(line.encode()) + sum(dropped) == 1000
    assert 300 <= found.count(line.encode()) <= 500


def test_what_others_write_does_not_wait_either(pipe: Pipe) -> None:
    """As a library that writes to standard error by itself."""
    writer = Writer(pipe[1])
    text = f"{'x' * 99}\n" * 5000
    writer.write(text)
    wait_until(lambda: stat.S_ISCHR(os.fstat(pipe[1]).st_mode))
    assert os.write(pipe[1], b"y" * 1_000_000) == 1_000_000
    writer.write("end\n")
    assert read_until(pipe[0], b"end\n").decode() == f"{text}end\n"
    writer.write("again\n")
    assert writer.flush(DEADLINE)
    assert stat.S_ISFIFO(os.fstat(pipe[1]).st_mode)


def test_a_reader_that_has_left_stops_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = Writer(writing)
    writer.write("lost\n")
    assert writer.flush(DEADLINE)
    os.close(writing)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no file that is always full")
def test_a_full_disk_stops_nothing() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        writer = Writer(full.fileno())
        writer.write("lost\n")
        assert writer.flush(DEADLINE)


def test_a_line_that_cannot_be_formatted_is_named(pipe: Pipe) -> None:
    handler = LogHandler(Writer(pipe[1]))
    handler.handle(logging.LogRecord("a.name", logging.INFO, "", 0, "%d", ("no number",), None))
    handler.flush()
    assert b"a line of a.name cannot be written" in read_until(pipe[0], b"\n")


def test_a_server_whose_output_is_not_read_answers_and_ends(tmp_path: Path, pipe: Pipe) -> None:
    """As under `2>&1 | less`: the reader stops after the first screen, and the log of the requests fills the pipe."""
    command = [sys.executable, "-m", "mlxpaged", "serve", "none", "--port", "0"]
    env = environment({"HOME": str(tmp_path)})
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe[1], stderr=pipe[1], env=env) as process:
        try:
            banner = b""
            while not (found := re.search(rb"without a model at (http://[0-9.:]+)\n", banner)):
                banner += os.read(pipe[0], 65536)
            with httpx.Client(base_url=found[1].decode(), timeout=DEADLINE, trust_env=False) as client:
                for _ in range(400):
                    assert client.get("/v1/files/none", headers={"X-Request-Id": "x" * 120}).status_code == 400
                assert client.get("/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
