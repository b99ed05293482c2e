"""Writes models of mlx-lm as GGUF files, with the changes that llama.cpp's conversion makes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.models.gguf_files import Stored, plain, tokenizer_metadata, write_gguf

Array = Any
Store = Callable[[str, Array], Stored]
"""Makes a tensor of values [.., rows, columns], given its name in the GGUF file."""

NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.embed_q": "attn_k_b",
    "self_attn.unembed_out": "attn_v_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
for _part in ("gate", "up", "down"):
    for _place in ("mlp.switch_mlp", "mlp.experts", "block_sparse_moe.switch_mlp", "experts.switch_glu"):
        NAMES[f"{_place}.{_part}_proj"] = f"ffn_{_part}_exps"
    for _place in ("mlp.shared_experts", "mlp.shared_expert"):
        NAMES[f"{_place}.{_part}_proj"] = f"ffn_{_part}_shexp"

POST_ATTENTION = ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_5", "qwen3_5_moe")
"""Models that call the norm after the attention, or before the MLP, by the name of the former."""
PERMUTED = ("llama", "mixtral", "ministral3", "granite")
SHIFTED = ("gemma", "gemma2", "gemma3_text")

ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_moe": "qwen3moe",
}
"""Names of architectures in GGUF, if they are others."""


def tensor_name(name: str, model_type: str) -> str:
    found = re.fullmatch(r"(?:language_model\.)?(?:model\.)?(?:layers\.(\d+)\.)?(.+)", name)
    assert found is not None
    place = "" if found[1] is None else f"blk.{found[1]}."
    if found[2] in NAMES:
        return place + NAMES[found[2]]
    base, _, suffix = found[2].rpartition(".")
    if base == "post_attention_layernorm" and model_type in POST_ATTENTION:
        return f"{place}post_attention_norm.{suffix}"
    return f"{place}{NAMES[base]}.{suffix}"


def exported(name: str, array: Array, model_type: str, config: Mapping[str, Any]) -> Array:
    """A weight as llama.cpp's conversion writes it."""
    if model_type in PERMUTED and re.search(r"self_attn\.[qk]_proj", name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = array.reshape(heads, 2, -1, *array.shape[1:])
        return np.ascontiguousarray(np.swapaxes(halves, 1, 2)).reshape(array.shape)
    if model_type in SHIFTED and name.endswith("norm.weight"):
        return array + 1
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        array = array[..., 0]
    if name.endswith("A_log"):
        array = -np.exp(array)
    if "linear_attn" in name and not name.endswith("linear_attn.norm.weight"):
        return in_turns(name, array, config)
    return array


def in_turns(name: str, array: Array, config: Mapping[str, Any]) -> Array:
    """Value heads of Qwen3.5: first one of each key head, then the next of each."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim, before = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]

    def turned(part: Array, axis: int = 0, size: int = 1) -> Array:
        part = np.moveaxis(part, axis, 0)
        grouped = part.reshape(keys, values // keys, size, *part.shape[1:])
        return np.moveaxis(np.swapaxes(grouped, 0, 1).reshape(part.shape), 0, axis)

    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([array[:before], turned(array[before:], size=dim)])
    if "out_proj" in name:
        return turned(array, axis=1, size=dim)
    return turned(array, size=dim if "in_proj_z" in name else 1)


def split_latents(name: str, array: Array, config: Mapping[str, Any]) -> dict[str, Array]:
    """The keys, with their dimensions exchanged, and the values of DeepSeek V2's projection of latents."""
    if "attn_kv_b" not in name:
        return {name: array}
    sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
    heads = array.reshape(config["num_attention_heads"], sum(sizes), -1)
    keys, values = heads[:, : sizes[0]], heads[:, sizes[0] :]
    parts = {"attn_k_b": np.swapaxes(keys, 1, 2), "attn_v_b": values}
    return {name.replace("attn_kv_b", own): np.ascontiguousarray(part) for own, part in parts.items()}


def metadata_of(config: Mapping[str, Any], model_type: str, weights: Mapping[str, Array]) -> dict[str, Any]:
    """The keys of a config, without the architecture before them."""
    layers = config["num_hidden_layers"]
    found: dict[str, Any] = {
        "block_count": layers,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config.get("norm_eps", config["rms_norm_eps"]),
        "context_length": config["max_position_embeddings"],
        "rope.freq_base": config.get("rope_parameters", config).get("rope_theta", config["rope_theta"]),
        "rope.dimension_count": int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)),
    }
    same = {
        "num_experts": "expert_count",
        "num_local_experts": "expert_count",
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "top_k_experts": "expert_used_count",
        "n_shared_experts": "expert_shared_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "kv_lora_rank": "attention.kv_lora_rank",
        "q_lora_rank": "attention.q_lora_rank",
        "sliding_window": "attention.sliding_window",
        "logits_scaling": "logit_scale",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "conv_L_cache": "shortconv.l_cache",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_key_head_dim": "ssm.state_size",
        "full_attention_interval": "full_attention_interval",
    }
    found |= {key: config[name] for name, key in same.items() if config.get(name) is not None}
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("type") == "yarn":
        found["rope.scaling.type"] = "yarn"
        found["rope.scaling.factor"] = scaling["factor"]
    if "original_max_position_embeddings" in scaling:
        found["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if model_type == "gemma3_text":
        found["attention.sliding_window_pattern"] = config["sliding_window_pattern"]
    if model_type == "gpt_oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if model_type == "phi3" and "original_max_position_embeddings" in config:
        before = config["original_max_position_embeddings"]
        longer = config["max_position_embeddings"] / before
        found["rope.scaling.original_context_length"] = before
        found["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(longer) / np.log(before)))
    if model_type == "ministral3":
        found["rope.scaling.yarn_log_multiplier"] = float(scaling.get("mscale_all_dim", 0.0))
        found["attention.temperature_scale"] = scaling["llama_4_scaling_beta"]
    if model_type == "lfm2":
        heads = config["num_key_value_heads"]
        found["attention.head_count_kv"] = [heads * (kind == "full_attention") for kind in config["layer_types"]]
        found["feed_forward_length"] = len(weights["model.layers.0.feed_forward.w1.weight"])
    if "linear_value_head_dim" in config:
        found["rope.dimension_sections"] = [2, 1, 1, 0]
        found["ssm.inner_size"] = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    if "kv_lora_rank" in config:
        rope = config["qk_rope_head_dim"]
        found |= {
            "attention.head_count_kv": 1,
            "attention.key_length": config["kv_lora_rank"] + rope,
            "attention.value_length": config["kv_lora_rank"],
            "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": rope,
            "expert_gating_func": 2 if model_type == "deepseek_v3" else 1,
            "rope.scaling.yarn_log_multiplier": 0.1 * scaling.get("mscale_all_dim", 0.0),
        }
    if model_type == "gemma4_text":
        sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        everywhere = config["num_key_value_heads"]
        in_full = config.get("num_global_key_value_heads") or everywhere
        shared = config["num_kv_shared_layers"]
        found |= {
            "attention.key_length": config["global_head_dim"],
            "attention.key_length_swa": config["head_dim"],
            "attention.value_length_swa": config["head_dim"],
            "attention.value_length": config["global_head_dim"],
            "rope.dimension_count": config["global_head_dim"],
            "rope.dimension_count_swa": config["head_dim"],
            "attention.sliding_window_pattern": sliding,
            "attention.head_count_kv": [everywhere if each else in_full for each in sliding],
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "feed_forward_length": [
                config["intermediate_size"] * (1 + (shared > 0 and i >= layers - shared)) for i in range(layers)
            ],
            "rope.freq_base": config["rope_parameters"]["full_attention"]["rope_theta"],
            "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        }
    return found


def factors(config: Mapping[str, Any], model_type: str) -> dict[str, list[float]]:
    """Tensors that hold rotary settings."""
    scaling = config.get("rope_scaling") or {}
    if model_type == "gemma4_text":
        half = config["global_head_dim"] // 2
        rotated = int(config["rope_parameters"]["full_attention"].get("partial_rotary_factor", 1.0) * half)
        return {"rope_freqs": [1.0] * rotated + [1e30] * (half - rotated)}
    if scaling.get("type") == "longrope":
        return {f"rope_factors_{name}": scaling[f"{name}_factor"] for name in ("long", "short")}
    if scaling.get("rope_type") == "llama3":
        wavelengths = [
            2 * np.pi * config["rope_theta"] ** (i / config["head_dim"]) for i in range(0, config["head_dim"], 2)
        ]
        low, high, factor, context = 1.0, 4.0, scaling["factor"], 8192
        found = []
        for length in wavelengths:
            if length < context / high:
                found.append(1.0)
            elif length > context / low:
                found.append(factor)
            else:
                smooth = (context / length - low) / (high - low)
                found.append(1 / ((1 - smooth) / factor + smooth))
        return {"rope_freqs": found}
    return {}


def as_gguf(
    directory: Path,
    path: Path,
    store: Store = lambda name, array: plain(array),
    change: Callable[[dict[str, Any], dict[str, Stored]], None] = lambda metadata, tensors: None,
) -> Path:
    """Write the model of a directory as a GGUF file. change: of metadata and tensors, before they are written."""
    config = json.loads((directory / "config.json").read_text())
    config = config | config.get("text_config", {}) | {"model_type": config["model_type"]}
    model_type = config["model_type"]
    stored: Any = mx.load(str(directory / "model.safetensors"))
    weights = {name: np.array(array.astype(mx.float32)) for name, array in stored.items()}
    architecture = ARCHITECTURES.get(model_type, model_type)
    metadata = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in metadata_of(config, model_type, weights).items()}
    metadata |= tokenizer_metadata(json.loads((directory / "tokenizer.json").read_text()))
    metadata["tokenizer.ggml.eos_token_id"] = 2
    tensors = {f"{name}.weight": plain(found) for name, found in factors(config, model_type).items()}
    for name, array in weights.items():
        own = tensor_name(name, model_type)
        given = np.ascontiguousarray(exported(name, array, model_type, config))
        for each, part in split_latents(own, given, config).items():
            tensors[each] = store(each, part)
    change(metadata, tensors)
    return write_gguf(path, metadata, tensors)
