"""What a sequence holds in the pool, the swap space and the checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the flags import Priority, and these need numpy
    from mlxpaged.core.blocks.block_table import BlockTable
    from mlxpaged.core.blocks.prefix_cache import CachedBlock


class RoomLookup(NamedTuple):
    """The free blocks that a waiting sequence needed at its last search of the prefix cache, and its number of tokens
    and the pool's `num_gains` at that time."""

    num_tokens: int
    blocks_needed: int
    num_gains: int
    num_checkpoints: int = 0


@dataclass(eq=False)
class SequenceKV:
    """The KV and the recurrent state of a sequence. Only the block manager writes it.

    table: set while the sequence holds blocks. keys: hashes of its full blocks, for the prefix cache. swap_slots: of
    its blocks, in order, while it is swapped out; num_swapped_tokens: whose KV is in these slots. state_slots: of its
    state. restore_from: the block whose checkpoint its next row starts from. reserved_checkpoints: (position, id), of
    blocks that are not published yet. recent_checkpoints: (position, block), of steps in flight.
    """

    table: BlockTable | None = None
    keys: list[bytes] = field(default_factory=list)
    swap_slots: list[int] = field(default_factory=list)
    num_swapped_tokens: int = 0
    num_swaps_out: int = 0
    num_swaps_in: int = 0
    last_lookup: RoomLookup | None = None
    state_slots: list[int] = field(default_factory=list)
    restore_from: CachedBlock | None = None
    reserved_checkpoints: list[tuple[int, int]] = field(default_factory=list)
    recent_checkpoints: list[tuple[int, CachedBlock]] = field(default_factory=list)
