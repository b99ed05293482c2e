"""Writes a structured output (thinking, text and tool calls) as one grammar in llguidance's Lark notation.

The grammar works on bytes, so it does not matter how the model cuts the tags into tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from mlxpaged.engine.constraint import StructuredOutput

Pieces = Callable[[str], Sequence[str | int]]
"""Splits a text into special tokens, as ids, and the texts between them."""


def lark(form: StructuredOutput, pieces: Pieces) -> str:
    """The grammar of `form`. In it, `@part_i` refers to the grammar of `form.parts[i]`."""

    def written(text: str) -> str:
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces(text))

    def until(name: str, tag: str, *absent: str) -> list[str]:
        """The rules for `name`: any text, to the end of `tag`. A regular expression cannot contain special tokens."""
        first, *_ = pieces(tag)
        if isinstance(first, int):
            return [f"{name}: {name.upper()} {written(tag)}", f"{name.upper()}: {text_without(tag, *absent)}"]
        rest = written(tag[len(first) :])
        upto = f"/(?s:.*){in_regex(first)}/" + "".join(f" & {text_without(text)}" for text in absent)
        return [f"{name}: {name}_head {rest}", f"{name}_head[lazy]: {name.upper()}", f"{name.upper()}: {upto}"]

    thought = {"never": "", "may": f"({written(form.think_start)} thought)? ", "open": "thought "}[form.thinking]
    rules = [f"start: {thought}answer"]
    if form.thinking != "never":
        rules += until("thought", form.think_end)
    if form.calls:
        more = "" if form.one_call else f' ("\\n"? {written(form.call_start)} call)*'
        rules += [f"calls: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(form.calls)))]
        for i, call in enumerate(form.calls):
            rules.append(f"call_{i}: {written(call.before)} @part_{i} {written(call.after)}")
    if form.text == "free":
        absent = [tag for tag in [form.think_start] if tag]
        rules += ["answer: TEXT | upto_call calls", f"TEXT: {text_without(form.call_start, *absent)}"]
        rules += until("upto_call", form.call_start, *absent)
    else:
        space = '("\\n" "\\n"?)? ' if form.spaced else ""
        text = f"@part_{len(form.calls)}" if form.text is not None else ""
        called = f"{written(form.call_start)} calls" if form.calls else ""
        rules.append(f"answer: {space}({' | '.join(filter(None, [text, called]))})")
    return "\n".join(rules) + "\n"


def text_without(*texts: str) -> str:
    """A terminal for any text that contains none of `texts`."""
    return "/(?s:.*)/" + "".join(f" & ~/(?s:.*){in_regex(text)}(?s:.*)/" for text in texts)


def in_regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
