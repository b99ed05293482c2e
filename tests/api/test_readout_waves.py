"""Which rows of a readout run first: what several prompts share, then the prompts, then their longer answers."""

from __future__ import annotations

import random

import pytest

from mlxpaged.api.generation.readout_waves import LEAST_SAVED, EngineRow, ReadoutPrompt, shared_prefixes, waves_of
from mlxpaged.core.engine.readout import Readout

BLOCK = 32
SHARED = list(range(1000, 1000 + 3 * BLOCK + 20))
ONE, SEVERAL = [[1], [2]], [[1, 3, 4], [1, 5], [2, 6]]


def prompt(own: list[int], answers: list[list[int]], shared: list[int] = SHARED) -> ReadoutPrompt:
    return ReadoutPrompt([*shared, *own], Readout(answers), shared=shared)


def shape(waves: list[list[EngineRow]]) -> list[list[int]]:
    """The tokens of each row."""
    return [[len(row.token_ids) for row in wave] for wave in waves]


def test_one_prompt_is_one_wave() -> None:
    [[row]] = waves_of([prompt([7, 8], ONE)], BLOCK)
    assert (row.token_ids, row.prompts, row.is_whole) == ([*SHARED, 7, 8], (0,), True)
    assert row.num_counted == len(SHARED) + 2


def test_what_many_prompts_share_is_computed_before_them() -> None:
    prompts = [prompt([7, 100 + i, 9], ONE) for i in range(9)]
    first, second = waves_of(prompts, BLOCK)
    [row] = first
    assert row.token_ids == [*SHARED, 7], "what they share of their own tokens too"
    assert row.params.max_tokens == 0
    assert sorted(row.prompts) == list(range(9))
    assert sum(each.num_counted for each in (*first, *second)) == len(SHARED) + 9 * 3


def test_a_wave_that_saves_little_is_left_out() -> None:
    few = LEAST_SAVED // 20
    assert len(waves_of([prompt([i], ONE) for i in range(1 + few)], BLOCK)) == 1
    assert len(waves_of([prompt([i], ONE) for i in range(2 + few)], BLOCK)) == 2
    whole = SHARED[: 2 * BLOCK]
    assert len(waves_of([prompt([i], ONE, whole) for i in range(200)], BLOCK)) == 1, "whole blocks are shared anyhow"


def test_prompts_that_share_more_are_computed_after_what_they_share() -> None:
    kinds = [[*range(50 * kind, 50 * kind + 40), 500 + i] for kind in (1, 2) for i in range(5)]
    waves = waves_of([prompt(own, ONE) for own in kinds], BLOCK)
    assert shape(waves) == [[len(SHARED)], [len(SHARED) + 40] * 2, [len(SHARED) + 41] * 10]


def test_longer_answers_follow_their_prompts() -> None:
    prompts = [prompt([100 + i], SEVERAL if i % 2 else ONE) for i in range(6)]
    *_, whole, paths = waves_of(prompts, BLOCK)
    assert [row.prompts[0] for row in whole] == list(range(6))
    rows = prompts[1].readout.rows[1:]
    assert [row.token_ids for row in paths] == [[*SHARED, 100 + i, *row.path] for i in (1, 3, 5) for row in rows]
    assert [row.num_counted for row in paths] == [len(row.path) for row in rows] * 3


def test_a_few_longer_answers_are_in_the_wave_of_their_prompt() -> None:
    [wave] = waves_of([prompt([7], SEVERAL)], BLOCK)
    assert [row.is_whole for row in wave] == [True, False, False, False]


def test_prompts_about_different_inputs_share_nothing() -> None:
    other = [*SHARED]
    prompts = [prompt([100 + i], ONE, (SHARED, other)[i % 2]) for i in range(20)]
    first, second = waves_of(prompts, BLOCK)
    assert [sorted(row.prompts) for row in first] in (
        [[*range(0, 20, 2)], [*range(1, 20, 2)]],
        [[*range(1, 20, 2)], [*range(0, 20, 2)]],
    )
    assert len(second) == 20


def test_prompts_that_share_nothing_are_one_wave() -> None:
    [wave] = waves_of([ReadoutPrompt([i, 7], Readout(ONE)) for i in range(9)], BLOCK)
    assert [row.prompts for row in wave] == [(i,) for i in range(9)]


def test_equal_prompts_and_prefixes_of_each_other_end() -> None:
    owns = [[7] * (1 + i // 2) for i in range(800)]
    found = shared_prefixes([prompt(own, ONE) for own in owns], BLOCK)
    assert found
    assert all(each.length <= len(SHARED) + 400 for each in found)


@pytest.mark.parametrize("seed", range(20))
def test_every_prefix_is_one_of_its_prompts_and_of_the_shorter_ones(seed: int) -> None:
    source = random.Random(seed)
    prompts = [
        prompt([source.randrange(2) for _ in range(source.randrange(1, 60))], ONE)
        for _ in range(source.randrange(2, 80))
    ]
    by_level = dict[int, tuple[int, int]]()
    for prefix in sorted(shared_prefixes(prompts, BLOCK), key=lambda each: each.level):
        tokens = {tuple(prompts[index].token_ids[: prefix.length]) for index in prefix.prompts}
        assert len(tokens) == 1
        assert all(by_level.get(index, (-1, 0))[0] == prefix.level - 1 for index in prefix.prompts)
        assert all(by_level.get(index, (-1, 0))[1] < prefix.length for index in prefix.prompts)
        by_level |= dict.fromkeys(prefix.prompts, (prefix.level, prefix.length))
