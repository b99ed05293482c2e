"""`mlxpaged completion`, in the real shells: bash everywhere, zsh and fish if they are installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlxpaged.cli import COMMANDS
from mlxpaged.cli.completion import SHELLS, completions
from tests.cli.helpers import Result, environment


def completed(*words: str) -> list[str]:
    return [word for word, _ in completions(words)]


def test_commands_flags_values_and_models_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--someone--my--model").mkdir()
    assert completed("") == list(COMMANDS)
    assert completed("serv") == ["serve", "service"]
    assert completed("nonsense", "x") == []
    assert completed("--ver") == ["--version"]
    assert completed("serve", "--max-num-") == ["--max-num-seqs", "--max-num-batched-tokens"]
    assert completed("serve", "--kv-cache-dtype", "i") == ["int8", "int4"]
    assert completed("serve", "--default-priority", "h") == ["high"]
    assert completed("serve", "--strict", "some") == ["someone/my--model"]
    assert completed("--config", "x", "pull", "qwen3.6:") == ["qwen3.6:27b", "qwen3.6:35b"]
    assert completed("rm", "someone/") == ["someone/my--model"]
    assert completed("bench", "--model", "dem") == ["demo", "demo-vision"]
    assert completed("serve", "--api-keys", "x") == []
    assert completed("keys", "") == ["add", "list", "remove"]
    assert completed("keys", "add", "name", "--tok") == ["--token-limit"]
    assert completed("config", "ben") == ["bench"]
    assert completed("completion", "") == list(SHELLS)


def test_a_shell_that_is_not_known_is_refused(run: Callable[..., Result]) -> None:
    assert run("completion", "tcsh").status == 2


BASH = """
complete_line() {
    COMP_LINE="$1" COMP_POINT=${#1}
    _mlxpaged
    printf '%s\\n' "${COMPREPLY[@]}"
}
"""
ZSH = """
compdef() { :; }
_describe() { print -rl -- "${(@P)2}"; }
_files() { print -r -- files; }
"""


@pytest.mark.parametrize(
    ("shell", "before", "call", "found", "nothing"),
    [
        ("bash", BASH, 'complete_line "mlxpaged {}"', ["27b", "35b"], [""]),
        (
            "zsh",
            ZSH,
            "words=(mlxpaged {}); CURRENT=$#words; _mlxpaged",
            [r"qwen3.6\:27b:mlx", r"qwen3.6\:35b:mlx"],
            ["files"],
        ),
        ("fish", "", 'complete -C "mlxpaged {}"', ["qwen3.6:27b", "qwen3.6:35b"], ["/etc/"]),
    ],
)
def test_a_real_shell_completes_a_model_and_a_file(
    tmp_path: Path, shell: str, before: str, call: str, found: list[str], nothing: list[str]
) -> None:
    """bash replaces only what follows a colon."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command = tmp_path / "mlxpaged"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mlxpaged "$@"\n')
    command.chmod(0o755)
    load = "mlxpaged completion fish | source" if shell == "fish" else f"source <(mlxpaged completion {shell})"
    models, files = call.format("pull qwen3.6:"), call.format("serve --api-keys /et")
    script = "\n".join((before, load, models, "echo ,,,", files))
    env = environment({"HOME": str(tmp_path)})
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    flags = {"zsh": ["-f"], "fish": ["--no-config"], "bash": ["--norc"]}[shell]
    result = subprocess.run(
        [shell, *flags, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    first, _, second = result.stdout.partition(",,,\n")
    lines = first.splitlines()
    assert len(lines) == len(found), result
    assert all(line.startswith(start) for line, start in zip(lines, found, strict=True)), lines
    assert second.splitlines() == nothing
    assert result.stderr == ""
