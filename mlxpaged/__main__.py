"""`python -m mlxpaged` is `mlxpaged`."""

from mlxpaged.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
