"""What the routes share: the engine, the metrics, and the thread that tokenizes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from mlxpaged.api.access.key_ring import KeyRing
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.errors import ApiError, model_not_found
from mlxpaged.api.metrics import Metrics
from mlxpaged.api.open_requests import OpenRequests
from mlxpaged.engine import AsyncEngine, EngineConfig, EngineInfo, EngineState, RequestOutput
from mlxpaged.engine import Request as EngineRequest

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Server:
    """One per app. `engine` is None for a server started without a model, `keys` for one that asks for none."""

    def __init__(self, config: EngineConfig | None, clock: Callable[[], float], http: HttpConfig) -> None:
        """Raises KeyFileError."""
        self.http = http
        self.keys = KeyRing(http.api_keys, clock) if http.api_keys is not None else None
        self.metrics = Metrics(lambda: self.engine.stats if self.engine else None)
        self.engine = AsyncEngine(config, self._observe, clock) if config else None
        self.open_requests = OpenRequests()
        self._clock = clock
        self._started = clock()
        # One thread: a fast tokenizer must not be used by two at once, and a long prompt must not stop the event loop.
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="mlxpaged-tokenizer")

    def _observe(self, request: EngineRequest, output: RequestOutput) -> None:
        self.metrics.observe(request, output)
        self.open_requests.count(request.request_id, len(output.token_ids))
        if output.finish_reason is not None:
            logger.info(
                "%s finish_reason=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d seconds=%.3f",
                request.request_id,
                output.finish_reason.value,
                len(request.prompt_token_ids),
                output.num_cached_tokens,
                output.num_output_tokens,
                output.time - request.arrival_time,
            )

    def ready(self, model: str | None) -> tuple[AsyncEngine, EngineInfo]:
        """The engine that serves `model` (any, where None). Raises ApiError or EngineUnavailableError."""
        if self.engine is None:
            raise ApiError(503, "this server was started without a model", "server_error", code="no_model")
        info = self.engine.require_ready()
        if model is not None and model != info.model:
            raise model_not_found(model, [info.model])
        return self.engine, info

    async def tokenize(self, function: Callable[[], Result]) -> Result:
        """Run a function that uses the tokenizer on the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, function)

    @property
    def uptime(self) -> float:
        """Seconds."""
        return self._clock() - self._started

    @property
    def model_names(self) -> list[str]:
        if self.engine is None or self.engine.info is None or self.engine.state is EngineState.DEAD:
            return []
        return [self.engine.info.model]

    async def close(self) -> None:
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)
        if self.engine is not None and await self.engine.stop(timeout=10.0 if self.engine.info else 1.0):
            logger.info("engine thread stopped")


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server
