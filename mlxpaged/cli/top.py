"""`mlxpaged top` shows what the running server does: requests, tokens per second, blocks, memory, writes to a disk."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mlxpaged.cli.banner import megabytes
from mlxpaged.cli.client import Client, ServerError
from mlxpaged.cli.connection import add_server_flags, running
from mlxpaged.cli.ps import ABSENT, Status, writes
from mlxpaged.cli.status_line import width
from mlxpaged.cli.visible import visible

PERIOD_SECONDS = 1.0
BEGIN, END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The alternate screen, without a cursor (xterm's private modes 1049 and 25)."""
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"

TITLES = ("MODEL", "RUN", "WAIT", "OUTPUT/S", "PROMPT/S", "KV USED", "CACHED", "FREE", "MEMORY")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        description="Show what the running server does, each second: requests, tokens per second, blocks, memory, and "
        "bytes written to a disk. q or Ctrl-C ends it. With --api-keys, the server wants an admin key.",
        epilog="Exit status: 1 if no server runs.",
    )
    once = "print one frame, for the second after the start; so does an output that is no terminal"
    parser.add_argument("--once", action="store_true", help=once)
    add_server_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        client = running(args)
        first = Sample.of(client)
        if args.once or not sys.stdout.isatty():
            time.sleep(PERIOD_SECONDS)
            print("\n".join(frame(Sample.of(client), first, width(sys.stdout))))
            return 0
        with screen() as keys:
            watch(client, first, keys)
    except ServerError as error:  # the screen is the user's again
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    return 0


def watch(client: Client, before: Sample, keys: Keys) -> None:
    """Draw a frame each second, until q is typed. Raises ServerError."""
    latest = before
    while True:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        shown = frame(latest, before, columns)[: max(1, lines - 1)]
        drawn = "".join(f"{line}{REST_OF_LINE}\n" for line in shown)
        sys.stdout.write(f"{HOME}{drawn}{REST_OF_SCREEN}")
        sys.stdout.flush()
        if keys.wait("q", PERIOD_SECONDS):
            return
        before, latest = latest, Sample.of(client)


class Keys:
    """What is typed. is_terminal: whether standard input is one; otherwise nothing is read."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal

    def wait(self, key: str, seconds: float) -> bool:
        """Returns True as soon as the key is typed, False after so many seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._is_terminal:
                time.sleep(left)
            elif select.select([sys.stdin], [], [], left)[0]:
                typed = os.read(sys.stdin.fileno(), 1024)
                if key.encode() in typed:
                    return True
                if not typed:  # it was closed
                    self._is_terminal = False
        return False


@contextlib.contextmanager
def screen() -> Iterator[Keys]:
    """Yields the keys. The terminal is as it was after the context, also if a signal ends it. Ctrl-C interrupts as
    ever."""
    is_terminal = sys.stdin.isatty()
    before = termios.tcgetattr(sys.stdin) if is_terminal else None
    handlers = {each: signal.signal(each, leave) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        if is_terminal:
            tty.setcbreak(sys.stdin)
        sys.stdout.write(BEGIN)
        yield Keys(is_terminal)
    finally:
        with contextlib.suppress(OSError, termios.error):  # the terminal was closed
            sys.stdout.write(END)
            sys.stdout.flush()
            if before is not None:
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def leave(number: int, _: object) -> None:
    """The handler of a signal that ends the process. Raises SystemExit, with the status that a shell gives it."""
    raise SystemExit(128 + number)


@dataclass(frozen=True)
class Sample:
    """A status, and when it came, in seconds of a clock of the process."""

    url: str
    status: Status
    time: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, client: Client) -> Sample:
        """Raises ServerError."""
        return cls(client.url, client.get("/v1/status"))

    def model(self, name: str) -> Status:
        return next((each for each in self.status["models"] if each["id"] == name), {})


def frame(latest: Sample, before: Sample, columns: int) -> list[str]:
    """Returns the lines of a frame, none longer than `columns`. before: the sample that rates are counted from."""
    status = latest.status
    state = status.get("progress") or status["state"]
    head = [f"{latest.url}  {state}", f"up {duration(status['uptime_seconds'])}"]
    if (memory := status.get("resident_bytes")) is not None:
        head.append(f"process {megabytes(memory)}")
    parts = [*head, *writes(status)]
    rows = [TITLES, *(row(model, before.model(model["id"]), latest.time - before.time) for model in status["models"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if len(rows) == 1:
        table = ["no model is loaded"]
    elif sum(widths) + 2 * (len(widths) - 1) <= columns:
        table = [aligned(each, widths) for each in rows]
    else:
        table = [line for each in rows[1:] for line in card(each)]
    return [visible(line)[:columns] for line in (*filled(parts, columns), "", *table)]


def row(model: Status, before: Status, seconds: float) -> tuple[str, ...]:
    """Returns the cells of a model: ABSENT for what is not known. before: the same one `seconds` earlier, or {}."""
    totals = [str(model[name]["total"]) if name in model else ABSENT for name in ("running", "waiting")]
    now, then = model.get("tokens"), before.get("tokens")
    rates = [rate(now, then, name, seconds) for name in ("output", "prefilled")]
    blocks = [str(model["blocks"][name]) if "blocks" in model else ABSENT for name in ("used", "cached", "free")]
    memory = model.get("memory_bytes")
    return model["id"], *totals, *rates, *blocks, ABSENT if memory is None else megabytes(memory)


def rate(now: Status | None, then: Status | None, name: str, seconds: float) -> str:
    """Returns tokens per second, ABSENT if the model was loaded again or makes none."""
    if now is None or then is None or now[name] < then[name] or seconds <= 0:
        return ABSENT
    return f"{(now[name] - then[name]) / seconds:.1f}"


def aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    """Names are on the left of their column, numbers on the right."""
    justified = [cell.rjust(size) for cell, size in zip(cells, widths, strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *justified[1:]])


def card(cells: tuple[str, ...]) -> list[str]:
    """Returns the lines of a model on a narrow terminal."""
    name, num_running, num_waiting, output, prompt, used, cached, free, memory = cells
    return [
        f"{name}  {memory}",
        f"  {num_running} running, {num_waiting} waiting",
        f"  tokens/s: {output} out, {prompt} prompt",
        f"  KV: {used} used, {cached} cached, {free} free",
    ]


def filled(parts: list[str], columns: int) -> Iterator[str]:
    """Yields lines with as many of the parts as fit."""
    line = ""
    for part in parts:
        if line and len(line) + 2 + len(part) > columns:
            yield line
            line = ""
        line = f"{line}  {part}" if line else part
    yield line


def duration(seconds: float) -> str:
    """Returns for example "2 h 5 min"."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = ((days, "d"), (hours, "h"), (minutes, "min"), (left, "s"))
    first = next((i for i, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2])
