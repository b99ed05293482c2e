"""The servers' command lines, and one server running: started, ready, watched, stopped with all its processes."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .environments import BEFORE, LINUX, LLAMA_CPP, server_variables, telling_line

READY_SECONDS = 300
STOP_SECONDS = 20
INTERRUPTED_STOP_SECONDS = 2
"""After an interrupt, the answers that a server still gives are not needed."""
MEMORY_INTERVAL = 0.5

# Everything that is not named here is the server's default.
COMMANDS: dict[str, tuple[str, ...]] = {
    "mlxpaged": ("mlxpaged", "serve", "{model}", "--port", "{port}"),
    BEFORE: ("mlxpaged", "serve", "{model}", "--port", "{port}"),
    "mlx-lm": ("mlx_lm.server", "--model", "{model}", "--port", "{port}"),
    "vllm-mlx": ("vllm-mlx", "serve", "{model}", "--port", "{port}", "--continuous-batching"),
    LLAMA_CPP: ("python", str(Path(__file__).with_name("llama_cpp.py")), "{model}", "{port}"),
    # Its snapshot of the prefix cache would let one run know the prompts of the one before.
    "rapid-mlx": ("rapid-mlx", "serve", "{model}", "--port", "{port}", "--disable-disk-caches"),
}


class ServerError(Exception):
    """A server does not start; the message says why."""


@dataclass
class Server:
    """A running server; all its processes are in one process group."""

    name: str
    model: str
    """The model's name in requests."""
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def died(self) -> str | None:
        """How it ended, None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return f"ended with {code}: {telling_line(self.log.read_text(errors='replace'))}"

    def memory_bytes(self) -> int:
        """Resident memory of the process group. Not what Metal wires for it on a Mac."""
        listing = subprocess.run(["ps", "-A", "-o", "pgid=,rss="], capture_output=True, text=True, check=True).stdout
        rows = (line.split() for line in listing.splitlines())
        return sum(1024 * int(rss) for group, rss in rows if int(group) == self.process.pid)

    def peak_bytes(self) -> int | None:
        """The highest resident memory of each process of the group since it began, together; None if the system does
        not tell."""
        peaks = [
            int(line.split()[1]) * 1024
            for process in self._processes()
            for line in read_lines(process / "status")
            if line.startswith("VmHWM:")
        ]
        return sum(peaks) if peaks else None

    def cpu_seconds(self) -> float | None:
        """User and system time of the process group, and of its processes that have ended; None if the system does not
        tell."""
        ticks = [sum(map(int, stat[11:15])) for process in self._processes() if (stat := stat_of(process))]
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None

    def _processes(self) -> list[Path]:
        """Their folders in /proc."""
        found = Path("/proc").glob("[0-9]*") if LINUX else ()
        return [process for process in found if (stat := stat_of(process)) and int(stat[2]) == self.process.pid]

    def uses_openblas(self) -> bool | None:
        """Whether OpenBLAS is mapped into the server's process; None if there is none to look for."""
        if not LINUX:
            return None
        maps = Path(f"/proc/{self.process.pid}/maps")
        return re.search(r"/libopenblasp?[-.]", maps.read_text()) is not None if maps.exists() else None


def read_lines(path: Path) -> list[str]:
    """Empty if the process has ended."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def stat_of(process: Path) -> list[str]:
    """What proc_pid_stat(5) has after the command's name, beginning with the state: the process group is the third,
    times are the twelfth to the fifteenth. Empty if the process has ended."""
    return " ".join(read_lines(process / "stat")).rpartition(") ")[2].split()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    name: str,
    python: Path,
    model: Path,
    log: Path,
    ready_seconds: float = READY_SECONDS,
    command: Sequence[str] = (),
) -> Iterator[Server]:
    """command: instead of that in COMMANDS. Raises ServerError if it ends or is not ready in time."""
    port = free_port()
    program, *arguments = (part.format(model=model, port=port) for part in command or COMMANDS[name])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(python.parent / program), *arguments],
            env=server_variables(name),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(name, str(model), port, process, log)
    patience: float = STOP_SECONDS
    try:
        wait_ready(server, ready_seconds)
        yield server
    except KeyboardInterrupt:
        patience = INTERRUPTED_STOP_SECONDS
        raise
    finally:
        stop(server, patience)


def wait_ready(server: Server, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if reason := server.died():
            raise ServerError(reason)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise ServerError(f"not ready within {seconds:.0f} s: {telling_line(server.log.read_text(errors='replace'))}")


def stop(server: Server, patience: float) -> None:
    """Returns when the server's process has ended; what it leaves in its process group is killed. An interrupt while it
    is waited for kills it at once."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(patience)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


class MemoryWatch:
    """The highest `memory_bytes` of a server while a load runs, looked at twice a second."""

    def __init__(self, server: Server) -> None:
        self.peak = 0
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self._server.memory_bytes())
            if self._done.wait(MEMORY_INTERVAL):
                return

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
