"""What a command makes of a server's answers, and of other programs at its address."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlxpaged.cli.answer import Answer, pieces
from mlxpaged.cli.client import Client, Comment, ServerError
from mlxpaged.cli.connection import wait_loaded
from tests.support import RunningServer


@contextlib.contextmanager
def server(*answers: tuple[int, str]) -> Iterator[Client]:
    """Gives these answers, one to each request. {key}: the key that the request has."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = left.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.replace("{key}", self.headers.get("Authorization", "none")).encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Client(f"http://127.0.0.1:{http.server_address[1]}", "sk-1")
        finally:
            http.shutdown()
            thread.join()


def said(client: Client, call: str = "get") -> tuple[str, int | None]:
    with pytest.raises(ServerError) as caught:
        client.health() if call == "health" else client.get("/v1/models")
    return str(caught.value), caught.value.status


def test_an_error_is_the_servers_own_sentence(demo_server: RunningServer) -> None:
    client = Client(demo_server.url)
    with pytest.raises(ServerError, match="nothing") as caught:
        client.get("/v1/models/nothing")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_errors_of_other_programs_have_a_sentence_too() -> None:
    with server((502, "<html>"), (500, "[]"), (401, '{"error": {"message": "no key"}}'), (401, "")) as client:
        assert said(client) == ("the server answered 502 Bad Gateway", 502)
        assert said(client) == ("the server answered 500 Internal Server Error", 500)
        assert said(client) == ("no key (--api-key or MLXPAGED_API_KEY)", 401)
        assert said(client)[0] == "the server needs an API key (--api-key or MLXPAGED_API_KEY)"


def test_another_program_is_not_taken_for_the_server() -> None:
    with server((200, "ok"), (404, "{}"), (200, '{"status": "ok"}')) as client:
        for _ in range(3):
            assert said(client, "health") == (f"what runs at {client.url} is not mlxpaged", None)


def test_a_server_that_is_reached_by_another_name_says_how_to_allow_it(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, port = socket.getaddrinfo, demo_server.url.rpartition(":")[2]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: resolve("127.0.0.1", *rest, **more))
    message, status = said(Client(f"http://studio.example:{port}"), "health")
    assert (message.endswith("start the server with --allowed-host studio.example"), status) == (True, 403)


def test_a_program_that_may_be_another_one_does_not_get_the_key() -> None:
    with server((200, '{"status": "{key}", "model": null}'), (200, '{"id": "{key}"}')) as client:
        assert client.health()["status"] == "none"
        assert client.get("/v1/models") == {"id": "Bearer sk-1"}


def test_a_name_that_no_host_can_have_is_not_found() -> None:
    assert said(Client(f"http://{'a' * 70}.example"))[0].startswith("the connection to http://aaa")


def test_a_stream_that_ends_early_is_an_error() -> None:
    event = 'data: {"choices": [{"index": 0, "delta": {"content": "4"}, "finish_reason": null}]}\n\n'
    with server(
        (200, f": waiting, 3 before it\n\n{event}"), (200, event + 'data: {"error": {"message": "out"}}\n\n')
    ) as client:
        for reason in ("the server has closed the connection", "out"):
            answer = Answer()
            found = []
            with pytest.raises(ServerError, match=reason):
                found.extend(pieces(client, {}, answer))
            assert answer.text == "4"


def test_comments_of_a_stream_say_how_far_it_is() -> None:
    with server((200, ': prefill 3/9\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n')) as client:
        assert list(client.stream("/", {})) == [Comment("prefill 3/9"), {"choices": []}]


def test_a_server_that_loads_is_waited_for() -> None:
    loading = '{"status": "loading", "model": null, "progress": "loading 1 of 2 GB"}'
    shown: list[str] = []
    with server(
        (503, loading), (503, '{"status": "loading", "model": null}'), (200, '{"status": "ok", "model": "a"}')
    ) as client:
        wait_loaded(client, shown.append)
    assert shown == ["loading 1 of 2 GB", "loading"]
    with (
        server((503, '{"status": "dead", "model": null, "reason": "no memory"}')) as client,
        pytest.raises(ServerError, match="no memory"),
    ):
        wait_loaded(client, shown.append)


@pytest.mark.parametrize("body", ["null", "[]", "3", "", "<html>"])
def test_an_answer_that_is_no_object_is_not_this_servers(body: str) -> None:
    with server((200, body), (200, body)) as client:
        for ask in (client.get, client.post):
            with pytest.raises(ServerError, match="is not mlxpaged: its answer to /v1/models/x/load is no object"):
                ask("/v1/models/x/load")
