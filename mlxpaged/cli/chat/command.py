"""Flags of `mlxpaged chat`, and its start."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mlxpaged.cli.client import ServerError
from mlxpaged.cli.connection import add_server_flags, connected
from mlxpaged.cli.flags import model_name


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        usage="%(prog)s [MODEL] [flags]",
        description="Chat with a model in the terminal. Without a running server, one is started for the chat. "
        "Ctrl-C ends an answer, Ctrl-D the chat; /help lists the commands.",
    )
    name = "name of a served model, or what `mlxpaged serve` takes (default: the first model of the server)"
    parser.add_argument("model", nargs="?", type=model_name, metavar="MODEL", help=name)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--stats", action="store_true", help="show the speed after each answer")
    add_server_flags(parser, starts=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("mlxpaged: chat needs a terminal; for one answer, use `mlxpaged run`", file=sys.stderr)
        return 1
    try:
        with connected(args, args.model) as connection:
            # Imported only now: they take half a second, and there may be no server to talk to.
            from mlxpaged.cli.chat.chat import Chat
            from mlxpaged.cli.chat.conversation import Conversation
            from mlxpaged.cli.chat.loop import talk, uninterrupted
            from mlxpaged.cli.chat.reader import Reader

            conversation = Conversation(connection.model, args.system)
            chat = Chat(connection.client, conversation, sys.stdout, args.stats)
            chat.say(f"{connection.model} at {connection.client.url}; /help lists the commands")
            reader = Reader(Path.home() / ".mlxpaged" / "chat_history", chat.words)
            with uninterrupted():
                talk(chat, reader.read)
    except ServerError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    return 0
