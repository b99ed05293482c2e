"""Images come from allowed hosts only, at public addresses, without redirections, within limits of size and time."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mlxpaged.api.image_hosts import FETCHES, SECONDS, ImageHosts, is_public, split_host
from mlxpaged.api.turns import Turns
from mlxpaged.vision.headers import ImageError
from mlxpaged.vision.reading import MAX_BYTES
from tests.api.helpers import FakeClock

PIXELS = b"\x89PNG\r\n\x1a\n" + bytes(100_000)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        server.seen.append((self.path, self.headers["Host"]))
        if self.path.startswith("/ok"):
            self.answer(200, PIXELS)
        elif self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/ok")
            self.end_headers()
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(MAX_BYTES // 2**20 + 2):
                    self.wfile.write(bytes(2**20))
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            server.may_end.wait()
        else:
            self.answer(404, b"no")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.seen, server.may_end = True, [], threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.may_end.set()
    server.shutdown()
    thread.join()
    server.server_close()


def fetched(hosts: ImageHosts, url: str) -> bytes:
    try:
        return asyncio.run(hosts.fetch("a client", url))
    finally:
        hosts.close()


def refusal(hosts: ImageHosts, url: str) -> str:
    with pytest.raises(ImageError) as caught:
        fetched(hosts, url)
    return str(caught.value)


def test_an_image_of_an_allowed_address(server: Any) -> None:
    here = f"127.0.0.1:{server.server_port}"
    assert fetched(ImageHosts([here]), f"http://{here}/ok?size=1#part") == PIXELS
    assert server.seen == [("/ok?size=1", here)]


def test_a_path_may_have_spaces_and_other_letters_than_ascii(server: Any) -> None:
    here = f"127.0.0.1:{server.server_port}"
    assert fetched(ImageHosts([here]), f"http://{here}/ok a%20größe.png?of=ä b&c=%C3%A4") == PIXELS
    assert [path for path, _ in server.seen] == ["/ok%20a%20gr%C3%B6%C3%9Fe.png?of=%C3%A4%20b&c=%C3%A4"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/moved", "answers with 302"),
        ("/none", "answers with 404"),
        ("/large", "has more than 20 MiB"),
    ],
)
def test_what_an_answer_must_not_be(server: Any, path: str, reason: str) -> None:
    here = f"127.0.0.1:{server.server_port}"
    assert reason in refusal(ImageHosts([here], seconds=300), f"http://{here}{path}")  # 20 MiB take a while
    assert len(server.seen) == 1


def test_an_answer_that_does_not_end(server: Any) -> None:
    here = f"127.0.0.1:{server.server_port}"
    assert "within 0.2 s" in refusal(ImageHosts([here], seconds=0.2), f"http://{here}/slow")


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/a.png",
        "http://images.example:8080/a.png",
        "http://images.example@other.example/a.png",
        "http://images.example.other.example/a.png",
        "http://127.0.0.1/a.png",
        "http://[::1]/a.png",
        "http:///a.png",
    ],
)
def test_hosts_that_are_not_allowed_are_not_resolved(url: str) -> None:
    def resolve(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was resolved")

    assert "does not fetch images from" in refusal(ImageHosts(["images.example"], resolve), url)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://images.example/a", "/etc/passwd", "http://a:b/c", "//x/y"]
)
def test_other_urls(url: str) -> None:
    assert "neither http nor https" in refusal(ImageHosts(["images.example"]), url)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.1.4", "224.0.0.1"),
        *("::1", "fe80::1%lo", "fec0::1", "fd00::1", "ff0e::1"),
        *("::ffff:10.0.0.1", "::10.0.0.1", "::ffff:0:10.0.0.1"),
        *("64:ff9b::169.254.169.254", "64:ff9b:1::8.8.8.8", "2002:a00:1::1", "2002:7f00:1::"),
        *("2001:0:808:808::f5ff:fffe", "2600::5efe:192.168.1.4", "2600::200:5efe:10.0.0.1"),
    ],
)
def test_a_name_with_an_address_that_is_not_public(address: str) -> None:
    """Also if its first address is public: which one a client's name has first is up to its owner."""

    def resolve(name: str, port: int, type: int) -> Any:
        return [(socket.AF_INET, type, 0, "", (each, port)) for each in ("93.184.215.14", address)]

    hosts = ImageHosts(["images.example"], resolve)
    assert "address is not public" in refusal(hosts, "https://IMAGES.example/a.png")


class PlainContext(ssl.SSLContext):
    def wrap_socket(self, sock: socket.socket, *_: Any, **__: Any) -> Any:
        return sock


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8443"])
def test_the_host_of_https_is_named_as_in_the_url(server: Any, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 9112, 3.2. A signed URL is signed with the name of its host."""

    def resolve(name: str, port: int, type: int) -> Any:
        return [(socket.AF_INET, type, 0, "", (name, server.server_port))]

    monkeypatch.setattr(ssl, "create_default_context", lambda: PlainContext(ssl.PROTOCOL_TLS_CLIENT))
    assert fetched(ImageHosts([host], resolve), f"https://{host}/ok") == PIXELS
    assert server.seen == [("/ok", host)]


def test_a_name_is_resolved_once_and_its_address_is_used(server: Any) -> None:
    """A second answer could be another address (DNS rebinding)."""
    asked = []

    def resolve(name: str, port: int, type: int) -> Any:
        asked.append((name, port))
        return [(socket.AF_INET, type, 0, "", ("127.0.0.1", port))]

    port = server.server_port
    hosts = ImageHosts([f"127.0.0.1:{port}"], resolve)
    assert fetched(hosts, f"http://127.0.0.1:{port}/ok") == PIXELS
    assert asked == [("127.0.0.1", port)]


def test_a_host_that_does_not_answer() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "could not be fetched: ConnectionRefusedError" in refusal(ImageHosts([here]), f"http://{here}/")


def test_names_of_hosts() -> None:
    assert split_host("Images.example") == ("images.example", None)
    assert split_host("images.example:8443") == ("images.example", 8443)
    assert split_host("[::1]:80") == ("::1", 80)
    for text in ("", "http://a", "a/b", "u@a", "*.a", "a:b", "*"):
        with pytest.raises(ValueError, match=r"not a host|Port"):
            split_host(text)


def test_a_client_whose_hosts_are_slow_holds_a_half_of_the_threads() -> None:
    clock = FakeClock()
    turns = Turns(FETCHES, clock)
    first = [turns.ask("slow") for _ in range(FETCHES.at_once)]
    clock.advance(SECONDS)
    for turn in first:
        turns.leave(turn)
    assert [turns.ask("slow").has_begun for _ in range(6)] == [True] * 4 + [False] * 2
    assert [turns.ask("other").has_begun for _ in range(6)] == [True] * 4 + [False] * 2


def test_the_time_of_an_image_begins_with_its_turn(server: Any) -> None:
    here = f"127.0.0.1:{server.server_port}"
    hosts = ImageHosts([here])

    async def script() -> bytes:
        turns = [hosts.turns.ask("another") for _ in range(FETCHES.at_once)]
        waiting = asyncio.ensure_future(hosts.fetch("a client", f"http://{here}/ok"))
        while not hosts.turns.waiting:
            await asyncio.sleep(0)
        hosts.seconds = 300.0
        hosts.turns.leave(turns[0])
        return await waiting

    hosts.seconds = 0.0
    try:
        assert asyncio.run(script()) == PIXELS
    finally:
        hosts.close()


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "2600::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1", "2600::200:5efe:8.8.8.8"],
)
def test_an_address_in_another_one_decides_whether_it_is_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
