"""What is measured, in which order: the comparison of one request at a time with many, and the sweep over contexts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxpaged.cli.bench.load import Pass, make_prompts, run_pass
from mlxpaged.engine import AsyncEngine, EngineInfo

WARM_UP_TOKENS = 4
WARM_UP_CONTEXT = 1024
FIRST_CONTEXT = 128

Begin = Callable[[str], Callable[[int], None]]
"""Told what is measured now; returns what is to be told of tokens that are done."""


class NoRoomError(Exception):
    """The model's context or the KV pool is too small for what is to be measured."""


@dataclass
class Comparison:
    """prompt_tokens: the lengths that the prompts have in turn; clipped: whether some were to be longer. batched: the
    passes for each number of `concurrency`."""

    prompt_tokens: tuple[int, ...]
    clipped: bool
    prompts: int
    max_tokens: int
    runs: int
    concurrency: tuple[int, ...]
    single: list[Pass] = field(default_factory=list)
    batched: list[list[Pass]] = field(init=False)

    def __post_init__(self) -> None:
        self.batched = [[] for _ in self.concurrency]

    def describe(self) -> str:
        counts = [len(range(i, self.prompts, len(self.prompt_tokens))) for i in range(len(self.prompt_tokens))]
        kinds = ", ".join(f"{count} of {tokens}" for count, tokens in zip(counts, self.prompt_tokens, strict=True))
        limit = ", clipped to the room there is" if self.clipped else ""
        return f"{self.prompts} prompts ({kinds} tokens{limit}), {self.max_tokens} tokens each; {plural(self.runs)}"

    @property
    def tokens(self) -> int:
        """Of prompts and answers, those of the warm-up left out."""
        lengths = itertools.islice(itertools.cycle(self.prompt_tokens), self.prompts)
        return self.runs * (1 + len(self.concurrency)) * (sum(lengths) + self.prompts * self.max_tokens)

    async def run(self, engine: AsyncEngine, info: EngineInfo, begin: Begin) -> None:
        """One request at a time and many take turns, so that what else the machine does hits both."""
        prompts = make_prompts(self.prompt_tokens, self.prompts, info.vocab_size)
        few = min(WARM_UP_TOKENS, self.max_tokens)
        begin("warm-up")
        await run_pass(engine, prompts, few, Pass(max(self.concurrency)))
        await run_pass(engine, prompts[: len(self.prompt_tokens)], few, Pass(1))
        for run in range(1, self.runs + 1):
            for concurrency, passes in zip((1, *self.concurrency), (self.single, *self.batched), strict=True):
                passes.append(Pass(concurrency))
                advance = begin(f"{at_a_time(concurrency)}, run {run} of {self.runs}")
                await run_pass(engine, prompts, self.max_tokens, passes[-1], advance)


@dataclass
class Sweep:
    """passes: by context, the prompt's length in tokens."""

    contexts: tuple[int, ...]
    max_tokens: int
    runs: int
    passes: dict[int, list[Pass]] = field(init=False)

    def __post_init__(self) -> None:
        self.passes = {context: [] for context in self.contexts}

    def describe(self) -> str:
        first, last = self.contexts[0], self.contexts[-1]
        return f"one prompt of {first} to {last} tokens at a time, {self.max_tokens} tokens each; {plural(self.runs)}"

    @property
    def tokens(self) -> int:
        """Of prompts and answers, those of the warm-up left out."""
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
    """Most tokens of a prompt. Raises NoRoomError where it is below `least`."""
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
