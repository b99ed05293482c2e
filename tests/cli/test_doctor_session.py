"""`mlxpaged doctor --session`: what it says of small sessions of each client, and of files that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import Result

pytestmark = pytest.mark.usefixtures("home")

Run = Callable[..., Result]


def lines_of(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def item(**fields: Any) -> dict[str, Any]:
    return {"timestamp": "2026-11-29T00:00:00.000Z", "type": "response_item", "payload": fields}


PART = {"type": "input_text", "text": "Hi."}
ASKED = item(type="message", role="user", content=[PART])
SAID = item(type="message", role="assistant", content=[{"type": "output_text", "text": "Yes."}])
CODEX = (
    {"timestamp": "t", "type": "session_meta", "payload": {"id": "i", "cwd": "/tmp"}},
    ASKED,
    {"timestamp": "t", "type": "event_msg", "payload": {"type": "user_message", "message": "Hi."}},
    item(type="reasoning", summary=[], encrypted_content="gAAA"),
    item(type="reasoning", summary=[{"type": "summary_text", "text": "Hm."}], encrypted_content="gAAA"),
    item(type="web_search_call", status="completed", action={"type": "search", "query": "secret words"}),
    item(type="function_call", call_id="c", name="shell", arguments="{}"),
    item(type="function_call_output", call_id="c", output=[{"type": "input_image", "image_url": "data:,"}]),
    item(type="ghost_snapshot", ghost_commit={"id": "abc"}),
    SAID,
)


def test_a_session_of_codex(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rollout-1.jsonl"
    file.write_text(lines_of(*CODEX))
    result = run("doctor", "--session", str(file))
    assert result.status == 0, result.stderr
    assert [" ".join(line.split()) for line in result.stdout.splitlines()] == [
        "a session of Codex",
        "read 6 message 2, input_text 1, function_call 1, function_call_output 1, output_text 1",
        "shown as text 2 reasoning (encrypted) 1, web_search_call 1",
        "left out 2 reasoning (encrypted) 1, ghost_snapshot 1",
        "shown if the model takes it, else left out 1 input_image 1",
        "it goes on here; 2 of 11 would be left out",
    ]
    assert "secret" not in result.stdout
    read = json.loads(run("doctor", "--session", str(file), "--json").stdout)
    assert (read["client"], read["left_out"]) == ("Codex", {"reasoning (encrypted)": 1, "ghost_snapshot": 1})


def test_what_would_be_refused_is_said_with_its_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rollout-1.jsonl"
    file.write_text(lines_of(ASKED, item(type="function_call", call_id="c", name="f", arguments={"a": 1})))
    result = run("doctor", "--session", str(file))
    assert result.status == 1
    assert "  line 2: arguments: must be a string" in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1].startswith("it cannot go on here as it is")


def test_what_a_reference_leads_to_is_not_here(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rollout-1.jsonl"
    file.write_text(lines_of(ASKED, item(type="item_reference", id="msg_1"), SAID))
    read = json.loads(run("doctor", "--session", str(file), "--json").stdout)
    assert read["left_out"] == {"item_reference": 1}


def test_a_compaction_of_codex_replaces_what_was_before_it(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rollout-1.jsonl"
    history = [ASKED["payload"], {"type": "compaction", "encrypted_content": "gAAA"}]
    compacted = {"timestamp": "t", "type": "compacted", "payload": {"message": "", "replacement_history": history}}
    file.write_text(lines_of(*CODEX, compacted, SAID))
    read = json.loads(run("doctor", "--session", str(file), "--json").stdout)
    assert read["read"] == {"message": 2, "input_text": 1, "output_text": 1}
    assert read["left_out"] == {"compaction": 1}


def claude(kind: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "sessionId": "s", "uuid": "u", "message": {"role": kind, "content": content}, **fields}


FOUND = [{"type": "web_search_result", "url": "u"}]
SEARCHED = {"type": "web_search_tool_result", "tool_use_id": "s", "content": FOUND}
USED = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
CLAUDE = (
    {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}},
    claude("user", "Hi."),
    claude("assistant", [{"type": "thinking", "thinking": "Hm.", "signature": "gAAA"}]),
    claude("assistant", [{"type": "redacted_thinking", "data": "gAAA"}]),
    claude("assistant", [USED, SEARCHED]),
    claude("assistant", [{"type": "tool_use", "id": "t", "name": "Read", "input": {}, "caller": {"type": "direct"}}]),
    claude("user", [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]),
    claude("assistant", [{"type": "text", "text": "To the agent."}], isSidechain=True),
    claude("assistant", [{"type": "text", "text": "Yes."}]),
)


def test_a_session_of_claude_code(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "session.jsonl"
    file.write_text(lines_of(*CLAUDE))
    read = json.loads(run("doctor", "--session", str(file), "--json").stdout)
    assert read == {
        "client": "Claude Code",
        "read": {"text": 2, "thinking": 1, "tool_use": 1, "tool_result": 1},
        "offered": {},
        "shown": {"server_tool_use": 1, "web_search_tool_result": 1},
        "left_out": {"redacted_thinking": 1},
        "media": {"image": 1},
        "refused": {},
        "refusals": [],
    }
    file.write_text(lines_of(*CLAUDE, {"type": "system", "subtype": "compact_boundary"}, claude("user", "In short.")))
    assert json.loads(run("doctor", "--session", str(file), "--json").stdout)["read"] == {"text": 1}


MESSAGES: list[dict[str, Any]] = [
    {"info": {"id": "msg_1", "role": "user"}, "parts": [{"type": "text", "text": "Hi."}]},
    {
        "info": {"id": "msg_2", "role": "assistant"},
        "parts": [
            {"type": "step-start"},
            {"type": "reasoning", "text": "", "metadata": {"openai": {"reasoningEncryptedContent": "gAAA"}}},
            {"type": "reasoning", "text": "Hm."},
            {"type": "tool", "callID": "c", "tool": "read", "state": {"status": "completed", "input": {"a": 1}}},
            {"type": "file", "mime": "application/pdf", "url": "data:,"},
            {"type": "text", "text": "Yes."},
            {"type": "step-finish"},
        ],
    },
]


def test_a_session_of_opencode(run: Run, tmp_path: Path) -> None:
    """Its export, and its storage, say the same."""
    export = tmp_path / "export.json"
    export.write_text(json.dumps({"info": {"id": "ses_1"}, "messages": MESSAGES}, indent=2))
    said = json.loads(run("doctor", "--session", str(export), "--json").stdout)
    assert (said["client"], said["read"]) == ("opencode", {"text": 2, "thinking": 1, "tool_use": 1})
    assert (said["left_out"], said["media"]) == ({"reasoning (encrypted)": 1}, {"file": 1})
    for message in MESSAGES:
        name = message["info"]["id"]
        for path, value in [(f"message/ses_1/{name}.json", message["info"])] + [
            (f"part/{name}/prt_{i}.json", part) for i, part in enumerate(message["parts"])
        ]:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(json.dumps(value))
    file = tmp_path / "session" / "project" / "ses_1.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"id": "ses_1", "title": "T"}))
    assert json.loads(run("doctor", "--session", str(file), "--json").stdout) == said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no session of Codex, Claude Code or opencode"),
        (b"\x89PNG\xff", "is no text"),
        (b"Dear diary", "line 1 of"),
        (b"{}", "is no session of Codex, Claude Code or opencode"),
        (b"[1, 2]", "is no session of Codex, Claude Code or opencode"),
        (b'{"messages": [{"info": {}}]}', "message 0 of"),
        (b'{"id": "../../x"}', "is no session of Codex, Claude Code or opencode"),
        (lines_of(ASKED).encode() + b'{"type": "respo', "line 2 of"),
        (lines_of(ASKED, {"type": "response_item", "payload": 5}).encode(), "line 2 of"),
        (lines_of(claude("user", "Hi."), {"type": "user"}).encode(), "line 2 of"),
        (b"[" * 100_000, "line 1 of"),
    ],
)
def test_another_or_damaged_file_is_a_clear_error(run: Run, tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    result = run("doctor", "--session", str(file))
    assert (result.status, result.stdout) == (1, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert "No such file" in run("doctor", "--session", str(tmp_path / "none")).stderr
    assert "cannot be read" in run("doctor", "--session", str(tmp_path)).stderr
