"""Shares of models that mlx-lm cannot cut, for several ranks: Qwen3-Next.

They are cut as mlx-lm's `shard` cuts Qwen3.5, which has the same layers: each rank has whole heads of both kinds of
attention, and a part of each expert. The weights of Qwen3-Next's linear attention lie together by key head
(`q, k, v, z` and `b, a`), so a rank takes consecutive rows of them. The channels of the convolution are `q | k | v` of
all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.utils import tree_map

OUT, IN = "all-to-sharded", "sharded-to-all"
"""A share of a layer's outputs, or of its inputs."""


def cut_qwen3_next(model: Any, group: mx.distributed.Group) -> None:
    """The output head stays whole."""
    for layer in model.layers:
        if layer.is_linear:
            cut_linear_attention(layer.linear_attn, group)
        else:
            cut_attention(layer.self_attn, group)
        if hasattr(layer.mlp, "switch_mlp"):
            cut_experts(layer.mlp, group)
        else:
            cut_joined(layer.mlp, {"gate_proj": OUT, "up_proj": OUT, "down_proj": IN}, group)


def cut_linear_attention(attention: Any, group: mx.distributed.Group) -> None:
    count, rank = group.size(), group.rank()
    key_dim = attention.key_dim
    shard_inplace(attention.in_proj_qkvz, OUT, group=group)
    shard_inplace(attention.in_proj_ba, OUT, group=group)
    shard_inplace(attention.conv1d, lambda path, weight: (0, [key_dim, 2 * key_dim]), group=group)
    attention.conv1d.groups //= count
    attention.dt_bias = mx.split(attention.dt_bias, count)[rank]
    attention.A_log = mx.split(attention.A_log, count)[rank]
    attention.out_proj = shard_linear(attention.out_proj, IN, group=group)
    for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
        setattr(attention, name, getattr(attention, name) // count)


def cut_attention(attention: Any, group: mx.distributed.Group) -> None:
    count, num_kv_heads = group.size(), attention.num_key_value_heads
    if num_kv_heads < count:
        for projection in (attention.k_proj, attention.v_proj):
            repeat_heads(projection, num_kv_heads, count)
    cut_joined(attention, {"q_proj": OUT, "k_proj": OUT, "v_proj": OUT, "o_proj": IN}, group)
    attention.num_attention_heads //= count
    attention.num_key_value_heads = max(1, num_kv_heads // count)


def repeat_heads(projection: Any, num_heads: int, count: int) -> None:
    """Give each of `count` ranks one of fewer heads. Raises ValueError if they cannot have equally many."""
    if count % num_heads:
        raise ValueError(f"{num_heads} KV heads cannot be divided among {count}")

    def repeat(rows: mx.array) -> mx.array:
        heads = rows.reshape(num_heads, -1, *rows.shape[1:])
        return mx.repeat(heads, count // num_heads, axis=0).reshape(-1, *rows.shape[1:])

    projection.update(tree_map(repeat, projection.parameters()))


def cut_experts(block: Any, group: mx.distributed.Group) -> None:
    """The block adds up once, for its own experts and the shared one."""
    block.sharding_group = group
    for experts in (block.switch_mlp, block.shared_expert):
        for name, kind in (("gate_proj", OUT), ("up_proj", OUT), ("down_proj", IN)):
            shard_inplace(getattr(experts, name), kind, group=group)


def cut_joined(module: Any, kinds: dict[str, str], group: mx.distributed.Group) -> None:
    """Cut layers, of which those with a share of the inputs add up."""
    for name, kind in kinds.items():
        setattr(module, name, shard_linear(getattr(module, name), kind, group=group))


CUTS: dict[str, Callable[[Any, mx.distributed.Group], None]] = {"qwen3_next": cut_qwen3_next}
"""What cuts a model, by its `model_type`."""
