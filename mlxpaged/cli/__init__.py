"""The `mlxpaged` command. Each subcommand is a module of this folder, and a line in addons.py.

These modules import no engine before they run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlxpaged import addons, mlx_settings
from mlxpaged.cli.config_file import ConfigFile, ConfigFileError
from mlxpaged.cli.parser import INTERRUPTED, Parser

COMMANDS = addons.ours("commands")
"""Our own. Those of other packages are looked for if a word is none of these."""

PARSERS: addons.Table[Any] = addons.Table("commands", Callable)

NO_ADDONS = "--no-addons"


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
    flags = list(takewhile("--".__ne__, argv))
    if NO_ADDONS in flags:  # anywhere: what the flags of the command may be can depend on it
        os.environ[addons.OFF] = "1"
        argv = [*(word for word in flags if word != NO_ADDONS), *argv[len(flags) :]]
    is_help = "-h" in flags or "--help" in flags
    config = ConfigFile() if is_help else ConfigFile.read(file)  # a broken file does not hide the help
    commands = COMMANDS if chosen in COMMANDS else addons.everything("commands")
    parser = make_parser([chosen], config, commands)
    parser.check_command(chosen, parser.commands)
    if not config.keys <= keys_of(parser) and not config.keys <= keys_of(make_parser(COMMANDS)):
        every = addons.everything("commands")
        config.check_keys(keys_of(make_parser(every, known=every)))
    args = parser.parse_args(argv)
    if getattr(args, "wired_memory", None) == "on":
        mlx_settings.keep_wired()
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


def make_parser(
    names: Iterable[str], config: ConfigFile | None = None, known: Mapping[str, addons.Named] = COMMANDS
) -> Parser:
    """The whole parser, of the commands that are known. Only those in `names` have their flags: the others are not
    imported. One of another package that cannot be used is left out."""
    parser = Parser(
        prog="mlxpaged",
        description="Serve language models to all programs of one Mac, and use them in the terminal.",
        config=config,
    )
    parser.add_argument("--version", action=Version, help="show the version and exit")
    parser.add_argument("--config", metavar="FILE", help="configuration file, before the command [MLXPAGED_CONFIG]")
    off = f"use no add-ons of other packages, with any command [{addons.OFF}]"
    parser.add_argument(NO_ADDONS, action="store_true", help=off)
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, named in known.items():
        if name not in names:
            commands.add_parser(name, help=named.summary)
        elif name in PARSERS:
            PARSERS[name](commands)
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
