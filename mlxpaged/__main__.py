"""The process of the `mlxpaged` command: `python -m mlxpaged` and the script."""

import signal

INTERRUPTED = 130
"""The exit status is 128 plus the number of SIGINT, as in a shell."""


def main() -> int:
    """Returns the exit status. Ctrl-C shows no traceback: neither during the imports, nor while Python ends."""
    try:
        from mlxpaged import cli

        status = cli.main()
    except KeyboardInterrupt:
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
