"""Messages of rank 0: what is written is read, and a step of many long contexts is small."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mlxpaged.cache.table_rows import UNUSED
from mlxpaged.engine.rank_messages import MessageReader, MessageWriter
from mlxpaged.engine.step_input import StepInput
from mlxpaged.models.states import StateRow
from mlxpaged.scheduler.batch import BlockMoves

BLOCK_SIZE = 32


def step(lengths: dict[int, int], groups: int = 1, shift: int = 0) -> StepInput:
    """A decode step of sequences with these contexts. shift: of all block ids."""
    ids, width = list(lengths), max(-(-each // BLOCK_SIZE) for each in lengths.values())
    tables = np.full((groups, len(ids), width), UNUSED, np.int32)
    for group in range(groups):
        for row, sequence_id in enumerate(ids):
            count = -(-lengths[sequence_id] // BLOCK_SIZE)
            tables[group, row, :count] = np.arange(count) * 100 + sequence_id + shift + group
    tokens = np.arange(len(ids), dtype=np.int32)
    states = [StateRow(each, 3, 1, None, ((4, 9),)) for each in ids]
    pending = tokens if shift else None
    return StepInput(
        *(ids, [1] * len(ids), list(lengths.values()), tokens, tables, tokens, pending),
        *(len(ids), [None] * len(ids), states, set(ids)),
    )


def assert_equal(got: StepInput, expected: StepInput) -> None:
    for one, other in zip(got, expected, strict=True):
        if isinstance(other, np.ndarray):
            assert isinstance(one, np.ndarray)
            assert one.dtype == other.dtype
            assert one.tolist() == other.tolist()
        elif other and isinstance(other, list) and isinstance(other[0], StateRow):
            assert [row.checkpoints[0] for row in one] == [[4, 9]] * len(other)  # type: ignore[union-attr]
        else:
            assert one == other


def test_steps_are_read_as_they_were_written_however_tables_change() -> None:
    rng, writer, reader = random.Random(0), MessageWriter(), MessageReader()
    lengths: dict[int, int] = {}
    for number in range(60):
        lengths = {each: length + rng.randrange(40) for each, length in lengths.items() if rng.random() < 0.8}
        for _ in range(rng.randrange(3)):
            lengths[rng.randrange(1000)] = rng.randrange(1, 300)
        shuffled = dict(rng.sample(list(lengths.items()), len(lengths))) or {5: 1}
        expected = step(shuffled, groups=2, shift=number % 7)
        call, [got] = reader.read(writer.write("run", expected))
        assert call == "run"
        assert_equal(got, expected)


def test_a_step_of_64_contexts_of_32_thousand_tokens_takes_a_few_kilobytes() -> None:
    writer = MessageWriter()
    writer.write("run", step(dict.fromkeys(range(64), 32_000)))
    assert len(writer.write("run", step(dict.fromkeys(range(64), 32_001)))) < 8_000


def test_other_calls_are_read_as_they_were_written() -> None:
    writer, reader = MessageWriter(), MessageReader()
    moves = BlockMoves([(1, 2)], [(3, 4)], [(5, 6)], [(7, [8, 9])], [([10], 11)])
    call, [got] = reader.read(writer.write("move_blocks", moves))
    assert call == "move_blocks"
    assert got == BlockMoves([[1, 2]], [[3, 4]], [[5, 6]], [[7, [8, 9]]], [[[10], 11]])  # type: ignore[list-item]
    assert reader.read(writer.write("copy_blocks", {5: 3, 6: 4})) == ("copy_blocks", [{5: 3, 6: 4}])
    assert reader.read(writer.write("resize_pool", 2, 40)) == ("resize_pool", [2, 40])
    assert reader.read(writer.write("clear_cache")) == ("clear_cache", [])


@pytest.mark.parametrize("message", [b"", b"{", b"[]", b'["run"]', b'["run",[1]]'])
def test_anything_else_is_an_error(message: bytes) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        MessageReader().read(message)
