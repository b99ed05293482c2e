"""Lines of the log, and text of a server on the terminal: nothing in them can pass for something else."""

from __future__ import annotations

import logging
import sys

import pytest

from mlxpaged.cli.client import ServerError
from mlxpaged.cli.logs import LineFormatter

FORGED = "m\n2026-01-01 00:00:00 INFO mlxpaged: \x1b[2Jall is well\u2028\x9b"


def line(message: str, *args: object, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("a.name", logging.INFO, "", 0, message, args, info)
    return LineFormatter("%(levelname)s %(request)s%(message)s").format(record)


def test_a_name_cannot_forge_a_line() -> None:
    assert line("loading %s", FORGED) == (
        r"INFO loading m\x0a2026-01-01 00:00:00 INFO mlxpaged: \x1b[2Jall is well\x2028\x9b"
    )


def test_the_lines_of_a_traceback_are_indented() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        text = line("it failed", error=error)
    first, *others = text.split("\n")
    assert first == "INFO it failed"
    assert others
    assert all(other.startswith("  ") for other in others)
    assert not {"\x1b", "\x9b", "\u2028"} & set(text)


def test_what_a_server_says_cannot_change_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print(ServerError("\x1b[2Jno\x07 model"), file=sys.stderr)
    assert capsys.readouterr().err == "[2Jno model\n"
