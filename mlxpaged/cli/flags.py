"""Defines flags that MLXPAGED_* variables and the configuration file can set too.

The command line wins, then the variable, then the file. An empty variable counts as not set.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
import os
import re
import sys
from collections.abc import Callable, Container, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from mlxpaged.cli.config_file import Given
from mlxpaged.cli.parser import Parser, Setting
from mlxpaged.models.sources.short_names import without_address

TRUE, FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}

Kind = Callable[[str], Any]
Config = TypeVar("Config")


def variable(flag: str) -> str:
    """Returns the variable of a flag: MLXPAGED_MAX_NUM_SEQS for --max-num-seqs."""
    return "MLXPAGED_" + flag.lstrip("-").replace("-", "_").upper()


def key_of(flag: str) -> str:
    """Returns the key of a flag in the configuration file: max-num-seqs for --max-num-seqs."""
    return flag.lstrip("-")


class Flags:
    """Adds flags to a parser. The help shows the default, or `otherwise` if the default is None."""

    def __init__(self, parser: Parser, title: str | None = None, defaults: Any = None) -> None:
        self._parser = parser
        self._group = parser if title is None else parser.add_argument_group(title)
        self._defaults = defaults

    def group(self, title: str, defaults: Any = None) -> Flags:
        """Returns a group, whose flags the help shows together. defaults: the configuration whose fields they set."""
        return Flags(self._parser, title, defaults)

    def model(self, default: str, help: str) -> None:
        """Add the model's name, as MODEL or as --model. Of several in the variable or the file, it is the first one."""
        either = self._parser.add_mutually_exclusive_group()
        either.add_argument("model", nargs="?", type=model_name, default=argparse.SUPPRESS, metavar="MODEL", help=help)
        given = next(iter(self._texts("--model")), None)
        self._parser.settings.append(Setting("model", default, "", given))
        first = default if given is None else name_and_path(given)[1]
        same = f"the same as MODEL (default {default}) [{variable('model')}]"
        either.add_argument("--model", type=model_name, default=first, metavar="MODEL", help=same)

    def models(self, default: str, help: str, more: str) -> None:
        """Add the names of models: one as MODEL, and further ones as --model. `models_of` collects them."""
        self._parser.add_argument("model", nargs="?", type=model_name, metavar="MODEL", help=help)
        self.values("--model", model_name, f"a further MODEL, or the first one (default {default}); {more}", "models")
        self._parser.settings[-1] = self._parser.settings[-1]._replace(default=default)
        self._parser.set_defaults(default_model=default)

    def field(self, flag: str, kind: Kind, help: str, otherwise: str = "", dest: str | None = None) -> None:
        """Add a flag that sets a field of the configuration, by default the one of the same name."""
        dest = dest or flag.lstrip("-").replace("-", "_")
        self.value(flag, kind, getattr(self._defaults, dest), help, otherwise, dest)

    def value(
        self,
        flag: str,
        kind: Kind,
        default: Any,
        help: str,
        otherwise: str = "",
        dest: str | None = None,
        without_value: str | None = None,
    ) -> None:
        """Add a flag with a value. without_value: the value if the command line has the flag only."""
        if default is not None:
            help += f" (default {default.name.lower() if isinstance(default, enum.Enum) else default})"
        elif otherwise:
            help += f" (default: {otherwise})"
        # argparse applies `type` to a default that is a string, such as the variable's.
        options: dict[str, Any] = {} if without_value is None else {"nargs": "?", "const": without_value}
        self._add(flag, help, kind, default=self._setting(flag, default, otherwise), dest=dest, **options)

    def values(self, flag: str, kind: Kind, help: str, dest: str, separator: str = ",") -> None:
        """Add a flag that can be repeated. separator: between the values in its variable. The file has a list."""
        given = self._texts(flag, separator)
        self._parser.settings.append(Setting(key_of(flag), None, "none", given or None))
        try:
            default = tuple(map(located(kind), given))
        except argparse.ArgumentTypeError as error:
            self._parser.error(f"{flag}: {error}")
        self._add(flag, f"{help}; can be repeated", kind, action=Append, default=default, dest=dest)

    def _texts(self, flag: str, separator: str = ",") -> list[Given]:
        """The texts that the variable or the file gives for a flag that can be repeated."""
        texts = list(filter(None, (text.strip() for text in os.environ.get(variable(flag), "").split(separator))))
        return [Given(text, variable(flag)) for text in texts] or self._parser.config.values(key_of(flag)) or []

    def _add(self, flag: str, help: str, kind: Kind, **options: Any) -> None:
        if kind in CHOICES:
            self._parser.choices[flag] = CHOICES[kind]
        metavar = METAVARS.get(kind, flag.rsplit("-", 1)[1].upper())
        self._group.add_argument(
            flag, metavar=metavar, help=f"{help} [{variable(flag)}]", type=located(kind), **options
        )

    def _setting(self, flag: str, default: Any, otherwise: str = "") -> Any:
        """The text that the variable or the file gives; else the default."""
        text = os.environ.get(variable(flag))
        given = Given(text, variable(flag)) if text else self._parser.config.value(key_of(flag))
        self._parser.settings.append(Setting(key_of(flag), default, otherwise, given))
        return default if given is None else given

    def switch(self, flag: str, help: str) -> None:
        text = os.environ.get(variable(flag), "").strip().lower()
        if text not in TRUE | FALSE:
            self._parser.error(f"{variable(flag)} must be 1 or 0, got {text!r}")
        is_set = bool(os.environ.get(variable(flag)))
        given = Given(text, variable(flag)) if is_set else self._parser.config.switch(key_of(flag))
        self._parser.settings.append(Setting(key_of(flag), False, "", given))
        help = f"{help} [{variable(flag)}]"
        self._group.add_argument(flag, action="store_true", default=(given or text) in TRUE, help=help)


class Append(argparse.Action):
    """Collects values in the order given; the first one replaces the environment's."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before: Sequence[Any] = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (values,) if before is self.default else (*before, values))


def models_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The models of the command line, or else those of the variable or the file; MODEL is the first one."""
    if args.model is None:
        return args.models or (args.default_model,)
    return (args.model, *(() if args.models is args.parser.get_default("models") else args.models))


def name_and_path(model: str) -> tuple[str, str]:
    """A directory that exists may have an equals sign in its name. An address of the hub becomes the repository."""
    model = without_address(model)
    name, equals, path = model.partition("=")
    return (model, model) if not (name and equals and path) or os.path.exists(model) else (name, without_address(path))


def from_flags(config: type[Config], args: argparse.Namespace, **fields: Any) -> Config:
    """Makes a configuration of `fields`, and of the flags whose `dest` is the name of a field. Raises ValueError."""
    names = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    return config(**{name: getattr(args, name) for name in names if hasattr(args, name)} | fields)


def located(kind: Kind) -> Kind:
    """Returns a parser whose error says which variable or which line of the file gives the value."""

    def parse(text: str) -> Any:
        try:
            return kind(text)
        except argparse.ArgumentTypeError as error:
            if isinstance(text, Given):
                raise argparse.ArgumentTypeError(f"{error} ({text.origin})") from None
            raise

    return parse


def checked(parse: Kind) -> Kind:
    """Returns a parser that shows the message of a ValueError. argparse would replace it by its own."""

    def check(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return check


def fitting(kind: Kind, what: str, fits: Callable[[Any], object]) -> Kind:
    """Returns a parser of values of this kind. what: names the values that fit, for the error message."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan  # in no range
        if not fits(value):
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
        return value

    return parse


CHOICES: dict[Kind, tuple[str, ...]] = {}
"""The values of the kinds that `one_of` makes, for the completion in shells."""


def one_of(*choices: str, more: Callable[[], Container[str]] = tuple) -> Kind:
    """more: finds further choices, if the value is none of these."""
    kind = fitting(str.lower, f"one of {', '.join(choices)}", lambda value: value in choices or value in more())
    CHOICES[kind] = choices
    return kind


def parse_size(text: str) -> int:
    """Bytes of "512MB", "8GB", "1.5GiB" or a plain number of bytes. KB is 1,000 bytes, KiB is 1,024.

    Raises ValueError for other texts.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B)?\s*", text.upper())
    size = 0
    if match is not None:
        unit = 1024 if match[3] else 1000
        size = int(Decimal(match[1]) * unit ** (" KMGT".index(match[2] or " ")))
    if not 1 <= size <= sys.maxsize:
        raise ValueError(f"not a memory size: {text!r}; write for example 512MB or 8GB")
    return size


def or_zero(parse: Kind, zero: Any) -> Kind:
    """Returns a parser that also takes 0, which means `zero`. So the command line can turn off what a variable sets."""
    return lambda text: zero if text.strip() == "0" else parse(text)


def duration(text: str) -> float:
    """Seconds of "90", "90s", "10m", "1.5h" or "1d"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", text.lower())
    found = float(match[1]) * UNIT_SECONDS[match[2] or "s"] if match else 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"must be a time such as 90s, 10m or 1h, got {text!r}")
    return found


UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

model_name = fitting(str, "the name of a model", str.strip)
positive_int = fitting(int, "a whole number of at least 1", lambda value: value >= 1)
natural_int = fitting(int, "a whole number of at least 0", lambda value: value >= 0)
port = fitting(int, "a whole number from 0 to 65535", range(65536).__contains__)
fraction = fitting(float, "a number of at least 0 and below 1", lambda value: 0 <= value < 1)
duty_cycle = fitting(float, "a number of 0.1 to 1", lambda value: 0.1 <= value <= 1)
size = checked(parse_size)
milliseconds = fitting(float, "a number of milliseconds, at least 0", lambda value: 0 <= value < math.inf)
seconds = fitting(float, "a number of seconds, at least 0", lambda value: 0 <= value < math.inf)
positive_seconds = fitting(float, "a positive number of seconds", lambda value: 0 < value < math.inf)


def positive_ints(text: str) -> tuple[int, ...]:
    """Parses numbers with commas between them."""
    return tuple(positive_int(number) for number in text.split(","))


def path(text: str) -> Path:
    """~ is the home directory: shells put it in for a word of its own, but not for a variable or the file. Without a
    name, it would be the working directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must be a path, got {text!r}")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"there is no such home directory: {text!r}") from None


def file(text: str) -> Path:
    if not path(text).is_file():
        raise argparse.ArgumentTypeError(f"not a file: {text!r}")
    return path(text)


def directory(text: str) -> Path:
    if not path(text).is_dir():
        raise argparse.ArgumentTypeError(f"not a directory: {text!r}")
    return path(text)


def output_file(text: str) -> str:
    """Checks that the file can be written, without creating it. - is standard output."""
    if text == "-":
        return text
    file = path(text)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot be written: {text!r}")
    return str(file)


# HOST is a name as in a Host header, without the port. Addresses are always allowed, so [ and : are mistakes here.
HOST, ORIGIN = re.compile(r"\*|[a-z0-9_-]+(\.[a-z0-9_-]+)*"), re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")
host_name = fitting(str.lower, "the name of a host, without scheme and port", HOST.fullmatch)
IMAGE_HOST = re.compile(r"([a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?", re.IGNORECASE)
image_host = fitting(str, "the name or address of a host, with or without a port", IMAGE_HOST.fullmatch)
origin = fitting(str, "an origin, such as http://localhost:3000, without a path", ORIGIN.fullmatch)

METAVARS: dict[Kind, str] = {positive_int: "N", natural_int: "N", positive_ints: "N[,N...]", output_file: "FILE"}
"""The help shows these names of values. Other flags show the last word of their own name."""
