"""The prefix cache's tier on a disk: loads the prefixes of new requests. disk_writer.py stores them.

A new request whose prefix goes on on the disk is held, if reading is expected to take less time than computing. The
store's thread reads, and between two steps a bounded number of bytes goes into blocks, which the prefix cache then has
as if they were computed. With recurrent layers, the prefix ends at a checkpoint, which is loaded after the blocks. What
is missing or damaged is computed. One prefix is loaded at a time, so a second request for it finds the blocks of the
first. Several ranks do all this with rank 0's tier (disk_share.py).
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mlxpaged.core.blocks.prefix_cache import CachedBlock, Origin
from mlxpaged.core.blocks.table_rows import UNUSED
from mlxpaged.core.engine.errors import RankLostError
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.core.engine.part import Need, Part
from mlxpaged.core.engine.request import Request
from mlxpaged.core.scheduling.queue import ORDER
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.scheduling.wait import Wait
from mlxpaged.parts.disk.disk_index import Name
from mlxpaged.parts.disk.disk_records import StoredBlock, StoreStats
from mlxpaged.parts.disk.disk_share import STATE, DiskShare
from mlxpaged.parts.disk.disk_store import DiskStore
from mlxpaged.parts.disk.disk_writer import DiskWriter, pieces
from mlxpaged.parts.ranks.rank_messages import StoredBlocks

logger = logging.getLogger(__name__)

PREFIX = Wait("prefix on the disk", brings_prefix=True)

PIECES_AHEAD = 2
"""Pieces that are read before they are needed."""

READ_SECONDS = 0.005
"""What each prefix that is read takes beside its bytes."""

STEP_SHARE = 0.15
"""Share of a step's time that may pass between two steps for blocks that go into the pool. At least one does. The
shorter one of the last two steps counts."""

PATIENCE_SECONDS = 5.0
"""A request waits so long for the next piece and for room in the pool, or as long as computing its prefix takes if that
is more. Then it is queued to be computed."""

PAUSE_SECONDS = 60.0
"""After the disk kept a request waiting, so long nothing is loaded."""

WAIT_SECONDS = 0.005
"""Time for which the engine thread waits for the disk if nothing else runs. Commands are later by at most this."""


class TierStats(NamedTuple):
    """store: of all models that share the directory. The rest is of this model."""

    directory: str = ""
    store: StoreStats = StoreStats()
    loading: int = 0
    blocks_stored_total: int = 0
    blocks_loaded_total: int = 0


NO_TIER = TierStats()


class Wanted(NamedTuple):
    """What is loaded together: of the last one of these records its blocks of each group, as far as the next token sees
    them, or the state after it. records: keys and tokens. No token sees blocks of those before the last one."""

    records: list[tuple[bytes, tuple[int, ...]]]
    parts: list[StoredBlock]


Piece = ListOf[Wanted]
"""What is read at once: blocks of several records, or a state."""


@dataclass(eq=False)
class Load:
    """A prefix that is being loaded. parent: the last record that is in the pool. held: references to blocks, so that
    they stay. patience: how long it waits for a piece and for room. checkpoint: reserved, while it is written. again:
    whether a block is damaged, and its sequence looks for a shorter prefix."""

    sequence: Sequence
    parent: CachedBlock | None
    patience: float
    held: list[int]
    checkpoint: int | None = None
    again: bool = False


class DiskTier(Part):
    """clock: seconds. The share's store is this model's until `close`."""

    def __init__(self, share: DiskShare, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        assert scheduler.prefix_cache is not None
        self.share, self._scheduler, self._clock = share, scheduler, clock
        self._cache, self._pool, self._groups = scheduler.prefix_cache, scheduler.pool, scheduler.blocks.groups
        self._checkpoints = scheduler.blocks.states.checkpoints
        self._writer = DiskWriter(share, scheduler, clock)
        self._load: Load | None = None
        self._reading: Iterator[bool] = iter(())  # puts the next portion of the load into the pool
        self._missing = 0  # blocks that the load waits for
        self._paused_until = -math.inf
        self._loaded = 0
        self._portion = 1  # records that go into the pool between two steps
        self._record_seconds = math.inf
        self._advanced_at, self._step_seconds = clock(), 0.0

    def discard(self) -> None:
        """A step has failed: what it and the steps after it computed is not valid."""
        self._writer.discard()
        self.end_load()

    def before_shrink(self) -> None:
        self.end_load()

    def evicted(self) -> None:
        self._writer.take_leaving()

    def keep(self) -> None:
        self.end_load()
        self._writer.store_all()

    def clear(self) -> None:
        """Delete what the store has of this model."""
        self.discard()
        self.share.clear_store()

    # -- loading -------------------------------------------------------------------------------------------------

    def wait_of(self, request: Request, sequence: Sequence) -> Wait | None:
        """The prefix of a new sequence is loaded if it goes on on the disk, and reading takes less time than
        computing."""
        may_load = sequence.fork_of is None and self._clock() >= self._paused_until
        return PREFIX if may_load and self._on_disk(sequence)[1] else None

    def _on_disk(self, sequence: Sequence) -> tuple[list[CachedBlock], list[Piece]]:
        """The leading records of a sequence in the pool, and what is to be loaded after them."""
        tokens, size = sequence.token_ids, self._pool.block_size
        self._cache.extend_keys(sequence.kv.keys, tokens, sequence.num_known_tokens, sequence.cache_seed)
        most = len(tokens) - 1 if sequence.logits_from is None else sequence.logits_from
        keys = sequence.kv.keys[: most // size]
        chain = self._cache.match(keys, tokens)
        usable, start = self._scheduler.blocks.usable(chain), len(chain)
        end = start
        everywhere = [group for group, window in enumerate(self._groups.windows) if window is None]
        while end < len(keys) and all(self.share.can_read(Name(keys[end], group)) for group in everywhere):
            end += 1
        while end > usable and not (self._has_windows(keys, chain, end) and self._has_state(keys, chain, end)):
            end -= 1
        wanted: list[Wanted] = []
        unseen: list[tuple[bytes, tuple[int, ...]]] = []
        for i in range(start, end):
            unseen.append((keys[i], tuple(tokens[i * size : (i + 1) * size])))
            seen = [group for group in range(len(self._groups)) if i >= self._groups.first_block(group, end * size)]
            if seen:
                parent, (key, content) = keys[i - 1] if i else b"", unseen[-1]
                parts = [StoredBlock(Name(key, group), parent, content) for group in seen]
                wanted.append(Wanted(unseen, parts))
                unseen = []
        found: list[Piece] = list(pieces(wanted, max(1, self._writer.piece_blocks // len(self._groups))))
        num_bytes = sum(len(each.parts) for each in wanted) * self.share.block_bytes
        if self.share.state_bytes and end > usable:
            last = StoredBlock(
                Name(keys[end - 1], STATE),
                keys[end - 2] if end > 1 else b"",
                tuple(tokens[(end - 1) * size : end * size]),
            )
            found.append([Wanted([(last.name.key, last.tokens)], [last])])
            num_bytes += self.share.state_bytes
        computing = self._scheduler.times.seconds_roughly(usable * size, (end - usable) * size)
        reading = READ_SECONDS + num_bytes / self.share.store.read_rate
        return chain[:end], [] if computing is not None and computing <= reading else found

    def _has_windows(self, keys: ListOf[bytes], chain: ListOf[CachedBlock], end: int) -> bool:
        """Whether a sequence can go on after `end` blocks: the windows of the next token are in the pool or stored."""
        return all(
            chain[i].blocks[group] != UNUSED if i < len(chain) else self.share.can_read(Name(keys[i], group))
            for group, window in enumerate(self._groups.windows)
            if window is not None
            for i in range(self._groups.first_block(group, end * self._pool.block_size), end)
        )

    def _has_state(self, keys: ListOf[bytes], chain: ListOf[CachedBlock], end: int) -> bool:
        is_cached = end <= len(chain) and chain[end - 1] in self._checkpoints
        return not self.share.state_bytes or is_cached or self.share.can_read(Name(keys[end - 1], STATE))

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        self.advance()
        return Need.NOTHING

    def advance(self) -> None:
        """Store what the last step has confirmed, and load a piece, or all that is read if nothing runs. Raises
        DeviceError."""
        last, self._step_seconds = self._step_seconds, self._clock() - self._advanced_at
        self._checkpoints.start_step()
        self._writer.store_taken()
        loaded = False
        while (self._load is not None or self._begin()) and not (loaded and self._scheduler.num_runnable):
            load = self._load
            assert load is not None
            self._portion = max(1, int(STEP_SHARE * min(last, self._step_seconds) / self._record_seconds))
            goes_on: bool | None = None  # it has ended
            try:
                if load.sequence.sequence_id in self._scheduler.held[PREFIX]:
                    goes_on = next(self._reading, None)
            except (DeviceError, RankLostError):  # the contents of all blocks are lost
                raise
            except Exception:
                logger.exception("a prefix could not be loaded; it is computed")
            if goes_on is None:
                self.end_load()
            elif not goes_on:
                break
            loaded = loaded or goes_on is True
        self._advanced_at = self._clock()

    def after_schedule(self) -> None:
        """Take the blocks that the step overwrites. Ask for the room that a load needs."""
        self.evicted()
        if self._missing:
            self._scheduler.blocks.size.ask(self._missing)
        self._missing = 0

    def _begin(self) -> bool:
        """Begin the next load. Queue the sequences that need none, which is so if another load was for them too."""
        for sequence in sorted(self._scheduler.held[PREFIX].values(), key=ORDER):
            chain, left = self._on_disk(sequence) if self._clock() >= self._paused_until else ([], [])
            while left and not self.share.look_up(contents(itertools.chain(*left))):
                chain, left = self._on_disk(sequence)
            if not left:
                self._scheduler.release(sequence.sequence_id)
                continue
            size = self._pool.block_size
            num_records = sum(len(each.records) for piece in left for each in piece)
            seconds = self._scheduler.times.seconds_roughly(len(chain) * size, num_records * size) or 0.0
            held = [block for record in chain for block in record.blocks if block != UNUSED]
            for block in held:
                self._pool.share(block)
            parent = chain[-1] if chain else None
            self._load = Load(sequence, parent, max(PATIENCE_SECONDS, seconds), held)
            self._reading = self._portions(self._load, deque(left))
            return True
        return False

    def _portions(self, load: Load, left: deque[Piece]) -> Iterator[bool]:
        """Read the pieces, and put them into the pool in portions. Yields True after each portion, and False while it
        waits for the disk or for room."""
        for piece in itertools.islice(left, PIECES_AHEAD):
            self.share.read(contents(piece))
        while left:
            deadline = self._clock() + load.patience
            while (found := self.share.next_read(0 if self._scheduler.num_runnable else WAIT_SECONDS)) is None:
                if self._clock() >= deadline:
                    logger.warning("the disk is too slow: a prefix of %s is computed", load.sequence.label)
                    self._paused_until = self._clock() + PAUSE_SECONDS
                    return
                yield False
            piece, flags = left.popleft(), iter(found)
            if len(left) >= PIECES_AHEAD:
                self.share.read(contents(left[PIECES_AHEAD - 1]))
            whole = list(itertools.takewhile(lambda each: all(next(flags) for _ in each.parts), piece))  # noqa: B023
            is_damaged = load.again = len(whole) < len(piece)
            if whole and whole[0].parts[0].name.part == STATE:
                whole.clear()
                yield from self._put_state(load)
            while whole:
                count = self._portion if self._scheduler.num_runnable else len(whole)
                missing = sum(len(each.parts) for each in whole[:count]) - self._scheduler.room_beside(load.sequence)
                if missing <= 0:
                    self._put(load, whole[:count])
                    del whole[:count]
                    yield True
                elif self._can_wait and self._clock() < deadline:
                    self._missing = missing
                    yield False
                else:
                    load.again = False
                    return
            if is_damaged:
                return

    @property
    def _can_wait(self) -> bool:
        """Whether there may be room later."""
        return len(self._scheduler.running) > 0 or self._scheduler.blocks.size.can_grow

    def _put_state(self, load: Load) -> Iterator[bool]:
        """Make a checkpoint of the last record that was loaded."""
        record, load.checkpoint = load.parent, self._checkpoints.reserve()
        self.evicted()  # what was replaced for it
        if load.checkpoint is None:
            return
        for _ in self.share.put_state(load.checkpoint):
            yield True
        if record is not None and record in self._cache:
            self._checkpoints.attach(load.checkpoint, record)
            load.checkpoint, record.is_start = None, True
            self._loaded += 1

    def _put(self, load: Load, found: ListOf[Wanted]) -> None:
        """Put records into the pool, and let the prefix cache find them."""
        started = self._clock()
        blocks = self._pool.allocate(sum(len(each.parts) for each in found))
        load.held += blocks
        self.evicted()  # what was evicted for them
        self.share.put(blocks)
        new, origin = iter(blocks), Origin(load.sequence.cache_seed, load.sequence.client)
        for records, parts in found:
            of_groups = [UNUSED] * len(self._groups)
            for key, tokens in records[:-1]:
                load.parent = self._cache.insert(key, load.parent, tokens, of_groups, origin)
            for part in parts:
                of_groups[part.name.part] = next(new)
            load.parent = self._cache.insert(parts[0].name.key, load.parent, parts[0].tokens, of_groups, origin)
            load.parent.is_valuable = True
        self._loaded += len(blocks)
        self._record_seconds = max(1e-6, (self._clock() - started) / len(found))

    def end_load(self) -> None:
        """Let the sequence of the load go on with what was loaded, or look for a shorter prefix."""
        load, self._load = self._load, None
        if load is None:
            return
        if load.sequence.sequence_id in self._scheduler.held[PREFIX] and not load.again:
            self._scheduler.release(load.sequence.sequence_id)
        self._pool.release(reversed(load.held))
        if load.checkpoint is not None:
            self._checkpoints.release(load.checkpoint)
        if self.share.has_read:
            self.share.drop_reads()

    def give_way(self) -> bool:
        """End the load, whose blocks other sequences need."""
        had_load = self._load is not None
        self.end_load()
        return had_load

    # -- the rest ------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return self._load is not None or self.share.has_taken

    def stats(self) -> TierStats:
        share = self.share
        counts = share.num_stored, self._loaded
        return TierStats(str(share.store.directory), share.stats(), len(self._scheduler.held[PREFIX]), *counts)

    def close(self) -> None:
        close_store(self.share.store)


def contents(wanted: Iterable[Wanted]) -> StoredBlocks:
    return StoredBlocks(part for each in wanted for part in each.parts)


STORES: dict[Path, tuple[DiskStore, int]] = {}
"""The stores of this process, and how many models use each. Belongs to the engine thread."""


def open_store(directory: Path, budget: int, write_budget: int) -> DiskStore:
    """The store of a directory, which all models of the process share. Raises StoreError."""
    path = directory.absolute()
    store, users = STORES.get(path) or (DiskStore(path, budget, write_budget), 0)
    STORES[path] = store, users + 1
    return store


def close_store(store: DiskStore) -> None:
    _, users = STORES.pop(store.directory)
    if users > 1:
        STORES[store.directory] = store, users - 1
    else:
        store.close()
