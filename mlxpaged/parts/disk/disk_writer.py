"""Stores what leaves the pool and the checkpoints, if it is worth it, and all that is left when a model ends.

A block is stored if its prefix was found again or took long to compute, and with recurrent layers the last checkpoint
of such a prefix. The bytes are taken on the engine thread, before the next step overwrites them (disk_share.py). The
store's thread writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from typing import TypeVar

from mlxpaged.core.blocks.prefix_cache import CachedBlock, Content
from mlxpaged.core.blocks.table_rows import UNUSED
from mlxpaged.core.engine.errors import RankLostError
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.parts.disk.disk_index import Name
from mlxpaged.parts.disk.disk_records import StoredBlock
from mlxpaged.parts.disk.disk_share import PIECE_BYTES, STATE, DiskShare
from mlxpaged.parts.disk.disk_store import MAX_PENDING_BYTES
from mlxpaged.parts.ranks.rank_messages import StoredBlocks

logger = logging.getLogger(__name__)

VALUABLE_SECONDS = 1.0
"""A prefix that takes longer to compute is stored also if it was not found again."""

END_SECONDS = 8.0
"""Time for the blocks of a model that ends."""

Item = TypeVar("Item")


class DiskWriter:
    """clock: seconds."""

    def __init__(self, share: DiskShare, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        assert scheduler.prefix_cache is not None
        self._share, self._clock = share, clock
        self._cache, self._pool = scheduler.prefix_cache, scheduler.pool
        self._checkpoints = scheduler.blocks.states.checkpoints
        self._leaving: list[tuple[int, StoredBlock]] = []
        self._leaving_states: dict[CachedBlock, int] = {}
        self.piece_blocks = max(1, PIECE_BYTES // max(1, share.block_bytes))
        scheduler.valuable_seconds = VALUABLE_SECONDS
        scheduler.pool.call_at_leave(self._leave)
        self._checkpoints.call_at_replace(self._leave_state)

    def _leave(self, block: int, content: Content) -> None:
        record, group = content
        self._leave_state(record)
        if record.is_valuable and Name(record.key, group) not in self._share:
            self._leaving.append((block, stored(record, group)))

    def _leave_state(self, record: CachedBlock) -> None:
        checkpoint = self._checkpoints.computed(record) if record.is_start else None
        if checkpoint is not None and Name(record.key, STATE) not in self._share:
            self._leaving_states.setdefault(record, checkpoint)

    def take_leaving(self) -> None:
        """Take the bytes of what has left, before they are overwritten. If there are too many blocks for the disk, the
        last ones to leave are kept, which are the first of their prefixes."""
        leaving, self._leaving = self._leaving, []
        states, self._leaving_states = self._leaving_states, {}
        try:
            for record, checkpoint in states.items():
                if self._share.room >= self._share.state_bytes:
                    self._share.take_state(StoredBlocks([stored(record, STATE)]), checkpoint)
            count = self._share.room // max(1, self._share.block_bytes)
            for piece in pieces(leaving[-count:] if count > 0 else [], self.piece_blocks):
                self._share.take_blocks(StoredBlocks(block for _, block in piece), [block for block, _ in piece])
        except RankLostError:
            raise
        except Exception as error:
            logger.warning("blocks could not be stored: %s", error)
            self._share.discard_taken()  # of several ranks, the others have taken them

    def store_taken(self) -> None:
        """The steps that computed the blocks have ended without an error."""
        if self._share.has_taken:
            self._share.write_taken()

    def discard(self) -> None:
        """A step has failed: its blocks, and those of the steps after it, are not valid."""
        self._leaving, self._leaving_states = [], {}
        if self._share.has_taken:
            self._share.discard_taken()

    def store_all(self) -> None:
        """Store what the pool and the checkpoints have: the model ends. No step may be in flight."""
        self.store_taken()
        self._checkpoints.start_step()
        deadline = self._clock() + END_SECONDS
        kept = [record for record in self._cache if record.parent is None or record.parent in self._cache]
        blocks = [
            (block, Content(record, group))
            for record in kept
            for group, block in enumerate(record.blocks)
            if block != UNUSED and self._pool.is_kept(block)
        ]
        for piece in pieces(blocks, self.piece_blocks):
            if not self._make_room(PIECE_BYTES, deadline):
                return
            for block, content in piece:
                self._leave(block, content)
            self._leaving_states.clear()
            self._store_leaving()
        for record in kept:
            self._leave_state(record)
            if self._leaving_states and self._make_room(self._share.state_bytes, deadline):
                self._store_leaving()
        self._make_room(MAX_PENDING_BYTES, deadline)

    def _make_room(self, size: int, deadline: float) -> bool:
        """Wait until so many bytes can wait for the disk."""
        return self._share.make_room(max(0, MAX_PENDING_BYTES - size), deadline - self._clock())

    def _store_leaving(self) -> None:
        self.take_leaving()
        self.store_taken()


def stored(record: CachedBlock, part: int) -> StoredBlock:
    parent = b"" if record.parent is None else record.parent.key
    return StoredBlock(Name(record.key, part), parent, record.tokens)


def pieces(items: ListOf[Item], size: int) -> Iterator[ListOf[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
