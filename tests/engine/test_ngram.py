"""Drafts from repetitions in the text."""

from __future__ import annotations

import random

from mlxpaged.core.step import FIRST_CONTENT_ID
from mlxpaged.models.loader import DEMO_PATH, read_tokenizer
from mlxpaged.parts.drafting.ngram import LENGTH, PLACES, TOKENS_AT_ONCE, NgramIndex


def index_of(tokens: list[int]) -> NgramIndex:
    index = NgramIndex()
    while True:
        index.extend(tokens, len(tokens))
        if index.continuation(len(tokens), 1)[1] or len(tokens) < TOKENS_AT_ONCE:
            return index


def test_what_followed_the_longest_match_is_proposed() -> None:
    tokens = [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 9, 1, 2, 3, 4]
    assert index_of(tokens).continuation(len(tokens), 3) == ([50, 9, 2], 4)


def test_a_prediction_is_searched_too_and_ends_before_the_prompt() -> None:
    index = NgramIndex([1, 2, 3, 4, 5])
    tokens = [9, 8, 1, 2, 3]
    index.extend(tokens, 5)
    assert index.continuation(5, 8) == ([], 0), "its tokens are added first"
    index.extend(tokens, 5)
    assert index.continuation(5, 8) == ([4, 5], 3)


def test_two_tokens_are_a_match_and_their_latest_place_counts() -> None:
    tokens = [1, 2, 30, 1, 2, 40, 41, 9, 1, 2]
    assert index_of(tokens).continuation(len(tokens), 2) == ([40, 41], 2)


def test_a_copy_goes_on_after_a_token_was_replaced() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 100, 1, 2, 3]
    index = index_of(tokens)
    for token, drafts in ((4, [5, 6]), (99, []), (6, [7, 8])):  # 99 instead of 5
        tokens.append(token)
        index.extend(tokens, len(tokens))
        assert index.continuation(len(tokens), 2)[0] == drafts


def test_rows_of_an_image_are_not_proposed() -> None:
    tokens = [1, 2, 3, 4, FIRST_CONTENT_ID, 9, 1, 2, 3]
    assert index_of(tokens).continuation(9, 5) == ([4], 3)


def test_nothing_is_proposed_for_new_text() -> None:
    assert index_of([1, 2, 3, 4, 5, 6]).continuation(6, 8) == ([], 0)
    assert index_of([1, 2]).continuation(2, 8) == ([], 0)


def test_a_repetition_goes_on_beyond_the_end() -> None:
    tokens = [5, 6, 7, 5, 6, 7, 5, 6]
    assert index_of(tokens).continuation(8, 7)[0] == [7, 5, 6, 7, 5, 6, 7]


def test_a_copy_is_followed_however_common_its_n_grams_are() -> None:
    """More places than are kept have the same tokens; the copied one is the first of them."""
    common = [7, 8, 9]
    parts = [[*common, 100 + i, 200 + i] for i in range(3 * PLACES)]
    tokens = [1, 2, 3, 4, *[token for part in parts for token in part], 1, 2, 3, 4]
    index = index_of(tokens)
    expected = [token for part in parts for token in part]
    for i, token in enumerate(expected[:40]):
        drafts, _ = index.continuation(len(tokens), 4)
        assert drafts == expected[i : i + 4]
        tokens.append(token)
        index.extend(tokens, len(tokens))


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(50_000) for _ in range(2 * TOKENS_AT_ONCE + 10)]
    tokens += tokens[5 : 5 + LENGTH]
    index = NgramIndex()
    found = []
    for _ in range(3):
        index.extend(tokens, len(tokens))
        found.append(index.continuation(len(tokens), 2)[0])
    assert found == [[], [], tokens[8:10]]


def test_an_edited_text_takes_few_passes() -> None:
    """The answer repeats a text of the prompt with two changes. Each pass of the model verifies eight drafts."""
    tokenizer = read_tokenizer(str(DEMO_PATH))
    old = "\n".join(f"def area_{i}(width, height):\n    return width * height + {i}\n" for i in range(12))
    new = old.replace("area_3", "surface_3").replace("+ 8", "- 8")
    prompt, answer = (tokenizer.reader.encode(text, add_special_tokens=False) for text in (old, new))
    index, tokens, passes, done = NgramIndex(), list(prompt), 0, 0
    while done < len(answer):
        index.extend(tokens, len(tokens))
        drafts, _ = index.continuation(len(tokens), 8)
        accepted = next(
            (i for i, draft in enumerate(drafts) if answer[done + i : done + i + 1] != [draft]), len(drafts)
        )
        tokens += answer[done : done + accepted + 1]
        done += accepted + 1
        passes += 1
    assert len(answer) / passes > 6
