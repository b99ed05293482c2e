"""A server whose limit of open files is low."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.helpers import DEADLINE
from tests.support import wait_until

LIMIT = 96
SERVE = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
from mlxpaged.cli import main
sys.exit(main(["serve", "none", "--port", "0"]))
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    env = os.environ | {"HOME": str(tmp_path)}
    with (
        (tmp_path / "out").open("w") as out,
        subprocess.Popen([sys.executable, "-c", SERVE], stdout=out, env=env) as process,
    ):
        try:
            wait_until(lambda: "http://" in (tmp_path / "out").read_text(), pause=0.05)
            yield re.findall(r"http://\S+", (tmp_path / "out").read_text())[0]
        finally:
            process.kill()


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(4096), b""))


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=DEADLINE).status_code == 200
    except httpx.TransportError:  # the connections before are not closed yet
        return False


def test_a_hard_limit_below_that_of_mlx_lm_is_kept() -> None:
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
import mlxpaged.models.loader
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{(LIMIT, LIMIT)}\n", done.stderr


@pytest.mark.more
def test_connections_beyond_the_limit_are_refused_and_the_others_are_served(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack, httpx.Client(base_url=url, timeout=DEADLINE, trust_env=False) as client:
        assert client.get("/health").status_code == 200  # on a connection that stays
        connections = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE)) for _ in range(3 * LIMIT)
        ]
        with selectors.DefaultSelector() as selector:
            for connection in connections:
                selector.register(connection, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(DEADLINE)]
        answers = [read_all(connection) for connection in connections if connection in ready]
        assert answers
        for answer in answers:
            assert b"503 Service Unavailable" in answer
            assert b"too_many_connections" in answer
        assert client.get("/v1/models").status_code == 200
    wait_until(lambda: is_healthy(url))
