"""Cache groups: layers whose queries see the same keys share a block table.

A layer with a sliding window needs only the blocks of the last tokens. So the layers of a model are grouped by their
windows, and a sequence has one block table for each group. All blocks take equally many bytes, so every group can use
every free block. vLLM's hybrid KV cache manager works alike.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from mlxpaged.core.blocks.block_pool import DEFAULT_BLOCK_SIZE


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens fill: ceil(num_tokens / block_size)."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True)
class CacheGroups:
    """windows: for each group, the keys that a query sees, its own included; None for all. Several groups may have
    the same window."""

    windows: tuple[int | None, ...] = (None,)
    block_size: int = DEFAULT_BLOCK_SIZE

    def __post_init__(self) -> None:
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"there must be a group, and windows must be positive, got {self.windows}")

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def keeps_all(self) -> bool:
        """Whether no group has a window, so that a sequence keeps all its blocks."""
        return all(window is None for window in self.windows)

    def first_block(self, group: int, position: int) -> int:
        """Index of the first block with a key that a query at `position` or later sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def most_blocks(self, group: int, num_blocks: int, chunk: int) -> int:
        """The most blocks of a group that a sequence holds at once, if it fills `num_blocks` blocks in steps of up to
        `chunk` tokens. A step writes all its keys before it reads any, so the sequence holds its blocks and those of
        the `window` tokens before it."""
        window = self.windows[group]
        if window is None:
            return num_blocks
        return min(num_blocks, (window + chunk + self.block_size - 2) // self.block_size + 1)

    def blocks_needed(self, num_tokens: int, chunk: int) -> int:
        """The most blocks of all groups that a sequence of `num_tokens` tokens holds at once."""
        filled = blocks_for(num_tokens, self.block_size)
        return sum(self.most_blocks(group, filled, chunk) for group in range(len(self)))

    def most_tokens(self, num_blocks: int, chunk: int, limit: int) -> int:
        """The tokens of the longest sequence, up to `limit`, that `num_blocks` blocks can hold."""
        filled = range(1, blocks_for(limit, self.block_size) + 1)
        found = bisect_right(filled, num_blocks, key=lambda count: self.blocks_needed(count * self.block_size, chunk))
        return min(limit, found * self.block_size)


ONE_GROUP = CacheGroups()
