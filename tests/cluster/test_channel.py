"""The control channel: only named hosts that know the secret, and no peer that holds up the others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from mlxpaged.cluster import channel
from mlxpaged.cluster.channel import AuthenticationError, Channel, Listener, connect
from tests.support import wait_until

SECRET = b"s" * 32
SECONDS = 60.0
"""Nothing takes that long."""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", SECONDS)
    monkeypatch.setattr(channel, "SEND_SECONDS", SECONDS)


class Accepting:
    """A listener whose `accept` runs on a thread."""

    def __init__(self, *peers: str) -> None:
        self.listener = Listener("127.0.0.1", peers, SECRET)
        self.accepted: list[Channel] = []
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def _accept(self) -> None:
        try:
            while True:
                self.accepted.append(self.listener.accept())
        except OSError:
            pass

    def close(self) -> None:
        self.listener.close()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        for each in self.accepted:
            each.close()


@pytest.fixture
def accepting() -> Iterator[Accepting]:
    found = Accepting("127.0.0.1")
    yield found
    found.close()


def test_messages_go_both_ways(accepting: Accepting) -> None:
    ours = connect(accepting.listener.address, SECRET)
    ours.send({"large": b"x" * 1_000_000})
    wait_until(lambda: accepting.accepted)
    theirs = accepting.accepted[0]
    assert theirs.receive() == {"large": b"x" * 1_000_000}
    theirs.send("yes")
    assert ours.receive() == "yes"
    ours.close()
    with pytest.raises((EOFError, OSError)):
        theirs.receive()


def test_a_peer_without_the_secret_is_refused_and_delays_no_other(
    accepting: Accepting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        connect(accepting.listener.address, b"wrong" * 8)
    with socket.create_connection(accepting.listener.address, SECONDS) as silent:
        assert silent.recv(32)
        connect(accepting.listener.address, SECRET).close()
        wait_until(lambda: accepting.accepted)
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # its time is not over
            silent.recv(1)
    with monkeypatch.context() as patch:
        patch.setattr(channel, "HANDSHAKE_SECONDS", 0.1)
        with socket.create_connection(accepting.listener.address, SECONDS) as silent:
            assert silent.recv(32)
            assert silent.recv(1) == b""
    with socket.create_connection(accepting.listener.address) as mirror:  # it sends each proof back as its own
        mirror.settimeout(SECONDS)
        while received := mirror.recv(32):
            mirror.sendall(received)
    assert len(accepting.accepted) == 1


def test_other_machines_are_refused() -> None:
    accepting = Accepting("10.0.0.2")
    with pytest.raises((EOFError, OSError)):
        connect(accepting.listener.address, SECRET)
    assert not accepting.accepted
    accepting.close()


def test_a_peer_that_reads_nothing_is_lost_after_a_while(accepting: Accepting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "SEND_SECONDS", 1.0)
    ours = connect(accepting.listener.address, SECRET)
    with pytest.raises(BlockingIOError):
        ours.send(b"x" * 50_000_000)
    ours.close()


def test_a_thread_that_receives_ends_when_another_one_closes_the_channel(accepting: Accepting) -> None:
    ours = connect(accepting.listener.address, SECRET)
    ended: list[type[BaseException]] = []

    def receive() -> None:
        try:
            ours.receive()
        except (EOFError, OSError) as error:
            ended.append(type(error))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    thread.join(0.1)
    ours.close()
    thread.join(SECONDS)
    assert ended
