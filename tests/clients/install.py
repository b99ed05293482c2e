"""Installs the programs of `make test-clients`, each into a folder of its own: their requirements contradict each
other's and ours. Arguments are names of programs; without arguments, all are installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv" / "clients"
TIME_LIMIT_S = 900.0

PYTHON = {
    "aider": "aider-chat==0.86.2",
    "anthropic": "anthropic==2.14.0",
    "dspy": "dspy==3.4.1",
    "guidellm": "guidellm==0.8.1",  # 1.1 GB; on Linux, torch from PyPI brings CUDA, 3 GB more
    "instructor": "instructor==1.17.0",
    "langchain": "langchain-openai==1.7.4 langchain-anthropic==1.7.10 langchain-ollama==1.1.0",
    "litellm": "litellm==1.110.2 mcp==2.3.0",
    "llama_index": "llama-index-llms-openai-like==0.8.1",
    "llm": "llm==0.36",
    "ollama": "ollama==0.6.3",
    "open_webui": "open-webui==0.12.4",  # 2.3 GB, without CUDA; Python 3.11 or 3.12
    "openai": "openai==3.57.0",
    "openai_agents": "openai-agents==0.24.0",
    "pydantic_ai": "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "smolagents": "smolagents[openai]==1.26.0",
}
NODE = {
    "anthropic_node": "@anthropic-ai/sdk@1.14.0",
    "claude_code": "@anthropic-ai/claude-code@2.1.332",
    "codex": "@openai/codex@0.171.0",
    "continue": "@continuedev/cli@1.5.47",
    "ollama_node": "ollama@0.6.4",
    "openai_node": "openai@7.59.0",
    "opencode": "opencode-ai@1.18.33",
    "vercel_ai": "ai@7.0.173 zod@4.6.7 "
    "@ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92 @ai-sdk/anthropic@4.0.105",
    "vercel_ai_6": "ai@6.0.325 zod@4.6.7 "
    "@ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.92 @ai-sdk/anthropic@3.0.140",
}


class NotInstalled(Exception):
    pass


def folder_of(name: str) -> Path:
    """Where a program is installed. Raises NotInstalled with the reason if it is not."""
    folder = FOLDER / name
    if (folder / "failed").exists():
        raise NotInstalled((folder / "failed").read_text())
    if not (folder / "installed").exists():
        raise NotInstalled(f"python tests/clients/install.py {name} installs it")
    return folder


def install(name: str) -> None:
    """Install a program, unless this version is there already. A failure is kept for folder_of."""
    packages = (PYTHON | NODE)[name]
    folder = FOLDER / name
    if (folder / "installed").exists() and (folder / "installed").read_text() == packages:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    print(f"{name}: {packages} ...", flush=True)
    try:
        for command in commands(name, folder, packages.split()):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", "") or str(error)
        reason = f"{packages} cannot be installed: {output[-500:]}"
        (folder / "failed").write_text(reason)
        print(reason)
    else:
        (folder / "installed").write_text(packages)
        print(f"{name}: installed in {time.monotonic() - start:.0f} s")


def commands(name: str, folder: Path, packages: list[str]) -> list[list[str]]:
    if name in NODE:
        return [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]]
    uv = shutil.which("uv")
    python = str(folder / "bin" / "python")
    if uv is not None:
        return [
            [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
            [uv, "pip", "install", "--quiet", "--python", python, *packages],
        ]
    return [
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", *packages],
    ]


if __name__ == "__main__":
    for name in sys.argv[1:] or PYTHON | NODE:
        install(name)
