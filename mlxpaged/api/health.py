"""GET /health and GET /metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.errors import RETRY
from mlxpaged.api.metrics import CONTENT_TYPE
from mlxpaged.api.server import server_of
from mlxpaged.engine import EngineState


async def health(request: Request) -> Response:
    """200 if the server takes requests; 503 with the reason while it loads or drains, and if the engine is dead."""
    engine = server_of(request).engine
    if engine is None:
        return JSONResponse({"status": "ok", "model": None})
    body: dict[str, object] = {"status": engine.state.value, "model": engine.info.model if engine.info else None}
    if engine.state is EngineState.READY and engine.stats is not None:
        scheduler = engine.stats.scheduler
        return JSONResponse(body | {"running": scheduler.running, "waiting": scheduler.waiting})
    if engine.reason is not None:
        body["reason"] = engine.reason
    return JSONResponse(body, status_code=503, headers=None if engine.state is EngineState.DEAD else RETRY)


async def metrics(request: Request) -> Response:
    return Response(server_of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})
