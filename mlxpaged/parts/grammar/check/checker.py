"""Asks a child process to compile a grammar first. The process is native code's, and its death refuses the grammar.

The child has less stack than this process compiles with, and a limit of time and of memory. So a grammar that it has
compiled does not overflow the stack here, and needs no more time and memory than is known.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxpaged.core.engine.constraint import GrammarError
from mlxpaged.watched_program import LimitError, Limits, WatchedProgram

PROGRAM = Path(__file__).with_name("program.py")
SECONDS = 5.0
"""Processor time of one check. A schema of 128 Ki characters takes 0.3 seconds."""
MAX_MEMORY = 2**28
"""Bytes of a child. It begins with 22 MB; the largest schemas that are not refused before take 100 MB."""
STACK_BYTES = 2**25
"""Bytes of its stack, half of those in this process. See MAX_DEPTH of schema_limits.py."""
MAX_IDLE = 2
"""Children that wait for work. Two constraints are compiled at a time."""
KEPT_CHARS = 4096
"""The answer to a longer question is not kept: a client can make a new one of megabytes again and again."""

_program = WatchedProgram("checks it", MAX_IDLE)
end_children = _program.end


def check(grammars: Sequence[str], limits: Mapping[str, int | bool]) -> None:
    """grammars: in llguidance's notation. limits: of its parser. Raises GrammarError if the child exceeds a limit, and
    OSError if no process can be started. Other errors of a grammar are not found here."""
    _ask({"grammars": grammars, "limits": limits})


def lark_of(grammar: str) -> str:
    """Writes a grammar of GBNF's notation in Lark's. Raises ValueError, and what `check` raises."""
    reply = _ask({"gbnf": grammar})
    if "error" in reply:
        raise ValueError(f"the grammar in GBNF's notation cannot be read: {reply['error']}")
    return str(reply["lark"])


def is_empty(grammar: str) -> bool:
    """Whether no text fits a grammar in Lark's notation, of a part of an answer. Raises what `check` raises."""
    return (_is_empty if len(grammar) <= KEPT_CHARS else _is_empty.__wrapped__)(grammar)


@functools.lru_cache(maxsize=1024)
def _is_empty(grammar: str) -> bool:
    return bool(_ask({"part": grammar})["is_empty"])


def matches(grammar: str, texts: Sequence[str]) -> list[bool]:
    """Whether each text fits a grammar in Lark's notation. Raises what `check` raises."""
    return list(_ask({"part": grammar, "texts": texts})["matches"])


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    line = json.dumps(request).encode() + b"\n"
    try:
        answer, _ = _program.ask(PROGRAM, line, Limits(SECONDS, MAX_MEMORY), (str(STACK_BYTES),))
    except LimitError as error:
        raise GrammarError(f"cannot be compiled: {error}") from None
    reply: dict[str, Any] = json.loads(answer)
    return reply
