"""The command in a process of its own, and a stand-in for the hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

import httpx

from tests.cli import forked
from tests.cli.forked import ForkedProcess
from tests.support import wait_until

DEADLINE = 300.0
SLOW = "import sys; from tests.cli.forked import main, slow_down; slow_down(); sys.exit(main(sys.argv[1:]))"
NOT_RUN = re.compile(r"^.* mlxpaged\.engine\.awake_clock: the process did not run for .*\n", re.MULTILINE)
REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Result:
    """What a command in this process came to."""

    status: int
    stdout: str
    stderr: str


@dataclass
class Command:
    """A running `mlxpaged`; its output goes to files, so that it never waits for a reader."""

    process: subprocess.Popen[bytes] | ForkedProcess
    stdout_path: Path
    stderr_path: Path

    def go_on(self) -> None:
        """Steps are as fast as they can be from now on."""
        (self.stdout_path.parent / "slow").unlink()

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text()

    @property
    def stderr(self) -> str:
        """Without what a process says that got no processor time for some seconds."""
        return NOT_RUN.sub("", self.stderr_path.read_text())

    @property
    def url(self) -> str:
        match = re.search(r"http://\S+", self.stdout)
        assert match is not None, self.stderr
        return match[0]

    def wait_started(self) -> None:
        wait_until(lambda: "http://" in self.stdout or self.process.poll() is not None, DEADLINE)
        assert self.process.poll() is None, self.stderr

    def wait_logged(self, text: str) -> None:
        wait_until(lambda: text in self.stderr, DEADLINE)

    def wait_end(self) -> int:
        return self.process.wait(DEADLINE)


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any of the command's own variables. Nothing is timed on a Mac either."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXPAGED_")}
    return kept | {"PYTHONUNBUFFERED": "1", "MLXPAGED_ATTENTION_TUNING": "default"} | dict(changes)


@contextlib.contextmanager
def mlxpaged(
    directory: Path, *args: str, env: Mapping[str, str] | None = None, fork: bool = True, slow: bool = False
) -> Iterator[Command]:
    """fork: save the imports. Without it, or if `env` has variables of libraries, which may read them when they are
    imported, the process starts as a user's does. slow: each step takes a tenth of a second longer until `go_on`. Its
    home is `directory`, so that no other command finds a server."""
    forks = fork and forked.IS_SUPPORTED and all(name.startswith(("MLXPAGED_", "HOME")) for name in env or {})
    directory.mkdir(parents=True, exist_ok=True)
    if slow:
        (directory / "slow").touch()
    env = {"HOME": str(directory), **(env or {})}
    stdout, stderr = directory / "stdout", directory / "stderr"
    process: subprocess.Popen[bytes] | ForkedProcess
    with open(stdout, "wb") as out, open(stderr, "wb") as err:
        process = (
            ForkedProcess(args, environment(env), stdout, stderr)
            if forks
            else subprocess.Popen(
                [sys.executable, *(("-c", SLOW) if slow else ("-m", "mlxpaged")), *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment(env),
            )
        )
    try:
        yield Command(process, stdout, stderr)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(DEADLINE)


@contextlib.contextmanager
def serving(directory: Path, *args: str, **options: Any) -> Iterator[Command]:
    """`mlxpaged serve` on a free port with a small pool, once its banner is out. options: of `mlxpaged`."""
    flags = ["--port", "0", *args]
    if "--kv-cache-memory" not in flags:
        flags += ["--kv-cache-memory", "16MB"]
    with mlxpaged(directory, "serve", *flags, **options) as command:
        command.wait_started()
        yield command


def question(url: str, text: str = "What is 17 + 25?", model: str | None = None) -> str:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "temperature": 0}
    if model is not None:
        body["model"] = model
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE, trust_env=False)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@contextlib.contextmanager
def hub(
    repository: str,
    directory: Path,
    sizes: Mapping[str, int] | None = None,
    breaks_off: str | None = None,
    stalls: str | None = None,
    resets: str | None = None,
) -> Iterator[tuple[str, list[str]]]:
    """A server that speaks as much of the hub's API as a download needs and has one repository with the files of
    `directory`. sizes: what it tells if it is asked for the sizes of the files; None if it does not know them.
    breaks_off: a file of which the first request gets half. stalls: a file of which a request gets half, and the rest
    when the server ends. resets: a file of which a request gets half, and then the connection is reset. Yields its
    address and the list of requests it got, with the range that they ask for."""
    left_to_break = [breaks_off]
    ended = threading.Event()
    paths = [path for path in directory.rglob("*") if path.is_file()]
    files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            requests.append(f"{self.command} {self.path}" + (f" {asked}" if asked else ""))
            if self.path.startswith("/api/models?"):  # a search
                words = parse_qs(self.path.partition("?")[2]).get("search", [""])[0].lower().split()
                hit = all(word in repository.lower() for word in words)
                return self.answer_json([{"_id": "1", "id": repository, "modelId": repository}] if hit else [])
            path = self.path.partition("?")[0]
            if path in (f"/api/models/{repository}", *(f"/api/models/{repository}/revision/{r}" for r in revisions)):
                siblings = [{"rfilename": name} | ({"size": sizes[name]} if sizes else {}) for name in files]
                return self.answer_json(
                    {"_id": "1", "id": repository, "modelId": repository, "sha": REVISION, "siblings": siblings}
                )
            if path in [f"/api/models/{repository}/tree/{revision}" for revision in revisions]:
                return self.answer_json(
                    [
                        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for name, data in files.items()
                    ]
                )
            for revision in revisions:
                prefix = f"/{repository}/resolve/{revision}/"
                if path.startswith(prefix) and path.removeprefix(prefix) in files:
                    return self.answer_file(path.removeprefix(prefix))
            known = path.startswith((f"/api/models/{repository}/", f"/{repository}/"))
            return self.answer(b"", "text/plain", 404, "EntryNotFound" if known else "RepoNotFound")

        def answer_file(self, name: str) -> None:
            data, asked = files[name], re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if asked is not None:
                start = int(asked[1])
                ranged = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
                self.answer(data[start:], "application/octet-stream", 206, headers=ranged)
            elif self.command == "GET" and left_to_break[0] == name:
                left_to_break[0] = None
                self.close_connection = True
                self.answer(data, "application/octet-stream", sent=len(data) // 2)
            elif self.command == "GET" and name == stalls:
                self.answer(data, "application/octet-stream", sent=len(data) // 2)
                ended.wait(DEADLINE)
            elif self.command == "GET" and name == resets:
                self.close_connection = True
                self.answer(data, "application/octet-stream", sent=len(data) // 2)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())  # without the end of the stream that the server would send
            else:
                self.answer(data, "application/octet-stream")

        def answer_json(self, data: Any) -> None:
            self.answer(json.dumps(data).encode(), "application/json")

        def answer(
            self,
            data: bytes,
            kind: str,
            status: int = 200,
            error: str | None = None,
            headers: Mapping[str, str] = MappingProxyType({}),
            sent: int | None = None,
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", REVISION)
            if error is not None:
                self.send_header("X-Error-Code", error)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[:sent])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    revisions = ("main", REVISION)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", requests
        finally:
            ended.set()
            server.shutdown()
            thread.join(DEADLINE)
