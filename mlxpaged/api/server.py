"""Holds what the endpoints share: the models, the metrics, and the threads for bodies, the tokenizer and grammars."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from mlxpaged.api.access.caller import allows, caller_of, is_local
from mlxpaged.api.access.key_ring import KeyRing
from mlxpaged.api.answer_thread import AnswerThread
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.downloads import Downloads
from mlxpaged.api.errors import ApiError, bad_parameter, load_failed, model_not_found, no_room
from mlxpaged.api.ignored_fields import IgnoredFields, client_of
from mlxpaged.api.image_hosts import ImageHosts
from mlxpaged.api.image_threads import ImageThreads
from mlxpaged.api.metrics import Metrics
from mlxpaged.api.open_requests import OpenRequest, OpenRequests
from mlxpaged.api.refusals import MAX_REFUSALS, Refusal
from mlxpaged.api.tokenizer_lanes import TokenizerLanes
from mlxpaged.api.turns import Rules, Turn, TurnRefusedError, Turns
from mlxpaged.core.engine.constraint import Constraint, GrammarError, StructuredOutput
from mlxpaged.core.engine.request import Request as EngineRequest
from mlxpaged.core.engine.request import RequestOutput
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.info import EmbeddingInfo, EngineInfo
from mlxpaged.library_errors import public_reason
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.kinds import Kind
from mlxpaged.models.text.tokenizer import Tokenizer
from mlxpaged.process_memory import is_out_of_memory
from mlxpaged.registry.errors import LoadFailedError, ModelUnknownError, NoRoomError
from mlxpaged.registry.model import Model
from mlxpaged.registry.profile import Profile
from mlxpaged.registry.registry import Registry

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LARGE_BODY_BYTES = 64 * 1024
"""Larger bodies are parsed on a thread. A smaller one takes at worst 15 ms, if every few bytes are an object; an
ordinary one takes less than the switch to a thread and back."""
BODIES = Rules("large request bodies", at_once=2, places=256, seconds=6e-8)
"""Two, so that a large body does not block the next one. More would only wait for the interpreter lock. The size of a
turn is the body's in bytes."""
HUGE_BODY_BYTES = 1024 * 1024
"""Larger ones are parsed one at a time, with a rest after each. 12 MB of nested objects take 0.7 seconds, in which the
interpreter lock is held: two threads that parse one after the other would leave the running streams no time."""
HUGE_BODIES = Rules("huge request bodies", at_once=1, places=32, seconds=6e-8, free_seconds=0.0, rests=True)
FILES = Rules("changes of files", at_once=2, places=64, seconds=5e-9)
"""The size of a turn is that of an upload in bytes: 200 MiB are copied and flushed."""
COMPILE_SECONDS = 10.0
"""Time limit for a grammar. Almost all take less than a second, or the compiler gives up."""
GRAMMARS = Rules("grammars", at_once=2, places=16, free_seconds=1.0, rests=True)
"""Two, so that a slow one does not block the next one. Heavy clients take a half of one core at most. The text of a
grammar does not tell how long it takes."""


class Server:
    """One per app. `registry` is None on a server without a model, `keys` on one without API keys."""

    def __init__(self, registry: Registry | None, clock: Callable[[], float], http: HttpConfig) -> None:
        """Raises KeyFileError."""
        self.http = http
        self.keys = KeyRing(http.api_keys, clock) if http.api_keys is not None else None
        self.metrics = Metrics(lambda: () if registry is None else registry.models.values())
        self.refusals: deque[Refusal] = deque(maxlen=MAX_REFUSALS)
        self.registry = registry
        if registry is not None:
            registry.observe(self._observe)
        self.open_requests = OpenRequests()
        self.is_ending = False  # a signal has come, or the start has failed
        self.ignored_fields = IgnoredFields()
        self.downloads = Downloads()
        self._clock = clock
        self._started = clock()
        self.tokenizer_lanes = TokenizerLanes()
        self.body_turns, self.huge_body_turns = Turns(BODIES), Turns(HUGE_BODIES)
        self._body_threads = ThreadPoolExecutor(BODIES.at_once, thread_name_prefix="mlxpaged-body")
        self._huge_body_thread = ThreadPoolExecutor(HUGE_BODIES.at_once, thread_name_prefix="mlxpaged-body-huge")
        self._answer_thread = AnswerThread()
        self._with_templates: dict[str, tuple[EngineInfo, EngineInfo]] = {}  # by profile: of its model, and its own
        self.images = ImageThreads()
        self.image_hosts = ImageHosts(http.image_hosts)
        self.file_turns = Turns(FILES)
        self._file_threads = ThreadPoolExecutor(FILES.at_once, thread_name_prefix="mlxpaged-file")
        self.grammar_turns = Turns(GRAMMARS)

    def _observe(self, model: str, request: EngineRequest, output: RequestOutput) -> None:
        self.metrics.observe(model, request, output)
        if (opened := self.open_requests.get(request.request_id)) is not None:
            opened.observe(request, output)
        if output.finish_reason is not None:
            logger.info(
                "%s finish_reason=%s%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d seconds=%.3f",
                request.request_id,
                output.finish_reason.value,
                "" if output.stop_cause is None else f" ({output.stop_cause})",
                len(request.prompt_token_ids),
                output.num_cached_tokens,
                output.num_output_tokens,
                output.time - request.arrival_time,
            )

    def started(self) -> Registry:
        """Raises ApiError or EngineUnavailableError if the server takes no requests."""
        if self.registry is None:
            raise ApiError(503, "this server was started without a model", "server_error", code="no_model")
        self.registry.require_started()
        return self.registry

    async def model(self, request: Request, name: str | None) -> Model:
        """The model that a request names; None: the default one. Raises ApiError or EngineUnavailableError."""
        registry, caller = self.started(), caller_of(request)
        any_directory = is_local(request) and (caller is None or caller.admin)
        try:
            model = await registry.names.find(name, any_directory=any_directory)
        except ModelUnknownError:
            raise model_not_found(name or "", self.names_for(request)) from None
        if not allows(caller, model.name):
            message = f"model: {model.name!r} is not allowed for the key {caller.name!r}" if caller else ""
            raise ApiError(403, message, "permission_error", param="model", code="model_not_allowed")
        return model

    async def ready(
        self, request: Request, name: str | None, tier: str | None = None
    ) -> tuple[AsyncEngine, EngineInfo]:
        """The engine of the model that a request names, if it generates text; None: the default one. It is loaded if it
        is not. tier: the `service_tier` of the request. Raises ApiError or EngineUnavailableError."""
        model = await self.model(request, name)
        loaded = await self._load(request, model, tier)
        info = loaded.require_ready()
        if not isinstance(info, EngineInfo):
            others = [each.name for each in self.started().models.values() if each.kind.generates]
            use = f"; use {others[0]!r} to generate text" if others else ""
            does = "makes embeddings" if info.cross_encoder is None else "reranks"
            raise bad_parameter("model", f"{model.name!r} {does}{use}", code="generation_not_supported")
        return loaded, info

    async def with_template(self, info: EngineInfo, profile: Profile | None) -> EngineInfo:
        """The facts of an engine, with the chat template of a profile if that has one of its own. Raises ApiError if
        the model cannot use it."""
        if profile is None or profile.chat_template is None:
            return info
        known = self._with_templates.get(profile.name)
        if known is None or known[0] is not info:  # the model was loaded again
            try:
                tokenizer = await asyncio.to_thread(info.tokenizer.with_template, profile.chat_template)
            except UnsupportedModelError as error:
                message = f"the chat template of the profile {profile.name!r} cannot be used: {error}"
                raise ApiError(400, message, param="model", code="chat_template_not_supported") from None
            self._with_templates[profile.name] = known = info, info.with_tokenizer(tokenizer)
        return known[1]

    async def embedder(self, request: Request, name: str | None) -> tuple[AsyncEngine, EngineInfo | EmbeddingInfo]:
        """The engine of the model that is to make embeddings. None: the first one that only makes embeddings, else the
        default one. Raises ApiError or EngineUnavailableError."""
        name = name or self._first(Kind.EMBEDDING)
        model = await self.model(request, name)
        if self.started().names.adapter_in(name) is not None:
            message = f"{name!r} is an adapter, which makes no embeddings; use {model.name!r}"
            raise bad_parameter("model", message, code="embeddings_not_supported")
        loaded = await self._load(request, model)
        return loaded, loaded.require_ready()

    async def reranker(self, request: Request, name: str | None) -> tuple[AsyncEngine, EngineInfo | EmbeddingInfo]:
        """The engine of the model that is to judge documents. None: the first reranker, else the default one. Raises
        ApiError or EngineUnavailableError."""
        loaded = await self._load(request, await self.model(request, name or self._first(Kind.RERANKER)))
        return loaded, loaded.require_ready()

    def _first(self, kind: Kind) -> str | None:
        """The name of the first model of a kind."""
        return next((each.name for each in self.started().models.values() if each.kind is kind), None)

    async def begin_load(self, request: Request, name: str | None, tier: str | None) -> Load | None:
        """Begin to load the model that a request names. Returns None if it is loaded already. tier: the `service_tier`
        of the request. Raises ApiError or EngineUnavailableError."""
        model = await self.model(request, name)
        if not self.started().loader.must_load(model):
            return None
        task = asyncio.ensure_future(self._load(request, model, tier))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # if the stream has left
        return Load(model, task, self.started().loader.waiting_for)

    async def _load(self, request: Request, model: Model, tier: str | None = None) -> AsyncEngine:
        """Raises ApiError, EngineUnavailableError or RequestCancelledError."""
        registry, caller = self.started(), caller_of(request)
        usual = registry.base.default_priority if caller is None else caller.default
        priority = Priority.LOW if tier == "flex" else Priority.HIGH if tier == "priority" else usual
        try:
            if not registry.loader.must_load(model):
                return await registry.loader.ready(model)
            load = registry.loader.ready(model, priority)
            return await self.open_requests.wait_for(load, request.state.request_id, caller)
        except LoadFailedError as error:
            raise load_failed(model.name, error) from None
        except NoRoomError as error:
            raise no_room(model.name, error) from None

    def names_for(self, request: Request) -> list[str]:
        """The names of the models that are served, and that the caller may use, with those of their adapters."""
        caller = caller_of(request)
        models = self.registry.models.values() if self.registry else ()
        return [name for model in models if allows(caller, model.name) for name in model.names]

    def held_beside(self, opened: OpenRequest) -> int:
        """Returns how many sequences the request's key has in the queue beside it; 0 if there is no other key."""
        return self.open_requests.held_beside(opened) if self.keys is not None and len(self.keys) > 1 else 0

    def ignore(self, request: Request, field: str, reason: str) -> None:
        """Note a field of a body that the model cannot honour. Raises ApiError, with the reason, if the server is
        strict."""
        if self.http.strict:
            raise bad_parameter(field, reason, code="unsupported_parameter")
        if field not in request.state.ignored:
            request.state.ignored.insert(0, field)
        self.ignored_fields.note(client_of(request), [field])

    async def prepare(self, request: Request, function: Callable[[], Result]) -> Result:
        """Run a function whose time grows with the body (`request.state.body_size`): on a thread if that is large.
        Raises TurnRefusedError."""
        size = request.state.body_size
        if size <= LARGE_BODY_BYTES:
            return function()
        if size <= HUGE_BODY_BYTES:
            return await self.body_turns.run(program_of(request), size, self._body_threads, function)
        return await self.huge_body_turns.run(program_of(request), size, self._huge_body_thread, function)

    async def check_image(self, request: Request, size: int, function: Callable[[], Result]) -> Result:
        """Run a function that reads an image's header. It does not wait for those that are decoded. size: bytes of the
        image. Raises TurnRefusedError."""
        return await self.body_turns.run(program_of(request), size, self._body_threads, function)

    async def render(self, function: Callable[[], Result]) -> Result:
        """Run a function that renders a large answer, on a thread."""
        return await self._answer_thread.run(function)

    async def change_file(self, request: Request, size: int, function: Callable[[], Result]) -> Result:
        """Run a function that writes or deletes a file. size: bytes. Raises TurnRefusedError."""
        return await self.file_turns.run(program_of(request), size, self._file_threads, function)

    async def tokenize(
        self, request: Request, tokenizer: Tokenizer, size: int, function: Callable[[], Result]
    ) -> Result:
        """Run a function that uses a tokenizer, on a thread. size: characters or tokens that it works on. Raises
        TurnRefusedError."""
        return await self.tokenizer_lanes.run(program_of(request), tokenizer, size, function)

    async def compile(
        self, request: Request, info: EngineInfo, constraint: Constraint | StructuredOutput | None
    ) -> None:
        """Compile the grammar, unless it is known. Raises ApiError if it is not supported, TurnRefusedError if others
        take too long."""
        if constraint is None or info.grammars.is_compiled(constraint):
            return
        try:
            turn = await self.grammar_turns.enter(program_of(request), timeout=COMPILE_SECONDS)
        except TurnRefusedError as error:
            raise TurnRefusedError(f"{constraint.param}: {error}") from None
        try:
            thread = info.grammars.compile_on_thread(constraint)
        except BaseException:  # there is no memory for a thread
            self.grammar_turns.leave(turn)
            raise
        compiled = asyncio.wrap_future(thread)
        compiled.add_done_callback(partial(self._end_compiling, turn))
        await asyncio.wait([compiled], timeout=COMPILE_SECONDS)
        if not compiled.done():
            message = f"takes more than {COMPILE_SECONDS:.0f} s to compile"
            raise bad_parameter(constraint.param, message, code="unsupported_constraint")
        try:
            compiled.result()
        except OSError as error:  # of the process that checks grammars
            if is_out_of_memory(error):
                raise
            reason = public_reason(error)
            raise TurnRefusedError(f"{constraint.param}: the grammar compiler cannot be started: {reason}") from None
        except GrammarError as error:
            param = error.param or constraint.param
            reason = "the grammar compiler refuses the constraint"  # its own message can have text of the constraint
            raise bad_parameter(param, str(error), "unsupported_constraint", reason) from None

    def _end_compiling(self, turn: Turn, compiled: asyncio.Future[Any]) -> None:
        self.grammar_turns.leave(turn)
        if not compiled.cancelled():
            compiled.exception()  # marks it as retrieved: after a timeout nothing else reads it

    @property
    def now(self) -> float:
        """Seconds on the clock of requests and outputs."""
        return self._clock()

    @property
    def uptime(self) -> float:
        """Seconds."""
        return self._clock() - self._started

    async def close(self) -> None:
        for threads in (self._body_threads, self._huge_body_thread, self._file_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._answer_thread.close()
        self.images.close()
        self.image_hosts.close()
        self.tokenizer_lanes.close()
        if self.registry is not None:
            had_model = bool(self.registry.loaded)
            if await self.registry.stop(timeout=10.0 if had_model else 1.0) and had_model:
                logger.info("engine thread stopped")


class Load:
    """A load that a stream waits for."""

    def __init__(self, model: Model, task: asyncio.Future[AsyncEngine], waiting_for: Callable[[Model], str]) -> None:
        """waiting_for: says what a request for the model waits for."""
        self.model = model
        self._task = task
        self._waiting_for = waiting_for

    @property
    def done(self) -> bool:
        return self._task.done()

    @property
    def progress(self) -> str:
        return self._waiting_for(self.model)

    async def wait(self, seconds: float) -> None:
        await asyncio.wait([self._task], timeout=seconds)

    def raise_if_failed(self) -> None:
        """Raises ApiError."""
        self._task.result()

    def leave(self) -> None:
        """Stop waiting. The load goes on."""
        self._task.cancel()


def program_of(request: Request) -> str:
    """Who takes turns with others: a key, or on a server without keys, a program on a machine. The batches of a key are
    another one."""
    if request.client is None:
        return f"{client_of(request)} in batches"
    return client_of(request) if caller_of(request) is not None else f"{request.client.host} {client_of(request)}"


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server
