"""Decoding steps of known models as graphs, ours and mlx-lm's own: traced, never computed, without memory for weights.

MLX composes its fused functions of small operations on a CPU. So each of them is replaced by one kernel while a step is
traced, as on a Mac: a norm, a rotary embedding, attention over contiguous keys, a dequantized embedding, a compiled
activation. mlx-lm's attention over 1,024 keys or more would be two kernels on a Max or Ultra chip.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import activations
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache
from mlx_lm.utils import _get_classes

from mlxpaged.attention import AttentionMetadata
from mlxpaged.attention.command_buffers import Operation, operations
from mlxpaged.attention.layer import route_attention
from mlxpaged.models.caches import ModelCaches
from mlxpaged.models.layers import KV

CONTEXT = 900
BLOCKS = 16
"""Of each layer's pool. A sequence's table repeats them."""


@dataclass(frozen=True)
class KnownModel:
    """config: of mlx-lm's ModelArgs. Quantized to 4 bits in groups of 64, as in the mlx-community's repositories, but
    for gpt-oss as there: experts in mxfp4, the rest in 8 bits."""

    config: dict[str, Any]

    @property
    def windows(self) -> list[int | None]:
        size = self.config.get("sliding_window")
        layers: int = self.config["num_hidden_layers"]
        return [size if size and i % 2 == 0 else None for i in range(layers)]

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


@contextlib.contextmanager
def fused_functions() -> Iterator[None]:
    names = ("swiglu", "precise_swiglu", "swiglu_oai")
    compiled = {id(getattr(activations, name)): name for name in names if hasattr(activations, name)}
    with contextlib.ExitStack() as stack:
        for name in ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention"):
            stack.enter_context(mock.patch.object(mx.fast, name, functools.partial(one_kernel, name)))
        stack.enter_context(mock.patch.object(mx, "dequantize", dequantize))
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


def our_step(known: KnownModel, batch: int) -> list[Operation]:
    """The step of `ModelRunner.forward`, and argmax."""
    model = known.build()
    route_attention(model)
    config = known.config
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config["num_key_value_heads"]
    specs = [KV(heads, size, size, mx.bfloat16, window, config["num_attention_heads"]) for window in known.windows]
    with fused_functions():
        caches = ModelCaches(specs, BLOCKS, backend="metal")
        table = [block % BLOCKS for block in range(-(-CONTEXT // 32))]
        meta = AttentionMetadata.build([1] * batch, [CONTEXT] * batch, [table] * batch)
    rows = mx.arange(batch)
    mx.eval(rows, meta.positions, meta.slot_mapping, meta.block_tables)

    def run(state: list[mx.array]) -> mx.array:
        return caches.run(model, state[0], [meta])[rows, -1]

    return trace(model, [mx.zeros((batch,), mx.int32)], run)


def step_of_mlx_lm(known: KnownModel, batch: int) -> list[Operation]:
    """The model with mlx-lm's own caches, which are large enough for the token, and argmax."""
    model = known.build()
    config = known.config
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    state = [mx.zeros((batch, 1), mx.int32)]
    caches: list[Any] = []
    for window in known.windows:
        shape = (batch, config["num_key_value_heads"], window or -(-CONTEXT // 256) * 256, size)
        if batch == 1:
            caches.append(RotatingKVCache(window) if window else KVCache())
            caches[-1].offset = CONTEXT - 1
        else:
            padding = [0] * batch
            caches.append(BatchRotatingKVCache(window, padding) if window else BatchKVCache(padding))
            caches[-1].offset += CONTEXT - 1
            mx.eval(caches[-1].offset, caches[-1].left_padding)
        if window:
            caches[-1]._idx = (CONTEXT - 1) % window
            if batch > 1:
                caches[-1]._offset = CONTEXT - 1
        elif batch > 1:
            caches[-1]._idx = CONTEXT - 1
        state += [mx.zeros(shape, mx.bfloat16), mx.zeros(shape, mx.bfloat16)]

    def run(state: list[mx.array]) -> mx.array:
        for i, cache in enumerate(caches):
            cache.keys, cache.values = state[1 + 2 * i : 3 + 2 * i]
        logits: mx.array = model(state[0], cache=caches)[:, -1]
        return logits

    return trace(model, state, run)
