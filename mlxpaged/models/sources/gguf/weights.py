"""Loads a GGUF file into mlx-lm's model: what the weights of an MLX model's directory would be, made of its tensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model

from mlxpaged.cpu.float32 import Sizes, Storage
from mlxpaged.models.files.weight_names import classes_of
from mlxpaged.models.sources.gguf.blocks import GROUP, Errors, arrays, bits_of, memory_bytes
from mlxpaged.models.sources.gguf.file import GgufFile, Tensor
from mlxpaged.models.sources.gguf.names import NAMES, weight_name
from mlxpaged.progress import ReportAmount

logger = logging.getLogger(__name__)

Arrays = dict[str, mx.array]
"""Parts of a weight: "weight", and "scales" and "biases" if it is quantized."""

Config = Mapping[str, Any]

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def dtype_name(file: GgufFile) -> str:
    """The type of the activations, and of the scales of quantized tensors. Models are trained in bfloat16, and the
    activations of some exceed float16, so it is float16 only for a file without any other half or quantized type."""
    kinds = {tensor.type.name for tensor in file.tensors.values()} - {"F32"}
    return "float16" if kinds == {"F16"} else "bfloat16" if kinds else "float32"


def sizes_of(file: GgufFile) -> Sizes:
    """Bytes of its tensors in each storage."""
    sizes = Sizes(0, 0, 0)
    for tensor in file.tensors.values():
        numbers, quantized = math.prod(tensor.shape), bits_of(tensor.type.name) is not None
        own, dense = memory_bytes(tensor), 4 * numbers
        scales = own + (own - numbers * (bits_of(tensor.type.name) or 0) // 8) if quantized else dense
        sizes = Sizes(sizes.model + own, sizes.scales + scales, sizes.dense + dense)
    return sizes


def load_gguf(
    directory: Path, file: GgufFile, report: ReportAmount, storage: Storage = Storage.MODEL
) -> tuple[Module, dict[str, Any]]:
    """The model of a file, whose weights are evaluated, and its config. directory: with its config.json. report: gets
    the bytes of the file that are read, and of all. Raises any exception."""

    def classes(config: dict[str, Any]) -> tuple[type[Module], type]:
        model_class, args_class = classes_of(config)

        class Model(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: Arrays) -> Arrays:
                """mlx-lm calls it for the weights of the directory, which has none."""
                read, quantization = read_weights(self, file, config, report, storage)
                config["quantization"] = quantization
                known: Arrays = super().sanitize(read) if hasattr(super(), "sanitize") else read
                return known

            def load_weights(self, *args: Any, **_: Any) -> Module:
                loaded: Module = super().load_weights(*args, strict=True)
                return loaded

        return Model, args_class

    model, config = load_model(directory, lazy=True, strict=False, get_model_classes=classes)
    return model, config


def read_weights(
    model: Module, file: GgufFile, config: Config, report: ReportAmount, storage: Storage = Storage.MODEL
) -> tuple[Arrays, dict[str, Any]]:
    """Weights by their names in the model, and the `quantization` of a config.json for them."""
    names = NAMES[config["model_type"]]
    dtype = DTYPES[config["dtype"]] if storage is Storage.MODEL else mx.float32
    modules = dict(model.named_modules())
    casts = getattr(model, "cast_predicate", lambda name: True)
    weights: Arrays = {}
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    errors, done, total = Errors(), 0, sum(tensor.nbytes for tensor in file.tensors.values())
    report(0, total)
    for tensor in file.tensors.values():
        done += tensor.nbytes
        name = weight_name(names, tensor.name, config["num_hidden_layers"])
        if name is None:
            continue
        found = arrays(tensor, dtype, errors, dense=storage is Storage.DENSE)
        for own_name, parts in changed(name, found, names.permuted, names.shift, config).items():
            module = own_name.rpartition(".")[0]
            if "scales" in parts and not hasattr(modules.get(module), "to_quantized"):
                parts = {"weight": dequantized(tensor, parts).astype(dtype)}
            if "scales" in parts:
                quantization[module] = settings(tensor)
                own = {f"{module}.{part}": array for part, array in parts.items()}
            else:
                own = {own_name: parts["weight"].astype(dtype if casts(own_name) else mx.float32)}
            mx.eval(own)
            weights |= own
        report(done, total)
    for kind, error in errors.relative().items():
        logger.info("tensors of the type %s are stored in %s bits: relative error %.4f", kind, bits_of(kind), error)
    return joined_latents(weights, config), quantization


def settings(tensor: Tensor) -> dict[str, Any]:
    """How mlx-lm has to read a quantized weight."""
    mode = "mxfp4" if tensor.type.name == "MXFP4" else "affine"
    return {"group_size": GROUP, "bits": bits_of(tensor.type.name), "mode": mode}


def dequantized(tensor: Tensor, parts: Arrays) -> mx.array:
    values: mx.array = mx.dequantize(parts["weight"], parts["scales"], parts.get("biases"), **settings(tensor))
    return values


def changed(name: str, found: Arrays, permuted: bool, shift: float, config: Config) -> dict[str, Arrays]:
    """Undo what llama.cpp's conversion has changed. Returns one weight, or two that the file has in one."""
    end = name.rpartition(".layers.")[2].partition(".")[2] or name
    if permuted and end.startswith(("self_attn.q_proj.", "self_attn.k_proj.")):
        heads = config["num_attention_heads" if ".q_proj." in end else "num_key_value_heads"]
        return {name: rows(found, half_rotation(len(found["weight"]), heads))}
    if shift and name.endswith("norm.weight"):
        return {name: {"weight": found["weight"].astype(mx.float32) - shift}}
    if end == "mlp.shared_expert_gate.weight" and found["weight"].ndim == 1:  # llama.cpp writes a row as a vector
        return {name: {"weight": found["weight"][None]}}
    if end == "conv.conv.weight":
        return {name: {"weight": found["weight"][..., None]}}
    if end.endswith(".gate_up_proj.weight") and "experts" in end:
        half = found["weight"].shape[-2] // 2
        parts = {"gate": slice(half), "up": slice(half, None)}
        return {name.replace("gate_up", part): rows(found, index) for part, index in parts.items()}
    if end.startswith("linear_attn."):
        return {name: in_groups(end, found, config)}
    return {name: found}


def rows(found: Arrays, index: Any) -> Arrays:
    """Some rows of a weight, or some items of a vector."""
    return {part: array[..., index, :] if array.ndim > 1 else array[index] for part, array in found.items()}


def half_rotation(num_rows: int, heads: int) -> mx.array:
    """llama.cpp rotates neighbouring dimensions of a head, and mlx-lm those half a head apart: the places, in the file,
    of the rows (LlamaModel.permute in llama.cpp's conversion, undone)."""
    return mx.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).flatten()


def in_groups(end: str, found: Arrays, config: Config) -> Arrays:
    """Weights of Qwen3.5's linear attention. The file has the value heads of all key heads in turn, mlx-lm those of one
    key head together (_LinearAttentionVReorderBase in llama.cpp's conversion)."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim, keys = config["linear_value_head_dim"], 2 * key_heads * config["linear_key_head_dim"]
    order = mx.arange(heads).reshape(-1, key_heads).T.flatten()
    values = (order[:, None] * dim + mx.arange(dim)).flatten()
    if end == "linear_attn.A_log":
        return {"weight": mx.log(-found["weight"].astype(mx.float32))[order]}
    if end.startswith(("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.dt_bias")):
        return rows(found, order)
    if end.startswith("linear_attn.in_proj_z"):
        return rows(found, values)
    if end.startswith(("linear_attn.in_proj_qkv", "linear_attn.conv1d")):
        found = rows(found, mx.concatenate([mx.arange(keys), keys + values]))
        return {"weight": found["weight"][..., None]} if "conv1d" in end else found
    if end.startswith("linear_attn.out_proj"):
        return {part: array.reshape(len(array), heads, -1)[:, order].flatten(1) for part, array in found.items()}
    return found


def joined_latents(weights: Arrays, config: Config) -> Arrays:
    """DeepSeek V2 has one projection of latents to keys and values, of which newer files have the two parts."""
    if config["model_type"] != "deepseek_v2":
        return weights
    joined = dict(weights)
    for name in weights:
        if name.endswith("embed_q.weight"):
            place = name.removesuffix("embed_q.weight")
            keys, values = (joined.pop(f"{place}{part}.weight") for part in ("embed_q", "unembed_out"))
            joined[f"{place}kv_b_proj.weight"] = mx.concatenate([keys.swapaxes(1, 2), values], axis=1).flatten(0, 1)
    return joined
