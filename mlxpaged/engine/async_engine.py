"""The engine as the event loop sees it: submit a request, iterate over its outputs, give up at any time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from mlxpaged.cache import BlockUsage, blocks_for
from mlxpaged.engine.config import EngineConfig
from mlxpaged.engine.core import EngineCore
from mlxpaged.engine.embedder import EmbeddingRequest, Vectors
from mlxpaged.engine.engine_thread import Abort, Callbacks, Cancel, Embed, EngineThread, Query, Stop, Submit
from mlxpaged.engine.grammar import Grammars
from mlxpaged.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.engine.status import EngineStats, EngineStatus
from mlxpaged.models import EmbeddingModel, Tokenizer
from mlxpaged.scheduler import FinishReason, PromptTooLongError

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")

REPLY_SECONDS = 30.0
"""The engine replies between two steps. No step takes as long, unless something is wrong."""


class EngineState(str, Enum):
    LOADING = "loading"
    READY = "ok"
    DRAINING = "draining"
    DEAD = "dead"


class EngineUnavailableError(Exception):
    """No request can be taken now. `state` says whether that will change."""

    def __init__(self, state: EngineState, message: str) -> None:
        super().__init__(message)
        self.state = state


class QueueFullError(Exception):
    """As many requests run and wait as the server takes. `ever`: whether it could be taken when nobody else is here."""

    def __init__(self, message: str, ever: bool) -> None:
        super().__init__(message)
        self.ever = ever


class DuplicateRequestError(Exception):
    """An unfinished request has this id."""


class MinTokensError(ValueError):
    """A request's least number of tokens is more than the most that it may generate."""


class RequestFailedError(Exception):
    """The engine could not complete the answer."""


class RequestCancelledError(Exception):
    """Somebody asked for the request's end."""


class DeadlineExceededError(Exception):
    """The request's time was up before its answer was complete."""


class EngineBusyError(Exception):
    """A step has been under way for REPLY_SECONDS: what was asked may still happen after it."""


@dataclass(frozen=True)
class EngineInfo:
    """What was loaded. kv_cache_bytes: size of all KV pools. num_swap_slots: KV blocks that the swap space holds.
    embedding_model: what makes embeddings, None with the reason where nothing does."""

    model: str
    tokenizer: Tokenizer
    vocab_size: int
    context_length: int
    num_layers: int
    weight_bytes: int
    kv_cache_bytes: int
    num_blocks: int
    num_swap_slots: int
    block_size: int
    backend: str
    created: int
    grammars: Grammars
    embedding_model: EmbeddingModel | None
    no_embeddings_because: str

    @property
    def second_model(self) -> EmbeddingModel | None:
        """What makes embeddings, where it is not the model that generates."""
        return None if self.embedding_model is None or self.embedding_model.name == self.model else self.embedding_model

    @property
    def max_tokens_in_pool(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer: the last one of an answer is never in the pool."""
        return min(self.context_length, self.max_tokens_in_pool + 1)


class RequestStream:
    """The outputs of one request. Whoever does not read them to the last one must close it."""

    def __init__(self, request: Request, abort: Callable[[str], None], state: Callable[[], EngineState]) -> None:
        self.request = request
        self._state = state
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._abort = abort
        self._finished = False

    def put(self, output: RequestOutput) -> None:
        self._outputs.put_nowait(output)

    def close(self) -> None:
        """Abort the request unless its last output was read."""
        if not self._finished:
            self._finished = True
            self._abort(self.request.request_id)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Raises DeadlineExceededError, RequestCancelledError or RequestFailedError where the engine ends the request
        without completing it, and EngineUnavailableError where that is because the engine itself ends."""
        while not self._finished:
            output = await self._outputs.get()
            if output.finish_reason is not None:
                self._finished = True
            raise_unless_complete(output.finish_reason, output.error, self._state())
            yield output


def raise_unless_complete(reason: FinishReason | None, error: str | None, state: EngineState) -> None:
    """The exception for a request that ended without its answer."""
    if reason is FinishReason.TIMEOUT:
        raise DeadlineExceededError(error)
    if reason is FinishReason.CANCELLED:
        raise RequestCancelledError(error)
    if reason in (FinishReason.ERROR, FinishReason.ABORT):
        if state in (EngineState.DRAINING, EngineState.DEAD):
            raise EngineUnavailableError(state, error or "the client left")
        raise RequestFailedError(error or "the client left")


class AsyncEngine:
    """Belongs to the event loop that `start` ran on; all its methods are called there.

    on_output: called for every output as it arrives on the loop, with its request; for measurements. clock: seconds;
    what arrival times, deadlines and outputs are measured on.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_output: Callable[[Request, RequestOutput], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.state = EngineState.LOADING
        self.reason: str | None = None
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self._on_output = on_output
        self._streams: dict[str, RequestStream] = {}
        self._replies: set[asyncio.Future[Any]] = set()
        self._embedding = 0  # requests that wait for embeddings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled = asyncio.Event()  # loaded, or failed to
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended_all = False
        self._reserved = 0
        callbacks = Callbacks(self._ready_on_thread, self._step_on_thread, self._end_on_thread)
        self._thread = EngineThread(config, callbacks, clock)

    def start(self) -> None:
        """Start the engine thread; the model loads in the background."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def wait_loaded(self) -> None:
        """Raises EngineUnavailableError where loading failed."""
        await self._settled.wait()
        if self.state is EngineState.DEAD:
            raise EngineUnavailableError(self.state, self.reason or "the engine is dead")

    @property
    def num_unfinished(self) -> int:
        return len(self._streams) + self._embedding

    def require_ready(self) -> EngineInfo:
        """Raises EngineUnavailableError while no request can be taken."""
        if self.state is EngineState.READY and self.info is not None:
            return self.info
        messages = {
            EngineState.LOADING: "the model is still loading",
            EngineState.DRAINING: "the server is shutting down",
        }
        raise EngineUnavailableError(self.state, messages.get(self.state, f"the engine is dead: {self.reason}"))

    def check(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """The number of tokens that may be generated: `max_tokens`, or all that context and pool leave room for.

        Raises PromptTooLongError, naming size and limit, where the request could never run.
        """
        info = self.require_ready()
        room_in_context = info.context_length - num_prompt_tokens
        room_in_pool = info.max_tokens_in_pool - num_prompt_tokens + 1
        if room_in_context < 1 or (max_tokens is not None and max_tokens > room_in_context):
            wanted = "" if max_tokens is None else f" and max_tokens is {max_tokens}"
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens{wanted}; this model's context length is "
                f"{info.context_length} tokens",
                num_prompt_tokens,
                max_tokens,
                info.context_length,
            )
        if room_in_pool < 1 or (max_tokens is not None and max_tokens > room_in_pool):
            needed = num_prompt_tokens + (max_tokens or 1) - 1
            raise PromptTooLongError(
                f"the request needs KV memory for {needed} tokens ({blocks_for(needed, info.block_size)} blocks); the "
                f"pool holds {info.max_tokens_in_pool} tokens ({info.num_blocks} blocks): raise --kv-cache-memory",
                num_prompt_tokens,
                max_tokens,
                info.max_tokens_in_pool + 1,
            )
        return min(room_in_context, room_in_pool) if max_tokens is None else max_tokens

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[float]:
        """Room for `count` requests while they are made ready to be submitted. Yields the time.

        Taken before tokenizing, so that a full server refuses at once and its 503s cost the others nothing.
        Raises QueueFullError.
        """
        limit = self.config.max_num_seqs + self.config.max_queue
        taken = self.num_unfinished + self._reserved
        if taken + count > limit:
            message = f"{taken} requests run or wait, and {count} more would exceed the {limit} that this server takes"
            raise QueueFullError(f"{message} (--max-num-seqs plus --max-queue)", ever=count <= limit)
        self._reserved += count
        try:
            yield self.clock()
        finally:
            self._reserved -= count

    def submit(self, requests: Sequence[Request], default_max_tokens: int | None = None) -> list[RequestStream]:
        """Queue requests for which there is a reservation, whose time is their arrival time: all, or none on an error.

        default_max_tokens: a limit, as far as there is room, where their parameters have none.
        Raises EngineUnavailableError, PromptTooLongError, MinTokensError or DuplicateRequestError.
        """
        streams = []
        for request in requests:
            max_tokens = self.check(len(request.prompt_token_ids), request.params.max_tokens)
            if request.request_id in self._streams:
                raise DuplicateRequestError(f"a request with the id {request.request_id} is unfinished")
            if request.params.max_tokens is None and default_max_tokens is not None:
                max_tokens = min(max_tokens, default_max_tokens)
            if request.params.min_tokens > max_tokens:
                message = f"{request.params.min_tokens} are asked for, and at most {max_tokens} can be generated"
                raise MinTokensError(message)
            limited = dataclasses.replace(request, params=dataclasses.replace(request.params, max_tokens=max_tokens))
            streams.append(RequestStream(limited, self._abort, lambda: self.state))
        self._streams.update((stream.request.request_id, stream) for stream in streams)
        self._idle.clear()
        self._thread.send(Submit(tuple(stream.request for stream in streams)))
        return streams

    async def embed(self, request: EmbeddingRequest, arrival_time: float, timeout: float | None) -> Vectors:
        """The vectors of its inputs, [inputs, dimensions]. Cancelling the task that waits for them ends the request.
        timeout: seconds from its arrival.

        Raises EngineUnavailableError, DeadlineExceededError, RequestCancelledError or RequestFailedError.
        """
        self.require_ready()
        waiter = asyncio.wrap_future(request.reply)
        self._replies.add(waiter)
        self._embedding += 1
        self._idle.clear()
        self._thread.send(Embed(request))
        try:
            left = None if timeout is None else max(0.0, arrival_time + timeout - self.clock())
            output = await asyncio.wait_for(waiter, left)
        except asyncio.TimeoutError:
            raise DeadlineExceededError(f"timeout of {timeout:g} s passed: the embeddings were not complete") from None
        finally:
            self._replies.discard(waiter)
            self._embedding -= 1
            self._note_idle()
        raise_unless_complete(output.finish_reason, output.error, self.state)
        assert output.vectors is not None
        return output.vectors

    def _note_idle(self) -> None:
        if not self.num_unfinished:
            self._idle.set()

    def _abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._thread.send(Abort(request_id))

    async def cancel(self, request_ids: Sequence[str]) -> list[EndedRequest]:
        """End requests, whose streams then raise RequestCancelledError. Returns those that had not ended yet; all they
        held is free again. Raises EngineUnavailableError or EngineBusyError."""
        reply: Future[list[EndedRequest]] = Future()
        return await self._ask(Cancel(tuple(request_ids), reply), reply)

    async def status(self) -> EngineStatus:
        """Raises EngineUnavailableError or EngineBusyError."""
        reply: Future[EngineStatus] = Future()
        return await self._ask(Query(EngineCore.status, reply), reply)

    async def clear_cache(self) -> int:
        """Empty the prefix cache. Returns the number of blocks that were in it. Raises EngineUnavailableError or
        EngineBusyError."""
        reply: Future[int] = Future()
        return await self._ask(Query(EngineCore.clear_cache, reply), reply)

    async def _ask(self, command: Cancel | Query, reply: Future[Reply]) -> Reply:
        if self.info is None or self.state is EngineState.DEAD:
            self.require_ready()
        waiter = asyncio.wrap_future(reply)
        self._replies.add(waiter)
        self._thread.send(command)
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes with the reply.
            done, _ = await asyncio.wait([waiter], timeout=REPLY_SECONDS)
            if not done:
                raise EngineBusyError(f"the engine has not replied within {REPLY_SECONDS:.0f} s")
            return waiter.result()
        finally:
            waiter.cancel()
            self._replies.discard(waiter)

    async def drain(self, timeout: float) -> bool:
        """Take no more requests and wait for those that run. False where they were ended before they were done."""
        if self.state in (EngineState.LOADING, EngineState.READY):
            self.state = EngineState.DRAINING
            self.reason = "the server is shutting down"
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            logger.warning("%d requests still run after %.0f s: they are ended", self.num_unfinished, timeout)
            self.end_all("the server is shutting down")
            await self._idle.wait()
        return not self._ended_all

    def end_all(self, error: str) -> None:
        """End every request with an error."""
        self._ended_all = self.num_unfinished > 0
        self._thread.send(Abort(None, error))

    async def stop(self, timeout: float = 10.0) -> bool:
        """End the engine thread. False where it does not end within `timeout` seconds."""
        self._thread.send(Stop())
        ended = await asyncio.to_thread(self._thread.join, timeout)
        if not ended:
            doing = "loads the model" if self.info is None else "is busy"
            logger.warning("the engine thread still %s after %.0f s; not waiting for it", doing, timeout)
        return ended

    # -- from the engine thread --------------------------------------------------------------------------------------

    def _hand_over(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            logger.debug("the event loop is closed; dropped %s", getattr(callback, "__name__", callback))

    def _ready_on_thread(self, core: EngineCore) -> None:
        served = core.served
        info = EngineInfo(
            model=served.name,
            tokenizer=served.tokenizer,
            vocab_size=served.vocab_size,
            context_length=served.context_length,
            num_layers=len(served.layers),
            weight_bytes=served.weight_bytes,
            kv_cache_bytes=core.runner.kv_cache_bytes,
            num_blocks=core.scheduler.pool.num_blocks,
            num_swap_slots=core.scheduler.config.num_swap_slots,
            block_size=core.scheduler.pool.block_size,
            backend=core.runner.backend,
            created=int(time.time()),
            grammars=core.grammars,
            embedding_model=None if core.embedder is None else core.embedder.model,
            no_embeddings_because=core.no_embedder_because,
        )
        self._hand_over(self._become_ready, info, core.stats())

    def _step_on_thread(self, outputs: list[RequestOutput], stats: EngineStats) -> None:
        self._hand_over(self._dispatch, outputs, stats)

    def _end_on_thread(self, reason: str | None) -> None:
        self._hand_over(self._become_dead, reason)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _become_ready(self, info: EngineInfo, stats: EngineStats) -> None:
        self.info, self.stats = info, stats
        if self.state is EngineState.LOADING:
            self.state = EngineState.READY
        self._settled.set()

    def _dispatch(self, outputs: list[RequestOutput], stats: EngineStats) -> None:
        self.stats = stats
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            if self._on_output is not None:
                self._on_output(stream.request, output)
            stream.put(output)
        self._note_idle()

    def _become_dead(self, reason: str | None) -> None:
        self.state = EngineState.DEAD
        self.reason = reason or "the engine was stopped"
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
            scheduler = dataclasses.replace(last, running=0, waiting=0, blocks=blocks, swap=swap)
            self._dispatch(ends, dataclasses.replace(self.stats, scheduler=scheduler))
        self._settled.set()
