"""Handles GET /health, /metrics and /v1/status, and POST /v1/cache/clear."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.errors import RETRY
from mlxpaged.api.metrics import CONTENT_TYPE
from mlxpaged.api.server import server_of
from mlxpaged.core.engine.errors import EngineState, EngineUnavailableError
from mlxpaged.core.engine.status import EngineStats, EngineStatus, SequenceState
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.info import EngineInfo
from mlxpaged.models.features import Feature, Missing
from mlxpaged.parts.disk.disk_tier import NO_TIER, TierStats
from mlxpaged.parts.drafting.draft_stats import DRAFTERS, NO_DRAFTS
from mlxpaged.parts.embeddings.embedder import NO_EMBEDDINGS
from mlxpaged.process_memory import resident_bytes
from mlxpaged.registry.model import Model


async def health(request: Request) -> Response:
    """200 if the server takes requests; 503 while it loads, with how far it is, and with the reason while it drains or
    is stalled, and if the engine of the default model is dead. running, waiting: of all models."""
    registry = server_of(request).registry
    if registry is None:
        return JSONResponse({"status": "ok", "model": None})
    state, default = registry.state, registry.default.engine
    info = None if default is None else default.info
    body: dict[str, object] = {"status": state.value, "model": registry.default.name if registry.is_started else None}
    if state is EngineState.READY:
        if isinstance(info, EngineInfo) and info.kernels_off is not None:
            body["metal_kernels_off"] = info.kernels_off
        runner = request.app.state.batch_runner
        if runner is not None and runner.num_restarts:
            body["batch_task_restarts"] = runner.num_restarts
        found = [engine.stats.scheduler for engine in registry.engines if engine.stats is not None]
        counts = {"running": sum(each.running for each in found), "waiting": sum(each.waiting for each in found)}
        return JSONResponse(body | counts)
    if state is EngineState.LOADING and registry.progress is not None:
        body["progress"] = str(registry.progress)
    if registry.reason is not None:
        body["reason"] = registry.reason
    if (stall := registry.stall) is not None:
        body["stall"] = stall.fields(registry.clock())
    return JSONResponse(body, status_code=503, headers=None if state is EngineState.DEAD else RETRY)


async def metrics(request: Request) -> Response:
    return Response(server_of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def status(request: Request) -> Response:
    """The engines answer between two steps. The status code is 200 in every state: load balancers use /health. The
    fields of the default model stand at the top, too."""
    server = server_of(request)
    registry = server.registry
    found: dict[str, Any] = {"uptime_seconds": server.uptime, "resident_bytes": resident_bytes(), "models": []}
    if server.keys is not None:
        found["keys"] = server.keys.usage.describe()
    if registry is None:
        return JSONResponse({"state": EngineState.READY.value, "reason": None, "model": None} | found)
    asked = [] if registry.state is EngineState.STALLED else registry.loaded  # a stalled engine does not reply
    models = {model: await at_work(model) for model in asked}
    state = registry.state  # after the engines have answered, or have failed to
    if state is EngineState.LOADING and registry.progress is not None:
        found["progress"] = str(registry.progress)
    found |= {
        "state": state.value,
        "reason": registry.reason,
        "model": registry.default.name if registry.is_started else None,
        "models": [model_fields(model) | models.get(model, {}) for model in registry.loaded],
    }
    return JSONResponse(found | models.get(registry.default, {}))


def model_fields(model: Model) -> dict[str, Any]:
    state, kind = model.state.value, model.kind.value
    return {"id": model.name, "state": state, "kind": kind, "memory_bytes": model.memory_bytes}


async def at_work(model: Model) -> dict[str, Any]:
    """Returns what a model has at work; nothing if it was unloaded meanwhile."""
    with contextlib.suppress(EngineUnavailableError):
        if (engine := model.engine) is not None:
            return describe_engine(engine, await engine.status())
    return {}


def describe_engine(engine: AsyncEngine, found: EngineStatus) -> dict[str, Any]:
    info = engine.info
    assert info is not None
    fields = {
        "steps": found.steps_total,
        "step_seconds": {str(rows): round(seconds, 6) for rows, seconds in found.step_seconds.items()},
        "running": {"total": found.scheduler.running, "sequences": describe(found.running)},
        "waiting": {"total": found.scheduler.waiting, "sequences": describe(found.waiting)},
        "embeddings": {
            "model": None if info.embedding_model is None else info.embedding_model.name,
            "inputs_waiting": 0 if engine.stats is None else engine.stats.of(NO_EMBEDDINGS).waiting,
        },
    }
    return fields | (memory_of(engine, found, info) if isinstance(info, EngineInfo) else {})


def memory_of(engine: AsyncEngine, found: EngineStatus, info: EngineInfo) -> dict[str, Any]:
    blocks, swap = found.scheduler.blocks, found.scheduler.swap
    stats = EngineStats(found.scheduler) if engine.stats is None else engine.stats
    drafts = stats.of(NO_DRAFTS)
    return {
        "tokens": {
            "prompt": found.scheduler.prompt_tokens_total,
            "cached": found.scheduler.prefix_hit_tokens_total,
            "prefilled": stats.prefilled_tokens_total,
            "output": stats.generated_tokens_total,
        },
        "blocks": {
            "used": blocks.used,
            "cached": blocks.cached,
            "free": blocks.free,
            "total": sum(astuple(blocks)),
            "max_total": found.scheduler.max_blocks,
        },
        "kv_cache": {
            "bytes": stats.kv_cache_bytes,
            "max_bytes": info.kv_cache_bytes,
            "dtype": info.kv_cache_dtype,
            "dtype_because": info.missing[Feature.KV_CACHE_DTYPE] or None,
        },
        "swap": {
            "used": swap.used,
            "total": swap.used + swap.free,
            "written_today_bytes": stats.swap_written_today,
            "written_bytes": stats.swap_written_total,
        },
        "prefix_cache_disk": None if engine.stats is None else describe_tier(engine.stats.of(NO_TIER), info.missing),
        "speculative": {
            "drafters": info.drafters,
            "no_mtp_because": info.missing[Feature.DRAFT_HEAD] or None,
            "drafted_tokens": drafts.drafted_total,
            "accepted_tokens": drafts.accepted_total,
            "tokens_per_pass": round(drafts.gain.tokens_per_pass, 3),
            "share_of_steps": round(drafts.gain.share_of_steps, 3),
            "speedup": round(drafts.gain.speedup, 3),
            "by_drafter": {name: counts._asdict() for name, counts in zip(DRAFTERS, drafts.counts, strict=True)},
        },
        "ranks": None if info.cluster is None else list(info.cluster.ranks),
        "attention": {
            "backend": info.backend,
            "metal_kernels_off": info.kernels_off,
            "invariant_rows": info.invariant_rows,
        },
        "states": {
            "reserved_bytes": info.states.nbytes,
            "bytes_per_sequence": info.states.bytes_per_state,
            "checkpoints": found.scheduler.checkpoints,
            "max_checkpoints": found.scheduler.max_checkpoints,
        },
    }


def describe_tier(tier: TierStats, missing: Missing) -> dict[str, Any]:
    """Returns what the prefix cache has on a disk."""
    store = tier.store
    return {
        "directory": tier.directory or None,
        "off_because": missing[Feature.DISK_PREFIXES] or None,
        "blocks": store.blocks,
        "bytes": store.size,
        "max_bytes": store.max_size,
        "written_today_bytes": store.written_today,
        "written_bytes": store.written_total,
        "max_written_bytes": store.max_written,
        "writing_stopped_because": store.stopped or None,
        "damaged_blocks": store.damaged,
        "loading": tier.loading,
        "stored_blocks": tier.blocks_stored_total,
        "loaded_blocks": tier.blocks_loaded_total,
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
    """Empties the prefix caches of all models. Running requests keep their blocks."""
    registry = server_of(request).started()
    registry.require_ready()
    dropped = 0
    for model in registry.loaded:
        with contextlib.suppress(EngineUnavailableError):  # it was unloaded meanwhile, and its cache with it
            dropped += 0 if model.engine is None else await model.engine.clear_cache()
    registry.require_ready()  # the engine may have failed meanwhile
    return JSONResponse({"dropped_blocks": dropped})
