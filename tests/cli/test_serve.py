"""`mlxpaged serve` as a process: banner, answers, signals, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mlxpaged.api.app import create_app
from mlxpaged.api.config import HttpConfig
from mlxpaged.cli import http_server, port_in_use, serve, smaller_model
from mlxpaged.cli.banner import banner, page_address
from mlxpaged.cli.http_protocol import HttpProtocol
from mlxpaged.cli.http_server import HttpServer, url_of
from mlxpaged.cli.port_in_use import occupant
from mlxpaged.engine import async_engine
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine.info import EngineInfo
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models import device_memory
from mlxpaged.models.errors import ModelNotFoundError
from mlxpaged.models.loader import DEMO_PATH, load_model
from mlxpaged.registry.registry import Registry
from tests.cli.helpers import DEADLINE, Command, Result, hub, mlxpaged, question, serving
from tests.models.architectures import make_architecture
from tests.models.gguf_blocks import quantized_q8_0
from tests.models.gguf_files import Stored, plain
from tests.models.gguf_models import as_gguf
from tests.support import RunningServer, make_embedding_model, make_tiny_model, wait_until


@contextlib.contextmanager
def running_stream(command: Command, num_tokens: int) -> Iterator[Iterator[Any]]:
    """A stream of exactly `num_tokens` tokens of which the first text has arrived; yields the events to come."""
    body = {"prompt": "Repeat: x", "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(timeout=DEADLINE, trust_env=False) as client,
        client.stream("POST", f"{command.url}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        events = (line if line == "[DONE]" else json.loads(line) for line in lines)
        next(events)
        yield events


def refused(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=DEADLINE).close()
    except ConnectionRefusedError:
        return True
    return False


def in_order(text: str, *parts: str) -> bool:
    places = [text.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


def test_the_banner_describes_the_server_and_its_curl_line_works(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-num-seqs", "7", env={"MLXPAGED_MAX_QUEUE": "0"}, fork=False) as command:
        banner = command.stdout
        assert "start_display: listening on http" in command.stderr  # how far it is depends on when it is asked
        assert re.search(r"model +demo: \d+ layers", banner)
        assert re.search(r"\d+ blocks of 32 tokens", banner)
        assert "up to 7 sequences" in banner
        assert re.search(rf"address +{command.url}\n", banner)
        page = re.search(r"^In a browser: (\S+)$", banner, flags=re.MULTILINE)
        assert page is not None
        assert httpx.get(page[1], trust_env=False).headers["content-type"].startswith("text/html")
        curl = banner[banner.index("curl ") :]
        script = curl.replace("curl ", "curl -s --noproxy '*' ", 1)
        answer = subprocess.run(["sh", "-c", script], capture_output=True, timeout=DEADLINE, check=True)
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
        assert question(command.url) == "42"
        # The variable counts in a real process too: with no queue, seven requests at most.
        body = {"prompt": ["a"] * 8, "max_tokens": 1}
        response = httpx.post(f"{command.url}/v1/completions", json=body, timeout=DEADLINE, trust_env=False)
        assert "exceed the limit of 7" in response.json()["error"]["message"]


def test_the_banner_tells_of_the_memory_for_recurrent_states(tmp_path: Path) -> None:
    config = {"state_size": 512, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4}
    model = make_tiny_model(tmp_path / "model", "mamba", **config)
    with serving(tmp_path, str(model), "--max-num-seqs", "7", "--state-cache-memory", "1.2MB") as command:
        # Two layers of 96 x 512 and 96 x 3 float32
        line = r"states +0\.4 MB for each sequence: 7 sequences and 3 checkpoints, 4\.0 MB reserved\n"
        assert re.search(line, command.stdout)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("internlm3", "  slower    2 of 2 layers run once per sequence, without a prefix cache\n"),
        ("gemma3_text", "  groups    3 cache groups: 2 with a window of 12 tokens\n"),
    ],
)
def test_the_banner_tells_of_slower_layers_and_of_cache_groups(tmp_path: Path, name: str, line: str) -> None:
    config = EngineConfig(str(make_architecture(tmp_path / "model", name)), kv_cache_bytes=2_000_000)
    registry = Registry.of(config)
    engine = registry.default.engine = AsyncEngine(config)
    engine.info = EngineInfo(build_engine(config, load_model(config.model)), config)
    assert line in banner(registry, "http://127.0.0.1:1", needs_key=False)


@pytest.mark.parametrize(
    ("url", "page"),
    [
        ("http://127.0.0.1:80", "http://127.0.0.1:80/"),
        ("http://0.0.0.0:80", "http://127.0.0.1:80/"),
        ("http://[::]:80", "http://[::1]:80/"),
        ("http://10.0.0.7:80", "http://10.0.0.7:80/"),
    ],
)
def test_the_address_of_the_page_is_one_that_a_browser_on_this_machine_can_open(url: str, page: str) -> None:
    assert page_address(url) == page


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_banner_tells_of_the_swap_space_and_of_the_embedding_model(tmp_path: Path, in_memory: bool) -> None:
    second = make_embedding_model(tmp_path / "second")
    flags = ["--swap-space", "20MB", "--embedding-model", str(second), "--served-embedding-model-name", "vectors"]
    place = "memory" if in_memory else str(tmp_path)
    with serving(tmp_path, *flags, *([] if in_memory else ["--swap-dir", place])) as command:
        found = re.search(rf"swap +(\S+) MB in {place}: (\d+) blocks, (\d+) tokens\n", command.stdout)
        assert found is not None, command.stdout
        assert 19 < float(found[1]) <= 20
        assert int(found[3]) == 32 * int(found[2]) > 0
        assert "embedding vectors: 64 dimensions, inputs up to 512 tokens\n" in command.stdout


def test_without_batching_one_request_runs_at_a_time_with_the_same_answers(tmp_path: Path) -> None:
    with serving(tmp_path, "--no-batching", "--no-prefix-cache", "--served-model-name", "x") as command:
        assert "up to 1 sequences" in command.stdout
        assert question(command.url, model="x") == "42"
        assert question(command.url, "Reverse: a b c") == "c b a"
        command.process.send_signal(signal.SIGTERM)
        assert command.wait_end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_requests_finish_and_ends_with_status_0(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path, "--drain-timeout", "60", fork=number is signal.SIGTERM, slow=True) as command:
        with running_stream(command, 200) as events:
            command.process.send_signal(number)
            command.wait_logged("no new requests")
            assert refused(command.url), "what the log says is so when it is said"
            assert "drained" not in command.stderr, "the stream ended before new connections were refused"
            command.go_on()
            *chunks, done = list(events)
        assert done == "[DONE]"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert command.wait_end() == 0
        assert in_order(
            command.stderr,
            f"{number.name}: no new requests",
            "drained",
            "HTTP closed",
            "engine stopped",
            "engine thread stopped",
        )
        assert "Traceback" not in command.stderr
        assert "used=0" in command.stderr


def test_the_drain_limit_ends_what_still_runs_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout", "0.2", slow=True) as command:
        with running_stream(command, 1000) as events:
            command.process.send_signal(signal.SIGINT)
            received = list(events)
        assert "shutting down" in received[-1]["error"]["message"]
        assert command.wait_end() == 0
        assert in_order(command.stderr, "are ended now", "HTTP closed", "engine stopped", "engine thread stopped")
        assert "Traceback" not in command.stderr


def test_a_second_signal_does_not_wait_for_running_requests(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout", "600", slow=True) as command:
        with running_stream(command, 1000) as events:
            command.process.send_signal(signal.SIGINT)
            command.wait_logged("no new requests")
            command.process.send_signal(signal.SIGINT)
            assert command.wait_end() == 0
            with contextlib.suppress(httpx.HTTPError):
                assert "[DONE]" not in list(events)
        assert "drained" not in command.stderr
        assert "Traceback" not in command.stderr


def test_a_client_that_never_finishes_its_request_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """One connection idle, one in the middle of a head, one in the middle of a body."""
    with serving(tmp_path, "--drain-timeout", "0") as command:
        host, port = command.url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for sent in (b"", b"POST /v1/comp", head + b'{"prompt"'):
                connection = stack.enter_context(socket.create_connection((host, int(port))))
                connection.sendall(sent)
            assert question(command.url) == "42"
            command.process.send_signal(signal.SIGTERM)
            assert command.wait_end() == 0
        assert "engine thread stopped" in command.stderr
        assert "Traceback" not in command.stderr


def test_events_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TCP_NODELAY the kernel holds small writes back for an acknowledgement: 40 ms for every answer. The event
    loop sets it, or does not."""
    options: list[int] = []
    connection_made = HttpProtocol.connection_made

    def watched(self: HttpProtocol, transport: asyncio.Transport) -> None:
        connection_made(self, transport)
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    def connect() -> None:
        try:
            with socket.create_connection(listener.getsockname()) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                wait_until(lambda: options)
        finally:
            server.should_exit = True

    monkeypatch.setattr(HttpProtocol, "connection_made", watched)
    listener = serve.listen("127.0.0.1", 0)
    server = HttpServer(create_app(None), [listener], 0)
    client = threading.Thread(target=connect)
    client.start()
    assert server.run_until_signal() == 0
    client.join()
    assert len(options) == 1
    assert options[0] > 0


def test_both_ports_lead_to_the_same_server() -> None:
    listeners = [serve.listen("127.0.0.1", 0) for _ in range(2)]
    urls = [url_of(listener) for listener in listeners]
    app = create_app(None, http=HttpConfig(ollama_port=listeners[1].getsockname()[1]))
    server = HttpServer(app, listeners, 0)
    found: list[tuple[int, str]] = []

    def ask() -> None:
        try:
            with httpx.Client(trust_env=False, timeout=DEADLINE) as client:
                for url in urls:
                    version, root = (client.get(f"{url}{path}") for path in ("/api/version", "/"))
                    found.append((version.status_code, root.headers["content-type"].partition(";")[0]))
        finally:
            server.should_exit = True

    client = threading.Thread(target=ask)
    client.start()
    assert server.run_until_signal() == 0
    client.join()
    assert found == [(200, "text/html"), (200, "text/plain")]


def test_freed_memory_is_returned_again_and_again_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    returned_by: list[threading.Thread] = []

    def return_freed_memory() -> None:
        returned_by.append(threading.current_thread())
        server.should_exit = len(returned_by) >= 3

    monkeypatch.setattr(http_server, "RETURN_SECONDS", 0.001)
    monkeypatch.setattr(http_server, "return_freed_memory", return_freed_memory)
    server = HttpServer(create_app(None), [serve.listen("127.0.0.1", 0)], 0)
    assert server.run_until_signal() == 0
    assert len(returned_by) >= 3
    assert threading.main_thread() not in returned_by


def test_a_port_in_use_is_said_in_a_sentence(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_in_use, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(serve, "server_models", None)  # it is said before the engine is imported
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port))
    assert (result.status, result.stdout) == (1, "")
    assert result.stderr == (
        f"mlxpaged: cannot listen on 127.0.0.1:{port}: Address already in use: another program uses it, "
        f"which `lsof -nP -i :{port}` names; end that, or choose another port with --port\n"
    )


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"/health": '{"status": "ok", "model": "demo"}'}, "mlxpaged runs there already with demo; use it"),
        ({"/health": '{"status": "ok", "model": null}'}, "mlxpaged runs there already; use it"),
        (
            {
                "/health": '{"status": "ok", "model": "a"}',
                "/v1/models": '{"data": [{"id": "a", "state": "loaded"}, {"id": "b", "state": "loaded"}, {"id": "c"}]}',
            },
            "mlxpaged runs there already with a, b; use it (`mlxpaged ps --url URL`), end it with "
            "`mlxpaged stop --url URL`, or choose another port with --ollama-port",
        ),
        ({"/": "Ollama is running"}, "Ollama runs there; quit it, or choose another port with --ollama-port"),
        ({"/health": "[1]", "/": "<html>"}, "another program uses it"),
    ],
)
def test_what_uses_a_port_is_named(answers: dict[str, str], said: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path, "{}").encode()
            self.send_response(200 if self.path in answers else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert said in occupant(url, "--ollama-port").replace(url, "URL")
        server.shutdown()
        thread.join()


def test_a_real_server_on_the_port_is_named(demo_server: RunningServer, run: Callable[..., Result]) -> None:
    port = demo_server.url.rpartition(":")[2]
    assert "mlxpaged runs there already with demo; use it" in run("serve", "--port", port).stderr


def test_a_directory_without_a_model_is_said_in_a_sentence(tmp_path: Path, run: Callable[..., Result]) -> None:
    result = run("serve", "--port", "0", str(tmp_path / "nothing"))
    assert result.status == 1
    [sentence] = [line for line in result.stderr.splitlines() if line.startswith("mlxpaged: ")]
    assert str(tmp_path / "nothing") in sentence
    assert result.stdout == ""


def test_a_model_that_does_not_fit_is_said_with_one_that_does(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "system_free_memory", lambda: 200_000)
    monkeypatch.setattr(device_memory, "CPU_MARGIN", 0)
    monkeypatch.setattr(smaller_model, "largest_within", lambda size: "qwen3:0.6b" if size < 200_000 else None)
    result = run("serve", "--port", "0")
    assert result.status == 1
    [sentence] = [line for line in result.stderr.splitlines() if line.startswith("mlxpaged: ")]
    assert "its weights take" in sentence
    assert re.search(r"; qwen3:0\.6b would fit \(3\d\d\.\d MB\)$", sentence)


@pytest.mark.parametrize(
    ("name", "said"),
    [("~no-such-user/model", "there is no such home directory"), ("./" + "x" * 300, "File name too long")],
)
def test_a_path_that_cannot_be_looked_up_is_said_in_a_sentence(
    run: Callable[..., Result], name: str, said: str
) -> None:
    result = run("serve", "--port", "0", name)
    assert result.status == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_start_that_fails_does_not_wait_for_a_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of the server before may be open, and watch the new one."""
    most, lines, watched = 200, list[str](), threading.Event()

    def load(*_: Any) -> None:
        watched.wait(DEADLINE)
        raise ModelNotFoundError("there is no such model")

    def watch() -> None:
        with httpx.stream("GET", f"{server.url}/v1/status/stream", timeout=DEADLINE, trust_env=False) as response:
            for line in response.iter_lines():
                lines.append(line)
                watched.set()
                if len(lines) == most:
                    return

    monkeypatch.setattr(async_engine, "load_core", load)
    registry = Registry.of(EngineConfig())
    registry.start(uvloop.new_event_loop())
    server = HttpServer(create_app(registry), [serve.listen("127.0.0.1", 0)], DEADLINE)
    client = threading.Thread(target=watch)
    client.start()
    assert server.run_until_signal() == 1
    client.join()
    assert len(lines) < most


def test_a_server_without_a_model_ends_the_stream_of_its_page(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[str] = []

    def watch() -> None:
        with httpx.stream("GET", f"{server.url}/v1/status/stream", timeout=DEADLINE, trust_env=False) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            ends.append(list(lines)[-1])

    server = HttpServer(create_app(None), [serve.listen("127.0.0.1", 0)], 0)
    client = threading.Thread(target=watch)
    client.start()
    assert server.run_until_signal() == 0
    client.join()
    assert ends == [""]
    assert "Exception in ASGI application" not in caplog.text


@pytest.mark.parametrize("begins", [False, True])
def test_an_answer_that_takes_longer_than_the_end_of_the_server_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, begins: bool
) -> None:
    answers: list[bytes] = []

    async def slow(*_: Any) -> Response:
        if not begins:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        return StreamingResponse(pieces())

    async def pieces() -> AsyncIterator[bytes]:
        yield b"a part"
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    def ask() -> None:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as client:
            client.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answers.append(b"".join(iter(lambda: client.recv(4096), b"")))

    app = create_app(None)
    app.routes.append(Route("/slow", slow))
    server = HttpServer(app, [serve.listen("127.0.0.1", 0)], 0)
    client = threading.Thread(target=ask)
    client.start()
    assert server.run_until_signal() == 0
    client.join()
    [answer] = answers
    assert (b"a part" if begins else b'"code":"draining"') in answer
    assert "Traceback" not in caplog.text


def test_a_mistyped_model_is_one_line_and_a_debug_log_has_the_traceback(tmp_path: Path) -> None:
    with mlxpaged(tmp_path / "run", "serve", "--port", "0", "./nothing") as command:
        assert command.wait_end() == 1
        assert re.fullmatch(r"mlxpaged: no such directory: nothing; .+\n", command.stderr)
        assert command.stdout == ""
    with mlxpaged(tmp_path / "run", "serve", "--port", "0", "./nothing", "--log-level", "debug") as command:
        assert command.wait_end() == 1
        assert "Traceback" in command.stderr
        assert "ModelNotFoundError: no such directory" in command.stderr


def test_serve_none_is_up_without_a_model(tmp_path: Path) -> None:
    with serving(tmp_path, "none") as command:
        with httpx.Client(base_url=command.url, timeout=DEADLINE, trust_env=False) as client:
            assert client.get("/health").json()["status"] == "ok"
            assert client.get("/v1/models").json()["data"] == []
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        command.process.send_signal(signal.SIGINT)
        assert command.wait_end() == 0
        assert "Traceback" not in command.stderr


def test_a_hub_repository_is_downloaded_and_served(tmp_path: Path) -> None:
    with hub("someone/tiny", DEMO_PATH) as (address, requests):
        env = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
        with serving(tmp_path / "run", "someone/tiny", env=env) as command:
            assert question(command.url, model="someone/tiny") == "42"
            models = httpx.get(f"{command.url}/v1/models", trust_env=False, timeout=DEADLINE).json()["data"]
            assert [model["id"] for model in models] == ["someone/tiny"]
            assert any(request.startswith("GET ") and "model.safetensors" in request for request in requests)
        with mlxpaged(tmp_path / "other", "serve", "someone/absent", "--port", "0", env=env) as command:
            assert command.wait_end() == 1
            [sentence] = [line for line in command.stderr.splitlines() if line.startswith("mlxpaged: ")]
            assert "someone/absent" in sentence
            assert command.stdout == ""


def test_a_gguf_file_is_served_with_its_chat_template(tmp_path: Path) -> None:
    def store(_: str, array: Any) -> Stored:
        return plain(array) if array.ndim < 2 else quantized_q8_0(array)

    template = {"tokenizer.chat_template": (DEMO_PATH / "chat_template.jinja").read_text()}
    path = as_gguf(DEMO_PATH, tmp_path / "demo-Q8_0.gguf", store, lambda metadata, _: metadata.update(template))
    with serving(tmp_path / "run", str(path)) as command:
        assert question(command.url) == "42"


def test_a_hub_repository_without_a_model_that_can_be_loaded_is_said_in_a_sentence(tmp_path: Path) -> None:
    (directory := tmp_path / "files").mkdir()
    (directory / "mmproj-q4.gguf").write_bytes(b"GGUF")
    with hub("someone/tiny-GGUF", directory) as (address, requests):
        env = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
        with mlxpaged(tmp_path / "run", "serve", "someone/tiny-GGUF", "--port", "0", env=env) as command:
            assert command.wait_end() == 1
            [sentence] = [line for line in command.stderr.splitlines() if line.startswith("mlxpaged: ")]
            assert "someone/tiny-GGUF cannot be loaded: it has no GGUF file of a language model" in sentence
            assert "Traceback" not in command.stderr
        assert not any("mmproj-q4.gguf" in request for request in requests)
