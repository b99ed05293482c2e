"""The `mlxpaged` command. Each subcommand is a module of this folder, and a line in COMMANDS."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence

from mlxpaged import __version__

COMMANDS = {
    "serve": ("serve", "serve a model over the OpenAI, Anthropic and Ollama APIs"),
    "chat": ("chat.command", "chat with a model in the terminal"),
    "run": ("run_prompt", "print the answer to one prompt"),
    "ps": ("ps", "list the loaded models of the running server"),
    "stop": ("stop", "unload a model, or end the running server"),
    "launch": ("launch", "start a coding agent on the server"),
    "service": ("service.command", "start the server at login, and keep it running"),
    "bench": ("bench.command", "measure how fast this machine serves a model"),
    "doctor": ("doctor.command", "check and measure the attention kernels on this machine"),
    "keys": ("keys", "make, list and remove API keys"),
}
"""Name -> (module, summary for the help)."""

INTERRUPTED = 130
"""The exit status is 128 plus the number of SIGINT, as in a shell."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status. argv: without the program's name; None: the process's arguments."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # in most cases during the imports, which take seconds
        return INTERRUPTED


def run(argv: Sequence[str]) -> int:
    """Import the module of the command and call it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="mlxpaged", description="One model, many clients, one Mac.")
    parser.add_argument("--version", action="version", version=f"mlxpaged {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    chosen = next((word for word in argv if word in COMMANDS), None)
    for name, (module, summary) in COMMANDS.items():
        if name == chosen:  # only this one is imported: the engine takes two seconds
            gc.disable()  # imports make many objects and hardly any garbage: collections took 0.2 s of the two
            try:
                importlib.import_module(f"mlxpaged.cli.{module}").add_parser(commands)
            finally:
                gc.enable()
        else:
            commands.add_parser(name, help=summary)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status
