"""Reads the session files of coding agents: Codex, Claude Code and opencode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

CODEX, CLAUDE_CODE, OPENCODE = "Codex", "Claude Code", "opencode"
CODEX_LINES = ("session_meta", "response_item", "compacted", "turn_context", "event_msg", "world_state")
"""Types of lines of a rollout, since Codex 0.32."""
CLAUDE_LINES = ("user", "assistant", "system", "summary", "file-history-snapshot", "queue-operation", "progress")


class SessionError(Exception):
    """The file is no session that can be read."""


@dataclass(frozen=True)
class Entry:
    """An item or a message of a session, as its client sends it. place: the line, or the part, that has it."""

    place: str
    value: dict[str, Any]


@dataclass(frozen=True)
class Session:
    client: str
    entries: list[Entry]


def read(path: Path) -> Session:
    """Raises SessionError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SessionError(f"{path} is no text; give a session file of Codex, Claude Code or opencode") from None
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {error.strerror}") from None
    try:
        whole = from_json(text)
    except ValueError:
        return of_lines(path, list(parsed_lines(path, text)))
    if isinstance(whole, dict) and "payload" not in whole and "message" not in whole:
        return Session(OPENCODE, list(of_opencode(path, whole)))
    return of_lines(path, [(1, whole)])


def parsed_lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, from_json(line)
            except ValueError as error:
                raise SessionError(f"line {number} of {path} is damaged, or the file is no session: {error}") from None


def of_lines(path: Path, lines: list[tuple[int, Any]]) -> Session:
    codex = [each for each in lines if isinstance(each[1], dict) and each[1].get("type") in CODEX_LINES]
    if any(isinstance(value.get("payload"), dict) for _, value in codex):
        return Session(CODEX, list(of_codex(path, codex)))
    claude = [each for each in lines if isinstance(each[1], dict) and each[1].get("type") in CLAUDE_LINES]
    if any(isinstance(value.get("message"), dict) for _, value in claude):
        return Session(CLAUDE_CODE, list(of_claude(path, claude)))
    raise SessionError(f"{path} is no session of Codex, Claude Code or opencode, or has no conversation")


def of_codex(path: Path, lines: list[tuple[int, Any]]) -> Iterator[Entry]:
    """Yields the items of the responses API. After a compaction, they replace those before it."""
    found: list[Entry] = []
    for number, line in lines:
        payload = checked(path, number, line.get("payload"), dict)
        if line["type"] == "response_item":
            found.append(Entry(f"line {number}", payload))
        elif line["type"] == "compacted" and payload.get("replacement_history") is not None:
            items = checked(path, number, payload["replacement_history"], list)
            found = [Entry(f"line {number}", checked(path, number, item, dict)) for item in items]
    yield from found


def of_claude(path: Path, lines: list[tuple[int, Any]]) -> Iterator[Entry]:
    """Yields the messages of Anthropic's API. Those of agents that the session has started are not part of it, nor
    those before a compaction."""
    found: list[Entry] = []
    for number, line in lines:
        if line.get("subtype") == "compact_boundary":
            found = []
        elif line["type"] in ("user", "assistant") and not line.get("isSidechain"):
            message = checked(path, number, line.get("message"), dict)
            found.append(Entry(f"line {number}", {"role": line["type"], "content": message.get("content")}))
    yield from found


def checked(path: Path, number: int, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise SessionError(f"line {number} of {path} is damaged")
    return value


def of_opencode(path: Path, whole: dict[str, Any]) -> Iterator[Entry]:
    """Yields the parts of an export, or of the storage that a session's file belongs to, as parts of chat
    completions. Parts that opencode keeps for itself are left out."""
    messages = whole.get("messages")
    if messages is None and isinstance(whole.get("id"), str) and whole["id"].isidentifier():
        messages = list(stored(path, whole["id"]))
    if not isinstance(messages, list) or not messages:
        raise SessionError(f"{path} is no session of Codex, Claude Code or opencode, or has no messages")
    for i, message in enumerate(messages):
        match message:
            case {"info": {"role": str(role)}, "parts": list(parts)}:
                for j, part in enumerate(parts):
                    if not isinstance(part, dict):
                        raise SessionError(f"part {j} of message {i} of {path} is damaged")
                    if (sent := as_sent(part)) is not None:
                        yield Entry(f"message {i}, part {j}", {"role": role, "content": [sent]})
            case _:
                raise SessionError(f"message {i} of {path} is damaged")


def stored(path: Path, session: str) -> Iterator[dict[str, Any]]:
    storage = path.parent.parent.parent
    for message in sorted((storage / "message" / session).glob("*.json")):
        parts = sorted((storage / "part" / message.stem).glob("*.json"))
        try:
            yield {"info": from_json(message.read_bytes()), "parts": [from_json(each.read_bytes()) for each in parts]}
        except (OSError, ValueError) as error:
            raise SessionError(f"the messages of {path} are damaged: {error}") from None


KEPT = ("step-start", "step-finish", "snapshot", "patch", "agent", "retry", "subtask", "compaction")
"""Types of parts that opencode sends to no server."""


def as_sent(part: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a part as opencode sends it to a server with OpenAI's chat completions; None if it sends none."""
    match part.get("type"):
        case kind if kind in KEPT:
            return None
        case "reasoning":
            thought = part.get("text")
            return {"type": "thinking", "thinking": thought} if thought else {"type": "reasoning (encrypted)"}
        case "tool":
            state = part.get("state")
            given = state.get("input") if isinstance(state, dict) else None
            return {"type": "tool_use", "id": part.get("callID"), "name": part.get("tool"), "input": given or {}}
        case _:
            return part
