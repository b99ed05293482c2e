"""How fast the ranks add up their parts of a step: measured once, after the ranks have met."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import mlx.core as mx

from mlxpaged.engine.info import Link
from mlxpaged.models.sources.resolve import resolve

TIMES = 7
"""Messages of each size; the median of their times counts."""

DEFAULT_HIDDEN_SIZE = 4096


def measure_link(group: mx.distributed.Group, hidden_size: int, num_tokens: int) -> Link:
    """Add up the hidden states of one token, and of the largest step. All ranks must call it. Raises MLX's RuntimeError
    if a rank is lost."""
    return Link(
        token_bytes=4 * hidden_size,
        token_seconds=seconds(group, (1, hidden_size)),
        step_bytes=4 * hidden_size * num_tokens,
        step_seconds=seconds(group, (num_tokens, hidden_size)),
    )


def seconds(group: mx.distributed.Group, shape: tuple[int, int]) -> float:
    """An all_sum of float32, the largest type that a hidden state has."""
    took = []
    for _ in range(TIMES):
        own = mx.zeros(shape)
        mx.eval(own)
        started = time.perf_counter()
        mx.eval(mx.distributed.all_sum(own, group=group))
        took.append(time.perf_counter() - started)
    return median(took)


def hidden_size(model: str) -> int:
    """The hidden size in a model's config.json, or in the text part of a multimodal one."""
    config = resolve(model).config
    text: Any = config.get("text_config") or {}
    found = text.get("hidden_size") if isinstance(text, dict) and "hidden_size" in text else config.get("hidden_size")
    return found if isinstance(found, int) and found > 0 else DEFAULT_HIDDEN_SIZE
