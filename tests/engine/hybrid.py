"""Tiny models, mlx-lm's own answers, and engines that serve them."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.core.step import Step
from mlxpaged.engine import sizes
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.cache_groups import cache_layout
from mlxpaged.models.layers import state_bytes
from mlxpaged.models.loader import load_model
from mlxpaged.parts.memory.fitting import START_TOKENS
from mlxpaged.parts.memory.memory_pressure import MemoryPressure
from tests.answers import Answer, greedy_answer
from tests.models.architectures import QWEN3_5, VOCAB_SIZE, nested, random_weights
from tests.support import make_tiny_model, poison_new_blocks


@dataclass
class Run:
    """What an engine did: outputs by request, and the batches that it ran."""

    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    batches: list[Step] = field(default_factory=list)

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, ()) for token in output.token_ids]

    def error(self, name: str) -> str | None:
        return self.outputs[name][-1].error

    def note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def num_computed(self, request_id: str | None = None) -> int:
        """Tokens that were run through the model, of one request or all."""
        rows = [row for batch in self.batches for row in batch.rows]
        return sum(row.num_tokens for row in rows if request_id in (None, row.request_id))


class TinyModel:
    """A tiny model of any architecture. block_size: of its engines, by default."""

    def __init__(self, path: Path, block_size: int = 8) -> None:
        self.path = path
        self.block_size = block_size
        self.plain: Any = load_plain_model(self.path)[0]
        self.plain.eval()
        self.served = load_model(str(self.path))
        self._answers: dict[tuple[tuple[int, ...], tuple[int, ...]], Answer] = {}

    def answer(self, prompt: list[int], num_tokens: int, banned: tuple[int, ...] = ()) -> Answer:
        """Greedy, with mlx-lm's own caches. banned: tokens that are never chosen."""
        known = self._answers.get((tuple(prompt), banned))
        if known is None or len(known.tokens) < num_tokens:
            known = greedy_answer(self.plain, make_prompt_cache(self.plain), prompt, num_tokens, banned)
            self._answers[tuple(prompt), banned] = known
        return Answer(known.tokens[:num_tokens], known.margins[:num_tokens])

    def answers_after(self, prefix: list[int], suffixes: list[list[int]], num_tokens: int) -> list[Answer]:
        """Those of prompts that all begin with `prefix`, which is computed once."""
        cache = make_prompt_cache(self.plain)
        mx.eval(self.plain(mx.array([prefix]), cache=cache))
        return [greedy_answer(self.plain, deepcopy(cache), suffix, num_tokens) for suffix in suffixes]

    def engine(
        self,
        num_blocks: int = 256,
        swap_blocks: int = 0,
        num_checkpoints: int | None = None,
        start_tokens: int = START_TOKENS,
        clock: Callable[[], float] = time.monotonic,
        pressure: Callable[[], MemoryPressure] = lambda: MemoryPressure.NORMAL,
        **options: Any,
    ) -> EngineCore:
        """New blocks are filled with NaN. Steps are not limited by time, so they are the same on any machine. Nothing
        is drafted by default. start_tokens: those that the pool holds at the start."""
        defaults: dict[str, Any] = {
            "attention_backend": "gather",
            "max_num_seqs": 16,
            "max_step_ms": 0,
            "speculative": "off",
        }
        options = {"block_size": self.block_size} | defaults | options
        layout = cache_layout(self.served.kv_layers, self.served.context_length)
        block = options["block_size"] * layout.bytes_per_token
        checkpoints = None if num_checkpoints is None else num_checkpoints * state_bytes(self.served.layers)
        config = EngineConfig(
            str(self.path),
            kv_cache_bytes=num_blocks * max(1, block),
            swap_space_bytes=swap_blocks * block,
            state_cache_bytes=checkpoints,
            **options,
        )
        with mock.patch.object(sizes, "START_TOKENS", start_tokens):
            core = build_engine(config, self.served, clock, pressure=pressure)
        poison_new_blocks(core)
        return core


class Hybrid(TinyModel):
    """Half of the layers are gated delta nets, the others attend."""

    def __init__(self, path: Path, num_layers: int = 4, block_size: int = 8) -> None:
        config = nested(model_type="qwen3_5_text", **QWEN3_5 | {"num_hidden_layers": num_layers})
        make_weights = partial(random_weights, embedding=1.0)
        make_tiny_model(path, "qwen3_5", 0, make_weights, vocab_size=VOCAB_SIZE, **config)
        super().__init__(path, block_size)


def request(
    name: str,
    prompt: list[int],
    num_tokens: int,
    banned: tuple[int, ...] = (),
    fork_of: str | None = None,
    priority: Priority = Priority.NORMAL,
    adapter: str | None = None,
) -> Request:
    bias = dict.fromkeys(banned, -mx.inf)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logit_bias=bias)
    return Request(name, prompt, params, time.monotonic(), priority, fork_of=fork_of, adapter=adapter)


def run(core: EngineCore, requests: list[Request], before_step: Callable[[int], None] = lambda step: None) -> Run:
    """Run requests that arrive together to their ends. before_step: called with the number of each step."""
    result, schedule = Run(), core.scheduler.schedule

    def noting_schedule() -> Step:
        result.batches.append(schedule())
        return result.batches[-1]

    core.scheduler.schedule = noting_schedule  # type: ignore[method-assign]
    try:
        for each in requests:
            core.add(each)
        step = 0
        while core.has_work():
            before_step(step)
            result.note(core.step())
            step += 1
    finally:
        core.scheduler.schedule = schedule  # type: ignore[method-assign]
    assert_balanced(core)
    return result


def assert_balanced(core: EngineCore) -> None:
    """No unfinished request holds a block, a swap slot or a checkpoint."""
    stats, checkpoints = core.stats().scheduler, core.scheduler.blocks.states.checkpoints
    assert stats.blocks.used == 0
    assert stats.swap.used == 0
    assert checkpoints.num_reserved == 0
    assert len(checkpoints) <= checkpoints.capacity
