"""What tokens cost, in multiply-adds: the products of a decoder's layers with weights, and its attention.

They are counted, not timed: a server must know before the first long input that its late tokens cost more.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

EXPERTS_PER_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk"),
    *("moe_top_k", "moe_k"),
)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
"""Names of these numbers in the config.json of mlx-lm's models."""


@dataclass(frozen=True)
class TokenCost:
    """Multiply-adds of a token in a causal decoder. linear: of all products with weights. attention: for each key that
    the token attends to, of all layers with the same window; the window is None for all keys."""

    linear: int
    attention: Mapping[int | None, int]

    def of(self, start: int, tokens: int) -> float:
        """Those of `tokens` tokens from position `start` on."""
        keys = (each * attended(start, tokens, window) for window, each in self.attention.items())
        return tokens * self.linear + sum(keys)

    def most_within(self, cost: float, start: int, most: int) -> int:
        """The most tokens from position `start` on, up to `most`, that cost at most `cost`."""
        return bisect.bisect_right(range(1, most + 1), cost, key=lambda tokens: self.of(start, tokens))


def attended(start: int, tokens: int, window: int | None) -> float:
    """Keys that the tokens from position `start` on attend to, added up over these tokens."""
    whole = tokens if window is None else max(0, min(tokens, window - start))
    return whole * (start + (whole + 1) / 2) + (tokens - whole) * (window or 0)


def token_cost(decoder: Module, caches: Sequence[Any], config: Mapping[str, Any]) -> TokenCost:
    """caches: of mlx-lm, one for each layer, with some tokens. config: of the text model."""
    per_key: Counter[int | None] = Counter()
    for cache in caches:
        keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
        if isinstance(keys, mx.array) and isinstance(values, mx.array):
            heads = named(config, HEADS, keys.shape[1])
            per_key[getattr(cache, "max_size", None)] += heads * (keys.shape[-1] + values.shape[-1])
    modules = (module for _, module in decoder.named_modules())
    return TokenCost(sum(multiply_adds(module, experts_per_token(config)) for module in modules), dict(per_key))


def multiply_adds(module: Module, experts: int) -> int:
    """Those of a token with the weights of a module itself, without modules in it. experts: of a token."""
    arrays = {name: each for name, each in module.items() if isinstance(each, mx.array)}
    weight = arrays.get("weight")
    if weight is None or weight.ndim < 2 or isinstance(module, (Embedding, QuantizedEmbedding)):
        return 0
    elements = int(weight.size) * 32 // module.bits if "scales" in arrays else int(weight.size)
    return elements * min(experts, len(weight)) // len(weight) if is_of_experts(module) else elements


def is_of_experts(module: object) -> bool:
    return isinstance(module, (SwitchLinear, QuantizedSwitchLinear))


def experts_per_token(config: Mapping[str, object]) -> int:
    """config: of the text model."""
    return named(config, EXPERTS_PER_TOKEN, 1)


def named(config: Mapping[str, object], names: Iterable[str], default: int) -> int:
    """The first positive number that the configuration has by one of these names."""
    return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), default)
