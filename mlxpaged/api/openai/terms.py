"""How a request is served, whatever it asks the model: its id, its priority, its deadlines, whether it is recorded."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from mlxpaged.api.access.caller import Caller, caller_of
from mlxpaged.api.errors import ApiError, bad_parameter
from mlxpaged.api.openai.schema import SamplingFields
from mlxpaged.api.request_id import HEADER, VALID, new_id
from mlxpaged.api.tiers import Tier, tier_of
from mlxpaged.engine import EngineConfig, Priority

TIMELINE_HEADER = "X-Mlxpaged-Timeline"


@dataclass(frozen=True)
class Terms:
    """caller: who asks. service_tier: what was granted, in OpenAI's words. timeout, ttft_timeout: seconds, None for any
    time."""

    request_id: str
    caller: Caller | None
    priority: Priority
    service_tier: str
    timeout: float | None
    ttft_timeout: float | None
    timeline: bool


def terms_of(request: Request, body: SamplingFields, config: EngineConfig, id_prefix: str) -> Terms:
    """Raises ApiError for a header or a field that asks for what cannot be had."""
    priority, service_tier = priority_of(body.service_tier, tier_of(request, config))
    return Terms(
        request_id=choose_id(request, id_prefix),
        caller=caller_of(request),
        priority=priority,
        service_tier=service_tier,
        timeout=config.request_timeout if body.timeout is None else body.timeout,
        ttft_timeout=config.ttft_timeout if body.ttft_timeout is None else body.ttft_timeout,
        timeline=wants_timeline(request, config),
    )


def choose_id(request: Request, prefix: str) -> str:
    """The client's id for this request, or a new one."""
    given = request.headers.get(HEADER)
    if given is None:
        request.state.request_id = new_id(prefix)
    elif not VALID.match(given):
        raise ApiError(400, f"{HEADER}: must be 1 to 128 of A-Z, a-z, 0-9, '.', '_' and '-'", param=HEADER)
    request_id: str = request.state.request_id
    return request_id


def priority_of(asked: str | None, tier: Tier) -> tuple[Priority, str]:
    """The priority and what the response calls it. A client may always lower itself."""
    if asked == "flex":
        return Priority.LOW, "flex"
    if asked == "priority":
        if tier.highest is not Priority.HIGH:
            message = "'priority' is not open to this caller; 'auto', 'default' and 'flex' are"
            raise bad_parameter("service_tier", message, code="service_tier_not_allowed")
        return Priority.HIGH, "priority"
    return tier.default, "default"


def wants_timeline(request: Request, config: EngineConfig) -> bool:
    given = request.headers.get(TIMELINE_HEADER)
    if given not in (None, "0", "1"):
        raise ApiError(400, f"{TIMELINE_HEADER}: must be 1 or 0, got {given!r}", param=TIMELINE_HEADER)
    return config.timelines if given is None else given == "1"
