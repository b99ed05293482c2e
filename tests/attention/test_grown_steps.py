"""A decode step whose metadata grew from the last one's: the same as one that is built."""

from __future__ import annotations

import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import UNUSED, HostStep, IntArray, Planner, TableView, step_of
from mlxpaged.attention.tuning import Choice, Tuning, decode_class

BLOCK_SIZE = 16
VIEWS = (TableView(), TableView(group=1), TableView(ratio=2, part=1))
ONE_VIEW = (TableView(),)


def tables_for(contexts: list[int], groups: int = 2) -> IntArray:
    """Block ids that differ in all places, and UNUSED after the last block of each context."""
    width = -(-max(contexts) // BLOCK_SIZE)
    tables = np.arange(groups * len(contexts) * 2000).reshape(groups, len(contexts), -1)[:, :, :width].astype(np.int32)
    for i, context in enumerate(contexts):
        tables[:, i, -(-context // BLOCK_SIZE) :] = UNUSED
    return tables


def build(contexts: list[int], more: list[IntArray], planners: list[Planner], views: tuple[TableView, ...]) -> HostStep:
    lens = [1] * len(contexts)
    return HostStep.build(step_of(lens, contexts, tables_for(contexts)), BLOCK_SIZE, more, views, planners)


def grown(
    step: HostStep, contexts: list[int], more: list[IntArray], planners: list[Planner], views: tuple[TableView, ...]
) -> HostStep | None:
    return step.grown(step_of([1] * len(contexts), contexts, tables_for(contexts)), more, views, planners)


def make_planners(tuning: Tuning, *localities: tuple[int | None, int | None]) -> list[Planner]:
    layout = KVLayout(2, 32, 32, mx.float16, BLOCK_SIZE)
    kv = LayerKVCache.from_layout(1, layout, "metal", tuning)
    found = [kv.planner(4, window, chunk) for window, chunk in localities]
    return [planner for planner in found if planner is not None]


@pytest.mark.parametrize(
    "localities",
    [[(None, None)], [(40, None)], [(None, 50)], [(None, None), (100, None)], [(512, None)], [(600, None)]],
)
@pytest.mark.parametrize("partition", [None, 64, 96])
@pytest.mark.rotated("slow")
def test_a_grown_step_is_the_one_that_would_be_built(
    metal: None, localities: list[tuple[int | None, int | None]], partition: int | None
) -> None:
    rng = random.Random(str(localities))
    planners = make_planners(Tuning(decode=None if partition is None else Choice(partition)), *localities)
    num_grown = 0
    for first in ([5], [1, 39, 40, 63, 64, 95], [rng.randrange(1, 700) for _ in range(16)], [4090, 30], [8180, 450]):
        contexts = list(first)
        step = build(contexts, [np.arange(len(contexts), dtype=np.int32)], planners, VIEWS)
        for _ in range(150):
            contexts = [context + 1 for context in contexts]
            more = [np.array([rng.randrange(100) for _ in contexts], dtype=np.int32)]
            expected, found = build(contexts, more, planners, VIEWS), grown(step, contexts, more, planners, VIEWS)
            if found is not None:
                num_grown += 1
                assert found.shapes == expected.shapes
                assert found.plans == expected.plans
                assert found.signature == expected.signature
                assert found.max_blocks == expected.max_blocks
                assert found.vector.tolist() == expected.vector.tolist()
            step = found or expected
    assert num_grown > 375, "of 750"


def test_a_step_of_other_sequences_is_built(metal: None) -> None:
    planners = make_planners(Tuning(), (None, None))
    step = build([5, 9], [], planners, ONE_VIEW)
    assert grown(step, [6, 10], [], planners, ONE_VIEW) is not None
    for contexts in ([6], [6, 10, 3], [6, 9], [6, 11], [5, 9], [10, 6]):
        assert grown(step, contexts, [], planners, ONE_VIEW) is None
    assert step.grown(step_of([1, 2], [6, 11], tables_for([6, 11])), [], ONE_VIEW, planners) is None
    assert step.grown(step_of([1, 1], [6, 10], tables_for([6, 300])), [], ONE_VIEW, planners) is None, "a wider table"
    assert grown(step, [6, 10], [np.zeros(2, np.int32)], planners, ONE_VIEW) is None
    with_more = build([5, 9], [np.zeros(2, np.int32)], planners, ONE_VIEW)
    assert grown(with_more, [6, 10], [np.zeros(3, np.int32)], planners, ONE_VIEW) is None
    assert grown(with_more, [6, 10], [], planners, ONE_VIEW) is None
    tile = HostStep.build(
        replace(step_of([1, 1], [5, 5], tables_for([5, 5])), num_repeats=1), BLOCK_SIZE, [], ONE_VIEW, planners
    )
    assert grown(tile, [6, 6], [], planners, ONE_VIEW) is None
    chunk = HostStep.build(step_of([2], [6], tables_for([6])), BLOCK_SIZE, [], ONE_VIEW, planners)
    assert chunk.grown(step_of([2], [7], tables_for([7])), [], ONE_VIEW, planners) is None
    assert chunk.grown(step_of([1], [7], tables_for([7])), [], ONE_VIEW, planners) is None


def test_positions_are_shifted_after_images(metal: None) -> None:
    """Slots and plans are those of the places in the sequences, whatever the shifts are."""
    planners = make_planners(Tuning(), (None, None))
    plain, shifted = (step_of([1, 1], contexts, tables_for(contexts)) for contexts in ([40, 90], [41, 91]))
    rows = [row._replace(shifts=[(10, -4), (35, -20)][: i + 1]) for i, row in enumerate(shifted.rows)]
    step = HostStep.build(plain, BLOCK_SIZE, [], ONE_VIEW, planners)
    found = step.grown(replace(shifted, rows=rows), [], ONE_VIEW, planners)
    built = HostStep.build(replace(shifted, rows=rows), BLOCK_SIZE, [], ONE_VIEW, planners)
    without = HostStep.build(shifted, BLOCK_SIZE, [], ONE_VIEW, planners)
    assert found is not None
    assert found.vector.tolist() == built.vector.tolist()
    assert built.vector[:2].tolist() == [40 - 4, 90 - 20]
    assert built.vector[2:].tolist() == without.vector[2:].tolist()


def test_the_step_before_is_not_changed(metal: None) -> None:
    planners = make_planners(Tuning(), (None, None))
    step = build([5, 9], [], planners, ONE_VIEW)
    before = step.vector.tolist()
    assert grown(step, [6, 10], [], planners, ONE_VIEW) is not None
    assert grown(step, [6, 10], [np.zeros(2, np.int32)], planners, ONE_VIEW) is None
    assert step.vector.tolist() == before


def test_no_block_of_a_longer_table_is_left(metal: None) -> None:
    planners = make_planners(Tuning(), (None, None))
    step = HostStep.build(step_of([1], [5], tables_for([80])), BLOCK_SIZE, [], ONE_VIEW, planners)
    found = grown(step, [6], [], planners, ONE_VIEW)
    assert found is not None
    assert found.vector.tolist() == build([6], [], planners, ONE_VIEW).vector.tolist()


def test_a_step_whose_context_is_of_another_class_gets_the_plan_of_that_class(metal: None) -> None:
    short = decode_class(np.array([1024]))
    planners = make_planners(Tuning(((short, Choice(4096)),)), (None, None))
    lens, tables = [1], tables_for([2000])
    step = HostStep.build(step_of(lens, [1023], tables), BLOCK_SIZE, [], ONE_VIEW, planners)
    step_of_1024 = step.grown(step_of(lens, [1024], tables), [], ONE_VIEW, planners)
    assert step_of_1024 is not None
    assert step_of_1024.grown(step_of(lens, [1025], tables), [], ONE_VIEW, planners) is None


def test_a_grown_step_needs_blocks_for_its_tokens(metal: None) -> None:
    planners = make_planners(Tuning(), (None, None))
    step = build([16, 40], [], planners, ONE_VIEW)
    with pytest.raises(ValueError, match="lack blocks"):
        step.grown(step_of([1, 1], [17, 41], tables_for([16, 41])), [], ONE_VIEW, planners)
    step = build([16], [], planners, ONE_VIEW)
    with pytest.raises(ValueError, match="too short"):
        step.grown(step_of([1], [17], tables_for([16])), [], ONE_VIEW, planners)
