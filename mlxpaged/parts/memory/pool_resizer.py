"""Resizes the KV pools between two steps, one layer after the other.

They grow while the scheduler asks for more blocks, and shrink while the engine is idle or the system is short of
memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxpaged.core.blocks.pool_size import FULL
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.part import Need, Part, Room
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.step import Step
from mlxpaged.parts.memory.memory_pressure import MemoryPressure
from mlxpaged.parts.memory.memory_watch import POLL_SECONDS, MemoryWatch

logger = logging.getLogger(__name__)

COPY_BYTES = 64 * 2**20
"""Bytes of pools that are made anew between two steps: as many as a move of swapped blocks copies at once. A layer's
pool is copied whole, also if it is larger."""

RETRY_SECONDS = 1.0
"""Seconds after a growth that failed until the next one is tried. They double with each failure."""

MAX_RETRY_SECONDS = 16.0

LEAST_SHARE = 1 / 8
"""Least share of its blocks that the pool gives back at once, but for the last ones: a smaller pool is a copy of every
layer. While memory is critical, the use of a busy server falls by a few blocks a second."""

PRESSURE_SECONDS = 5.0
"""While the system is short of memory, the pool is halved as often as this. The system's level follows late."""


class PoolResizer(Part):
    """Belongs to the engine thread. While the pools grow, some layers have more blocks than the scheduler uses. It gets
    the new blocks once all layers have them. When they shrink, it loses the blocks first.

    bytes_per_block: of all layers. step_bytes: what a step needs. clock: seconds. pressure: what the system says.
    parts: are told before and after blocks are evicted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        bytes_per_block: int,
        step_bytes: int,
        clock: Callable[[], float],
        pressure: Callable[[], MemoryPressure],
        parts: Sequence[Part] = (),
    ) -> None:
        self._scheduler = scheduler
        self._size = scheduler.blocks.size
        self._runner = runner
        self._bytes_per_block = bytes_per_block
        self._step_bytes = step_bytes
        self._clock = clock
        self._parts = parts
        self._watch = MemoryWatch(clock, runner.clear_cache, pressure)
        self._least = self._size.num_blocks  # it never shrinks below its size at the start
        self._target = self._wanted = self._size.num_blocks
        self._remaining: list[int] = []  # indices of the pools that do not have the target's size yet
        self._shrink_to: int | None = None  # blocks, once no step is in flight
        self._retry_at = self._yielded_at = -math.inf
        self._retry_seconds = RETRY_SECONDS

    @property
    def is_resizing(self) -> bool:
        return bool(self._remaining) or self._target != self._size.num_blocks

    @property
    def room(self) -> Room:
        if self.is_due:
            return Room.NEXT
        return Room.LATER if self._size.num_blocks < self._size.limit else Room.NEVER

    @property
    def is_due(self) -> bool:
        """Whether `advance` would resize a pool."""
        return self.is_resizing or self._size.wanted > self._size.num_blocks

    @property
    def can_shrink(self) -> bool:
        """Whether an idle engine has memory to give back: blocks, or freed buffers that MLX keeps."""
        return self._size.num_blocks > self._least or mx.get_cache_memory() > 0

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        """Resize a part of the pools if they are to grow or shrink, after the step in flight."""
        if self._shrink_to is None:
            self._shrink_to = self.poll(is_idle=False)
        if self._shrink_to is None and not self.is_due:
            return Need.NOTHING
        if in_flight is not None:
            return Need.FINISHED
        self._resize()
        return Need.NOTHING

    def rest(self, device_is_idle: bool) -> bool:
        self._shrink_to = self.poll(is_idle=True, device_is_idle=device_is_idle)
        if self._shrink_to is None and not self.is_due:
            return False
        self._resize()
        return True

    def _resize(self) -> None:
        """Do a part of what is due. If a shrinking raises DeviceError, `advance` follows at the next step."""
        num_blocks, self._shrink_to = self._shrink_to, None
        if num_blocks is not None:
            self.shrink(num_blocks)
        if self.is_due:
            self.advance()

    def pause(self, waits: bool) -> float:
        if self.is_resizing:
            return 0.0
        return POLL_SECONDS if waits or self.can_shrink else math.inf

    # -- growing -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Resize the next pools, up to COPY_BYTES. No step may be in flight."""
        if not self.is_resizing:
            self._begin_growth()
        copied = 0
        try:
            while self._remaining and copied < COPY_BYTES:
                index = self._remaining[-1]
                pool = self._runner.pools[index]
                if (needed := self._target * pool.layout.bytes_per_block) > (free := self._runner.free_memory()):
                    raise MemoryError(f"a pool of {needed / 1e6:.1f} MB does not fit: {free / 1e6:.1f} MB are free")
                self._runner.resize_pool(index, self._target)
                copied += pool.nbytes
                self._remaining.pop()
        except (MemoryError, RuntimeError) as error:  # MLX has no type of its own for a failed allocation
            self._fail(error)
        self._runner.clear_cache()  # the old pools: MLX would keep them for later allocations of their size
        if not self._remaining and self._target > self._size.num_blocks:
            self._size.grow(self._target)
            if self._target < self._wanted:  # a growth by a few blocks copies as much as one by many
                self._wait()
            else:
                self._retry_seconds = RETRY_SECONDS
            logger.info("the KV pool has grown to %d blocks, %.1f MB", self._target, self._runner.kv_cache_bytes / 1e6)

    def _begin_growth(self) -> None:
        """Choose the new size: what the scheduler wants, or as much of it as the free memory allows."""
        self._runner.clear_cache()  # what MLX keeps of freed buffers is not free for the system
        present, free = self._size.num_blocks, self._runner.free_memory()
        target = self._wanted = self._size.wanted
        if self._bytes_per_block:
            # A step and the copy of a layer never run at the same time, so they need the same memory.
            copied = max((pool.nbytes for pool in self._runner.pools), default=0)
            target = min(target, present + (free - max(self._step_bytes, copied)) // self._bytes_per_block)
        if target > present:
            self._resize_to(target)
        else:
            self._refuse(f"only {free / 1e6:.1f} MB are free")

    def _resize_to(self, num_blocks: int) -> None:
        self._target = num_blocks
        pools = self._runner.pools
        self._remaining = [i for i in reversed(range(len(pools))) if pools[i].num_blocks != num_blocks]

    def _fail(self, error: Exception) -> None:
        """Give back what has grown already. If even that fails, these layers keep blocks that are not used."""
        if self._target > self._size.num_blocks:
            self._resize_to(self._size.num_blocks)
            self._refuse(str(error))
        else:
            self._remaining = []

    def _refuse(self, reason: str) -> None:
        logger.warning("the KV pool stays at %d blocks: %s", self._size.num_blocks, reason)
        self._wait()

    def _wait(self) -> None:
        """Try no growth for some time."""
        self._size.allow_growth(False)
        self._retry_at = self._clock() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)

    def ran_short(self, step: Step) -> None:
        """The pool shrinks before the next step as if memory were critical, and grows later."""
        self._watch.note_failure()
        self._wait()

    # -- shrinking -----------------------------------------------------------------------------------------------

    def poll(self, is_idle: bool, device_is_idle: bool = False) -> int | None:
        """Read the system's memory pressure if it is time, and decide whether the pool may grow. Returns the number of
        blocks to shrink to, if any: half of them for each IDLE_SECONDS without a request, so that what the prefix cache
        used last is kept longest."""
        now, last = self._clock(), self._watch.level
        if not is_idle:
            self._watch.note_use()
        if not self._watch.poll(device_is_idle):
            return None
        level = self._watch.level
        if level is not last:
            message = "the system's memory pressure is %s; the KV pool has %d blocks, and grows only while it is normal"
            logger.warning(message, level.name.lower(), self._size.num_blocks)
        if level is not MemoryPressure.NORMAL:
            self._size.allow_growth(False)
            self._retry_at = max(self._retry_at, now + RETRY_SECONDS)
            if self._target > self._size.num_blocks:  # give back what has grown already
                self._resize_to(self._size.num_blocks)
        elif now >= self._retry_at:
            self._size.allow_growth(True)
        present = self._size.num_blocks
        keep = self._size_to_keep(level, now, self._watch.is_idle)
        enough = keep == self._least or present - keep >= LEAST_SHARE * present
        return keep if keep < present and enough else None

    def _size_to_keep(self, level: MemoryPressure, now: float, rests: bool) -> int:
        keep = present = self._size.num_blocks
        if level is MemoryPressure.CRITICAL:
            keep = 0
        elif rests or (level is MemoryPressure.WARNING and now >= self._yielded_at + PRESSURE_SECONDS):
            keep = present // 2
        running = sum(self._scheduler.blocks.room_left_for(sequence) for sequence in self._scheduler.running)
        used = self._scheduler.pool.usage().used + running
        return min(present, max(keep, self._least, math.ceil(used / FULL)))

    def give_back(self) -> None:
        """Give back at once what no running sequence needs, for another model, and end a growth. No step may be in
        flight. Raises as `shrink` does."""
        keep = self._size_to_keep(MemoryPressure.CRITICAL, self._clock(), rests=True)
        if keep < self._size.num_blocks:
            self.shrink(keep)
        elif self._target > self._size.num_blocks:  # what has grown already
            self._resize_to(self._size.num_blocks)
        while self.is_resizing:
            self.advance()

    def shrink(self, num_blocks: int) -> None:
        """Give back blocks: evict cached ones, and move those that are kept down. `advance` frees the memory. No step
        may be in flight. Raises DeviceError if blocks cannot be copied: then no sequence has other blocks."""
        for part in self._parts:
            part.before_shrink()
        moves = self._scheduler.pool.moves_to(num_blocks)
        for part in self._parts:
            part.evicted()
        self._runner.copy_blocks(moves)
        self._scheduler.shrink(num_blocks, moves)
        self._yielded_at = self._clock()
        self._watch.note_use()
        self._resize_to(num_blocks)
        logger.info("the KV pool shrinks to %d blocks; %d were moved", num_blocks, len(moves))
