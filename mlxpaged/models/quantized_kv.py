"""Decides whether a model's KV cache is quantized: it must fit the layers, and the probe's logits must stay close."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxpaged.models.cache_groups import cache_layout
from mlxpaged.models.layers import KV, LayerSpec, is_per_sequence, kv_layers, quantized
from mlxpaged.models.probe import TIMES_ROUNDING, PagedRun, differences_of
from mlxpaged.models.probe_steps import steps
from mlxpaged.models.reference import Reference
from mlxpaged.models.sharding import least
from mlxpaged.models.turns import Turns

logger = logging.getLogger(__name__)

COARSER = {"int4": "int8", "int8": "auto"}
"""What is tried after a type that is refused."""

LEAST_DIFFERENCE = 0.05
"""Logits may differ by this share of their standard deviation, whatever the model's rounding is: between the 0.4 % by
which bfloat16 rounds and what changes answers."""


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


def too_coarse(model: Module, layers: Sequence[LayerSpec], reference: Reference, turns: Turns) -> str:
    """The reason why the logits are too far from those with KV that is not quantized; empty if they are not.

    The median of all rows of the probe's steps counts, because a router of experts may move single rows far.
    """
    run = PagedRun(model, layers, reference)
    values: list[float] = []
    for step in steps(len(reference.tokens)):
        turns.take()
        for _, of_kind in differences_of(step, run(step), reference):
            values += of_kind
    difference, allowed = median(values), max(LEAST_DIFFERENCE, TIMES_ROUNDING * reference.rounding)
    logger.debug("quantized KV: logits differ by %.2g, allowed are %.2g", difference, allowed)
    if difference <= allowed:
        return ""
    return f"the logits of the probe differ by {difference:.2%}, and rounding explains {allowed:.2%}"
