"""mlxpaged beside other MLX servers, on the same model, machine and requests: python benchmarks/compare.py --help

Starts from a bare Python: makes an environment for itself, runs in it again, and does the rest there.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from comparison.environments import DRIVER_PACKAGES, SetupError, make_environment
from comparison.options import parse


def interrupt_on_signals() -> None:
    """Turn the signals that end this process into KeyboardInterrupt, so that it ends the servers it started. They are
    in sessions of their own and get neither Ctrl-C nor SIGHUP. Under nohup, SIGHUP stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - `make bench` takes any python3
        sys.exit("compare.py: Python 3.10 or newer is needed")
    options = parse(sys.argv[1:])
    try:
        interrupt_on_signals()
        python = make_environment("driver", DRIVER_PACKAGES, options.cache)
        if Path(sys.prefix).resolve() != python.parent.parent.resolve():
            os.execv(python, [str(python), *sys.argv])
        from comparison.agent import compare_agent
        from comparison.real import compare_real
        from comparison.run import compare, print_saved

        if options.agent:
            compare_agent(options)
        elif options.gguf is not None:
            compare_real(options)
        elif options.markdown is not None:
            print_saved(options.markdown)
        else:
            compare(options)
    except SetupError as error:
        sys.exit(f"compare.py: {error}")
    except KeyboardInterrupt:
        sys.exit("compare.py: interrupted")


if __name__ == "__main__":
    main()
