"""An answer of a model with its calls, as an agent puts it together from a stream, and what is wrong with it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxpaged.cli.answer import PATH
from mlxpaged.cli.client import Client, Comment, ServerError
from mlxpaged.cli.doctor.agent_tasks import KNOWN, Turn
from mlxpaged.formats import THOUGHTS, Call, NotACall


@dataclass
class AgentAnswer:
    """calls: as the chat API has them, with their ids."""

    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def message(self) -> dict[str, Any]:
        """Returns the message that the next request has for this answer."""
        thoughts = {"reasoning_content": self.thinking} if self.thinking else {}
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.text, **thoughts, **calls}


def ask(client: Client, body: dict[str, Any]) -> AgentAnswer:
    """Returns the answer to a request, from its stream. Raises ServerError."""
    answer = AgentAnswer()
    with contextlib.closing(client.stream(PATH, body | {"stream": True})) as events:
        for event in events:
            for choice in () if isinstance(event, Comment) else event["choices"]:
                delta = choice["delta"]
                answer.text += delta.get("content") or ""
                answer.thinking += delta.get("reasoning_content") or ""
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                for piece in delta.get("tool_calls") or ():
                    add_piece(answer.calls, piece)
    if answer.finish_reason is None:
        raise ServerError("the answer has ended early: the server has closed the connection")
    return answer


def add_piece(calls: list[dict[str, Any]], piece: Mapping[str, Any]) -> None:
    """Adds a piece of a call: the first one has its id and its name, each has a part of its arguments."""
    function = piece["function"]
    if piece["index"] == len(calls):
        named = {"name": function.get("name"), "arguments": ""}
        calls.append({"id": piece.get("id"), "type": "function", "function": named})
    calls[piece["index"]]["function"]["arguments"] += function.get("arguments") or ""


def raw_text(client: Client, body: dict[str, Any]) -> str:
    """Returns what the model writes, tags included: the tokens of the log-probabilities of the same request. Raises
    ServerError."""
    answer = client.post(PATH, body | {"logprobs": True}, seconds=None)
    tokens = answer["choices"][0]["logprobs"]["content"]
    return bytes(byte for token in tokens for byte in token["bytes"]).decode(errors="replace")


def problems(answer: AgentAnswer, turn: Turn, tags: Iterable[str]) -> list[str]:
    """Returns what is wrong with an answer; nothing if it is right. tags: those that no text may have."""
    if answer.finish_reason == "length":
        return ["the answer was cut, because it had reached the most tokens"]
    found = list(call_problems(answer.calls, turn))
    found += [f"the text has the tag {tag}" for tag in tags if tag in answer.text]
    missing = [each for each in turn.says if each not in answer.text]
    if missing and not found:
        found.append(f"the text lacks {' and '.join(missing)}" if answer.text else "there is no text")
    if turn.thinks is False and answer.thinking:
        found.append("there are thoughts")
    if turn.thinks is True and not answer.thinking:
        found.append("there are no thoughts apart from the text")
    reason = "tool_calls" if answer.calls else "stop"
    if not found and answer.finish_reason != reason:
        found.append(f"finish_reason is {answer.finish_reason!r} instead of {reason!r}")
    return found


def call_problems(calls: list[dict[str, Any]], turn: Turn) -> Iterable[str]:
    if len(calls) != len(turn.calls):
        names = f" ({', '.join(str(call['function']['name']) for call in calls)})" if calls else ""
        yield f"{number(len(calls))}{names} instead of {number(len(turn.calls))}"
        return
    ids = [call["id"] for call in calls]
    if not all(ids) or len({*ids}) < len(ids):
        yield f"the ids of the calls are {ids}"
    left = list(turn.calls)
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            fits, value = KNOWN.fit(Call(name, arguments)), json.loads(arguments)
        except (NotACall, ValueError):
            yield f"{name} has the arguments {shortened(arguments, 80)}"
            continue
        candidates = [wanted for called, wanted in left if called == name]
        if not candidates:
            yield f"{name} was called with {shortened(arguments, 80)}"
            continue
        found = [(difference(wanted, value), wanted) for wanted in candidates]
        same = next((wanted for what, wanted in found if what is None), None)
        if same is None:
            yield f"{name}: {found[0][0]}" + ("" if fits else ", and the arguments do not fit the schema")
        left.remove((name, found[0][1] if same is None else same))


def number(calls: int) -> str:
    return "no call" if calls == 0 else "one call" if calls == 1 else f"{calls} calls"


def difference(wanted: Any, got: Any, path: str = "") -> str | None:
    """Returns where two JSON values differ; None if they are equal. 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        for key in wanted.keys() | got.keys():
            at = f"{path}.{key}" if path else key
            if key not in got or key not in wanted:
                return f"{at} is missing" if key not in got else f"{at} is too much"
        found = (difference(wanted[key], got[key], f"{path}.{key}" if path else key) for key in wanted)
        return next((each for each in found if each), None)
    if isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
        found = (difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(wanted, got, strict=True)))
        return next((each for each in found if each), None)
    if isinstance(wanted, str) and isinstance(got, str):
        return None if wanted == got else text_difference(wanted, got, path)
    if isinstance(wanted, bool) is isinstance(got, bool) and wanted == got:
        return None
    return f"{path} is {shortened(json.dumps(got), 80)} instead of {shortened(json.dumps(wanted), 80)}"


def text_difference(wanted: str, got: str, path: str) -> str:
    """Returns the first line in which two texts differ."""
    if "\n" not in wanted:
        return f"{path} is {shortened(json.dumps(got, ensure_ascii=False), 80)} instead of {json.dumps(wanted)}"
    lines, others = wanted.splitlines(keepends=True), got.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        other = others[number - 1] if number <= len(others) else None
        if other is None:
            return f"{path} ends before line {number} of {len(lines)}"
        if other != line:
            return f"line {number} of {path} is {shortened(json.dumps(other), 100)} instead of {json.dumps(line)}"
    return f"{path} goes on after line {len(lines)}"


def thought_tags() -> list[str]:
    return [tag for tags in THOUGHTS for tag in (tags.start, tags.end)]


def shortened(text: str, most: int) -> str:
    """Returns the beginning and the end of a long text."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end]} [...] {text[-end:]}"
