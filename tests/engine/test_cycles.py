"""Cycles at the end of a sequence, beside a search of all periods."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxpaged.parts.repetition.cycles import STRIDE, WINDOW, Cycle, CycleFinder

EARLIEST = WINDOW + STRIDE
"""Tokens of the second copy after which a cycle is known for certain."""


def repeated(tokens: list[int], period: int) -> int:
    """How many tokens at the end repeat those before them after so many tokens, the first copy included."""
    count = 0
    while count < len(tokens) - period and tokens[-1 - count] == tokens[-1 - count - period]:
        count += 1
    return count + period


def found(tokens: list[int]) -> list[Cycle]:
    finder = CycleFinder()
    for token in tokens:
        finder.add(token)
    return sorted(finder.cycles())


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Texts with cycles in them, cycles of cycles included."""
    few = st.lists(st.integers(0, 2), min_size=1, max_size=12)
    pieces = draw(st.lists(st.tuples(few, st.integers(1, 30)), min_size=1, max_size=6))
    tokens = [token for piece, copies in pieces for token in piece * copies]
    return tokens * draw(st.integers(1, 4))


@given(texts())
def test_every_cycle_of_three_copies_is_found_with_its_shortest_period_and_whole_length(tokens: list[int]) -> None:
    by_period = {cycle.period: cycle.length for cycle in found(tokens)}
    for period, length in by_period.items():
        assert repeated(tokens, period) == length
    shortest: list[int] = []
    for period in range(1, len(tokens)):
        length = repeated(tokens, period)
        if length < max(3 * period, period + EARLIEST) or any(period % each == 0 for each in shortest):
            continue
        shortest.append(period)
        assert by_period[period] == length


@given(
    st.lists(st.integers(0, 3), min_size=20, max_size=60), st.integers(2, 5), st.lists(st.integers(0, 3), max_size=40)
)
def test_copies_of_one_text_are_one_cycle_after_whatever_came_before(
    unit: list[int], copies: int, before: list[int]
) -> None:
    period = next(
        each for each in range(1, len(unit) + 1) if len(unit) % each == 0 and unit == unit[:each] * (len(unit) // each)
    )
    tokens = [*before, 9, *unit * copies]
    if len(unit) * copies - period >= EARLIEST:
        assert Cycle(period, len(unit) * copies) in found(tokens)


def test_a_cycle_ends_with_the_first_new_token() -> None:
    assert found([1, 2, 3] * 20) == [Cycle(3, 60)]
    assert found([1, 2, 3] * 20 + [7]) == []
    assert Cycle(3, 62).copies == 20


def test_what_has_a_new_number_in_each_copy_is_no_cycle() -> None:
    words = [5, 6, 7, 8]
    tokens = [token for number in range(200) for token in (*words, 1000 + number)]
    assert found(tokens) == []


def test_a_cycle_inside_of_each_copy_is_followed_beside_the_long_one() -> None:
    ruler, row = [1] * 40, [3, 4, 5, 6]
    assert found((row + ruler) * 4) == [Cycle(1, 40), Cycle(44, 176)]
    assert found((row + ruler) * 4 + row) == [Cycle(44, 180)]
