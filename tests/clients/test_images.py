"""Libraries and Claude Code show images to the bundled model that sees, and its answers are right."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.clients.conftest import NUMBER, installed, run
from tests.support import RunningServer

pytestmark = pytest.mark.clients

PROGRAMS = Path(__file__).parent / "programs" / "images"


@pytest.mark.parametrize("script", sorted(path.name for path in PROGRAMS.iterdir()))
def test_a_library_shows_images(seeing: RunningServer, images: list[Path], tmp_path: Path, script: str) -> None:
    folder = installed(Path(script).stem)
    shown = run(tmp_path, folder / "bin" / "python", "-I", PROGRAMS / script, seeing.url, *images)
    answers = re.findall(r"^(.*\b(chat|stream|counted|sees)): (.*)$", shown, flags=re.MULTILINE)
    assert len(answers) >= 6, shown
    for label, kind, answer in answers:
        assert answer == ("True" if kind in ("counted", "sees") else str(NUMBER)), label


class Planner(BaseHTTPRequestHandler):
    """A model that calls for a file, and leaves what it is told about it to the server that sees."""

    file = ""
    server_url = ""
    told: list[dict[str, Any]]
    call: ClassVar[dict[str, Any]] = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        results = [
            part
            for message in body["messages"]
            for part in (message["content"] if isinstance(message["content"], list) else ())
            if part["type"] == "tool_result"
        ]
        if results:
            self.told.append(results[-1])
            messages = [
                {"role": "user", "content": "Read the file. What number is in the picture?"},
                {"role": "assistant", "content": [self.call]},
                {"role": "user", "content": results[-1:]},
            ]
            body = {"model": "demo-vision", "max_tokens": 20, "stream": True, "messages": messages, "temperature": 0}
            request = urllib.request.Request(f"{self.server_url}/v1/messages", json.dumps(body).encode())
            request.add_header("content-type", "application/json")
            with urllib.request.urlopen(request) as response:
                self.reply(response.read())
            return
        arguments = {"type": "input_json_delta", "partial_json": json.dumps({"file_path": self.file})}
        usage = {"input_tokens": 1, "output_tokens": 1}
        empty: dict[str, Any] = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "planner",
            "content": [],
        }
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": {**empty, "stop_reason": None, "stop_sequence": None, "usage": usage}},
            {"type": "content_block_start", "index": 0, "content_block": self.call},
            {"type": "content_block_delta", "index": 0, "delta": arguments},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": usage},
            {"type": "message_stop"},
        ]
        self.reply("".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events).encode())

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("number", range(3), ids=["png", "jpeg", "webp"])
def test_claude_code_reads_an_image(seeing: RunningServer, images: list[Path], tmp_path: Path, number: int) -> None:
    """It sends the file that it was told to read as a tool's result, as an image in it."""
    claude = installed("claude_code") / "node_modules" / ".bin" / "claude"
    (tmp_path / "work").mkdir()
    file = tmp_path / "work" / images[number].name
    file.write_bytes(images[number].read_bytes())
    told: list[dict[str, Any]] = []
    handler = type("Planner", (Planner,), {"file": str(file), "server_url": seeing.url, "told": told})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as planner:
        threading.Thread(target=planner.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{planner.server_port}"
        env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "unused", "ANTHROPIC_MODEL": "planner"}
        options = ("--tools", "Read", "--allowedTools", "Read", "--system-prompt", "Be brief.")
        shown = run(tmp_path, claude, "-p", f"What number is in {file.name}?", *options, **env)
        planner.shutdown()
    assert told[0]["content"][0]["type"] == "image"
    assert shown.strip() == str(NUMBER)
