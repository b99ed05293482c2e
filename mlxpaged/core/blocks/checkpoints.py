"""Checkpoints of recurrent states, as integers: which published block has one, and which is replaced next.

A layer with a recurrent state cannot start in the middle of a prompt from KV blocks alone: it needs the state at that
position. A checkpoint is the state after the last token of a published block. The model runner keeps the states.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from mlxpaged.core.blocks.prefix_cache import CachedBlock


class Checkpoints:
    """`capacity` ids, each for the state of one sequence. The least recently used checkpoint is replaced first.

    An id is reserved when a step is scheduled that computes the state, and attached to the block once the block is
    published: its last token may not be known before. A pinned checkpoint will be read by a step that is not scheduled
    yet: its id is not used again before `unpin`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_attached = 0  # since the start: each can extend a prefix hit
        self._free = list(range(capacity - 1, -1, -1))
        self._ids: OrderedDict[CachedBlock, int] = OrderedDict()  # in the order of use
        self._pins: Counter[CachedBlock] = Counter()
        self._forgotten: dict[CachedBlock, int] = {}  # pinned ids of blocks that no prompt finds any more
        self._new: set[int] = set()  # ids that were reserved for the step being scheduled
        self._on_replace: Callable[[CachedBlock], None] = lambda block: None

    def call_at_replace(self, on_replace: Callable[[CachedBlock], None]) -> None:
        """From now on, call it before a block loses its checkpoint to another one."""
        self._on_replace = on_replace

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def num_reserved(self) -> int:
        """Ids that are neither free nor attached."""
        return self.capacity - len(self._free) - len(self._ids) - len(self._forgotten)

    def __contains__(self, block: CachedBlock) -> bool:
        return block in self._ids

    def start_step(self) -> None:
        """All steps that were scheduled so far have been launched, so they have computed their checkpoints."""
        self._new.clear()

    def computed(self, block: CachedBlock) -> int | None:
        """The id of a block's checkpoint, if a step that was launched has computed it."""
        checkpoint = self._ids.get(block)
        return None if checkpoint in self._new else checkpoint

    def deepest(self, chain: Sequence[CachedBlock]) -> int:
        """The number of leading blocks of a chain up to the last one that has a checkpoint."""
        return next((i for i in range(len(chain), 0, -1) if chain[i - 1] in self._ids), 0)

    def pin(self, block: CachedBlock) -> None:
        """Keep the checkpoint of a block until `unpin`."""
        self._ids.move_to_end(block)
        self._pins[block] += 1

    def unpin(self, block: CachedBlock) -> int:
        """Returns the checkpoint's id."""
        self._pins -= Counter([block])
        if block in self._forgotten and block not in self._pins:
            checkpoint = self._forgotten.pop(block)
            self._free.append(checkpoint)
            return checkpoint
        return self._ids[block] if block in self._ids else self._forgotten[block]

    def reserve(self) -> int | None:
        """An id for a new checkpoint, or None if all are pinned or reserved."""
        if not self._free:
            oldest = next((block for block in self._ids if block not in self._pins), None)
            if oldest is None:
                return None
            self._on_replace(oldest)
            self.forget(oldest)
        self._new.add(self._free[-1])
        return self._free.pop()

    def attach(self, checkpoint: int, block: CachedBlock) -> None:
        """Make a reserved checkpoint that of a block. If the block has one already, the id is free again."""
        if block in self._ids:
            self._free.append(checkpoint)
            return
        self._ids[block] = checkpoint
        self.num_attached += 1

    def release(self, checkpoint: int) -> None:
        """Free a reserved id."""
        self._free.append(checkpoint)

    def forget(self, block: CachedBlock) -> None:
        """Drop the checkpoint of a block, if it has one."""
        checkpoint = self._ids.pop(block, None)
        if checkpoint is not None and block in self._pins:
            self._forgotten[block] = checkpoint
        elif checkpoint is not None:
            self._free.append(checkpoint)
