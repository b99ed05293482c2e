"""What the kernels are told of a step: where each token lies, and which keys it sees."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxpaged.attention.metadata import AttentionMetadata


def test_metadata_places_every_token() -> None:
    meta = AttentionMetadata.build([1, 3, 2], [10, 9, 2], [[7, 2], [4, 1, 9], [0]], block_size=8)
    assert meta.num_tokens == 6
    assert meta.positions.tolist() == [9, 6, 7, 8, 0, 1]
    assert meta.slot_mapping.tolist() == [2 * 8 + 1, 4 * 8 + 6, 4 * 8 + 7, 1 * 8 + 0, 0, 1]
    assert meta.block_tables.tolist() == [[7, 2, *[-1] * 6], [4, 1, 9, *[-1] * 5], [0, *[-1] * 7]], "8 columns at least"
    assert meta.padded_slots.tolist() == [2 * 8 + 1, 4 * 8 + 6, 4 * 8 + 7, 1 * 8 + 0, 0, 1, -1, -1]
    arrays = (meta.positions, meta.slot_mapping, meta.block_tables)
    assert {array.dtype for array in arrays} == {mx.int32}
    assert meta.max_block == 9


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "tables", "block_size", "message"),
    [
        ([], [], [], 32, "at least one sequence"),
        ([1, 1], [1], [[0], [1]], 32, "one entry per sequence"),
        ([1], [1], [], 32, "one entry per sequence"),
        ([0], [5], [[0]], 32, "sequence 0: query_len"),
        ([-1], [5], [[0]], 32, "sequence 0: query_len"),
        ([1, 6], [1, 5], [[0], [1]], 32, "sequence 1: query_len"),
        ([1], [33], [[0]], 32, "cannot hold 33 tokens"),
        ([1], [1], [[]], 32, "cannot hold 1 tokens"),
        ([1], [1], [[-1]], 32, "negative block id"),
        ([1], [1], [[0, -3]], 32, "negative block id -3"),
        ([1], [1], [[0]], 0, "block_size"),
        ([1], [1], [[2**40]], 32, "block id"),
    ],
)
def test_metadata_refuses_lists_that_do_not_fit(
    query_lens: list[int], context_lens: list[int], tables: list[list[int]], block_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionMetadata.build(query_lens, context_lens, tables, block_size)
