"""The links of MLX's ring, made here: only ranks that know the secret take part.

MLX takes the first connection to a rank's port for its neighbor's, also if another program made it. So it makes a ring
within this process instead, over loopback, and its sockets are then replaced by links that were proved. MLX 0.32 sends
nothing before the first collective operation (mlx/distributed/ring/ring.cpp).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx

from mlxpaged.cluster.channel import AuthenticationError, Channel, Listener, connect
from mlxpaged.cluster.hosts import LOCAL
from mlxpaged.cluster.messages import Address
from mlxpaged.core.engine.errors import RankLostError
from mlxpaged.interpreter import PYTHON

BACKLOG = 1024
"""Connections of others may wait before MLX's."""


def own_addresses(rank: int) -> list[str]:
    """The addresses of this rank, one for each link to a neighbor, in the hostfile that `mlx.launch` has made; empty if
    there are no other ranks, or if another backend is used."""
    path = os.environ.get("MLX_HOSTFILE")
    hosts = json.loads(text) if path is not None and (text := Path(path).read_text()) else []
    return [address.rpartition(":")[0] for address in hosts[rank]] if hosts else []


class Ring:
    """The links of one rank. Its neighbors connect at `addresses`, one at each.

    own: its addresses, without ports."""

    def __init__(self, own: Sequence[str], secret: bytes) -> None:
        self._secret = secret
        # A neighbor may connect from an address that is not in the hostfile: each cable has two.
        self._listeners = [Listener(address, None, secret) for address in own]
        self.addresses: tuple[Address, ...] = tuple(each.address for each in self._listeners)

    def join(self, rank: int, ring: Sequence[Sequence[Address]]) -> mx.distributed.Group:
        """Meet both neighbors. ring: the addresses of all ranks. Raises RankLostError."""
        size = len(ring)
        try:
            to_right = [connect(address, self._secret) for address in ring[(rank + 1) % size]]
            to_left = [each.accept() for each in self._listeners]
        except (OSError, EOFError, AuthenticationError) as error:
            raise RankLostError(f"the next rank of the ring cannot be reached: {error}") from error
        for each in self._listeners:
            each.close()
        return ring_of(rank, size, to_left, to_right)


def ring_of(rank: int, size: int, to_left: Sequence[Channel], to_right: Sequence[Channel]) -> mx.distributed.Group:
    """MLX's group with these links."""
    with contextlib.ExitStack() as stack:
        left = [stack.enter_context(reserved_port()) for _ in to_left]
        right = [stack.enter_context(socket.create_server((LOCAL, 0), backlog=BACKLOG)) for _ in to_right]
        ports = [port_of(each) for each in left], [port_of(each) for each in right]
        nodes: list[list[str]] = [[] for _ in range(size)]
        for node, ports_of_node in zip((rank, (rank + 1) % size), ports, strict=True):
            nodes[node] = [f"{LOCAL}:{port}" for port in ports_of_node]
        hostfile = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="mlxpaged-ring-"))
        hostfile.write(json.dumps(nodes))
        hostfile.flush()
        os.environ["MLX_HOSTFILE"] = hostfile.name
        stack.enter_context(connecting(ports[0]))
        group = mx.distributed.init(strict=True, backend="ring")
        # By an address, and whether it is the other end's: MLX accepts from the left, and connects to the right. The
        # port alone may be that of a connection to another machine too.
        links: dict[tuple[object, bool], Channel] = {}
        links |= {((LOCAL, port), False): each for port, each in zip(ports[0], to_left, strict=True)}
        links |= {((LOCAL, port), True): each for port, each in zip(ports[1], to_right, strict=True)}
        for descriptor in set(map(int, os.listdir("/dev/fd"))) - {each.fileno() for each in left}:
            own, peer = ends_of(descriptor)
            for end in ((own, False), (peer, True)):
                if end in links:
                    links.pop(end).replace(descriptor)
        if links:
            raise RuntimeError("MLX's ring has other sockets than expected")
    return group


def reserved_port() -> socket.socket:
    """A socket that does not listen. MLX can listen at its port, and other users' programs cannot."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((LOCAL, 0))
    return reserved


def port_of(own: socket.socket) -> int:
    return int(own.getsockname()[1])


CONNECT = """
import socket, sys, time

print(flush=True)
connected = []
for port in sys.argv[1:]:
    for _ in range(60_000):  # the rank may have been killed
        try:
            connected.append(socket.create_connection(("127.0.0.1", int(port))))
            break
        except OSError:
            time.sleep(0.001)
sys.stdin.read()
"""


@contextlib.contextmanager
def connecting(ports: Sequence[int]) -> Iterator[None]:
    """Connect to the ports one after the other, as soon as MLX listens there. It takes a process: MLX holds Python's
    lock until the ring is made. The process has started before, or this rank would not beat meanwhile."""
    command = [*PYTHON, "-S", "-c", CONNECT, *map(str, ports)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the process that connects to MLX's ring does not start")
        yield
    finally:
        process.kill()
        process.communicate()


def ends_of(descriptor: int) -> tuple[object, object]:
    """The addresses of this and the other end of a socket; None for an end that there is not, or not any more."""
    own = peer = None
    with contextlib.suppress(OSError):  # it is no socket
        found = socket.socket(fileno=descriptor)
        try:
            own = found.getsockname()
            peer = found.getpeername()
        finally:
            found.detach()
    return own, peer
