"""The way of a request into the engine: its checks, its place in the queue, its sequences."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from starlette.requests import Request as HttpRequest

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.answers import Answers
from mlxpaged.api.generation.check import ContextLengthError, check_request
from mlxpaged.api.generation.prompt import Prompts, prepare
from mlxpaged.api.generation.request import Chat, GenerationRequest
from mlxpaged.api.generation.request_context import RequestContext, context_of
from mlxpaged.api.open_requests import OpenRequest
from mlxpaged.api.server import Server, server_of
from mlxpaged.engine import AsyncEngine, MinTokensError, QueueFullError, Request, RequestCancelledError, RequestStream
from mlxpaged.scheduler import PromptTooLongError


async def start(http: HttpRequest, translate: Callable[[], GenerationRequest], id_prefix: str) -> Answers:
    """Check a request, tokenize its prompts, and submit it.

    translate: makes the request of the client's body; it runs on a thread if the body is large. Raises ApiError and the
    engine's errors.
    """
    server = server_of(http)
    request = await server.prepare(http, lambda: check_request(translate()))
    engine, info = server.ready(request.model)
    context = context_of(http, request, engine.config, id_prefix)
    with reserved(server, engine, context, request) as (opened, arrival_time):
        prompts = await prepare(http, request, info)
        if opened.cancelled:
            raise RequestCancelledError("the request was cancelled")
        requests = engine_requests(request, context, opened, prompts, arrival_time)
        streams = submit(engine, request, prompts, requests)
        opened.submitted = True
        opened.count(sum(len(prompt) for prompt in prompts.token_ids))
    return Answers(info, context, request, prompts, streams, lambda: server.open_requests.close(opened))


@contextlib.contextmanager
def reserved(
    server: Server, engine: AsyncEngine, context: RequestContext, request: GenerationRequest
) -> Iterator[tuple[OpenRequest, float]]:
    """The id of one HTTP request and room in the queue for all its sequences, while it is made ready and submitted; and
    its arrival time.

    An exception in the block gives both back. Raises DuplicateRequestError, QueueFullError, or ApiError if the server
    would never take as many.
    """
    num_prompts = 1 if isinstance(request.prompt, Chat) else len(request.prompt)
    count = num_prompts * request.candidates
    opened = server.open_requests.open(context.request_id, count, context.caller)
    try:
        with engine.reserve(count) as arrival_time:
            yield opened, arrival_time
    except BaseException as error:
        server.open_requests.close(opened)
        if isinstance(error, QueueFullError) and not error.ever:
            raise bad_parameter(request.client_name("candidates"), str(error), code="too_many_prompts") from None
        raise


def engine_requests(
    request: GenerationRequest, context: RequestContext, opened: OpenRequest, prompts: Prompts, arrival_time: float
) -> list[Request]:
    """Each prompt as often as there are candidates. A seeded request gives its candidate `i` what it would give alone
    with the seed + i."""
    params = prompts.params
    if request.candidates > request.n and params.logprobs is None:
        params = dataclasses.replace(params, logprobs=0)  # to find the best candidates by
    requests = []
    for number, name in enumerate(opened.names):
        prompt, candidate = divmod(number, request.candidates)
        seed = None if params.seed is None else params.seed + candidate
        requests.append(
            Request(
                name,
                prompts.token_ids[prompt],
                dataclasses.replace(params, seed=seed),
                arrival_time,
                context.priority,
                fork_of=opened.names[number - candidate] if candidate else None,
                timeout=context.timeout,
                ttft_timeout=context.ttft_timeout,
                timeline=context.timeline,
            )
        )
    return requests


def submit(
    engine: AsyncEngine, request: GenerationRequest, prompts: Prompts, requests: Sequence[Request]
) -> list[RequestStream]:
    """Submit all requests, or none of them if one is refused. Raises ApiError or EngineUnavailableError."""
    try:
        return engine.submit(requests, request.default_max_tokens)
    except PromptTooLongError as error:
        fit_alone = all(fits_alone(engine, prompt) for prompt in prompts.token_ids)
        raise ContextLengthError(request.client_name("max_tokens") if fit_alone else prompts.param, error) from None
    except MinTokensError as error:
        raise bad_parameter(request.client_name("min_tokens"), str(error)) from None


def fits_alone(engine: AsyncEngine, prompt: Sequence[int]) -> bool:
    """Whether the prompt leaves room for at least one token."""
    try:
        engine.check(len(prompt), None)
    except PromptTooLongError:
        return False
    return True
