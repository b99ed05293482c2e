"""Manages the blocks of each sequence: reuses cached ones, forks, grows, copies before a write, swaps out and in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace

from mlxpaged.core.blocks.block_pool import BlockPool, OutOfBlocksError
from mlxpaged.core.blocks.block_table import BlockTable
from mlxpaged.core.blocks.groups import blocks_for
from mlxpaged.core.blocks.pool_size import PoolSize
from mlxpaged.core.blocks.prefix_cache import CachedBlock, Content, Origin, PrefixCache, value
from mlxpaged.core.blocks.table_rows import TableRows
from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.core.scheduling.recurrent import Recurrent, Stateless
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.scheduling.sequence_kv import RoomLookup
from mlxpaged.core.step import BlockMoves

WORTH_A_COPY = 8
"""One in so many tokens of a block. A copy is two dispatches for each layer, 0.2 ms of a Mac's GPU, and computing three
tokens more can take less."""


@dataclass(frozen=True)
class PartialBlock:
    """A cached block of which a sequence has the first tokens, after a hit. num_tokens: that the sequence need not
    compute, those of the hit included."""

    record: CachedBlock
    num_tokens: int


@dataclass(frozen=True)
class Reuse:
    """What a waiting sequence need not compute. Either `hit`, found in the prefix cache, and the swapped-out blocks
    or the partial block that follow it; or all tokens except the last, in blocks that it shares with the sequence
    `fork_of`."""

    hit: ListOf[CachedBlock]
    fork_of: Sequence | None = None
    partial: PartialBlock | None = None

    @property
    def without_copy(self) -> Reuse:
        """What takes the least room."""
        return replace(self, partial=None)


class BlockManager:
    """Owns the pool, the prefix cache and the swap slots, all as integers, and collects the moves of each step. The
    scheduler decides which sequence gets blocks; the model runner moves the bytes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.groups, self._longest_chunk = config.groups, config.max_num_batched_tokens
        self.pool: BlockPool[Content] = BlockPool(config.start_blocks or config.num_blocks, config.block_size)
        self.size = PoolSize(self.pool, config.num_blocks, config.cached_blocks)
        self.prefix_cache = PrefixCache(self.pool, config.cache_seed, self.groups) if config.prefix_caching else None
        self.tables = TableRows()
        self.swap: BlockPool[None] = BlockPool(config.num_swap_slots, config.block_size)
        self.blocks_copied = self.blocks_swapped_out = self.blocks_swapped_in = 0
        self.states = Stateless()
        if config.recurrent:
            recurrent = config.num_checkpoints, config.swap_slots_per_state, config.block_size, self.prefix_cache
            self.states = Recurrent(*recurrent)
        self._states_out: list[tuple[int, int, list[int]]] = []
        self._states_in: list[tuple[list[int], int]] = []
        self._loaded: list[int] = []  # swap slots that the step being scheduled reads
        self._copies: dict[int, int] = {}  # by target: one that is released and taken again gets the last one
        self._copied: list[int] = []  # cached blocks that the step being scheduled copies
        # That it writes, or a step in flight: blocks are copied before a step, and only if their own has succeeded.
        self._written: set[CachedBlock] = set()
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []

    def find(self, sequence: Sequence, fork_of: Sequence | None = None) -> Reuse:
        """Find what a sequence without blocks can reuse. Its last token is always computed, for the logits."""
        if fork_of is not None and self.states.can_fork:
            parent = fork_of.kv.table
            if parent is not None and parent.can_fork(len(sequence.token_ids) - 1):
                return Reuse((), fork_of)
        hit = self._match(sequence)
        if sequence.kv.state_slots:  # it goes on from its own state
            hit = hit[: sequence.kv.num_swapped_tokens // self.block_size]
            return Reuse(hit[: self._last_whole_window(hit)])
        hit = hit[: self.usable(hit)]
        return Reuse(hit, partial=self._match_partial(sequence, hit))

    def room_for(self, sequence: Sequence, reuse: Reuse) -> int:
        """Free blocks that a waiting sequence needs for all its tokens and the first token of its answer. If it were
        admitted with less room, it could be preempted during its prefill or right after it."""
        filled = blocks_for(tokens_at_first(sequence), self.block_size)
        if reuse.fork_of is not None:  # the partly full block is copied
            filled -= (len(sequence.token_ids) - 1) // self.block_size
            return self._most_blocks([filled] * len(self.groups))
        cached = [0] * len(self.groups)  # found blocks that are not in use: they take a free block too
        for group, block in self.found_blocks(reuse):
            cached[group] += self.pool.ref_count(block) == 0
        needed = self._most_blocks([filled - len(reuse.hit) + count for count in cached])
        gains = self.pool.num_gains, self.states.checkpoints.num_attached
        sequence.kv.last_lookup = RoomLookup(len(sequence.token_ids), needed, *gains)
        sources = () if reuse.partial is None else reuse.partial.record.blocks  # they stay until they are copied
        return needed + sum(self.pool.ref_count(block) == 0 for block in sources)

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the pool is large enough for a waiting sequence alone. What is cached of it saves blocks of windows,
        and is searched only if that can be enough."""
        filled = blocks_for(tokens_at_first(sequence), self.block_size)

        def holds_from(position: int) -> bool:
            firsts = (self.groups.first_block(group, position) for group in range(len(self.groups)))
            return self._most_blocks([filled - first for first in firsts]) <= self.size.num_blocks

        if holds_from(0):
            return True
        return holds_from(len(sequence.token_ids) - 1) and holds_from(len(self.find(sequence).hit) * self.block_size)

    def outgrows_pool(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the whole pool is too small for a running sequence with its next `num_tokens` tokens."""
        table, start = sequence.kv.table, sequence.num_computed_tokens
        assert table is not None
        return len(table) + table.blocks_missing(start + num_tokens, max(0, start - 1)) > self.size.num_blocks

    def room_left_for(self, sequence: Sequence) -> int:
        """Free blocks that a running sequence still needs for the rest of its prompt or its next token."""
        table = sequence.kv.table
        assert table is not None
        held, end = len(table.ids[0]), blocks_for(len(sequence.token_ids), self.block_size)
        if end <= held:
            return 0
        most = (self.groups.most_blocks(group, end, self._longest_chunk) for group in range(len(self.groups)))
        return sum(min(end - held, count - held + first) for count, first in zip(most, table.firsts, strict=True))

    def _most_blocks(self, num_blocks: ListOf[int]) -> int:
        """The most blocks that a sequence holds at once, if it takes so many in each group, one after the other."""
        return sum(self.groups.most_blocks(group, count, self._longest_chunk) for group, count in enumerate(num_blocks))

    def found_blocks(self, reuse: Reuse) -> Iterator[tuple[int, int]]:
        """(group, block) of the blocks of a hit that its sequence will hold."""
        for group in range(len(self.groups)):
            first = self.groups.first_block(group, len(reuse.hit) * self.block_size)
            for cached in reuse.hit[first:]:
                yield group, cached.blocks[group]

    def least_room_for(self, sequence: Sequence) -> int:
        """A lower bound of `room_for` in O(1). It saves searching the prefix cache for long prompts in every step that
        has no room for them. Each gain of the pool since the last search can have saved one block."""
        last = sequence.kv.last_lookup
        if last is None or last.num_tokens != len(sequence.token_ids) or sequence.fork_of is not None:
            return 0
        if sequence.logits_from is not None:
            return 0  # more of the prompt may be found once its log-probabilities are known
        gains = self.pool.num_gains - last.num_gains
        if last.num_checkpoints != self.states.checkpoints.num_attached or (gains and not self.groups.keeps_all):
            return 0  # a new checkpoint, or the last block of a window, can make many cached blocks usable
        return last.blocks_needed - gains

    def start(self, sequence: Sequence, reuse: Reuse) -> int:
        """Give a sequence its block table, filled with what it reuses. There must be room for it. Returns the number of
        leading tokens that need not be computed."""
        kv, prompt_end = sequence.kv, sequence.prompt_end(self.block_size)
        kv.table = table = BlockTable(self.pool, self.tables, self.prefix_cache, self.groups, prompt_end)
        if reuse.fork_of is not None:
            assert reuse.fork_of.kv.table is not None
            computed = len(sequence.token_ids) - 1
            table.fork(reuse.fork_of.kv.table, computed)
        else:
            first = len(reuse.hit)
            computed = max(first * self.block_size, kv.num_swapped_tokens)
            table.adopt(reuse.hit)
            value(reuse.hit)
            if reuse.partial is not None:
                computed, sources = reuse.partial.num_tokens, list(reuse.partial.record.blocks)
                for block in sources:
                    self.pool.share(block)
                self._copied += sources
                self._copy(table.copy_in(sources))
            table.grow(computed, computed)
            loads = [
                (slot, table.ids[group][index])
                for slot, (group, index) in zip(kv.swap_slots, self._kept(kv.num_swapped_tokens), strict=True)
                if index >= first
            ]
            self._swap_in += loads
            self.blocks_swapped_in += len(loads)
            kv.num_swaps_in += bool(kv.swap_slots)
            self._loaded += kv.swap_slots
            if kv.state_slots:
                self._states_in.append((kv.state_slots, sequence.sequence_id))
                self._loaded += kv.state_slots
            elif reuse.hit:
                self.states.restore(sequence, reuse.hit[-1])
            kv.swap_slots, kv.state_slots, kv.num_swapped_tokens = [], [], 0
        return computed

    def _kept(self, num_tokens: int) -> list[tuple[int, int]]:
        """(group, index) of the blocks that a sequence needs to go on after `num_tokens` tokens, in order."""
        end = blocks_for(num_tokens, self.block_size)
        return [
            (group, index)
            for group in range(len(self.groups))
            for index in range(self.groups.first_block(group, num_tokens), end)
        ]

    def catch_up(self, sequence: Sequence) -> int:
        """Adopt blocks of the sequence's prompt that other sequences have computed since its last chunk, so that no
        block is computed twice. Returns the number of leading tokens in shared blocks, or 0 if none was adopted."""
        table = sequence.kv.table
        assert table is not None
        known = len(table.chain)
        hit = self._match(sequence, table.chain)
        if not hit:
            return 0
        usable = self.usable([*table.chain, *hit], table)
        if usable <= known or usable * self.block_size <= sequence.num_computed_tokens:
            return 0
        hit = hit[: usable - known]
        table.adopt(hit)
        value(table.chain)
        self.states.restore(sequence, hit[-1])
        return usable * self.block_size

    def num_available_tokens(self, sequence: Sequence) -> int:
        """Leading tokens whose KV is in its blocks, in swap space or in the prefix cache."""
        table = sequence.kv.table
        chain = () if table is None else table.chain
        shared = self.usable([*chain, *self._match(sequence, chain)], table) * self.block_size
        return max(sequence.num_computed_tokens, sequence.kv.num_swapped_tokens, shared)

    def usable(self, chain: ListOf[CachedBlock], table: BlockTable | None = None) -> int:
        """The most leading blocks of a chain from which a sequence with this table can go on."""
        length = self._last_whole_window(chain, table)
        while (usable := self.states.usable(chain[:length])) < length:
            length = self._last_whole_window(chain[:usable], table)
        return length

    def _last_whole_window(self, chain: ListOf[CachedBlock], table: BlockTable | None = None) -> int:
        if self.prefix_cache is None or self.groups.keeps_all:
            return len(chain)
        own = () if table is None else (table.firsts, len(table.chain))
        return self.prefix_cache.usable(chain, *own)

    def give_back(self, sequences: Iterable[Sequence]) -> None:
        """Release the blocks that left the windows of running sequences. A step in flight may still read them: the next
        step writes them after it. One more token is kept than the next step sees, because a fork computes the last
        token of the prompt again."""
        for sequence in () if self.groups.keeps_all else sequences:
            assert sequence.kv.table is not None
            sequence.kv.table.give_back(sequence.num_computed_tokens - 1)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Take blocks for the next `num_tokens` tokens, and copy the block that they begin in if it is shared. If too
        few are free, asks for a larger pool and raises OutOfBlocksError, with nothing taken."""
        table = sequence.kv.table
        assert table is not None
        start = sequence.num_computed_tokens
        kept = max(0, start - 1)
        shared = table.is_shared(start)
        missing = table.blocks_missing(start + num_tokens, kept) + shared * len(self.groups)
        if not missing:
            return
        if missing > self.pool.num_free:
            self.size.ask(missing - self.pool.num_free)
            raise OutOfBlocksError(f"{missing} blocks wanted, {self.pool.num_free} free")
        if shared:
            self._copy(table.make_private(start))
        table.grow(start + num_tokens, kept)

    def _copy(self, copies: ListOf[tuple[int, int]]) -> None:
        self._copies.update((target, source) for source, target in copies)
        self.blocks_copied += len(copies)

    def grow_for_drafts(self, sequence: Sequence, most: int, reserved: int) -> int:
        """Take blocks for `most` drafts after the next token, which has room already. Returns for how many there is
        room if so many free blocks are reserved: a larger pool is not asked for."""
        table = sequence.kv.table
        assert table is not None
        start = sequence.num_computed_tokens
        kept, end = max(0, start - 1), start + 1
        if table.blocks_missing(end + most, kept) > max(0, self.pool.num_free - reserved):
            most = min(most, -end % self.block_size)
        if most:
            table.grow(end + most, kept)
        return most

    def publish(self, sequence: Sequence) -> None:
        """Publish the full blocks whose tokens are known. Every layer writes before it attends, so a sequence in the
        same step may use them."""
        if self.prefix_cache is None:
            return
        table = sequence.kv.table
        assert table is not None
        if sequence.num_computed_tokens // self.block_size <= len(table.chain):
            return  # no block became full, as in most steps
        num_tokens = min(sequence.num_computed_tokens, sequence.num_known_tokens)
        self.prefix_cache.extend_keys(sequence.kv.keys, sequence.token_ids, num_tokens, sequence.cache_seed)
        known = len(table.chain)
        table.publish(sequence.token_ids, num_tokens, sequence.kv.keys, origin_of(sequence))
        self._written.update(table.chain[known:])
        self.states.attach(sequence)

    def commit(self, sequence: Sequence, start: int, end: int) -> None:
        """The step that computed these tokens has succeeded. Their full blocks may be copied."""
        table = sequence.kv.table
        if table is not None and self._written:
            self._written.difference_update(table.chain[start // self.block_size : end // self.block_size])

    def publish_partial(self, sequence: Sequence) -> None:
        """Publish the block in which the computed tokens of a sequence end. The sequence writes no more of them."""
        table, end, seed = sequence.kv.table, sequence.num_committed_tokens, sequence.cache_seed
        index, count = divmod(end, self.block_size)
        if self.prefix_cache is None or table is None or not count or not self._is_worth_a_copy(count):
            return
        if not self.states.can_fork or len(table.chain) != index:
            return
        tokens = sequence.token_ids[end - count : end]
        self.prefix_cache.extend_keys(sequence.kv.keys, sequence.token_ids, end, seed)
        key = self.prefix_cache.key_of(sequence.kv.keys, index, tokens, seed)
        parent = table.chain[-1] if table.chain else None
        self.prefix_cache.insert(key, parent, tuple(tokens), [ids[index] for ids in table.ids], origin_of(sequence))

    def unpublish(self, sequence: Sequence) -> set[int]:
        """Unpublish the blocks that the steps in flight write. Returns these blocks: other sequences may share them."""
        table = sequence.kv.table
        if table is None:
            return set()
        invalid = set(table.unpublish(sequence.num_committed_tokens // self.block_size))
        return invalid | self.states.forget_uncommitted(sequence)

    def release(self, sequence: Sequence) -> None:
        """Release every block and swap slot."""
        if sequence.kv.table is not None:
            sequence.kv.table.release()
            sequence.kv.table = None
        self.states.release(sequence)
        self.drop_swapped(sequence)

    def swap_out(self, sequence: Sequence) -> bool:
        """Release the blocks and keep their contents in swap slots. False, with nothing done, if too few are free, or
        if its state is still to be read from a checkpoint."""
        kv, table, computed = sequence.kv, sequence.kv.table, sequence.num_computed_tokens
        assert table is not None
        blocks = [table.ids[group][index] for group, index in self._kept(computed)]
        count = len(blocks)
        if count == 0 or count + self.states.slots_per_state > self.swap.num_free:
            return False
        if kv.restore_from is not None:  # it does not have the state of its last computed token yet
            return False
        slots, state_slots = self.swap.allocate(count), self.swap.allocate(self.states.slots_per_state)
        if state_slots:
            self._states_out.append((sequence.sequence_id, computed, state_slots))
        self._swap_out += zip(blocks, slots, strict=True)
        self.blocks_swapped_out += count
        self.release(sequence)
        kv.swap_slots, kv.state_slots = slots, state_slots
        kv.num_swapped_tokens = computed
        kv.num_swaps_out += 1
        return True

    def drop_swapped(self, sequence: Sequence) -> None:
        """Release the swap slots of a sequence that no longer needs them."""
        kv = sequence.kv
        self.swap.release([*kv.swap_slots, *kv.state_slots])
        kv.swap_slots, kv.state_slots, kv.num_swapped_tokens = [], [], 0

    def take_moves(self) -> BlockMoves:
        """Return the moves of the step that was scheduled since the last call."""
        states = tuple(self._states_out), tuple(self._states_in)
        copies = tuple((source, target) for target, source in self._copies.items())
        moves = BlockMoves(tuple(self._swap_out), copies, tuple(self._swap_in), *states)
        self._swap_out, self._copies, self._swap_in = [], {}, []
        self._states_out, self._states_in = [], []
        self.swap.release(self._loaded)  # only now: the same moves must not write a slot or a block that they read
        self.pool.release(self._copied)
        self._loaded, self._copied = [], []
        if self.prefix_cache is not None:
            self._written = {record for record in self._written if record in self.prefix_cache}
        return moves

    def _match(self, sequence: Sequence, chain: ListOf[CachedBlock] = ()) -> list[CachedBlock]:
        """The cached blocks of the sequence that follow `chain`, up to the first token that must be computed."""
        if self.prefix_cache is None:
            return []
        tokens = sequence.token_ids
        self.prefix_cache.extend_keys(sequence.kv.keys, tokens, sequence.num_known_tokens, sequence.cache_seed)
        usable = sequence.kv.keys[: most_reused(sequence) // self.block_size]
        return self.prefix_cache.match(usable, tokens, chain)

    def _match_partial(self, sequence: Sequence, hit: ListOf[CachedBlock]) -> PartialBlock | None:
        """The cached block after a hit with most of a sequence's next tokens, if these are worth a copy of it. None for
        a model with recurrent states, which go on from checkpoints after whole blocks only."""
        if self.prefix_cache is None or not self.states.can_fork:
            return None
        filled, groups = blocks_for(tokens_at_first(sequence), self.block_size), len(self.groups)
        if sequence.kv.num_swapped_tokens or self._most_blocks([filled] * groups) + groups > self.size.num_blocks:
            return None  # it goes on from there; or there is no room for the cached block beside its copy
        first = len(hit) * self.block_size
        tokens = sequence.token_ids[first : min(first + self.block_size, most_reused(sequence))]
        found = self.prefix_cache.match_within(sequence.kv.keys, tokens, hit, self._written, origin_of(sequence))
        if found is None or not self._is_worth_a_copy(found[1]):
            return None
        return PartialBlock(found[0], first + found[1])

    def _is_worth_a_copy(self, num_tokens: int) -> bool:
        return num_tokens * WORTH_A_COPY >= self.block_size


def origin_of(sequence: Sequence) -> Origin:
    return Origin(sequence.cache_seed, sequence.client)


def most_reused(sequence: Sequence) -> int:
    """The most leading tokens that need not be computed: the logits of the others are wanted."""
    return len(sequence.token_ids) - 1 if sequence.logits_from is None else sequence.logits_from


def tokens_at_first(sequence: Sequence) -> int:
    """The tokens for which a waiting sequence needs room: all that it has, and the first one of its answer."""
    return min(len(sequence.token_ids) + 1, sequence.max_kv_tokens)
