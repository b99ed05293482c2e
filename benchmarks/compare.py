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


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - `make bench` takes whatever python3 there is
        sys.exit("compare.py: Python 3.10 or newer is needed")
    options = parse(sys.argv[1:])
    try:
        python = make_environment("driver", DRIVER_PACKAGES, options.cache)
        if Path(sys.prefix).resolve() != python.parent.parent.resolve():
            os.execv(python, [str(python), *sys.argv])
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # its end is the end of the servers that it started
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from comparison.run import compare, print_saved

        if options.markdown is not None:
            print_saved(options.markdown)
        else:
            compare(options)
    except SetupError as error:
        sys.exit(f"compare.py: {error}")
    except KeyboardInterrupt:
        sys.exit("compare.py: interrupted")


if __name__ == "__main__":
    main()
