"""`text_offset` of completions: where a token begins in the text, in characters as Python counts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.helpers import post, stream_events
from tests.scripted import scripted_server
from tests.support import RunningServer

SCRIPT = {"Emoji?": "A😀B", "Accents?": "é\u0301ßa", "Flag?": "\U0001f1e9\U0001f1ea.", "Stop?": "A😀B😀C"}
"""The model has a token for each byte: four for an emoji, two for each of the accents, eight for a flag."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", SCRIPT) as server:
        yield server


def offsets(server: RunningServer, prompt: str, **fields: Any) -> tuple[list[str], list[list[int]]]:
    """The texts of the choices and the offsets in each, the same whole and streamed."""
    body = {"model": "scripted", "prompt": prompt, "max_tokens": 40, "logprobs": 1} | fields
    choices = post(server, body)["choices"]
    streamed: list[list[int]] = [[] for _ in choices]
    *chunks, _ = stream_events(server, "/v1/completions", body)
    for chunk in chunks:
        [choice] = chunk["choices"]
        streamed[choice["index"]] += (choice["logprobs"] or {"text_offset": []})["text_offset"]
    found = [choice["logprobs"]["text_offset"] for choice in choices]
    assert streamed == found
    return [choice["text"] for choice in choices], found


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Emoji?", [0, 1, 1, 1, 1, 2, 3]),
        ("Accents?", [0, 0, 1, 1, 2, 2, 3, 4]),
        ("Flag?", [0, 0, 0, 0, 1, 1, 1, 1, 2, 3]),
    ],
)
def test_a_part_of_a_character_begins_with_it(server: RunningServer, prompt: str, expected: list[int]) -> None:
    """The end token is no part of the text."""
    for n in (1, 2):
        assert offsets(server, prompt, n=n) == ([SCRIPT[prompt]] * n, [expected] * n)


def test_with_echo_they_go_on_after_the_prompt(server: RunningServer) -> None:
    """The client has written a special token, which the text repeats."""
    prompt = "é<|im_start|>Emoji?"
    text, found = offsets(server, prompt, echo=True, n=2)
    assert text == [f"{prompt}A😀B"] * 2
    begin = prompt.index("E")
    at = [0, 0, 1, *range(begin, begin + 6)]
    assert found == [[*at, *(len(prompt) + each for each in (0, 1, 1, 1, 1, 2, 3))]] * 2


def test_each_prompt_has_its_own(server: RunningServer) -> None:
    body = {"model": "scripted", "prompt": ["Flag?", "Emoji?"], "max_tokens": 3, "logprobs": 0, "echo": True}
    found = [choice["logprobs"]["text_offset"] for choice in post(server, body)["choices"]]
    assert found == [[*range(5), 5, 5, 5], [*range(6), 6, 7, 7]]


def test_they_end_with_the_text(server: RunningServer) -> None:
    assert offsets(server, "Stop?", stop="B😀") == (["A😀"], [[0, 1, 1, 1, 1]])
