"""A server in a process of its own, and what it has counted."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from comparison.servers import free_port, stat_of

COUNTED = ("prompt_tokens", "prefix_hit_tokens", "generated_tokens", "requests_finished")


@contextlib.contextmanager
def serving(model: str, *flags: str, connections: int = 100) -> Iterator[httpx.Client]:
    """A client of a server of this model, which it calls "model"."""
    port = free_port()
    command = [sys.executable, "-m", "mlxpaged", "serve", model, "--served-model-name", "model", "--port", str(port)]
    process = subprocess.Popen([*command, "--log-level", "warning", *flags], stdout=subprocess.DEVNULL)
    limits = httpx.Limits(max_connections=connections)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=3600, trust_env=False, limits=limits) as client:
            while not is_ready(client):
                assert process.poll() is None, "the server ended"
                time.sleep(0.2)
            yield client
    finally:
        process.terminate()
        process.wait()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def steps_and_tokens(client: httpx.Client) -> tuple[int, int]:
    """Steps so far, and tokens that were run through the model: those of prompts without what the prefix cache had, and
    those of answers but the first."""
    text = client.get("/metrics").text
    prompt, hits, generated, answers = (
        sum(map(float, re.findall(rf"^mlxpaged_{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE))) for name in COUNTED
    )
    return int(client.get("/v1/status").json()["steps"]), int(prompt - hits + generated - answers)


def cpu_seconds() -> float:
    """User and system time of the servers that this process has started and that still run; 0 if the system does not
    tell."""
    stats = map(stat_of, Path("/proc").glob("[0-9]*"))
    ticks = [int(stat[11]) + int(stat[12]) for stat in stats if stat and int(stat[1]) == os.getpid()]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")
