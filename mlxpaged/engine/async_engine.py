"""The engine as the event loop sees it: submit a request, iterate over its outputs, abort it at any time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from mlxpaged.core.blocks.block_pool import BlockUsage
from mlxpaged.core.engine import errors
from mlxpaged.core.engine.errors import EngineState, EngineUnavailableError
from mlxpaged.core.engine.prompt_progress import WaitingLine
from mlxpaged.core.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.core.engine.status import EngineSnapshot, EngineStats, EngineStatus
from mlxpaged.core.engine.worker import Worker
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.engine import commands
from mlxpaged.engine.builder import load_core
from mlxpaged.engine.engine_thread import Callbacks, EngineHost, EngineThread, Failure, ModelSlot
from mlxpaged.engine.info import EmbeddingInfo, EngineInfo
from mlxpaged.engine.request_stream import RequestStream, raise_unless_complete
from mlxpaged.engine_config import EngineConfig
from mlxpaged.parts.embeddings.embedding_line import EmbeddingRequest
from mlxpaged.parts.embeddings.embedding_passes import Vectors
from mlxpaged.progress import Progress

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")

REPLY_SECONDS = 30.0
"""How long a command waits for its reply. The engine replies between two steps, and a step takes far less time."""

END_SECONDS = 1.0
"""How long a shutdown waits for the engine to end requests. HTTP waits two seconds more."""


class AsyncEngine:
    """One model. Belongs to the event loop that `start` got. All its other methods are called there.

    clock: seconds. Arrival times, deadlines and the times of outputs refer to it. host: that of the other models; None
    for an engine alone, on a thread of its own.
    """

    def __init__(
        self, config: EngineConfig, clock: Callable[[], float] = time.monotonic, host: EngineHost | None = None
    ) -> None:
        self.config = config
        self.clock = clock
        self.state = EngineState.LOADING
        self.reason: str | None = None
        self.info: EngineInfo | EmbeddingInfo | None = None
        self.stats: EngineStats | None = None
        self.on_output: Callable[[Request, RequestOutput], None] | None = None
        """Called with every output and its request, for metrics."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called when its last request has ended."""
        self._streams: dict[str, RequestStream] = {}
        self._line = WaitingLine()
        self._replies: set[asyncio.Future[Any]] = set()
        self._embedding = 0  # requests that wait for embeddings
        self.loop: asyncio.AbstractEventLoop | None = None
        self._loaded = asyncio.Event()  # set when the model is loaded or failed to load
        self._ended = asyncio.Event()  # set when the engine thread holds nothing of it any more
        self.failure: Failure | None = None  # that ended the model
        self._idle = asyncio.Event()
        self._idle.set()
        self.idle_since = clock()
        self._ended_all = False
        self._reserved = 0
        self.progress: Progress | None = None
        callbacks = Callbacks(
            lambda progress: self._hand_over(self._note_progress, progress),
            lambda info, stats: self._hand_over(self._become_ready, info, stats),
            lambda outputs, stats: self._hand_over(self._dispatch, outputs, stats),
            lambda failure: self._hand_over(self._become_dead, failure),
            lambda reason: self._hand_over(self._note_restart, reason),
        )
        self.host = host or EngineThread(clock)
        self.slot = ModelSlot(config, lambda report: load_core(config, clock, report), callbacks)

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start the engine thread if it does not run. The model loads in the background, and `progress` says how far it
        is.

        loop: an event loop that will run later; None: the running one.
        """
        self.loop = loop or asyncio.get_running_loop()
        if self.host.ident is None:
            self.host.start()
        self.host.load(self.slot)

    async def wait_loaded(self) -> None:
        """Wait until the model is loaded. Raises EngineUnavailableError if loading failed."""
        await self._loaded.wait()
        if self.state is EngineState.DEAD:
            raise EngineUnavailableError(self.state, self.reason or "the engine is dead")

    @property
    def is_restarting(self) -> bool:
        """Whether it is loaded anew after a failure; its requests go on then."""
        return self.state is EngineState.LOADING and self._loaded.is_set()

    @property
    def num_unfinished(self) -> int:
        return len(self._streams) + self._embedding

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished or about to be submitted."""
        return not self.num_unfinished and not self._reserved

    def require_ready(self) -> EngineInfo | EmbeddingInfo:
        """Raises EngineUnavailableError if the engine takes no requests now."""
        self._require_no_stall()
        if self.state is EngineState.READY and self.info is not None:
            return self.info
        messages = {
            EngineState.LOADING: "".join(
                [
                    f"{self.reason}; " if self.reason else "",
                    f"the model is still loading{f': {self.progress}' if self.progress else ''}",
                ]
            ),
            EngineState.DRAINING: str(self.reason),
        }
        raise EngineUnavailableError(self.state, messages.get(self.state, f"the engine is dead: {self.reason}"))

    def _require_no_stall(self) -> None:
        if (stall := self.host.stall) is not None:
            raise EngineUnavailableError(EngineState.STALLED, str(stall))

    @contextlib.contextmanager
    def reserve(self, count: int, held: int = 0) -> Iterator[float]:
        """Reserve room for `count` requests until they are submitted. Yields the time of the reservation.

        The room is reserved before tokenizing, so that a full server refuses requests at once. held: unfinished
        requests of the same API key; with them, it may have no more than there are places left, so that no key fills
        the queue (the dynamic thresholds of Choudhury and Hahne, 1998). Raises QueueFullError.
        """
        limit = self.config.max_num_seqs + self.config.max_queue
        taken = self.num_unfinished + self._reserved
        if taken + count > limit:
            message = f"{taken} requests are running or waiting, and {count} more would exceed the limit of {limit}"
            raise errors.QueueFullError(f"{message} (--max-num-seqs plus --max-queue)", ever=count <= limit)
        left = limit - taken - count
        if held and held + count > left:
            message = (
                f"this API key has {held} unfinished requests; {count} more would leave {left} places for other keys"
            )
            raise errors.QueueFullError(f"{message} (--max-num-seqs plus --max-queue)", ever=True)
        self._reserved += count
        try:
            yield self.clock()
        finally:
            self._reserved -= count

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Queue requests that have a reservation. Its time is their arrival time. If one is refused, none is queued.

        max_tokens is cut to what context and pool have room for.
        Raises EngineUnavailableError, PromptTooLongError, MinTokensError or DuplicateRequestError.
        """
        info, limited_requests = self.require_ready(), []
        assert isinstance(info, EngineInfo)
        for request in requests:
            max_tokens = info.max_new_tokens(len(request.prompt_token_ids), request.params.max_tokens)
            if request.request_id in self._streams:
                raise errors.DuplicateRequestError(f"an unfinished request already has the id {request.request_id}")
            if request.params.min_tokens > max_tokens:
                message = f"{request.params.min_tokens} tokens are required, but at most {max_tokens} can be generated"
                raise errors.MinTokensError(message)
            params = dataclasses.replace(request.params, max_tokens=max_tokens)
            limited_requests.append(dataclasses.replace(request, params=params))
        streams = [
            RequestStream(request, self._abort, lambda: self.state, self._line, self.clock)
            for request in limited_requests
        ]
        self._streams.update((stream.request.request_id, stream) for stream in streams)
        self._idle.clear()
        self.host.submit(self.slot, limited_requests)
        return streams

    async def embed(self, request: EmbeddingRequest, arrival_time: float, timeout: float | None) -> Vectors:
        """Returns the vectors [inputs, dimensions]. If the waiting task is cancelled, the request ends.
        timeout: seconds from arrival.

        Raises EngineUnavailableError, DeadlineExceededError, RequestCancelledError or RequestFailedError.
        """
        self.require_ready()
        late = "timeout of {:g} s passed: the embeddings were not complete"
        if timeout is not None and arrival_time + timeout <= self.clock():  # nothing is computed for it
            raise errors.DeadlineExceededError(late.format(timeout))
        waiter = asyncio.wrap_future(request.reply)
        self._replies.add(waiter)
        self._embedding += 1
        self._idle.clear()
        self.host.send(self.slot, lambda core: core.embed(request))
        try:
            if timeout is None:
                await asyncio.wait([waiter])
            else:  # the loop's clock may count the sleep of the machine, unlike ours
                while not waiter.done() and (left := arrival_time + timeout - self.clock()) > 0:
                    await asyncio.wait([waiter], timeout=left)
                if not waiter.done():
                    raise errors.DeadlineExceededError(late.format(timeout))
            self._raise_if_ended(waiter)
            output = waiter.result()
        finally:
            waiter.cancel()
            self._replies.discard(waiter)
            self._embedding -= 1
            self._note_idle()
        raise_unless_complete(output.finish_reason, output.error, self.state)
        assert output.vectors is not None
        return output.vectors

    def knows(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return request_id in self._streams

    def touch(self) -> None:
        """Note that the model is used now."""
        self.idle_since = self.clock()

    def _note_idle(self) -> None:
        if not self.num_unfinished and not self._idle.is_set():
            self.touch()
            self._idle.set()
            self.on_idle()

    def _abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self.host.send(self.slot, partial(commands.abort, request_id=request_id))

    async def cancel(self, request_ids: Sequence[str]) -> list[EndedRequest]:
        """Cancel requests: their streams raise RequestCancelledError. Returns those that had not ended yet. All that
        they held is free when this returns. Raises EngineUnavailableError or EngineBusyError."""
        return await self._ask(partial(commands.cancel, request_ids=request_ids))

    async def status(self) -> EngineStatus:
        """Raises EngineUnavailableError or EngineBusyError."""
        return await self._ask(commands.status)

    async def snapshot(self) -> EngineSnapshot:
        """Raises EngineUnavailableError or EngineBusyError."""
        return await self._ask(commands.snapshot)

    async def clear_cache(self) -> int:
        """Empty the prefix cache. Returns the number of blocks that it held. Raises EngineUnavailableError or
        EngineBusyError."""
        return await self._ask(commands.clear_cache)

    async def give_back(self) -> int:
        """Free the memory of the KV pools that no running request needs. Returns the bytes."""
        return await self._ask(commands.give_back)

    async def _ask(self, question: Callable[[Worker], tuple[Reply, list[RequestOutput]]]) -> Reply:
        """Ask the engine, even if this task is cancelled. Returns the first part of its result. The outputs in the
        second part go to their streams."""
        if self.info is None or self.state is EngineState.DEAD:
            self.require_ready()
        self._require_no_stall()  # before the command is sent: who asks again and again must not fill the queue
        reply: Future[Reply] = Future()
        waiter = asyncio.wrap_future(reply)
        self._replies.add(waiter)
        self.host.ask(self.slot, question, reply)
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes with the reply.
            done, _ = await asyncio.wait([waiter], timeout=REPLY_SECONDS)
            if not done:
                raise errors.EngineBusyError(f"the engine has not replied within {REPLY_SECONDS:.0f} s")
            self._raise_if_ended(waiter)
            return waiter.result()
        finally:
            waiter.cancel()
            self._replies.discard(waiter)

    def _raise_if_ended(self, waiter: asyncio.Future[Any]) -> None:
        """Only `end_waiting` and `drain` cancel what a task waits for. Raises EngineUnavailableError."""
        if waiter.cancelled():
            if self.state is EngineState.DRAINING:
                raise EngineUnavailableError(self.state, str(self.reason))
            message = "the engine was stalled, so that this could not be done"
            raise EngineUnavailableError(EngineState.STALLED, message)

    async def drain(self, timeout: float) -> bool:
        """Take no more requests, and wait until the others are done. Returns False if some had to be ended."""
        if self.state in (EngineState.LOADING, EngineState.READY):
            self.state = EngineState.DRAINING
            self.reason = "the server is shutting down"
        with contextlib.suppress(asyncio.TimeoutError):  # with a timeout of 0, it may come although nothing runs
            await asyncio.wait_for(self._idle.wait(), timeout)
        if not self._idle.is_set():
            logger.warning("%d requests are still running after %.0f s and are ended now", self.num_unfinished, timeout)
            self.end_all("the server is shutting down")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), END_SECONDS)
            self._end_streams("the server is shutting down")  # of a step that takes long, or does not end
        return not self._ended_all

    def end_all(self, error: str) -> None:
        """End every request with an error."""
        self._ended_all = self.num_unfinished > 0
        self.host.send(self.slot, partial(commands.abort_all, error=error))

    def _end_streams(self, error: str) -> None:
        """End all requests without the engine thread, which forgets them when it hears of it."""
        now, reason = self.clock(), FinishReason.ERROR
        ends = [RequestOutput(request_id, now, finish_reason=reason, error=error) for request_id in self._streams]
        if self.stats is not None:
            self._dispatch(ends, self.stats)
        for waiter in self._replies:
            waiter.cancel()

    def end_waiting(self, error: str, running: Container[str]) -> None:
        """End the requests of which no step computes or has computed a part, and those for embeddings, with an error:
        the engine thread is stalled. If it goes on after all, it forgets them first. running: ids of the requests in
        the step that is stalled."""
        waiting = [
            stream
            for stream in self._streams.values()
            if stream.is_waiting and stream.request.request_id not in running
        ]
        for stream in waiting:
            stream.ended_in = EngineState.STALLED
            self._abort(stream.request.request_id)
        now, reason = self.clock(), FinishReason.ERROR
        ends = [RequestOutput(stream.request.request_id, now, finish_reason=reason, error=error) for stream in waiting]
        if self.stats is not None:
            self._dispatch(ends, self.stats)
        for waiter in self._replies:
            waiter.cancel()

    async def unload(self) -> None:
        """Free what the model holds, also while it loads. Its requests end with an error. Other models go on."""
        if self.state is not EngineState.DEAD:
            self.state = EngineState.DRAINING
            self.reason = "the model was unloaded"
        self.host.unload(self.slot)
        await self._ended.wait()

    async def stop(self, timeout: float = 10.0) -> bool:
        """End the engine thread, with all its models. Returns False if it does not end within `timeout` seconds."""
        return await asyncio.to_thread(self.host.stop, timeout)

    def _hand_over(self, callback: Callable[..., None], *args: object) -> None:
        """Call a method on the event loop, from the engine thread."""
        assert self.loop is not None
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed
            logger.debug("the event loop is closed; dropped %s", getattr(callback, "__name__", callback))

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _note_progress(self, progress: Progress) -> None:
        self.progress = progress

    def _note_restart(self, reason: str) -> None:
        if self.state is EngineState.READY:
            self.state, self.reason, self.progress = EngineState.LOADING, reason, None

    def _become_ready(self, info: EngineInfo | EmbeddingInfo, stats: EngineStats) -> None:
        self.info, self.stats = info, stats
        self.touch()  # the load may have taken longer than --idle-unload
        if self.state is EngineState.LOADING:
            self.state, self.reason = EngineState.READY, None
        self._loaded.set()

    def _dispatch(self, outputs: list[RequestOutput], stats: EngineStats) -> None:
        self.stats = stats
        for chunk in stats.prompt_chunks:
            if (stream := self._streams.get(chunk.request_id)) is not None:
                stream.put_chunk(chunk)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.put(output)
            try:
                if self.on_output is not None:
                    self.on_output(stream.request, output)
            except Exception:  # the other outputs are still delivered
                logger.exception("the metrics could not be updated for an output of %s", output.request_id)
        self._note_idle()

    def _become_dead(self, failure: Failure | None) -> None:
        self.state = EngineState.DEAD
        if failure is not None:
            self.reason = failure.reason
        elif self.reason is None:
            self.reason = "the engine was stopped"
        self.failure = failure
        for waiter in self._replies:
            if not waiter.done():
                waiter.set_exception(EngineUnavailableError(self.state, f"the engine is dead: {self.reason}"))
        now = self.clock()
        ends = [
            RequestOutput(request_id, now, finish_reason=FinishReason.ERROR, error=f"the engine is dead: {self.reason}")
            for request_id in self._streams
        ]
        if self.stats is not None:
            last = self.stats.scheduler
            blocks, swap = (BlockUsage(0, 0, each.used + each.cached + each.free) for each in (last.blocks, last.swap))
            scheduler = dataclasses.replace(last, running=0, waiting=0, blocks=blocks, swap=swap, checkpoints=0)
            self._dispatch(ends, dataclasses.replace(self.stats, scheduler=scheduler))
        self._loaded.set()
        self._ended.set()
