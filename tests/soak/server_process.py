"""The server as a process, as users start it, and what the system says of the process."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 120.0
LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Usage:
    """Of the process, by /proc. resident: bytes; private: those that are no file's."""

    resident: int
    private: int
    threads: int
    descriptors: int
    cpu_seconds: float


class ServerProcess:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.port = 0

    def usage(self) -> Usage:
        """Raises OSError if the process has ended."""
        root = Path(f"/proc/{self.process.pid}")
        fields = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
        resident, private = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
        times = (root / "stat").read_text().rpartition(")")[2].split()
        cpu_seconds = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
        return Usage(resident, private, int(fields["Threads"]), len(os.listdir(root / "fd")), cpu_seconds)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (found := LISTENING.search(self.log.read_text(errors="replace"))):
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.1)
        self.port = int(found[1])
        while not self._is_healthy():
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            assert time.monotonic() < deadline, "the model is not loaded in time"
            time.sleep(0.1)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200


@contextlib.contextmanager
def server_process(
    args: Sequence[str | Path], directory: Path, environment: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server on a free port, with its log in `directory`. It gets SIGTERM at the end, and must end with 0."""
    log = directory / "server.log"
    command = [sys.executable, "-m", "mlxpaged", "serve", *map(str, args), "--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=os.environ | (environment or {})
        )
    try:
        server = ServerProcess(process, log)
        server.wait_ready()
        yield server
        process.send_signal(signal.SIGTERM)
        status = process.wait(90)
        assert status == 0, f"the server ended with {status}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
