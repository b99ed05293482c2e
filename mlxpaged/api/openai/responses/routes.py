"""Handles the endpoints of /v1/responses."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.access.caller import owner_of, sees_all
from mlxpaged.api.body import read_query
from mlxpaged.api.errors import ApiError, bad_parameter
from mlxpaged.api.generation.answers import reply
from mlxpaged.api.generation.prompt import count_tokens
from mlxpaged.api.generation.submission import start
from mlxpaged.api.openai.responses.beginning import ResponseBeginning
from mlxpaged.api.openai.responses.renderer import ResponseRenderer
from mlxpaged.api.openai.responses.schema import (
    REFERENCE,
    InputTokensRequest,
    Item,
    ItemList,
    ItemReference,
    OtherItem,
    ResponseRequest,
)
from mlxpaged.api.openai.responses.store import ITEM, MAX_RESPONSES, ResponseStore, StoredResponse
from mlxpaged.api.openai.responses.translation import check_calls, offered, translate
from mlxpaged.api.page import page_of
from mlxpaged.api.request_id import RESPONSE_PREFIX, response_id_of
from mlxpaged.api.schema import Body
from mlxpaged.api.server import HUGE_BODY_BYTES, LARGE_BODY_BYTES, server_of
from mlxpaged.core.engine.errors import DuplicateRequestError


def store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


async def respond(request: Request, body: ResponseRequest) -> Response:
    store = store_of(request)
    previous, earlier, items = await whole_conversation(request, body)
    answers = await start(request, lambda: translate(body, [*earlier, *items]), RESPONSE_PREFIX)
    if store.find(owner_of(request), response_id := response_id_of(answers.context.request_id)) is not None:
        answers.close()
        raise DuplicateRequestError(f"a stored response already has the id {response_id}")

    def keep(response: dict[str, Any]) -> None:
        if body.kept:
            store.add(owner_of(request), response, previous, items)

    beginning: ResponseBeginning | None = getattr(request.state, "beginning", None)
    large = request.state.body_size > LARGE_BODY_BYTES  # it has the instructions and the tools
    called_as = {tool.name: fields for tool, fields in offered(body, [*earlier, *items])}
    return await reply(answers, ResponseRenderer(answers, body, called_as, keep, beginning, large), bool(body.stream))


async def input_tokens(request: Request, body: InputTokensRequest) -> Response:
    _, earlier, items = await whole_conversation(request, body)
    num_tokens = await count_tokens(request, lambda: translate(body, [*earlier, *items]))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})


async def whole_conversation(
    request: Request, body: InputTokensRequest
) -> tuple[StoredResponse | None, list[Item], list[Item]]:
    """Returns the stored response that the request continues, the items up to its end, and those of the request."""
    found: StoredResponse | None = None
    earlier: list[Item] = []
    response_id = body.previous_response_id
    if response_id is not None:
        found = stored(request, response_id)
        if found is None:
            message = f"there is no stored response {response_id!r}; at most the newest {MAX_RESPONSES} are kept"
            raise bad_parameter("previous_response_id", message, code="previous_response_not_found")
        # It takes as long as a body that has it, but not as much memory: most bytes of a large one are images.
        request.state.body_size += min(found.num_held_bytes, HUGE_BODY_BYTES)
        continued = found
        earlier = await server_of(request).prepare(request, lambda: continued.conversation)
    found_items = referred(request, body)
    sizes = sum(map(len, filter(None, found_items.values())))
    if sizes > (most := server_of(request).http.max_body_bytes):
        message = f"its references are to items of {sizes} bytes; the limit is that of a body, {most}"
        raise bad_parameter("input", message, code="body_too_large")
    request.state.body_size += sizes

    def read() -> list[Item]:
        return [
            lost_or_stored(found_items[i]) if isinstance(item, ItemReference) else item
            for i, item in enumerate(body.items)
        ]

    items = await server_of(request).prepare(request, read) if found_items else read()
    check_calls(earlier, items)
    return found, earlier, items


def stored(request: Request, response_id: str) -> StoredResponse | None:
    """Returns the response of this id that the caller may use."""
    return store_of(request).find(owner_of(request), response_id_of(response_id), any_owner=sees_all(request))


def referred(request: Request, body: InputTokensRequest) -> dict[int, bytes | None]:
    """Returns the stored items that items of the request refer to, by index. None for an item of another server: it is
    left out by name. Raises ApiError if it is the last one: the answer would be to another."""
    store, owner = store_of(request), owner_of(request)
    found = {
        i: store.item(owner, item.id, any_owner=sees_all(request))
        for i, item in enumerate(body.items)
        if isinstance(item, ItemReference)
    }
    last = body.items[-1]
    if isinstance(last, ItemReference) and found[len(body.items) - 1] is None:
        message = f"there is no stored item {last.id!r}; send the item itself"
        raise bad_parameter(f"input.{len(body.items) - 1}.id", message, code="item_not_found")
    if None in found.values():
        server_of(request).ignore(request, f"input.{REFERENCE}", "this server does not have the item")
    return found


def lost_or_stored(item: bytes | None) -> Item:
    return OtherItem(type=REFERENCE) if item is None else ITEM.validate_json(item)


async def retrieve(request: Request) -> Response:
    read_query(request, Body)  # no parameter is supported
    return Response(find(request).body, media_type=JSONResponse.media_type)


async def delete(request: Request) -> Response:
    response_id = response_id_of(request.path_params["response_id"])
    store_of(request).delete(find(request).owner, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def cancel(request: Request) -> Response:
    """Refuses every call: OpenAI's API cancels only responses that are made in the background."""
    response_id = request.path_params["response_id"]
    reason = "no response runs in the background"
    message = f"{reason}; DELETE /v1/requests/{response_id} ends one that is still running"
    raise bad_parameter("response_id", message, "not_cancellable", reason)


async def input_items(request: Request) -> Response:
    query = read_query(request, ItemList)
    inputs = find(request).inputs
    ids = list(inputs if query.order == "asc" else reversed(inputs))

    def body() -> bytes:
        return to_json(
            page_of(ids, lambda each: ITEM.validate_json(inputs[each]).shown(each), query.after, query.limit)
        )

    return Response(await server_of(request).render(body), media_type=JSONResponse.media_type)


def find(request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    if (found := stored(request, response_id)) is None:
        raise ApiError(404, f"there is no response {response_id!r}", param="response_id", code="response_not_found")
    return found
