"""Handles GET /health, /metrics and /v1/status, and POST /v1/cache/clear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.errors import RETRY
from mlxpaged.api.metrics import CONTENT_TYPE
from mlxpaged.api.server import server_of
from mlxpaged.engine import AsyncEngine, EngineInfo, EngineState, EngineStatus, SequenceState


async def health(request: Request) -> Response:
    """200 if the server takes requests; 503 while it loads, with how far it is, and with the reason while it drains and
    if the engine is dead."""
    engine = server_of(request).engine
    if engine is None:
        return JSONResponse({"status": "ok", "model": None})
    body: dict[str, object] = {"status": engine.state.value, "model": engine.info.model if engine.info else None}
    if engine.state is EngineState.READY and engine.stats is not None:
        scheduler = engine.stats.scheduler
        if engine.info is not None and engine.info.kernels_off is not None:
            body["metal_kernels_off"] = engine.info.kernels_off
        return JSONResponse(body | {"running": scheduler.running, "waiting": scheduler.waiting})
    if engine.state is EngineState.LOADING and engine.progress is not None:
        body["progress"] = str(engine.progress)
    if engine.reason is not None:
        body["reason"] = engine.reason
    return JSONResponse(body, status_code=503, headers=None if engine.state is EngineState.DEAD else RETRY)


async def metrics(request: Request) -> Response:
    return Response(server_of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def status(request: Request) -> Response:
    """The engine answers between two steps. The status code is 200 in every state: load balancers use /health."""
    server = server_of(request)
    engine = server.engine
    found: dict[str, Any] = {
        "state": EngineState.READY.value if engine is None else engine.state.value,
        "reason": None if engine is None else engine.reason,
        "model": None if engine is None or engine.info is None else engine.info.model,
        "uptime_seconds": server.uptime,
    }
    if engine is not None and engine.state is EngineState.LOADING and engine.progress is not None:
        found["progress"] = str(engine.progress)
    return JSONResponse(found | (await running_engine(engine) if engine is not None else {}))


async def running_engine(engine: AsyncEngine) -> dict[str, Any]:
    """Returns {} if the engine still loads its model, or is dead."""
    if engine.info is None or engine.state is EngineState.DEAD:
        return {}
    return describe_engine(engine, engine.info, await engine.status())


def describe_engine(engine: AsyncEngine, info: EngineInfo, found: EngineStatus) -> dict[str, Any]:
    model = info.embedding_model
    blocks, swap = found.scheduler.blocks, found.scheduler.swap
    return {
        "steps": found.steps_total,
        "running": {"total": found.scheduler.running, "sequences": describe(found.running)},
        "waiting": {"total": found.scheduler.waiting, "sequences": describe(found.waiting)},
        "blocks": {
            "used": blocks.used,
            "cached": blocks.cached,
            "free": blocks.free,
            "total": sum(astuple(blocks)),
            "max_total": found.scheduler.max_blocks,
        },
        "kv_cache": {
            "bytes": 0 if engine.stats is None else engine.stats.kv_cache_bytes,
            "max_bytes": info.kv_cache_bytes,
        },
        "swap": {"used": swap.used, "total": swap.used + swap.free},
        "attention": {"backend": info.backend, "metal_kernels_off": info.kernels_off},
        "states": {
            "reserved_bytes": info.states.nbytes,
            "bytes_per_sequence": info.states.bytes_per_state,
            "checkpoints": found.scheduler.checkpoints,
            "max_checkpoints": found.scheduler.max_checkpoints,
        },
        "embeddings": {
            "model": None if model is None else model.name,
            "inputs_waiting": 0 if engine.stats is None else engine.stats.embeddings.waiting,
        },
    }


def describe(sequences: Sequence[SequenceState]) -> list[dict[str, Any]]:
    return [
        vars(sequence)  # asdict would copy each value: 25 us a sequence
        | {
            "status": sequence.status.value,
            "phase": None if sequence.phase is None else sequence.phase.value,
            "priority": sequence.priority.name.lower(),
        }
        for sequence in sequences
    ]


async def clear_cache(request: Request) -> Response:
    """Running requests keep their blocks."""
    engine, _ = server_of(request).ready(None)
    return JSONResponse({"dropped_blocks": await engine.clear_cache()})
