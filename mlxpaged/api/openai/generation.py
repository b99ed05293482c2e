"""What both completion routes do with the engine: check token ids, submit, collect, choose, and count."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.open_requests import OpenRequest
from mlxpaged.api.openai.schema import SamplingFields
from mlxpaged.api.openai.terms import Terms
from mlxpaged.api.server import Server
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


def check_token_ids(info: EngineInfo, params: SamplingParams, field: str, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ApiError for a token id that the model has no embedding for; nothing behind this check would.

    field: the one that holds the prompts.
    """
    for param, ids in (
        ("logit_bias", list(params.logit_bias)),
        ("stop_token_ids", list(params.stop_token_ids)),
        *((field, ids) for ids in prompts),
    ):
        if ids and max(ids) >= info.vocab_size:
            raise bad_parameter(param, f"token id {max(ids)} is not in the vocabulary of {info.vocab_size} tokens")


def check_text_length(info: EngineInfo, field: str, num_chars: int) -> None:
    """Raises ApiError for a text that cannot fit the context however it is tokenized.

    Tokenizing megabytes only to refuse them would keep everybody else's prompts waiting.
    """
    tokens = info.tokenizer.least_tokens(num_chars)
    if tokens > info.context_length:
        limit = f"this model's context length is {info.context_length} tokens"
        error = PromptTooLongError(
            f"the prompt has at least {tokens} tokens; {limit}", tokens, None, info.context_length
        )
        raise bad_parameter(field, str(error), code="context_length_exceeded") from error


@contextlib.contextmanager
def begin(
    server: Server, engine: AsyncEngine, terms: Terms, body: SamplingFields, num_prompts: int
) -> Iterator[Generation]:
    """The id of one HTTP request and room in the queue for all its sequences, while it is made ready and submitted.

    What the block raises gives them back. Raises DuplicateRequestError, QueueFullError, or ApiError where the server
    would never take as many.
    """
    count = num_prompts * body.num_candidates
    request = server.open_requests.open(terms.request_id, count, terms.caller)
    generation = Generation(server, engine, terms, body, request)
    try:
        with engine.reserve(count) as arrival_time:
            generation.arrival_time = arrival_time
            yield generation
    except BaseException as error:
        generation.close()
        if isinstance(error, QueueFullError) and not error.ever:
            raise bad_parameter(body.multiplier or "prompt", str(error), code="too_many_prompts") from None
        raise


def fits_alone(engine: AsyncEngine, prompt: Sequence[int]) -> bool:
    """Whether the prompt leaves room for at least one token."""
    try:
        engine.check(len(prompt), None)
    except PromptTooLongError:
        return False
    return True


def seeded(params: SamplingParams, index: int) -> SamplingParams:
    """For the answer `index` to a prompt: what would come back if it were asked for alone with this seed."""
    return params if params.seed is None else dataclasses.replace(params, seed=params.seed + index)


class Generation:
    """The answers to one HTTP request: num_candidates streams for the first prompt, then those for the next one."""

    def __init__(
        self, server: Server, engine: AsyncEngine, terms: Terms, body: SamplingFields, request: OpenRequest
    ) -> None:
        self.streams: list[RequestStream] = []
        self.arrival_time = 0.0
        self._server = server
        self._engine = engine
        self._terms = terms
        self._num_choices = body.num_choices
        self._num_candidates = body.num_candidates
        self._request = request
        self._last: dict[int, RequestOutput] = {}

    def submit(
        self,
        field: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        default_max_tokens: int | None = None,
    ) -> None:
        """All prompts, each as often as there are candidates, or none of them where one is refused.

        field: the one that holds the prompts. default_max_tokens: most tokens to generate where `params` does not say.
        Raises ApiError, RequestCancelledError or EngineUnavailableError.
        """
        if not all(prompts):
            raise bad_parameter(field, "a prompt without tokens cannot be continued")
        if self._request.cancelled:
            raise RequestCancelledError("the request was cancelled")
        if self._num_candidates > self._num_choices and params.logprobs is None:
            params = dataclasses.replace(params, logprobs=0)  # to find the best ones by
        requests = [
            self._engine_request(number, prompts[number // self._num_candidates], params)
            for number in range(len(self._request.names))
        ]
        try:
            self.streams = self._engine.submit(requests, default_max_tokens)
        except PromptTooLongError as error:
            param = "max_tokens" if all(fits_alone(self._engine, prompt) for prompt in prompts) else field
            raise bad_parameter(param, str(error), code="context_length_exceeded") from error
        except MinTokensError as error:
            raise bad_parameter("min_tokens", str(error)) from None
        self._request.submitted = True
        self._request.count(sum(len(prompt) for prompt in prompts))

    def _engine_request(self, number: int, prompt: list[int], params: SamplingParams) -> Request:
        terms, names, candidate = self._terms, self._request.names, number % self._num_candidates
        return Request(
            names[number],
            prompt,
            seeded(params, candidate),
            self.arrival_time,
            terms.priority,
            fork_of=names[number - candidate] if candidate else None,
            timeout=terms.timeout,
            ttft_timeout=terms.ttft_timeout,
            timeline=terms.timeline,
        )

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self._server.open_requests.close(self._request)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(choice, output) as they come. The first failure ends them all; so does leaving early."""
        try:
            async with aclosing(self._merged() if len(self.streams) > 1 else self._single()) as outputs:
                async for index, output in outputs:
                    self._last[index] = output
                    yield index, output
        finally:
            self.close()

    async def _single(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async for output in self.streams[0]:
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

        tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(self.streams)]
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

    async def collect(self) -> list[Choice]:
        """The answers to show, by their index. Raises what `outputs` raises where one of them fails."""
        candidates = [Choice() for _ in self.streams]
        async for index, output in self.outputs():
            candidates[index].add(output)
        if self._num_candidates == self._num_choices:
            return candidates
        choices = []
        for start in range(0, len(candidates), self._num_candidates):
            of_prompt = candidates[start : start + self._num_candidates]
            choices += sorted(of_prompt, key=lambda c: c.mean_logprob, reverse=True)[: self._num_choices]
        return choices

    def last_chunk(self, include_usage: bool) -> dict[str, Any] | None:
        """What a stream says about itself in the end, as far as that was asked for."""
        usage = {"usage": self.usage()} if include_usage else {}
        timeline = timeline_field([self._last[index].timeline for index in range(len(self.streams))])
        return {"choices": [], **usage, **timeline} if usage or timeline else None

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, however many answers it gets; every token that was generated counts."""
        firsts = range(0, len(self.streams), self._num_candidates)
        prompt = sum(len(self.streams[index].request.prompt_token_ids) for index in firsts)
        cached = sum(self._last[index].num_cached_tokens for index in firsts)
        completion = sum(output.num_output_tokens for output in self._last.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


@dataclass
class Choice:
    """An answer collected to its end."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None
    timeline: Timeline | None = None

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.logprobs += output.logprobs
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            self.stop_string = output.stop_string
            self.timeline = output.timeline

    @property
    def mean_logprob(self) -> float:
        """Per token of the text; an answer without any is the worst."""
        return sum(token.logprob for token in self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf


def timeline_field(timelines: Sequence[Timeline | None]) -> dict[str, Any]:
    """{"timeline": an object, or a list of them where there are several choices}; {} where none was recorded."""
    objects = [dataclasses.asdict(timeline) for timeline in timelines if timeline is not None]
    if not objects:
        return {}
    return {"timeline": objects[0] if len(objects) == 1 else objects}
