"""Claude Code, Codex and Continue, where `claude`, `codex` and `cn` are installed: each runs a command that the model
asks for, and shows what the model makes of its output."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import SCRIPT
from tests.scripted import scripted_server
from tests.support import RunningServer

pytestmark = pytest.mark.clients

CODEX = """model = "scripted"
model_instructions_file = "{brief}"
model_provider = "local"

[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""
CONTINUE = """name: local
version: 0.0.1
schema: v1
models:
  - {{name: scripted, provider: {provider}, model: scripted, apiBase: "{url}/v1", apiKey: unused, roles: [chat]}}
"""


def run(home: Path, program: str, *arguments: str, **env: str) -> str:
    """What the program prints. It finds nothing of the user's: no settings, no keys."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not on PATH")
    work = home / "work"
    work.mkdir()
    done = subprocess.run(
        [path, *arguments],
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


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("small"), "json_tools", SCRIPT, context_length=16384) as server:
        yield server


@pytest.mark.parametrize("context", ["server", "small_server"])
def test_claude_code(request: pytest.FixtureRequest, tmp_path: Path, context: str) -> None:
    """It asks for 32,000 tokens, and in a small context for fewer once it was told."""
    server: RunningServer = request.getfixturevalue(context)
    env = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "unused", "ANTHROPIC_MODEL": "scripted"}
    options = ("--tools", "Bash", "--allowedTools", "Bash", "--system-prompt", "Be brief.")
    assert "Done, as you said." in run(tmp_path, "claude", "-p", "Say that it is done", *options, **env)


def test_codex(server: RunningServer, tmp_path: Path) -> None:
    brief = tmp_path / "instructions.md"  # in place of Codex's own, which are 17,000 tokens here
    brief.write_text("Be brief.")
    (tmp_path / "config.toml").write_text(CODEX.format(url=server.url, brief=brief))
    options = ("--skip-git-repo-check", "--sandbox", "danger-full-access")
    assert "Done, as you said." in run(
        tmp_path, "codex", "exec", *options, "Carry it out please", CODEX_HOME=str(tmp_path)
    )


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_continue(server: RunningServer, tmp_path: Path, provider: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONTINUE.format(url=server.url, provider=provider))
    options = ("-p", "--auto", "--config", str(config))
    telemetry = {"CONTINUE_TELEMETRY_ENABLED": "0"}
    assert "Done, as you said." in run(tmp_path, "cn", *options, "Say that it is done", **telemetry)
