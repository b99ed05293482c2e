"""What the event loop asks of an engine: functions with arguments, so that they can be sent to another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxpaged.core.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.core.engine.status import EngineSnapshot, EngineStatus
from mlxpaged.core.engine.worker import Worker

Outputs = list[RequestOutput]

Command = Callable[[Worker], Outputs]
"""Runs between two steps. Returns the last outputs of the requests that it ended."""

Question = Callable[[Worker], tuple[Any, Outputs]]
"""Like a command. The first part of its result is the answer."""


def submit(worker: Worker, requests: Sequence[Request]) -> Outputs:
    return worker.submit(requests)


def abort(worker: Worker, request_id: str) -> Outputs:
    return worker.abort(request_id)


def abort_all(worker: Worker, error: str) -> Outputs:
    return worker.abort_all(error)


def cancel(worker: Worker, request_ids: Sequence[str]) -> tuple[list[EndedRequest], Outputs]:
    return worker.cancel(request_ids)


def status(worker: Worker) -> tuple[EngineStatus, Outputs]:
    return worker.status(), []


def snapshot(worker: Worker) -> tuple[EngineSnapshot, Outputs]:
    return worker.snapshot(), []


def clear_cache(worker: Worker) -> tuple[int, Outputs]:
    return worker.clear_cache(), []


def give_back(worker: Worker) -> tuple[int, Outputs]:
    return worker.give_back(), worker.finish_step()


def keep_prefixes(worker: Worker) -> tuple[None, Outputs]:
    """End all requests, and store what is to outlive the model. It must be unloaded then."""
    worker.abort_all("the model is unloaded")
    worker.keep_prefixes()
    return None, []
