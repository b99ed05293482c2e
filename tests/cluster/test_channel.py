"""The control channel: only named hosts that know the secret, and no peer that holds up the others."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

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


def provers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mlxpaged-prove"]


@pytest.mark.parametrize("sent", [b"", b"x"])
def test_200_peers_that_prove_nothing_keep_no_other_out(accepting: Accepting, sent: bytes) -> None:
    """Those that came first are ended, so that threads and descriptors are bounded."""
    with contextlib.ExitStack() as stack:
        idle = []
        for _ in range(200):
            idle.append(stack.enter_context(socket.create_connection(accepting.listener.address, SECONDS)))
            idle[-1].sendall(sent)
        connect(accepting.listener.address, SECRET).close()
        wait_until(lambda: accepting.accepted)
        wait_until(lambda: len(provers()) <= channel.MAX_HANDSHAKES)
        assert idle[0].recv(32)
        assert idle[0].recv(1) == b""
        idle[-1].setblocking(False)
        assert idle[-1].recv(32)
        with pytest.raises(BlockingIOError):  # its time is not over
            idle[-1].recv(1)
    wait_until(lambda: not provers())


class Slow(socket.socket):
    """A peer that sends a byte every second of a clock."""

    now = 0.0

    def recv(self, *_: Any) -> bytes:
        if self.timeout is None or self.timeout < 1:
            Slow.now += self.timeout or 0
            raise TimeoutError
        Slow.now += 1
        return b"x"


def test_a_handshake_has_its_time_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 5.5)
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: Slow.now))
    ours, theirs = socket.socketpair()
    with theirs, Slow(fileno=ours.detach()) as slow, pytest.raises(TimeoutError):
        channel.prove(slow, SECRET, b"listener", b"caller")
    assert Slow.now == 5.5


def test_a_listener_that_lacks_a_thread_goes_on(
    accepting: Accepting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_thread(**_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(channel, "PAUSE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(channel, "threading", SimpleNamespace(Thread=no_thread))
        with pytest.raises((EOFError, OSError)):
            connect(accepting.listener.address, SECRET)
        wait_until(lambda: "cannot be accepted: can't start new thread" in caplog.text)
    connect(accepting.listener.address, SECRET).close()
    wait_until(lambda: accepting.accepted)


def test_a_listener_that_lacks_a_descriptor_goes_on(
    accepting: Accepting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "PAUSE_SECONDS", 0.01)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as peer:
        resource.setrlimit(resource.RLIMIT_NOFILE, (peer.fileno(), limit[1]))
        try:
            peer.connect(accepting.listener.address)
            wait_until(lambda: "cannot be accepted" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        channel.prove(peer, SECRET, b"caller", b"listener")
        wait_until(lambda: accepting.accepted)


def test_a_peer_that_leaves_after_its_proof_leaves_nothing_behind(
    accepting: Accepting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS, a socket whose peer has left takes no options."""

    def fail(connected: socket.socket) -> Channel:
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patch, socket.create_connection(accepting.listener.address, SECONDS) as peer:
        patch.setattr(channel, "Channel", fail)
        channel.prove(peer, SECRET, b"caller", b"listener")
        assert peer.recv(1) == b"", "the listener keeps the connection"
        with pytest.raises(OSError, match="Invalid argument"):
            connect(accepting.listener.address, SECRET)
    with contextlib.closing(connect(accepting.listener.address, SECRET)):
        wait_until(lambda: accepting.accepted)


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
