"""Ctrl-C at every phase: no traceback, and the exit status that the documentation says."""

from __future__ import annotations

import pytest

from mlxpaged.cli import COMMANDS
from tests.support import RunningServer, wait_until
from tests.terminal.conftest import SilentHub
from tests.terminal.tmux import Terminal

INTERRUPTED = 130
STARTS = {
    "serve": "serve none --port 0",
    "chat": "chat demo",
    "run": "run demo hello",
    "ps": "ps",
    "stop": "stop",
    "launch": "launch claude --print --small-context",
    "service": "service install --dry-run",
    "bench": "bench",
    "doctor": "doctor",
    "keys": "keys list",
    "config": "config",
    "pull": "pull someone/absent",
    "ls": "ls",
    "rm": "rm someone/absent",
    "cache": "cache ls absent",
    "completion": "completion bash",
    "help": "help serve",
    "version": "version",
}
TIMES = "PYTHONPROFILEIMPORTTIME=1 "
"""Python then prints each import, so that the test sees how far the process is."""


def check(text: str) -> None:
    for word in ("Traceback", "Exception ignored", "KeyboardInterrupt", "Error:"):
        assert word not in text, text


def interrupted(terminal: Terminal, command: str, pattern: str, then: str = "") -> int:
    """Press Ctrl-C when the command shows the pattern; and once more when it shows `then`."""
    before = terminal.start(command)
    for each in filter(None, (pattern, then)):
        terminal.wait_for(each, since=before)
        terminal.key("C-c")
    status = terminal.wait_prompt(before)
    check(terminal.text()[before:])
    return status


@pytest.mark.parametrize("module", ["argparse", "mlxpaged\\.cli\\.parser"])
@pytest.mark.parametrize("name", COMMANDS)
def test_during_the_imports(terminal: Terminal, name: str, module: str) -> None:
    """Every command imports the parser, and its own module next. It may be done before the key arrives."""
    status = interrupted(terminal, f"{TIMES}mlxpaged {STARTS[name]}", rf"\| +{module}\n")
    assert status in (INTERRUPTED, 0, 1)


@pytest.mark.parametrize("module", ["rich\\.console", "prompt_toolkit\\.utils"])
def test_during_the_imports_of_the_chat(terminal: Terminal, server: RunningServer, module: str) -> None:
    command = f"{TIMES}mlxpaged chat --url {server.url}"
    assert interrupted(terminal, command, rf"\| +{module}\n") == INTERRUPTED


@pytest.mark.parametrize("module", ["numpy", "mlx\\.core", "transformers", "mlxpaged\\.engine"])
def test_during_the_imports_of_the_server(terminal: Terminal, module: str) -> None:
    command = f"{TIMES}mlxpaged serve none --port 0"
    assert interrupted(terminal, command, rf"\| +{module}\n") in (INTERRUPTED, 0)


@pytest.mark.parametrize("command", ["chat demo", "run demo hello"])
def test_while_a_server_starts(terminal: Terminal, command: str) -> None:
    assert interrupted(terminal, f"mlxpaged {command}", "starting a server") == INTERRUPTED


@pytest.mark.parametrize("command", ["chat", "run"])
def test_while_the_model_of_a_started_server_is_fetched(terminal: Terminal, silent_hub: str, command: str) -> None:
    command = f"HF_ENDPOINT={silent_hub} mlxpaged {command} someone/absent {'hello' * (command == 'run')}"
    assert interrupted(terminal, command, "(loading|download|fetch)") == INTERRUPTED


def test_while_launch_starts_a_server_and_while_the_agent_runs(terminal: Terminal) -> None:
    """Ctrl-C is for the agent, which may do something else with it than to end."""
    program = terminal.home / "claude"
    program.write_text('#!/bin/sh\ntrap "echo caught; exit 5" INT\necho running\nwhile :; do sleep 0.1; done\n')
    program.chmod(0o755)
    command = "PATH=$HOME:$PATH mlxpaged launch claude --small-context"
    assert interrupted(terminal, command, "starting a server") == INTERRUPTED
    assert interrupted(terminal, command, "running") == 5


def test_while_an_answer_streams_ends_it_and_not_the_chat(terminal: Terminal, server: RunningServer) -> None:
    before = terminal.start(f"mlxpaged chat --url {server.url}")
    terminal.wait_for(r">>>", since=before)
    for _ in range(3):
        before = len(terminal.text())
        terminal.type("Long?")
        terminal.wait_for(r"so so so", since=before)
        terminal.key("C-c", "C-c", "C-c")
        terminal.wait_for(r">>> *\Z", since=before)
        terminal.type("/clear")  # what came of the answer may fill the context
        terminal.wait_for(r">>> /clear\n(.*\n)*>>> *\Z", since=before)
    server.wait_idle()
    before = len(terminal.text())
    terminal.type("Hello")
    terminal.wait_for(r"Hi, there\.\n", since=before)
    terminal.type("/bye")
    assert terminal.wait_prompt(before) == 0
    check(terminal.text())


def test_while_run_prints_an_answer(terminal: Terminal, server: RunningServer) -> None:
    assert interrupted(terminal, f"mlxpaged run scripted --url {server.url} 'Long?'", "so so so") == INTERRUPTED
    server.wait_idle()


def test_at_the_prompt_and_while_the_chat_ends(terminal: Terminal) -> None:
    before = terminal.start("mlxpaged chat demo")
    terminal.wait_for(r">>>", since=before)
    terminal.key("C-c")
    terminal.wait_for(r"leaves the chat\.\n>>>", since=before)
    terminal.key("C-d")
    terminal.key("C-c", "C-c")
    assert terminal.wait_prompt(before) in (0, INTERRUPTED)
    check(terminal.text())


def test_while_serve_fetches_its_model(terminal: Terminal, silent_hub: str) -> None:
    command = f"HF_ENDPOINT={silent_hub} mlxpaged serve someone/absent --port 0"
    assert interrupted(terminal, command, "listening on") in (0, INTERRUPTED)


@pytest.mark.parametrize("then", ["", "no new requests"])
def test_while_serve_serves_and_while_it_ends(terminal: Terminal, then: str) -> None:
    command = "mlxpaged serve --port 0 --kv-cache-memory 16MB"
    assert interrupted(terminal, command, r"Try it:", then) in (0, INTERRUPTED)


def test_while_stop_waits(terminal: Terminal) -> None:
    """The server ends all the same."""
    terminal.run("mlxpaged serve --port 0 --kv-cache-memory 16MB --log-level error > out 2>&1 &")
    terminal.run("until grep 'Try it' out; do sleep 0.2; done")
    long = "mlxpaged run demo 'Count from 1 to 200' > /dev/null 2>&1 &"
    terminal.run(long)
    assert interrupted(terminal, "mlxpaged stop", "finishes its requests|has ended") in (INTERRUPTED, 0)
    assert terminal.run("wait")[0] == 0


@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_while_a_measurement_runs(terminal: Terminal, command: str) -> None:
    before = terminal.start(f"mlxpaged {command}")
    terminal.wait_for(r"\S", since=before)
    terminal.key("C-c")
    assert terminal.wait_prompt(before) in (INTERRUPTED, 0)
    check(terminal.text()[before:])


def test_while_pull_waits_for_the_hub(terminal: Terminal, silent_hub: SilentHub) -> None:
    before = terminal.start(f"HF_ENDPOINT={silent_hub} mlxpaged pull someone/absent")
    wait_until(lambda: silent_hub.connections, 30)
    terminal.key("C-c")
    assert terminal.wait_prompt(before) in (INTERRUPTED, 1)
    check(terminal.text()[before:])
