"""What is said in a chat and how answers are asked for: the body of the next request, and the file of a saved chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxpaged.api.durable_files import replacing

Kind = Callable[[str], Any]


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, got {text!r}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None


def switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(f"must be on or off, got {text!r}")
    return text == "on"


SETTINGS: dict[str, Kind] = {
    "temperature": number,
    "top_p": number,
    "top_k": whole_number,
    "min_p": number,
    "repetition_penalty": number,
    "presence_penalty": number,
    "frequency_penalty": number,
    "seed": whole_number,
    "max_tokens": whole_number,
    "stop": str,
    "enable_thinking": switch,
    "reasoning_effort": str,
    "thinking_budget": whole_number,
}
"""Fields of the request that `/set` changes. The server checks their ranges."""


@dataclass
class Conversation:
    """messages: without the system message. settings: fields of the request that are not left to the server."""

    model: str
    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def request(self) -> dict[str, Any]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {"model": self.model, "messages": [*system, *self.messages], **self.settings}

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the answer to the last question; without an answer, take the question back."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def last_question(self) -> str | None:
        """Take the last question and its answer out of the conversation. Returns None if there is none."""
        if not self.messages:
            return None
        del self.messages[-1]
        return self.messages.pop()["content"]

    def save(self, path: Path) -> None:
        """Only the user may read the file. Raises OSError, or ValueError if the file is there and is something else."""
        if path.exists():
            read(path)
        with replacing(path) as file:
            file.write((json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n").encode())

    def load(self, path: Path) -> None:
        """Take the system message, settings and messages of a saved chat. The model stays. Raises OSError, and
        ValueError if the file is not a saved chat."""
        other = read(path)
        self.system, self.settings, self.messages = other.system, other.settings, other.messages


def read(path: Path) -> Conversation:
    try:
        found = Conversation(**json.loads(path.read_text(encoding="utf-8")))
        roles = [message["role"] for message in found.messages]
        texts = [message["content"] for message in found.messages]
        whole = roles == ["user", "assistant"] * (len(roles) // 2) and all(isinstance(text, str) for text in texts)
        if not (whole and set(found.settings) <= SETTINGS.keys() and isinstance(found.system, str | None)):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError):  # not JSON, or JSON of something else
        raise ValueError(f"{path} is not a saved chat") from None
    return found
