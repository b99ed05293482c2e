"""deploy/replicas/: a real HAProxy before two replicas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.replicas.try_replicas import configure, router_program, running

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]
CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
LONG = "word " * 40_000


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


@pytest.fixture(scope="module")
def haproxy() -> str:
    path = shutil.which("haproxy")
    assert path is not None, "install HAProxy (Debian and Ubuntu: apt install haproxy)"
    return path


@pytest.fixture(scope="module")
def router(haproxy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("haproxy")
    front, *_, first, second = configure("haproxy", folder)
    replicas = [ThreadingHTTPServer(("127.0.0.1", int(port)), Replica) for port in (first, second)]
    for each in replicas:
        threading.Thread(target=each.serve_forever).start()
    program = router_program("haproxy", haproxy, folder, front)
    try:
        with running([program]), httpx.Client(base_url=program.url, trust_env=False) as client:
            yield client
    finally:
        for each in replicas:
            each.shutdown()
            each.server_close()


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


def test_conversations_stay_and_no_request_is_lost_that_had_not_begun(haproxy: str) -> None:
    command = [sys.executable, "deploy/replicas/try_replicas.py", "--program", haproxy]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 of 12 conversations moved, 0 missed their prefix\n" in done.stdout
