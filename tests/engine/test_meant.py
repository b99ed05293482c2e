"""Repetitions that are meant: constants, and what the prompt asks for."""

from __future__ import annotations

import math

import pytest

from mlxpaged.parts.repetition.meant import copies_asked, is_array, is_data, nests


@pytest.mark.parametrize(
    "unit",
    [
        "0, ",
        "0",
        "0.0, 1.5e-3,\n ",
        "[0, 0], ",
        "0x00, 0xff, ",
        "\\x00",
        "\n    '\\ufffe'",
        "null,",
        "True, False, ",
        "FF FF ",
        "| 0 | 0 |\n",
        "-1,-1;",
    ],
)
def test_numbers_and_other_constants_are_data_wherever_the_cycle_begins(unit: str) -> None:
    for first in range(len(unit)):
        turned = unit[first:] + unit[:first]
        assert is_data(turned * 16), turned


@pytest.mark.parametrize("unit", ["~`", "━", " ----", "+--+--", "#\n    |", ";", "| |\n", "AAAAAAAA"])
def test_rulers_and_drawings_and_zero_bytes_are_data(unit: str) -> None:
    assert is_data(unit * 16)


@pytest.mark.parametrize(
    "unit",
    ["the ", " ", "\n", "\t \n", "!", "?!", "\ufffd", "a, ", "1 apple, ", "x = 0\n", "No. ", "feed the ", "st", "你好"],
)
def test_words_and_white_space_and_what_broken_models_write_are_none(unit: str) -> None:
    assert not is_data(unit * 16)


def test_copies_of_which_each_is_deeper_in_json_nest() -> None:
    assert nests('"type": "object", "properties": {"a": {')
    assert nests(', "additionalProperties": false}}')
    assert not nests('{"a": [1, 2], "b": {}}, ')
    assert not nests("if (x) { return; ")


def test_the_digits_of_one_number_are_no_array() -> None:
    assert is_array("0, 0, 0, ")
    assert not is_array("333")
    assert not is_array("3 3 3 ")


LINE = "All work and no play makes Jack a dull boy."


@pytest.mark.parametrize(
    ("prompt", "unit", "copies"),
    [
        (f"Write '{LINE}' 50 times.", f"{LINE}\n", 50),
        (f"Write 500 copies of: {LINE}", f"* {LINE}\n", 500),
        (f"Schreib 30 mal: {LINE}", " Jack a dull boy.\nAll work and no play makes", 30),
        (f"Repeat this: {LINE}", LINE, math.inf),
        ("say hello a hundred times", "Hello! ", math.inf),
        ("print(x * 80) for x = 'ho'", "ho", 80),
        ("请重复 你好", "你好\n", math.inf),
        ("Print 🎉 100 times", "🎉", 100),
        ("Say hello 20 times, then hello 70 times", "hello ", 70),
        (f"Tell me about this sentence: {LINE}", LINE, 0),
        ("Write a story with 3 chapters, 50 times better than others.", "the dog and the cat. ", 0),
        (f"{LINE}{' padding' * 30} Do it 50 times.", LINE, 0),
        ("", LINE, 0),
        ("Repeat it.", "", 0),
        ("Repeat it.", " \n", 0),
    ],
)
def test_the_prompt_asks_for_copies_of_what_it_has_near_a_number_or_a_word_for_them(
    prompt: str, unit: str, copies: float
) -> None:
    assert copies_asked(prompt, unit) == copies


def test_a_cycle_may_begin_at_any_of_its_words() -> None:
    words = LINE.split()
    for first in range(len(words)):
        turned = " ".join(words[first:] + words[:first])
        assert copies_asked(f"Write '{LINE}' 9 times", turned) == 9
