"""Manages the blocks of each sequence: reuses cached ones, forks, grows, copies before a write, swaps out and in."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from mlxpaged.cache import BlockPool, BlockTable, OutOfBlocksError, TableRows, blocks_for
from mlxpaged.cache.prefix_cache import CachedBlock, PrefixCache
from mlxpaged.scheduler.batch import BlockMoves
from mlxpaged.scheduler.config import SchedulerConfig
from mlxpaged.scheduler.sequence import RoomLookup, Sequence

PRESSURE = 0.85
"""If used and cached blocks fill more than this share of the pool, the least recently used cached ones are evicted."""


@dataclass(frozen=True)
class Reuse:
    """What a waiting sequence need not compute. Either `hit`, found in the prefix cache, and the swapped-out blocks
    that follow it; or all tokens except the last, in blocks that it shares with the sequence `fork_of`."""

    hit: ListOf[CachedBlock]
    fork_of: Sequence | None = None


class BlockManager:
    """Owns the pool, the prefix cache and the swap slots, all as integers, and collects the moves of each step. The
    scheduler decides which sequence gets blocks; the model runner moves the bytes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.pool: BlockPool[CachedBlock] = BlockPool(config.num_blocks, config.block_size)
        self.prefix_cache = PrefixCache(self.pool, config.cache_seed) if config.prefix_caching else None
        self.tables = TableRows()
        self.swap: BlockPool[None] | None = None
        if config.num_swap_slots:
            self.swap = BlockPool(config.num_swap_slots, config.block_size)
        self.blocks_copied = self.blocks_swapped_out = self.blocks_swapped_in = 0
        self._loaded: list[int] = []  # swap slots that the step being scheduled reads
        self._copies: list[tuple[int, int]] = []
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []

    def find(self, sequence: Sequence, fork_of: Sequence | None = None) -> Reuse:
        """Find what a sequence without blocks can reuse. Its last token is always computed, for the logits."""
        if fork_of is not None:
            return Reuse((), fork_of)
        return Reuse(self._match(sequence))

    def room_for(self, sequence: Sequence, reuse: Reuse) -> int:
        """Free blocks that a waiting sequence needs for all its tokens and the first token of its answer. If it were
        admitted with less room, it could be preempted during its prefill or right after it."""
        wanted = blocks_for(min(len(sequence.token_ids) + 1, sequence.max_kv_tokens), self.block_size)
        if reuse.fork_of is not None:  # the partly full block is copied
            return wanted - (len(sequence.token_ids) - 1) // self.block_size
        in_use = sum(self.pool.ref_count(cached.block) > 0 for cached in reuse.hit)
        sequence.last_lookup = RoomLookup(len(sequence.token_ids), wanted - in_use, self.pool.num_gains)
        return wanted - in_use

    def least_room_for(self, sequence: Sequence) -> int:
        """A lower bound of `room_for` in O(1). It saves searching the prefix cache for long prompts in every step that
        has no room for them. Each gain of the pool since the last search can have saved one block."""
        last = sequence.last_lookup
        if last is None or last.num_tokens != len(sequence.token_ids) or sequence.fork_of is not None:
            return 0
        return last.blocks_needed - (self.pool.num_gains - last.num_gains)

    def start(self, sequence: Sequence, reuse: Reuse) -> int:
        """Give a sequence its block table, filled with what it reuses. There must be room for it. Returns the number of
        leading tokens that need not be computed."""
        sequence.block_table = table = BlockTable(self.pool, self.tables, self.prefix_cache)
        if reuse.fork_of is not None:
            assert reuse.fork_of.block_table is not None
            computed = len(sequence.token_ids) - 1
            table.fork(reuse.fork_of.block_table, computed)
        else:
            computed = max(len(reuse.hit) * self.block_size, sequence.num_swapped_tokens)
            table.adopt(reuse.hit)
            table.grow(computed)
            first = len(reuse.hit)
            loads = list(zip(sequence.swap_slots[first:], table.block_ids[first:], strict=False))
            self._swap_in += loads
            self.blocks_swapped_in += len(loads)
            sequence.num_swaps_in += bool(sequence.swap_slots)
            self._loaded += sequence.swap_slots
            sequence.swap_slots, sequence.num_swapped_tokens = [], 0
        return computed

    def catch_up(self, sequence: Sequence) -> int:
        """Adopt blocks of the sequence's prompt that other sequences have computed since its last chunk, so that no
        block is computed twice. Returns the number of leading tokens in shared blocks, or 0 if none was adopted."""
        table = sequence.block_table
        assert table is not None
        hit = self._match(sequence, table.chain)
        if not hit:
            return 0
        table.adopt(hit)
        return len(table.chain) * self.block_size

    def num_available_tokens(self, sequence: Sequence) -> int:
        """Leading tokens whose KV is in its blocks, in swap space or in the prefix cache."""
        chain = () if sequence.block_table is None else sequence.block_table.chain
        shared = (len(chain) + len(self._match(sequence, chain))) * self.block_size
        return max(sequence.num_computed_tokens, sequence.num_swapped_tokens, shared)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Take blocks for the next `num_tokens` tokens, and copy the block that they begin in if it is shared. Raises
        OutOfBlocksError, with nothing changed, if too few are free."""
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
        """Publish the full blocks whose tokens are known. Every layer writes before it attends, so a sequence in the
        same step may use them."""
        if self.prefix_cache is None:
            return
        table = sequence.block_table
        assert table is not None
        if sequence.num_computed_tokens // self.block_size <= len(table.chain):
            return  # no block became full, as in most steps
        num_tokens = min(sequence.num_computed_tokens, sequence.num_known_tokens)
        self.prefix_cache.extend_keys(sequence.block_keys, sequence.token_ids, num_tokens)
        table.publish(sequence.token_ids, num_tokens, sequence.block_keys)

    def unpublish(self, sequence: Sequence) -> set[int]:
        """Unpublish the blocks that the steps in flight write. Returns these blocks: other sequences may share them."""
        table = sequence.block_table
        return set() if table is None else set(table.unpublish(sequence.num_committed_tokens // self.block_size))

    def release(self, sequence: Sequence) -> None:
        """Release every block and swap slot."""
        if sequence.block_table is not None:
            sequence.block_table.release()
            sequence.block_table = None
        self.drop_swapped(sequence)

    def swap_out(self, sequence: Sequence) -> bool:
        """Release the blocks and keep their contents in swap slots. False, with nothing done, if too few are free."""
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
        """Release the swap slots of a sequence that no longer needs them."""
        if self.swap is not None:
            self.swap.release(sequence.swap_slots)
        sequence.swap_slots, sequence.num_swapped_tokens = [], 0

    def relieve(self) -> None:
        """Evict cached blocks if the pool is filled beyond PRESSURE."""
        usage = self.pool.usage()
        excess = usage.used + usage.cached - int(PRESSURE * self.pool.num_blocks)
        if excess > 0:
            self.pool.evict(excess)

    def take_moves(self) -> BlockMoves:
        """Return the moves of the step that was scheduled since the last call."""
        moves = BlockMoves(tuple(self._swap_out), tuple(self._copies), tuple(self._swap_in))
        self._swap_out, self._copies, self._swap_in = [], [], []
        if self.swap is not None:  # only now: the same moves must not write a slot that they read
            self.swap.release(self._loaded)
        self._loaded = []
        return moves

    def _match(self, sequence: Sequence, chain: ListOf[CachedBlock] = ()) -> list[CachedBlock]:
        """The cached blocks of the sequence that follow `chain`."""
        if self.prefix_cache is None:
            return []
        tokens = sequence.token_ids
        self.prefix_cache.extend_keys(sequence.block_keys, tokens, sequence.num_known_tokens)
        usable = sequence.block_keys[: (len(tokens) - 1) // self.block_size]
        return self.prefix_cache.match(usable, tokens, chain)
