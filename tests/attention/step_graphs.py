"""Decoding steps of known models as graphs, ours and mlx-lm's own: traced, never computed, without memory for weights.

MLX composes its fused functions of small operations on a CPU. So each of them is replaced by one kernel while a step is
traced, as on a Mac: a norm, a rotary embedding, attention over contiguous keys, a dequantized embedding, a compiled
activation. mlx-lm's attention over 1,024 keys or more would be two kernels on a Max or Ultra chip.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import activations, gated_delta
from mlx_lm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes

from benchmarks.command_buffers import Operation, operations
from mlxpaged.attention.layer import route_attention
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.qkv import QkvKind
from mlxpaged.core.step import Row
from mlxpaged.models.caches import ModelCaches
from mlxpaged.models.head import RowSelection, select_rows_before_head
from mlxpaged.models.joins import fused_attention, joins
from mlxpaged.models.joins.expert_rows import rows_of
from mlxpaged.models.joins.fused_attention import FusedAttention, fuse_attention
from mlxpaged.models.layer_finder import Way, find_layers
from mlxpaged.models.layers import KV, LayerSpec, Recurrent
from mlxpaged.models.replacements import route_layers

CONTEXT = 900
BLOCKS = 16
"""Of each layer's pool. A sequence's table repeats them."""


@dataclass(frozen=True)
class KnownModel:
    """config: of mlx-lm's ModelArgs. Quantized to 4 bits in groups of 64, as in the mlx-community's repositories, but
    for gpt-oss as there: experts in mxfp4, the rest in 8 bits."""

    config: dict[str, Any]

    @property
    def num_heads(self) -> int:
        heads: int = self.config["num_attention_heads"]
        return heads

    def build(self) -> nn.Module:
        model_class, args_class = _get_classes(self.config)
        model: nn.Module = model_class(args_class.from_dict(self.config))
        model.set_dtype(mx.bfloat16)
        is_mxfp4 = self.config["model_type"] == "gpt_oss"

        def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
            if not hasattr(module, "to_quantized"):
                return False
            if is_mxfp4:
                experts = ".experts" in path
                return {"group_size": 32, "bits": 4, "mode": "mxfp4"} if experts else {"group_size": 64, "bits": 8}
            return True

        nn.quantize(model, 64, 4, class_predicate=predicate)
        return model


def qwen3(**sizes: Any) -> KnownModel:
    common = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
    common |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": True}
    return KnownModel(common | sizes)


MODELS = {
    "Qwen3-0.6B": qwen3(hidden_size=1024, num_hidden_layers=28, intermediate_size=3072, num_attention_heads=16),
    "Qwen3-4B": qwen3(hidden_size=2560, num_hidden_layers=36, intermediate_size=9728, num_attention_heads=32),
    "Llama-3.1-8B": KnownModel(
        {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 128256}
        | {"rope_theta": 5e5, "tie_word_embeddings": False}
    ),
    "Qwen3-30B-A3B": qwen3(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, intermediate_size=6144, num_attention_heads=32
    ),
    "gpt-oss-20b": KnownModel(
        {"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "intermediate_size": 2880}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
        | {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150000}
        | {"rms_norm_eps": 1e-5, "rope_scaling": None}
    ),
}
MODELS["Qwen3-30B-A3B"].config.update(
    {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
    | {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_key_value_heads": 4, "tie_word_embeddings": False}
)
MODELS["Qwen3.5-35B-A3B"] = KnownModel(
    {"model_type": "qwen3_5_moe", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16}
    | {"num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "rms_norm_eps": 1e-6, "intermediate_size": 0}
    | {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128}
    | {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
    | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True}
    | {"shared_expert_intermediate_size": 512, "tie_word_embeddings": False}
)
MODELS["GLM-4.7-Flash"] = KnownModel(
    {"model_type": "glm4_moe_lite", "num_attention_heads": 20, "num_experts_per_tok": 4}  # the rest is mlx-lm's default
)


PROMPTS = [name for name in MODELS if name != "GLM-4.7-Flash"]
"""Those whose prompts can be traced: the stand-ins for kernels do not know the shapes of expanded latents."""


def kernel(name: str, inputs: Sequence[Any], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    arrays = [array for array in inputs if isinstance(array, mx.array)]
    built = METAL_KERNEL(name=name, input_names=[f"i{i}" for i in range(len(arrays))], output_names=["o"], source="")
    one = (1, 1, 1)
    [out] = built(inputs=arrays, template=[], grid=one, threadgroup=one, output_shapes=[shape], output_dtypes=[dtype])
    return out  # type: ignore[no-any-return]


METAL_KERNEL: Any = mx.fast.metal_kernel


def one_kernel(name: str, first: mx.array, *rest: Any, **options: Any) -> mx.array:
    """A kernel whose result is like its first argument."""
    return kernel(name, [first, *rest, *options.values()], first.shape, first.dtype)


def dequantize(weight: mx.array, scales: mx.array, biases: mx.array | None = None, **options: Any) -> mx.array:
    shape = (*weight.shape[:-1], weight.shape[-1] * 32 // options["bits"])
    return kernel("dequantize", [weight, scales, biases], shape, mx.bfloat16)


def gated_delta_kernel(q: mx.array, k: mx.array, v: mx.array, *more: Any) -> tuple[mx.array, mx.array]:
    """Returns the outputs and the new state."""
    arrays = [array for array in (q, k, v, *more) if array is not None]
    state = arrays[5]
    built = METAL_KERNEL(
        name="gated_delta", input_names=[f"i{i}" for i in range(len(arrays))], output_names=["o", "s"], source=""
    )
    one, likes = (1, 1, 1), (v, state)
    out, after = built(
        inputs=arrays,
        template=[],
        grid=one,
        threadgroup=one,
        output_shapes=[each.shape for each in likes],
        output_dtypes=[q.dtype, state.dtype],
    )
    return out, after


@contextlib.contextmanager
def fused_functions() -> Iterator[None]:
    names = ("swiglu", "precise_swiglu", "swiglu_oai", "compute_g")
    owners = (activations, gated_delta)
    compiled = {id(getattr(owner, name)): name for owner in owners for name in names if hasattr(owner, name)}
    with contextlib.ExitStack() as stack:
        for name in ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention"):
            stack.enter_context(mock.patch.object(mx.fast, name, functools.partial(one_kernel, name)))
        stack.enter_context(mock.patch.object(mx, "dequantize", dequantize))
        stack.enter_context(mock.patch.object(nn, "silu", functools.partial(one_kernel, "silu")))
        stack.enter_context(mock.patch.object(gated_delta, "gated_delta_ops", gated_delta_kernel))
        # Not MLX's own function: LayerKVCache takes a function of another type for a stand-in that can run.
        stack.enter_context(mock.patch.object(mx.fast, "metal_kernel", lambda **options: METAL_KERNEL(**options)))
        for module in [m for name, m in sys.modules.items() if name.startswith("mlx_lm.models.")]:
            for name, value in list(vars(module).items()):
                if id(value) in compiled:
                    stack.enter_context(mock.patch.object(module, name, functools.partial(one_kernel, name)))
        yield


def trace(model: nn.Module, state: Sequence[mx.array], run: Callable[[list[mx.array]], mx.array]) -> list[Operation]:
    """The operations of `run`, which gets `state`; weights and state are inputs of the graph."""
    names, weights = zip(*tree_flatten(model.parameters()), strict=True)
    placeholders = [mx.zeros(weight.shape, weight.dtype) for weight in weights]  # these are never evaluated
    records: list[dict[str, Any]] = []

    def step(*arrays: mx.array) -> mx.array:
        model.update(tree_unflatten(list(zip(names, arrays, strict=False))))
        return mx.argmax(run(list(arrays[len(names) :])), axis=-1)

    with fused_functions():
        mx.export_function(records.append, step, *placeholders, *state)
    return operations(records)


def with_heads(specs: Sequence[LayerSpec], heads: int, kind: QkvKind | None) -> list[LayerSpec]:
    """A probe of the model would find the number of query heads, and what a fused layer does."""
    return [replace(spec, num_query_heads=heads, qkv=kind) if isinstance(spec, KV) else spec for spec in specs]


def join_unchecked(model: nn.Module) -> None:
    """What `joins.join` does to a model whose numbers are right, without computing its projections."""
    with mock.patch.object(mx, "eval"), mock.patch.object(joins, "are_rounding", return_value=True):
        joins.join_gate_and_up(model)
        joins.name_rows(model)
    rows_of.cache_clear()  # those of the trials were not computed
    joins.join_norms(model)


def fuse_unchecked(model: nn.Module) -> QkvKind | None:
    """Fuse the attention layers that can be, whose weights are never computed. None if there are none."""
    parameters: Any = tree_flatten(model.parameters())
    mx.eval([array for _, array in parameters if array.ndim < 2])
    layers: list[Any] = [module for module in model.modules() if "q_proj" in module]
    with mock.patch.object(fused_attention, "difference_of", return_value=None), mock.patch.object(mx, "eval"):
        fuse_attention([(layer, mx.bfloat16) for layer in layers])
    kinds = {layer.fusion.qkv.kind for layer in layers if isinstance(layer, FusedAttention)}
    assert len(kinds) <= 1
    return next(iter(kinds), None)


def our_step(
    known: KnownModel, batch: int, context: int = CONTEXT, joined: bool = True, fused: bool = True
) -> list[Operation]:
    """The step of `ModelRunner.forward`, and argmax. joined: by models/joins/joins.py. fused: by fused_attention.py."""
    return traced_step(known, [Row(i, context - 1, [0]) for i in range(batch)], joined=joined, fused=fused)


def prompt_step(known: KnownModel, tokens: int) -> list[Operation]:
    """A new prompt of so many tokens, of whose last one the logits are wanted."""
    return traced_step(known, [Row(0, 0, [0] * tokens)], wanted=[tokens - 1])


def traced_step(
    known: KnownModel,
    rows: Sequence[Row],
    wanted: Sequence[int] | None = None,
    joined: bool = True,
    fused: bool = True,
) -> list[Operation]:
    """wanted: the tokens that go through the output head; None for all."""
    model = known.build()
    specs = route_layers(model, Way.ROWS)
    route_attention(model)
    if joined:
        join_unchecked(model)
    kind = fuse_unchecked(model) if fused else None
    specs = with_heads(specs, known.num_heads, kind)
    if wanted is not None:
        with_rows(model, known.config["vocab_size"], mx.array(wanted))
    lens, contexts = [row.num_tokens for row in rows], [row.context_len for row in rows]
    with fused_functions():
        caches = ModelCaches(specs, BLOCKS, backend="metal")
        tables = [[block % BLOCKS for block in range(-(-context // 32))] for context in contexts]
        meta = AttentionMetadata.build(lens, contexts, tables)
    last = mx.arange(sum(lens) if wanted is None else len(wanted))
    mx.eval(last, meta.positions, meta.slot_mapping, meta.block_tables)
    states = [[mx.zeros((len(rows), *shape[1:]), dtype) for shape, dtype in layer.likes] for layer in caches.recurrent]

    def run(state: list[mx.array]) -> mx.array:
        arrays = iter(state[1:])
        for layer in caches.recurrent:
            layer.bind([[next(arrays) for _ in layer.likes]])
        return caches.run(model, state[0], [meta], rows)[last, -1]

    return trace(model, [mx.zeros((sum(lens),), mx.int32), *itertools.chain(*states)], run)


def with_rows(model: nn.Module, vocab_size: int, rows: mx.array) -> None:
    """Lets the output head select rows, without running the model to find it."""
    mx.eval(rows)

    def take(selection: RowSelection) -> bool:
        selection.rows = rows
        return True

    assert select_rows_before_head(model, {vocab_size}, take) is not None


def step_of_mlx_lm(known: KnownModel, batch: int) -> list[Operation]:
    """The model with mlx-lm's own caches, which are large enough for the token, and argmax."""
    model = known.build()
    state = [mx.zeros((batch, 1), mx.int32)]
    caches = make_prompt_cache(model)
    for i, (cache, spec) in enumerate(zip(caches, find_layers(known.build()).specs, strict=True)):
        if isinstance(spec, Recurrent):
            state += [mx.zeros((batch, *like[0]), like[1]) for like in spec.arrays if like is not None]
            continue
        assert isinstance(spec, KV)
        window = cache.max_size if isinstance(cache, RotatingKVCache) else None
        length = window or -(-CONTEXT // 256) * 256
        if batch == 1:
            cache.offset = CONTEXT - 1
        else:
            padding = [0] * batch
            cache = caches[i] = BatchRotatingKVCache(window, padding) if window else BatchKVCache(padding)
            cache.offset += CONTEXT - 1
            mx.eval(cache.offset, cache.left_padding)
        if window:
            cache._idx = (CONTEXT - 1) % window
            if batch > 1:
                cache._offset = CONTEXT - 1
        elif batch > 1:
            cache._idx = CONTEXT - 1
        sizes = spec.kv_layout(block_size=1).input_sizes
        state += [mx.zeros((batch, spec.num_kv_heads, length, size), mx.bfloat16) for size in sizes]

    def run(state: list[mx.array]) -> mx.array:
        arrays = iter(state[1:])
        for cache in caches:
            if isinstance(cache, ArraysCache):
                of_layer: list[Any] = [next(arrays) for _ in cache.cache]
                cache.cache = of_layer
            else:
                cache.keys, cache.values = next(arrays), next(arrays)
        logits: mx.array = model(state[0], cache=caches)[:, -1]
        return logits

    return trace(model, state, run)


def kv_bytes(known: KnownModel, batch: int) -> int:
    """Bytes of the keys and values that the tokens of a step see."""
    specs = [spec for spec in find_layers(known.build()).specs if isinstance(spec, KV)]
    seen = [min(CONTEXT, spec.window or CONTEXT) for spec in specs]
    return batch * sum(
        keys * spec.kv_layout(block_size=1).bytes_per_token for keys, spec in zip(seen, specs, strict=True)
    )
