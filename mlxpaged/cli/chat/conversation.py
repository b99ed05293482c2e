"""What is said in a chat and how answers are asked for: the body of the next request, and the file of a saved chat."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxpaged.cli.image_file import content
from mlxpaged.durable_files import replacing
from mlxpaged.models.files.generation_config import LIMITS, Limits

Kind = Callable[[str], Any]


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "auto")


def within(limits: Limits) -> Kind:
    """Returns a parser of numbers that are within the limits of the server."""

    def parse(text: str) -> float:
        try:
            value = int(text) if limits.whole else float(text)
        except ValueError:
            value = math.nan
        if not limits.fit(value):
            raise ValueError(f"must be {limits}, got {text!r}")
        return value

    return parse


def effort(text: str) -> str:
    if text not in EFFORTS:
        raise ValueError(f"must be one of {', '.join(EFFORTS)}, got {text!r}")
    return text


def switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(f"must be on or off, got {text!r}")
    return text == "on"


MAX_BYTES = 64 * 2**20
"""Bytes of a saved chat. A server takes 32 MiB, unless it is told otherwise."""
TOKENS = Limits(1, 2**31 - 1, whole=True)
SETTINGS: dict[str, Kind] = {
    **{name: within(limits) for name, limits in LIMITS.items()},
    "seed": within(Limits(0, 2**32 - 1, whole=True)),
    "max_tokens": within(TOKENS),
    "stop": str,
    "enable_thinking": switch,
    "reasoning_effort": effort,
    "thinking_budget": within(TOKENS),
}
"""Fields of the request that `/set` changes, with values that the server takes."""


@dataclass
class Conversation:
    """messages: without the system message. settings: fields of the request that are not left to the server. images:
    data: URLs that go with the next question."""

    model: str
    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def request(self) -> dict[str, Any]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {"model": self.model, "messages": [*system, *self.messages], **self.settings}

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": content(text, self.images)})
        self.images = []

    def answer(self, text: str) -> None:
        """Add the answer to the last question; without an answer, take the question back, and its images."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self._take_back()

    def last_question(self) -> str | None:
        """Take the last question and its answer out of the conversation. Returns None if there is none."""
        if not self.messages:
            return None
        del self.messages[-1]
        return self._take_back()

    def _take_back(self) -> str:
        """Take a question out of the conversation. Its images go with the next one."""
        asked = self.messages.pop()["content"]
        if isinstance(asked, str):
            return asked
        *parts, last = asked
        self.images = [part["image_url"]["url"] for part in parts]
        return str(last["text"])

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
        self.images = other.images


def is_content(found: Any) -> bool:
    """Whether it is a text, or what `ask` makes of images and a text. Raises KeyError or TypeError for some others."""
    if isinstance(found, str):
        return True
    *parts, last = found
    return isinstance(last["text"], str) and all(isinstance(part["image_url"]["url"], str) for part in parts)


def read(path: Path) -> Conversation:
    """Raises as `Conversation.load`."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES:  # to open a FIFO would wait
            raise ValueError
        found = Conversation(**json.loads(path.read_text(encoding="utf-8")))
        roles = [message["role"] for message in found.messages]
        contents = [message["content"] for message in found.messages]
        whole = roles == ["user", "assistant"] * (len(roles) // 2) and all(map(is_content, contents))
        whole = whole and all(isinstance(url, str) for url in found.images)
        whole = whole and isinstance(found.messages, list) and isinstance(found.images, list)
        if not (whole and found.settings.keys() <= SETTINGS.keys() and isinstance(found.system, str | None)):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # not JSON, or JSON of something else
        raise ValueError(f"{path} is not a saved chat") from None
    return found
