"""All endpoints, of all APIs. The router and /openapi.json are both made from this table."""

from __future__ import annotations

import dataclasses
from itertools import takewhile

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from mlxpaged import addons
from mlxpaged.api import openapi
from mlxpaged.api.body import MAX_DISCARDED_BYTES, too_large
from mlxpaged.api.endpoint import Access, Api, Endpoint
from mlxpaged.api.error_format import FORMATS
from mlxpaged.api.server import server_of
from mlxpaged.api.web import files as web


def problem(name: str, api: Api) -> str | None:
    """Says why an API of another package cannot be served beside those before it: it has a path that is there already,
    one without a key, one outside of its format of errors or inside of another one, or a model with the name of another
    model in /openapi.json."""
    before = [APIS[each] for each in takewhile(name.__ne__, addons.everything("apis")) if each in APIS]
    known = [endpoint for each in before for endpoint in each.endpoints]
    models = {model.__name__: model for each in before for model in models_of(each)}
    for endpoint in api.endpoints:
        what, routes = f"{endpoint.method} {endpoint.path}", endpoint.routes()
        taken = [route for each in known if each.method == endpoint.method for route in each.routes()]
        if any(overlap(route, other) for route in routes for other in (*taken, *web.routes())):
            return f"{what} is there already"
        if api.errors is not None and not api.errors.has(endpoint.path):
            return f"{what} does not begin with {api.errors.prefix}/"
        if endpoint.access is Access.OPEN:
            return f"{what} needs no key"
    if api.errors is not None and any(api.errors.has(endpoint.path) for endpoint in known):
        return f"the paths of another API begin with {api.errors.prefix}/"
    for model in models_of(api):
        if models.setdefault(model.__name__, model) is not model:
            return f"there is another model with the name {model.__name__}"
    openapi.document([*known, *api.endpoints], needs_key=True)  # raises an error if a model has no schema
    return None


def models_of(api: Api) -> list[type[BaseModel]]:
    """The models of /openapi.json."""
    found = [model for each in api.endpoints for model in (each.body, each.answer, each.query) if model is not None]
    return found if api.errors is None else [*found, api.errors.model]


def overlap(one: Route, other: Route) -> bool:
    """Whether a request can be for both."""
    return bool(one.path_regex.match(other.path) or other.path_regex.match(one.path))


def limited(endpoint: Endpoint) -> Endpoint:
    """An endpoint whose handler gets no more of a body than the server's limit, however it reads it."""

    async def handle(request: Request) -> Response:
        limit, received = server_of(request).http.max_body_bytes, 0

        async def receive() -> Message:
            nonlocal received
            while True:
                message = await request.receive()
                received += len(message.get("body", b""))
                if received <= limit:
                    return message
                if not message.get("more_body") or received > limit + MAX_DISCARDED_BYTES:
                    raise too_large(limit)

        return await endpoint.handler(Request(request.scope, receive))

    return dataclasses.replace(endpoint, handler=handle)


def endpoints_of(name: str, api: Api) -> tuple[Endpoint, ...]:
    return api.endpoints if name in addons.ours("apis") else tuple(map(limited, api.endpoints))


APIS: addons.Table[Api] = addons.Table("apis", Api, problem)

ENDPOINTS = tuple(endpoint for name, api in APIS.items() for endpoint in endpoints_of(name, api))

FORMATS += [api.errors for api in APIS.values() if api.errors is not None]

OPEN_PATHS = web.PATHS | {endpoint.path for endpoint in ENDPOINTS if endpoint.access is Access.OPEN}
