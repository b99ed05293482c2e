"""GET /v1/status and POST /v1/cache/clear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.server import Server, server_of
from mlxpaged.engine import AsyncEngine, EngineState, SequenceState
from mlxpaged.scheduler import SchedulerStats


async def status(request: Request) -> Response:
    """Answered between two steps of the engine. The status code is 200 in every state: load balancers use /health."""
    server = server_of(request)
    return JSONResponse(head(server) | (await running_engine(server.engine) if server.engine is not None else {}))


def head(server: Server) -> dict[str, Any]:
    engine = server.engine
    return {
        "state": EngineState.READY.value if engine is None else engine.state.value,
        "reason": None if engine is None else engine.reason,
        "model": None if engine is None or engine.info is None else engine.info.model,
        "uptime_seconds": server.uptime,
    }


async def running_engine(engine: AsyncEngine) -> dict[str, Any]:
    """Empty if the engine still loads its model, or is dead."""
    if engine.info is None or engine.state is EngineState.DEAD:
        return {}
    found, model = await engine.status(), engine.info.embedding_model
    return {
        "steps": found.steps_total,
        "running": {"total": found.scheduler.running, "sequences": describe(found.running)},
        "waiting": {"total": found.scheduler.waiting, "sequences": describe(found.waiting)},
        "blocks": blocks(found.scheduler),
        "swap": swap(found.scheduler),
        "embeddings": {
            "model": None if model is None else model.name,
            "inputs_waiting": 0 if engine.stats is None else engine.stats.embeddings.waiting,
        },
    }


def describe(sequences: Sequence[SequenceState]) -> list[dict[str, Any]]:
    return [
        asdict(sequence)
        | {
            "status": sequence.status.value,
            "phase": None if sequence.phase is None else sequence.phase.value,
            "priority": sequence.priority.name.lower(),
        }
        for sequence in sequences
    ]


def blocks(stats: SchedulerStats) -> dict[str, int]:
    usage = stats.blocks
    total = usage.used + usage.cached + usage.free
    return {"used": usage.used, "cached": usage.cached, "free": usage.free, "total": total}


def swap(stats: SchedulerStats) -> dict[str, int]:
    return {"used": stats.swap.used, "total": stats.swap.used + stats.swap.free}


async def clear_cache(request: Request) -> Response:
    """Running requests keep their blocks."""
    engine, _ = server_of(request).ready(None)
    return JSONResponse({"dropped_blocks": await engine.clear_cache()})
