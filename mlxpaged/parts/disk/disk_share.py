"""A rank's share of the prefixes on a disk: moves bytes between its pool and its store.

Rank 0 decides what is stored and loaded. Before it changes anything here, it lets the other ranks make the same call,
each for its share of the heads (rank_messages.py). What one rank cannot read is put into the pool of none: the ranks
agree on it before. A model that is not divided has one share.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from concurrent.futures import Future, wait

import mlx.core as mx
import numpy as np

from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.swap_space import bytes_per_slot
from mlxpaged.parts.disk.checkpoint_bytes import CheckpointBytes
from mlxpaged.parts.disk.disk_index import Name
from mlxpaged.parts.disk.disk_records import Data, StoredBlock, StoreStats
from mlxpaged.parts.disk.disk_store import CLOSE_SECONDS, DiskStore
from mlxpaged.parts.ranks.rank_messages import StoredBlocks

logger = logging.getLogger(__name__)

STATE = 255
"""The part of a name that stands for the recurrent state after a block, not for a cache group."""

PIECE_BYTES = 32 * 2**20
"""Most bytes that go into the pool between two steps while sequences run, and that are read at once."""

CALLS = {
    *("take_blocks", "take_state", "write_taken", "discard_taken", "make_room", "clear_store"),
    *("look_up", "read", "agree", "drop_reads", "put", "begin_state", "continue_state"),
}
"""The calls that a message of rank 0 can ask for."""

READING = -1
"""Stands for a block that a rank still reads."""

STOPPED = "another rank stores nothing more; its log says why"


class DiskShare:
    """model: the name that the store shows. seed: of the names in the store of a rank other than 0, so that they belong
    to its share of these weights. block_bytes, state_bytes: of this rank. num_stored: blocks and states."""

    def __init__(self, store: DiskStore, model: str, runner: ModelRunner, seed: bytes = b"") -> None:
        self.store, self.model, self._runner, self._seed = store, model, runner, seed
        self._states = CheckpointBytes(runner.recurrent)
        self.block_bytes, self.state_bytes = bytes_per_slot(runner.pools), self._states.nbytes
        self.num_stored = 0
        self._taken: list[tuple[StoredBlocks, list[mx.array]]] = []  # valid if the steps in flight are
        self._reads: deque[tuple[StoredBlocks, Future[list[Data | None]]]] = deque()
        self._found: deque[Data | None] = deque()  # what was read last, and is not in the pool yet
        self._using = StoredBlocks()  # what was read last, until the next read is agreed on, or the load ends
        self._state: Iterator[None] = iter(())
        self._lacking: set[Name] = set()  # on rank 0: what another rank does not have
        self._others_write = True

    # -- what there is, for rank 0 -------------------------------------------------------------------------------

    def __contains__(self, name: Name) -> bool:
        """Whether a block is stored, or will be soon."""
        return name in self.store and name not in self._lacking

    def can_read(self, name: Name) -> bool:
        return self.store.can_read(name) and name not in self._lacking

    @property
    def room(self) -> int:
        """Bytes of this rank that can be taken now."""
        taken = sum(array.nbytes for _, arrays in self._taken for array in arrays)
        return self.store.room - taken if self._others_write else 0

    @property
    def has_taken(self) -> bool:
        return bool(self._taken)

    def stats(self) -> StoreStats:
        stats = self.store.stats()
        return stats if self._others_write else stats._replace(stopped=stats.stopped or STOPPED)

    # -- storing ---------------------------------------------------------------------------------------------------

    def take_blocks(self, contents: StoredBlocks, blocks: ListOf[int]) -> None:
        """Take the bytes of blocks, after the steps in flight and before the next one overwrites them."""
        self._runner.tell("take_blocks", contents, blocks)
        self._lacking.difference_update(each.name for each in contents)
        self._taken.append((self._own(contents), self._runner.read_blocks(blocks)))

    def take_state(self, contents: StoredBlocks, checkpoint: int) -> None:
        """Take the bytes of a checkpoint. contents: its name alone."""
        self._runner.tell("take_state", contents, checkpoint)
        self._lacking.difference_update(each.name for each in contents)
        arrays = self._states.read(checkpoint)
        if sum(array.nbytes for array in arrays) == self.state_bytes:  # some have smaller ones after the first tokens
            self._taken.append((self._own(contents), arrays))

    def write_taken(self) -> None:
        """Store what was taken. The steps that computed it have ended without an error."""
        self._runner.tell("write_taken")
        taken, self._taken = self._taken, []
        for contents, arrays in taken:
            try:
                columns = [np.asarray(array).reshape(len(contents), -1) for array in arrays]
            except Exception as error:
                logger.warning("blocks could not be stored: %s", error)
                continue
            rows = np.concatenate([np.empty((len(contents), 0), np.uint8), *columns], axis=1)
            self.store.write(self.model, [(block, row.data) for block, row in zip(contents, rows, strict=True)])
            self.num_stored += len(contents)

    def discard_taken(self) -> None:
        """What was taken is not valid."""
        self._runner.tell("discard_taken")
        self._taken = []

    def make_room(self, pending_bytes: int, seconds: float) -> bool:
        """Wait until at most so many bytes wait for the disk of each rank. Returns whether it is so, and all of them
        take more."""
        self._runner.tell("make_room", pending_bytes, seconds)
        has_room = self.store.flush(seconds, pending_bytes) and self.store.room > 0
        return bool(self._least_of_writers([has_room])[0])

    def clear_store(self) -> None:
        """Delete what the stores have of this model."""
        self._runner.tell("clear_store")
        self._lacking.clear()
        wait([self.store.clear(self.model)], CLOSE_SECONDS)

    # -- loading ---------------------------------------------------------------------------------------------------

    def look_up(self, contents: StoredBlocks) -> bool:
        """Whether all ranks have all of it, as far as they know without reading. What one lacks can be read by none
        from then on, until it is stored again."""
        if not self._runner.is_shared:
            return True
        self._runner.tell("look_up", StoredBlocks(StoredBlock(each.name, b"", ()) for each in contents))
        found = self._least_of_writers([self.store.can_read(each.name) for each in self._own(contents)])
        self._note(contents, found)
        return all(found)

    def read(self, contents: StoredBlocks) -> None:
        """Begin to read. What was read first is agreed on first."""
        self._runner.tell("read", contents)
        own = self._own(contents)
        self._reads.append((own, self.store.read(own)))

    def next_read(self, seconds: float) -> list[bool] | None:
        """What `agree` returns, after this rank's own read has ended: then the others' have most likely ended too. None
        if it has not ended in so many seconds."""
        return self.agree(seconds) if wait([self._reads[0][1]], seconds).done else None

    def agree(self, seconds: float) -> list[bool] | None:
        """Whether all ranks have read each block of the first read. None if one is not done in so many seconds: the
        running sequences go on then."""
        self._runner.tell("agree", seconds)
        contents, future = self._reads[0]
        is_done = len(wait([future], seconds).done) > 0
        found: list[Data | None] = [None] * len(contents)
        if is_done and future.exception() is None:
            found = future.result()
        own = [self._is_whole(each, data) for each, data in zip(contents, found, strict=True)]
        least = self._runner.agree(own if is_done else [READING] * len(own))
        if READING in least:
            return None
        self._reads.popleft()
        self._end_using()
        self._found, self._using = deque(found), contents
        self._note(contents, least)
        return list(map(bool, least))

    def drop_reads(self) -> None:
        """Nothing more is loaded of what was read."""
        self._runner.tell("drop_reads")
        for contents, _ in self._reads:
            self.store.end_reading(contents)
        self._reads.clear()
        self._end_using()

    @property
    def has_read(self) -> bool:
        return bool(self._reads or self._using)

    def _end_using(self) -> None:
        """Nothing more is done with what was read last."""
        self._found.clear()
        if self._using:
            self.store.end_reading(self._using)
        self._using = StoredBlocks()

    def put(self, blocks: ListOf[int]) -> None:
        """Overwrite blocks with those that were read and agreed on, in this order. Raises DeviceError."""
        self._runner.tell("put", blocks)
        found = [self._found.popleft() for _ in blocks]
        rows = [np.frombuffer(data, np.uint8) for data in found if data is not None]
        self._runner.write_blocks(blocks, np.stack(rows))

    def put_state(self, checkpoint: int) -> Iterator[None]:
        """Make a checkpoint of the state that was read and agreed on. Yields after every PIECE_BYTES. Raises
        DeviceError."""
        self.begin_state(checkpoint)
        while self.continue_state():
            yield

    def begin_state(self, checkpoint: int) -> None:
        self._runner.tell("begin_state", checkpoint)
        data = self._found.popleft()
        assert data is not None
        self._state = self._states.write(checkpoint, np.frombuffer(data, np.uint8), PIECE_BYTES)

    def continue_state(self) -> bool:
        """Returns whether there is more to do."""
        self._runner.tell("continue_state")
        return any(True for _ in self._state)

    # -- on each rank ----------------------------------------------------------------------------------------------

    def _own(self, contents: StoredBlocks) -> StoredBlocks:
        """The same blocks by their names in the store of this rank."""
        if not self._seed:
            return contents
        return StoredBlocks(each._replace(name=self._own_name(each.name)) for each in contents)

    def _own_name(self, name: Name) -> Name:
        return name._replace(key=hashlib.blake2b(self._seed + name.key, digest_size=16).digest())

    def _is_whole(self, block: StoredBlock, data: Data | None) -> bool:
        size = self.state_bytes if block.name.part == STATE else self.block_bytes
        return data is not None and data.nbytes == size

    def _note(self, contents: StoredBlocks, found: ListOf[int]) -> None:
        if not self._seed:
            self._lacking.update(each.name for each, is_found in zip(contents, found, strict=True) if not is_found)

    def _least_of_writers(self, values: ListOf[int]) -> list[int]:
        """What all runners agree on. Learns whether all ranks still write."""
        writes = not self.store.stats().stopped
        *least, all_write = self._runner.agree([*values, writes])
        if writes and self._others_write and not all_write:
            logger.warning("no more prefixes are written to %s: %s", self.store.directory, STOPPED)
        self._others_write = bool(all_write) or not writes
        return least
