"""Stores what leaves the pool and the checkpoints, if it is worth it, and all that is left when a model ends.

A block is stored if its prefix was found again or took long to compute, and with recurrent layers the last checkpoint
of such a prefix. The bytes are taken on the engine thread, before the next step overwrites them. The store's thread
writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from typing import TypeVar

import mlx.core as mx
import numpy as np

from mlxpaged.cache.disk_index import Name
from mlxpaged.cache.disk_records import StoredBlock
from mlxpaged.cache.disk_store import MAX_PENDING_BYTES, DiskStore
from mlxpaged.cache.prefix_cache import CachedBlock, Content
from mlxpaged.cache.table_rows import UNUSED
from mlxpaged.engine.checkpoint_bytes import CheckpointBytes
from mlxpaged.engine.model_runner import ModelRunner
from mlxpaged.engine.swap_space import bytes_per_slot
from mlxpaged.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

STATE = 255
"""The part of a name that stands for the recurrent state after a block, not for a cache group."""

VALUABLE_SECONDS = 1.0
"""A prefix that takes longer to compute is stored also if it was not found again."""

PIECE_BYTES = 32 * 2**20
"""Most bytes that go into the pool between two steps while sequences run, and that are read at once."""

END_SECONDS = 8.0
"""Time for the blocks of a model that ends."""

Item = TypeVar("Item")


class DiskWriter:
    """model: the name that the store shows. clock: seconds."""

    def __init__(
        self,
        store: DiskStore,
        model: str,
        scheduler: Scheduler,
        runner: ModelRunner,
        states: CheckpointBytes,
        clock: Callable[[], float],
    ) -> None:
        assert scheduler.prefix_cache is not None
        self._store, self._model, self._runner, self._states, self._clock = store, model, runner, states, clock
        self._cache, self._pool = scheduler.prefix_cache, scheduler.pool
        self._checkpoints = scheduler.blocks.states.checkpoints
        self._block_bytes = bytes_per_slot(runner.pools)
        self._leaving: list[tuple[int, StoredBlock]] = []
        self._leaving_states: dict[CachedBlock, int] = {}
        self._taken: list[tuple[list[StoredBlock], list[mx.array]]] = []  # valid if the steps in flight are
        self.piece_blocks = max(1, PIECE_BYTES // max(1, self._block_bytes))
        self.num_stored = 0
        scheduler.valuable_seconds = VALUABLE_SECONDS
        scheduler.pool.on_leave = self._leave
        self._checkpoints.on_replace = self._leave_state

    @property
    def has_taken(self) -> bool:
        """Whether `store_taken` has something to do."""
        return bool(self._taken)

    def _leave(self, block: int, content: Content) -> None:
        record, group = content
        self._leave_state(record)
        if record.is_valuable and Name(record.key, group) not in self._store:
            self._leaving.append((block, stored(record, group)))

    def _leave_state(self, record: CachedBlock) -> None:
        checkpoint = self._checkpoints.computed(record) if record.is_start else None
        if checkpoint is not None and Name(record.key, STATE) not in self._store:
            self._leaving_states.setdefault(record, checkpoint)

    def take_leaving(self) -> None:
        """Take the bytes of what has left, before they are overwritten. If there are too many blocks for the disk, the
        last ones to leave are kept, which are the first of their prefixes."""
        leaving, self._leaving = self._leaving, []
        states, self._leaving_states = self._leaving_states, {}
        room = self._store.room - sum(array.nbytes for _, arrays in self._taken for array in arrays)
        try:
            for record, checkpoint in states.items():
                arrays = self._states.read(checkpoint)
                size = sum(array.nbytes for array in arrays)
                if room >= size == self._states.nbytes:  # the first tokens of some models have smaller states
                    self._taken.append(([stored(record, STATE)], arrays))
                    room -= size
            count = room // max(1, self._block_bytes)
            for piece in pieces(leaving[-count:] if count > 0 else [], self.piece_blocks):
                arrays = self._runner.read_blocks([block for block, _ in piece])
                self._taken.append(([block for _, block in piece], arrays))
        except Exception as error:
            logger.warning("blocks could not be stored: %s", error)

    def store_taken(self) -> None:
        """The steps that computed the blocks have ended without an error."""
        taken, self._taken = self._taken, []
        for blocks, arrays in taken:
            try:
                columns = [np.asarray(array).reshape(len(blocks), -1) for array in arrays]
            except Exception as error:
                logger.warning("blocks could not be stored: %s", error)
                continue
            rows = np.concatenate([np.empty((len(blocks), 0), np.uint8), *columns], axis=1)
            self._store.write(self._model, [(block, row.data) for block, row in zip(blocks, rows, strict=True)])
            self.num_stored += len(blocks)

    def discard(self) -> None:
        """A step has failed: its blocks, and those of the steps after it, are not valid."""
        self._leaving, self._leaving_states, self._taken = [], {}, []

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
            if self._leaving_states and self._make_room(self._states.nbytes, deadline):
                self._store_leaving()

    def _make_room(self, size: int, deadline: float) -> bool:
        """Wait until so many bytes can wait for the disk."""
        waiting = max(0, MAX_PENDING_BYTES - size)
        return self._store.flush(deadline - self._clock(), waiting) and self._store.room > 0

    def _store_leaving(self) -> None:
        self.take_leaving()
        self.store_taken()


def stored(record: CachedBlock, part: int) -> StoredBlock:
    parent = b"" if record.parent is None else record.parent.key
    return StoredBlock(Name(record.key, part), parent, record.tokens)


def pieces(items: ListOf[Item], size: int) -> Iterator[ListOf[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
