"""The process of the `mlxpaged` command: `python -m mlxpaged` and the script."""

from __future__ import annotations

import signal

INTERRUPTED = 130
"""The exit status is 128 plus the number of SIGINT, as in a shell."""


def main() -> int:
    """Returns the exit status. Ctrl-C shows no traceback: neither during the imports, nor while Python ends."""
    try:
        from mlxpaged import cli

        status = cli.main()
    except BaseException as error:
        if not was_interrupted(error):
            raise
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


def was_interrupted(error: BaseException | None) -> bool:
    """Some C extensions turn a KeyboardInterrupt during their import into an ImportError. mlx does."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    raise SystemExit(main())
