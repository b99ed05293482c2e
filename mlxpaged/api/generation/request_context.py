"""Decides how a request is served: its id, its priority, its deadlines, and what is told about its course."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from mlxpaged.api.access.caller import Caller, caller_of
from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation.request import GenerationRequest
from mlxpaged.api.request_id import HEADER, VALID, new_id
from mlxpaged.api.server import program_of, server_of
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.engine_config import EngineConfig

TIMELINE_HEADER, PROGRESS_HEADER = "X-Mlxpaged-Timeline", "X-Mlxpaged-Progress"

PROGRESS_SECONDS = 1.0
"""A client that asks for progress waits at most this long for news."""


@dataclass(frozen=True)
class RequestContext:
    """client: who takes turns with others. service_tier: the granted one, as the response names it. timeout,
    ttft_timeout: seconds; None for no limit. timeline: whether the client gets one. progress: whether a stream has data
    about the request's progress. keep_alive_seconds: how long a stream may be silent. cache_scope: only requests of the
    same one share prefixes."""

    request_id: str
    caller: Caller | None
    client: str
    priority: Priority
    service_tier: str
    timeout: float | None
    ttft_timeout: float | None
    timeline: bool
    progress: bool
    keep_alive_seconds: float
    cache_scope: tuple[str, ...]


def context_of(http: Request, request: GenerationRequest, config: EngineConfig, id_prefix: str) -> RequestContext:
    """Raises ApiError for a header or a field that asks for what the server does not grant."""
    caller = caller_of(http)
    priority, service_tier = priority_of(request, caller, config.default_priority)
    progress = is_wanted(http, PROGRESS_HEADER, request.return_progress)
    longest = server_of(http).http.keep_alive_seconds
    return RequestContext(
        request_id=choose_id(http, id_prefix),
        caller=caller,
        client=program_of(http),
        priority=priority,
        service_tier=service_tier,
        timeout=config.request_timeout if request.timeout is None else request.timeout,
        ttft_timeout=config.ttft_timeout if request.ttft_timeout is None else request.ttft_timeout,
        timeline=is_wanted(http, TIMELINE_HEADER, config.timelines),
        progress=progress,
        keep_alive_seconds=min(PROGRESS_SECONDS, longest) if progress else longest,
        cache_scope=cache_scope(caller, server_of(http).http.isolate_prefix_cache),
    )


def cache_scope(caller: Caller | None, isolates: bool) -> tuple[str, ...]:
    """Returns what keeps the prefixes of some keys apart from those of others, which could learn of them from the time
    to the first token and from the number of cached tokens: the tier of the key, or its name if the server isolates
    them all."""
    if caller is None:
        return ()
    return ("key", caller.name) if isolates else ("tier", caller.default.name)


def choose_id(http: Request, prefix: str) -> str:
    """Returns the client's id for this request, or a new one. Raises ApiError if the client's is not valid. A stream
    that waited for its model keeps the id that its header has, and all parts of a request have the same one."""
    given = http.headers.get(HEADER)
    if given is None and not getattr(http.state, "has_begun", False):
        http.state.request_id = new_id(prefix)
    elif given is not None and not VALID.match(given):
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


def is_wanted(http: Request, header: str, default: bool) -> bool:
    """Returns what a header says, which is 1 or 0. Raises ApiError."""
    given = http.headers.get(header)
    if given not in (None, "0", "1"):
        raise ApiError(400, f"{header}: must be 1 or 0, got {given!r}", param=header)
    return default if given is None else given == "1"
