"""A server whose ranks are real processes, what it has started, and clients that load it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tests.cli.helpers import Command, mlxpaged
from tests.support import wait_until

START_SECONDS = 180.0
PROMPTS = ["Once upon a time", "The sum of 3 and 4", "Hello there, my", "A list: one, two"]
LISTEN = "0A"
"""The state of a socket in /proc/net/tcp."""
LOCAL = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}


@dataclass
class Cluster:
    """length: tokens of an answer."""

    command: Command
    url: str
    home: Path
    length: int
    expected: dict[str, str] = field(default_factory=dict)

    def health(self) -> tuple[int, dict[str, Any]]:
        response = httpx.get(f"{self.url}/health", timeout=10, trust_env=False)
        return response.status_code, response.json()

    def used_blocks(self) -> int:
        status = httpx.get(f"{self.url}/v1/status", timeout=30, trust_env=False).json()
        return int(status["blocks"]["used"])

    def processes(self) -> dict[int, dict[str, str]]:
        """Without those that render chat templates: they have the environments of those that started them."""
        return {pid: each for pid, each in processes_of(self.home).items() if b"templates" not in command_of(pid)}

    def ranks(self) -> dict[int, int]:
        """The process of each rank."""
        every = self.processes()
        return {int(each["MLX_RANK"]): pid for pid, each in every.items() if "MLX_RANK" in each}

    def kept(self) -> int:
        """Threads and descriptors of the server."""
        process = Path(f"/proc/{self.command.process.pid}")
        return len(os.listdir(process / "task")) + len(os.listdir(process / "fd"))

    def complete(self, prompt: str, begun: threading.Event | None = None) -> Answer:
        """begun: set when a part of the answer is there."""
        body = {"prompt": prompt, "max_tokens": self.length, "temperature": 0, "ignore_eos": True, "stream": True}
        answer = Answer()
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=180, trust_env=False) as response:
            if response.status_code != 200:
                answer.error = response.read().decode()
                return answer
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    answer.error = answer.error or event.get("error")
                    if begun is not None:
                        begun.set()
                    for choice in event.get("choices", ()):
                        answer.text += choice["text"]
                        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        return answer


@dataclass
class Answer:
    text: str = ""
    finish_reason: str | None = None
    error: Any = None


class Load:
    """One stream for each prompt, on threads. One of them has begun when it is made."""

    def __init__(self, cluster: Cluster) -> None:
        self.answers: dict[str, Answer] = {}
        self._begun = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(cluster, prompt)) for prompt in PROMPTS]
        for thread in self._threads:
            thread.start()
        assert self._begun.wait(60), "no answer begins"

    def _run(self, cluster: Cluster, prompt: str) -> None:
        self.answers[prompt] = cluster.complete(prompt, self._begun)

    def join(self) -> dict[str, Answer]:
        for thread in self._threads:
            thread.join(180)
            assert not thread.is_alive(), "a client hangs"
        return self.answers


def processes_of(home: Path) -> dict[int, dict[str, str]]:
    """The environments of a server and of all processes that it has started: they have its home."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of a zombie it is empty
            entries = path.read_bytes().decode(errors="replace").split("\0")
            environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
            if environment.get("HOME") == str(home):
                found[int(path.parent.name)] = environment
    return found


def command_of(pid: int) -> bytes:
    """Empty if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def listening(pid: int) -> set[int]:
    """The ports on which a process waits for connections. A process that has ended has none."""
    with contextlib.suppress(OSError):
        sockets = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
        lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        return {
            int(line[1].rpartition(":")[2], 16)
            for line in lines
            if line[3] == LISTEN and f"socket:[{line[9]}]" in sockets
        }
    return set()


class Storm:
    """As soon as a process of a server listens at a port of its own, 200 connections that prove nothing are there: some
    are silent, and some send a byte now and then.

    reached: a file that is made when it has been at two ports."""

    def __init__(self, home: Path, reached: Path) -> None:
        self._home, self._reached = home, reached
        self._ends = threading.Event()
        self._open: list[socket.socket] = []
        self.ports: set[int] = set()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Storm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        for each in self._open:
            each.close()

    def _run(self) -> None:
        while not self._ends.wait(0.02):
            ports = {port for pid in processes_of(self._home) for port in listening(pid)}
            for port in ports - self.ports:
                self.ports.add(port)
                for _ in range(200):
                    with contextlib.suppress(OSError):
                        self._open.append(socket.create_connection(("127.0.0.1", port), 5))
                if len(self.ports) == 2:
                    self._reached.touch()
            for each in self._open[::2]:
                with contextlib.suppress(OSError):  # it was closed
                    each.send(b"x", socket.MSG_DONTWAIT)


@contextmanager
def cluster_of(
    directory: Path,
    *flags: str,
    model: str = "demo",
    hosts: list[dict[str, Any]] | None = None,
    length: int = 64,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Cluster]:
    """hosts: of the hostfile; by default two ranks of this machine. length: tokens of an answer."""
    directory.mkdir(parents=True, exist_ok=True)
    hostfile = directory / "hosts.json"
    hostfile.write_text(json.dumps(hosts or [LOCAL] * 2))
    arguments = ["serve", model, "--port", "0", "--kv-cache-memory", "16MB", "--hosts", str(hostfile), *flags]
    with mlxpaged(directory, *arguments, env={"OPENBLAS_NUM_THREADS": "1", **env}, fork=False) as command:
        wait_until(lambda: "http://" in command.stdout or command.process.poll() is not None, START_SECONDS)
        assert command.process.poll() is None, command.stderr
        cluster = Cluster(command, command.url, directory, length)
        cluster.expected = {prompt: cluster.complete(prompt).text for prompt in PROMPTS}
        yield cluster
