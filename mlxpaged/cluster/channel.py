"""Authenticated connections between the processes of a cluster. They carry messages, never tensors."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Container
from multiprocessing.connection import Connection
from typing import Any

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""For the whole handshake, however few bytes come at a time."""
MAX_HANDSHAKES = 64
"""At a time. Beyond it, the oldest one is ended: a peer that knows the secret needs milliseconds."""
PAUSE_SECONDS = 0.5
"""After a connection that could not be accepted: for a while, no descriptor or thread may be left."""
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

    def replace(self, descriptor: int) -> None:
        """Put this connection in the place of another socket, and end the channel. It does not block there."""
        os.set_blocking(self._connection.fileno(), False)
        os.dup2(self._connection.fileno(), descriptor, inheritable=False)
        self._connection.close()

    def close(self) -> None:
        """A thread in `receive` gets EOFError, also if the peer cannot be reached."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)  # does not come with the close of a descriptor that is being read
        with contextlib.suppress(OSError):
            self._connection.close()


class Listener:
    """Accepts channels on one address. peers: from these only; None for any. Peers that are silent or slow delay no
    other, however many they are."""

    def __init__(self, address: str, peers: Container[str] | None, secret: bytes) -> None:
        self._socket = socket.create_server((address, 0))
        self._peers = peers
        self._secret = secret
        self._proven: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()  # None: the listener is closed
        self._proving: dict[socket.socket, None] = {}  # the oldest one first
        self._lock = threading.Lock()
        self._is_closed = False
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
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `_listen`
        self._socket.close()

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                connected, (address, *_) = self._socket.accept()
                if self._peers is None or address in self._peers:
                    self._begin(connected)
                else:
                    connected.close()
            except (OSError, RuntimeError) as error:
                if not self._is_closed:
                    logger.warning("a connection of a rank cannot be accepted: %s", error)
                    time.sleep(PAUSE_SECONDS)
        self._proven.put(None)

    def _begin(self, connected: socket.socket) -> None:
        """Raises RuntimeError if there can be no more threads."""
        with self._lock:
            self._proving[connected] = None
            if len(self._proving) > MAX_HANDSHAKES:
                oldest = next(iter(self._proving))
                del self._proving[oldest]
                with contextlib.suppress(OSError):  # the peer has left
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        try:
            threading.Thread(target=self._prove, args=(connected,), name="mlxpaged-prove", daemon=True).start()
        except RuntimeError:
            self._end(connected)
            raise

    def _prove(self, connected: socket.socket) -> None:
        try:
            prove(connected, self._secret, b"listener", b"caller")
            self._proven.put(Channel(connected))
        except (OSError, EOFError, AuthenticationError):
            pass
        finally:
            self._end(connected)  # a channel has its descriptor

    def _end(self, connected: socket.socket) -> None:
        with self._lock:
            self._proving.pop(connected, None)
        connected.close()


def connect(address: tuple[str, int], secret: bytes) -> Channel:
    """Raises OSError, EOFError or AuthenticationError."""
    connected = socket.create_connection(address, HANDSHAKE_SECONDS)
    try:
        prove(connected, secret, b"caller", b"listener")
        return Channel(connected)
    except BaseException:
        connected.close()
        raise


def prove(connected: socket.socket, secret: bytes, own: bytes, other: bytes) -> None:
    """Prove to the other end that this one knows the secret, and make sure that it does too. own, other: the roles of
    the ends, so that no proof can be sent back as one's own. Raises AuthenticationError, OSError or EOFError."""
    until = time.monotonic() + HANDSHAKE_SECONDS
    mine = secrets.token_bytes(NONCE_BYTES)
    connected.settimeout(HANDSHAKE_SECONDS)
    connected.sendall(mine)
    theirs = receive_exactly(connected, NONCE_BYTES, until)
    connected.sendall(hmac.digest(secret, own + theirs + mine, "sha256"))
    expected = hmac.digest(secret, other + mine + theirs, "sha256")
    if not hmac.compare_digest(receive_exactly(connected, len(expected), until), expected):
        raise AuthenticationError("the peer does not know the secret of this cluster")


def receive_exactly(connected: socket.socket, count: int, until: float) -> bytes:
    """until: a time of `time.monotonic`."""
    received = b""
    while len(received) < count:
        connected.settimeout(max(0.0, until - time.monotonic()))
        more = connected.recv(count - len(received))
        if not more:
            raise EOFError
        received += more
    return received
