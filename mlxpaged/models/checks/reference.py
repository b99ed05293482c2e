"""The reference: the logits that a model computes with mlx-lm's own caches, and how far rounding moves them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlxpaged.attention import layer, precision
from mlxpaged.attention.layer import route_attention
from mlxpaged.models.checks.probe_steps import ROUNDING_TOKENS, SHORT_PROMPT, prompt_length
from mlxpaged.models.errors import UnsupportedModelError, in_one_line
from mlxpaged.trials import on_host

logger = logging.getLogger(__name__)

REGIONS = 8
"""The prompt's tokens come from one region of the vocabulary. The next one is tried if logits are zero."""
MIN_VOCABULARY = 256
"""Tokens that every vocabulary is taken to have. Smaller embeddings are not those of tokens."""
ROUNDING_UNITS = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
"""The relative distance of neighbouring numbers, at least."""

MOST_UNITS = 8
"""Units of rounding by which the output of a joined module may differ from that of its parts."""


@dataclass(frozen=True)
class Reference:
    """A prompt, and what one forward pass with mlx-lm's own caches computes for it.

    positions: those whose logits are kept, in order: the first ROUNDING_TOKENS and the last SHORT_PROMPT. logits:
    [positions, vocabulary], float32. rounding: the mean of `differences` that rounding causes. attention_calls: of one
    forward pass.
    """

    tokens: list[int]
    positions: list[int]
    logits: mx.array
    rounding: float
    attention_calls: int

    def at(self, positions: Sequence[int]) -> mx.array:
        """The logits at positions that are kept."""
        return self.logits[mx.array([self.positions.index(position) for position in positions])]


def differences(logits: mx.array, expected: mx.array) -> mx.array:
    """The root mean square of each row's differences, relative to the standard deviation of the expected row:
    [n, vocabulary] each -> [n]. It is infinite if a logit is not a number."""
    squares = mx.mean(mx.square(logits.astype(mx.float32) - expected), axis=-1)
    return mx.nan_to_num(mx.sqrt(squares / mx.var(expected, axis=-1)), nan=mx.inf, posinf=mx.inf)


def rounding_unit(dtype: mx.Dtype) -> float:
    """The unit of rounding of results that may have been products."""
    is_tf32 = dtype == mx.float32 and precision.rounds_float32()
    return precision.TF32_UNIT if is_tf32 else ROUNDING_UNITS[dtype]


def are_rounding(got: Sequence[mx.array] | None, expected: Sequence[mx.array] | None) -> bool:
    """Whether arrays differ by no more than some units of rounding of their largest elements. Other kernels do this.
    The host compares them."""
    if got is None or expected is None or len(got) != len(expected):
        return False
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
    numbers = on_host([*got, *expected])
    units = [rounding_unit(each.dtype) for each in expected]
    with np.errstate(invalid="ignore"):  # a difference of infinite numbers is none
        return all(
            bool(np.abs(a - b).max() <= MOST_UNITS * unit * np.abs(b).max())
            for a, b, unit in zip(numbers[: len(got)], numbers[len(got) :], units, strict=True)
        )


def make_reference(model: Module, context_length: int) -> Reference:
    """Run the model as mlx-lm loads it, on tokens whose logits are not zero: embeddings of tokens that were never
    trained may be zero. Raises UnsupportedModelError if there are no such tokens, a logit is
    not finite, or the model does not run."""
    route_attention(model)
    length, missed = prompt_length(model, context_length)
    if missed:
        logger.debug("not checked past windows of %s tokens, because it would take too long", missed)
    positions = sorted({*range(ROUNDING_TOKENS), *range(length - SHORT_PROMPT, length)})
    for region in range(REGIONS):
        tokens = make_prompt(vocabulary(model), region, length)
        calls = layer.attention_calls
        try:
            logits = forward(model, tokens, positions)
        except Exception as error:  # mlx-vlm's models raise any type
            raise UnsupportedModelError(f"it does not run: {type(error).__name__}: {in_one_line(error)}") from error
        calls = layer.attention_calls - calls
        if not mx.isfinite(logits).all():
            raise UnsupportedModelError("its logits are not finite")
        if mx.any(logits, axis=-1).all():
            rounding = measure_rounding(model, tokens[:ROUNDING_TOKENS], logits[:ROUNDING_TOKENS])
            return Reference(tokens, positions, logits, rounding, calls)
    raise UnsupportedModelError("its logits are all zero for every prompt that was tried")


def vocabulary(model: Module) -> int:
    """A number of tokens that the vocabulary has at least: the rows of the smallest embedding. Positions may have an
    embedding too."""
    sizes = [module.weight.shape[0] for module in model.modules() if hasattr(module, "as_linear")]
    return min((size for size in sizes if size > MIN_VOCABULARY), default=MIN_VOCABULARY)


def make_prompt(vocab_size: int, region: int, length: int) -> list[int]:
    """Random tokens of a region of the vocabulary, always the same ones."""
    rng, size = random.Random(0), vocab_size // REGIONS
    return [region * size + rng.randrange(size) for _ in range(length)]


def forward(model: Any, tokens: Sequence[int], positions: Sequence[int]) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=make_prompt_cache(model))[0]
    return logits[mx.array(list(positions))].astype(mx.float32)


def measure_rounding(model: Module, tokens: Sequence[int], logits: mx.array) -> float:
    """How far the model's logits move if each linear layer, norm and the like rounds its results in another way. Other
    shapes of a batch do this on a GPU. Half types and routers of experts need it: how a layer's rounding grows from
    layer to layer depends on the model."""
    with rounded_otherwise(model):
        again = forward(model, tokens, range(len(tokens)))
        return float(differences(again, logits).mean())


@contextmanager
def rounded_otherwise(model: Module) -> Iterator[None]:
    """Move the results of the innermost modules with weights by up to one unit of their type's rounding."""
    seeds = count()
    with other_calls(model, lambda base: moved(base, seeds)):
        yield


@contextmanager
def other_calls(model: Module, call_of: Callable[[type[Module]], Callable[..., Any]]) -> Iterator[None]:
    """Let the innermost modules with weights be called as `call_of` says for their class."""
    plain = [(module, type(module)) for module in model.modules() if not module.children() and module.parameters()]
    for module, base in plain:
        module.__class__ = type(base.__name__, (base,), {"__call__": call_of(base)})
    try:
        yield
    finally:
        for module, base in plain:
            module.__class__ = base


def moved(base: type[Module], seeds: Iterator[int]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base.__call__(self, *args, **kwargs)
        if not isinstance(result, mx.array) or result.dtype not in ROUNDING_UNITS:
            return result
        by = mx.random.uniform(-1, 1, result.shape, key=mx.random.key(next(seeds))) * rounding_unit(result.dtype)
        return (result.astype(mx.float32) * (1 + by)).astype(result.dtype)

    return call
