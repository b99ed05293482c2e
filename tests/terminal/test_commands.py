"""Each command, as it is meant to be used."""

from __future__ import annotations

import re
from pathlib import Path

from mlxpaged.models.loader import DEMO_PATH
from tests.cli.helpers import hub
from tests.models.test_preflight import sizes_of
from tests.support import RunningServer
from tests.terminal.tmux import Terminal


def test_two_commands_to_a_first_answer(terminal: Terminal) -> None:
    """The first one is the installation. No server runs: one is started for the chat, and ends with it."""
    before = terminal.start("mlxpaged chat demo --stats")
    terminal.wait_for(r"demo at http://127\.0\.0\.1:\d+; /help lists the commands\n>>>", since=before)
    terminal.type("What is 17 + 25?")
    terminal.wait_for(r">>> What is 17 \+ 25\?\n42\nfirst token after 0\.\d+ s; .+\n>>>", since=before)
    terminal.key("C-d")
    assert terminal.wait_prompt(before) == 0


def test_a_chat_in_a_terminal(terminal: Terminal, server: RunningServer) -> None:
    before = terminal.start(f"mlxpaged chat --url {server.url}")
    terminal.wait_for(r"\n>>>", since=before)
    terminal.type("Hello")
    terminal.wait_for(r"Hi, there\.\n>>>", since=before)
    terminal.type("Why?")
    terminal.wait_for(r"thought for 0 s, /think shows it\nBecause\.\n>>>", since=before)
    terminal.type("List")
    text = terminal.wait_for(r"That is all\.\n>>>", since=before)
    assert re.findall(r"number (\d+)\n", text) == [str(i) for i in range(100)], "the scrollback has all, once"
    before = len(terminal.text())
    terminal.type("one", end="M-Enter")
    terminal.type("Hello")
    terminal.wait_for(r"Hi, there\.\n>>>", since=before)
    terminal.type("/mo", end="Tab")
    terminal.wait_for(r">>> /model", since=before)
    terminal.key("Enter")
    terminal.wait_for(r">>> /model\n\* scripted  loaded\n>>>", since=before)
    terminal.key("Up", "Up")
    terminal.wait_for(r">>> one\n\.\.\. Hello\Z", since=before)
    terminal.key("C-c")
    terminal.wait_for(r"Ctrl-D or /bye leaves the chat\.\n>>>", since=before)
    terminal.type("/bye")
    assert terminal.wait_prompt(before) == 0


def test_top_is_drawn_again_and_again_and_ends_with_q(terminal: Terminal, server: RunningServer) -> None:
    for key, status in (("q", 0), ("C-c", 130)):
        terminal.start(f"mlxpaged top --url {server.url}")
        terminal.wait_for(r"\nscripted +0 +0 +- +-")
        terminal.wait_for(r"\nscripted +0 +0 +0\.0 +0\.0")
        terminal.key(key)
        assert terminal.wait_prompt() == status
        assert "OUTPUT/S" not in terminal.text(), "the screen is as it was"
        assert terminal.run("stty -a | grep -wc -e icanon")[1] == "1"


def test_run_in_a_pipe(terminal: Terminal, server: RunningServer) -> None:
    assert terminal.run(f"mlxpaged run scripted --url {server.url} Hello") == (0, "Hi, **there**.")
    assert terminal.run(f"echo Hello | mlxpaged run scripted --url {server.url} | tr a-z A-Z") == (0, "HI, **THERE**.")
    assert terminal.run(f"mlxpaged run scripted --url {server.url} 'Long?' | head -c 5") == (0, "so so")


def test_run_without_a_server(terminal: Terminal) -> None:
    status, text = terminal.run("mlxpaged run demo 'What is 17 + 25?'")
    assert (status, text) == (0, "42")
    status, text = terminal.run("mlxpaged run ./nothing hello")
    assert (status, text) == (1, "mlxpaged: no such directory: nothing; a hub repository is named OWNER/NAME")


def test_a_server_is_served_listed_used_and_stopped(terminal: Terminal) -> None:
    terminal.run("mlxpaged serve --port 0 --log-level error --kv-cache-memory 16MB > out 2>&1 &")
    status, text = terminal.run("until mlxpaged ps | grep demo; do sleep 0.2; done")
    assert "demo" in text
    assert re.search(r"demo +loaded +text", terminal.run("mlxpaged ps")[1])
    assert terminal.run("mlxpaged run demo 'What is 17 + 25?'") == (0, "42")
    assert terminal.run("mlxpaged stop demo") == (0, "demo is unloaded")
    assert "demo" not in terminal.run("mlxpaged ps")[1]
    assert terminal.run("mlxpaged run demo 'What is 17 + 25?'") == (0, "42"), "it is loaded again"
    (terminal.home / "claude").write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL $*"\nexit 3\n')
    (terminal.home / "claude").chmod(0o755)
    status, text = terminal.run("PATH=$HOME:$PATH mlxpaged launch claude --small-context -- -p hello")
    assert status == 3
    assert re.search(r"^http://127\.0\.0\.1:\d+ demo -p hello\Z", text, re.MULTILINE)
    status, text = terminal.run("mlxpaged stop")
    assert status == 0
    assert "has ended" in text
    assert "no server runs" in terminal.run("mlxpaged ps")[1]
    assert "Traceback" not in (terminal.home / "out").read_text()


def test_keys_and_the_service(terminal: Terminal, tmp_path: Path) -> None:
    assert "sk-mlxpaged-" in terminal.run(f"mlxpaged keys add anna --api-keys {tmp_path}/keys")[1]
    assert "anna" in terminal.run(f"mlxpaged keys list --api-keys {tmp_path}/keys")[1]
    assert terminal.run("mlxpaged service install --dry-run -- --port 8090")[0] == 0
    assert terminal.run("mlxpaged service status") == (1, "not installed")


def test_bench_and_doctor_print_their_tables(terminal: Terminal) -> None:
    status, text = terminal.run("mlxpaged bench --prompts 2 --concurrency 2 --max-tokens 8 --runs 1")
    assert (status, "tokens/s" in text) == (0, True), text
    status, text = terminal.run("mlxpaged doctor --max-num-seqs 2")
    assert (status, "decoding, tokens per second" in text) == (0, True), text


def test_a_model_is_pulled_listed_and_deleted(terminal: Terminal) -> None:
    with hub("owner/tiny", DEMO_PATH, sizes_of(DEMO_PATH)) as (address, _):
        status, text = terminal.run(f"HF_ENDPOINT={address} mlxpaged pull owner/tiny")
    assert status == 0
    assert "its whole context fits" in text
    assert "serve it: mlxpaged serve owner/tiny" in text
    status, text = terminal.run("mlxpaged ls")
    assert (status, text.count("\n")) == (0, 1)
    assert re.search(r"owner/tiny +3\.\d MB +text +mlx-lm +float32 +4096 +yes", text)
    for answer, expected in (("n", 1), ("y", 0)):
        before = terminal.start("mlxpaged rm owner/tiny")
        terminal.wait_for(r"Delete owner/tiny, 3\.\d MB\? \[y/N\]", since=before)
        terminal.type(answer)
        assert terminal.wait_prompt(before) == expected
    assert "no model is downloaded" in terminal.run("mlxpaged ls")[1]


def test_the_configuration_is_shown_and_can_be_used(terminal: Terminal) -> None:
    assert terminal.run("MLXPAGED_PORT=9000 mlxpaged config > mine.toml") == (0, "")
    assert terminal.run("mlxpaged --config mine.toml config | grep -c 'port = 9000  # mine.toml, line'") == (0, "1")


def test_bash_completes_the_words(terminal: Terminal) -> None:
    terminal.run("source <(mlxpaged completion bash)")
    before = len(terminal.text())
    terminal.type("mlxpaged comp", end="Tab")
    terminal.wait_for(r"mlxpaged completion\Z", since=before)
    terminal.key("C-c")
    before = len(terminal.text())
    terminal.type("mlxpaged run qwen3.6:27", end="Tab")
    terminal.wait_for(r"mlxpaged run qwen3\.6:27b\Z", since=before)
    terminal.key("C-c")
