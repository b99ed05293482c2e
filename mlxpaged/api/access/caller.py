"""Who sent a request: the owner of a key, or anybody, on a server without keys."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from mlxpaged.api.access.rate_limit import Allowance
from mlxpaged.api.errors import ApiError
from mlxpaged.engine import Priority


@dataclass(frozen=True)
class Caller:
    """name: the key's. default, highest: the priority of its requests, and the best that they may ask for. admin: may
    see and end everybody's requests. allowance: what its limits leave."""

    name: str
    default: Priority
    highest: Priority
    admin: bool
    allowance: Allowance


def caller_of(request: Request) -> Caller | None:
    """None where the server has no keys, and everybody may do everything."""
    caller: Caller | None = request.state.caller
    return caller


def require_admin(request: Request) -> None:
    """Raises ApiError 403."""
    caller = caller_of(request)
    if caller is not None and not caller.admin:
        message = f"{request.method} {request.url.path} is for admin keys; {caller.name!r} is not one"
        raise ApiError(403, message, "permission_error", code="admin_key_required")


def owner_of(request: Request) -> str | None:
    """Whose a thing is that the request makes and the server keeps."""
    caller = caller_of(request)
    return None if caller is None else caller.name


def may_use(request: Request, owner: str | None) -> bool:
    """Whether the caller may see a thing that is kept: its own, by the key's name, and an admin everything."""
    caller = caller_of(request)
    return caller is None or caller.admin or caller.name == owner
