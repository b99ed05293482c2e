"""Which weight of mlx-lm's model each tensor of a GGUF file is, by architecture.

The names of tensors are those of gguf-py's constants.py, and what a conversion changes comes from llama.cpp's
conversion scripts: rows of queries and keys in another order, scales of norms plus one, decays as -exp(A_log).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from mlxpaged.models.errors import UnsupportedModelError

BLOCK = re.compile(r"blk\.(\d+)\.(.+)")

GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
DENSE = NORMS | ATTENTION | MLP


def experts(prefix: str, router: str) -> dict[str, str]:
    """Names of stacked experts and of their router."""
    parts = {f"ffn_{part}_exps": f"{prefix}.{part}_proj" for part in ("gate", "up", "down")}
    return {"ffn_gate_inp": router, **parts}


def shared_experts(prefix: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"{prefix}.{part}_proj" for part in ("gate", "up", "down")}


MOE = DENSE | experts("mlp.switch_mlp", "mlp.gate")
GEMMA = DENSE | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
}
DEEPSEEK = (
    MOE | LATENT | shared_experts("mlp.shared_experts") | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
)
QWEN35 = (
    MOE
    | shared_experts("mlp.shared_expert")
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)
GPT_OSS = (
    NORMS
    | ATTENTION
    | experts("mlp.experts", "mlp.router")
    | {"post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks"}
)
GLM4 = DENSE | {
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
PHI3 = DENSE | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **ATTENTION,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
GEMMA4 = (
    GEMMA
    | experts("experts.switch_glu", "router.proj")
    | {
        "ffn_gate_up_exps": "experts.switch_glu.gate_up_proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
)
PER_LAYER = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


class Names(NamedTuple):
    """block: names of a layer's weights, after `model.layers.N.`. others: those outside the layers. prefix: of all.
    permuted: whether the rows of queries and keys are in llama.cpp's order. shift: what is added to the scales of
    norms in the file. Names with a suffix come first, and replace it."""

    block: Mapping[str, str]
    others: Mapping[str, str] = GLOBAL
    prefix: str = ""
    permuted: bool = False
    shift: float = 0.0


LLAMA = Names(DENSE, permuted=True)

NAMES: Mapping[str, Names] = {
    "deepseek_v2": Names(DEEPSEEK),
    "deepseek_v3": Names(DEEPSEEK),
    "gemma": Names(DENSE, shift=1.0),
    "gemma2": Names(GEMMA, shift=1.0),
    "gemma3_text": Names(GEMMA, shift=1.0),
    "gemma4_text": Names(GEMMA4, GLOBAL | PER_LAYER),
    "glm4": Names(GLM4),
    "gpt_oss": Names(GPT_OSS),
    "granite": LLAMA,
    "lfm2": Names(LFM2, GLOBAL | {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}),
    "llama": LLAMA,
    "ministral3": LLAMA,
    "mixtral": Names(DENSE | experts("block_sparse_moe.switch_mlp", "block_sparse_moe.gate"), permuted=True),
    "phi3": Names(PHI3),
    "qwen2": Names(DENSE),
    "qwen3": Names(DENSE),
    "qwen3_5": Names(QWEN35, prefix="language_model."),
    "qwen3_5_moe": Names(QWEN35, prefix="language_model."),
    "qwen3_moe": Names(MOE),
}
"""Tables by the model type of the config."""

UNUSED = re.compile(
    r"(rope_freqs|rope_factors_(long|short)|blk\.\d+\.attn_rot_embd)\.weight|(v|mm|a|mtp|model\.vision_tower)\..*"
)
"""Tensors that the config holds, and those of towers for images and sound, and of draft heads."""


def weight_name(names: Names, tensor: str, num_layers: int) -> str | None:
    """The name of a tensor's weight in mlx-lm's model. None if the model does not have it, such as the layers of draft
    heads. Raises UnsupportedModelError for one that this architecture does not have."""
    if UNUSED.fullmatch(tensor):
        return None
    found = BLOCK.fullmatch(tensor)
    if found is not None and int(found[1]) >= num_layers:
        return None
    table, place = (names.others, "") if found is None else (names.block, f"model.layers.{int(found[1])}.")
    part = tensor if found is None else found[2]
    base, _, suffix = part.rpartition(".")
    if part in table:
        return names.prefix + place + table[part]
    if base in table:
        return f"{names.prefix}{place}{table[base]}.{suffix}"
    raise UnsupportedModelError(f"it has the tensor {tensor}, which is not known in this architecture")
