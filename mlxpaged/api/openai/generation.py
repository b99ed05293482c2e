"""What both completion routes do with the engine: check token ids, submit, collect, and count."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from mlxpaged.api.errors import bad_parameter
from mlxpaged.engine import AsyncEngine, EngineInfo, RequestOutput, RequestStream, SamplingParams, TokenLogprobs
from mlxpaged.scheduler import PromptTooLongError


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


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
        raise bad_parameter(field, f"the prompt has at least {tokens} tokens; {limit}", code="context_length_exceeded")


def submit_all(
    engine: AsyncEngine,
    request_id: str,
    field: str,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    arrival_time: float,
    default_max_tokens: int | None = None,
) -> Generation:
    """All prompts of one HTTP request, or none of them where one is refused.

    field: the one that holds the prompts. default_max_tokens: most tokens to generate where `params` does not say.
    """
    generation = Generation()
    if not all(prompts):
        raise bad_parameter(field, "a prompt without tokens cannot be continued")
    with ExitStack() as undo:
        undo.callback(generation.close)
        for index, prompt in enumerate(prompts):
            name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            try:
                generation.streams.append(engine.submit(name, prompt, params, arrival_time, default_max_tokens))
            except PromptTooLongError as error:
                param = "max_tokens" if fits_alone(engine, prompt) else field
                raise bad_parameter(param, str(error), code="context_length_exceeded") from None
        undo.pop_all()
    return generation


def fits_alone(engine: AsyncEngine, prompt: Sequence[int]) -> bool:
    """Whether the prompt leaves room for at least one token."""
    try:
        engine.check(len(prompt), None)
    except PromptTooLongError:
        return False
    return True


@dataclass
class Generation:
    """The streams of one HTTP request, one per choice, and what they have used so far."""

    streams: list[RequestStream] = field(default_factory=list)
    _last: dict[int, RequestOutput] = field(default_factory=dict)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

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

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(stream.request.prompt_token_ids) for stream in self.streams)
        completion = sum(output.num_output_tokens for output in self._last.values())
        cached = sum(output.num_cached_tokens for output in self._last.values())
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

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.logprobs += output.logprobs
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value


async def collect(generation: Generation) -> list[Choice]:
    """Raises RequestFailedError where one of the answers fails."""
    choices = [Choice() for _ in generation.streams]
    async for index, output in generation.outputs():
        choices[index].add(output)
    return choices
