"""The process of the `mlxpaged` command: `python -m mlxpaged` and the script."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import Any

from mlxpaged.process_memory import is_out_of_memory

INTERRUPTED = 130
"""The exit status is 128 plus the number of SIGINT, as in a shell."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def main() -> int:
    """Returns the exit status. Ctrl-C shows no traceback: neither during the imports, nor while Python ends. The same
    holds for a reader of standard output that leaves, as `head` does, for a full disk, and if an allocation fails or no
    thread can start: the status is then 1."""
    sys.unraisablehook = end_if_interrupted
    try:
        open_standard_streams()
        from mlxpaged import cli

        try:
            status = cli.main()
        finally:
            sys.stdout.flush()
    except BaseException as error:
        is_full = isinstance(error, OSError) and error.errno in FULL
        if is_full or isinstance(error, BrokenPipeError):
            if is_full:
                print(f"mlxpaged: {plain(error)}", file=sys.stderr)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the end of Python fails once more
            status = 1
        elif was_interrupted(error):
            status = INTERRUPTED
        elif is_out_of_memory(error):
            print(f"mlxpaged: there is too little memory: {plain(error)}", file=sys.stderr)
            status = 1
        else:
            raise
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


def plain(error: BaseException) -> str:
    """Returns the message of an error, without the number that the system has for it. It imports nothing: the disk may
    be full."""
    return str(getattr(error, "strerror", None) or error)


def open_standard_streams() -> None:
    """Standard streams that the caller has closed become /dev/null; Python has None for them. Characters that the
    terminal's encoding lacks are shown as "?"."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # by number: each takes the free one
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (until the process ends)
        elif name == "stdout" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def end_if_interrupted(unraisable: Any) -> None:
    """Replaces sys.unraisablehook. A KeyboardInterrupt inside of a __del__ would be printed and lost. Imports run many
    of these. While a command handles SIGINT itself, it can only be lost."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        os._exit(INTERRUPTED)


def was_interrupted(error: BaseException | None) -> bool:
    """Some C extensions turn a KeyboardInterrupt during their import into an ImportError. mlx does."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    raise SystemExit(main())
