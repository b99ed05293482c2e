"""Which blocks each sequence has: found in the prefix cache, forked, grown, copied before a write, swapped out and in.

Who gets them is the scheduler's decision; what has to be moved for it, before the step runs, is collected here.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from mlxpaged.cache import (
    BlockPool,
    BlockTable,
    BlockUsage,
    OutOfBlocksError,
    PrefixCache,
    PrefixHit,
    TableRows,
    blocks_for,
)
from mlxpaged.cache.prefix_cache import CachedBlock
from mlxpaged.scheduler.batch import BlockMoves
from mlxpaged.scheduler.sequence import LastLook, Sequence

PRESSURE = 0.85
"""Share of the pool that cached blocks may fill it up to. Behind it the longest unused ones are dropped."""


@dataclass(frozen=True)
class Reuse:
    """What a waiting sequence need not compute: `hit` from the prefix cache, and what was swapped out behind it; or the
    blocks of all but its last token, which it shares with the sequence `fork_of`."""

    hit: PrefixHit
    fork_of: Sequence | None = None


class BlockManager:
    """Owns the pool, the prefix cache and the swap slots. All are integers: who runs the step moves the bytes."""

    def __init__(
        self, num_blocks: int, block_size: int, num_swap_slots: int, prefix_caching: bool, cache_seed: bytes
    ) -> None:
        self.pool: BlockPool[CachedBlock] = BlockPool(num_blocks, block_size)
        self.prefix_cache = PrefixCache(self.pool, cache_seed) if prefix_caching else None
        self.tables = TableRows()
        self.swap: BlockPool[None] | None = BlockPool(num_swap_slots, block_size) if num_swap_slots else None
        self.blocks_copied = self.blocks_swapped_out = self.blocks_swapped_in = 0
        self._loaded: list[int] = []  # swap slots that the step being made up reads
        self._copies: list[tuple[int, int]] = []
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    def swap_usage(self) -> BlockUsage:
        return BlockUsage(0, 0, 0) if self.swap is None else self.swap.usage()

    # -- starting and growing ------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, fork_of: Sequence | None = None) -> Reuse:
        """What is there of a sequence that has no blocks. At least one token is left to compute, for its logits."""
        if fork_of is not None:
            return Reuse(PrefixHit(), fork_of)
        return Reuse(self._match(sequence))

    def num_reused_tokens(self, sequence: Sequence, reuse: Reuse) -> int:
        if reuse.fork_of is not None:
            return len(sequence.token_ids) - 1
        return max(len(reuse.hit) * self.block_size, sequence.num_swapped_tokens)

    def room_for(self, sequence: Sequence, reuse: Reuse) -> int:
        """Free blocks that it takes to compute a waiting sequence to its end, and the first token of its answer.

        Admitting on the first chunk alone would let prompts preempt each other half-way; without room for the answer a
        newcomer would be the first to be preempted, right after its prefill.
        """
        wanted = blocks_for(min(len(sequence.token_ids) + 1, sequence.max_kv_tokens), self.block_size)
        if reuse.fork_of is not None:  # the partly full block is copied
            return wanted - (len(sequence.token_ids) - 1) // self.block_size
        in_use = sum(self.pool.ref_count(cached.block) > 0 for cached in reuse.hit.blocks)
        sequence.last_look = LastLook(len(sequence.token_ids), wanted - in_use, self.pool.num_gains)
        return wanted - in_use

    def least_room_for(self, sequence: Sequence) -> int:
        """A lower bound of `room_for` in O(1), so that long prompts are not matched with the cache in every step that
        has no room for them: since the last look each gain of the pool can have spared one block."""
        look = sequence.last_look
        if look is None or look.num_tokens != len(sequence.token_ids) or sequence.fork_of is not None:
            return 0
        return look.room - (self.pool.num_gains - look.num_gains)

    def start(self, sequence: Sequence, reuse: Reuse) -> None:
        """Give a sequence its table, with everything that need not be computed. There must be room for it."""
        table = BlockTable(self.pool, self.tables, self.prefix_cache)
        computed = self.num_reused_tokens(sequence, reuse)
        if reuse.fork_of is not None:
            assert reuse.fork_of.block_table is not None
            table.fork(reuse.fork_of.block_table, computed)
        else:
            table.adopt(reuse.hit)
            table.grow(computed)
            first = len(reuse.hit)
            loads = list(zip(sequence.swap_slots[first:], table.block_ids[first:], strict=False))
            self._swap_in += loads
            self.blocks_swapped_in += len(loads)
            sequence.num_swaps_in += bool(sequence.swap_slots)
            self._loaded += sequence.swap_slots
            sequence.swap_slots, sequence.num_swapped_tokens = [], 0
        sequence.block_table = table
        sequence.num_computed_tokens = sequence.num_committed_tokens = computed

    def catch_up(self, sequence: Sequence) -> bool:
        """Take over what others have computed of a prompt since its last chunk, so that nothing is computed twice."""
        table = sequence.block_table
        assert table is not None
        hit = self._match(sequence, table.chain)
        if hit:
            table.adopt(hit)
            sequence.num_computed_tokens = len(table.chain) * self.block_size
        return bool(hit)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks for the next `num_tokens` tokens, a private copy of the block that they begin in where it is shared.

        Raises OutOfBlocksError and changes nothing where blocks run out.
        """
        table = sequence.block_table
        assert table is not None
        start = sequence.num_computed_tokens
        shared = table.is_shared(start)
        missing = table.blocks_missing(start + num_tokens) + shared
        if not missing:
            return
        if missing > self.pool.num_free:
            raise OutOfBlocksError(f"{missing} blocks wanted, {self.pool.num_free} free")
        if shared:
            self._copies.append(table.make_private(start))
            self.blocks_copied += 1
        table.grow(start + num_tokens)

    def publish(self, sequence: Sequence) -> None:
        """Offer the full blocks whose tokens are known. Every layer writes before it attends, so even a sequence of the
        same step may use them."""
        if self.prefix_cache is None:
            return
        table = sequence.block_table
        assert table is not None
        if sequence.num_computed_tokens // self.pool.block_size <= len(table.chain):
            return  # as it is for all but one of a block's tokens
        num_tokens = min(sequence.num_computed_tokens, sequence.num_known_tokens)
        self.prefix_cache.extend_keys(sequence.block_keys, sequence.token_ids, num_tokens)
        table.publish(sequence.token_ids, num_tokens, sequence.block_keys)

    def retract(self, sequence: Sequence) -> set[int]:
        """Unpublish what the steps under way should have written. Returns these blocks: others may have taken them."""
        if sequence.block_table is None:
            return set()
        return set(sequence.block_table.retract(sequence.num_committed_tokens // self.block_size))

    # -- giving back ---------------------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Give back every block and swap slot."""
        if sequence.block_table is not None:
            sequence.block_table.release()
            sequence.block_table = None
        sequence.num_computed_tokens = sequence.num_committed_tokens = 0
        self.drop_swapped(sequence)

    def swap_out(self, sequence: Sequence) -> bool:
        """Give the blocks back and keep their contents in swap slots. False, with nothing done, if too few are free."""
        table, computed = sequence.block_table, sequence.num_computed_tokens
        assert table is not None
        count = blocks_for(computed, self.block_size)
        if self.swap is None or count == 0 or count > self.swap.num_free:
            return False
        slots = self.swap.allocate(count)
        self._swap_out += zip(table.block_ids, slots, strict=False)
        self.blocks_swapped_out += count
        self.release(sequence)
        sequence.swap_slots = slots
        sequence.num_swapped_tokens = computed
        sequence.num_swaps_out += 1
        return True

    def drop_swapped(self, sequence: Sequence) -> None:
        """Return the swap slots of a sequence that will not come back for them."""
        if self.swap is not None:
            self.swap.release(sequence.swap_slots)
        sequence.swap_slots, sequence.num_swapped_tokens = [], 0

    def relieve(self) -> None:
        """Drop cached blocks where they fill the pool beyond PRESSURE."""
        usage = self.pool.usage()
        excess = usage.used + usage.cached - int(PRESSURE * self.pool.num_blocks)
        if excess > 0:
            self.pool.evict(excess)

    def take_moves(self) -> BlockMoves:
        """What has to be moved before the step that was made up since the last call."""
        moves = BlockMoves(tuple(self._swap_out), tuple(self._copies), tuple(self._swap_in))
        self._swap_out, self._copies, self._swap_in = [], [], []
        if self.swap is not None:  # only now: a slot that is read must not be written by the same moves
            self.swap.release(self._loaded)
        self._loaded = []
        return moves

    def _match(self, sequence: Sequence, behind: ListOf[CachedBlock] = ()) -> PrefixHit:
        if self.prefix_cache is None:
            return PrefixHit()
        tokens = sequence.token_ids
        self.prefix_cache.extend_keys(sequence.block_keys, tokens, sequence.num_known_tokens)
        usable = sequence.block_keys[: (len(tokens) - 1) // self.block_size]
        return self.prefix_cache.match(usable, tokens, behind)
