"""What `tool_choice` and strict tools demand of an answer, and the grammar for constrained decoding to hold it to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxpaged.api.errors import bad_parameter


def check_demands(tool_choice: str | None, strict: bool) -> None:
    """Raises ApiError for what only constrained decoding can promise: it takes `calls_grammar` from here.

    tool_choice: "auto", "none", "required" or the name of a tool, or None. strict: whether a tool is.
    """
    if tool_choice not in (None, "auto", "none"):
        raise bad_parameter("tool_choice", f"{tool_choice!r} cannot be enforced yet; 'auto' and 'none' are supported")
    if strict:
        raise bad_parameter("tools", "strict cannot be enforced yet; leave it out, or set it to false")


def calls_grammar(tools: Sequence[Mapping[str, Any]], start: str, end: str, one_call: bool) -> str:
    """A grammar in llguidance's Lark of an answer that is one call, or one or more, of any of OpenAI's `tools`, as
    Hermes and Qwen write them.

    start, end: what stands around a call, in Lark: `<[id]>` for a single token, else a quoted string. A rule for every
    tool, so that references inside its schema still start at its root.
    """
    numbers = range(len(tools))
    more = "" if one_call else ' ("\\n" call)*'
    rules = [f"start: call{more}", f"call: {' | '.join(f'call_{i}' for i in numbers)}"]
    for i, tool in zip(numbers, tools, strict=True):
        function = tool["function"]
        head = json.dumps(f'\n{{"name": {json.dumps(function["name"])}, "arguments": ')
        rules.append(f'call_{i}: {start} {head} arguments_{i} "}}\\n" {end}')
        rules.append(f"arguments_{i}: %json {json.dumps(function.get('parameters') or {'type': 'object'})}")
    return "\n".join(rules) + "\n"
