"""Plans what is measured in which order: one request at a time compared with several, or a sweep over contexts."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mlxpaged.cli.bench.defaults import FIRST_CONTEXT, PROMPT_TOKENS
from mlxpaged.cli.bench.load import Load
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.info import EngineInfo

WARM_UP_TOKENS = 4
WARM_UP_CONTEXT = 1024

Begin = Callable[[str], Callable[[int], None]]
"""Takes a description of what is measured now; returns a function that takes numbers of computed tokens."""


class NoRoomError(Exception):
    """The model's context or the KV pool is too small for the measurement."""


@dataclass(frozen=True)
class Plan:
    description: str
    prompt_tokens: tuple[int, ...]  # lengths of the prompts
    loads: list[Load]  # of a comparison: the first one is one request at a time
    warm_up: list[Load]
    max_tokens: int
    runs: int
    is_sweep: bool

    @property
    def tokens(self) -> int:
        """The tokens of all prompts and answers, without the warm-up."""
        return self.runs * sum(sum(load.lengths) + len(load.lengths) * self.max_tokens for load in self.loads)

    async def run(self, engine: AsyncEngine, vocab_size: int, begin: Begin) -> None:
        """The loads take turns, so that other work on the machine affects all of them."""
        begin("warm-up")
        for load in self.warm_up:
            await load.run(engine, min(WARM_UP_TOKENS, self.max_tokens), vocab_size)
        for run, load in itertools.product(range(1, self.runs + 1), self.loads):
            advance = begin(f"{load.name}, run {run} of {self.runs}")
            await load.run(engine, self.max_tokens, vocab_size, advance)


def make_plan(args: argparse.Namespace, info: EngineInfo) -> Plan:
    """Fits the measurement to the model's context and the KV pool. Raises NoRoomError."""
    runs = "1 run" if args.runs == 1 else f"{args.runs} runs"
    tail = f"{args.max_tokens} tokens each; {runs}, after a warm-up"
    if args.context_sweep:
        longest = args.max_context or room_for_prompt(info, args.max_tokens, FIRST_CONTEXT)
        room_for_prompt(info, args.max_tokens, longest)
        contexts = contexts_up_to(longest)
        loads = [Load(f"context {context}", 1, [context]) for context in contexts]
        warm_up = [Load("", 1, [context for context in contexts if context <= WARM_UP_CONTEXT])]
        description = f"one prompt of {contexts[0]} to {contexts[-1]} tokens at a time, {tail}"
        return Plan(description, contexts, loads, warm_up, args.max_tokens, args.runs, is_sweep=True)
    wanted = args.prompt_tokens or PROMPT_TOKENS
    room = room_for_prompt(info, args.max_tokens, min(wanted))
    kinds = tuple(min(length, room) for length in wanted)
    lengths = list(itertools.islice(itertools.cycle(kinds), args.prompts))
    counts = ", ".join(f"{count} of {length}" for length, count in Counter(lengths).items())
    clipped = "" if kinds == wanted else ", shortened to fit"
    levels = (1, *(number for number in args.concurrency if number > 1))
    loads = [Load(at_a_time(level), level, lengths) for level in levels]
    warm_up = [Load("", max(levels), lengths), Load("", 1, lengths[: len(kinds)])]
    description = f"{args.prompts} prompts ({counts} tokens{clipped}), {tail}"
    return Plan(description, kinds, loads, warm_up, args.max_tokens, args.runs, is_sweep=False)


def at_a_time(concurrency: int) -> str:
    return "one at a time" if concurrency == 1 else f"{concurrency} at a time"


def room_for_prompt(info: EngineInfo, max_tokens: int, least: int) -> int:
    """Returns the most tokens that a prompt may have. Raises NoRoomError if that is below `least`."""
    room = info.max_model_len - max_tokens
    if room < least:
        limit = f"the KV pool holds {info.max_tokens_in_pool} tokens (--kv-cache-memory)"
        if info.longest <= info.max_tokens_in_pool:
            limit = info.limit
        wanted = f"a prompt of {least} tokens and an answer of {max_tokens} (--max-tokens)"
        raise NoRoomError(f"{info.model} has no room for {wanted}: {limit}")
    return room


def contexts_up_to(limit: int) -> tuple[int, ...]:
    """Returns 128, 256, ..., and the limit itself."""
    doubled = itertools.takewhile(lambda context: context < limit, (FIRST_CONTEXT << i for i in itertools.count()))
    return (*doubled, limit)
