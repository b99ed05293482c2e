"""Authenticated connections between the processes of a cluster. They carry messages, never tensors."""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Container
from multiprocessing.connection import Connection
from typing import Any

HANDSHAKE_SECONDS = 5.0
SEND_SECONDS = 5.0
"""A peer that does not read for so long, with full buffers, is lost."""

NONCE_BYTES = 32


class AuthenticationError(Exception):
    """The peer does not know the secret."""


class Channel:
    """Messages in both directions, pickled: both ends have proved that they know the secret. Several threads may send;
    one receives. `send` and `receive` raise OSError or EOFError if the peer is lost.

    Messages are not encrypted: like MLX's own traffic, they need a network that you trust."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(None)
        limit = struct.pack("ll", int(SEND_SECONDS), 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._connection = Connection(connected.detach())
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        with self._lock:
            self._connection.send(message)

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except TypeError as error:
            if self._connection.closed:  # in the middle of a message
                raise EOFError("the channel is closed") from error
            raise

    def close(self) -> None:
        """A thread in `receive` gets EOFError, also if the peer cannot be reached."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)  # does not come with the close of a descriptor that is being read
        with contextlib.suppress(OSError):
            self._connection.close()


class Listener:
    """Accepts channels from the given addresses only, and on one of them. A peer that is silent delays no other."""

    def __init__(self, address: str, peers: Container[str], secret: bytes) -> None:
        self._socket = socket.create_server((address, 0))
        self._peers = peers
        self._secret = secret
        self._proven: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()  # None: the listener is closed
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._listen, name="mlxpaged-listen", daemon=True).start()

    def accept(self) -> Channel:
        """Wait for a peer that knows the secret. Raises OSError if the listener is closed."""
        channel = self._proven.get()
        if channel is None:
            self._proven.put(None)
            raise OSError("the listener is closed")
        return channel

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `_listen`
        self._socket.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, (address, *_) = self._socket.accept()
                if address in self._peers:
                    threading.Thread(target=self._prove, args=(connected,), name="mlxpaged-prove", daemon=True).start()
                else:
                    connected.close()
        self._proven.put(None)

    def _prove(self, connected: socket.socket) -> None:
        try:
            connected.settimeout(HANDSHAKE_SECONDS)
            prove(connected, self._secret, b"listener", b"caller")
        except (OSError, EOFError, AuthenticationError):
            connected.close()
        else:
            self._proven.put(Channel(connected))


def connect(address: tuple[str, int], secret: bytes) -> Channel:
    """Raises OSError, EOFError or AuthenticationError."""
    connected = socket.create_connection(address, HANDSHAKE_SECONDS)
    try:
        prove(connected, secret, b"caller", b"listener")
    except BaseException:
        connected.close()
        raise
    return Channel(connected)


def prove(connected: socket.socket, secret: bytes, own: bytes, other: bytes) -> None:
    """Prove to the other end that this one knows the secret, and make sure that it does too. own, other: the roles of
    the ends, so that no proof can be sent back as one's own. Raises AuthenticationError, OSError or EOFError."""
    mine = secrets.token_bytes(NONCE_BYTES)
    connected.sendall(mine)
    theirs = receive_exactly(connected, NONCE_BYTES)
    connected.sendall(hmac.digest(secret, own + theirs + mine, "sha256"))
    expected = hmac.digest(secret, other + mine + theirs, "sha256")
    if not hmac.compare_digest(receive_exactly(connected, len(expected)), expected):
        raise AuthenticationError("the peer does not know the secret of this cluster")


def receive_exactly(connected: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        more = connected.recv(count - len(received))
        if not more:
            raise EOFError
        received += more
    return received
