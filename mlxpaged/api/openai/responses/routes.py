"""POST /v1/responses, and GET, DELETE /v1/responses/{id} and its input items."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.access.caller import may_use, owner_of
from mlxpaged.api.body import read_json, read_query
from mlxpaged.api.errors import ApiError, bad_parameter
from mlxpaged.api.openai.generation import begin, check_text_length, check_token_ids
from mlxpaged.api.openai.responses.reply import ResponseReply
from mlxpaged.api.openai.responses.schema import ItemList, ResponseRequest
from mlxpaged.api.openai.responses.store import ResponseStore, StoredResponse
from mlxpaged.api.openai.terms import terms_of
from mlxpaged.api.page import page
from mlxpaged.api.server import server_of
from mlxpaged.api.streaming import EventStream, answer
from mlxpaged.engine import DuplicateRequestError
from mlxpaged.models.tokenizer import ChatTemplateError


def store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


async def create(request: Request) -> Response:
    body = await read_json(request, ResponseRequest)
    return await answer(request, respond(request, body))


async def respond(request: Request, body: ResponseRequest) -> Response:
    server, store = server_of(request), store_of(request)
    engine, info = server.ready(body.model)
    sampling, params = body.sampling(), body.params()
    terms = terms_of(request, sampling, engine.config, "resp")
    if terms.request_id in store:
        raise DuplicateRequestError(f"a response with the id {terms.request_id} is stored")
    earlier = conversation_before(request, body.previous_response_id)
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    messages = [*instructions, *earlier, *body.messages()]
    check_text_length(info, "input", sum(len(message["content"]) for message in messages))

    def keep(response: dict[str, Any], text: str) -> None:
        if body.kept:
            store.add(owner_of(request), response, body, earlier, text)

    reply = ResponseReply(info, body, terms, keep)
    with begin(server, engine, terms, sampling, num_prompts=1) as generation:
        try:
            prompt = await server.tokenize(lambda: info.tokenizer.apply_chat_template(messages))
        except ChatTemplateError as error:
            raise bad_parameter("input", str(error)) from None
        check_token_ids(info, params, "input", [prompt])
        generation.submit("input", [prompt], params, limit_field="max_output_tokens")
    if body.stream:
        return EventStream(reply.events(generation), generation.close)
    return JSONResponse(await reply.complete(generation))


def conversation_before(request: Request, response_id: str | None) -> list[dict[str, Any]]:
    if response_id is None:
        return []
    found = store_of(request).get(response_id)
    if found is None or not may_use(request, found.owner):
        message = f"there is no response {response_id!r}; the server keeps the newest ones that are stored"
        raise bad_parameter("previous_response_id", message, code="previous_response_not_found")
    return list(found.conversation)


async def retrieve(request: Request) -> Response:
    if request.query_params:
        raise bad_parameter(
            next(iter(request.query_params)), "this parameter is not supported", "unsupported_parameter"
        )
    return JSONResponse(find(request).response)


async def delete(request: Request) -> Response:
    response_id = find(request).response["id"]
    store_of(request).delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    query = read_query(request, ItemList)
    items = list(find(request).items)
    return page(items if query.order == "asc" else items[::-1], query.after, query.limit)


def find(request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    found = store_of(request).get(response_id)
    if found is None or not may_use(request, found.owner):
        raise ApiError(404, f"there is no response {response_id!r}", param="response_id", code="response_not_found")
    return found
