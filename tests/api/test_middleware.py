"""Requests that are refused before a handler sees them: by host, by origin, by size, by number."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import re
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.api import body
from mlxpaged.api.access import local_names
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.openai import models
from mlxpaged.api.server import Server
from mlxpaged.cli import http_protocol
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import DEADLINE, FakeClock, StepGate, ask, bearer, raw, run_on, start, write_keys
from tests.support import RunningServer, running_server, wait_until

PAGE, NAMED_PAGE, OTHER_PAGE = "http://localhost:3000", "https://chat.example", "https://evil.example"
FOREIGN = [
    OTHER_PAGE,
    "null",
    "file://",
    "https://x:y",
    "[",
    "http://localhost.evil.example",
    "http://localhost:3000.evil.example",
    "http://127.0.0.1.evil.example:80",
    "http://evil.local:3000",
    "http://192.168.1.5:3000",
    "https://capacitor.example",
    "capacitor://evil.example",
    "chrome-extension://abcdef",
    "evil+app://x",
]
LOCAL = [
    PAGE,
    "http://localhost",
    "https://localhost:8443",
    "http://127.0.0.1:5173",
    "http://[::1]:3000",
    "app://.",
    "app://obsidian.md",
    "tauri://localhost",
    "http://tauri.localhost",
    "https://tauri.localhost",
    "vscode-webview://1a2b3c",
    "capacitor://localhost",
]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def key(path: Path) -> str:
    return write_keys(path, someone={"requests_per_minute": 10_000, "admin": True})["someone"]


@pytest.fixture(scope="module")
def server(path: Path, key: str) -> Iterator[RunningServer]:
    """With keys, pages and a name of its own, and small limits."""
    http = HttpConfig(
        api_keys=path, allowed_hosts=("my.mac",), cors_origins=(NAMED_PAGE,), max_body_bytes=1000, max_connections=2
    )
    with running_server(EngineConfig(kv_cache_bytes=16_000_000), http=http) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningServer]:
    with running_server(None) as server:
        yield server


def error_of(response: httpx.Response) -> tuple[int, str | None, str | None]:
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert response.headers["x-request-id"]
    return response.status_code, error["param"], error["code"]


# -- hosts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8080",
        "localhost.:80",
        "127.0.0.1",
        "127.0.0.1:9",
        "127.9.9.9",
        "[::1]:8080",
        "[::1]",
        "192.168.1.5:8080",
        "0.0.0.0",
        "[fe80::1]:80",
        "my.mac:8080",
        "MY.MAC",
        "evil.localhost",
        "annas-mac.local:8080",
        "Annas-Mac.local.",
        "host.docker.internal:8080",
        "gateway.docker.internal",
        "host.containers.internal",
    ],
)
def test_this_server_goes_by_addresses_local_names_and_the_names_it_was_given(server: RunningServer, host: str) -> None:
    with raw(server) as client:
        assert client.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "localhost.example",
        "evil.local.example",
        "local",
        "docker.internal",
        "evil.host.docker.internal",
        "evil.internal",
        "evil.lan",
        "my.mac.evil.example",
        "notmy.mac",
        "[evil.example]",
        "127.0.0.1:8080:evil.example",
        "127.1",
        "",
        "::1",
        "localhost@evil.example",
        "evil.example#.local",
        "evil.example/.local",
        "evil.example\\.local",
        "evil.example?.localhost",
        "evil.example%2f.local",
        "evil.example .local",
        "evil.example,x.local",
        "[localhost]",
        "localhost:80a",
    ],
)
def test_a_foreign_name_for_this_server_is_refused(server: RunningServer, key: str, host: str) -> None:
    with raw(server) as client:
        for where in ("/health", "/v1/models", "/nothing"):
            response = client.get(where, headers={"Host": host} | bearer(key))
            assert error_of(response) == (403, "Host", "host_not_allowed")
            assert "start the server with --allowed-host " in response.json()["error"]["message"]


def test_a_refusal_says_which_flag_would_help_with_its_value(plain: RunningServer) -> None:
    def message(**headers: str) -> str:
        with raw(plain) as client:
            return str(client.get("/v1/models", headers=headers).json()["error"]["message"])

    assert message(Host="My-Proxy.example:8080").endswith("start the server with --allowed-host my-proxy.example")
    assert message(Host="$(reboot)").endswith("start the server with --allowed-host NAME")
    assert message(Origin=OTHER_PAGE).endswith(f"start the server with --cors-origin {OTHER_PAGE}")
    assert message(Origin="https://a;b").endswith("start the server with --cors-origin ORIGIN")


def test_the_machines_own_name_is_known_in_the_zones_of_home_networks_only(
    plain: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_names.socket, "gethostname", lambda: "Annas-Mac.evil.example")
    with raw(plain) as client:
        for host in ("annas-mac", "Annas-Mac.lan:8080", "annas-mac.home"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200
        for host in ("annas-mac.evil.example", "annas-mac.example", "x.annas-mac"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 403


def test_a_page_under_a_name_that_is_only_local_by_its_form_is_refused(server: RunningServer, key: str) -> None:
    """Another machine of the network can answer for a .local name, send a page, and point the name to this machine."""
    for host, status in (("evil.local:8080", 403), ("host.docker.internal", 403), ("my.mac:8080", 200)):
        with raw(server) as client:
            response = client.get("/v1/models", headers={"Host": host, "Origin": f"http://{host}"} | bearer(key))
        assert response.status_code == status


def test_without_names_of_its_own_only_the_loopback_counts(plain: RunningServer) -> None:
    with raw(plain) as client:
        assert client.get("/v1/models", headers={"Host": "localhost"}).status_code == 200
        assert client.get("/v1/models", headers={"Host": "my.mac"}).status_code == 403


def test_a_star_lets_any_name_in() -> None:
    with running_server(None, http=HttpConfig(allowed_hosts=("*",))) as server, raw(server) as client:
        assert client.get("/v1/models", headers={"Host": "anything.example:1"}).status_code == 200


# -- pages -----------------------------------------------------------------------------------------------------------


def preflight(client: httpx.Client, origin: str, method: str = "POST") -> httpx.Response:
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    return client.options(CHAT, headers={"Origin": origin} | asked)


@pytest.mark.parametrize("origin", [NAMED_PAGE, PAGE])
def test_a_page_that_was_named_or_is_local_may_do_everything_with_a_key(
    server: RunningServer, key: str, origin: str
) -> None:
    with raw(server) as client:
        for method in ("GET", "POST", "DELETE"):
            allowed = preflight(client, origin, method)  # without a key: browsers send none here
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == origin
            assert method in allowed.headers["access-control-allow-methods"]
            assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in allowed.headers
        answer = client.post(CHAT, json=ask("x", max_tokens=1), headers={"Origin": origin} | bearer(key))
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert {"x-request-id", "request-id", "x-ratelimit-remaining-requests"} <= {*exposed}
        assert {"retry-after", "retry-after-ms", "x-should-retry"} <= {*exposed}  # official clients go by them
        refused = client.post(CHAT, json=ask("x"), headers={"Origin": origin})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == origin  # so that the page can read why


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_page_that_was_not_named_changes_nothing(
    server: RunningServer, plain: RunningServer, key: str, origin: str
) -> None:
    for served in (server, plain):
        with raw(served) as client:
            for response in (
                preflight(client, origin),
                # What a browser sends without asking first: it would only have kept the answer from the page.
                client.post("/v1/cache/clear", headers={"Origin": origin} | bearer(key)),
                client.get("/v1/models", headers={"Origin": origin} | bearer(key)),
            ):
                assert error_of(response) == (403, "Origin", "origin_not_allowed")
                assert "--cors-origin" in response.json()["error"]["message"]
                assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("origin", LOCAL)
def test_pages_of_this_machine_and_desktop_apps_may_use_the_server_by_default(
    plain: RunningServer, origin: str
) -> None:
    with raw(plain) as client:
        for response in (preflight(client, origin), client.get("/v1/models", headers={"Origin": origin})):
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == origin
            assert "Origin" in response.headers["vary"]


def test_pages_that_the_server_itself_has_sent_need_no_cors(plain: RunningServer) -> None:
    own = "http://192.168.1.5:8080"
    with raw(plain) as client:
        response = client.get("/v1/models", headers={"Host": "192.168.1.5:8080", "Origin": own})
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


def test_a_star_lets_every_page_in() -> None:
    with running_server(None, http=HttpConfig(cors_origins=("*",))) as server, raw(server) as client:
        assert preflight(client, OTHER_PAGE).headers["access-control-allow-origin"] == "*"
        response = client.get("/v1/models", headers={"Origin": "null"})
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize("route", ["/v1/models", "/v1/messages/count_tokens"])
def test_a_page_can_read_that_the_server_failed(
    server: RunningServer, key: str, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("an unexpected error")

    monkeypatch.setattr(Server, "ready", fail)
    monkeypatch.setattr(models, "models_for", fail)
    with raw(server) as client:
        headers = {"Origin": PAGE, "X-Request-Id": "mine"} | bearer(key)
        sent = {"model": "demo", "messages": [{"role": "user", "content": "x"}]} if "messages" in route else None
        response = client.request("POST" if sent else "GET", route, json=sent, headers=headers)
    assert response.status_code == 500
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["error"]["message"] == "internal server error"
    assert (response.json().get("type") == "error") == ("messages" in route)  # Anthropic's format on its route


# -- limits ----------------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_that_was_set_is_refused_with_the_limit(server: RunningServer, key: str) -> None:
    with raw(server) as client:
        fits = client.post(COMPLETIONS, content=b'{"prompt": "x", "max_tokens": 1}'.ljust(1000), headers=bearer(key))
        assert fits.status_code == 200
        response = client.post(COMPLETIONS, content=b" " * 1001, headers=bearer(key))
        assert error_of(response) == (413, "body", "body_too_large")
        assert "1000 bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize("drip", [False, True], ids=["silent", "byte by byte"])
def test_a_body_that_does_not_arrive_in_time_gets_a_408(
    server: RunningServer, key: str, monkeypatch: pytest.MonkeyPatch, drip: bool
) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.3)
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nx-api-key: {key}\r\nContent-Length: 900\r\n\r\n"
    started = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
        connection.sendall(head.encode() + b"{")
        connection.settimeout(0.05 if drip else DEADLINE)
        received = b""
        while not received:
            try:
                received = connection.recv(65536)
            except TimeoutError:
                connection.sendall(b" ")
        connection.settimeout(DEADLINE)
        with contextlib.suppress(ConnectionResetError):  # a drop may have met the closed end
            while piece := connection.recv(65536):  # the server closes it
                received += piece
    assert time.monotonic() - started >= 0.3
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_timeout"' in received


def test_the_time_in_which_the_process_is_stopped_counts_for_no_body(
    server: RunningServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's clock stands still meanwhile."""
    monkeypatch.setattr(Server, "now", 0.0)
    monkeypatch.setattr(body, "BODY_SECONDS", 0.1)
    sent = json.dumps(run_on("x", 1)).encode()

    def pieces() -> Iterator[bytes]:
        yield sent[:10]
        time.sleep(0.3)
        yield sent[10:]

    with raw(server) as client:
        assert client.post(COMPLETIONS, content=pieces(), headers={"x-api-key": key}).status_code == 200


def test_a_body_that_comes_fast_enough_may_take_longer(
    server: RunningServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 bytes each 40 s: the first must be there after 60 s, the others after 60 s more each."""
    clock = FakeClock()
    monkeypatch.setattr(Server, "now", property(lambda _: clock()))
    monkeypatch.setattr(body, "BODY_SECONDS", 60.0)
    monkeypatch.setattr(body, "MIN_BYTES_PER_SECOND", 5)
    sent = json.dumps(run_on("x", 1)).encode().ljust(900)

    def pieces() -> Iterator[bytes]:
        for first in range(0, 900, 300):
            clock.advance(40)
            yield sent[first : first + 300]

    with raw(server) as client:
        response = client.post(COMPLETIONS, content=pieces(), headers=bearer(key))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "headers",
    [{f"x-{number}": "1" for number in range(120)}, {"x-long": "y" * 66_000}, {f"x-{n}": "y" * 700 for n in range(99)}],
    ids=["many", "one long", "long together"],
)
def test_too_many_headers_are_refused(plain: RunningServer, headers: dict[str, str]) -> None:
    """Whole heads come to the application, heads in pieces to h11's own limit, as the network cuts them."""
    with raw(plain) as client:
        status, _, code = error_of(client.get("/health", headers=headers))
        assert (status, code) in ((431, "headers_too_large"), (400, "invalid_http"))
        assert client.get("/health", headers={f"x-{n}": "y" * 500 for n in range(90)}).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 70_000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Fold: a\r\n b\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: localhost\nX-Fold:\n\tTransfer-Encoding: chunked\n\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nHost: localhost\r\ncontent-length: 2, 2\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length : 2\r\n\r\n{}",
        b"POST / HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=[
        *("no HTTP", "two hosts", "no host", "endless", "folded", "folded, bare line feeds", "two kinds of length"),
        *(
            "bare line feeds",
            "a bare line feed",
            "a bare line feed at the end",
            "two equal lengths",
            "a list of lengths",
        ),
        *("a space before the colon", "chunks in HTTP 1.0"),
    ],
)
def test_what_is_no_http_gets_an_error_in_the_apis_format(plain: RunningServer, sent: bytes) -> None:
    host, port = plain.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
        connection.sendall(sent)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    response = httpx.Response(400, headers=[line.split(b": ", 1) for line in head.split(b"\r\n")[1:]], content=body)
    assert error_of(response) == (400, None, "invalid_http")


def test_a_fold_is_looked_for_in_each_head_and_in_no_body(plain: RunningServer) -> None:
    host, port = plain.url.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    body = b"{}\r\n X: 1\r\n\r\n"
    sent = head + b"Content-Length: %d\r\n\r\n" % len(body) + body + head + b"Content-Length:\r\n 2\r\n\r\n{}"
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
        connection.sendall(sent)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    _, first, second = received.split(b"HTTP/1.1 400 ")
    assert b"invalid_json" in first
    assert b"folded" in second


def exchange(server: RunningServer, *sent: bytes) -> bytes:
    """What the server answers before it closes the connection. A piece is sent after the answer to the one before."""
    host, port = server.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
        for piece in sent[:-1]:
            connection.sendall(piece)
            received += connection.recv(65536)
        connection.sendall(sent[-1])
        while piece := connection.recv(65536):
            received += piece
    return received


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
EMPTY_BODY = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    "sent",
    [
        (b"\r\n" + HEALTH,),
        (b"\n\r\n\r\n" + HEALTH,),
        (EMPTY_BODY + b"\r\n" + HEALTH,),
        (EMPTY_BODY + b"\r\n", HEALTH),
        (EMPTY_BODY, b"\r\n" + HEALTH),
        (EMPTY_BODY + b"\r", b"\n" + HEALTH),
    ],
    ids=["first", "several", "pipelined", "with the body", "after the body", "cut"],
)
def test_empty_lines_before_a_request_are_ignored(plain: RunningServer, sent: tuple[bytes, ...]) -> None:
    """Some clients end a body with one."""
    statuses = re.findall(rb"HTTP/1.1 ([0-9]+)", exchange(plain, *sent))
    assert statuses == [b"404"] * any(b"nothing" in piece for piece in sent) + [b"200"]


@pytest.mark.parametrize(
    ("target", "status", "says"),
    [
        (b"http://127.0.0.1:80/health", b"200", b'"status":"ok"'),
        (b"HTTP://localhost/v1/responses/x?y=http://z", b"400", b'"param":"y"'),
        (b"http://localhost", b"200", b"<!doctype html>"),
        (b"https://localhost?x", b"200", b"<!doctype html>"),
        (b"http://evil.example/health", b"403", b"host_not_allowed"),
        (b"http://evil.example@localhost/health", b"403", b"host_not_allowed"),
    ],
)
def test_the_host_in_a_target_counts_and_the_header_does_not(
    plain: RunningServer, target: bytes, status: bytes, says: bytes
) -> None:
    host = b"evil.example" if b"localhost" in target or b"127" in target else b"localhost"
    received = exchange(plain, b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (target, host))
    assert re.findall(rb"HTTP/1.1 ([0-9]+)", received) == [status]
    assert says in received.lower()


@pytest.mark.parametrize("path", ["/health", COMPLETIONS])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_a_chunk_that_is_no_http_ends_the_request_without_an_error_in_the_log(
    plain: RunningServer, method: str, path: str, expect: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler already has the request."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{expect}Transfer-Encoding: chunked\r\n\r\n"
    received = exchange(plain, head.encode() + b"0x5\r\nhello\r\n0\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400 ")
    assert (b"invalid_http" in received) == (method != "HEAD")
    assert exchange(plain, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")  # it has ended now
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_chunk_that_is_no_http_after_the_answer_closes_the_connection(
    plain: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    received = exchange(plain, head, b"0x5\r\n")
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 400 " not in received
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/files/x", "DELETE, GET, HEAD"),
        ("/v1/requests", "DELETE"),
        (CHAT, "POST"),
    ],
)
def test_a_method_that_is_not_allowed_gets_all_that_are(plain: RunningServer, path: str, allowed: str) -> None:
    with raw(plain) as client:
        response = client.put(path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)


def test_an_offer_of_http_2_is_ignored(server: RunningServer, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Java's client makes one with each request."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    with raw(server) as client:
        for _ in range(2):
            response = client.post(CHAT, json=ask("x", max_tokens=1), headers=offer | bearer(key))
            assert (response.status_code, response.http_version) == (200, "HTTP/1.1")
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_a_connection_that_asks_for_nothing_is_closed(plain: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    protocols: list[http_protocol.HttpProtocol] = []
    made = http_protocol.HttpProtocol.connection_made

    def noted(self: http_protocol.HttpProtocol, transport: asyncio.Transport) -> None:
        protocols.append(self)
        made(self, transport)

    host, port = plain.url.removeprefix("http://").split(":")
    with monkeypatch.context() as patch:
        patch.setattr(http_protocol.HttpProtocol, "connection_made", noted)
        kept_alive = http.client.HTTPConnection(host, int(port), timeout=DEADLINE)
        with contextlib.closing(kept_alive):
            kept_alive.connect()
            kept_alive.auto_open = 0  # never a second connection
            for _ in range(2):  # one that has sent a request stays
                kept_alive.request("GET", "/health")
                response = kept_alive.getresponse()
                assert response.status == 200
                response.read()
                protocols[0].loop.call_soon_threadsafe(protocols[0].close_if_silent)  # as if its time were over
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    for sent in (b"", b"GET /health HTTP/1.1\r\nHost:"):
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
            connection.sendall(sent)
            assert connection.recv(1) == b""


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/models", 405), ("/v1/files", 400)])
def test_a_refusal_that_does_not_wait_for_the_body_ends_the_connection(
    plain: RunningServer, path: str, status: int
) -> None:
    """The client may leave out the body, which the server would find in the next request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    received = exchange(plain, head.encode())
    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in received.lower()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n", b"{}"),
        (b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n", b"{"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /health HTTP/1.1\r\nHost:"),
    ],
    ids=["the rest of a body", "a part of a body", "a part of a head"],
)
def test_a_connection_is_closed_if_nothing_follows_what_came_after_an_answer(
    plain: RunningServer, monkeypatch: pytest.MonkeyPatch, first: bytes, then: bytes
) -> None:
    received = http_protocol.HttpProtocol.data_received

    def limited(self: http_protocol.HttpProtocol, data: bytes) -> None:
        self.timeout_keep_alive = 0 if data == then else int(DEADLINE)
        received(self, data)

    monkeypatch.setattr(http_protocol.HttpProtocol, "data_received", limited)
    assert exchange(plain, first, then).count(b"HTTP/1.1 ") == 1


def refuse_connections(server: RunningServer, monkeypatch: pytest.MonkeyPatch, lingering_share: float) -> None:
    state = server.app.state.server
    monkeypatch.setattr(state, "http", replace(state.http, max_open_connections=0.5))
    monkeypatch.setattr(http_protocol, "LINGERING_SHARE", lingering_share)
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", DEADLINE)


@pytest.mark.parametrize("share", [100.0, 0.0])
def test_a_refused_client_that_still_sends_gets_its_answer_while_few_are_refused(
    plain: RunningServer, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """The second part of its request comes after the answer, and would reset a closed connection."""
    refuse_connections(plain, monkeypatch, share)
    host, port = plain.url.removeprefix("http://").split(":")
    with (
        socket.create_connection((host, int(port)), timeout=DEADLINE) as connection,
        contextlib.nullcontext() if share else pytest.raises(ConnectionError),
    ):
        for part in (b"POST /v1/completions HTTP/1.1\r\n", b"Host: localhost\r\nContent-Length: 2\r\n\r\n", b"{}"):
            connection.sendall(part)
            assert connection.recv(4, socket.MSG_PEEK) == b"HTTP"
            time.sleep(0.05)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
        assert received.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in received


def test_a_refused_connection_gets_the_error_in_the_format_of_its_path(
    plain: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_connections(plain, monkeypatch, lingering_share=100.0)
    text = "the server has as many open connections as its limit of open files allows"
    with raw(plain) as client:
        answers = [client.post(path, json={}) for path in ("/v1/messages?beta=true", "/v1/completions", "/api/chat")]
    assert [each.status_code for each in answers] == [503] * 3
    anthropic, openai, ollama = (each.json() for each in answers)
    assert (anthropic["type"], anthropic["error"]["message"]) == ("error", text)
    assert openai["error"]["code"] == "too_many_connections"
    assert ollama == {"error": text}


def test_a_connection_that_has_ended_keeps_no_memory(plain: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer keeps what it would close: 7 KB for 30 s. Under load, thousands of connections end in that time."""
    connections: list[weakref.ref[asyncio.BaseProtocol]] = []
    made = http_protocol.HttpProtocol.connection_made

    def noted(self: http_protocol.HttpProtocol, transport: asyncio.Transport) -> None:
        connections.append(weakref.ref(self))
        made(self, transport)

    monkeypatch.setattr(http_protocol.HttpProtocol, "connection_made", noted)
    host, port = plain.url.removeprefix("http://").split(":")
    for sent in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        for reset in (False, True):
            with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
                connection.sendall(sent)
                assert not sent or connection.recv(65536).startswith(b"HTTP/1.1 200 ")
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def are_gone() -> bool:
        gc.collect()
        return len(connections) == 4 and not any(each() for each in connections)

    wait_until(are_gone, pause=0.1)


def test_more_requests_than_the_limit_get_a_503_and_health_is_still_answered(server: RunningServer, key: str) -> None:
    with StepGate(server) as gate, raw(server) as client:
        pending = [start(server, run_on("x", 2, stream=name == "b"), name, **bearer(key)) for name in "ab"]
        response = client.post(COMPLETIONS, json=run_on("x", 1), headers=bearer(key))
        assert error_of(response) == (503, None, "too_many_connections")
        assert response.headers["retry-after"] == "1"
        assert client.get("/health").status_code == 200
        gate.open()
        assert [each.result().status_code for each in pending] == [200, 200]

        def served() -> bool:
            return client.post(COMPLETIONS, json=run_on("x", 1), headers=bearer(key)).status_code == 200

        wait_until(served)


def test_a_client_that_leaves_gives_its_place_back(server: RunningServer, key: str) -> None:
    with StepGate(server) as gate, raw(server) as client:
        for _ in range(5):
            sent: dict[str, Any] = run_on("x", 50, stream=True)
            with client.stream("POST", COMPLETIONS, json=sent, headers=bearer(key)) as response:
                assert response.status_code == 200
            gate.allow(1)
            wait_until(lambda: not list(server.app.state.server.open_requests))
        gate.open()
    server.wait_idle()
