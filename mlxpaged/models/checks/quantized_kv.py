"""Decides whether a model's KV cache is quantized: it must fit the layers, and the probe's logits must stay close."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxpaged.models.cache_groups import cache_layout
from mlxpaged.models.checks.probe import TIMES_ROUNDING, PagedRun, differences_of
from mlxpaged.models.checks.probe_steps import steps
from mlxpaged.models.checks.reference import Reference, differences
from mlxpaged.models.layers import KV, LayerSpec, is_per_sequence, kv_layers, quantized
from mlxpaged.models.sharding import least
from mlxpaged.models.turns import Turns
from mlxpaged.progress import Stage

logger = logging.getLogger(__name__)

COARSER = {"int4": "int8", "int8": "auto"}
"""What is tried after a type that is refused."""

MOST_DIVERGENCE = 0.05
"""Nats by which a quantized cache may change the predictions of the probe's random tokens, whatever the model's
rounding is: 0.05 is 5 % of the perplexity. benchmarks/quantized_kv.py measures it, and the perplexity of text. With
4-bit values it is 0.028 for the demo model and 0.35 for a random one, and the perplexity grows by 0.04 % and 53 %."""


class QuantizedKV(NamedTuple):
    """layers: what they keep. dtype: the type of the KV cache, one of the engine's `KV_CACHE_DTYPES`. reason: why it is
    not the type that was asked for; empty if it is."""

    layers: list[LayerSpec]
    dtype: str
    reason: str


def choose_quantization(
    model: Module,
    layers: Sequence[LayerSpec],
    wanted: str,
    reference: Reference,
    context_length: int,
    turns: Turns,
    group: mx.distributed.Group | None = None,
) -> QuantizedKV:
    """The layers with KV of the type that was asked for, or of a finer one if that is refused. All ranks of a group
    choose the same."""
    dtype, reason = wanted, ""
    while dtype != "auto":
        candidate = quantized(layers, dtype)
        refused = cannot_quantize(layers, candidate, context_length)
        if not refused:
            refused = too_coarse(model, candidate, reference, turns)
        if group is not None and not least(not refused, group):
            refused = refused or "another rank refuses it"
        if not refused:
            kept = sum(spec.quantization is None for spec in kv_layers(candidate))
            logger.info("the KV cache is %s; %d of %d layers stay unquantized", dtype, kept, len(kv_layers(candidate)))
            return QuantizedKV(candidate, dtype, reason)
        reason = reason or refused
        logger.warning("the KV cache is not %s but %s: %s", dtype, COARSER[dtype], refused)
        dtype = COARSER[dtype]
    return QuantizedKV(list(layers), dtype, reason)


def cannot_quantize(layers: Sequence[LayerSpec], candidate: Sequence[LayerSpec], context_length: int) -> str:
    """The reason why these layers cannot be quantized like this; empty if they can."""
    before, after = kv_layers(layers), kv_layers(candidate)
    if is_per_sequence(layers):
        return "some layers run once per sequence, with mlx-lm's own caches"
    if not any(spec.quantization for spec in after):
        heads = sorted({size_of(spec) for spec in before if spec.window is None and not spec.latent})
        return f"no group divides heads of {', '.join(heads)}" if heads else "all layers have a window or latents"
    groups, plain = cache_layout(after, context_length), cache_layout(before, context_length)
    if len(plain.windows) > 1 and len(groups.windows) == 1:
        return "its blocks do not divide those of the layers with a window"
    return ""


def size_of(spec: KV) -> str:
    sizes = dict.fromkeys((spec.key_size, spec.value_size))
    return "/".join(map(str, sizes))


class Effect(NamedTuple):
    """What a quantized cache does to the logits of the probe's steps. difference: as `differences`. divergence: of the
    predictions, Kullback-Leibler, in nats. The medians of all rows count, because a router of experts may move single
    rows far."""

    difference: float
    divergence: float


def too_coarse(model: Module, layers: Sequence[LayerSpec], reference: Reference, turns: Turns) -> str:
    """The reason why the logits are too far from those with KV that is not quantized; empty if they are not."""
    effect, explained = effect_on_logits(model, layers, reference, turns), TIMES_ROUNDING * reference.rounding
    logger.debug("quantized KV: %s, rounding explains a difference of %.2g", effect, explained)
    if effect.divergence <= MOST_DIVERGENCE or effect.difference <= explained:
        return ""
    return (
        f"the predictions of the probe change by {effect.divergence:.2g} nats, and {MOST_DIVERGENCE} are allowed; its "
        f"logits differ by {effect.difference:.1%}, and rounding explains {explained:.2%}"
    )


def effect_on_logits(
    model: Module, layers: Sequence[LayerSpec], reference: Reference, turns: Turns | None = None
) -> Effect:
    """Runs the probe's steps on caches of these layers."""
    run = PagedRun(model, layers, reference)
    found: tuple[list[float], list[float]] = ([], [])
    turns, planned = turns or Turns(), steps(len(reference.tokens))
    turns.begin(Stage.CHECKING_KV_CACHE, len(planned))
    for step in planned:
        logits = run(step)
        for values, distance in zip(found, (differences, divergences), strict=True):
            for _, of_kind in differences_of(step, logits, reference, distance):
                values += of_kind
        turns.step()
    return Effect(*map(median, found))


def divergences(logits: mx.array, expected: mx.array) -> mx.array:
    """The Kullback-Leibler divergence of each row's predictions, [n, vocabulary] each -> [n]. It is infinite if a logit
    is not a number."""
    got, wanted = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (logits.astype(mx.float32), expected))
    return mx.nan_to_num(mx.sum(mx.exp(wanted) * (wanted - got), axis=-1), nan=mx.inf, posinf=mx.inf)
