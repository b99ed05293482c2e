"""Runs loads on the engine through clients. A client sends its next prompt when its last answer is complete.

The clients call AsyncEngine as the routes of the HTTP API do: reservation, queue, engine thread, one hand-over of
tokens and text per step. There is no HTTP: a client in this process would share the server's interpreter lock, and slow
down what it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.async_engine import AsyncEngine

NUMBERS = itertools.count()


@dataclass
class Answer:
    """One request. Times are seconds on the engine's clock."""

    prompt_tokens: int
    submitted: float
    token_times: list[float] = field(default_factory=list)  # when each token reached the event loop
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    complete: bool = False

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [after - before for before, after in itertools.pairwise(self.token_times)]


@dataclass
class Pass:
    """One pass over all prompts of a load."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0  # until the last answer was complete, or an interrupt
    preemptions: int = 0


@dataclass
class Load:
    """Prompts of these lengths, `concurrency` at a time, and the passes over them so far."""

    name: str
    concurrency: int
    lengths: Sequence[int]
    passes: list[Pass] = field(default_factory=list)

    def begun(self) -> list[Answer]:
        """The answers that have a token."""
        return [answer for one in self.passes for answer in one.answers if answer.token_times]

    async def run(
        self, engine: AsyncEngine, max_tokens: int, vocab_size: int, advance: Callable[[int], object] = lambda _: None
    ) -> None:
        """Run one pass. Every answer has exactly `max_tokens` tokens, sampled greedily. The prefix cache is emptied
        first. A cancelled pass has the tokens that came until then. advance: called with numbers of tokens.

        Raises EngineUnavailableError, EngineBusyError or RequestFailedError if the engine fails.
        """
        prompts = iter(make_prompts(self.lengths, vocab_size))
        await engine.clear_cache()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.passes.append(Pass())
        preemptions, started = count_preemptions(engine), engine.clock()
        answers = self.passes[-1].answers

        async def run_client() -> None:
            for prompt in prompts:
                with engine.reserve(1) as now:
                    [stream] = engine.submit([Request(f"bench-{next(NUMBERS)}", prompt, params, now)])
                answers.append(answer := Answer(len(prompt), now))
                with contextlib.closing(stream):
                    async for output in stream:
                        advance(len(output.token_ids) + (0 if answer.token_times else len(prompt)))
                        answer.token_times += [engine.clock()] * len(output.token_ids)
                        answer.cached_tokens = output.num_cached_tokens
                answer.complete = True

        clients = [asyncio.ensure_future(run_client()) for _ in range(self.concurrency)]
        try:
            await asyncio.gather(*clients)
        finally:
            self.passes[-1].seconds = engine.clock() - started
            self.passes[-1].preemptions = count_preemptions(engine) - preemptions
            for client in clients:  # one of them may have failed
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


def make_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Returns prompts of random tokens. Their first tokens differ if possible, so that no prefix is shared."""
    rng = random.Random(0)
    return [
        [number % vocab_size, *(rng.randrange(vocab_size) for _ in range(length - 1))]
        for number, length in enumerate(lengths)
    ]


def count_preemptions(engine: AsyncEngine) -> int:
    return engine.stats.scheduler.preemptions_total if engine.stats is not None else 0
