"""Prompts, and clients that send them to the engine. A client sends its next prompt when an answer is complete.

The clients call AsyncEngine as the routes of the HTTP API do: reservation, queue, engine thread, one hand-over of
tokens and text per step. There is no HTTP: a client in this process would share the server's interpreter lock, and slow
down what it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mlxpaged.engine import AsyncEngine, Request, SamplingParams

NUMBERS = itertools.count()


@dataclass
class Answer:
    """One request. Times are seconds on the engine's clock."""

    prompt_tokens: int
    submitted: float
    token_times: list[float] = field(default_factory=list)  # when each token reached the event loop
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    complete: bool = False


@dataclass
class Pass:
    """All prompts once, `concurrency` at a time."""

    concurrency: int
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0  # until the last answer was complete, or an interrupt
    preemptions: int = 0


def make_prompts(lengths: Sequence[int], count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random tokens of these lengths, in turn. First tokens differ if possible, so that no prefix is shared."""
    rng = random.Random(seed)
    return [
        [number % vocab_size, *(rng.randrange(vocab_size) for _ in range(length - 1))]
        for number, length in zip(range(count), itertools.cycle(lengths), strict=False)
    ]


async def run_pass(
    engine: AsyncEngine,
    prompts: Sequence[list[int]],
    max_tokens: int,
    into: Pass,
    advance: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Every answer has exactly `max_tokens` tokens, sampled greedily. The prefix cache is emptied first. `into` is
    filled as tokens come, so that it is usable after a cancellation. advance: called with numbers of computed tokens.

    Raises EngineUnavailableError, EngineBusyError or RequestFailedError if the engine fails.
    """
    await engine.clear_cache()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    waiting = iter(prompts)
    clients = [
        asyncio.ensure_future(run_client(engine, waiting, params, into, advance)) for _ in range(into.concurrency)
    ]
    preemptions, started = count_preemptions(engine), engine.clock()
    try:
        await asyncio.gather(*clients)
    finally:
        into.seconds = engine.clock() - started
        into.preemptions = count_preemptions(engine) - preemptions
        for client in clients:  # one of them may have failed
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def run_client(
    engine: AsyncEngine,
    waiting: Iterator[list[int]],
    params: SamplingParams,
    into: Pass,
    advance: Callable[[int], None],
) -> None:
    for prompt in waiting:
        with engine.reserve(1) as now:
            request = Request(f"bench-{next(NUMBERS)}", prompt, params, now)
            [stream] = engine.submit([request])
        answer = Answer(len(prompt), now)
        into.answers.append(answer)
        with contextlib.closing(stream):
            async for output in stream:
                advance(len(output.token_ids) + (0 if answer.token_times else len(prompt)))
                answer.token_times += [engine.clock()] * len(output.token_ids)
                answer.cached_tokens = output.num_cached_tokens
        answer.complete = True


def count_preemptions(engine: AsyncEngine) -> int:
    return engine.stats.scheduler.preemptions_total if engine.stats is not None else 0
