"""deploy/replicas/: a real HAProxy before two replicas, and the routers that MLXPAGED_LITELLM and MLXPAGED_SMG name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from deploy.replicas.try_replicas import Conversation, configure, router_program, running

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]
CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
LONG = "word " * 40_000
NO_HAPROXY = "install HAProxy (Debian and Ubuntu: apt install haproxy)"


class Replica(BaseHTTPRequestHandler):
    """Answers everything. What a replica answers does not matter to the choice of one."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def two_replicas(kind: type[BaseHTTPRequestHandler], *ports: str) -> Iterator[None]:
    replicas = [ThreadingHTTPServer(("127.0.0.1", int(port)), kind) for port in ports]
    for each in replicas:
        threading.Thread(target=each.serve_forever).start()
    try:
        yield
    finally:
        for each in replicas:
            each.shutdown()
            each.server_close()


@pytest.fixture(scope="module")
def haproxy() -> str:
    path = shutil.which("haproxy")
    assert path is not None, NO_HAPROXY
    return path


@pytest.fixture(scope="module")
def router(haproxy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("haproxy")
    front, *_, first, second = configure("haproxy", folder)
    program = router_program("haproxy", haproxy, folder, front)
    client = httpx.Client(base_url=program.url, trust_env=False)
    with two_replicas(Replica, first, second), running([program]), client:
        yield client


def replica_of(router: httpx.Client, path: str, body: dict[str, Any], **headers: str) -> str:
    response = router.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.headers["x-replica"]


def parts(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, **more}]


def turns(form: str, number: int) -> list[tuple[str, dict[str, Any]]]:
    """Two requests of a conversation, and their path."""
    first, answer, second = (
        {"role": "user", "content": f"{number}?"},
        {"role": "assistant", "content": "Yes."},
        f"{number}!",
    )
    later = [first, answer, {"role": "user", "content": second}]
    system = {"role": "system", "content": "You help."}
    marked = [{"role": "user", "content": parts(f"{number}?", cache_control={"type": "ephemeral"})}]
    unmarked = [{"role": "user", "content": parts(f"{number}?")}, answer, {"role": "user", "content": second}]
    bodies: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "chat": (CHAT, {"messages": [first]}, {"messages": later}),
        "system": (CHAT, {"messages": [system, first]}, {"messages": [system, *later]}),
        "long": (
            CHAT,
            {"messages": [system, first]},
            {"messages": [system, *later, {"role": "user", "content": LONG}]},
        ),
        "parts": (MESSAGES, {"system": "You help.", "messages": marked}, {"messages": unmarked, "system": "You help."}),
        "responses": (RESPONSES, {"store": False, "input": [first]}, {"store": False, "input": later}),
        "key": (CHAT, {"prompt_cache_key": f"k{number}", "messages": [system]}, {"prompt_cache_key": f"k{number}"}),
        "prompt": (COMPLETIONS, {"prompt": f"{number} {LONG[:500]}"}, {"prompt": f"{number} {LONG[:900]}"}),
    }
    path, *both = bodies[form]
    return [(path, {"model": "demo", **body}) for body in both]


@pytest.mark.parametrize("form", ["chat", "system", "long", "parts", "responses", "key", "prompt"])
def test_a_conversation_stays_with_its_replica_and_conversations_are_spread(router: httpx.Client, form: str) -> None:
    firsts = []
    for number in range(24):
        first, second = [replica_of(router, path, body) for path, body in turns(form, number)]
        assert first == second
        firsts.append(first)
    assert 6 <= firsts.count("mac-1") <= 18


def test_what_is_stored_goes_to_the_replica_of_its_key(router: httpx.Client) -> None:
    for key in ("a", "b", "c"):
        headers = {"authorization": f"Bearer {key}"}
        asked = {replica_of(router, RESPONSES, {"input": f"{number}?"}, **headers) for number in range(8)}
        found = {router.get(f"{RESPONSES}/resp_{number}", headers=headers).headers["x-replica"] for number in range(8)}
        uploaded = {replica_of(router, "/v1/files", {"number": number}, **headers) for number in range(8)}
        assert len(asked | found | uploaded) == 1


def test_bodies_that_are_no_conversation_are_passed_on(router: httpx.Client) -> None:
    for content in (b"", b"{", b"[]", b"null", json.dumps({"messages": LONG}).encode(), LONG.encode() * 10):
        assert router.post(CHAT, content=content).status_code == 200


@pytest.mark.parametrize("router", ["haproxy", "smg"])
def test_conversations_stay_and_no_request_is_lost_that_had_not_begun(router: str) -> None:
    program = os.environ.get(f"MLXPAGED_{router.upper()}", shutil.which(router))
    if router != "haproxy" and program is None:
        pytest.skip(f"MLXPAGED_{router.upper()} does not name a program")
    assert program is not None, NO_HAPROXY
    command = [sys.executable, "deploy/replicas/try_replicas.py", "--router", router, "--program", program]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    known = "0 of 12 conversations moved, " if router == "haproxy" else ""
    assert f"\n{known}0 missed their prefix\n" in done.stdout


class Breaking(BaseHTTPRequestHandler):
    """Breaks the first stream of each conversation off, after the status of its answer and before its first event."""

    protocol_version = "HTTP/1.1"
    broken: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = body["messages"][-1]["content"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if name in self.broken:
            choice = {"index": 0, "delta": {"role": "assistant", "content": name}, "finish_reason": "stop"}
            chunk = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "demo", "choices": [choice]}
            for event in (json.dumps(chunk), "[DONE]"):
                self.wfile.write(b"%x\r\ndata: %s\n\n\r\n" % (len(event) + 8, event.encode()))
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.broken.add(name)
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_litellm_repeats_a_stream_that_ends_before_its_first_event(tmp_path: Path) -> None:
    program = os.environ.get("MLXPAGED_LITELLM")
    if program is None:
        pytest.skip("MLXPAGED_LITELLM does not name a LiteLLM proxy")
    front, first, second = configure("litellm", tmp_path)
    with two_replicas(Breaking, first, second), running([router_program("litellm", program, tmp_path, front)]):
        for number in range(6):
            turn = Conversation(f"conversation {number}", f"http://127.0.0.1:{front}")
            with httpx.Client(trust_env=False, timeout=60) as client:
                assert turn.ask(client).outcome == "answered", turn.turns[0].detail
    assert len(Breaking.broken) == 6
