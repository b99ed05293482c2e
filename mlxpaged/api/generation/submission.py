"""Brings a request into the engine: checks it, reserves its place in the queue, and submits its sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from starlette.requests import Request as HttpRequest

from mlxpaged.api.generation.answers import Answers
from mlxpaged.api.generation.check import ContextLengthError, adapter_of, check_logprobs, check_request
from mlxpaged.api.generation.profiles import with_profile
from mlxpaged.api.generation.prompt import Prompts, prepare
from mlxpaged.api.generation.request import Chat, GenerationRequest
from mlxpaged.api.generation.request_context import RequestContext, context_of
from mlxpaged.api.open_requests import OpenRequest
from mlxpaged.api.server import server_of
from mlxpaged.core.engine.errors import MinTokensError, QueueFullError, RequestCancelledError
from mlxpaged.core.engine.request import Request
from mlxpaged.core.scheduling.admission import PromptTooLongError
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.info import EngineInfo
from mlxpaged.registry.profile import Profile


async def start(
    http: HttpRequest,
    translate: Callable[[], GenerationRequest],
    id_prefix: str,
    ended: Callable[[], None] = lambda: None,
    part_of: OpenRequest | None = None,
) -> Answers:
    """Check a request, tokenize its prompts, and submit it.

    translate: makes the request from the client's body; it runs on a thread if the body is large. ended: called when a
    request that has come to its engine has ended, perhaps twice. part_of: it stays open after this part.
    Raises ApiError and the engine's errors.
    """
    server = server_of(http)
    request, engine, info, adapter, profile = await resolve(http, translate)
    context = context_of(http, request, engine.config, id_prefix)
    num_prompts = 1 if isinstance(request.prompt, Chat) else len(request.prompt)
    whole = OpenRequest(context.request_id, context.caller) if part_of is None else part_of

    def forget() -> None:
        if part_of is None:
            server.open_requests.close(opened)
        ended()

    opened = server.open_requests.open(whole, num_prompts * request.candidates, engine)
    try:
        with engine.reserve(len(opened.names), server.held_beside(opened)) as arrival_time:
            prompts = await prepare(http, request, info)
            params = check_logprobs(request, prompts.params, prompts.token_ids, info)
            prompts = dataclasses.replace(prompts, params=params)
            if opened.cancelled:
                raise RequestCancelledError("the request was cancelled")
            requests = engine_requests(request, context, opened, prompts, arrival_time, adapter)
            streams = engine.submit(requests)
        of_prompts = request.num_counted or [len(prompt) for prompt in prompts.token_ids]
        shared = [0] * (request.candidates - 1)  # candidates have one prompt
        opened.submit([tokens for counted in of_prompts for tokens in (counted, *shared)])
    except BaseException as error:
        forget()
        match error:
            case QueueFullError(ever=False):
                raise request.refusal("candidates", str(error), code="too_many_prompts") from None
            case MinTokensError():
                raise request.refusal("min_tokens", str(error)) from None
            case PromptTooLongError():
                raise ContextLengthError(prompts.param, error) from None
        raise
    model = info.model if adapter is None else f"{info.model}:{adapter}"
    name = model if profile is None else profile.name
    return Answers(info, name, context, request, prompts, streams, forget, server.render)


class Resolved(NamedTuple):
    """A request with the defaults of its model and its profile, and what it names: a model, an adapter, a profile."""

    request: GenerationRequest
    engine: AsyncEngine
    info: EngineInfo
    adapter: str | None
    profile: Profile | None


async def resolve(http: HttpRequest, translate: Callable[[], GenerationRequest]) -> Resolved:
    """Waits until the model is loaded. Raises what `start` raises."""
    server = server_of(http)
    request = await server.prepare(http, lambda: check_request(translate()))
    engine, info = await server.ready(http, request.model, request.service_tier)
    adapter = adapter_of(request, server.started().names.adapter_in(request.model), info)
    profile = server.started().names.profile_in(request.model)
    info = await server.with_template(info, profile)
    return Resolved(
        with_profile(request.with_defaults(info.sampling_defaults), profile), engine, info, adapter, profile
    )


def engine_requests(
    request: GenerationRequest,
    context: RequestContext,
    opened: OpenRequest,
    prompts: Prompts,
    arrival_time: float,
    adapter: str | None,
) -> list[Request]:
    """Returns as many requests as candidates for each prompt. With a seed, candidate `i` is the answer to one request
    with seed + i."""
    params = prompts.params
    if request.candidates > request.n and params.logprobs is None:
        params = dataclasses.replace(params, logprobs=0)  # they decide which candidates are best
    requests = []
    for number, name in enumerate(opened.names):
        prompt, candidate = divmod(number, request.candidates)
        of_prompt = request.of_prompts[prompt] if request.of_prompts else params
        seed = None if of_prompt.seed is None else of_prompt.seed + candidate
        requests.append(
            Request(
                name,
                prompts.token_ids[prompt],
                dataclasses.replace(of_prompt, seed=seed),
                arrival_time,
                context.priority,
                client=context.client,
                fork_of=opened.names[number - candidate] if candidate else None,
                timeout=context.timeout,
                ttft_timeout=context.ttft_timeout,
                timeline=context.timeline or request.timed,
                cache_salt=context.cache_scope + ((request.cache_salt,) if request.cache_salt else ()),
                adapter=adapter,
                images=request.images[prompt] if request.images else prompts.images,
            )
        )
    return requests
