"""A limit on thoughts leaves room for an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpaged.core.text.thinking_limit import ThinkingLimit


@pytest.mark.parametrize(
    ("text", "max_tokens", "most"),
    [
        ("2048", 100_000, 2048),
        ("2048", 500, 250),
        ("1", 500, 1),
        ("40%", 500, 200),
        ("99.5%", 1000, 995),
        ("40%", 1, 0),
        (" 7 ", 14, 7),
    ],
)
def test_it_is_a_number_or_a_share_and_a_number_is_at_most_the_half(text: str, max_tokens: int, most: int) -> None:
    limit = ThinkingLimit.parse(text)
    assert limit.of(max_tokens) == most
    assert ThinkingLimit.parse(str(limit)) == limit


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 99))
def test_an_answer_always_has_room(tokens: int, max_tokens: int, percent: int) -> None:
    for limit in (ThinkingLimit(tokens), ThinkingLimit.parse(f"{percent}%")):
        assert 0 <= limit.of(max_tokens) < max_tokens


@pytest.mark.parametrize("text", ["", "0", "-5", "1.5", "0%", "100%", "140%", "half", "40 %%", "4%0", "nan%", "%"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of tokens, at least 1, or a share"):
        ThinkingLimit.parse(text)
