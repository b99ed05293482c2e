"""The `mlxpaged` command. Each subcommand is a module of this folder, and a line in COMMANDS.

These modules import no engine before they run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlxpaged.cli.config_file import ConfigFile, ConfigFileError
from mlxpaged.cli.parser import INTERRUPTED, Parser

COMMANDS = {
    "serve": ("serve", "serve a model over the OpenAI, Anthropic and Ollama APIs"),
    "chat": ("chat.command", "chat with a model in the terminal"),
    "run": ("run_prompt", "print the answer to one prompt"),
    "ps": ("ps", "list the loaded models of the running server"),
    "stop": ("stop", "unload a model, or end the running server"),
    "launch": ("launch", "start a coding agent on the server"),
    "service": ("service.command", "start the server at login, and keep it running"),
    "pull": ("pull", "download a model, after saying whether it fits this machine"),
    "ls": ("ls", "list the downloaded models"),
    "rm": ("rm", "delete a downloaded model"),
    "cache": ("cache", "show or delete the prefixes that servers have stored on a disk"),
    "bench": ("bench.flags", "measure how fast this machine serves a model"),
    "doctor": ("doctor.flags", "check the attention kernels on this machine, or a model's tool calls"),
    "keys": ("keys.flags", "make, list and remove API keys"),
    "config": ("config", "show the configuration, and where each value comes from"),
    "completion": ("completion", "print a script that completes words in a shell"),
    "help": ("help", "show the help of a command"),
    "version": ("version", "show the version"),
}
"""Name -> (module, summary for the help)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status. argv: without the program's name; None: the process's arguments."""
    give_home()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # or it advises on stderr to install PyTorch
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except ConfigFileError as error:
        Parser(prog="mlxpaged").error(str(error))
    except KeyboardInterrupt:  # in most cases during the imports, which take seconds
        return INTERRUPTED


def give_home() -> None:
    """Without a home directory, which a process of an unknown user may lack, HOME becomes /, as in Docker."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = os.sep


def run(argv: Sequence[str]) -> int:
    """Import the module of the command and call it. Without a command, that is the help. Returns the exit status."""
    chosen, file = chosen_command(argv)
    if chosen is None:
        chosen, argv = "help", [*argv, "help"]
    is_help = any(word in ("-h", "--help") for word in takewhile("--".__ne__, argv))
    config = ConfigFile() if is_help else ConfigFile.read(file)  # a broken file does not hide the help
    parser = make_parser([chosen] if chosen in COMMANDS else [], config)
    parser.check_command(chosen, COMMANDS)
    if not config.keys <= keys_of(parser):
        config.check_keys(keys_of(make_parser(COMMANDS)))
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


def chosen_command(argv: Sequence[str]) -> tuple[str | None, str | None]:
    """The command, and the file that --config before it names, if any. The parsers of flags need both."""
    words, file = iter(argv), None
    for word in words:
        if word == "--config":
            file = next(words, None)
        elif word.startswith("--config="):
            file = word.partition("=")[2]
        elif not word.startswith("-"):
            return word, file
    return None, file


def make_parser(names: Iterable[str], config: ConfigFile | None = None) -> Parser:
    """The whole parser. Only the commands in `names` have their flags: the others are not imported."""
    parser = Parser(
        prog="mlxpaged",
        description="Serve language models to all programs of one Mac, and use them in the terminal.",
        config=config,
    )
    parser.add_argument("--version", action=Version, help="show the version and exit")
    parser.add_argument("--config", metavar="FILE", help="configuration file, before the command [MLXPAGED_CONFIG]")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        if name in names:
            importlib.import_module(f"mlxpaged.cli.{module}").add_parser(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser


def keys_of(parser: Parser) -> set[str]:
    """The keys that the configuration file may have."""
    return {setting.key for setting in parser.all_settings()}


class Version(argparse.Action):
    """Prints the version, which takes longer to find than the help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from mlxpaged import __version__

        print(f"mlxpaged {__version__}")
        parser.exit()
