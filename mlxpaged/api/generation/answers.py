"""Reads the answers to one request as deltas, collects them, or sends them in the format of an API's renderer."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property, partial
from heapq import nlargest
from typing import Any

from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from mlxpaged.api.errors import ApiError, from_engine
from mlxpaged.api.generation.deltas import Delta, Finish, Part, Text, Update, Usage, joined
from mlxpaged.api.generation.logprob_table import LogprobTable
from mlxpaged.api.generation.prompt import Prompts
from mlxpaged.api.generation.request import GenerationRequest
from mlxpaged.api.generation.request_context import RequestContext
from mlxpaged.api.streaming import EVENTS, EventStream, Silence, comment
from mlxpaged.core.engine.logprobs import PromptLogprobs
from mlxpaged.core.engine.prompt_progress import PromptProgress
from mlxpaged.core.engine.request import RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.engine.timeline import Timeline
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.core.text.answer_parser import AnswerParser
from mlxpaged.engine.info import EngineInfo
from mlxpaged.engine.request_stream import RequestStream

Counts = tuple[int, int, int, int]
"""Tokens that were cached, made, drafted, and accepted of those."""
NOTHING: Counts = (0, 0, 0, 0)

STOP_CAUSE_HEADER = "X-Mlxpaged-Stop-Cause"

MANY_LOGPROBS, MANY_UPDATES = 1000, 4000
"""The most that is rendered on the event loop at a time: 2 to 4 ms of work."""


@dataclass
class Answers:
    """model: the name of what answers. streams: `candidates` of them for each prompt, in the prompts' order. forget:
    called when the answers end. render: runs a function that renders what is large."""

    info: EngineInfo
    model: str
    context: RequestContext
    _request: GenerationRequest
    _prompts: Prompts
    _streams: Sequence[RequestStream]
    _forget: Callable[[], None]
    render: Callable[[Callable[[], Any]], Awaitable[Any]]
    _latest: dict[int, Counts] = field(default_factory=dict, init=False)  # by choice
    _timelines: dict[int, Timeline | None] = field(default_factory=dict, init=False)
    _counts: list[int] = field(default_factory=lambda: list(NOTHING), init=False)  # of all choices
    _thinking_tokens: int = field(default=0, init=False)

    def close(self) -> None:
        """End what still runs. Closing twice is no error."""
        for stream in self._streams:
            stream.close()
        self._forget()

    @property
    def params(self) -> SamplingParams:
        """Returns the parameters of the request, defaults included."""
        return self._request.params

    @property
    def num_choices(self) -> int:
        return len(self._streams)

    def wake(self) -> None:
        """Make `updates` yield although nothing has happened."""
        for stream in self._streams:
            stream.wake()

    @property
    def progress(self) -> PromptProgress:
        """Returns how far the request is. Several prompts count as one, and answers to one prompt share its tokens."""
        each = [stream.progress for stream in self._streams]
        prompts = each[:: self._request.candidates]
        waiting = [one.waiting_before for one in each if one.waiting_before is not None]
        return PromptProgress(
            waiting_before=min(waiting) if len(waiting) == len(each) else None,
            prompt=sum(one.prompt for one in prompts),
            cached=sum(one.cached for one in prompts),
            computed=sum(one.computed for one in prompts),
            output=sum(one.output for one in each),
            seconds=each[0].seconds,
        )

    async def updates(self, evenly: bool = False) -> AsyncGenerator[Update, None]:
        """Yields the deltas of all choices as they come. If one choice fails or the caller stops, all choices end.
        evenly: see `RequestStream.evenly`."""
        echoes = self._prompts.echoes
        parsers = [self._prompts.new_parser() for _ in self._streams]
        at_once = self._prompts.params.prompt_logprobs is None
        try:
            for choice in range(len(self._streams) if echoes and at_once else 0):
                yield Update(choice, [Text(self._echo(choice))])
            async with aclosing(self._merged(evenly) if len(self._streams) > 1 else self._single(evenly)) as outputs:
                async for choice, output in outputs:
                    self._count(choice, output)
                    yield self._update(choice, output, parsers[choice])
        finally:
            self.close()

    def _count(self, choice: int, output: RequestOutput) -> None:
        """Note the latest output of a choice. The usage can be in each event, so it must not take a sum over all of
        them. Answers to one prompt have the same cached tokens."""
        shares_prompt = choice % self._request.candidates > 0
        counts = (
            0 if shares_prompt else output.num_cached_tokens,
            output.num_output_tokens,
            output.num_drafted,
            output.num_accepted,
        )
        before, self._latest[choice] = self._latest.get(choice, NOTHING), counts
        self._counts = [total + new - old for total, new, old in zip(self._counts, counts, before, strict=True)]

    def _update(self, choice: int, output: RequestOutput, parser: AnswerParser | None) -> Update:
        thinking, finish, num_calls = False, None, 0
        if parser is None:
            deltas: list[Delta] = [Text(output.text)] if output.text else []
        else:
            thinking = parser.thinks
            deltas = parser.feed(output.text)
            thinking |= parser.thinks
            if output.finish_reason is not None:
                deltas += parser.finish(output.finish_reason is FinishReason.LENGTH or output.stop_cause is not None)
            num_calls = parser.calls_made
        if thinking:
            self._thinking_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            reason, stop_string = output.finish_reason.value, output.stop_string
            if parser is not None and parser.is_done:  # it ended with its only call, whatever ended the rest
                reason, stop_string = "stop", None
            finish = Finish(reason, stop_string, num_calls, output.timeline, output.stop_cause)
            self._timelines[choice] = output.timeline
        if output.prompt_logprobs is not None and self._prompts.echoes:
            deltas.insert(0, Text(self._echo(choice)))
        return Update(choice, deltas, output.logprobs, thinking, finish, output.prompt_logprobs)

    def prompt_of(self, index: int) -> tuple[Sequence[int], str]:
        """Returns the prompt of a shown answer, and the text with which the answer repeats it."""
        number = index // self._request.n
        return self._prompts.token_ids[number], self._prompts.echoes[number] if self._prompts.echoes else ""

    def _echo(self, choice: int) -> str:
        return self._prompts.echoes[choice // self._request.candidates]

    async def _single(self, evenly: bool) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        stream = self._streams[0]
        async for output in stream.evenly() if evenly else stream:
            yield 0, output

    async def _merged(self, evenly: bool) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        merged: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()

        async def pump(index: int, stream: RequestStream) -> None:
            try:
                async for output in stream.evenly() if evenly else stream:
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
        """Returns the answers to show, by their index. Raises what `updates` raises if one of them fails."""
        candidates = [Answer() for _ in self._streams]
        async for update in self.updates():
            candidates[update.choice].add(update)
        n, per_prompt = self._request.n, self._request.candidates
        if n == per_prompt:
            return candidates
        by_prompt = (candidates[start : start + per_prompt] for start in range(0, len(candidates), per_prompt))
        return [best for each in by_prompt for best in nlargest(n, each, key=lambda answer: answer.mean_logprob)]

    @property
    def usage(self) -> Usage:
        """Counts the tokens so far."""
        cached, made, drafted, accepted = self._counts
        return Usage(self._num_prompt_tokens, cached, made, self._thinking_tokens, drafted, accepted)

    @property
    def cached_tokens(self) -> list[int]:
        """Returns the tokens of each choice's prompt that the prefix cache had, after all have begun."""
        return [self._latest[choice][0] for choice in range(len(self._streams))]

    @cached_property
    def _num_prompt_tokens(self) -> int:
        return sum(len(stream.request.prompt_token_ids) for stream in self._streams[:: self._request.candidates])

    @property
    def timelines(self) -> list[Timeline | None]:
        """Returns the timelines of all choices, after these have ended."""
        return [self._timelines[index] for index in range(len(self._streams))]


@dataclass
class Answer:
    """One answer, collected to its end."""

    updates: list[Update] = field(default_factory=list)
    logprobs: LogprobTable = field(default_factory=LogprobTable)

    def add(self, update: Update) -> None:
        if update.logprobs:
            update = update._replace(logprobs=self.logprobs.add(update.logprobs))
        self.updates.append(update)

    @property
    def parts(self) -> list[Part]:
        return joined(delta for update in self.updates for delta in update.deltas)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        return self.updates[0].prompt_logprobs

    @property
    def finish(self) -> Finish:
        finish = self.updates[-1].finish
        assert finish is not None
        return finish

    @property
    def mean_logprob(self) -> float:
        """Returns the mean per token. An answer without tokens is the worst."""
        return self.logprobs.total / len(self.logprobs) if self.logprobs else -math.inf


def timeline_field(timelines: Sequence[Timeline | None]) -> dict[str, Any]:
    """Returns {"timeline": an object, or a list of them for several choices}, or {} if none was recorded."""
    objects = [shown(timeline) for timeline in timelines if timeline is not None]
    if not objects:
        return {}
    return {"timeline": objects[0] if len(objects) == 1 else objects}


def shown(timeline: Timeline) -> dict[str, Any]:
    """Returns its fields. Only an answer that was stopped has a cause of that."""
    return {name: value for name, value in dataclasses.asdict(timeline).items() if value is not None}


def stop_causes(answers: Sequence[Answer]) -> dict[str, str]:
    """Returns the header that says why the server has stopped answers whose model would have gone on: a list of causes
    with parameters (RFC 8941). It says which choice was stopped if there are several."""
    causes = [(index, answer.finish.stop_cause) for index, answer in enumerate(answers)]
    many = len(answers) > 1
    found = [cause + (f"; choice={index}" if many else "") for index, cause in causes if cause is not None]
    return {STOP_CAUSE_HEADER: ", ".join(found)} if found else {}


def progress_field(progress: PromptProgress) -> dict[str, Any]:
    """Returns the progress in llama.cpp's form, which clients know. `waiting_before` is not in llama.cpp's."""
    return {
        "prompt_progress": {
            "total": progress.prompt,
            "cache": progress.cached,
            "processed": progress.computed,
            "time_ms": round(progress.seconds * 1000),
            "waiting_before": progress.waiting_before,
        }
    }


def progress_comment(progress: PromptProgress) -> str:
    if progress.waiting_before is not None:
        return comment(f"waiting, {progress.waiting_before} before it")
    if not progress.output:
        return comment(f"prefill {progress.computed}/{progress.prompt}")
    return comment(f"decode {progress.output}")


class Renderer(ABC):
    """Renders answers in the format of one API. Events are texts of a stream of the type `media_type`."""

    media_type = EVENTS
    repeats_much = False
    """Whether what the first and the last events repeat of the request is large."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns the body of a response that is not streamed."""

    def begin(self) -> Iterable[str]:
        """Returns the events before the first update."""
        return ()

    @abstractmethod
    def events(self, update: Update) -> Iterable[str]:
        """Returns the events of an update."""

    def is_large(self, update: Update) -> bool:
        """Whether the events of an update take long to make."""
        return are_large([update]) or (self.repeats_much and update.finish is not None)

    def end(self) -> Iterable[str]:
        """Returns the events after the last update."""
        return ()

    def keep_alive(self, progress: PromptProgress) -> str:
        """Returns what is sent after a long silence."""
        return progress_comment(progress)

    @abstractmethod
    def progress(self, progress: PromptProgress) -> str:
        """Returns what is sent instead to a client that has asked for progress."""

    @abstractmethod
    def error(self, error: ApiError) -> str:
        """Returns the event that ends a failed stream."""


def are_large(updates: Sequence[Update]) -> bool:
    """Whether they take long to render."""
    if len(updates) > MANY_UPDATES or any(update.prompt_logprobs is not None for update in updates):
        return True
    return sum(map(num_logprobs, updates)) > MANY_LOGPROBS


def num_logprobs(update: Update) -> int:
    """Log-probabilities of its tokens. All tokens have as many."""
    return len(update.logprobs) * (1 + len(update.logprobs[0].top)) if update.logprobs else 0


async def reply(answers: Answers, renderer: Renderer, stream: bool) -> Response:
    """Returns a stream, or the whole answer. Its long lists are iterators: their entries become JSON one by one."""
    if stream:
        return EventStream(events(answers, renderer), answers.close, renderer.media_type)
    collected = await answers.collect()

    def body() -> bytes:
        return to_json(renderer.whole(collected))

    large = renderer.repeats_much or are_large([update for answer in collected for update in answer.updates])
    content = await answers.render(body) if large else body()
    return Response(content, headers=stop_causes(collected), media_type=JSONResponse.media_type)


async def events(answers: Answers, renderer: Renderer) -> AsyncGenerator[str, None]:
    silence = Silence(answers.context.keep_alive_seconds, answers.wake)
    tell = renderer.progress if answers.context.progress else renderer.keep_alive
    begun = False
    beginning = iter(renderer.begin())  # sent with the first update: until then, a router can repeat the request
    try:
        async with aclosing(answers.updates(evenly=True)) as updates:
            async for update in updates:
                if renderer.repeats_much and not begun:
                    beginning = iter(await answers.render(partial(list, beginning)))
                begun = True
                for event in beginning:
                    yield event
                silent, rendered = True, renderer.events(update)
                if renderer.is_large(update):
                    rendered = await answers.render(partial(list, rendered))
                for event in rendered:
                    yield event
                    silent = False
                if not silent:
                    silence.end()
                elif silence.is_long:
                    yield tell(answers.progress)
                    silence.end()
        for event in renderer.end():
            yield event
    except Exception as error:
        for event in beginning:
            yield event
        yield renderer.error(from_engine(error))
    finally:
        silence.close()
