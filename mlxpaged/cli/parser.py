"""The parser of all commands: one error is one line, a wrong word names the one that was meant, and heavy imports wait.

"Heavy" is the engine, mlx or transformers: they take seconds, and `--help` does without them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from mlxpaged.cli.config_file import ConfigFile, Given
from mlxpaged.cli.guesses import meant_command, meant_flag

INTERRUPTED = 130
"""The exit status is 128 plus the number of SIGINT, as in a shell."""


FLAG = re.compile(r"--[^\s]+|-[A-Za-z]+")
"""Words that can only be flags: no file, number or prompt."""


def is_flag(word: str) -> bool:
    return FLAG.fullmatch(word.partition("=")[0]) is not None


class Setting(NamedTuple):
    """A flag that variables and the configuration file can set too. given: by one of these, if any; a list if the flag
    can be repeated. otherwise: says what the default is if it is None."""

    key: str
    default: Any
    otherwise: str
    given: Given | list[Given] | None


class Parser(argparse.ArgumentParser):
    """config: what Flags takes values from. choices: the values of flags that take one of a few."""

    def __init__(self, config: ConfigFile | None = None, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.config = config or ConfigFile()
        self.settings: list[Setting] = []
        self.choices: dict[str, tuple[str, ...]] = {}

    def add_subparsers(self, **options: Any) -> Any:
        parser_class: Any = functools.partial(Parser, self.config)
        return super().add_subparsers(parser_class=parser_class, **options)

    @property
    def actions(self) -> list[argparse.Action]:
        """The arguments, in the order in which they were added."""
        return self._actions

    @property
    def commands(self) -> dict[str, Parser]:
        """The parsers of its commands, by name. Empty if it has none."""
        found = [action.choices for action in self.actions if isinstance(action.choices, Mapping)]
        return dict(found[0]) if found else {}

    @property
    def flags(self) -> list[str]:
        return [name for action in self.actions for name in action.option_strings]

    def all_settings(self) -> list[Setting]:
        """Its own, and those of its commands."""
        return [*self.settings, *(each for parser in self.commands.values() for each in parser.all_settings())]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        takes_rest = any(action.nargs in (argparse.REMAINDER, argparse.PARSER) for action in self.actions)
        if args is not None and not takes_rest:  # argparse would complain first of what follows from a wrong flag
            self._check_flags(args)
        if args and self.commands and not args[0].startswith("-"):
            self.check_command(args[0], self.commands)
        namespace, unknown = super().parse_known_args(args, namespace)
        self._check_flags(unknown)
        if unknown:
            self.error(f"unexpected {unknown[0]!r}")
        return namespace, unknown

    def check_command(self, word: str, known: Iterable[str]) -> None:
        """End with an error if the word is not among the known commands."""
        if word not in known:
            self.error(f"there is no command {word!r}{meant_command(word, known)}")

    def _check_flags(self, words: list[str]) -> None:
        for word in words:
            flag = word.partition("=")[0]
            if word == "--":
                return
            if is_flag(word) and flag not in self.flags:
                self.error(f"there is no flag {flag}{meant_flag(flag, self.flags)}")

    def error(self, message: str) -> NoReturn:
        """One line, without the usage, which would hide it."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


@contextlib.contextmanager
def heavy_imports() -> Iterator[None]:
    """Turns garbage collection off during imports of the engine: they make many objects and hardly any garbage.
    Collections took 0.2 s of the two.

    A command does these imports when it runs, so that `--help` does not wait for them. Ctrl-C ends the process at once:
    pydantic's extension panics, and shows it, if a KeyboardInterrupt meets it during its import."""
    gc.disable()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        gc.enable()
