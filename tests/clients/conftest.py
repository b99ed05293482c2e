"""Libraries and command lines that people already have, against the server; `make test-clients`.

They are not installed for the other tests, so nothing here is even imported there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripted import scripted_server
from tests.support import RunningServer

REPLY = '{"city": "Rome", "degrees": 21}'


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


SCRIPT = {
    "Hello": "Hello there.",
    "Weather in Rome?": f"<think>\nI should look.\n</think>\n{call('weather', city='Rome')}",
    "21 degrees": "It is 21 degrees in Rome.",
    "Describe Rome": REPLY,
    "Describe it": call("Weather", city="Rome", degrees=21),  # type: ignore[arg-type]
    "Say that it is done": call("Bash", command="echo it is done", description="Say it"),
    "Carry it out": call("exec_command", cmd="echo it is done"),
    "\nit is done": "Done, as you said.",
}
"""What the model answers, by the last of these texts in the prompt."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if "not clients" in config.getoption("markexpr") else None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Room for the long prompts of agents: a token is a letter."""
    options = {"context_length": 131072, "kv_cache_bytes": 70_000_000}
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", SCRIPT, **options) as server:
        yield server


@pytest.fixture(autouse=True)
def _idle_afterwards(server: RunningServer) -> Iterator[None]:
    yield
    server.wait_idle()
