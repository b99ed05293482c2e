"""Adapters as PEFT saves them, and the same adapters merged into the weights of their model by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_unflatten
from mlx_lm.utils import load_model as load_plain_model

PREFIX, SUFFIX = "base_model.model.", ".weight"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALPHA = 12


@dataclass(frozen=True)
class PeftAdapter:
    """path: its directory. matrices: A and B of each module, by the module's path in the model."""

    path: Path
    matrices: Mapping[str, tuple[mx.array, mx.array]]


def linear_layers(model: Path) -> dict[str, tuple[int, int]]:
    """The number of outputs and inputs of each linear layer, by its path."""
    plain, _ = load_plain_model(model)
    found = {name: dense_weight(each) for name, each in plain.named_modules() if is_linear(each)}
    return {name: (weight.shape[0], weight.shape[1]) for name, weight in found.items()}


def is_linear(module: Any) -> bool:
    return isinstance(module, (Linear, QuantizedLinear))


def dense_weight(linear: Any) -> mx.array:
    """[out, in]"""
    weight: mx.array = linear.weight
    if isinstance(linear, QuantizedLinear):
        weight = mx.dequantize(weight, linear.scales, linear.biases, linear.group_size, linear.bits)
    return weight


def make_peft_adapter(
    model: Path,
    directory: Path,
    modules: tuple[str, ...] = ("q_proj", "v_proj", "down_proj"),
    ranks: Mapping[str, int] | None = None,
    rename: tuple[str, str] = ("", ""),
    prefix: str = PREFIX,
    suffix: str = SUFFIX,
    dtype: mx.Dtype = mx.float32,
    frozen: str = "",
    **fields: Any,
) -> PeftAdapter:
    """Save random weights that change the answers of a model. modules: ends of the paths of the linear layers. ranks:
    by the ends of paths, if not `r`. rename: what the paths of transformers have instead of a part of the model's.
    prefix, suffix: of the names of tensors. frozen: a layer whose own weight is saved too. fields: of the config."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"target_modules": list(modules), "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}
    config |= {"rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "init_lora_weights": True} | fields
    mx.random.seed(5)
    tensors, matrices = {}, {}
    for name, (outputs, inputs) in linear_layers(model).items():
        if name.endswith(modules):
            rank = next((rank for end, rank in (ranks or {}).items() if name.endswith(end)), config["r"])
            a, b = (mx.random.normal(shape).astype(dtype) * 0.2 for shape in ((rank, inputs), (outputs, rank)))
            matrices[name] = a, b
            published = f"{prefix}{name.replace(*rename)}" if rename[0] else f"{prefix}{name}"
            tensors |= {f"{published}.lora_A{suffix}": a, f"{published}.lora_B{suffix}": b}
            if name == frozen:
                tensors[f"{published}.base_layer.weight"] = mx.zeros((outputs, inputs), dtype)
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / WEIGHTS), tensors, {"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config))
    return PeftAdapter(directory, matrices)


def merged(model: Path, adapter: PeftAdapter, scales: Mapping[str, float]) -> Any:
    """The model of mlx-lm with scale * B @ A added to its weights. scales: by the ends of paths; "" is the default."""
    plain, _ = load_plain_model(model)
    modules, changed = dict(plain.named_modules()), []
    for name, (a, b) in adapter.matrices.items():
        scale = next(scale for end, scale in scales.items() if name.endswith(end))
        base: Any = modules[name]
        delta = scale * b.astype(mx.float32) @ a.astype(mx.float32)
        layer = Linear(a.shape[1], b.shape[0], bias="bias" in base)
        layer.weight = dense_weight(base) + delta
        if "bias" in base:
            layer.bias = base.bias
        changed.append((name, layer))
    plain.update_modules(tree_unflatten(changed))
    plain.eval()
    return plain
