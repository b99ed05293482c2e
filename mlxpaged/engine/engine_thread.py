"""The only thread that uses MLX: it loads and unloads models, runs their commands, and lets them take turns."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from mlxpaged.awake import AWAKE, Hold, StayAwake
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.stall import Stall, StepSize, Work
from mlxpaged.core.engine.status import EngineStats
from mlxpaged.core.engine.swap_space import SwapSpaceError
from mlxpaged.core.engine.worker import REST_SECONDS, DeviceClock, Worker
from mlxpaged.engine import commands
from mlxpaged.engine.commands import Command, Question
from mlxpaged.engine.garbage import free_garbage, freezes
from mlxpaged.engine.info import EmbeddingInfo, EngineInfo
from mlxpaged.engine.load_journal import LoadJournal
from mlxpaged.engine_config import EngineConfig
from mlxpaged.library_errors import public_reason
from mlxpaged.models.errors import InsufficientMemoryError, ModelNotFoundError, UnsupportedModelError
from mlxpaged.parts.embeddings.embedding_core import EmbeddingCore
from mlxpaged.parts.memory.fitting import CACHE_LIMIT, limit_freed_buffers
from mlxpaged.parts.memory.wired_memory import IdleWiring
from mlxpaged.process_memory import is_out_of_memory
from mlxpaged.progress import Progress, Report

logger = logging.getLogger(__name__)

EXPECTED = (ModelNotFoundError, UnsupportedModelError, MemoryError, SwapSpaceError)
"""The errors of loading a model that say all in their message."""


UNLOADED = "the model was unloaded"


class LoadCancelled(BaseException):
    """The model that is being loaded is not wanted any more. No library catches it, as it would an Exception."""


@dataclass(frozen=True)
class Failure:
    """lacks_memory: whether the model could be loaded if more memory were free. missing_bytes: at least so much more;
    0 if it is not known."""

    reason: str
    lacks_memory: bool = False
    missing_bytes: int = 0

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        reason = str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {public_reason(error)}"
        missing = error.missing_bytes if isinstance(error, InsufficientMemoryError) else 0
        return cls(reason, is_out_of_memory(error), missing)


@dataclass(frozen=True)
class Callbacks:
    """Called on the engine thread. on_progress: while the model loads and kernels are compiled. on_step: once per step,
    with all its outputs. on_end: last, with the failure that ended the model, or None if it was unloaded. on_restart:
    the model is loaded anew, for the reason given; its requests go on when it is ready again."""

    on_progress: Report
    on_ready: Callable[[EngineInfo | EmbeddingInfo, EngineStats], None]
    on_step: Callable[[list[RequestOutput], EngineStats], None]
    on_end: Callable[[Failure | None], None]
    on_restart: Callable[[str], None] = lambda reason: None


@dataclass(eq=False)
class ModelSlot:
    """One model on the engine thread. load: makes its core, and reports how far it is; other models take turns in each
    report. Only the engine thread uses the other fields.

    freezes: the number of times objects were frozen before the load.

    virtual_time: seconds of steps, divided by the model's weight. The model with the least of it takes the next turn
    (start-time fair queueing, Goyal et al. 1996).
    """

    config: EngineConfig
    load: Callable[[Report], Worker]
    callbacks: Callbacks
    core: Worker | None = None
    is_unwanted: bool = False
    has_ended: bool = False
    outputs: list[RequestOutput] = field(default_factory=list)
    freezes: int = 0
    virtual_time: float = 0.0
    had_work: bool = False

    @property
    def name(self) -> str:
        return self.config.served_model_name or self.config.model


class Activity(NamedTuple):
    """What the engine thread does since a time on its clock. slot: the model that it does this for."""

    work: Work
    slot: ModelSlot | None
    since: float

    def size(self) -> StepSize | None:
        """The size of a step. Any thread may ask."""
        core = None if self.slot is None else self.slot.core
        if core is None or self.work in (Work.COMMANDS, Work.LOAD):
            return None
        return core.embedding_size() if self.work is Work.EMBEDDINGS else core.step_size()


class Guard:
    """Ends a model if its engine fails in this context. The others go on. A generator would take three times as long,
    in every step."""

    def __init__(self, slot: ModelSlot, end: Callable[[ModelSlot, BaseException], None]) -> None:
        self._slot = slot
        self._end = end

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is not None:
            logger.critical("the engine of a model failed", exc_info=error)
            self._end(self._slot, error)
        return True


class EngineHost(Protocol):
    """Where engines run: an EngineThread, or the processes of several ranks. Any thread may call its methods, which are
    those of EngineThread."""

    @property
    def ident(self) -> int | None: ...
    @property
    def stall(self) -> Stall | None: ...
    def start(self) -> None: ...
    def load(self, slot: ModelSlot) -> None: ...
    def send(self, slot: ModelSlot, command: Command) -> None: ...
    def submit(self, slot: ModelSlot, requests: Sequence[Request]) -> None: ...
    def ask(self, slot: ModelSlot, question: Question, reply: Future[Any]) -> None: ...
    def unload(self, slot: ModelSlot) -> None: ...
    def stop(self, timeout: float) -> bool: ...


class EngineThread(threading.Thread):
    """Runs commands between steps, and steps while there is work. Without work it waits for commands, and looks about
    once a second whether it is to give back memory."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, loads: LoadJournal | None = None, awake: StayAwake = AWAKE
    ) -> None:
        """clock: seconds. loads: notes what is being loaded; None if nothing remembers it. awake: is held while a model
        has work or is loaded."""
        # A daemon: a step or a download must not delay an interpreter that quits.
        super().__init__(name="mlxpaged-engine", daemon=True)
        self._clock = clock
        self._loads = loads
        self.commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loaded: tuple[tuple[ModelSlot, Worker], ...] = ()
        self._to_load: deque[ModelSlot] = deque()
        self._loading: ModelSlot | None = None
        self._virtual_time = 0.0  # of the model that took the last turn, at its start
        self._last: ModelSlot | None = None  # which took the last turn
        self._device = DeviceClock()
        self._wiring, self._awake = IdleWiring(clock), Hold(awake, clock)
        self._garbage: list[ModelSlot] = []  # models that have ended whose memory is not free yet
        self._ending = False
        self.activity: Activity | None = None  # None while it waits for commands
        self._stalled: tuple[Activity, Stall] | None = None

    # -- on any thread -----------------------------------------------------------------------------------------------

    def load(self, slot: ModelSlot) -> None:
        """Load a model after those that were asked for before."""
        self.commands.put(lambda: self._to_load.append(slot))

    def send(self, slot: ModelSlot, command: Command) -> None:
        """Run a command for a model. It has no effect if the model is not loaded."""
        self.commands.put(lambda: self._run_command(slot, command))

    def submit(self, slot: ModelSlot, requests: Sequence[Request]) -> None:
        self.send(slot, partial(commands.submit, requests=requests))

    def ask(self, slot: ModelSlot, question: Question, reply: Future[Any]) -> None:
        """Like `send`. The answer, or the exception, goes to `reply`."""
        self.send(slot, partial(answer, question=question, reply=reply))

    def unload(self, slot: ModelSlot) -> None:
        """Free what a model holds, also if it is still loading. Its running requests end with an error."""
        self.commands.put(lambda: self._unload(slot))

    def end(self) -> None:
        """End the thread. Running requests end with an error."""
        self.commands.put(self._end)

    def stop(self, timeout: float) -> bool:
        """`end`, and wait. Returns False if the thread does not end within `timeout` seconds."""
        self.end()
        self.join(timeout)
        if self.is_alive():
            doing = "is busy" if self._loading is None else "loads a model"
            logger.warning("the engine thread still %s after %.0f s; not waiting for it", doing, timeout)
        return not self.is_alive()

    def note_stall(self, activity: Activity, stall: Stall) -> None:
        """The activity has not ended in time."""
        self._stalled = activity, stall

    @property
    def stall(self) -> Stall | None:
        """None if no activity was stalled, or it has ended after all."""
        stalled = self._stalled
        return stalled[1] if stalled is not None and stalled[0] is self.activity else None

    # -- on this thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._ending:
            try:
                self._take_turn(self._pause())
                self._free_garbage()
                if self._to_load and not self._ending:
                    self._load(self._to_load.popleft())
            except BaseException as error:  # of no model in particular; without an end, requests would wait for ever
                logger.critical("the engine thread failed", exc_info=error)
                self._end_slots(error)
        self._end_slots(why="the server was shut down")
        self._awake.end()
        self.activity = None

    def _begin(self, work: Work, slot: ModelSlot | None = None) -> None:
        self.activity = Activity(work, slot, self._clock())

    def _pause(self) -> float:
        """Seconds for which nothing is to be done if no command arrives."""
        if self._to_load or self._garbage:
            return 0.0
        pauses = [core.pause() for _, core in self._loaded]
        return min([REST_SECONDS, *pauses, self._awake.pause(), *([self._wiring.pause()] if pauses else [])])

    def _take_turn(self, pause: float) -> None:
        """Run the commands, waiting up to `pause` seconds for the first one, and a step of one model."""
        while (pause or not self.commands.empty()) and not self._ending:
            self.activity = None
            try:
                command = self.commands.get(timeout=pause)
            except queue.Empty:
                break
            finally:
                self._begin(Work.COMMANDS)
            pause = 0.0
            command()
            if self.commands.empty():
                self._deliver_outputs()
        for slot, core in self._loaded:
            with self._guarded(slot):
                slot.outputs += core.expire()
        self._deliver_outputs()  # before the step, so that clients do not wait for it
        if not self._ending:
            self._step()

    def _step(self) -> None:
        """Run a step of the model whose turn it is. The idle ones give back memory."""
        working, idle = [], []
        for slot, core in self._loaded:
            has_work = core.has_work() or core.embeds()
            if has_work:
                if not slot.had_work:  # an idle time gives no claim to later turns
                    slot.virtual_time = max(slot.virtual_time, self._virtual_time)
                working.append(slot)
            else:
                idle.append((slot, core))
            slot.had_work = has_work
        if working:
            self._wiring.note_use()
            self._awake.note_use()
        elif self._loading is None:
            self._awake.rest()
        for slot, core in idle:
            with self._guarded(slot):
                if core.rest(device_is_idle=not working):
                    self._wiring.note_use()  # pools have changed, and may go on to
                    self._deliver(slot)
        if idle and not working and self._loading is None:
            self._wiring.rest()
        alone = len(working) == 1
        for slot in working if alone else sorted(working, key=self._order):
            self._virtual_time, started = slot.virtual_time, self._clock()
            with self._guarded(slot):
                self._step_of(slot, alone)
            if slot.core is not None:
                slot.virtual_time += (self._clock() - started) / slot.core.weight
                if slot.core.waits_for_memory:
                    continue  # it has run nothing: the next one takes the turn too
            return

    def _order(self, slot: ModelSlot) -> tuple[bool, float]:
        """Streams must not wait for two steps of embeddings in a row."""
        assert slot.core is not None
        return slot is self._last and not slot.core.generates, slot.virtual_time

    def _step_of(self, slot: ModelSlot, alone: bool) -> None:
        """Run a step. The step of another model that is in flight is finished after the launch of this one, so that the
        device always has work. alone: whether no other model has work."""
        last, self._last = self._last, slot
        core = slot.core
        assert core is not None
        if core.has_work():
            self._begin(Work.STEP, slot)
            slot.outputs += core.step()
            self._deliver(slot)
            if self._loading is not None:  # which measures times and memory
                self._finish_step(slot)
        if last is not None and last is not slot:
            self._finish_step(last)
        if core.embedder is not None and core.embeds():
            # An embedding waits for the device anyway, and its time must not count as that of the step in flight.
            self._finish_step(slot)
            self._begin(Work.EMBEDDINGS, slot)
            core.embedder.step(alone=alone and not core.has_work())
            self._device.note_read(self._clock())
            self._deliver(slot)

    def _finish_step(self, slot: ModelSlot) -> None:
        """Process the step of a model that is in flight, if there is one."""
        if slot.core is not None:
            self._begin(Work.STEP, slot)
            with self._guarded(slot):
                slot.outputs += slot.core.finish_step()
            if slot.outputs and slot.core is not None:
                self._deliver(slot)

    def _run_command(self, slot: ModelSlot, command: Command) -> None:
        if slot.core is not None:
            with self._guarded(slot):
                slot.outputs += command(slot.core)

    def _deliver_outputs(self) -> None:
        for slot, _ in self._loaded:
            if slot.outputs:
                with self._guarded(slot):
                    self._deliver(slot)

    def _deliver(self, slot: ModelSlot) -> None:
        assert slot.core is not None
        outputs, slot.outputs = slot.outputs, []
        slot.callbacks.on_step(outputs, slot.core.stats())

    def _guarded(self, slot: ModelSlot) -> Guard:
        return Guard(slot, self._end_slot)

    # -- loading and unloading ---------------------------------------------------------------------------------------

    def _load(self, slot: ModelSlot) -> None:
        def report(progress: Progress) -> None:
            slot.callbacks.on_progress(progress)
            self._take_turn(0.0)
            self._begin(Work.LOAD, slot)
            self._free_garbage()
            if slot.is_unwanted or self._ending:
                raise LoadCancelled

        self._wiring.note_use()
        self._awake.note_use()
        self._loading, slot.freezes = slot, freezes()
        self._fit_limits()
        self._begin(Work.LOAD, slot)
        try:
            with contextlib.nullcontext() if self._loads is None else self._loads.loading(slot.config):
                slot.core = slot.load(report)
        except LoadCancelled:
            self._end_slot(slot)
        except EXPECTED as error:
            logger.debug("a model could not be loaded", exc_info=error)  # the caller shows the message
            self._end_slot(slot, error)
        except BaseException as error:
            logger.critical("a model could not be loaded", exc_info=error)
            self._end_slot(slot, error)
        else:
            slot.core.join(self._device)
            self._loaded += ((slot, slot.core),)
            slot.callbacks.on_ready(info_of(slot.core, slot.config), slot.core.stats())
        finally:
            self._loading = None
            self._wiring.note_use()
        self._fit_limits()

    def _unload(self, slot: ModelSlot) -> None:
        slot.is_unwanted = True
        if slot is not self._loading:  # otherwise the load ends at its next report
            self._end_slot(slot)

    def _free_garbage(self) -> None:
        """Also between two parts of a load: the model may need what another one held."""
        if self._garbage:
            since = min(slot.freezes for slot in self._garbage)
            self._garbage = []
            self._wiring.note_use()
            free_garbage(since)
            self._fit_limits()

    def _fit_limits(self) -> None:
        """Limit freed buffers to what the loaded models need."""
        most = max((core.step_bytes for _, core in self._loaded), default=CACHE_LIMIT)
        limit_freed_buffers(most, loading=self._loading is not None)

    def _end(self) -> None:
        self._ending = True

    def _end_slots(self, error: BaseException | None = None, why: str = UNLOADED) -> None:
        for slot in [*(slot for slot, _ in self._loaded), *self._to_load]:
            self._end_slot(slot, error, why)

    def _end_slot(self, slot: ModelSlot, error: BaseException | None = None, why: str = UNLOADED) -> None:
        """End a model and its requests. error: the reason if it failed. why: otherwise the reason."""
        if slot.has_ended:
            return
        slot.has_ended = True
        self._loaded = tuple(each for each in self._loaded if each[0] is not slot)
        if slot in self._to_load:
            self._to_load.remove(slot)
        else:
            self._garbage.append(slot)
        core, slot.core = slot.core, None
        if core is not None:
            try:
                with contextlib.closing(core):
                    if error is None:
                        slot.callbacks.on_step(slot.outputs + core.abort_all(why), core.stats())
                        logger.info("engine stopped: %s; KV blocks: %s", why, core.stats().scheduler.blocks)
                        core.keep_prefixes()
            except Exception:  # the state of a failed engine is not known; its requests end below
                logger.exception("a model did not end cleanly")
        # Not the error itself: its traceback refers to the model's weights.
        slot.callbacks.on_end(None if error is None else Failure.of(error))


def answer(core: Worker, question: Question, reply: Future[Any]) -> list[RequestOutput]:
    """A command that replies to a question. Its caller handles what the question raises."""
    is_awaited = reply.set_running_or_notify_cancel()
    try:
        result, outputs = question(core)
    except Exception as error:
        if is_awaited:
            reply.set_exception(error)
        return []
    if is_awaited:
        reply.set_result(result)
    return outputs


def info_of(model: Worker, config: EngineConfig) -> EngineInfo | EmbeddingInfo:
    """The facts about a loaded model. They are no method of it: the API reads them and imports no engine."""
    if isinstance(model, EngineCore):
        return EngineInfo(model, config)
    assert isinstance(model, EmbeddingCore)
    return EmbeddingInfo(model)
