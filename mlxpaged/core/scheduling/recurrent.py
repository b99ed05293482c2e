"""What each kind of model adds to the blocks of its sequences: nothing, or a recurrent state.

A layer with a recurrent state cannot start in the middle of a prompt from KV blocks alone. So a sequence starts from a
checkpoint of the state, and its rows make new ones. Here they are integers: the model runner keeps the states.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf

from mlxpaged.core.blocks.checkpoints import Checkpoints
from mlxpaged.core.blocks.prefix_cache import CachedBlock, PrefixCache
from mlxpaged.core.scheduling.junctions import Junctions
from mlxpaged.core.scheduling.sequence import Sequence

CHECKPOINT_DISTANCE = 1024
"""Tokens between two checkpoints of a long sequence, rounded to whole blocks."""


class Stateless:
    """A model whose layers keep keys and values only: its sequences go on from any block. slots_per_state: swap slots
    that the state of a sequence takes. num_attached: checkpoints since the start, each of which can extend a hit."""

    can_fork = True
    slots_per_state = 0

    def __init__(self) -> None:
        self.checkpoints = Checkpoints(0)

    def add(self, sequence: Sequence) -> None:
        """A sequence was queued."""

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended."""

    def usable(self, chain: ListOf[CachedBlock]) -> int:
        """The most leading blocks of a chain from which a sequence can go on."""
        return len(chain)

    def restore(self, sequence: Sequence, block: CachedBlock) -> None:
        """Let the next row of a sequence start from the state after a block."""

    def take_restore(self, sequence: Sequence) -> int | None:
        """The checkpoint that the row being scheduled starts from; None to go on from the sequence's own state."""
        return None

    def take_checkpoints(self, sequence: Sequence, start: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Reserve the checkpoints (position, id) of a row."""
        return ()

    def most_drafts(self, sequence: Sequence, most: int) -> int:
        """How many of `most` drafts the next row of a decoding sequence may have."""
        return most

    def attach(self, sequence: Sequence) -> None:
        """Blocks of a sequence were published."""

    def forget_uncommitted(self, sequence: Sequence) -> set[int]:
        """Drop the checkpoints that the steps in flight write. Returns the blocks of all that started from them."""
        return set()

    def release(self, sequence: Sequence) -> None:
        """Release the checkpoints that a sequence was to start from or to make."""


class Recurrent(Stateless):
    """A model with recurrent states. A fork would need the state at the end of the prompt, which its parent has passed.
    capacity: checkpoints that there may be."""

    can_fork = False

    def __init__(self, capacity: int, slots_per_state: int, block_size: int, prefix_cache: PrefixCache | None) -> None:
        self.slots_per_state = slots_per_state
        self._block_size = block_size
        self._prefix_cache = prefix_cache
        self.checkpoints = Checkpoints(capacity if prefix_cache is not None else 0)
        self._junctions: Junctions | None = None
        if prefix_cache is not None and capacity:
            prefix_cache.on_drop = self.checkpoints.forget
            self._junctions = Junctions(prefix_cache, block_size)

    def add(self, sequence: Sequence) -> None:
        if self._junctions is not None:
            self._junctions.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        if self._junctions is not None:
            self._junctions.remove(sequence)

    def usable(self, chain: ListOf[CachedBlock]) -> int:
        return self.checkpoints.deepest(chain)

    def restore(self, sequence: Sequence, block: CachedBlock) -> None:
        self._cancel_restore(sequence)
        self.checkpoints.pin(block)
        sequence.kv.restore_from = block

    def take_restore(self, sequence: Sequence) -> int | None:
        block, sequence.kv.restore_from = sequence.kv.restore_from, None
        return None if block is None else self.checkpoints.unpin(block)

    def take_checkpoints(self, sequence: Sequence, start: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """They are at the last whole block of the prompt, where other prompts part from it, and every
        CHECKPOINT_DISTANCE tokens."""
        if self._junctions is None:
            return ()
        kv, taken = sequence.kv, []
        assert kv.table is not None
        kv.recent_checkpoints = [each for each in kv.recent_checkpoints if each[0] > sequence.num_committed_tokens]
        size = self._block_size
        prompt_end = sequence.prompt_end(size)
        for position in range(start // size * size + size, start + num_tokens + 1, size):
            index = position // size - 1
            if not (
                self._is_junction(sequence, index) or position == prompt_end or position % CHECKPOINT_DISTANCE == 0
            ):
                continue
            if index < len(kv.table.chain) and kv.table.chain[index] in self.checkpoints:
                continue
            checkpoint = self.checkpoints.reserve()
            if checkpoint is None:
                break
            taken.append((position, checkpoint))
        kv.reserved_checkpoints += taken
        self.attach(sequence)
        return tuple(taken)

    def most_drafts(self, sequence: Sequence, most: int) -> int:
        """None if the row takes a checkpoint or starts from one. Else the row ends before the next position that a
        checkpoint may be taken at, so that a later row takes it after a token that is certain."""
        if sequence.kv.restore_from is not None:
            return 0
        if self._junctions is None or self._prefix_cache is None:
            return most
        tokens, known = sequence.token_ids, sequence.num_known_tokens
        self._prefix_cache.extend_keys(sequence.kv.keys, tokens, known, sequence.cache_seed)
        size, end = self._block_size, sequence.num_computed_tokens + 1
        for position in range(-(-end // size) * size, end + most + 1, size):
            if position % CHECKPOINT_DISTANCE == 0 or self._is_junction(sequence, position // size - 1):
                return max(0, position - 1 - end)
        return most

    def _is_junction(self, sequence: Sequence, index: int) -> bool:
        """Whether other prompts part from a sequence after its block of this index, as far as its tokens are known."""
        keys = sequence.kv.keys
        return self._junctions is not None and index < len(keys) and keys[index] in self._junctions

    def attach(self, sequence: Sequence) -> None:
        """Attach reserved checkpoints to their blocks, as far as these are published. A block that the prefix cache has
        dropped since then gets none: no prompt could find it."""
        kv = sequence.kv
        assert kv.table is not None
        published = len(kv.table.chain) * self._block_size
        for position, checkpoint in kv.reserved_checkpoints:
            if position <= published:
                block = kv.table.chain[position // self._block_size - 1]
                if self._prefix_cache is None or block not in self._prefix_cache:
                    self.checkpoints.release(checkpoint)
                    continue
                self.checkpoints.attach(checkpoint, block)
                kv.recent_checkpoints.append((position, block))
        kv.reserved_checkpoints = [each for each in kv.reserved_checkpoints if each[0] > published]

    def forget_uncommitted(self, sequence: Sequence) -> set[int]:
        invalid: set[int] = set()
        for position, block in sequence.kv.recent_checkpoints:
            if position > sequence.num_committed_tokens:
                self.checkpoints.forget(block)
                invalid.update(block.blocks)
        return invalid

    def release(self, sequence: Sequence) -> None:
        self._cancel_restore(sequence)
        for _, checkpoint in sequence.kv.reserved_checkpoints:
            self.checkpoints.release(checkpoint)
        sequence.kv.reserved_checkpoints, sequence.kv.recent_checkpoints = [], []

    def _cancel_restore(self, sequence: Sequence) -> None:
        if sequence.kv.restore_from is not None:
            self.checkpoints.unpin(sequence.kv.restore_from)
            sequence.kv.restore_from = None
