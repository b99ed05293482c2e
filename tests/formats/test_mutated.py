"""Outputs of models that are broken in some way: tags that come twice or not at all, calls in calls, two formats in one
answer. Nothing is lost, nothing is invented, and the result does not depend on how the text is cut.

`make test-formats` runs all of them. MLXPAGED_OUTPUTS: how many. MLXPAGED_FUZZ_SEED and MLXPAGED_FUZZ_FIRST: which.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxpaged.api.generation.deltas import Delta, ToolCall
from mlxpaged.formats import FORMATS, HARMONY
from tests.formats.test_reading import THOUGHTS, calls_of, parse, uncut
from tests.formats.written import GEMMA_QUOTE, WRITTEN, as_json

OUTPUTS = int(os.environ.get("MLXPAGED_OUTPUTS") or 20_000)
SEED = int(os.environ.get("MLXPAGED_FUZZ_SEED") or 1)
FIRST = int(os.environ.get("MLXPAGED_FUZZ_FIRST") or 0)
CHUNK = 1000
"""Outputs of a test, so that several processes share them."""

MARK = re.compile(r"q\d+z")
"""Words that are all different. Each must come out as often as the model wrote it."""
FORMS = sorted(FORMATS)
AROUND = ["a < b", "x = {'k': [1]}", 'say "so"', "C:\\dir", "  two\n\n    lines\n", "<b>é</b>", "", "null", "3"]


class Case:
    """One output. text: what the model has written."""

    def __init__(self, number: int) -> None:
        self.rng = random.Random(f"{SEED}:{number}")
        self.words = (f"q{i}z" for i in itertools.count(10))
        self.form = self.rng.choice(FORMS)
        self.thinking = FORMATS[self.form] is not HARMONY and self.rng.random() < 0.1
        self.pieces = list(self.answer(self.form))
        for _ in range(self.rng.randint(1, 4)):
            self.rng.choice(MUTATIONS)(self)
        self.text = "".join(self.pieces)
        if self.rng.random() < 0.15:
            self.text = self.text[: self.rng.randint(0, len(self.text))]

    def string(self) -> str:
        parts = [self.rng.choice(AROUND) for _ in range(self.rng.randint(0, 2))]
        parts.insert(self.rng.randint(0, len(parts)), next(self.words))
        return self.rng.choice((" ", "", "\n")).join(parts)

    def call(self, form: str) -> str:
        name, arguments = self.rng.choice(
            [
                ("weather", {"city": self.string()}),
                ("say", {}),
                ("write_file", {"path": self.string(), "content": self.string()}),
                ("mixed", {"text": self.string(), "count": self.rng.randint(-9, 99), "items": [self.string()]}),
                ("mixed", {"options": {"deep": [self.string(), None]}, "flag": True}),
                ("mcp__fs__read-file", {"path": self.string()}),
                ("king", {"city": self.string()}),
            ]
        )
        return WRITTEN[form](name, arguments)

    def answer(self, form: str) -> Iterator[str]:
        """The pieces of an answer: tags, and what is between them."""
        text = ""
        if self.rng.random() < 0.5:
            start, end = THOUGHTS.get(form, ("<think>", "</think>"))
            if FORMATS[form] is HARMONY:
                start, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
            text += f"{start}\n{next(self.words)}\n{end}\n\n"
        if self.rng.random() < 0.4:
            text += f"I say {next(self.words)}.\n"
        separator = "<|start|>assistant" if FORMATS[form] is HARMONY else self.rng.choice(("\n", ""))
        text += separator.join(self.call(form) for _ in range(self.rng.randint(1, 3)))
        if self.rng.random() < 0.2:
            text += f"\nand {next(self.words)}"
        yield from self.parts(form, text)

    def parts(self, form: str, text: str) -> list[str]:
        tags = sorted((*FORMATS[form].tags, *THOUGHTS.get(form, ("<think>", "</think>"))), key=len, reverse=True)
        return [part for part in re.split(f"({'|'.join(map(re.escape, tags))})", text) if part]

    def at(self) -> int:
        return self.rng.randrange(len(self.pieces)) if self.pieces else 0

    def tag(self) -> int:
        """The place of a piece that is a tag, if there is one."""
        places = [i for i, piece in enumerate(self.pieces) if piece in FORMATS[self.form].tags or piece[:2] == "</"]
        return self.rng.choice(places) if places else self.at()


def double(case: Case) -> None:
    at = case.tag()
    case.pieces[at:at] = case.pieces[at : at + 1]


def drop(case: Case) -> None:
    at = case.tag()
    del case.pieces[at : at + 1]


def swap(case: Case) -> None:
    if case.pieces:
        a, b = case.tag(), case.tag()
        case.pieces[a], case.pieces[b] = case.pieces[b], case.pieces[a]


def nest(case: Case) -> None:
    """A call inside of a piece."""
    if case.pieces:
        at = case.at()
        piece = case.pieces[at]
        cut = case.rng.randint(0, len(piece))
        case.pieces[at : at + 1] = [piece[:cut], *case.parts(case.form, case.call(case.form)), piece[cut:]]


def lose_characters(case: Case) -> None:
    if case.pieces:
        at = case.at()
        piece = case.pieces[at]
        cut = case.rng.randint(0, len(piece))
        case.pieces[at] = piece[:cut] + piece[cut + case.rng.randint(1, 3) :]


def mix(case: Case) -> None:
    """An answer in another format, or one of its tags."""
    other = case.rng.choice(FORMS)
    at = case.at()
    case.pieces[at:at] = case.answer(other) if case.rng.random() < 0.5 else [case.rng.choice(FORMATS[other].tags)]


def move(case: Case) -> None:
    if case.pieces:
        piece = case.pieces.pop(case.at())
        case.pieces.insert(case.at(), piece)


MUTATIONS: list[Callable[[Case], None]] = [double, drop, swap, nest, lose_characters, mix, move]


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    if isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from keys(each)


def is_written(value: Any, text: str) -> bool:
    """Whether the model has written this value, in JSON, in Python or as it is."""
    if isinstance(value, str):
        escaped = as_json(value)[1:-1]
        return any(each in text for each in (value, escaped, repr(value)[1:-1], as_json(escaped)[1:-1]))
    return any(each in text for each in (json.dumps(value), repr(value)))


def problem(case: Case, deltas: list[Delta]) -> str | None:
    """What is wrong with how an output was read; None if it is right."""
    calls, text = calls_of(deltas), case.text
    out = "\n".join((*(delta.text for delta in uncut(deltas) if not isinstance(delta, ToolCall)), as_json(calls)))
    wrote, came = Counter(MARK.findall(text)), Counter(MARK.findall(out))
    if wrote != came:
        return f"lost {dict(wrote - came)}, invented {dict(came - wrote)}"
    quote = {"gemma4": GEMMA_QUOTE, "function_gemma": "<escape>"}.get(case.form)
    shown = [text] if quote is None else [text, text.replace(quote, '"')]
    shown.append(text.replace("\\n", "\n").replace("\\\\", "\\").replace('\\"', '"'))  # escaped only in a part
    for name, arguments in calls:
        for value in (*leaves(arguments), *keys(arguments), name):
            if not any(is_written(value, each) for each in shown):
                return f"{name} has {value!r}, which the model has not written"
    return None


def check(number: int) -> None:
    case = Case(number)
    deltas: list[Delta] = []
    again = f"repeat it with: make test-formats SEED={SEED} FIRST={number} OUTPUTS=1 ARGS='-k mutated'"
    try:
        deltas = parse([case.text], case.form, thinking=case.thinking)
        wrong = problem(case, deltas)
        at = sorted({0, *(case.rng.randint(0, len(case.text)) for _ in range(8)), len(case.text)})
        for pieces in (list(case.text), [case.text[a:b] for a, b in itertools.pairwise(at)]):
            if uncut(parse(pieces, case.form, thinking=case.thinking)) != uncut(deltas):
                wrong = wrong or "it depends on the cuts"
    except Exception as error:
        raise AssertionError(f"{error!r}\n{case.form}: {case.text!r}\n{again}") from error
    assert wrong is None, f"{wrong}\n{case.form}, thinking {case.thinking}: {case.text!r}\n{uncut(deltas)}\n{again}"


def test_a_few_mutated_outputs_are_read_without_loss() -> None:
    for number in range(200):
        check(number)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FIRST, FIRST + OUTPUTS, CHUNK))
def test_mutated_outputs_are_read_without_loss(first: int) -> None:
    for number in range(first, min(first + CHUNK, FIRST + OUTPUTS)):
        check(number)
