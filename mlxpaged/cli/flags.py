"""Command-line flags that can also be set as MLXPAGED_* environment variables; a value on the command line wins.

A variable that is set to nothing counts as not set."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlxpaged.attention import parse_tuning
from mlxpaged.cache.block_pool import SUPPORTED_BLOCK_SIZES

RETUNE = "measure again which attention kernel is fastest, instead of taking what an earlier start found"
"""Help of a flag that commands share."""

TRUE, FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


def variable(flag: str) -> str:
    """--max-num-seqs is MLXPAGED_MAX_NUM_SEQS."""
    return "MLXPAGED_" + flag.lstrip("-").replace("-", "_").upper()


class Flags:
    """Adds flags to one parser. A value from the environment is checked like one from the command line."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def value(self, flag: str, kind: Callable[[str], Any], default: Any, help: str, **options: Any) -> None:
        # argparse passes a default through `type` if it is a string, as the environment's is.
        default = os.environ.get(variable(flag)) or default
        self._parser.add_argument(flag, type=kind, default=default, help=self._help(flag, help), **options)

    def values(self, flag: str, kind: Callable[[str], Any], help: str, **options: Any) -> None:
        """A flag that may be given several times; the variable has commas between the values."""
        texts = filter(None, (text.strip() for text in os.environ.get(variable(flag), "").split(",")))
        try:
            default = tuple(kind(text) for text in texts)
        except argparse.ArgumentTypeError as error:
            self._parser.error(f"{variable(flag)}: {error}")
        self._parser.add_argument(
            flag, action=Several, type=kind, default=default, help=self._help(flag, help), **options
        )

    def switch(self, flag: str, help: str) -> None:
        text = os.environ.get(variable(flag), "").strip().lower()
        if text not in TRUE | FALSE:
            self._parser.error(f"{variable(flag)} must be 1 or 0, got {text!r}")
        self._parser.add_argument(flag, action="store_true", default=text in TRUE, help=self._help(flag, help))

    @staticmethod
    def _help(flag: str, help: str) -> str:
        return f"{help} [{variable(flag)}]"


class Several(argparse.Action):
    """Values in the order given; the first one takes the place of what the environment says."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before: Sequence[Any] = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (values,) if before is self.default else (*before, values))


def positive_int(text: str) -> int:
    return _int_from(text, 1)


def natural_int(text: str) -> int:
    return _int_from(text, 0)


def positive_ints(text: str) -> tuple[int, ...]:
    """With commas between them."""
    return tuple(positive_int(number) for number in text.split(","))


def block_size(text: str) -> int:
    value = positive_int(text)
    if value not in SUPPORTED_BLOCK_SIZES:
        raise argparse.ArgumentTypeError(f"must be one of {SUPPORTED_BLOCK_SIZES}, got {value}")
    return value


def tuning(text: str) -> str:
    try:
        parse_tuning(text.lower())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text.lower()


def port(text: str) -> int:
    value = natural_int(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"must be at most 65535, got {value}")
    return value


def _int_from(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def seconds(text: str) -> float:
    return _float_below(text, float("inf"), "a number of seconds, at least 0")


def milliseconds(text: str) -> float:
    return _float_below(text, float("inf"), "a number of milliseconds, at least 0")


def positive_seconds(text: str) -> float:
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def share(text: str) -> float:
    return _float_below(text, 1, "a number of at least 0 and below 1")


def _float_below(text: str, limit: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < limit:  # not a number is not in any range
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
    return value


def directory(text: str) -> Path:
    if not text.strip() or not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"not a directory: {text!r}")
    return Path(text)


def output_file(text: str) -> str:
    """A file that can be written, or - for standard output. It is not touched yet."""
    if text != "-":
        path = Path(text)
        if not text.strip() or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"cannot be written: {text!r}")
    return text


def host_name(text: str) -> str:
    """As in a Host header, without the port. Addresses need not be named, so that [ and : are mistakes here."""
    if text != "*" and not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", text):
        raise argparse.ArgumentTypeError(f"not the name of a host, without scheme and port: {text!r}")
    return text.lower()


def origin(text: str) -> str:
    """As browsers send it: scheme://host or scheme://host:port."""
    if text not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", text):
        raise argparse.ArgumentTypeError(f"not an origin, such as http://localhost:3000 without a path: {text!r}")
    return text


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(address).is_loopback


def one_of(*choices: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text.lower() not in choices:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}, got {text!r}")
        return text.lower()

    return check


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse show the message of a ValueError, which it otherwise replaces by its own."""

    def check(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return check


def or_off(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """0 as well, for off: so that the command line can turn off what the environment turns on."""
    return lambda text: 0 if text.strip() == "0" else parse(text)
