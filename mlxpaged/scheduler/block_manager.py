"""Manages the blocks of each sequence: reuses cached ones, forks, grows, copies before a write, swaps out and in."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from mlxpaged.cache import BlockPool, BlockTable, OutOfBlocksError, TableRows, blocks_for
from mlxpaged.cache.checkpoints import Checkpoints
from mlxpaged.cache.prefix_cache import CachedBlock, PrefixCache
from mlxpaged.scheduler.batch import BlockMoves
from mlxpaged.scheduler.config import SchedulerConfig
from mlxpaged.scheduler.junctions import Junctions
from mlxpaged.scheduler.sequence import RoomLookup, Sequence

PRESSURE = 0.85
"""If used and cached blocks fill more than this share of the pool, the least recently used cached ones are evicted."""

CHECKPOINT_DISTANCE = 1024
"""Tokens between two checkpoints of a long sequence, rounded to whole blocks."""


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
        self.recurrent = config.recurrent
        self.checkpoints = Checkpoints(config.num_checkpoints if config.prefix_caching else 0)
        self.junctions: Junctions | None = None
        if self.prefix_cache is not None and self.checkpoints.capacity:
            self.prefix_cache.on_drop = self.checkpoints.forget
            self.junctions = Junctions(self.prefix_cache, config.block_size)
        self._slots_per_state = config.swap_slots_per_state
        self._states_out: list[tuple[int, list[int]]] = []
        self._states_in: list[tuple[list[int], int]] = []
        self._loaded: list[int] = []  # swap slots that the step being scheduled reads
        self._copies: list[tuple[int, int]] = []
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []

    def find(self, sequence: Sequence, fork_of: Sequence | None = None) -> Reuse:
        """Find what a sequence without blocks can reuse. Its last token is always computed, for the logits."""
        if not self.recurrent:
            return Reuse((), fork_of) if fork_of is not None else Reuse(self._match(sequence))
        hit = self._match(sequence)  # a fork too: its parent's state has passed the last token of the prompt
        if sequence.num_swapped_tokens:
            return Reuse(hit[: sequence.num_swapped_tokens // self.block_size])
        return Reuse(hit[: self.checkpoints.deepest(hit)])

    def room_for(self, sequence: Sequence, reuse: Reuse) -> int:
        """Free blocks that a waiting sequence needs for all its tokens and the first token of its answer. If it were
        admitted with less room, it could be preempted during its prefill or right after it."""
        wanted = blocks_for(min(len(sequence.token_ids) + 1, sequence.max_kv_tokens), self.block_size)
        if reuse.fork_of is not None:  # the partly full block is copied
            return wanted - (len(sequence.token_ids) - 1) // self.block_size
        in_use = sum(self.pool.ref_count(cached.block) > 0 for cached in reuse.hit)
        gains = self.pool.num_gains, self.checkpoints.num_attached
        sequence.last_lookup = RoomLookup(len(sequence.token_ids), wanted - in_use, *gains)
        return wanted - in_use

    def least_room_for(self, sequence: Sequence) -> int:
        """A lower bound of `room_for` in O(1). It saves searching the prefix cache for long prompts in every step that
        has no room for them. Each gain of the pool since the last search can have saved one block."""
        last = sequence.last_lookup
        if last is None or last.num_tokens != len(sequence.token_ids) or sequence.fork_of is not None:
            return 0
        if last.num_checkpoints != self.checkpoints.num_attached:
            return 0  # a new checkpoint can make many cached blocks usable
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
            if sequence.state_slots:
                self._states_in.append((sequence.state_slots, sequence.sequence_id))
                self._loaded += sequence.state_slots
            elif self.recurrent and reuse.hit:
                self._restore(sequence, reuse.hit[-1])
            sequence.swap_slots, sequence.state_slots, sequence.num_swapped_tokens = [], [], 0
        return computed

    def catch_up(self, sequence: Sequence) -> int:
        """Adopt blocks of the sequence's prompt that other sequences have computed since its last chunk, so that no
        block is computed twice. Returns the number of leading tokens in shared blocks, or 0 if none was adopted."""
        table = sequence.block_table
        assert table is not None
        hit = self._match(sequence, table.chain)
        if self.recurrent:
            usable = self.checkpoints.deepest([*table.chain, *hit])
            if usable * self.block_size <= sequence.num_computed_tokens:
                return 0
            hit = hit[: usable - len(table.chain)]
        if not hit:
            return 0
        table.adopt(hit)
        if self.recurrent:
            self._restore(sequence, hit[-1])
        return len(table.chain) * self.block_size

    def num_available_tokens(self, sequence: Sequence) -> int:
        """Leading tokens whose KV is in its blocks, in swap space or in the prefix cache."""
        chain = () if sequence.block_table is None else sequence.block_table.chain
        whole = [*chain, *self._match(sequence, chain)]
        shared = (self.checkpoints.deepest(whole) if self.recurrent else len(whole)) * self.block_size
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
        self._attach(sequence)

    def take_restore(self, sequence: Sequence) -> int | None:
        """The checkpoint that the row being scheduled starts from; None to go on from the sequence's own state."""
        block, sequence.restore_from = sequence.restore_from, None
        return None if block is None else self.checkpoints.unpin(block)

    def take_checkpoints(self, sequence: Sequence, start: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Reserve the checkpoints (position, id) of a row: at the last whole block of the prompt, where other prompts
        part from it, and every CHECKPOINT_DISTANCE tokens."""
        if self.junctions is None:
            return ()
        sequence.recent_checkpoints = [
            recent for recent in sequence.recent_checkpoints if recent[0] > sequence.num_committed_tokens
        ]
        table, taken = sequence.block_table, []
        assert table is not None
        size = self.block_size
        prompt_end = (sequence.num_prompt_tokens - 1) // size * size
        for position in range(start // size * size + size, start + num_tokens + 1, size):
            index = position // size - 1
            is_junction = index < len(sequence.block_keys) and sequence.block_keys[index] in self.junctions
            if not (is_junction or position == prompt_end or position % CHECKPOINT_DISTANCE == 0):
                continue
            if index < len(table.chain) and table.chain[index] in self.checkpoints:
                continue
            checkpoint = self.checkpoints.reserve()
            if checkpoint is None:
                break
            taken.append((position, checkpoint))
        sequence.reserved_checkpoints += taken
        self._attach(sequence)
        return tuple(taken)

    def _attach(self, sequence: Sequence) -> None:
        """Attach reserved checkpoints to their blocks, as far as these are published."""
        table = sequence.block_table
        assert table is not None
        published = len(table.chain) * self.block_size
        for position, checkpoint in sequence.reserved_checkpoints:
            if position <= published:
                block = table.chain[position // self.block_size - 1]
                self.checkpoints.attach(checkpoint, block)
                sequence.recent_checkpoints.append((position, block))
        sequence.reserved_checkpoints = [each for each in sequence.reserved_checkpoints if each[0] > published]

    def _restore(self, sequence: Sequence, block: CachedBlock) -> None:
        """Let the next row of a sequence start from the checkpoint of a block."""
        self._cancel_restore(sequence)
        self.checkpoints.pin(block)
        sequence.restore_from = block

    def _cancel_restore(self, sequence: Sequence) -> None:
        if sequence.restore_from is not None:
            self.checkpoints.unpin(sequence.restore_from)
            sequence.restore_from = None

    def unpublish(self, sequence: Sequence) -> set[int]:
        """Unpublish the blocks that the steps in flight write. Returns these blocks: other sequences may share them."""
        table = sequence.block_table
        if table is None:
            return set()
        invalid = set(table.unpublish(sequence.num_committed_tokens // self.block_size))
        for position, block in sequence.recent_checkpoints:
            if position > sequence.num_committed_tokens:
                self.checkpoints.forget(block)
                invalid.add(block.block)  # those that started from this checkpoint share the block
        return invalid

    def release(self, sequence: Sequence) -> None:
        """Release every block and swap slot."""
        if sequence.block_table is not None:
            sequence.block_table.release()
            sequence.block_table = None
        self._cancel_restore(sequence)
        for _, checkpoint in sequence.reserved_checkpoints:
            self.checkpoints.release(checkpoint)
        sequence.reserved_checkpoints, sequence.recent_checkpoints = [], []
        self.drop_swapped(sequence)

    def swap_out(self, sequence: Sequence) -> bool:
        """Release the blocks and keep their contents in swap slots. False, with nothing done, if too few are free, or
        if its state is still to be read from a checkpoint."""
        table, computed = sequence.block_table, sequence.num_computed_tokens
        assert table is not None
        count = blocks_for(computed, self.block_size)
        if self.swap is None or count == 0 or count + self._slots_per_state > self.swap.num_free:
            return False
        if sequence.restore_from is not None:  # it does not have the state of its last computed token yet
            return False
        slots, state_slots = self.swap.allocate(count), self.swap.allocate(self._slots_per_state)
        if state_slots:
            self._states_out.append((sequence.sequence_id, state_slots))
        self._swap_out += zip(table.block_ids, slots, strict=False)
        self.blocks_swapped_out += count
        self.release(sequence)
        sequence.swap_slots, sequence.state_slots = slots, state_slots
        sequence.num_swapped_tokens = computed
        sequence.num_swaps_out += 1
        return True

    def drop_swapped(self, sequence: Sequence) -> None:
        """Release the swap slots of a sequence that no longer needs them."""
        if self.swap is not None:
            self.swap.release([*sequence.swap_slots, *sequence.state_slots])
        sequence.swap_slots, sequence.state_slots, sequence.num_swapped_tokens = [], [], 0

    def relieve(self) -> None:
        """Evict cached blocks if the pool is filled beyond PRESSURE."""
        usage = self.pool.usage()
        excess = usage.used + usage.cached - int(PRESSURE * self.pool.num_blocks)
        if excess > 0:
            self.pool.evict(excess)

    def take_moves(self) -> BlockMoves:
        """Return the moves of the step that was scheduled since the last call."""
        states = tuple(self._states_out), tuple(self._states_in)
        moves = BlockMoves(tuple(self._swap_out), tuple(self._copies), tuple(self._swap_in), *states)
        self._swap_out, self._copies, self._swap_in = [], [], []
        self._states_out, self._states_in = [], []
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
