"""The answers to one request: its sequences in the engine, submitted together, read as deltas or collected whole."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.answer_parser import AnswerParser
from mlxpaged.api.generation.check import ContextLengthError, check_request, check_token_ids
from mlxpaged.api.generation.deltas import Delta, Finish, Text, Update, Usage
from mlxpaged.api.generation.prompt import encode, render, thinking_of
from mlxpaged.api.generation.request import Chat, GenerationRequest
from mlxpaged.api.generation.request_context import RequestContext, context_of
from mlxpaged.api.generation.structured_output import structured_output
from mlxpaged.api.open_requests import OpenRequest
from mlxpaged.api.server import Server, server_of
from mlxpaged.engine import (
    AsyncEngine,
    EngineInfo,
    MinTokensError,
    QueueFullError,
    Request,
    RequestCancelledError,
    RequestOutput,
    RequestStream,
    SamplingParams,
    Timeline,
    TokenLogprobs,
)
from mlxpaged.scheduler import PromptTooLongError


async def start(http: HttpRequest, translate: Callable[[], GenerationRequest], id_prefix: str) -> Answers:
    """Check a request, render and tokenize its prompts, and submit it.

    translate: makes the request of the client's body; it runs on a thread if the body is large. Raises what it raises,
    ApiError, and the engine's errors.
    """
    server = server_of(http)
    request = await server.prepare(http, lambda: check_request(translate()))
    engine, info = server.ready(request.model)
    context = context_of(http, request, engine.config, id_prefix)
    with opened(server, engine, info, context, request) as answers:
        if isinstance(request.prompt, Chat):
            await answers.submit_chat(http, request.prompt)
        else:
            await answers.submit_prompts()
    return answers


@contextlib.contextmanager
def opened(
    server: Server, engine: AsyncEngine, info: EngineInfo, context: RequestContext, request: GenerationRequest
) -> Iterator[Answers]:
    """The id of one HTTP request and room in the queue for all its sequences, while it is made ready and submitted.

    An exception in the block gives both back. Raises DuplicateRequestError, QueueFullError, or ApiError if the server
    would never take as many.
    """
    num_prompts = 1 if isinstance(request.prompt, Chat) else len(request.prompt)
    count = num_prompts * request.candidates
    opened = server.open_requests.open(context.request_id, count, context.caller)
    answers = Answers(server, engine, info, context, request, opened)
    try:
        with engine.reserve(count) as arrival_time:
            answers.arrival_time = arrival_time
            yield answers
    except BaseException as error:
        answers.close()
        if isinstance(error, QueueFullError) and not error.ever:
            raise bad_parameter(request.client_name("candidates"), str(error), code="too_many_prompts") from None
        raise


class Answers:
    """Streams of the engine: `candidates` for the first prompt, then those for the next one."""

    def __init__(
        self,
        server: Server,
        engine: AsyncEngine,
        info: EngineInfo,
        context: RequestContext,
        request: GenerationRequest,
        opened: OpenRequest,
    ) -> None:
        self.info = info
        self.context = context
        self.request = request
        self.arrival_time = 0.0
        self._server = server
        self._engine = engine
        self._opened = opened
        self._streams: list[RequestStream] = []
        self._last: dict[int, RequestOutput] = {}
        self._thinking_tokens = 0
        self._echoes: list[str] = []
        self._new_parser: Callable[[], AnswerParser] | None = None

    async def submit_chat(self, http: HttpRequest, chat: Chat) -> None:
        tags = self.info.tokenizer.tags
        prompt = await render(http, self.request, chat, self.info)
        param = self.request.client_name("messages")
        check_token_ids(self.request, param, [prompt], self.info)
        thinking = thinking_of(self.info, chat, prompt)
        form = await self._server.prepare(http, lambda: structured_output(self.request, chat, tags, thinking))
        await self._server.compile(self.info, form)
        tools = [tool.for_template() for tool in chat.offered_tools]
        self._new_parser = lambda: AnswerParser(tags, thinking == "open", tools, chat.one_call, form)
        params = dataclasses.replace(
            self.request.params,
            think_tags=True,
            tool_tags=bool(tools),
            begins_thinking=thinking == "open",
            constraint=form,
        )
        self._submit(param, [prompt], params)

    async def submit_prompts(self) -> None:
        param, params = self.request.client_name("prompt"), self.request.params
        prompts, self._echoes = await encode(self._server, self.request, self.info)
        check_token_ids(self.request, param, prompts, self.info)
        await self._server.compile(self.info, params.constraint)
        self._submit(param, prompts, params)

    def _submit(self, param: str, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """Submit all prompts, each as often as there are candidates, or none of them if one is refused.

        param: the client's field that holds the prompts. Raises ApiError, RequestCancelledError or
        EngineUnavailableError.
        """
        if self._opened.cancelled:
            raise RequestCancelledError("the request was cancelled")
        if self.request.candidates > self.request.n and params.logprobs is None:
            params = dataclasses.replace(params, logprobs=0)  # to find the best ones by
        requests = [
            self._engine_request(number, prompts[number // self.request.candidates], params)
            for number in range(len(self._opened.names))
        ]
        try:
            self._streams = self._engine.submit(requests, self.request.default_max_tokens)
        except PromptTooLongError as error:
            fit_alone = all(self._fits_alone(prompt) for prompt in prompts)
            raise ContextLengthError(self.request.client_name("max_tokens") if fit_alone else param, error) from None
        except MinTokensError as error:
            raise bad_parameter(self.request.client_name("min_tokens"), str(error)) from None
        self._opened.submitted = True
        self._opened.count(sum(len(prompt) for prompt in prompts))

    def _engine_request(self, number: int, prompt: list[int], params: SamplingParams) -> Request:
        """A seeded request gives its answer `i` what it would give alone with the seed + i."""
        context, names, candidate = self.context, self._opened.names, number % self.request.candidates
        if params.seed is not None:
            params = dataclasses.replace(params, seed=params.seed + candidate)
        return Request(
            names[number],
            prompt,
            params,
            self.arrival_time,
            context.priority,
            fork_of=names[number - candidate] if candidate else None,
            timeout=context.timeout,
            ttft_timeout=context.ttft_timeout,
            timeline=context.timeline,
        )

    def _fits_alone(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt leaves room for at least one token."""
        try:
            self._engine.check(len(prompt), None)
        except PromptTooLongError:
            return False
        return True

    def close(self) -> None:
        """End what still runs. Closing twice is no error."""
        for stream in self._streams:
            stream.close()
        self._server.open_requests.close(self._opened)

    @property
    def num_choices(self) -> int:
        return len(self._streams)

    async def updates(self) -> AsyncGenerator[Update, None]:
        """The deltas of all choices as they come. The first failure ends them all; so does leaving early."""
        new_parser = self._new_parser
        parsers = [None if new_parser is None else new_parser() for _ in self._streams]
        try:
            for choice in range(len(self._streams) if self._echoes else 0):
                yield Update(choice, [Text(self._echoes[choice // self.request.candidates])])
            async with aclosing(self._merged() if len(self._streams) > 1 else self._single()) as outputs:
                async for choice, output in outputs:
                    self._last[choice] = output
                    yield self._update(choice, output, parsers[choice])
        finally:
            self.close()

    def _update(self, choice: int, output: RequestOutput, parser: AnswerParser | None) -> Update:
        ended, thinking = output.finish_reason is not None, False
        deltas: list[Delta] = []
        if parser is None:
            deltas = [Text(output.text)] if output.text else []
        else:
            thinking = parser.thinks
            deltas = parser.feed(output.text)
            thinking |= parser.thinks
            if ended:
                deltas += parser.finish()
        if thinking:
            self._thinking_tokens += len(output.token_ids)
        finish = None
        if output.finish_reason is not None:
            num_calls = 0 if parser is None else parser.calls_made
            finish = Finish(output.finish_reason.value, output.stop_string, num_calls, output.timeline)
        return Update(choice, deltas, output.logprobs, thinking, finish)

    async def _single(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async for output in self._streams[0]:
            yield 0, output

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        merged: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()

        async def pump(index: int, stream: RequestStream) -> None:
            try:
                async for output in stream:
                    merged.put_nowait((index, output))
                merged.put_nowait(None)
            except Exception as error:
                merged.put_nowait(error)

        tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(self._streams)]
        open_streams = len(tasks)
        try:
            while open_streams:
                item = await merged.get()
                if item is None:
                    open_streams -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def collect(self) -> list[Answer]:
        """The answers to show, by their index. Raises what `updates` raises if one of them fails."""
        candidates = [Answer() for _ in self._streams]
        async for update in self.updates():
            candidates[update.choice].updates.append(update)
        n, per_prompt = self.request.n, self.request.candidates
        if n == per_prompt:
            return candidates
        chosen = []
        for start in range(0, len(candidates), per_prompt):
            of_prompt = candidates[start : start + per_prompt]
            chosen += sorted(of_prompt, key=lambda answer: answer.mean_logprob, reverse=True)[:n]
        return chosen

    @property
    def usage(self) -> Usage:
        """As far as the answers have come."""
        firsts = range(0, len(self._streams), self.request.candidates)
        return Usage(
            prompt=sum(len(self._streams[index].request.prompt_token_ids) for index in firsts),
            cached=sum(self._last[index].num_cached_tokens for index in firsts),
            completion=sum(output.num_output_tokens for output in self._last.values()),
            thinking=self._thinking_tokens,
        )

    @property
    def timelines(self) -> list[Timeline | None]:
        """Those of all choices, once they have ended."""
        return [self._last[index].timeline for index in range(len(self._streams))]


@dataclass
class Answer:
    """One answer, collected to its end."""

    updates: list[Update] = field(default_factory=list)

    @property
    def deltas(self) -> list[Delta]:
        return [delta for update in self.updates for delta in update.deltas]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [token for update in self.updates for token in update.logprobs]

    @property
    def finish(self) -> Finish:
        finish = self.updates[-1].finish
        assert finish is not None
        return finish

    @property
    def mean_logprob(self) -> float:
        """Per token of the text. An answer without any is the worst."""
        tokens = self.logprobs
        return sum(token.logprob for token in tokens) / len(tokens) if tokens else -math.inf


def timeline_field(timelines: Sequence[Timeline | None]) -> dict[str, Any]:
    """{"timeline": an object, or a list of them if there are several choices}; {} if none was recorded."""
    objects = [dataclasses.asdict(timeline) for timeline in timelines if timeline is not None]
    if not objects:
        return {}
    return {"timeline": objects[0] if len(objects) == 1 else objects}
