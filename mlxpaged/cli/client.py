"""Speaks HTTP to a server, with the standard library only, so that commands start fast. A proxy is never used."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from mlxpaged.cli.visible import visible

CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 30.0
"""A server that starts accepts connections before it has imported what it answers with."""
SILENT_SECONDS = 120.0
"""A stream has a comment every 10 seconds. A server that is silent for this time has stopped."""

HOST_NOT_ALLOWED = "host_not_allowed"
"""The code of a server that does not know itself by the name in its address. Its message says what to do."""


class ServerError(Exception):
    """The server cannot be reached, or has refused a request. status: None if there was no response."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(visible(message))  # it may be text of the server
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Comment:
    """A line of a stream that says how far the request is."""

    text: str


class Client:
    """Each request has its own connection. So the server sees at once that a client has left a stream."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """url: http://HOST:PORT or https://HOST, as `server_url` returns it."""
        self.url = url
        self.key = key

    def get(self, path: str) -> Any:
        return self._answer("GET", path, None, SILENT_SECONDS)

    def post(self, path: str, body: dict[str, Any] | None = None, seconds: float | None = SILENT_SECONDS) -> Any:
        """seconds: how long the server may be silent; None: as long as it wants."""
        return self._answer("POST", path, body, seconds)

    def health(self) -> dict[str, Any]:
        """Returns the body of GET /health, which describes a server that loads too. Raises ServerError if no server is
        there, or if it is a different program, which does not get the key."""
        with Client(self.url)._request("GET", "/health", None, HEALTH_SECONDS) as response:
            found = parsed(response.read())
        error = found.get("error") if isinstance(found, dict) else None
        if isinstance(error, dict) and error.get("code") == HOST_NOT_ALLOWED:
            raise ServerError(str(error.get("message")), response.status, HOST_NOT_ALLOWED)
        if not (isinstance(found, dict) and {"status", "model"} <= found.keys()):
            raise ServerError(f"what runs at {self.url} is not mlxpaged")
        return found

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any] | Comment, None, None]:
        """Yields the events of a stream and its comments. Closing the iterator ends the request. Raises ServerError,
        also for an error in the middle of the stream."""
        with self._request("POST", path, body, SILENT_SECONDS) as response:
            check(response)
            while line := response.readline():
                kind, _, text = line.decode().strip().partition(":")
                text = text.removeprefix(" ")
                if kind == "" and text:
                    yield Comment(text)
                elif kind == "data" and text != "[DONE]":
                    event: dict[str, Any] = json.loads(text)
                    if (error := event.get("error")) is not None:
                        raise ServerError(error["message"], response.status, error.get("code"))
                    yield event

    def _answer(self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None) -> Any:
        with self._request(method, path, body, seconds) as response:
            check(response)
            found = parsed(response.read())
        if not isinstance(found, dict):
            raise ServerError(f"what runs at {self.url} is not mlxpaged: its answer to {path} is no object")
        return found

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        address = urlsplit(self.url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(address.hostname), address.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(seconds)
            connection.request(method, address.path + path, None if body is None else json.dumps(body), headers)
            yield connection.getresponse()
        except ConnectionRefusedError:
            raise ServerError(f"no server runs at {self.url}") from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: no name of a host
            reason = "it does not answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise ServerError(f"the connection to {self.url} has failed: {reason}") from None
        finally:
            connection.close()


def check(response: http.client.HTTPResponse) -> None:
    """Raises ServerError if the response is an error."""
    if response.status >= 400:
        found = parsed(response.read())
        error = found.get("error") if isinstance(found, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if response.status == 401:
            message = f"{message or 'the server needs an API key'} (--api-key or MLXPAGED_API_KEY)"
        code = error.get("code") if isinstance(error, dict) else None
        raise ServerError(message or f"the server answered {response.status} {response.reason}", response.status, code)


def parsed(body: bytes) -> Any:
    """Returns None if the body is not JSON."""
    try:
        return json.loads(body)
    except ValueError:
        return None


def model_path(model: str, action: str = "") -> str:
    """Returns the path of a model, whose name may have slashes."""
    return f"/v1/models/{quote(model, safe='')}" + (f"/{action}" if action else "")
