"""An engine whose model runs on several ranks: starts their processes, passes messages on, and notices failures."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from mlxpaged.cluster.hosts import Hosts
from mlxpaged.cluster.messages import (
    BEAT_SECONDS,
    LOST_SECONDS,
    Ask,
    Beat,
    Failed,
    Hello,
    Progressed,
    Ready,
    Replied,
    Run,
    Start,
    Stepped,
    Submit,
    Versions,
    versions,
)
from mlxpaged.cluster.processes import Processes
from mlxpaged.cluster.unfinished import UnfinishedRequests
from mlxpaged.core.engine.deadlines import end_if_late
from mlxpaged.core.engine.request import Request, RequestOutput, failed
from mlxpaged.core.engine.status import EngineStats
from mlxpaged.daemon_thread import in_daemon_thread
from mlxpaged.engine.commands import Command, Question, abort, abort_all, cancel, keep_prefixes
from mlxpaged.engine.engine_thread import Failure, ModelSlot
from mlxpaged.engine.info import Cluster, EngineInfo
from mlxpaged.engine.watchdog import StallLimits
from mlxpaged.models.loader import read_tokenizer
from mlxpaged.models.text.tokenizer import Tokenizer
from mlxpaged.parts.disk.disk_writer import END_SECONDS
from mlxpaged.parts.grammar.grammar import Grammars

logger = logging.getLogger(__name__)

JOIN_SECONDS = 120.0
"""Seconds in which all ranks must have started and said Hello. Python and MLX take a few seconds, ssh some more."""

TICK_SECONDS = 0.5

BLAME_SECONDS = 1.0
"""Seconds to wait for a better explanation of a failure: the neighbours of a dead rank often notice first."""

RESTARTS = 3
"""So many failures in a row before the model is ready again are too many."""


KEEP_SECONDS = END_SECONDS + 1.0
"""Time that the ranks have to store what is to outlive them."""


class FromRanks(partial[None]):
    """A task that a rank's message or its end has left."""


class Blame(NamedTuple):
    """A reason for a failure. weight: the heaviest one is believed, and of these the first."""

    weight: int
    failure: Failure


def seeded(request: Request) -> Request:
    """What is computed again must be sampled as before."""
    if request.params.seed is not None:
        return request
    return dataclasses.replace(request, params=dataclasses.replace(request.params, seed=secrets.randbits(64)))


def ends_requests(message: Run | Ask) -> bool:
    """Whether rank 0 is to end requests, which it must have then."""
    function = message.command if isinstance(message, Run) else message.question
    return isinstance(function, partial) and function.func in (abort, abort_all, cancel)


def differences(theirs: Versions, ours: Versions) -> tuple[list[str], list[str]]:
    """The versions that differ, of both sides."""
    only_theirs, only_ours = set(theirs) - set(ours), set(ours) - set(theirs)
    return [" ".join(each) for each in only_theirs], [" ".join(each) for each in only_ours]


class ClusterEngine(threading.Thread):
    """An EngineHost for one model. Its own thread does everything; other threads leave it tasks.

    restarts: whether the ranks are started anew after a failure. Then the requests go on: their answers are computed
    again from their prompts and the tokens so far.
    """

    def __init__(self, hosts: Hosts, stall_limits: StallLimits, restarts: bool, log_level: str) -> None:
        super().__init__(name="mlxpaged-cluster", daemon=True)
        self._hosts = hosts
        self._stall_limits = stall_limits
        self._restarts = restarts
        self._log_level = log_level
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._postponed: deque[Callable[[], None]] = deque()  # while the ranks were storing
        self._ending = False
        self._slot: ModelSlot | None = None
        self._processes: Processes | None = None
        self._tokenizer: Future[Tokenizer] | None = None
        self._hellos: dict[int, Hello] = {}
        self._join_by = 0.0
        self._beat_at = 0.0
        self._is_ready = False
        self._was_ready = False  # since the load
        self._blames: list[Blame] = []
        self._decide_at = 0.0
        self._num_failures = 0  # since the model was ready
        self._unfinished = UnfinishedRequests()
        self._stats: EngineStats | None = None  # the latest
        self._numbers = itertools.count()
        self._unanswered: dict[int, tuple[Run | Ask, Future[Any]]] = {}  # in their order

    # -- on any thread -----------------------------------------------------------------------------------------------

    @property
    def stall(self) -> None:
        """A stall of a rank is a failure of the cluster."""
        return

    def load(self, slot: ModelSlot) -> None:
        self._tasks.put(partial(self._load, slot))

    def submit(self, slot: ModelSlot, requests: Sequence[Request]) -> None:
        self._tasks.put(partial(self._submit, slot, requests))

    def send(self, slot: ModelSlot, command: Command) -> None:
        self._tasks.put(partial(self._tell, slot, partial(Run, command=command), Future()))

    def ask(self, slot: ModelSlot, question: Question, reply: Future[Any]) -> None:
        self._tasks.put(partial(self._tell, slot, partial(Ask, question=question), reply))

    def unload(self, slot: ModelSlot) -> None:
        self._tasks.put(partial(self._unload, slot))

    def stop(self, timeout: float) -> bool:
        """End the ranks and this thread. Returns False if that takes more than `timeout` seconds."""
        self._tasks.put(self._end)
        self.join(timeout)
        return not self.is_alive()

    # -- on this thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while not self._ending:
                if self._postponed:
                    self._postponed.popleft()()
                else:
                    self._run_task()
                self._check()
        except BaseException as error:
            logger.critical("the cluster's thread failed", exc_info=error)
            self._finish(Failure.of(error))
        finally:
            if self._processes is not None:
                self._processes.kill()

    def _run_task(self, kind: type = object) -> None:
        """Run the next task, if it is of this kind. Others run later, in their order."""
        with contextlib.suppress(queue.Empty):
            task = self._tasks.get(timeout=TICK_SECONDS)
            if isinstance(task, kind):
                task()
            else:
                self._postponed.append(task)

    def _end(self) -> None:
        self._keep_prefixes()
        self._finish(None)
        self._ending = True

    def _load(self, slot: ModelSlot) -> None:
        self._slot = slot
        self._num_failures, self._was_ready = 0, False
        self._launch()

    def _unload(self, slot: ModelSlot) -> None:
        if slot is self._slot:
            self._keep_prefixes()
            self._finish(None)

    def _keep_prefixes(self) -> None:
        """Let the ranks store what is to outlive them, if they are well."""
        if self._slot is None or not self._is_ready or self._slot.config.prefix_cache_dir is None:
            return
        done: Future[None] = Future()
        self._tell(self._slot, partial(Ask, question=keep_prefixes), done)
        until = time.monotonic() + KEEP_SECONDS
        while not done.done() and not self._blames and time.monotonic() < until:
            self._run_task(FromRanks)
            self._beat()

    def _finish(self, failure: Failure | None) -> None:
        """End the ranks and the model, with its requests."""
        if self._processes is not None:
            self._processes.kill()
        slot, self._slot, self._processes, self._is_ready = self._slot, None, None, False
        self._unfinished.clear()
        self._unanswered.clear()
        if slot is not None:
            slot.callbacks.on_end(failure)

    def _launch(self) -> None:
        """Start the processes of all ranks."""
        assert self._slot is not None
        self._hellos, self._blames = {}, []
        self._is_ready = False
        self._join_by = time.monotonic() + JOIN_SECONDS
        on_joined, on_message, on_lost = (
            lambda *args, task=task: self._tasks.put(FromRanks(task, *args))
            for task in (self._on_joined, self._on_message, self._on_lost)
        )
        self._processes = Processes(self._hosts, self._log_level, on_joined, on_message, on_lost)
        config = self._slot.config
        if self._tokenizer is None:
            read = partial(read_tokenizer, config.model, config.tool_parser, config.chat_template)
            self._tokenizer = in_daemon_thread(read, "mlxpaged-read-tokenizer")

    # -- what the ranks say ------------------------------------------------------------------------------------------

    def _on_joined(self, processes: Processes, hello: Hello) -> None:
        if processes is not self._processes:
            return
        self._hellos[hello.rank] = hello
        if hello.versions != versions():
            theirs, ours = (" and ".join(sorted(each)) for each in differences(hello.versions, versions()))
            self._blame(3, Failure(f"{self._hosts.label(hello.rank)} has {theirs}, but the server has {ours}"))
        elif len(self._hellos) == len(self._hosts):
            self._start_ranks()

    def _start_ranks(self) -> None:
        assert self._slot is not None
        steps = self._hellos[0].steps
        assert steps is not None
        size = len(self._hosts)
        ring = tuple(self._hellos[rank].ring for rank in range(size))
        start = Start(self._slot.config, size, self._hosts.backend, steps, ring, self._stall_limits)
        for rank in range(size):
            self._send(rank, start)

    def _on_message(self, processes: Processes, rank: int, message: object) -> None:
        if processes is not self._processes or self._slot is None:
            return
        callbacks = self._slot.callbacks
        if isinstance(message, Stepped):
            self._stats = message.stats
            callbacks.on_step([self._unfinished.note(output) for output in message.outputs], message.stats)
            if self._unfinished.holds_back:
                self._send_next()
        elif isinstance(message, Replied):
            self._deliver(message)
        elif isinstance(message, Progressed):
            callbacks.on_progress(message.progress)
        elif isinstance(message, Ready):
            self._become_ready(message)
        elif isinstance(message, Failed):
            reason = f"{self._hosts.label(rank)}: {message.failure.reason}"
            failure = dataclasses.replace(message.failure, reason=reason)
            self._blame(0 if message.lost_peer else 2, failure)

    def _on_lost(self, processes: Processes, rank: int) -> None:
        if processes is self._processes:
            self._blame(1, Failure(f"{self._hosts.label(rank)} died"))

    def _deliver(self, message: Replied) -> None:
        _, reply = self._unanswered.pop(message.number)
        if not reply.set_running_or_notify_cancel():
            return
        if message.error is not None:
            reply.set_exception(message.error)
        else:
            reply.set_result(message.result)

    def _become_ready(self, message: Ready) -> None:
        assert self._slot is not None
        assert self._tokenizer is not None
        info = message.info
        assert isinstance(info, EngineInfo)
        try:
            info.tokenizer = self._tokenizer.result()
        except Exception as error:
            self._blame(3, Failure.of(error))
            return
        info.grammars = Grammars(info.tokenizer, info.vocab_size)
        ranks = tuple(self._hosts.label(rank) for rank in range(len(self._hosts)))
        info.cluster = Cluster(ranks, self._hosts.backend, message.link)
        self._is_ready, self._was_ready, self._num_failures, self._stats = True, True, 0, message.stats
        self._slot.callbacks.on_ready(info, message.stats)
        self._unfinished.room = self._slot.config.max_num_seqs
        told = [each for each, _ in self._unanswered.values()]
        self._send_next(at_once=any(ends_requests(each) for each in told))
        for each in told:
            self._send(0, each)

    def _send_next(self, at_once: bool = False) -> None:
        """Give rank 0 the requests that it is to get now. at_once: all of them."""
        if requests := self._unfinished.take(at_once):
            self._send(0, Submit(tuple(requests)))

    # -- what the server says ----------------------------------------------------------------------------------------

    def _submit(self, slot: ModelSlot, requests: Sequence[Request]) -> None:
        if slot is not self._slot:
            return
        self._unfinished.add([seeded(request) for request in requests])
        if self._is_ready:
            self._send_next()

    def _tell(self, slot: ModelSlot, message: Callable[[int], Run | Ask], reply: Future[Any]) -> None:
        """Send rank 0 the message of this number once the model is ready, and again if the ranks are lost before they
        have replied."""
        if slot is not self._slot:
            return
        number = next(self._numbers)
        self._unanswered[number] = message(number), reply
        if self._is_ready:
            if self._unfinished.holds_back and ends_requests(self._unanswered[number][0]):
                self._send_next(at_once=True)  # those that are to end
            self._send(0, self._unanswered[number][0])

    def _send(self, rank: int, message: object) -> None:
        assert self._processes is not None
        try:
            self._processes.send(rank, message)
        except (OSError, EOFError):
            self._blame(1, Failure(f"{self._hosts.label(rank)} takes no messages"))

    # -- failures ----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Send beats, and look which ranks are still alive."""
        now = time.monotonic()
        if self._processes is None:
            return
        self._beat()
        if not self._is_ready or self._unfinished.holds_back:
            self._expire(now)
        for rank in self._processes.silence.lost():
            self._blame(1, Failure(f"{self._hosts.label(rank)} has not been heard from for {LOST_SECONDS:.0f} s"))
        missing = [self._hosts.label(rank) for rank in range(len(self._hosts)) if rank not in self._hellos]
        if missing and (status := self._processes.launch_status) is not None:
            self._blame(0, Failure(f"{' and '.join(missing)} did not start: mlx.launch ended with status {status}"))
        elif missing and now >= self._join_by:
            self._blame(0, Failure(f"{' and '.join(missing)} did not start within {JOIN_SECONDS:.0f} s"))
        if self._blames and now >= self._decide_at:
            self._fail(max(self._blames, key=lambda blame: blame.weight).failure)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            for rank in self._hellos:
                self._send(rank, Beat())

    def _expire(self, now: float) -> None:
        """End the requests whose deadlines have passed, and that rank 0 does not have."""
        each = [(one.request, len(one.token_ids)) for one in self._unfinished if not one.is_sent]
        self._end_requests(end for request, count in each if (end := end_if_late(request, count, now)) is not None)

    def _end_requests(self, ends: Iterable[RequestOutput]) -> None:
        outputs = [self._unfinished.note(end) for end in ends]
        if outputs and self._slot is not None and self._stats is not None:
            self._slot.callbacks.on_step(outputs, dataclasses.replace(self._stats, prompt_chunks=()))

    def _blame(self, weight: int, failure: Failure) -> None:
        if not self._blames:
            self._decide_at = time.monotonic() + BLAME_SECONDS
        self._blames.append(Blame(weight, failure))

    def _fail(self, failure: Failure) -> None:
        """End the ranks, and start them anew if that is wanted."""
        assert self._slot is not None
        assert self._processes is not None
        logger.critical("%s; all ranks are ended", failure.reason)
        self._processes.kill()
        self._num_failures += 1
        if not (self._restarts and self._was_ready) or self._num_failures > RESTARTS:
            self._finish(failure)
            return
        now, error = time.monotonic(), "the ranks died of this request again and again, so it is not run any more"
        given_up = [(each.request, len(each.token_ids)) for each in self._unfinished.lose()]
        for request, _ in given_up:
            logger.error("%s fails: the ranks died of it again and again", request.request_id)
        self._end_requests(failed(request, count, now, error) for request, count in given_up)
        logger.warning("the ranks start again; %d requests go on then", len(self._unfinished))
        self._slot.callbacks.on_restart(f"{failure.reason}; the ranks start again")
        self._launch()
