"""`mlxpaged service install | remove | status`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

from mlxpaged.addons import OFF
from mlxpaged.cli.arguments import keep_after_dashes
from mlxpaged.cli.config_file import ConfigFile
from mlxpaged.cli.os_errors import sentence
from mlxpaged.cli.running_servers import server_of
from mlxpaged.cli.service.launchd import Launchd
from mlxpaged.cli.service.manager import SERVICE_VARIABLE, Job, Manager, ServiceError
from mlxpaged.cli.service.systemd import Systemd
from mlxpaged.interpreter import PYTHON

HUB = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "XDG_CACHE_HOME")
KEPT = (*HUB, "OLLAMA_MODELS", "XDG_CONFIG_HOME", "MLXPAGED_CONFIG", OFF)
"""Variables that say where models and settings are, and whether add-ons are used. A service sees no others of the
user's shell."""

END_SECONDS = 30
"""Time that a server has to end after its --drain-timeout. Without a limit, launchd kills it after 20 s."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "service",
        description="Start the server at each login and keep it running: with launchd on a Mac, systemd on Linux.",
    )
    verbs = parser.add_subparsers(title="what to do", dest="verb", required=True)
    install = verbs.add_parser(
        "install",
        help="start the server now and at each login",
        usage="%(prog)s [--dry-run] [-- flags of mlxpaged serve]",
        description="Start the server now and at each login. What is after -- goes to `mlxpaged serve`.",
    )
    install.add_argument("--dry-run", action="store_true", help="print the file of the service, and change nothing")
    keep_after_dashes(install, "serve_args")
    remove = verbs.add_parser("remove", help="end the server and do not start it again")
    status = verbs.add_parser("status", help="say whether the service runs; exit status 1 if not")
    for verb, action in ((install, run_install), (remove, run_remove), (status, run_status)):
        verb.set_defaults(run=run, action=action, parser=verb)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        return int(args.action(args, Launchd() if sys.platform == "darwin" else Systemd()))
    except (ServiceError, OSError) as error:
        print(f"mlxpaged: {sentence(error)}", file=sys.stderr)
        return 1


def run_install(args: argparse.Namespace, manager: Manager) -> int:
    drain_timeout = parsed(args.serve_args, args.parser.config).drain_timeout
    file = () if args.config is None else ("--config", args.config)
    command = (*PYTHON, "-m", "mlxpaged", *file, "serve", *args.serve_args)
    variables = {name: os.environ[name] for name in KEPT if os.environ.get(name)} | {SERVICE_VARIABLE: "1"}
    content = manager.content(Job(command, Path.cwd(), variables, math.ceil(drain_timeout) + END_SECONDS))
    if args.dry_run:
        print(f"# {manager.path}", file=sys.stderr)
        print(content.decode(), end="")
        return 0
    manager.path.parent.mkdir(parents=True, exist_ok=True)
    manager.path.write_bytes(content)
    manager.start()
    print(f"The service is installed: {manager.path}\nIts log: {manager.logs()}", file=sys.stderr)
    return 0


def run_remove(args: argparse.Namespace, manager: Manager) -> int:
    if not manager.path.exists():
        print("mlxpaged: the service is not installed", file=sys.stderr)
        return 1
    try:
        manager.stop()
    finally:
        manager.path.unlink()
    print(f"The service is removed: {manager.path}", file=sys.stderr)
    return 0


def run_status(args: argparse.Namespace, manager: Manager) -> int:
    if not manager.path.exists():
        print("not installed")
        return 1
    pid = manager.pid()
    server = None if pid is None else server_of(pid)
    print("not running" if pid is None else f"running: process {pid}" + (f", {server.url}" if server else ""))
    print(f"file: {manager.path}\nlog: {manager.logs()}")
    return 0 if pid is not None else 1


def parsed(serve_args: list[str], config: ConfigFile) -> argparse.Namespace:
    """Ends the command if `mlxpaged serve` refuses the arguments: the service would fail at each start."""
    from mlxpaged import cli

    return cli.make_parser(["serve"], config).parse_args(["serve", *serve_args])
