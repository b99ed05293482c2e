"""Real limits on the memory of a real server: it refuses requests, and neither hangs nor ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.cpu import blas
from mlxpaged.process_memory import CGROUP_MEMORY, MARGIN, PAGE_BYTES

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="a Mac does not enforce limits on memory"),
]

COMPLETIONS = "/v1/completions"
SECONDS = 60.0
MIB = 2**20


@dataclass
class LimitedServer:
    command: list[str]
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=SECONDS, trust_env=False)

    def together(self, bodies: list[dict[str, Any]], may_close: bool = False) -> list[httpx.Response]:
        """The answers to requests that are sent at the same time. A hanging one raises httpx.ReadTimeout. may_close:
        leave out those whose connections the server closes without an answer."""

        def post(body: dict[str, Any]) -> httpx.Response | None:
            try:
                return self.post(COMPLETIONS, body)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if not may_close:
                    raise
                return None

        with ThreadPoolExecutor(len(bodies)) as threads:
            return [response for response in threads.map(post, bodies) if response is not None]

    def limit_address_space(self, more: int | None) -> None:
        """more: bytes beyond what it has mapped now; None for no limit."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[0])
        limit = resource.RLIM_INFINITY if more is None else pages * PAGE_BYTES + more
        resource.prlimit(self.process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def restart_if_ended(self) -> None:
        """So that the failure of one test is not that of the others."""
        if self.process.poll() is not None:
            self.process = start(self.command, self.log)
            wait_ready(self)

    def check_alive(self) -> None:
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        health = httpx.get(f"{self.url}/health", timeout=SECONDS, trust_env=False)
        assert health.json()["status"] == "ok"


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"HOME": str(log.parent)})


@contextlib.contextmanager
def started(directory: Path, prefix: tuple[str, ...] = ()) -> Iterator[LimitedServer]:
    """prefix: a command that runs the server."""
    log = directory / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*prefix, sys.executable, "-m", "mlxpaged", "serve", "--port", str(port)]
    server = LimitedServer(command, start(command, log), f"http://127.0.0.1:{port}", log)
    try:
        wait_ready(server)
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def wait_ready(server: LimitedServer) -> None:
    deadline = time.monotonic() + 2 * SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text()[-2000:]
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health", timeout=SECONDS, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    pytest.fail(f"it does not start:\n{server.log.read_text()[-2000:]}")


def numbers(count: int, seed: int) -> list[int]:
    return [20 + (seed * 7919 + i * i) % 500 for i in range(count)]


def request(prompt: Any, tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} | more


SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "(a|b){1,50}"} for i in range(300)}}

LOADS: dict[str, list[dict[str, Any]]] = {
    "prefill": [request(numbers(1500, seed), 8) for seed in range(8)],
    "decode": [request(numbers(20, seed), 200) for seed in range(12)],
    "body": [request("a b " * 300_000, 8) for _ in range(6)],
    "grammar": [{"prompt": "a", "max_tokens": 8, "guided_json": SCHEMA | {"title": str(seed)}} for seed in range(6)],
}


def check_answers(responses: list[httpx.Response]) -> None:
    for response in responses:
        assert response.status_code in (200, 400, 503), response.text
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "out_of_memory"
            assert response.headers["Retry-After"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LimitedServer]:
    """It has a limit from the start, as docs/operations.md asks for."""
    with started(tmp_path_factory.mktemp("server"), ("prlimit", f"--as={2**40}:")) as server:
        yield server


@pytest.fixture
def server(shared: LimitedServer) -> LimitedServer:
    shared.restart_if_ended()
    return shared


@pytest.mark.parametrize("more", [0, 10, 40, 80, 160])
@pytest.mark.parametrize("load", LOADS)
def test_a_limit_on_the_address_space_refuses_requests_and_its_end_serves_them(
    server: LimitedServer, load: str, more: int
) -> None:
    known = request(numbers(30, 99), 8)
    expected = server.post(COMPLETIONS, known).json()["choices"]
    server.limit_address_space(more * MIB)
    try:
        responses = server.together(LOADS[load], may_close=more * MIB < MARGIN)
        server.check_alive()
    finally:
        server.limit_address_space(None)
    check_answers(responses)
    [again] = server.together([known])
    assert again.json()["choices"] == expected


def test_a_limit_that_comes_while_streams_run_ends_or_completes_each(server: LimitedServer) -> None:
    body = request(numbers(400, 5), 300, stream=True)

    def read(seed: int) -> str:
        with httpx.stream("POST", server.url + COMPLETIONS, json=body | {"seed": seed}, timeout=SECONDS) as response:
            return response.read().decode()

    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(read, seed) for seed in range(8)]
        time.sleep(1.0)
        server.limit_address_space(0)
        try:
            texts = [stream.result() for stream in streams]
            server.check_alive()
        finally:
            server.limit_address_space(None)
    for text in texts:
        assert "[DONE]" in text or '"code":"out_of_memory"' in text or '"code": "out_of_memory"' in text


@pytest.mark.parametrize("mebibytes", [450, 600, 750, 900])
def test_a_start_without_enough_address_space_says_so(tmp_path: Path, mebibytes: int) -> None:
    if mebibytes == 900 and blas.loaded is None:
        pytest.skip("it is enough without the buffers of OpenBLAS")
    command = ["prlimit", f"--as={mebibytes * MIB}", sys.executable, "-m", "mlxpaged", "serve", "--port", "0"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env=os.environ | {"HOME": str(tmp_path)}
    )
    assert ended.returncode == 1
    assert "MB are free" in ended.stderr + ended.stdout


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A new control group for memory. Version 2 comes first."""
    name = f"mlxpaged-test-{os.getpid()}"
    for root, limit, *_ in CGROUP_MEMORY:
        group = root / name
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                yield group
                time.sleep(0.5)  # until the kernel has removed the process
                group.rmdir()
                return
            group.rmdir()
    pytest.skip("no control group can be made here")


@pytest.mark.parametrize("more", [24, 64])
def test_a_limit_of_a_control_group_is_not_reached(cgroup: Path, tmp_path: Path, more: int) -> None:
    """The kernel grants memory beyond it, and kills the process when it is used."""
    limit, used = next(names[:2] for root, *names in CGROUP_MEMORY if root == cgroup.parent)
    join = ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh")
    with started(tmp_path, join) as server:
        expected = server.post(COMPLETIONS, request("a", 8)).json()["choices"]
        (cgroup / limit).write_text(str(int((cgroup / used).read_text()) + more * MIB))
        for load in LOADS.values():
            check_answers(server.together(load))
            assert server.process.poll() != -signal.SIGKILL
            server.check_alive()
        (cgroup / limit).write_text("-1" if limit == "memory.limit_in_bytes" else "max")
        assert server.post(COMPLETIONS, request("a", 8)).json()["choices"] == expected
