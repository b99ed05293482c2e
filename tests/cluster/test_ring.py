"""MLX's ring over links that were proved: a process without the secret is no neighbor, whatever it connects to."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.cluster import ring as ring_module
from mlxpaged.cluster.messages import Address
from mlxpaged.cluster.ring import Ring, own_addresses
from mlxpaged.core.engine.errors import RankLostError
from tests.cluster.ranks import CONTEXT, SECONDS
from tests.cluster.servers import listening

SECRET = b"s" * 32
LOCAL = "127.0.0.1"


def nothing() -> None:
    """Most ranks need no preparation."""


def run_rank(rank: int, num_links: int, server: Connection, prepare: Callable[[], None]) -> None:
    """A rank's process: it tells where it listens, is told where all do, and adds up numbers with the others."""
    os.environ["MLX_RANK"] = str(rank)
    try:
        prepare()
        ring = Ring([LOCAL] * num_links, SECRET)
        server.send(ring.addresses)
        group = ring.join(rank, server.recv())
        numbers = mx.arange(1_000) * (rank + 1)
        server.send((group.rank(), group.size(), mx.distributed.all_sum(numbers, group=group).tolist()))
    except BaseException:
        server.send(traceback.format_exc())


class Stranger:
    """Connects to every port on which a process listens, as soon as it does, and says nothing."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._ends = threading.Event()
        self._ports: set[int] = set()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        with ExitStack() as stack:
            while not self._ends.wait(0.02):
                for port in {port for pid in self._pids for port in listening(pid)} - self._ports:
                    self._ports.add(port)
                    stack.enter_context(silent(port))


@contextmanager
def silent(port: int) -> Iterator[None]:
    with socket.socket() as connected:
        connected.connect_ex((LOCAL, port))
        yield


def received(server: Any) -> Any:
    assert server.poll(SECONDS), "a rank hangs"
    result = server.recv()
    assert not isinstance(result, str), result
    return result


@contextmanager
def ranks(size: int, num_links: int, prepare: Callable[[], None] = nothing) -> Iterator[tuple[list[Any], list[int]]]:
    """prepare: called in each process. Yields the pipes to the processes, and their ids."""
    servers, processes = [], []
    for rank in range(size):
        server, own = CONTEXT.Pipe()
        process = CONTEXT.Process(target=run_rank, args=(rank, num_links, own, prepare), daemon=True)
        process.start()
        servers.append(server)
        processes.append(process)
    try:
        yield servers, [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def check_sums(found: list[Any]) -> None:
    size = len(found)
    factor = sum(range(1, size + 1))
    assert found == [(rank, size, [number * factor for number in range(1_000)]) for rank in range(size)]


@pytest.mark.parametrize(("size", "num_links"), [(2, 1), (3, 2)])
def test_a_silent_process_at_every_port_keeps_no_rank_from_meeting_the_others(size: int, num_links: int) -> None:
    with ranks(size, num_links) as (servers, pids):
        ring = [received(server) for server in servers]
        ports = {port for addresses in ring for _, port in addresses}
        with ExitStack() as stack:
            for port in ports:
                stack.enter_context(silent(port))  # before the neighbor
            stack.enter_context(Stranger(pids))
            for server in servers:
                server.send(ring)
            found = [received(server) for server in servers]
    assert len(ports) == size * num_links
    check_sums(found)


OTHERS: list[socket.socket] = []
"""In a rank's process."""


def connect_with_the_same_port() -> None:
    """Beside each port of the ring, there is a connection at the same port of another address."""
    found = ring_module.reserved_port

    def reserved_port() -> socket.socket:
        reserved = found()
        with socket.create_server((LOCAL, 0)) as listener:
            other = socket.socket()
            other.bind(("127.0.0.2", reserved.getsockname()[1]))
            other.connect(listener.getsockname())
            OTHERS.extend((other, listener.accept()[0]))
        return reserved

    ring_module.reserved_port = reserved_port


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has one address of loopback")
def test_a_connection_at_the_same_port_of_another_address_is_no_link() -> None:
    meet(connect_with_the_same_port)


def start_connecting_late() -> None:
    """The process that connects starts when a thread of this one has told it so. The thread needs Python's lock."""
    fifo = Path(tempfile.mkdtemp()) / "fifo"
    os.mkfifo(fifo)
    ring_module.PYTHON = ("/bin/sh", "-c", f'read -r line < {fifo}; exec "$0" "$@"', sys.executable)

    def tell() -> None:
        with fifo.open("w") as file:  # it has been started
            time.sleep(0.5)
            file.write("go\n")

    threading.Thread(target=tell, daemon=True).start()


def test_a_rank_runs_on_while_the_process_that_connects_starts() -> None:
    meet(start_connecting_late)


def meet(prepare: Callable[[], None]) -> None:
    with ranks(2, 1, prepare) as (servers, _):
        ring = [received(server) for server in servers]
        for server in servers:
            server.send(ring)
        check_sums([received(server) for server in servers])


def test_a_neighbor_that_cannot_be_reached_is_named_as_the_reason() -> None:
    ring = Ring([LOCAL], SECRET)
    with socket.socket() as closed:
        closed.bind((LOCAL, 0))
        other: Address = (LOCAL, closed.getsockname()[1])
        with pytest.raises(RankLostError, match="the next rank of the ring cannot be reached"):
            ring.join(0, [ring.addresses, [other]])


@pytest.mark.parametrize(
    ("text", "addresses"),
    [('[["10.0.0.1:32323", "10.0.1.1:32324"], ["10.0.0.2:32325"]]', ["10.0.0.1", "10.0.1.1"]), ("", [])],
    ids=["ring", "one host"],
)
def test_a_rank_listens_at_its_addresses_of_the_hostfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, addresses: list[str]
) -> None:
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    assert own_addresses(0) == []  # as with JACCL
    (tmp_path / "hosts.json").write_text(text)
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
    assert own_addresses(0) == addresses
