"""`mlxpaged bench`: how fast this machine serves a model, one request at a time and many at once."""

from mlxpaged.cli.bench.command import add_parser

__all__ = ["add_parser"]
