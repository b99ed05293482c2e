"""`mlxpaged run`: one answer as plain text, from a server that runs or from one of its own."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.api.batches.store import Store
from mlxpaged.cli import background_server, run_prompt
from mlxpaged.cli.client import Client, ServerError
from mlxpaged.cli.connection import chosen
from mlxpaged.cli.running_servers import running_servers
from mlxpaged.engine_config import EngineConfig
from tests.cli.helpers import Result
from tests.scripted import scripted_server
from tests.support import RunningServer, running_server, wait_until

pytestmark = pytest.mark.usefixtures("home")

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "chat-phone.png"

SCRIPT = {
    "Why?": "<think>\nHm, why.\n</think>\n\nBe\x1bcause.",
    "Long?": "so " * 90,
    "first\n\nsecond": "Both.",
    "Be rude.": "No.",
    "- one\n- two": "A list.",
}


@pytest.fixture(autouse=True)
def _empty_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", SCRIPT) as server:
        yield server


@pytest.fixture
def ask(run: Callable[..., Result], server: RunningServer) -> Callable[..., Result]:
    return lambda *args: run("run", "scripted", *args, "--url", server.url)


def test_the_answer_is_printed_without_its_thinking(ask: Callable[..., Result]) -> None:
    assert ask("Why?") == Result(0, "Be\x1bcause.\n", "")


def test_a_terminal_gets_no_control_characters(ask: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert ask("Why?").stdout == "Because.\n"


def test_thinking_goes_to_standard_error_if_it_is_wanted(ask: Callable[..., Result]) -> None:
    result = ask("--think", "Why?")
    assert result.stdout == "Be\x1bcause.\n"
    assert result.stderr.strip() == "Hm, why."


def test_words_and_standard_input_are_one_prompt(ask: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("second\n"))
    assert ask("--max-tokens", "9", "first").stdout == "Both.\n"


def test_a_prompt_may_begin_with_a_dash(ask: Callable[..., Result]) -> None:
    assert ask("- one\n- two", "--max-tokens", "9").stdout == "A list.\n"


def test_a_system_message_and_limits_are_sent(ask: Callable[..., Result]) -> None:
    assert ask("Why?", "--system", "Be rude.").stdout == "Be\x1bcause.\n", "the prompt comes last"
    cut = ask("--temperature", "0", "Long?", "--max-tokens", "6")
    assert cut == Result(3, "so so \n", "mlxpaged: the answer is cut: it has reached the most tokens it may have\n")


def test_a_seed_repeats_an_answer(run: Callable[..., Result], demo_server: RunningServer) -> None:
    flags = ("--temperature", "2", "--top-p", "0.99", "--max-tokens", "8", "--url", demo_server.url)
    answers = [run("run", "demo", "Tell me of xyzzy?", *flags, "--seed", "7").stdout for _ in range(2)]
    others = {run("run", "demo", "Tell me of xyzzy?", *flags, "--seed", str(seed)).stdout for seed in range(8)}
    assert answers[0] == answers[1]
    assert len(others) > 1


def test_a_schema_is_enforced(run: Callable[..., Result], demo_server: RunningServer, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema | {"additionalProperties": False}))
    for given in (str(tmp_path / "schema.json"), (tmp_path / "schema.json").read_text()):
        answer = run("run", "demo", "What is 3 + 4?", "--json-schema", given, "--url", f"{demo_server.url}/v1/")
        assert isinstance(json.loads(answer.stdout)["n"], int)


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["scripted"], 2, "there is no prompt"),
        (["scripted", "x", "--temperature", "3"], 2, "must be a number from 0 to 2"),
        (["scripted", "x", "--top-p", "0"], 2, "must be a number above 0 and at most 1"),
        (["scripted", "x", "--seed", "x"], 2, "must be a whole number from 0 to 2**64 - 1"),
        (["scripted", "x", "--max-tokens"], 2, "expected one argument"),
        (["scripted", "x", "--json-schema", "[]"], 2, "neither a JSON schema nor a file with one"),
        (["scripted", "x", "--api-key", "schlüssel"], 2, "must be letters, digits and signs of ASCII"),
        (["other", "x"], 1, "does not serve other. It serves scripted. It also loads any model that is on its machine"),
        (["scripted", "x", "--image", "/no/such.png"], 2, "/no/such.png cannot be read: No such file or directory"),
        (["scripted", "x", "--image", __file__], 2, "test_run_prompt.py is no PNG, JPEG, WEBP or GIF"),
        (["scripted", "x", "--image", str(PICTURE)], 1, "scripted does not see images; no model of the server does"),
        (["a prompt in place of the model " * 10, "x"], 1, "does not serve a prompt in place of the model"),
        (["scripted", "x", "--url", "ftp://a"], 2, "must be an address such as http://"),
        (["scripted", "x", "--url", "127.0.0.1:1"], 1, "no server runs at http://127.0.0.1:1"),
        (["scripted", "x " * 9000], 1, "context length"),
        (["scripted", "caf\udce9"], 1, "the prompt is not text in UTF-8"),
    ],
)
def test_what_cannot_be_answered_is_said_in_a_line(
    run: Callable[..., Result], server: RunningServer, args: list[str], status: int, said: str
) -> None:
    url = [] if "--url" in args else ["--url", server.url]
    result = run("run", *url, *args)
    assert (result.status, result.stdout) == (status, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_images_are_shown_before_the_prompt(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(EngineConfig(model="demo-vision", kv_cache_bytes=64_000_000)) as server:
        result = run("run", "demo-vision", "--url", server.url, "--image", str(PICTURE), "What number is it?")
    assert (result.status, result.stderr) == (0, "")
    assert result.stdout.strip()
    bodies: list[dict[str, Any]] = []
    monkeypatch.setattr(run_prompt, "connected", lambda *args, **options: contextlib.nullcontext(options))
    monkeypatch.setattr(run_prompt, "print_answer", lambda connection, body, thinks: bodies.append(body) or 0)
    run("run", "x", "--image", str(PICTURE), "What is it?", "--image", str(PICTURE))
    url = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    assert bodies[0]["messages"][-1]["content"] == [part, part, {"type": "text", "text": "What is it?"}]


def test_a_model_that_does_not_see_is_not_loaded_for_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        {"id": "text", "state": "available", "kind": "text"},
        {"id": "eyes", "state": "available", "kind": "vision"},
        {"id": "shut", "state": "loaded", "kind": "vision", "capabilities": {"vision": False}},
    ]
    posted: list[str] = []

    def post(client: Client, path: str, **options: Any) -> dict[str, Any]:
        posted.append(path)
        name = path.split("/")[3]
        return {"id": name, "kind": "text" if name == "other" else "vision"}

    monkeypatch.setattr(Client, "get", lambda self, path: {"data": entries})
    monkeypatch.setattr(Client, "post", post)
    client = Client("http://x")
    for name in ("text", "shut"):
        with pytest.raises(ServerError, match=f"{name} does not see images; eyes can"):
            chosen(client, name, lambda text: None, shows_images=True)
    assert posted == []
    assert chosen(client, "eyes", lambda text: None, shows_images=True) == "eyes"
    with pytest.raises(ServerError, match="other does not see images"):  # known once it is loaded
        chosen(client, "other", lambda text: None, shows_images=True)


def test_a_gguf_file_is_loaded_by_the_running_server(
    run: Callable[..., Result], demo_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    result = run("run", "broken.gguf", "Why?", "--url", demo_server.url)
    assert result.status == 1
    assert f"{tmp_path}/broken.gguf cannot be loaded: " in result.stderr


def test_a_server_that_cannot_be_found_is_not_waited_for(run: Callable[..., Result], home: Path) -> None:
    home.touch()
    result = run("run", "demo", "Why?")
    assert (result.status, result.stdout) == (1, "")
    reason = f"{home / '.mlxpaged'}: Not a directory"
    assert result.stderr == f"mlxpaged: the file of a new server cannot be written: {reason}\n"


def test_without_room_for_its_log_no_server_is_started(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    result = run("run", "demo", "Why?")
    assert (result.status, result.stdout) == (1, "")
    assert result.stderr.startswith("mlxpaged: no server can be started: ")


def test_without_a_server_one_is_started_with_the_configuration_and_ended(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = socket.create_server(("127.0.0.1", 0))  # by the server of another chat, with the same configuration
    configured = f'served-model-name = "mine"\nollama-port = {taken.getsockname()[1]}\ndata-dir = "{tmp_path}/data"\n'
    (file := tmp_path / "mine.toml").write_text(configured)
    (tmp_path / "uvloop.py").write_text("raise SystemExit('a file of the working directory')")
    monkeypatch.chdir(tmp_path)
    started: list[background_server.BackgroundServer] = []
    end = background_server.BackgroundServer.end

    def watched(self: background_server.BackgroundServer) -> None:
        started.append(self)
        [server] = running_servers()
        assert not server.shared
        assert [entry["id"] for entry in Client(server.url).get("/v1/models")["data"]][:1] == ["mine"]
        end(self)

    monkeypatch.setattr(background_server.BackgroundServer, "end", watched)
    with taken, contextlib.closing(Store(tmp_path / "data")):
        assert run("--config", str(file), "run", "demo", "What is 17 + 25?").stdout == "42\n"
    assert len(started) == 1
    wait_until(lambda: not running_servers())
