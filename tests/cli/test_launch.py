"""`mlxpaged launch`: what the agents get. `make test-clients` runs the agents themselves."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.cli import launch
from mlxpaged.cli.client import Client
from mlxpaged.cli.connection import Connection
from tests.cli.helpers import Result
from tests.support import RunningServer

pytestmark = pytest.mark.usefixtures("home")

AGENT = """#!/bin/sh
env > "$OUT/env"
printf '%s\\n' "$@" > "$OUT/args"
exit 7
"""


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs with the agents' names, which write down what they get; the folder with that."""
    (programs := tmp_path / "programs").mkdir()
    for name in launch.AGENTS:
        (program := programs / name).write_text(AGENT)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path


SMALL = (
    "mlxpaged: demo has a context of 4,096 tokens: below 65,536, it shortens its conversation in nearly every turn "
    "(claude)\n"
)


def got(directory: Path) -> tuple[dict[str, str], list[str]]:
    lines = (directory / "env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line), (directory / "args").read_text().splitlines()


def test_claude_gets_variables_and_its_own_arguments(
    agents: Path, run: Callable[..., Result], demo_server: RunningServer
) -> None:
    result = run("launch", "claude", "--small-context", "--url", demo_server.url, "--", "-p", "say -- it", "--url", "x")
    assert result == Result(7, "", SMALL), "the exit status is the agent's"
    variables, args = got(agents)
    assert args == ["-p", "say -- it", "--url", "x"]
    assert variables["ANTHROPIC_BASE_URL"] == demo_server.url
    assert variables["ANTHROPIC_API_KEY"] == "unused"
    assert variables["ANTHROPIC_MODEL"] == variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "demo"
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"


def test_codex_gets_overrides_of_its_file_and_the_key_as_a_variable(
    agents: Path, run: Callable[..., Result], demo_server: RunningServer
) -> None:
    run("launch", "codex", "demo", "--small-context", "--url", demo_server.url, "--api-key", "sk-1", "--", "exec", "x")
    variables, args = got(agents)
    assert args[-2:] == ["exec", "x"]
    assert f'model_providers.mlxpaged.base_url="{demo_server.url}/v1"' in args
    assert 'model="demo"' in args
    assert "model_context_window=4096" in args
    assert variables["MLXPAGED_API_KEY"] == "sk-1"
    assert not any("sk-1" in word for word in args), "other users see the arguments of a process"


def test_opencode_gets_a_configuration(agents: Path, run: Callable[..., Result], demo_server: RunningServer) -> None:
    run("launch", "opencode", "--small-context", "--url", demo_server.url)
    variables, args = got(agents)
    config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    assert args == [""]
    assert config["model"] == "mlxpaged/demo"
    provider = config["provider"]["mlxpaged"]
    assert provider["options"] == {"baseURL": f"{demo_server.url}/v1", "apiKey": "unused"}
    assert provider["models"]["demo"]["limit"] == {"context": 4096, "output": 2048}


@pytest.mark.parametrize("agent", launch.AGENTS)
@pytest.mark.parametrize("flags", [(), ("--print",)])
def test_a_context_that_is_too_small_is_said_before_the_agent_starts(
    agents: Path, run: Callable[..., Result], demo_server: RunningServer, agent: str, flags: tuple[str, ...]
) -> None:
    result = run("launch", agent, *flags, "--url", demo_server.url)
    assert (result.status, result.stdout) == (3, "")
    assert result.stderr.startswith(f"mlxpaged: {agent} needs a context of about 32,768 tokens, and demo has 4,096: ")
    assert "--small-context" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (agents / "args").exists()


@pytest.mark.parametrize("agent", launch.AGENTS)
def test_a_context_that_is_large_enough_is_not_mentioned(agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = launch.AGENTS[agent].context
    entries = [{"id": "a", "max_model_len": limit}, {"id": "b", "max_model_len": limit - 1}, {"id": "c"}]
    monkeypatch.setattr(Client, "get", lambda self, path: {"data": entries})
    said = [launch.too_small(agent, Connection(Client("http://x"), name, False)) for name in "abc"]
    assert [said[0], said[2]] == [None, None], "the context of a model that is not loaded is not known"
    assert said[1] is not None


def test_claude_code_is_started_with_a_warning_if_it_will_shorten_its_conversation_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [{"id": "a", "max_model_len": 65_536}, {"id": "b", "max_model_len": 65_535}, {"id": "c"}]
    monkeypatch.setattr(Client, "get", lambda self, path: {"data": entries})
    of = {name: Connection(Client("http://x"), name, False) for name in "abc"}
    assert [launch.tight("claude", of[name]) for name in "ac"] == [None, None]
    said = launch.tight("claude", of["b"])
    assert said is not None
    assert "b has a context of 65,535 tokens: below 65,536, it shortens its conversation in nearly every turn" in said
    assert launch.too_small("claude", of["b"]) is None
    assert launch.tight("codex", of["b"]) is None


@pytest.mark.parametrize("agent", launch.AGENTS)
def test_the_warning_comes_before_the_agent(
    agents: Path, run: Callable[..., Result], demo_server: RunningServer, agent: str
) -> None:
    result = run("launch", agent, "--small-context", "--url", demo_server.url)
    assert ("65,536" in result.stderr) == (agent == "claude")
    assert (agents / "args").exists()


@pytest.mark.parametrize("agent", launch.AGENTS)
def test_what_is_printed_does_the_same_in_a_shell(
    agents: Path, run: Callable[..., Result], demo_server: RunningServer, agent: str
) -> None:
    printed = run("launch", agent, "--print", "--small-context", "--url", demo_server.url, "--", "it's", "$HOME")
    assert printed.status == 0
    subprocess.run(["sh", "-c", printed.stdout], check=False)
    by_shell = got(agents)
    run("launch", agent, "--small-context", "--url", demo_server.url, "--", "it's", "$HOME")
    by_launch = got(agents)
    names = [shlex.split(line)[1].split("=")[0] for line in printed.stdout.splitlines()[:-1]]
    assert names
    assert [by_shell[0][name] for name in names] == [by_launch[0][name] for name in names]
    assert by_shell[1] == by_launch[1]


@pytest.mark.parametrize("command", [("launch", "claude", "--print"), ("run", "a", "x")])
@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nrm -r ~", "a\u202e"])
def test_a_name_that_would_change_the_terminal_is_refused(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], name: str
) -> None:
    """A server may call a model so: of the one that it lists, or that it has loaded."""
    entries = [{"id": name, "kind": "text", "state": "loaded", "max_model_len": 100_000}]
    answers = {"/health": {"status": "ok", "model": "a"}, "/v1/models": {"data": entries}}
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(Client, "health", lambda self: answers["/health"])
    monkeypatch.setattr(Client, "get", lambda self, path: answers[path])
    monkeypatch.setattr(Client, "post", lambda self, path, **_: entries[0])
    result = run(*command, "--url", "http://x")
    assert (result.status, result.stdout) == (1, "")
    assert "has characters that cannot be shown: 'a\\" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("agent", launch.AGENTS)
def test_a_missing_agent_is_said_with_the_way_to_install_it(
    run: Callable[..., Result], agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = run("launch", agent)
    assert result.status == 1
    assert result.stderr.startswith(f"mlxpaged: {agent} is not installed. To install it: npm install -g ")


def test_an_agent_whose_interpreter_is_gone_is_no_traceback(
    agents: Path, run: Callable[..., Result], demo_server: RunningServer
) -> None:
    (program := agents / "programs" / "claude").write_text(f"#!{agents}/node\n")
    result = run("launch", "claude", "--small-context", "--url", demo_server.url)
    assert result == Result(1, "", f"{SMALL}mlxpaged: {program} cannot be started: No such file or directory\n")


def test_nothing_is_started_to_print_the_variables(run: Callable[..., Result]) -> None:
    result = run("launch", "claude", "--print")
    assert (result.status, result.stdout) == (1, "")
    assert "no server runs" in result.stderr


@pytest.mark.parametrize("agent", launch.AGENTS.values())
def test_the_context_of_a_model_that_is_not_loaded_is_left_out(
    agent: launch.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is not an admin's loads a model by its first request."""
    entries = [{"id": "a", "state": "loaded", "max_model_len": 4096}, {"id": "b", "state": "available"}]
    monkeypatch.setattr(Client, "get", lambda self, path: {"data": entries})
    client = Client("http://x")
    assert "4096" in repr(agent.settings(Connection(client, "a", False)))
    for name in ("b", "a directory"):
        settings = repr(agent.settings(Connection(client, name, False)))
        assert name in settings
        assert "context" not in settings.lower()
        assert "None" not in settings
