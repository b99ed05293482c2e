"""Models of engine.py with other layers than the comparison's Llama: recurrent states, and latent attention.

Random weights, float32, the comparison's tokenizer. Their proportions are those of the models that they stand for; they
are so small that a decode step of 16 sequences takes about 0.1 s on two cores.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from comparison.model import write_model
from mlx.utils import tree_flatten

VERSION = 1
"""Part of the cached directories' names; to be raised when what is made here changes."""

SHARED: dict[str, Any] = {
    "hidden_size": 640,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}

HYBRID: dict[str, Any] = SHARED | {
    "model_type": "qwen3_5",
    "num_hidden_layers": 12,
    "full_attention_interval": 4,
    "intermediate_size": 1792,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
}
"""Qwen3.5 with 12 layers, 69 million parameters: three layers of gated delta rule, then one of full attention. The
states of 16 sequences take 30 MB, a ninth of the weights."""

LATENT: dict[str, Any] = SHARED | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 320,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "intermediate_size": 1792,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
"""DeepSeek-V3 with 8 layers, 75 million parameters: a dense layer, then experts, two of eight for a token."""


def make_weights(config: dict[str, Any], _num_fixed: int, seed: int) -> dict[str, Any]:
    """What mlx-lm's own layers begin with, and random routers, which would be zero."""
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    weights: Any = tree_flatten(module.Model(module.ModelArgs.from_dict(config)).parameters())
    return {
        name: np.array(mx.random.normal(array.shape) if name.endswith("mlp.gate.weight") else array)
        for name, array in weights
    }


def make_model(directory: Path, config: dict[str, Any], **overrides: Any) -> Path:
    """The model's directory, made if it is not there; `overrides` replace entries of its config."""
    return write_model(directory, config | overrides, make_weights)


def hybrid_model(cache: Path) -> Path:
    """Where it is, made if need be."""
    return make_model(cache / "models" / f"hybrid-{VERSION}", HYBRID)


def latent_model(cache: Path) -> Path:
    """Where it is, made if need be."""
    return make_model(cache / "models" / f"latent-{VERSION}", LATENT)
