"""What is measured, in which order: one request at a time compared with several, and a sweep over contexts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxpaged.cli.bench.load import Pass, make_prompts, run_pass
from mlxpaged.engine import AsyncEngine, EngineInfo

WARM_UP_TOKENS = 4
WARM_UP_CONTEXT = 1024
FIRST_CONTEXT = 128
BASE_CONTEXT = 256
"""The cost of a token at other contexts is given as a multiple of its cost at this one."""

Begin = Callable[[str], Callable[[int], None]]
"""Takes a description of what is measured now; returns a function that takes numbers of computed tokens."""


class NoRoomError(Exception):
    """The model's context or the KV pool is too small for the measurement."""


@dataclass
class Comparison:
    """The same prompts at several levels of concurrency."""

    prompt_tokens: tuple[int, ...]  # lengths of the prompts, in turn
    clipped: bool  # whether some of these were longer
    prompts: int
    max_tokens: int
    runs: int
    concurrency: tuple[int, ...]  # the first one is 1
    passes: dict[int, list[Pass]] = field(init=False)  # by concurrency

    def __post_init__(self) -> None:
        self.passes = {concurrency: [] for concurrency in self.concurrency}

    def describe(self) -> str:
        counts = [len(range(i, self.prompts, len(self.prompt_tokens))) for i in range(len(self.prompt_tokens))]
        kinds = ", ".join(f"{count} of {tokens}" for count, tokens in zip(counts, self.prompt_tokens, strict=True))
        limit = ", clipped to the room there is" if self.clipped else ""
        return f"{self.prompts} prompts ({kinds} tokens{limit}), {self.max_tokens} tokens each; {plural(self.runs)}"

    @property
    def tokens(self) -> int:
        """Of prompts and answers, without the warm-up."""
        lengths = itertools.islice(itertools.cycle(self.prompt_tokens), self.prompts)
        return self.runs * len(self.concurrency) * (sum(lengths) + self.prompts * self.max_tokens)

    async def run(self, engine: AsyncEngine, info: EngineInfo, begin: Begin) -> None:
        """All levels take turns, so that other load on the machine affects all of them."""
        prompts = make_prompts(self.prompt_tokens, self.prompts, info.vocab_size)
        few = min(WARM_UP_TOKENS, self.max_tokens)
        begin("warm-up")
        await run_pass(engine, prompts, few, Pass(max(self.concurrency)))
        await run_pass(engine, prompts[: len(self.prompt_tokens)], few, Pass(1))
        for run, concurrency in itertools.product(range(1, self.runs + 1), self.concurrency):
            self.passes[concurrency].append(Pass(concurrency))
            advance = begin(f"{at_a_time(concurrency)}, run {run} of {self.runs}")
            await run_pass(engine, prompts, self.max_tokens, self.passes[concurrency][-1], advance)


@dataclass
class Sweep:
    contexts: tuple[int, ...]  # lengths of the prompts
    max_tokens: int
    runs: int
    passes: dict[int, list[Pass]] = field(init=False)  # by context

    def __post_init__(self) -> None:
        self.passes = {context: [] for context in self.contexts}

    def describe(self) -> str:
        first, last = self.contexts[0], self.contexts[-1]
        return f"one prompt of {first} to {last} tokens at a time, {self.max_tokens} tokens each; {plural(self.runs)}"

    @property
    def tokens(self) -> int:
        """Of prompts and answers, without the warm-up."""
        return self.runs * (sum(self.contexts) + len(self.contexts) * self.max_tokens)

    async def run(self, engine: AsyncEngine, info: EngineInfo, begin: Begin) -> None:
        warm = [context for context in self.contexts if context <= WARM_UP_CONTEXT]
        prompts = make_prompts(warm, len(warm), info.vocab_size)
        begin("warm-up")
        await run_pass(engine, prompts, min(WARM_UP_TOKENS, self.max_tokens), Pass(1))
        for run, context in itertools.product(range(1, self.runs + 1), self.contexts):
            self.passes[context].append(Pass(1))
            advance = begin(f"context {context}, run {run} of {self.runs}")
            [prompt] = make_prompts([context], 1, info.vocab_size, seed=run)
            await run_pass(engine, [prompt], self.max_tokens, self.passes[context][-1], advance)


def plural(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def at_a_time(concurrency: int) -> str:
    return "one at a time" if concurrency == 1 else f"{concurrency} at a time"


def room_for_prompt(info: EngineInfo, max_tokens: int, least: int) -> int:
    """Most tokens of a prompt. Raises NoRoomError if it is below `least`."""
    room = info.max_model_len - max_tokens
    if room < least:
        limit = (
            f"its context length is {info.context_length} tokens"
            if info.context_length <= info.max_tokens_in_pool
            else f"the KV pool holds {info.max_tokens_in_pool} tokens (--kv-cache-memory)"
        )
        raise NoRoomError(
            f"{info.model} has no room for a prompt of {least} tokens and an answer of {max_tokens} (--max-tokens): "
            f"{limit}"
        )
    return room


def contexts_up_to(limit: int) -> tuple[int, ...]:
    """128, 256, ..., and the limit itself."""
    doubled = itertools.takewhile(lambda context: context < limit, (FIRST_CONTEXT << i for i in itertools.count()))
    return (*doubled, limit)
