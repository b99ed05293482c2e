"""Renders chat templates in child processes, because a template is a program that comes with the model.

Jinja's sandbox keeps a template from files and from Python's own objects. It does not keep it from looping 10^15 times
or from making 10^9 characters, nor from holding the interpreter's lock in one long call. A child (`program.py`) renders
one template at a time. While it does, its processor time and memory are watched, and it is ended at a limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxpaged.watched_program import LimitError, Limits, WatchedProgram

PROGRAM = Path(__file__).with_name("program.py")
SECONDS = 5.0
"""Processor time of one rendering. One with 120 messages and 200,000 characters takes 10 ms."""
MAX_MEMORY = 2**30
"""Bytes of a child. It begins with 20 MB; a conversation of a million tokens takes about 100 MB."""
MAX_SOURCE = 2**18
"""Characters of a template. Those of known models have some thousand."""
MAX_IDLE = 4
"""Children that wait for work. There is one for each model that renders at the same time."""
IDLE_MEMORY = 2**27
"""Bytes of a child that is kept. Python does not give all memory back."""


class TemplateLimitError(Exception):
    """A template exceeds a limit of this module. The message is the end of a sentence about the template."""


class TemplateError(Exception):
    """What a template, or Jinja at its sight, raised."""


_program = WatchedProgram("renders it", MAX_IDLE)
end_children = _program.end


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Returns the text that a template makes of its variables, values that JSON has. Any thread may call it. Raises
    TemplateError, TemplateLimitError, and OSError if no process can be started."""
    return str(_ask({"source": source, "variables": variables})["text"])


def variables_of(source: str) -> frozenset[str]:
    """Returns the names that a template looks up and does not set itself. Raises as `render` does."""
    return frozenset(_ask({"source": source})["names"])


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    if len(request["source"]) > MAX_SOURCE:
        raise TemplateLimitError(f"it has more than {MAX_SOURCE:,} characters")
    line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    try:
        answer, _ = _program.ask(PROGRAM, line, Limits(SECONDS, MAX_MEMORY), idle_memory=IDLE_MEMORY)
    except LimitError as error:
        raise TemplateLimitError(str(error)) from None
    reply: dict[str, Any] = json.loads(answer.decode("utf-8", "surrogatepass"))
    if "limit" in reply:
        raise TemplateLimitError(reply["limit"])
    if "error" in reply:
        raise TemplateError(reply["error"])
    return reply
