"""Libraries and command lines that people already have, against the server; `make test-clients`.

install.py installs each into a folder of its own. The other tests need none of them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.install import NotInstalled, folder_of
from tests.scripted import scripted_server
from tests.support import RunningServer

REPLY = '{"city": "Rome", "degrees": 21}'


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


SCRIPT = {
    "Hello": "Hello there.",
    "Predict a greeting": "[[ ## answer ## ]]\nHello there.\n\n[[ ## completed ## ]]",
    "Weather in Rome?": f"<think>\nI should look.\n</think>\n{call('weather', city='Rome')}",
    "21 degrees": "It is 21 degrees in Rome.",
    "It is hot.": call("final_answer", answer="It is 21 degrees in Rome."),
    "Describe Rome": REPLY,
    "Describe it": call("Weather", city="Rome", degrees=21),  # type: ignore[arg-type]
    "Describe a part": call("PartialWeather", city="Rome", degrees=21),  # type: ignore[arg-type]
    "Say that it is done": call("Bash", command="echo it is done", description="Say it"),
    "Let it be done": call("bash", command="echo it is done", description="Say it"),
    "Carry it out": call("exec_command", cmd="echo it is done"),
    "\nit is done": "Done, as you said.",
    "Write the greeting": "greeting.txt\n```\nGood morning\n```\n",
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


def installed(name: str) -> Path:
    """The folder of a program. Without the program, the test is skipped, with the reason."""
    try:
        return folder_of(name)
    except NotInstalled as reason:
        pytest.skip(str(reason))


def run(home: Path, *command: str | Path, **env: str) -> str:
    """What a program prints. It finds nothing of the user's: no settings, no keys."""
    work = home / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=work,
        env={"HOME": str(home), "PATH": os.environ["PATH"]} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
