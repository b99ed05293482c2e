"""`mlxpaged config [COMMAND]` prints the configuration of a command, and where each value comes from."""

from __future__ import annotations

import argparse
import enum
import json
import re
from typing import Any

from mlxpaged.cli.config_file import Given, candidates
from mlxpaged.cli.flags import TRUE
from mlxpaged.cli.parser import Parser, Setting

SECRETS = {"api-key"}
"""The output may go into an issue."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "config",
        description="Print the configuration of a command as TOML, which can be used as a configuration file. The "
        "comment of a line says where its value comes from: a variable, a line of the file, or the default.",
    )
    parser.add_argument("of", nargs="?", default="serve", metavar="COMMAND", help="a command (default serve)")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from mlxpaged.cli import COMMANDS, make_parser  # they import this module

    parser: Parser = args.parser
    parser.check_command(args.of, COMMANDS)
    chosen = make_parser([args.of], parser.config).commands[args.of]
    check(chosen)
    file = parser.config.path
    print(f"# mlxpaged {args.of}; file: {file or f'none, it would be {candidates()[0]}'}")
    settings = {setting.key: setting for setting in chosen.all_settings()}  # each once
    for setting in settings.values():
        print(line(setting))
    return 0


def check(parser: Parser) -> None:
    """End with an error if a variable or the file gives a value that the command would refuse."""
    for action in parser.actions:
        if isinstance(action.default, Given) and callable(action.type):
            try:
                action.type(action.default)
            except argparse.ArgumentTypeError as error:
                parser.error(f"{'/'.join(action.option_strings)}: {error}")
    for command in parser.commands.values():
        check(command)


def line(setting: Setting) -> str:
    given, default = setting.given, setting.default
    if setting.key in SECRETS and isinstance(given, Given):
        return f"# {setting.key}: set, and not shown  # {given.origin}"
    if isinstance(given, list):
        return f"{setting.key} = {json.dumps(given, ensure_ascii=False)}  # {given[0].origin}"
    if given is not None:
        value: Any = given.strip().lower() in TRUE if default is False else given
        return f"{setting.key} = {toml(value)}  # {given.origin}"
    if default is None:
        return f"# {setting.key}: {setting.otherwise or 'not set'} (default)"
    return f"{setting.key} = {toml(default)}  # default"


def toml(value: Any) -> str:
    """A number as a number, also if it is the text of one. A text such as "1.10" would come back as 1.1."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = value.name.lower() if isinstance(value, enum.Enum) else str(value)
    is_number = re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", text) and str(json.loads(text)) == text
    return text if is_number else json.dumps(text, ensure_ascii=False)
