"""The conformance cases pass on this server, and each fails on a server that does wrong what it checks."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.conformance.__main__ import report
from benchmarks.conformance.case import CASES, Outcome, run
from benchmarks.conformance.target import DEFINES, NotReady, Target
from mlxpaged.engine_config import EngineConfig
from tests.cli.helpers import DEADLINE, serving
from tests.support import RunningServer, make_embedding_model, running_server

Body = dict[str, Any]
Change = Callable[[str, Body, str], tuple[int, str, str]]


@pytest.mark.more
def test_a_server_process_passes_all_cases(tmp_path: Path) -> None:
    with serving(tmp_path, "demo", "--kv-cache-memory", "64MB") as command:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.conformance", command.url, "--timeout", str(DEADLINE)],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
    assert "| failed |" not in done.stdout, done.stdout
    assert done.returncode == 0, done.stderr
    embeddings = sum(case.endpoint == "embeddings" for case in CASES)
    assert f"| all |  | {len(CASES) - embeddings} of {len(CASES) - embeddings} | {embeddings} |" in done.stdout


def test_a_server_of_an_embedding_model_passes_the_cases_of_embeddings(tmp_path: Path) -> None:
    path = make_embedding_model(tmp_path / "model")
    with running_server(EngineConfig(model=str(path), served_model_name="demo")) as server:
        target = Target(server.url, "demo", 512, DEADLINE)
        assert failed(target, *(case.id for case in CASES if case.endpoint == "embeddings")) == {}


@contextmanager
def stand_in(answer: Callable[[str, str, bytes], tuple[int, str, str]]) -> Iterator[Target]:
    """A server whose replies (status, content type, text) a function makes of method, path and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, kind, text = answer(self.command, self.path, body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_DELETE = do_POST

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Target(f"http://127.0.0.1:{server.server_port}", "demo", 4096, DEADLINE)
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def damaged(
    server: RunningServer, request: Callable[[str, Body], None], reply: Callable[[str], str]
) -> Iterator[Target]:
    """The demo server behind one that changes requests in place and replies as text."""
    with httpx.Client(base_url=server.url, timeout=DEADLINE, trust_env=False) as client:

        def answer(method: str, path: str, body: bytes) -> tuple[int, str, str]:
            fields = json.loads(body) if body else None
            if fields is not None:
                request(path, fields)
            found = client.request(method, path, json=fields)
            return found.status_code, found.headers["content-type"], reply(found.text)

        with stand_in(answer) as target:
            yield target


def failed(target: Target, *ids: str) -> dict[str, str]:
    outcomes = list(run(target, [case for case in CASES if case.id in ids]))
    assert {outcome.case.id for outcome in outcomes if outcome.offered} == set(ids)
    return {outcome.case.id: outcome.seen for outcome in outcomes if outcome.seen is not None}


def drop(*names: str) -> Callable[[str, Body], None]:
    """Without fields of the request, wherever they are in it."""

    def change(_: str, body: Body) -> None:
        for fields in (body, body.get("options", {})):
            for name in names:
                fields.pop(name, None)

    return change


def nothing(_: str, body: Body) -> None:
    """As it is."""


def without_images(path: str, body: Body) -> None:
    """A plain question instead."""
    name = "input" if path == "/v1/responses" else "messages"
    body[name] = [{"role": "user", "content": "Count from 3 to 12"}]


def replaced(*pairs: tuple[str, str]) -> Callable[[str], str]:
    def change(text: str) -> str:
        for old, new in pairs:
            text = text.replace(old, new)
        return text

    return change


FAULTS: dict[str, tuple[Callable[[str, Body], None], Callable[[str], str], set[str]]] = {
    "stop strings are ignored": (
        drop("stop", "stop_sequences"),
        str,
        {"chat.stop", "chat.stop-list", "chat.stop-stream", "messages.stop-sequence", "messages.stop-stream"}
        | {"generate.stop", "ollama-chat.stop"},
    ),
    "every answer ends by itself": (
        nothing,
        replaced(('"length"', '"stop"'), ('"max_tokens"', '"end_turn"'), ('"incomplete"', '"completed"')),
        {"chat.max-tokens", "chat.stream-finish", "completions.max-tokens", "messages.max-tokens"}
        | {"generate.num-predict", "ollama-chat.num-predict", "responses.incomplete"},
    ),
    "n is ignored": (drop("n"), str, {"chat.n"}),
    "no tool is forced": (
        drop("tool_choice", "tools"),
        str,
        {"chat.tool-forced", "chat.tool-required", "chat.tool-stream", "responses.tool-forced", "messages.tool-forced"}
        | {"messages.tool-stream"},
    ),
    "calls have no ids": (
        nothing,
        replaced(('"id":"call', '"ix":"call'), ('"call_id"', '"call"'), ('"id":"toolu', '"ix":"toolu')),
        {"chat.tool-forced", "chat.tool-stream", "responses.tool-forced", "messages.tool-forced"},
    ),
    "schemas are ignored": (
        drop("response_format", "text", "format", "output_config"),
        str,
        {"chat.json-schema", "chat.json-object", "responses.json-schema", "messages.json-schema"}
        | {"generate.format", "ollama-chat.format"},
    ),
    "system messages are dropped": (
        drop("system", "instructions"),
        str,
        {"responses.instructions", "messages.system", "generate.system"},
    ),
    "streams have no end mark": (
        nothing,
        replaced(("data: [DONE]\n\n", "")),
        {"chat.stream-form", "completions.stream"},
    ),
    "the last event has no empty line": (nothing, str.rstrip, {"chat.stream-form", "messages.stream-order"}),
    "usage is not asked for": (drop("stream_options"), str, {"chat.stream-usage"}),
    "totals are wrong": (
        nothing,
        replaced(('"total_tokens":', '"total_tokens":1')),
        {"chat.usage", "completions.form", "responses.form"},
    ),
    "probabilities are more than 1": (
        nothing,
        replaced(('"logprob":-', '"logprob":')),
        {"chat.logprobs", "chat.top-logprobs"},
    ),
    "errors have another form": (
        nothing,
        replaced(('{"error":', '{"detail":'), ('"type":"error"', '"type":"fault"')),
        {"chat.unknown-model", "chat.temperature-type", "chat.too-long", "responses.unknown-model", "models.unknown"}
        | {"messages.no-max-tokens", "messages.unknown-model", "generate.unknown-model", "show.unknown-model"},
    ),
    "images are dropped": (
        without_images,
        str,
        {"chat.image", "responses.image", "messages.image", "ollama-chat.image"},
    ),
    "events have no types": (
        nothing,
        replaced(("event: ", "id: ")),
        {"messages.stream-order", "responses.stream-order"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_server_with_a_fault_fails_the_cases_of_it(demo_server: RunningServer, name: str) -> None:
    request, reply, ids = FAULTS[name]
    with damaged(demo_server, request, reply) as target:
        assert failed(target, *ids).keys() == ids


def test_another_server_in_between_fails_nothing(demo_server: RunningServer) -> None:
    ids = {"chat.form", "chat.stop", "chat.stream-form", "messages.stream-order", "responses.form", "generate.stream"}
    with damaged(demo_server, nothing, str) as target:
        assert failed(target, *ids) == {}


def test_answers_that_differ_from_one_api_to_another_fail(demo_server: RunningServer) -> None:
    def other_prompt(path: str, body: Body) -> None:
        if path == "/v1/chat/completions":
            body["messages"] = [{"role": "user", "content": "Who are you?"}]

    ids = {"responses.same-answer", "messages.same-answer", "ollama-chat.same-answer"}
    with damaged(demo_server, other_prompt, str) as target:
        assert failed(target, *ids).keys() == ids


def test_a_server_that_answers_all_with_an_empty_object_passes_no_case() -> None:
    with stand_in(lambda *_: (200, "application/json", "{}")) as target:
        assert [outcome.case.id for outcome in run(target, CASES) if outcome.seen is None] == []


def test_what_a_server_does_not_have_is_counted_apart() -> None:
    with stand_in(lambda *_: (404, "text/plain", "Not Found")) as target:
        outcomes = list(run(target, CASES))
    assert not any(outcome.offered for outcome in outcomes)
    assert f"| all |  | - | {len(CASES)} |" in report(outcomes)
    assert "failed" not in report(outcomes)


def test_a_server_that_still_loads_its_model_is_not_judged() -> None:
    with (
        stand_in(lambda *_: (503, "application/json", '{"error": "loading"}')) as target,
        pytest.raises(NotReady, match="loading"),
    ):
        list(run(target, CASES))


def test_the_report_names_what_failed_and_what_was_seen() -> None:
    chat = [case for case in CASES if case.endpoint == "chat"]
    text = report([Outcome(chat[0], "status 500: 'a|b'"), *map(Outcome, chat[1:])])
    assert f"| openai | `/v1/chat/completions` | {len(chat) - 1} of {len(chat)} |  |" in text
    assert f"| `{chat[0].id}` | {chat[0].defined_by} | status 500: 'a/b' |" in text


def test_each_case_has_an_id_of_its_own_and_says_what_defines_it() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    assert {case.api for case in CASES} == set(DEFINES)
    assert all(case.defined_by for case in CASES)
    assert len(CASES) <= 120
