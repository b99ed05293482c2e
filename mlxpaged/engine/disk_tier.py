"""The prefix cache's tier on a disk: stores blocks that leave the pool, and loads the prefixes of new requests.

A block is stored if its prefix was found again or took long to compute. Its bytes are taken from the pool on the engine
thread, before the next step overwrites them. The store's thread writes them.

A new request whose prefix goes on on the disk is held, if reading is expected to take less time than computing. The
store's thread reads, and between two steps a bounded number of bytes goes into blocks, which the prefix cache then has
as if they were computed. What is missing or damaged is computed. One prefix is loaded at a time, so a second request
for it finds the blocks of the first.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from mlxpaged.cache.disk_index import Name
from mlxpaged.cache.disk_store import CLOSE_SECONDS, MAX_PENDING_BYTES, Data, DiskStore, StoredBlock, StoreStats
from mlxpaged.cache.prefix_cache import CachedBlock, Content
from mlxpaged.cache.table_rows import UNUSED
from mlxpaged.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.engine.swap_space import bytes_per_slot
from mlxpaged.scheduler.queue import ORDER
from mlxpaged.scheduler.scheduler import Scheduler
from mlxpaged.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)

VALUABLE_SECONDS = 1.0
"""A prefix that takes longer to compute is stored also if it was not found again."""

PIECE_BYTES = 32 * 2**20
"""Most bytes that go into the pool between two steps while sequences run, and that are read at once."""

PIECES_AHEAD = 2
"""Pieces that are read before they are needed."""

READ_SECONDS = 0.005
"""What each prefix that is read takes beside its bytes."""

PATIENCE_SECONDS = 5.0
"""A request waits so long for room in the pool and for the disk, or as long as computing its prefix takes if that is
more. Then it is queued to be computed."""

PAUSE_SECONDS = 60.0
"""After the disk kept a request waiting, so long nothing is loaded."""

WAIT_SECONDS = 0.005
"""Time for which the engine thread waits for the disk if nothing else runs. Commands are later by at most this."""

END_SECONDS = 8.0
"""Time for the blocks of a model that ends."""


class TierStats(NamedTuple):
    """store: of all models that share the directory. The rest is of this model."""

    directory: str = ""
    off_because: str = ""
    store: StoreStats = StoreStats()
    loading: int = 0
    blocks_stored_total: int = 0
    blocks_loaded_total: int = 0


NO_TIER = TierStats()

Item = TypeVar("Item")
Parts = list[StoredBlock]
"""What is loaded of one record: its blocks of each group, as far as the next token sees them."""


@dataclass(eq=False)
class Load:
    """A prefix that is being loaded. pieces: not in the pool yet. parent: the last record that is. held: references to
    blocks, so that they stay. deadline: until when it waits."""

    sequence: Sequence
    parent: CachedBlock | None
    pieces: deque[list[Parts]]
    deadline: float
    held: list[int]
    reads: deque[Future[list[Data | None]]] = field(default_factory=deque)


class DiskTier:
    """model: the name that the store shows. clock: seconds. The store is this model's until `close`."""

    def __init__(
        self,
        store: DiskStore,
        model: str,
        scheduler: Scheduler,
        runner: ModelRunner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert scheduler.prefix_cache is not None
        self._store, self._model, self._clock = store, model, clock
        self._scheduler, self._runner = scheduler, runner
        self._cache, self._pool, self._groups = scheduler.prefix_cache, scheduler.pool, scheduler.blocks.groups
        self._block_bytes = bytes_per_slot(runner.pools)
        self._piece_blocks = max(1, PIECE_BYTES // self._block_bytes)
        self._leaving: list[tuple[int, StoredBlock]] = []
        self._taken: list[tuple[list[StoredBlock], list[mx.array]]] = []  # valid if the steps in flight are
        self._load: Load | None = None
        self._missing = 0  # blocks that the load waits for
        self._paused_until = -math.inf
        self._stored = self._loaded = 0
        scheduler.valuable_seconds = VALUABLE_SECONDS
        scheduler.pool.on_leave = self._leave

    # -- storing -------------------------------------------------------------------------------------------------

    def _leave(self, block: int, content: Content) -> None:
        record, group = content
        if record.is_valuable and Name(record.key, group) not in self._store:
            self._leaving.append((block, stored(record, group)))

    def take_leaving(self) -> None:
        """Take the bytes of the blocks that have left the pool, before they are overwritten. If there are too many for
        the disk, the last ones to leave are kept, which are the first of their prefixes."""
        leaving, self._leaving = self._leaving, []
        waiting = sum(len(blocks) for blocks, _ in self._taken)
        room = self._store.room // self._block_bytes - waiting
        for piece in pieces(leaving[-room:] if room > 0 else [], self._piece_blocks):
            try:
                arrays = self._runner.read_blocks([block for block, _ in piece])
                self._taken.append(([block for _, block in piece], arrays))
            except Exception as error:
                logger.warning("blocks could not be stored: %s", error)
                return

    def store_taken(self) -> None:
        """The steps that computed the blocks have ended without an error."""
        taken, self._taken = self._taken, []
        for blocks, arrays in taken:
            try:
                columns = [np.asarray(array).reshape(len(blocks), -1) for array in arrays]
            except Exception as error:
                logger.warning("blocks could not be stored: %s", error)
                continue
            rows = np.concatenate(columns, axis=1)
            self._store.write(self._model, [(block, row.data) for block, row in zip(blocks, rows, strict=True)])
            self._stored += len(blocks)

    def discard(self) -> None:
        """A step has failed: its blocks, and those of the steps after it, are not valid."""
        self._leaving, self._taken = [], []
        self.end_load()

    def store_all(self) -> None:
        """Store what the pool has: the model ends. No step may be in flight."""
        self.end_load()
        self.store_taken()
        deadline = self._clock() + END_SECONDS
        left = [
            (block, stored(record, group))
            for record in self._cache
            if record.is_valuable and (record.parent is None or record.parent in self._cache)
            for group, block in enumerate(record.blocks)
            if block != UNUSED and self._pool.is_kept(block) and Name(record.key, group) not in self._store
        ]
        for piece in pieces(left, self._piece_blocks):
            if not self._store.flush(deadline - self._clock(), MAX_PENDING_BYTES - PIECE_BYTES) or not self._store.room:
                break
            self._leaving = piece
            self.take_leaving()
            self.store_taken()

    def clear(self) -> None:
        """Delete what the store has of this model."""
        self.discard()
        wait([self._store.clear(self._model)], CLOSE_SECONDS)

    # -- loading -------------------------------------------------------------------------------------------------

    def wants(self, sequence: Sequence) -> bool:
        """Whether the prefix of a new sequence is to be loaded: it goes on on the disk, and reading takes less time
        than computing."""
        return sequence.fork_of is None and self._clock() >= self._paused_until and bool(self._on_disk(sequence)[1])

    def _on_disk(self, sequence: Sequence) -> tuple[list[CachedBlock], list[Parts]]:
        """The leading records of a sequence in the pool, and those that are to be loaded after them."""
        tokens, size = sequence.token_ids, self._pool.block_size
        self._cache.extend_keys(sequence.kv.keys, tokens, sequence.num_known_tokens, sequence.cache_seed)
        most = len(tokens) - 1 if sequence.logits_from is None else sequence.logits_from
        keys = sequence.kv.keys[: most // size]
        chain = self._cache.match(keys, tokens)
        start = end = len(chain)
        everywhere = [group for group, window in enumerate(self._groups.windows) if window is None]
        while end < len(keys) and all(self._store.can_read(Name(keys[end], group)) for group in everywhere):
            end += 1
        while end > start and not self._has_windows(keys, chain, end):
            end -= 1
        records = [
            [
                StoredBlock(Name(keys[i], group), keys[i - 1] if i else b"", tuple(tokens[i * size : (i + 1) * size]))
                for group in range(len(self._groups))
                if i >= self._groups.first_block(group, end * size)
            ]
            for i in range(start, end)
        ]
        computing = self._scheduler.prefill_seconds(start * size, (end - start) * size)
        reading = READ_SECONDS + sum(map(len, records)) * self._block_bytes / self._store.read_rate
        return chain, [] if computing is not None and computing <= reading else records

    def _has_windows(self, keys: ListOf[bytes], chain: ListOf[CachedBlock], end: int) -> bool:
        """Whether a sequence can go on after `end` blocks: the windows of the next token are in the pool or stored."""
        return all(
            chain[i].blocks[group] != UNUSED if i < len(chain) else self._store.can_read(Name(keys[i], group))
            for group, window in enumerate(self._groups.windows)
            if window is not None
            for i in range(self._groups.first_block(group, end * self._pool.block_size), end)
        )

    def advance(self) -> None:
        """Before a step: store what the last step has confirmed, and load a piece, or all that is read if nothing
        runs. Raises DeviceError."""
        self.store_taken()
        loaded = 0
        while self._load is not None or self._begin():
            load, runs = self._load, self._scheduler.num_runnable > 0
            assert load is not None
            if load.sequence.sequence_id not in self._scheduler.loading:  # it has ended
                self.end_load()
                continue
            wait(list(load.reads)[:1], 0 if runs else WAIT_SECONDS)
            if not load.reads[0].done():
                if self._clock() < load.deadline:
                    return
                logger.warning("the disk is too slow: a prefix of %s is computed", load.sequence.label)
                self._paused_until = self._clock() + PAUSE_SECONDS
                self.end_load()
                continue
            if runs and loaded:
                return
            count = self._load_piece(load)
            if count is None:
                return
            loaded += count

    def after_schedule(self) -> None:
        """Before the scheduled step runs: take the blocks that it overwrites. Ask for the room that a load needs."""
        self.take_leaving()
        if self._missing:
            self._scheduler.blocks.size.ask(self._missing)
        self._missing = 0

    def _begin(self) -> bool:
        """Begin the next load. Queue the sequences that need none, which is so if another load was for them too."""
        for sequence in sorted(self._scheduler.loading.values(), key=ORDER):
            chain, records = self._on_disk(sequence)
            if not records or self._clock() < self._paused_until:
                self._scheduler.release(sequence.sequence_id)
                continue
            size = self._pool.block_size
            seconds = self._scheduler.prefill_seconds(len(chain) * size, len(records) * size) or 0.0
            held = [block for record in chain for block in record.blocks if block != UNUSED]
            for block in held:
                self._pool.share(block)
            per_piece = max(1, self._piece_blocks // len(self._groups))
            left = deque(pieces(records, per_piece))
            parent = chain[-1] if chain else None
            self._load = Load(sequence, parent, left, self._clock() + max(PATIENCE_SECONDS, seconds), held)
            for piece in itertools.islice(left, PIECES_AHEAD):
                self._load.reads.append(self._store.read([part for parts in piece for part in parts]))
            return True
        return False

    def _load_piece(self, load: Load) -> int | None:
        """Put the next piece into the pool. Returns the number of blocks, or None if there is no room yet."""
        piece, size = load.pieces[0], self._scheduler.blocks.size
        missing = sum(map(len, piece)) - self._scheduler.room_beside(load.sequence)
        if missing > 0:
            can_wait = len(self._scheduler.running) or size.can_grow
            if can_wait and self._clock() < load.deadline:
                self._missing = missing
                return None
            self.end_load()
            return 0
        load.pieces.popleft()
        try:
            data = iter(load.reads.popleft().result())
            if len(load.pieces) > len(load.reads):
                ahead = load.pieces[len(load.reads)]
                load.reads.append(self._store.read([part for parts in ahead for part in parts]))
            found = [(parts, [next(data) for _ in parts]) for parts in piece]
            whole = list(itertools.takewhile(lambda each: all(map(self._is_whole, each[1])), found))
            count = self._put(load, whole)
        except DeviceError:  # the contents of all blocks are lost
            raise
        except Exception:
            logger.exception("a prefix could not be loaded; it is computed")
            whole, count = [], 0
        if len(whole) < len(piece) or not load.pieces:
            self.end_load()
        return count

    def _is_whole(self, data: Data | None) -> bool:
        return data is not None and data.nbytes == self._block_bytes

    def _put(self, load: Load, found: ListOf[tuple[Parts, ListOf[Data | None]]]) -> int:
        """Put records into the pool, and let the prefix cache find them. Returns the number of blocks."""
        data = [np.frombuffer(each, np.uint8) for _, parts in found for each in parts if each is not None]
        if not data:
            return 0
        blocks = self._pool.allocate(len(data))
        load.held += blocks
        self.take_leaving()  # what was evicted for them
        self._runner.write_blocks(blocks, np.stack(data))
        new = iter(blocks)
        for parts, _ in found:
            of_groups = [UNUSED] * len(self._groups)
            for part in parts:
                of_groups[part.name.part] = next(new)
            load.parent = self._cache.insert(parts[0].name.key, load.parent, parts[0].tokens, of_groups)
            load.parent.is_valuable = True
        self._loaded += len(data)
        return len(data)

    def end_load(self) -> None:
        """Let the sequence of the load go on with what was loaded."""
        load, self._load = self._load, None
        if load is None:
            return
        if load.sequence.sequence_id in self._scheduler.loading:
            self._scheduler.release(load.sequence.sequence_id)
        self._pool.release(reversed(load.held))

    # -- the rest ------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `advance` has something to do, also if no sequence is left."""
        return self._load is not None or bool(self._taken)

    def stats(self) -> TierStats:
        counts = self._stored, self._loaded
        return TierStats(str(self._store.directory), "", self._store.stats(), len(self._scheduler.loading), *counts)

    def close(self) -> None:
        close_store(self._store)


def stored(record: CachedBlock, group: int) -> StoredBlock:
    parent = b"" if record.parent is None else record.parent.key
    return StoredBlock(Name(record.key, group), parent, record.tokens)


def pieces(items: list[Item], size: int) -> Iterator[list[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


STORES: dict[Path, tuple[DiskStore, int]] = {}
"""The stores of this process, and how many models use each. Belongs to the engine thread."""


def open_store(directory: Path, budget: int, write_budget: int) -> DiskStore:
    """The store of a directory, which all models of the process share. Raises StoreError."""
    path = directory.expanduser().absolute()
    store, users = STORES.get(path) or (DiskStore(path, budget, write_budget), 0)
    STORES[path] = store, users + 1
    return store


def close_store(store: DiskStore) -> None:
    _, users = STORES.pop(store.directory)
    if users > 1:
        STORES[store.directory] = store, users - 1
    else:
        store.close()
