"""`mlxpaged stop MODEL` unloads a model of the running server; `mlxpaged stop` ends the server."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from typing import Any

from mlxpaged.cli.client import Client, ServerError, model_path
from mlxpaged.cli.connection import add_server_flags, running
from mlxpaged.cli.flags import model_name
from mlxpaged.cli.running_servers import RunningServer, running_servers, server_of
from mlxpaged.cli.status_line import StatusLine

POLL_SECONDS = 0.05


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "stop",
        usage="%(prog)s [MODEL] [flags]",
        description="Unload a model of the running server. Without MODEL, end the server: running requests may finish "
        "within its --drain-timeout.",
        epilog="Exit status: 1 if no server runs, or if it is not a server of this user on this machine.",
    )
    parser.add_argument(
        "model", nargs="?", type=model_name, metavar="MODEL", help="name of the model as `mlxpaged ps` shows it"
    )
    add_server_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        if args.model is not None:
            unload(running(args), args.model)
        else:
            end(stoppable(args))
    except ServerError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    return 0


def unload(client: Client, model: str) -> None:
    client.post(model_path(model, "unload"))
    print(f"{model} is unloaded", file=sys.stderr)


def stoppable(args: argparse.Namespace) -> RunningServer:
    """Returns the server of --url, or else the one that was started last. Raises ServerError if there is none. A server
    that another command has started is ended by that command."""
    servers = [server for server in running_servers() if server.shared]
    if args.url is not None:
        servers = [server for server in servers if server.url == args.url.replace("//localhost:", "//127.0.0.1:")]
    if not servers:
        url = running(args).url  # the more precise error
        raise ServerError(f"the server at {url} was not started by this user on this machine")
    return servers[0]


def end(server: RunningServer) -> None:
    """Send SIGTERM and wait for the end. Ctrl-C ends the waiting, not the server's."""
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(server.pid, signal.SIGTERM)
    line = StatusLine(sys.stderr)
    try:
        while server_of(server.pid) == server:
            line.show(f"the server at {server.url} finishes its requests")
            time.sleep(POLL_SECONDS)
    finally:
        line.clear()
    print(f"the server at {server.url} has ended", file=sys.stderr)
