"""Tracks which KV blocks are in use, and which is allocated next.

A block is an integer, the index into every layer's KV pool. This module counts references and keeps the free list. The
prefix cache attaches to each block a record of its content, which this module only stores.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

SUPPORTED_BLOCK_SIZES = (8, 16, 32)
"""Tokens per block that the attention kernels support. The pool itself takes any power of two."""

DEFAULT_BLOCK_SIZE = 32
"""Tokens per block. No other place sets this default."""

STATE_OF_COUNT = bytes((0, *range(2, 256), 255))
"""Maps a reference count to what `BlockPool.states` says of the block."""

Content = TypeVar("Content")


class BlockPoolError(Exception):
    """Base of the pool's errors."""


class OutOfBlocksError(BlockPoolError):
    """More blocks were requested than are free. Nothing was taken."""


class DoubleFreeError(BlockPoolError):
    """A block was released more often than it was allocated or shared."""


@dataclass(frozen=True)
class BlockUsage:
    """A count of the pool's blocks. `used + cached + free` is the size of the pool.

    used: at least one sequence references the block. cached: none does, but its content can be found. free: the rest.
    """

    used: int
    cached: int
    free: int


class BlockPool(Generic[Content]):
    """Reference-counted blocks with a free list in least-recently-used order. Every operation is O(1) per block.

    A freed block keeps its content until it is allocated again, so the free list is also the prefix cache. Blocks
    without content are allocated first, then cached ones, the least recently used first. Before these come the cached
    blocks that left their sequence's window, unless a prompt has found them: other prompts seldom continue there.
    Cached blocks are in an OrderedDict: a hit removes a block from the middle, and a plain dict does not pop its first
    key in O(1).
    """

    def __init__(self, num_blocks: int, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be at least 0, got {num_blocks}")
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._on_evict: Callable[[int, Content], None] = lambda block, content: None
        self._on_leave: Callable[[int, Content], None] = lambda block, content: None
        self.num_gains = 0  # blocks that got content or were shared while cached: each can extend one prefix hit
        self._ref_counts = [0] * num_blocks
        self._shared: set[int] = set()  # blocks with several references
        self._empty = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._passed: OrderedDict[int, None] = OrderedDict()  # cached too, evicted first
        self._found: set[int] = set()  # blocks whose content has been shared
        self._content: dict[int, Content] = {}

    def call_at_evict(self, on_evict: Callable[[int, Content], None]) -> None:
        """From now on, call it after the content of a block was dropped."""
        self._on_evict = on_evict

    def call_at_leave(self, on_leave: Callable[[int, Content], None]) -> None:
        """From now on, call it before the content of a block is dropped to make room: it is computed, and still there.
        Blocks that have left the window of their sequence are left out."""
        self._on_leave = on_leave

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can take, including those with cached content."""
        return len(self._empty) + self._num_cached

    @property
    def _num_cached(self) -> int:
        return len(self._cached) + len(self._passed)

    def usage(self) -> BlockUsage:
        return BlockUsage(self.num_blocks - self.num_free, cached=self._num_cached, free=len(self._empty))

    def states(self) -> bytes:
        """One byte for each block: 0 free, 1 cached, 1 + n if n sequences reference it, at most 255."""
        try:
            counts = bytes(self._ref_counts)
        except ValueError:  # a count above 255. The general way takes ten times as long
            counts = bytes(min(count, 255) for count in self._ref_counts)
        states = bytearray(counts.translate(STATE_OF_COUNT))
        for cached in (self._cached, self._passed):
            for block in cached:
                states[block] = 1
        return bytes(states)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def shared(self, blocks: Iterable[int]) -> set[int]:
        """The blocks with several references. /v1/status calls it for all running sequences between two steps, so it
        intersects sets: that takes a fifth of the time of checking each block's count."""
        return self._shared.intersection(blocks) if self._shared else set()

    def content(self, block: int) -> Content | None:
        return self._content.get(block)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`."""
        added = range(self.num_blocks, num_blocks)
        self._ref_counts += [0] * len(added)
        self._empty.extend(added)
        self.num_blocks = max(self.num_blocks, num_blocks)

    def moves_to(self, num_blocks: int) -> dict[int, int]:
        """Evict the least recently used content until `num_blocks` blocks can hold the rest. Returns the copies, source
        to target, after which the first `num_blocks` blocks hold it. Nothing else changes before `shrink`.

        Raises OutOfBlocksError, with nothing evicted, if more blocks are in use.
        """
        used = self.num_blocks - self.num_free
        if used > num_blocks:
            raise OutOfBlocksError(f"{used} blocks are in use, so the pool cannot shrink to {num_blocks}")
        self.evict(used + self._num_cached - num_blocks)
        sources = [
            block for block in range(num_blocks, self.num_blocks) if self._ref_counts[block] or self._is_cached(block)
        ]
        targets = sorted(block for block in self._empty if block < num_blocks)
        return dict(zip(sources, targets, strict=False))

    def shrink(self, num_blocks: int, moves: Mapping[int, int]) -> None:
        """Drop the blocks from `num_blocks` on, after the copies that `moves_to` returned."""
        taken = set(moves.values())
        for source, target in moves.items():
            self._ref_counts[target] = self._ref_counts[source]
            if source in self._content:
                self._content[target] = self._content.pop(source)
        self._shared = {moves.get(block, block) for block in self._shared}
        self._found = {moves.get(block, block) for block in self._found - taken}
        self._cached, self._passed = (
            OrderedDict((moves.get(block, block), None) for block in kept) for kept in (self._cached, self._passed)
        )
        self._empty = deque(block for block in self._empty if block < num_blocks and block not in taken)
        del self._ref_counts[num_blocks:]
        self.num_blocks = num_blocks

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting the least recently used content if needed.

        Raises OutOfBlocksError, with nothing taken, if fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        if count > len(self._empty):
            self.evict(count - len(self._empty))
        blocks = [self._empty.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        self._found.difference_update(blocks)
        return blocks

    def evict(self, count: int) -> None:
        """Drop the content of the `count` least recently used cached blocks, or of all if there are fewer. A call at
        an eviction may drop more."""
        wanted = len(self._empty) + count
        while len(self._empty) < wanted and self._num_cached:
            block = next(iter(self._passed or self._cached))
            if block in self._cached:
                self._on_leave(block, self._content[block])
            self.forget(block)

    def share(self, block: int) -> None:
        """Add a reference to a block in use or to a cached block.

        Raises BlockPoolError for a free block: it has no content to share.
        """
        if self._ref_counts[block] == 0:
            if not self._is_cached(block):
                raise BlockPoolError(f"block {block} is free and has no content to share")
            self._uncache(block)
            self.num_gains += 1
        self._found.add(block)
        self._ref_counts[block] += 1
        if self._ref_counts[block] == 2:
            self._shared.add(block)

    def _is_cached(self, block: int) -> bool:
        return block in self._cached or block in self._passed

    def is_kept(self, block: int) -> bool:
        """Whether a block is in use, or cached and not left behind by its sequence's window."""
        return self._ref_counts[block] > 0 or block in self._cached

    def _uncache(self, block: int) -> None:
        del (self._cached if block in self._cached else self._passed)[block]

    def release(self, blocks: Iterable[int], passed: bool = False) -> None:
        """Drop one reference to each block, in the given order. The first block that becomes free is evicted first.

        passed: the blocks have left the window of their sequence. Raises DoubleFreeError at a block without references.
        """
        for block in blocks:
            if self._ref_counts[block] <= 0:
                raise DoubleFreeError(f"block {block} is already free")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 1:
                self._shared.discard(block)
            if self._ref_counts[block] == 0:
                if block in self._content:
                    (self._passed if passed and block not in self._found else self._cached)[block] = None
                else:
                    self._empty.appendleft(block)

    def remember(self, block: int, content: Content) -> None:
        """Attach content to a block in use. The block keeps it after it is freed."""
        if self._ref_counts[block] == 0:
            raise BlockPoolError(f"block {block} is free: only a block in use can be given content")
        self._content[block] = content
        self.num_gains += 1

    def forget(self, block: int) -> None:
        """Detach the content of a block, if it has any."""
        content = self._content.pop(block, None)
        if content is None:
            return
        if self._is_cached(block):
            self._uncache(block)
            self._empty.append(block)
        self._on_evict(block, content)
