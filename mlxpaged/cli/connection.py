"""Finds the server that a command talks to, and the model there. `connected` starts a server if none runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlxpaged.cli.background_server import BackgroundServer, wait_loaded
from mlxpaged.cli.client import Client, ServerError, model_path
from mlxpaged.cli.flags import Flags
from mlxpaged.cli.parser import Parser
from mlxpaged.cli.running_servers import running_servers
from mlxpaged.cli.status_line import StatusLine
from mlxpaged.models.files.kinds import Kind
from mlxpaged.models.sources.short_names import taken, without_address

DEFAULT_URL = "http://127.0.0.1:8080"
LOADED = "loaded"
Entry = dict[str, Any]
"""What GET /v1/models says about a model."""


@dataclass(frozen=True)
class Connection:
    client: Client
    model: str
    is_own: bool
    """The server was started for this command, and ends with it."""


def server_url(text: str) -> str:
    """Parses the address of a server. Clients of OpenAI's API have /v1 at its end, which may be there here too."""
    try:
        address = urlsplit(text.strip() if "://" in text else f"http://{text.strip()}")
        is_one = address.scheme in ("http", "https") and address.hostname and address.port != 0 and not address.query
        is_one = is_one and text.isascii()
    except ValueError:  # of the port, or of an IPv6 address
        is_one = False
    if not is_one:
        raise argparse.ArgumentTypeError(f"must be an address such as {DEFAULT_URL}, got {text!r}")
    return f"{address.scheme}://{address.netloc}{address.path.rstrip('/').removesuffix('/v1')}"


def api_key(text: str) -> str:
    """A key goes into a header, which has neither other letters nor a line's end."""
    if not re.fullmatch("[!-~]+", key := text.strip()):
        raise argparse.ArgumentTypeError("must be letters, digits and signs of ASCII, without spaces")
    return key


def add_server_flags(parser: Parser, starts: bool = False) -> None:
    """starts: the command starts a server if none runs."""
    server = Flags(parser).group("server")
    found = "the one that runs on this machine" + (", or a new one" if starts else "")
    server.value("--url", server_url, None, "address of the server", found)
    server.value("--api-key", api_key, None, "API key, for a server that needs one")


def running(args: argparse.Namespace) -> Client:
    """Returns a client of the server of --url, or else of the one that was started last, or of the default port. Raises
    ServerError if there is none."""
    client = found(args)
    if client is None:
        raise ServerError("no server runs: start one with `mlxpaged serve`, or name its address with --url")
    return client


def found(args: argparse.Namespace) -> Client | None:
    if args.url is not None:
        client = Client(args.url, args.api_key)
        client.health()
        return client
    urls = [server.url for server in running_servers() if server.shared]
    for url in (*urls, DEFAULT_URL):  # there may be one of another user, or in a container
        client = Client(url, args.api_key)
        with contextlib.suppress(ServerError):
            client.health()
            return client
    return None


@contextlib.contextmanager
def connected(
    args: argparse.Namespace, model: str | None, more: Sequence[str] = (), shows_images: bool = False
) -> Iterator[Connection]:
    """Connects to the running server when its models are loaded. Without --url, a server is started if none runs, and
    ended with the context. Standard error shows what is waited for. model: the user's name for it; None: any. more:
    flags of a server that is started. shows_images: a model that does not see is refused, if possible before it is
    loaded."""
    line, wanted = StatusLine(sys.stderr), model
    said = None if model is None else taken(model)
    with contextlib.ExitStack() as stack:
        stack.callback(line.clear)
        client = found(args)
        is_own = client is None
        if client is None:
            if said is not None:
                print(f"mlxpaged: {said}", file=sys.stderr)
            server = BackgroundServer(model, args.config, more)
            stack.callback(server.end)
            client = Client(server.wait_ready(line.show), args.api_key)
            model = None  # the server may have a better name for it
        else:
            wait_loaded(client, line.show)
        name = chosen(client, model, line.show, shows_images)
        line.clear()
        if not name.isprintable():  # it would change the terminal, or a command that is printed for a shell
            raise ServerError(f"the name of the model at {client.url} has characters that cannot be shown: {name!r}")
        if said is not None and not is_own and name != wanted:
            print(f"mlxpaged: {said}", file=sys.stderr)
        yield Connection(client, name, is_own)


def chosen(client: Client, model: str | None, show: Callable[[str], None], shows_images: bool = False) -> str:
    """Returns the server's name of the model, which is loaded then, if the server can do this and the key may.
    shows_images: as for `connected`. Raises ServerError."""
    entries = generating(client)
    model = None if model is None else without_address(model)
    if model is None:
        if not entries:
            raise ServerError(f"the server at {client.url} serves no model that generates text")
        model = str(entries[0]["id"])
    states = {entry["id"]: entry["state"] for entry in entries}
    for entry in entries:
        if shows_images and entry["id"] == model and not sees(entry):
            raise ServerError(cannot_see(model, entries))
    if states.get(model) == LOADED:
        return model
    name = str(Path(model).resolve()) if model not in states and os.path.exists(model) else model
    show(f"loading {model}")
    try:
        loaded = client.post(model_path(name, "load"), seconds=None)
    except ServerError as error:
        if error.status == 403:  # only admins load models by hand; a request loads it too
            return name
        if error.status != 404:
            raise
        served = f"It serves {', '.join(states)}." if states else "It serves no model."
        how = "It also loads any model that is on its machine: `mlxpaged pull NAME` downloads one there."
        raise ServerError(f"the server at {client.url} does not serve {model}. {served} {how}") from None
    if shows_images and not sees(loaded):
        raise ServerError(cannot_see(model, entries))
    return str(loaded["id"])


def generating(client: Client) -> list[Entry]:
    """Returns the models that generate text, loaded ones first."""
    entries = [entry for entry in client.get("/v1/models")["data"] if Kind(entry["kind"]).generates]
    return sorted(entries, key=lambda entry: entry["state"] != LOADED)


def sees(entry: Entry) -> bool:
    """Whether a model sees images. entry: what GET /v1/models says of it, also of one that is not loaded."""
    known = entry.get("capabilities", {}).get("vision")
    return entry.get("kind") == Kind.VISION.value if known is None else bool(known)


def cannot_see(model: str, entries: Sequence[Entry]) -> str:
    """Returns the sentence that refuses an image, with the models of the server that see."""
    others = [str(entry["id"]) for entry in entries if sees(entry)]
    return f"{model} does not see images; " + (f"{', '.join(others)} can" if others else "no model of the server does")
