"""Shares of models that mlx-lm cannot cut, for several ranks: Qwen3-Next, and Ling's `bailing_hybrid`.

Each rank has whole heads of both kinds of attention, and a part of each expert. Qwen3-Next is cut as mlx-lm's `shard`
cuts Qwen3.5, which has the same layers. The weights of Qwen3-Next's linear attention lie together by key head
(`q, k, v, z` and `b, a`), so a rank takes consecutive rows of them. The channels of the convolution are `q | k | v` of
all heads. So are the rows of Ling's linear attention. Its heads have decays that depend on their numbers, and its
norm is over groups of them: a rank needs whole groups. The latent attention's keys and values are whole on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.utils import tree_map

OUT, IN = "all-to-sharded", "sharded-to-all"
"""A share of a layer's outputs, or of its inputs."""
MLP = {"gate_proj": OUT, "up_proj": OUT, "down_proj": IN}


def cut_qwen3_next(model: Any, group: mx.distributed.Group) -> None:
    """The output head stays whole."""
    for layer in model.layers:
        if layer.is_linear:
            cut_linear_attention(layer.linear_attn, group)
        else:
            cut_attention(layer.self_attn, group)
        if hasattr(layer.mlp, "switch_mlp"):
            layer.mlp.sharding_group = group  # the block adds up once
            cut_experts(layer.mlp.switch_mlp, layer.mlp.shared_expert, group=group)
        else:
            cut_joined(layer.mlp, MLP, group)


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


def cut_bailing_hybrid(model: Any, group: mx.distributed.Group) -> None:
    """The output head stays whole."""
    for layer in model.model.layers:
        if layer.is_global:
            cut_latent_attention(layer.attention, group)
        else:
            cut_decayed_attention(layer.attention, group)
        if hasattr(layer.mlp, "switch_mlp"):
            cut_experts(*filter(None, (layer.mlp.switch_mlp, layer.mlp.shared_experts)), group=group)
            layer.mlp = AddedUp(layer.mlp, group)
        else:
            cut_joined(layer.mlp, MLP, group)


def cut_latent_attention(attention: Any, group: mx.distributed.Group) -> None:
    count, rank = group.size(), group.rank()
    query = "q_proj" if attention.q_lora_rank is None else "q_b_proj"
    cut_joined(attention, {query: OUT, "dense": IN}, group)
    for by_head in (attention.embed_q, attention.unembed_out):
        by_head.update(tree_map(lambda weight: mx.split(weight, count)[rank], by_head.parameters()))
    attention.num_heads //= count


def cut_decayed_attention(attention: Any, group: mx.distributed.Group) -> None:
    """mlx-lm keeps the decays of the heads in `_slope`."""
    count, rank = group.size(), group.rank()
    shard_inplace(attention.query_key_value, OUT, segments=3, group=group)
    cut_joined(attention, {"g_proj": OUT, "dense": IN}, group)
    attention.g_norm.weight = mx.split(attention.g_norm.weight, count)[rank]
    attention._slope = mx.split(attention._slope, count)[rank]
    attention.g_norm.groups //= count
    for name in ("num_attention_heads", "num_key_value_heads"):
        setattr(attention, name, getattr(attention, name) // count)


class AddedUp(Module):
    """A block of which each rank computes a part of the sum."""

    def __init__(self, block: Module, group: mx.distributed.Group) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.block = block
        self.group = group

    def __call__(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(self.block(x), group=self.group)


def cut_experts(*experts: Any, group: mx.distributed.Group) -> None:
    """Cut those whose outputs their block adds up. Raises ValueError if each rank would add a bias."""
    for each in experts:
        if "bias" in each.down_proj:
            raise ValueError("its experts have biases")
        for name, kind in MLP.items():
            shard_inplace(getattr(each, name), kind, group=group)


def cut_joined(module: Any, kinds: dict[str, str], group: mx.distributed.Group) -> None:
    """Cut layers, of which those with a share of the inputs add up."""
    for name, kind in kinds.items():
        setattr(module, name, shard_linear(getattr(module, name), kind, group=group))


CUTS: dict[str, Callable[[Any, mx.distributed.Group], None]] = {
    "qwen3_next": cut_qwen3_next,
    "bailing_hybrid": cut_bailing_hybrid,
}
"""What cuts a model, by its `model_type`."""
