"""Log-probabilities of the tokens of a text, by an engine in this process that computes them in different ways."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.logprobs import PromptLogprobs
from mlxpaged.core.engine.matcher import Mask
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.engine.sampler import SamplingRow
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.engine import sizes
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import bytes_per_token, quantized
from mlxpaged.models.loader import ServedModel
from mlxpaged.parts.drafting import draft_budget

Floats = NDArray[np.float32]

ROOM = 8192
"""Tokens of the KV pool of an engine."""


@dataclass(frozen=True)
class Scores:
    """What an engine says of a text. steps: that it took for it. cached: tokens that it did not compute."""

    logprobs: Floats
    steps: int
    cached: int

    @property
    def perplexity(self) -> float:
        return perplexity(self.logprobs)


def perplexity(logprobs: Floats) -> float:
    return math.exp(-float(np.mean(logprobs, dtype=np.float64)))


def engine(served: ServedModel, kv_cache_dtype: str = "auto", **options: Any) -> EngineCore:
    """An engine whose steps do not depend on how long they take. Without drafts, unless `options` has `speculative`."""
    layers = served.layers if kv_cache_dtype == "auto" else quantized(served.layers, kv_cache_dtype)
    size = ROOM * bytes_per_token(layers)
    fields: dict[str, Any] = {"kv_cache_bytes": size, "max_step_ms": 0, "speculative": "off"} | options
    config = EngineConfig(**fields)
    return build_engine(config, replace(served, layers=layers))


def score(core: EngineCore, tokens: list[int], first: int = 1) -> Scores:
    """Of the tokens from `first` on, as prompt. The prefix cache may have those before: a request of the API asks for
    the log-probabilities of the whole prompt, so that nothing is taken from the cache."""
    found, outputs, steps = of_prompt(core, tokens, first)
    return Scores(found.logprobs[first - 1 :], steps, max(output.num_cached_tokens for output in outputs))


def of_prompt(
    core: EngineCore, tokens: list[int], first: int = 1, top: int = 0
) -> tuple[PromptLogprobs, list[RequestOutput], int]:
    """What is known of a prompt from `first` on, all outputs, and the number of steps."""
    made = RunningRequest.__init__

    def begin_later(running: RunningRequest, request: Request, sequence: Sequence, *rest: Any) -> None:
        made(running, request, sequence, *rest)
        sequence.logits_from = first - 1

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top)
    with mock.patch.object(RunningRequest, "__init__", begin_later):  # `add` asks the tier on a disk
        core.add(Request("text", tokens, params, core.clock()))
    outputs, steps = run(core)
    [found] = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return found, outputs, steps


def score_as_answer(core: EngineCore, tokens: list[int], first: int) -> Scores:
    """Of the tokens from `first` on, as an answer: each is taken, whatever the logits are. An engine with drafts finds
    them in the answer, which the request predicts. So a step verifies several of them together."""
    answer = tuple(tokens[first:])
    params = SamplingParams(max_tokens=len(answer), temperature=0.0, ignore_eos=True, logprobs=0, predicted=answer)
    core.add(Request("text", tokens[:first], params, core.clock()))
    [running] = core.requests.by_sequence.values()

    row = running.sampling_row

    def forced(position: int, mask: Mask | None, drafts: ListOf[int]) -> SamplingRow:
        return row(position, mask, drafts)._replace(forced=tokens[position])

    with mock.patch.object(running, "sampling_row", forced):
        outputs, steps = run(core)
    found = [token for output in outputs for token in output.logprobs]
    if tuple(token.token_id for token in found) != answer:
        raise RuntimeError("the engine has taken other tokens")
    logprobs = np.array([token.logprob for token in found], np.float32)
    return Scores(logprobs, steps, max(output.num_cached_tokens for output in outputs))


def run(core: EngineCore) -> tuple[list[RequestOutput], int]:
    """All outputs until the engine has nothing to do, and the number of steps."""
    outputs: list[RequestOutput] = []
    before = core.loop.num_steps
    while core.has_work():
        for output in core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            outputs.append(output)
    return outputs, core.loop.num_steps - before


@contextlib.contextmanager
def whole_prompts() -> Iterator[None]:
    """Engines that are built meanwhile compute the logits of a whole prompt in one step, whatever memory that takes."""
    with mock.patch.object(sizes, "max_prompt_logits", return_value=ROOM):
        yield


@contextlib.contextmanager
def all_drafts() -> Iterator[None]:
    """Every draft is verified meanwhile, whether it pays or not."""

    def all_of_them(_: ListOf[int], chances: ListOf[ListOf[float]], *__: object) -> list[int]:
        return [len(each) for each in chances]

    with mock.patch.object(draft_budget, "draft_lengths", all_of_them):
        yield
