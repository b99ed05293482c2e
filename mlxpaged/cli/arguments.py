"""What argparse does not do by itself: words after flags, and flags for another program after `--`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxpaged.cli.parser import Parser, is_flag


def put_flags_first(parser: Parser) -> None:
    """Make `MODEL --max-tokens 5 PROMPT` work: argparse has found an empty PROMPT by the time it comes to the flag."""

    def ordered(args: list[str]) -> list[str]:
        takes_value = {name for each in parser.actions if each.nargs is None for name in each.option_strings}
        flags, words, rest = list[str](), list[str](), iter(args)
        for word in rest:
            if word == "--":
                words += [word, *rest]
            elif is_flag(word):
                flags.append(word)
                if word in takes_value:
                    value = next(rest, None)
                    if value is None:
                        return args  # argparse has the error
                    flags.append(value)
            else:
                words.append(word)
        return flags + words

    change_args(parser, ordered)


def keep_after_dashes(parser: Parser, dest: str) -> None:
    """Put what is after `--` into a list. argparse would take it for the arguments before."""

    def before_dashes(args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        parser.set_defaults(**{dest: args[end + 1 :]})
        return args[:end]

    change_args(parser, before_dashes)


def change_args(parser: Parser, changed: Callable[[list[str]], list[str]]) -> None:
    """The parser of the commands calls this method of a command's parser, with a list."""
    parse = parser.parse_known_args

    def parse_known_args(args: list[str], *others: Any, **options: Any) -> Any:
        return parse(changed(args), *others, **options)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]
