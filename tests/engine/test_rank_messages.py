"""Messages of rank 0: what is written is read, and a step of many long contexts is small."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mlxpaged.core.blocks.table_rows import UNUSED
from mlxpaged.core.step import BlockMoves, Row, Step
from mlxpaged.parts.disk.disk_index import Name
from mlxpaged.parts.disk.disk_records import StoredBlock
from mlxpaged.parts.ranks.rank_messages import MessageReader, MessageWriter, StoredBlocks

BLOCK_SIZE = 32


def step(lengths: dict[int, int], groups: int = 1, shift: int = 0) -> Step:
    """A decode step of sequences with these contexts. shift: of all block ids."""
    width = max(-(-each // BLOCK_SIZE) for each in lengths.values())
    rows = []
    for sequence_id, length in lengths.items():
        count, tables = -(-length // BLOCK_SIZE), np.full((groups, width), UNUSED, np.int32)
        tables[:, :count] = [np.arange(count) * 100 + sequence_id + shift + group for group in range(groups)]
        logits = range(length - 1, length)
        rows.append(
            Row(sequence_id, length - 1, [-shift], logits, 1, None, [[4, 9]], None, "", tables, [[3, -2]], [[1, 5]])
        )
    return Step(rows)


def assert_equal(got: Step, expected: Step) -> None:
    for one, other in zip(got.rows, expected.rows, strict=True):
        assert [each for each in one if each is not one.tables] == [each for each in other if each is not other.tables]
        assert one.tables is not None
        assert other.tables is not None
        assert one.tables.dtype == other.tables.dtype
        assert one.tables.tolist() == other.tables.tolist()


def test_steps_are_read_as_they_were_written_however_tables_change() -> None:
    rng, writer, reader = random.Random(0), MessageWriter(), MessageReader()
    lengths: dict[int, int] = {}
    for number in range(60):
        lengths = {each: length + rng.randrange(40) for each, length in lengths.items() if rng.random() < 0.8}
        for _ in range(rng.randrange(3)):
            lengths[rng.randrange(1000)] = rng.randrange(1, 300)
        shuffled = dict(rng.sample(list(lengths.items()), len(lengths))) or {5: 1}
        expected = step(shuffled, groups=2, shift=number % 7)
        call, [got, *others] = reader.read(writer.write("run", expected, [3, 1], [1, 2]))
        assert (call, others) == ("run", [[3, 1], [1, 2]])
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
    blocks = StoredBlocks(
        [StoredBlock(Name(b"\x01\xff", 255), b"", (1, 2)), StoredBlock(Name(b"\x02", 0), b"\x01\xff", (3, 4))]
    )
    assert reader.read(writer.write("take_blocks", blocks, [7, 8])) == ("take_blocks", [blocks, [7, 8]])
    assert reader.read(writer.write("make_room", 100, 0.5)) == ("make_room", [100, 0.5])
    assert reader.read(writer.write("put", [7, 8])) == ("put", [[7, 8]])


@pytest.mark.parametrize("message", [b"", b"{", b"[]", b'["run"]', b'["run",[1]]'])
def test_anything_else_is_an_error(message: bytes) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        MessageReader().read(message)
