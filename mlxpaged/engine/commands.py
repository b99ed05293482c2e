"""What the event loop asks of an engine: functions with arguments, so that they can be sent to another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxpaged.engine.core import EngineCore
from mlxpaged.engine.embedding_core import EmbeddingCore
from mlxpaged.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.engine.status import EngineSnapshot, EngineStatus

Core = EngineCore | EmbeddingCore
Outputs = list[RequestOutput]

Command = Callable[[Core], Outputs]
"""Runs between two steps. Returns the last outputs of the requests that it ended."""

Question = Callable[[Core], tuple[Any, Outputs]]
"""Like a command. The first part of its result is the answer."""


def submit(core: Core, requests: Sequence[Request]) -> Outputs:
    assert isinstance(core, EngineCore)
    return core.submit(requests)


def abort(core: Core, request_id: str) -> Outputs:
    assert isinstance(core, EngineCore)
    return core.abort(request_id)


def abort_all(core: Core, error: str) -> Outputs:
    return core.abort_all(error)


def cancel(core: Core, request_ids: Sequence[str]) -> tuple[list[EndedRequest], Outputs]:
    return core.cancel(request_ids)


def status(core: Core) -> tuple[EngineStatus, Outputs]:
    return core.status(), []


def snapshot(core: Core) -> tuple[EngineSnapshot, Outputs]:
    return core.snapshot(), []


def clear_cache(core: Core) -> tuple[int, Outputs]:
    return core.clear_cache(), []


def give_back(core: Core) -> tuple[int, Outputs]:
    return core.give_back(), []
