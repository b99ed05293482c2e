"""Stop strings, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxpaged.core.text.answer_parser import AnswerParser, HarmonyParser, TagParser
from mlxpaged.core.text.answer_stop import AnswerStop
from mlxpaged.core.text.deltas import Text
from mlxpaged.core.text.stop_strings import StopStrings
from mlxpaged.formats import FORMATS
from mlxpaged.models.text.tokenizer import Tags
from tests.engine.helpers import lines_run


def reference(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Character by character: the answer ends as soon as it ends with a stop string, the longest if several."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def feed_all(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, bool]:
    strings = StopStrings(stop)
    out = ""
    for piece in pieces:
        text, stopped = strings.feed(piece)
        out += text
        if stopped:
            return out, True
    return out + strings.finish(), False


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({place % (len(text) + 1) for place in at})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


ALPHABET = st.text("ab\n", max_size=24)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=7), max_size=6).map(tuple)
CUTS = st.lists(st.integers(0, 100), max_size=12)


@given(ALPHABET, STOPS, CUTS)
@example("ab\n", ("ab\n", "b"), [])
@example("ab\n", ("ab\n", "b"), [1, 2])
def test_the_text_ends_before_the_stop_string_that_is_complete_first(
    text: str, stop: tuple[str, ...], at: list[int]
) -> None:
    assert feed_all(cut(text, at), stop) == reference(text, stop)


@given(ALPHABET, st.text("ab\n", min_size=1, max_size=5), CUTS)
def test_with_one_stop_string_the_text_is_what_stands_before_its_first_occurrence(
    text: str, stop: str, at: list[int]
) -> None:
    assert feed_all(cut(text, at), (stop,)) == (text.split(stop)[0], stop in text)


@given(ALPHABET, STOPS, CUTS)
def test_no_beginning_of_a_stop_string_is_let_out_and_nothing_else_is_held_back(
    text: str, stop: tuple[str, ...], at: list[int]
) -> None:
    strings = StopStrings(stop)
    fed = out = ""
    for piece in cut(text, at):
        fed += piece
        more, stopped = strings.feed(piece)
        out += more
        if stopped:
            break
        held = max((n for s in stop for n in range(len(s)) if fed.endswith(s[:n])), default=0)
        assert out == fed[: len(fed) - held]


def test_no_stop_strings_hold_nothing_back() -> None:
    strings = StopStrings(())
    assert strings.feed("anything") == ("anything", False)
    assert strings.finish() == ""


def test_what_was_held_back_comes_at_the_end_and_only_once() -> None:
    strings = StopStrings(("STOP",))
    assert strings.feed("go STO") == ("go ", False)
    assert strings.finish() == "STO"
    assert strings.finish() == ""


@pytest.mark.parametrize("pieces", [["x🙂y"], ["x", "🙂", "y"]])
def test_a_stop_string_may_be_any_characters(pieces: list[str]) -> None:
    assert feed_all(pieces, ("🙂",)) == ("x", True)


def lines(stop: tuple[str, ...]) -> int:
    """Of Python, for 300 characters of which most could begin a stop string. The first piece makes the automaton."""
    strings = StopStrings(stop)
    strings.feed("aaab")
    return lines_run(lambda: [strings.feed("aaab") for _ in range(75)])


def test_many_long_stop_strings_take_no_more_time_than_a_short_one() -> None:
    long = tuple("a" * 1000 + chr(ord("c") + i) * 24 for i in range(16))
    assert lines(long) < 2 * lines(("ac",))


SAY = [{"type": "function", "function": {"name": "say"}}]
MARKS = {
    "json_tools": ("<think>", "</think>", '<tool_call>{"name": "say"}</tool_call>', "<tool_call>", "</tool_call>"),
    "harmony": ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|start|>assistant"),
    "llama3": ('{"name": "say"}', '{"name"', "<|python_tag|>", '[{"', "<think>"),
}
"""Pieces of answers, by format: with each of them in any order, most are malformed."""


def new_parser(form: str) -> AnswerParser:
    if form == "harmony":
        return HarmonyParser(SAY, False)
    return TagParser(Tags("<think>", "</think>", FORMATS[form]), False, SAY, False)


@given(st.sampled_from(sorted(MARKS)), st.data())
def test_the_text_of_an_answer_has_no_stop_string_however_it_is_cut(form: str, data: st.DataObject) -> None:
    """The answer before it is what the model wrote."""
    words = st.sampled_from((*MARKS[form], "a", "b", "ab", " ", "\n", "<"))
    answer = "".join(data.draw(st.lists(words, max_size=12)))
    stop = tuple(data.draw(st.lists(st.text("ab\n <", min_size=1, max_size=3), min_size=1, max_size=3)))
    found = []
    for pieces in ([answer], list(answer), cut(answer, data.draw(CUTS))):
        strings, out, stopped = AnswerStop(stop, new_parser(form)), "", False
        for piece in pieces:
            if not stopped:
                text, stopped = strings.feed(piece)
                out += text
        if not stopped:
            text, stopped = strings.finish(is_cut=False)
            out += text
        found.append((out, strings.found))
    assert found == found[:1] * 3
    out, string = found[0]
    assert answer.startswith(out if string is None else out + string)
    assert (out == answer) == (string is None)
    parts = new_parser(form)
    for delta in (*parts.feed(out), *parts.finish()):
        assert not isinstance(delta, Text) or not any(each.strip() and each in delta.text for each in stop)
