"""Coding agents as people have them: in a terminal, which tmux keeps, for three turns. Two of them run a command."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.test_command_lines import CODEX, node_command
from tests.support import RunningServer
from tests.terminal.tmux import Terminal

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]

SECONDS = 120.0
ENTER_SECONDS = 2.0


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    home = tmp_path / "home"
    variables = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "screen-256color"}
    terminal = Terminal(home, variables)
    (home / "work").mkdir()
    try:
        yield terminal
    finally:
        terminal.close()


def ask(terminal: Terminal, question: str, answer: str) -> None:
    """Types a question, and waits for the answer. Agents take an Enter that comes at once for a line of a text that is
    pasted, so it is pressed until the answer is there: without a text, it does nothing."""
    terminal.type(question, end="")
    terminal.wait_for(re.escape(question), SECONDS)
    deadline = time.monotonic() + SECONDS
    while True:
        terminal.key("Enter")
        try:
            terminal.wait_for(answer, ENTER_SECONDS)
            return
        except AssertionError:
            if time.monotonic() > deadline:
                raise


def converse(terminal: Terminal, command: str, ready: str, question: str) -> None:
    """ready: a pattern of the screen on which a question can be typed. question: the model calls a tool for it."""
    terminal.type(f"cd work && {command}")
    terminal.wait_for(ready, SECONDS)
    ask(terminal, question, r"Done, as you said\.")
    ask(terminal, "Hello", r"Hello there\.")
    ask(terminal, question, r"(?s)Hello there\..*Done, as you said\.")


def test_claude_code_in_a_terminal(server: RunningServer, terminal: Terminal) -> None:
    project = {"hasTrustDialogAccepted": True}
    settings = {
        "hasCompletedOnboarding": True,
        "theme": "dark",
        "customApiKeyResponses": {"approved": ["unused"], "rejected": []},
        "projects": {str(terminal.home / "work"): project},
    }
    (terminal.home / ".claude.json").write_text(json.dumps(settings))
    variables = f"ANTHROPIC_BASE_URL={server.url} ANTHROPIC_API_KEY=unused ANTHROPIC_MODEL=scripted"
    command = f"{variables} {node_command('claude_code', 'claude')} --allowedTools Bash"
    converse(terminal, command, r"\n\N{HEAVY RIGHT-POINTING ANGLE QUOTATION MARK ORNAMENT}", "Say that it is done")
    ask(terminal, "/compact", "Compacted")
    ask(terminal, "Say that it is done", r"(?s)Compacted.*Done, as you said\.")


def test_codex_in_a_terminal(server: RunningServer, terminal: Terminal) -> None:
    brief = terminal.home / "instructions.md"  # in place of Codex's own, which are 17,000 tokens here
    brief.write_text("Be brief.")
    (terminal.home / ".codex").mkdir()
    settings = 'approval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
    trusted = f'[projects."{terminal.home / "work"}"]\ntrust_level = "trusted"\n'
    config = settings + CODEX.format(url=server.url, brief=brief) + trusted
    (terminal.home / ".codex" / "config.toml").write_text(config)
    command = f"{node_command('codex', 'codex')} --no-daemon"
    converse(terminal, command, "Ask Codex", "Carry it out please")


def test_opencode_in_a_terminal(server: RunningServer, terminal: Terminal) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": "unused"},
        "models": {"scripted": {"tool_call": True, "limit": {"context": 131072, "output": 32000}}},
    }
    config = {
        "provider": {"local": provider},
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "allow"},
    }
    folder = terminal.home / ".config" / "opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(json.dumps(config))
    command = f"OPENCODE_DISABLE_MODELS_FETCH=1 {node_command('opencode', 'opencode')} --model local/scripted"
    converse(terminal, command, "Ask anything", "Let it be done")
