"""What the engine asks of its optional parts: images, a tier on the disk, drafts, what watches memory.

The core knows them only as `Part`s, in one list (parts.py). They are asked in its order.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence as ListOf

import mlx.core as mx

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampler import SampledToken, SamplingRow
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.scheduling.wait import Wait
from mlxpaged.core.step import Row, Step

Tokens = dict[int, list[SampledToken]]
"""Sampled tokens by sequence id."""


class Need(enum.Enum):
    """What must become of the step in flight before a part can go on. COMMITTED: its tokens are known, and its text may
    be made while the device runs the next step. FINISHED: its text is made too."""

    NOTHING = enum.auto()
    COMMITTED = enum.auto()
    FINISHED = enum.auto()


class Room(enum.IntEnum):
    """Whether a sequence for which the KV pools are too small now may find room later: never, at some time, or in the
    next step."""

    NEVER = enum.auto()
    LATER = enum.auto()
    NEXT = enum.auto()


class Part:
    """An optional part of an engine, on the engine thread. It overrides what concerns it.

    is_busy: whether it does something now that a request waits for, so that an empty step is no sign of short memory.
    has_work: whether `before_step` has something to do, also if no request is left. room: what it does for sequences
    without room.
    """

    is_busy = False
    has_work = False

    @property
    def room(self) -> Room:
        return Room.NEVER

    # -- requests ----------------------------------------------------------------------------------------------------

    def admit(self, request: Request, sequence: Sequence) -> None:
        """A sequence is made of a request. If it cannot be queued, `forget` follows. Raises ValueError if the request
        asks for what it cannot have."""

    def wait_of(self, request: Request, sequence: Sequence) -> Wait | None:
        """What a sequence that all parts have admitted waits for before it is queued. The part calls
        `Scheduler.release` then."""
        return None

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended, perhaps one that does not concern the part."""

    # -- a step, in this order ---------------------------------------------------------------------------------------

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        """Called again until it returns NOTHING. Raises DeviceError."""
        return Need.NOTHING

    def after_schedule(self) -> None:
        """The next step is scheduled, and not launched."""

    def launched(self, step: Step, waited: float) -> None:
        """waited: seconds between the result of the last step and the launch of this one."""

    def sampled(self, step: InFlightStep, rows: ListOf[SamplingRow], tokens: mx.array | None) -> None:
        """The sampler of a step is launched. tokens: those of the rows, on the device; None if there are no rows."""

    def accept(self, rows: ListOf[Row], tokens: Tokens) -> Tokens:
        """Returns what is committed of a step's sampled tokens."""
        return tokens

    def timed(self, step: Step, seconds: float) -> None:
        """A step without moved blocks and without compilation has taken so long."""

    def committed(self, step: InFlightStep, tokens: Tokens) -> None:
        """The tokens of a step are committed. Raises DeviceError."""

    # -- between steps -----------------------------------------------------------------------------------------------

    def ran_short(self, step: Step) -> None:
        """An allocation failed in this step."""

    def ran_long(self, tokens: int) -> bool:
        """The device has ended a step of so many tokens because it took too long. Returns whether the next ones are
        shorter."""
        return False

    def rest(self, device_is_idle: bool) -> bool:
        """No step can run. device_is_idle: whether no other model has work. Returns whether something was done. Raises
        DeviceError."""
        return False

    def pause(self, waits: bool) -> float:
        """Seconds until `rest` may have something to do. waits: whether requests wait for memory."""
        return math.inf

    def give_back(self) -> None:
        """Another model needs memory: free what no running request needs. No step is in flight. Raises DeviceError."""

    def discard(self) -> None:
        """What was computed lately may be wrong: store none of it."""

    def give_way(self) -> bool:
        """Give up blocks, because no sequence can run and the pool cannot grow. Returns whether any were."""
        return False

    def before_shrink(self) -> None:
        """Blocks will be given back: hold none that no sequence has."""

    def evicted(self) -> None:
        """Blocks have left the prefix cache. Their bytes are as they were until this returns."""

    def clear(self) -> None:
        """The prefix cache is being emptied."""

    def keep(self) -> None:
        """The model is being unloaded: store what is to outlive it. No step is in flight."""

    def close(self) -> None:
        """Close files."""

    def stats(self) -> object | None:
        """A snapshot for `EngineStats.of`, of a type that no other part has."""
        return None
