"""The demo model's shape, its loading and saving, and the forward pass that training uses.

The model is mlx-lm's Qwen3, unmodified.  Training calls its submodules in :func:`hidden_states`, which
computes the same function faster on a CPU: attention in blocks of queries that leave out most of the masked
half, and a SwiGLU whose gradient takes fewer passes over memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import Model, ModelArgs

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 768,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
GENERATION_CONFIG: dict[str, Any] = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 0}

_QUERY_BLOCK = 64


def new_model() -> Model:
    """A model of the demo's shape with mlx-lm's initial weights (from MLX's global random state)."""
    known = {name: value for name, value in CONFIG.items() if name in ModelArgs.__dataclass_fields__}
    return Model(ModelArgs(**known))


def flat_parameters(model: Model) -> dict[str, mx.array]:
    """The weights by their dotted names."""
    return dict(tree_flatten(model.parameters()))


def parameter_count(model: Model) -> int:
    """How many numbers are trained."""
    return sum(value.size for value in flat_parameters(model).values())


def save_model(model: Model, out: Path) -> None:
    """Write the weights, config.json and generation_config.json."""
    mx.save_safetensors(str(out / "model.safetensors"), flat_parameters(model), metadata={"format": "mlx"})
    for name, content in (("config.json", CONFIG), ("generation_config.json", GENERATION_CONFIG)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@mx.custom_function
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


@_swiglu.vjp
def _swiglu_vjp(primals: tuple[mx.array, mx.array], cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    gate, up = primals
    sigmoid = mx.sigmoid(gate)
    swish = gate * sigmoid
    return cotangent * up * (sigmoid + swish * (1 - sigmoid)), cotangent * swish


def _attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    blocks = []
    for start in range(0, q.shape[2], _QUERY_BLOCK):
        end = start + _QUERY_BLOCK
        blocks.append(
            mx.fast.scaled_dot_product_attention(
                q[:, :, start:end], k[:, :, :end], v[:, :, :end], scale=scale, mask="causal"
            )
        )
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def hidden_states(model: Model, tokens: mx.array) -> mx.array:
    """The last layer's normalised output for rows of tokens, equal to ``model.model(tokens)``."""
    batch, length = tokens.shape
    x: mx.array = model.model.embed_tokens(tokens)
    for layer in model.layers:
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        q = attention.q_norm(attention.q_proj(normed).reshape(batch, length, attention.n_heads, -1))
        k = attention.k_norm(attention.k_proj(normed).reshape(batch, length, attention.n_kv_heads, -1))
        v = attention.v_proj(normed).reshape(batch, length, attention.n_kv_heads, -1).swapaxes(1, 2)
        q = attention.rope(q.swapaxes(1, 2))
        k = attention.rope(k.swapaxes(1, 2))
        mixed = _attention(q, k, v, attention.scale).swapaxes(1, 2).reshape(batch, length, -1)
        x = x + attention.o_proj(mixed)
        normed = layer.post_attention_layernorm(x)
        x = x + layer.mlp.down_proj(_swiglu(layer.mlp.gate_proj(normed), layer.mlp.up_proj(normed)))
    output: mx.array = model.model.norm(x)
    return output
