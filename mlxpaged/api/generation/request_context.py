"""Decides how a request is served: its id, its priority, its deadlines, and whether its timeline is recorded."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from mlxpaged.api.access.caller import Caller, caller_of
from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation.request import GenerationRequest
from mlxpaged.api.request_id import HEADER, VALID, new_id
from mlxpaged.engine import EngineConfig, Priority

TIMELINE_HEADER = "X-Mlxpaged-Timeline"


@dataclass(frozen=True)
class RequestContext:
    """service_tier: the granted one, as the response names it. timeout, ttft_timeout: seconds; None for no limit.
    timeline: whether the client gets one."""

    request_id: str
    caller: Caller | None
    priority: Priority
    service_tier: str
    timeout: float | None
    ttft_timeout: float | None
    timeline: bool


def context_of(http: Request, request: GenerationRequest, config: EngineConfig, id_prefix: str) -> RequestContext:
    """Raises ApiError for a header or a field that asks for what the server does not grant."""
    caller = caller_of(http)
    priority, service_tier = priority_of(request, caller, config.default_priority)
    return RequestContext(
        request_id=choose_id(http, id_prefix),
        caller=caller,
        priority=priority,
        service_tier=service_tier,
        timeout=config.request_timeout if request.timeout is None else request.timeout,
        ttft_timeout=config.ttft_timeout if request.ttft_timeout is None else request.ttft_timeout,
        timeline=wants_timeline(http, config),
    )


def choose_id(http: Request, prefix: str) -> str:
    """Returns the client's id for this request, or a new one. Raises ApiError if the client's is not valid."""
    given = http.headers.get(HEADER)
    if given is None:
        http.state.request_id = new_id(prefix)
    elif not VALID.match(given):
        raise ApiError(400, f"{HEADER}: must be 1 to 128 of A-Z, a-z, 0-9, '.', '_' and '-'", param=HEADER)
    request_id: str = http.state.request_id
    return request_id


def priority_of(request: GenerationRequest, caller: Caller | None, default: Priority) -> tuple[Priority, str]:
    """Returns the priority, and the response's name for it. A client may always lower its own. default: the default and
    the highest priority on a server without keys."""
    if request.service_tier == "flex":
        return Priority.LOW, "flex"
    if request.service_tier == "priority":
        if (default if caller is None else caller.highest) is not Priority.HIGH:
            message = "'priority' is not allowed for this caller; use 'auto', 'default' or 'flex'"
            raise request.refusal("service_tier", message, code="service_tier_not_allowed")
        return Priority.HIGH, "priority"
    return default if caller is None else caller.default, "default"


def wants_timeline(http: Request, config: EngineConfig) -> bool:
    given = http.headers.get(TIMELINE_HEADER)
    if given not in (None, "0", "1"):
        raise ApiError(400, f"{TIMELINE_HEADER}: must be 1 or 0, got {given!r}", param=TIMELINE_HEADER)
    return config.timelines if given is None else given == "1"
