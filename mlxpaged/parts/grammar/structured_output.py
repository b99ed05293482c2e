"""Writes a structured output (thinking, text and tool calls) as one grammar in llguidance's Lark notation.

The grammar works on bytes, so it does not matter how the model cuts the tags into tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence

from mlxpaged.core.engine.constraint import StructuredOutput, ToolCallForm, constraints_in
from mlxpaged.formats.pieces import Either, Json, Lark, Listed, Piece, Raw
from mlxpaged.parts.grammar.characters import as_it_is
from mlxpaged.parts.grammar.patterns import terms

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

    rules: list[str] = []
    parts = form.parts

    def rule(prefix: str, *lines: str) -> str:
        """Adds a rule under a new name."""
        name = f"{prefix}_{len(rules)}"
        rules.extend(line.replace("NAME", name) for line in lines)
        return name

    def pieces_of(call: ToolCallForm, items: Iterable[Piece]) -> str:
        return " ".join(filter(None, (piece_of(call, piece) for piece in items)))

    def piece_of(call: ToolCallForm, piece: Piece) -> str:
        if isinstance(piece, str):
            return written(piece)
        if isinstance(piece, Json | Lark):
            [part] = constraints_in([piece])
            return f"@part_{parts.index(part)} {written(piece.end) if isinstance(piece, Lark) else ''}".strip()
        if isinstance(piece, Listed):
            return listed(call, piece)
        if isinstance(piece, Either):
            return f"({' | '.join(pieces_of(call, way) for way in piece.ways)})"
        return raw(piece)

    def raw(piece: Raw) -> str:
        if piece.choices is not None:
            either = f"({' | '.join(json.dumps(text) for text in piece.choices if text)})"
            return f"{either}{'?' if '' in piece.choices else ''} {written(piece.end)}"
        name = f"raw_{len(rules)}"
        least, most = piece.lengths
        if (least, most, piece.patterns) == (0, None, ()):
            rules.extend(until(name, piece.end))
            return name
        first, *_ = pieces(piece.end)
        tag = "" if isinstance(first, int) else in_regex(piece.end)
        count = f"(?s:.){{{least},{'' if most is None else most}}}"
        limits = [f"/{count}{tag}/"]
        for pattern in piece.patterns:
            limits += terms(pattern, as_it_is, after=escaped(piece.end) if tag else "")
        rules.append(f"{name}: {name.upper()}{'' if tag else ' ' + written(piece.end)}")
        limits.append(once(piece.end) if tag else text_without(piece.end))
        rules.append(f"{name.upper()}: {' & '.join(limits)}")
        return name

    def listed(call: ToolCallForm, piece: Listed) -> str:
        """In `more_i`, an item comes before item i; in `none_i`, there is none yet."""
        more = none = ""
        for must, item in reversed(piece.items):
            this = f"{pieces_of(call, item)} {more}".strip()
            later = f"{written(piece.separator)} {this}" if piece.separator else this
            more, none = rule("more", either(must, later, more)), rule("none", either(must, this, none))
        return none

    thought = {"never": "", "may": f"({written(form.think_start)} thought)? ", "open": "thought "}[form.thinking]
    rules.append(f"start: {thought}answer")
    if form.thinking != "never":
        rules += until("thought", form.think_end)
    if form.calls:
        more = "" if form.one_call else f' ("\\n"? {written(form.call_start)} call)*'
        rules += [f"calls: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(form.calls)))]
        for i, call in enumerate(form.calls):
            body = pieces_of(call, call.pieces)  # it adds the rules that it needs
            rules.append(f"call_{i}: {body}")
    text_start = f"{written(form.text_start)} " if form.text_start else ""
    if form.text == "free" and text_start:
        rules += [
            f"answer: {text_start}TEXT | {written(form.call_start)} calls",
            f"TEXT: {text_without(form.text_start)}",
        ]
    elif form.text == "free":
        absent = [tag for tag in [form.think_start] if tag]
        rules += ["answer: TEXT | upto_call calls", f"TEXT: {text_without(form.call_start, *absent)}"]
        rules += until("upto_call", form.call_start, *absent)
    else:
        space = '("\\n" "\\n"?)? ' if form.spaced else ""
        text = f"{text_start}@part_{parts.index(form.text)}" if form.text is not None else ""
        called = f"{written(form.call_start)} calls" if form.calls else ""
        rules.append(f"answer: {space}({' | '.join(filter(None, [text, called]))})")
    return "\n".join(rules) + "\n"


def either(must: bool, item: str, others: str) -> str:
    """A rule for an item, or, unless it must be there, for what comes instead of it."""
    return f"NAME: {item}" if must else f"NAME: {item} | {others}" if others else f"NAME: ({item})?"


def once(tag: str) -> str:
    """A terminal for any text that has a tag at its end and nowhere else."""
    return f"~/(?s:.*){in_regex(tag)}(?s:.+)/"


def text_without(*texts: str) -> str:
    """A terminal for any text that contains none of `texts`."""
    return "/(?s:.*)/" + "".join(f" & ~/(?s:.*){in_regex(text)}(?s:.*)/" for text in texts)


def in_regex(text: str) -> str:
    """An expression of a text, between slashes."""
    return escaped(text).replace("/", r"\/")


def escaped(text: str) -> str:
    return re.escape(text).replace("\\\n", r"\n")
