"""Command lines and agents that people run: each runs a command, calls a tool or writes a file as the model says, and
shows what the model makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpaged.models.loader import DEMO_PATH
from tests.clients.conftest import REPLY, SCRIPT, installed, run
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
LLM = """- model_id: local
  model_name: scripted
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
"""


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("small"), "json_tools", SCRIPT, context_length=16384) as server:
        yield server


def node_command(name: str, command: str) -> Path:
    return installed(name) / "node_modules" / ".bin" / command


def ask_claude(server: RunningServer, home: Path) -> str:
    claude = node_command("claude_code", "claude")
    env = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "unused", "ANTHROPIC_MODEL": "scripted"}
    options = ("--tools", "Bash", "--allowedTools", "Bash", "--system-prompt", "Be brief.")
    return run(home, claude, "-p", "Say that it is done", *options, **env)


def test_claude_code(any_server: RunningServer, tmp_path: Path) -> None:
    assert "Done, as you said." in ask_claude(any_server, tmp_path)


def test_claude_code_in_a_small_context(small_server: RunningServer, tmp_path: Path) -> None:
    """It asks for 32,000 tokens, and for fewer once it was told."""
    assert "Done, as you said." in ask_claude(small_server, tmp_path)


def test_codex(any_server: RunningServer, tmp_path: Path) -> None:
    codex = node_command("codex", "codex")
    brief = tmp_path / "instructions.md"  # in place of Codex's own, which are 17,000 tokens here
    brief.write_text("Be brief.")
    (tmp_path / "config.toml").write_text(CODEX.format(url=any_server.url, brief=brief))
    options = ("--skip-git-repo-check", "--sandbox", "danger-full-access")
    shown = run(tmp_path, codex, "exec", *options, "Carry it out please", CODEX_HOME=str(tmp_path))
    assert "Done, as you said." in shown


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_continue(server: RunningServer, tmp_path: Path, provider: str) -> None:
    cn = node_command("continue", "cn")
    config = tmp_path / "config.yaml"
    config.write_text(CONTINUE.format(url=server.url, provider=provider))
    options = ("-p", "--auto", "--config", str(config))
    assert "Done, as you said." in run(tmp_path, cn, *options, "Say that it is done", CONTINUE_TELEMETRY_ENABLED="0")


def test_opencode(any_server: RunningServer, tmp_path: Path) -> None:
    opencode = node_command("opencode", "opencode")
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{any_server.url}/v1", "apiKey": "unused"},
        "models": {"scripted": {"tool_call": True, "limit": {"context": 131072, "output": 32000}}},
    }
    config = {
        "provider": {"local": provider},
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "allow"},
    }
    env = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    shown = run(tmp_path, opencode, "run", "--model", "local/scripted", "Let it be done", **env)
    assert "Done, as you said." in shown


def test_aider(server: RunningServer, tmp_path: Path) -> None:
    aider = installed("aider") / "bin" / "aider"
    url = ("--openai-api-base", f"{server.url}/v1", "--openai-api-key", "unused")
    quiet = ("--no-git", "--yes-always", "--analytics-disable", "--no-check-update", "--no-show-model-warnings")
    model = ("--model", "openai/scripted", "--edit-format", "whole")
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    run(tmp_path, aider, *url, *quiet, *model, "--message", "Write the greeting", "greeting.txt", **env)
    assert (tmp_path / "work" / "greeting.txt").read_text() == "Good morning\n"


def test_guidellm(server: RunningServer, tmp_path: Path) -> None:
    """Each of its requests succeeds, with the number of tokens that it asked for."""
    guidellm = installed("guidellm") / "bin" / "guidellm"
    backend = ("--backend", f"kind=openai_http,target={server.url}", "--profile", "kind=synchronous")
    tokenizer = ("--tokenizer", f"kind=huggingface_auto,model={DEMO_PATH}", "--constraint", "kind=max_requests,count=6")
    data = ("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16")
    report = ("--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console-interactive")
    run(tmp_path, guidellm, "run", *backend, *tokenizer, *data, *report, HF_HUB_OFFLINE="1")
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert benchmark["metrics"]["request_totals"] == totals
    assert [sample["output_metrics"]["text_tokens"] for sample in benchmark["requests"]["successful"]] == [16] * 6


def test_llm(server: RunningServer, tmp_path: Path) -> None:
    llm = installed("llm") / "bin" / "llm"
    (tmp_path / "extra-openai-models.yaml").write_text(LLM.format(url=server.url))

    def ask(*arguments: str) -> str:
        return run(tmp_path, llm, "--model", "local", *arguments, LLM_USER_PATH=str(tmp_path)).strip()

    assert ask("Hello") == ask("--no-stream", "Hello") == "Hello there."
    tool = "def weather(city: str) -> str:\n    return '21 degrees'"
    assert ask("--functions", tool, "Weather in Rome?").endswith("It is 21 degrees in Rome.")
    assert json.loads(ask("--schema", "city, degrees int", "Describe Rome")) == json.loads(REPLY)
