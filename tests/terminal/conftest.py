"""The commands as a user has them, in a shell in a terminal. `make test-cli` runs these tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpaged import __main__
from tests.cli.helpers import environment
from tests.scripted import scripted_server
from tests.support import RunningServer, wait_until
from tests.terminal.tmux import Terminal

SCRIPT = {
    "Hello": "Hi, **there**.",
    "Why?": "<think>\nHm, why.\n</think>\n\nBecause.",
    "List": "# Numbers\n\n" + "".join(f"- number {i}\n" for i in range(100)) + "\nThat is all.",
    "Long?": "so " * 2500,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without = shutil.which("tmux") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.terminal)
            if without:
                item.add_marker(pytest.mark.skip(reason="tmux is not installed"))


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A shell in a new home. What it has started has ended with the test."""
    home = tmp_path / "home"
    root = str(Path(__main__.__file__).parent.parent)
    variables = environment({"HOME": str(home), "PYTHONPATH": root, "LANG": "C.UTF-8", "TERM": "screen"})
    for name in ("TMUX", "TMUX_PANE"):
        variables.pop(name, None)
    terminal = Terminal(home, variables | {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home / "hf")})
    try:
        yield terminal
    finally:
        terminal.close()
    wait_until(lambda: not processes_of(home), 20)


def processes_of(home: Path) -> list[str]:
    """The commands of this home that still run. Only Linux tells."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"HOME={home}\0".encode() in path.read_bytes() and path.parent.name != str(os.getpid()):
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", SCRIPT) as server:
        yield server


class SilentHub(str):
    """The address of a hub that takes connections and never answers."""

    connections: list[socket.socket]


@pytest.fixture
def silent_hub() -> Iterator[SilentHub]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = SilentHub(f"http://127.0.0.1:{listener.getsockname()[1]}")
        hub.connections = connections = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(listener.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        yield hub
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in connections:
            connection.close()
