"""No real text is a loop, as tokens of a real model. `make bench-loops` has 2,000 of them, and what models write."""

from __future__ import annotations

import pytest

from benchmarks.loops import SHARES, first_cycle, texts, watched
from mlxpaged.models.text.tokenizer_files import tokenizer_in
from mlxpaged.parts.repetition.loop_end import COPIES, PATIENCE
from tests.real.conftest import path_of

NUM_TEXTS = 400
LINE = "I will look at the file again to see what is wrong with it.\n"


def test_no_text_of_a_real_file_is_a_loop_and_one_with_a_loop_at_its_end_is() -> None:
    tokenizer = tokenizer_in(path_of("float32"), None, ())
    ended, num_tokens = [], 0
    for root, share in SHARES.items():
        for path, text in texts(root, round(NUM_TEXTS * share)):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            num_tokens += len(tokens)
            if (found := watched(tokens, tokenizer)) is not None:
                ended.append((path, found))
    assert not ended
    assert num_tokens > 100_000
    loop = tokenizer.encode(LINE * 20, add_special_tokens=False)
    found = watched([*tokens, *loop], tokenizer)
    assert found is not None
    period = len(loop) // 20
    assert found.cycle.period == period
    assert found.tokens - len(tokens) == pytest.approx(COPIES * period + PATIENCE, abs=2)


def test_the_search_of_all_periods_finds_the_fourth_copy() -> None:
    unit = [5, 6, 7, 8, 9] * 4 + [1]
    assert first_cycle([3, *unit * 4]) == (1 + 4 * len(unit), len(unit))
    assert first_cycle([3, *unit * 3]) is None
    assert first_cycle([2] * 59) is None
    assert first_cycle([2] * 60) == (60, 1)
    assert first_cycle([2] * 80, more=20) == (80, 1)
