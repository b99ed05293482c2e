"""Makes the config.json of a GGUF file: the fields that mlx-lm's models need, of the file's metadata.

The keys are those of gguf-py's constants.py; llama.cpp's conversion scripts say which field each one holds, and
llama-model.cpp what is assumed if one is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.sources.gguf.file import GgufFile
from mlxpaged.models.sources.weight_headers import MAX_LAYERS

SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT_ROPE_BASE = 10_000.0
SIGMOID = 2
"""The number of a router's function: 1 is softmax (llama-hparams.h, llama_expert_gating_func_type)."""
MAX_FACTORS = 1024
"""Rotary frequencies of a head, and so factors on them."""


class Metadata:
    """Values of an architecture's keys. All methods raise UnsupportedModelError for a value of another type."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture: Any = file.metadata.get("general.architecture")

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def wrong(self, key: str) -> UnsupportedModelError:
        found = self.get(key)
        what = "is missing" if found is None else f"is {found!r:.60}"
        return UnsupportedModelError(f"its key {self.architecture}.{key} {what}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A number, or the largest of an array that has one for each layer."""
        found = self.get(key)
        if isinstance(found, np.ndarray) and found.size and found.dtype.kind in "iu":
            return int(found.max())
        found = default if found is None else found
        if type(found) is not int:
            raise self.wrong(key)
        return found

    def integers(self, key: str, count: int) -> list[int]:
        """One for each layer."""
        found = self.get(key)
        if not isinstance(found, np.ndarray):
            return [self.integer(key)] * count
        if found.size < count or found.dtype.kind not in "iub":
            raise self.wrong(key)
        return [int(each) for each in found[:count]]

    def number(self, key: str, default: float | None = None) -> float:
        found: Any = self.get(key)
        found = default if found is None else found
        if type(found) not in (int, float) or not math.isfinite(found):
            raise self.wrong(key)
        return float(found)

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def rows(self, tensor: str) -> int:
        if not self.has(tensor):
            raise UnsupportedModelError(f"it has no tensor {tensor}")
        return self.file.tensors[tensor].shape[0]

    def factors(self, tensor: str) -> list[float]:
        """The numbers of a small tensor of float32."""
        found = self.file.tensors[tensor]
        if found.type.name != "F32" or len(found.shape) != 1 or found.shape[0] > MAX_FACTORS:
            raise UnsupportedModelError(
                f"its tensor {tensor} has the shape {found.shape} and the type {found.type.name}"
            )
        rows = found.read(0, 1).view("<f4")[0]
        return [float(each) for each in rows]

    @property
    def num_layers(self) -> int:
        """Layers without those of draft heads."""
        return self.integer("block_count") - self.integer("nextn_predict_layers", 0)

    @property
    def head_dim(self) -> int:
        heads = max(1, self.integer("attention.head_count"))
        return self.integer("attention.key_length", self.integer("embedding_length") // heads)


def common(of: Metadata) -> dict[str, Any]:
    """Fields that most architectures have."""
    heads = of.integer("attention.head_count")
    config: dict[str, Any] = {
        "hidden_size": of.integer("embedding_length"),
        "num_hidden_layers": of.num_layers,
        "intermediate_size": of.integer("feed_forward_length", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": of.integer("attention.head_count_kv", heads),
        "head_dim": of.head_dim,
        "rms_norm_eps": of.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": of.rows("token_embd.weight"),
        "max_position_embeddings": of.integer("context_length"),
        "rope_theta": of.number("rope.freq_base", DEFAULT_ROPE_BASE),
        "tie_word_embeddings": not of.has("output.weight"),
    }
    if (scaling := rope_scaling(of)) is not None:
        config["rope_scaling"] = scaling
    return config


def rope_scaling(of: Metadata) -> dict[str, Any] | None:
    """Files of 2023 have another name for the factor, and none for the kind, which is linear then (llama-model.cpp,
    rope_scaling). Raises UnsupportedModelError for a kind that is not known."""
    factor = of.number("rope.scaling.factor", of.number("rope.scale_linear", 0.0))
    kind = of.get("rope.scaling.type") or ("linear" if factor else None)
    check_magnitude(of, kind)
    if of.has("rope_freqs.weight") and of.architecture != "gemma4":  # which has other factors there
        return llama3_scaling(of)
    if kind in (None, "none", "longrope"):  # the factors of longrope are tensors
        return None
    if kind not in ("linear", "yarn"):
        raise of.wrong("rope.scaling.type")
    if not factor:
        raise of.wrong("rope.scaling.factor")
    scaling: dict[str, Any] = {"type": kind, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = of.integer("rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            if of.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = of.number(f"rope.scaling.yarn_{name}")
    return scaling


LONG = "rope_factors_long.weight"
OWN_MULTIPLIER = ("deepseek2", "mistral3")
"""Architectures whose models take YaRN's logarithmic multiplier."""


def check_magnitude(of: Metadata, kind: Any) -> None:
    """Raises UnsupportedModelError for what changes the length of rotated vectors (llama-context.cpp, yarn_attn_factor)
    and is not in the rotations of mlx-lm, and for YaRN without its own frequencies."""
    is_long = of.architecture == "phi3" and of.has(LONG)  # `phi3` checks its factor
    if kind == "longrope" and not is_long:
        raise of.wrong("rope.scaling.type")
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if not is_long and of.number(key, 1.0) != 1.0:
            raise of.wrong(key)
    own_frequencies = of.number("rope.scaling.yarn_ext_factor", -1.0)  # below 0: as the kind says
    if own_frequencies >= 0 and own_frequencies != (1.0 if kind == "yarn" else 0.0):
        raise of.wrong("rope.scaling.yarn_ext_factor")
    if of.architecture not in OWN_MULTIPLIER and of.number("rope.scaling.yarn_log_multiplier", 0.0):
        raise of.wrong("rope.scaling.yarn_log_multiplier")


def llama3_scaling(of: Metadata) -> dict[str, Any]:
    """The settings of Llama 3's scaling, of which the file holds only the factors on the frequencies. Raises
    UnsupportedModelError if no such settings give these factors."""
    found = of.factors("rope_freqs.weight")
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": max(found),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    base = of.number("rope.freq_base", DEFAULT_ROPE_BASE)
    expected = llama3_factors(base, 2 * len(found), scaling)
    if not np.allclose(found, expected, rtol=1e-3):
        raise UnsupportedModelError("its rotary factors (rope_freqs.weight) are not those of Llama 3")
    return scaling


def llama3_factors(base: float, dims: int, scaling: Mapping[str, Any]) -> list[float]:
    """Divisors of the frequencies (Llama 3.1's scaling, as llama.cpp's conversion computes it)."""
    factor, low, high = (scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    context = scaling["original_max_position_embeddings"]
    factors = []
    for i in range(0, dims, 2):
        wavelength = 2 * math.pi * base ** (i / dims)
        smooth = (context / wavelength - low) / (high - low)
        factors.append(1 / ((1 - min(1.0, max(0.0, smooth))) / factor + min(1.0, max(0.0, smooth))))
    return factors


def llama(of: Metadata) -> dict[str, Any]:
    biases = {"attention_bias": of.has("blk.0.attn_q.bias"), "mlp_bias": of.has("blk.0.ffn_gate.bias")}
    if of.integer("expert_count", 0):
        return {"model_type": "mixtral", "num_local_experts": of.integer("expert_count"), **used_experts(of)}
    return {"model_type": "llama", **biases}


def used_experts(of: Metadata) -> dict[str, Any]:
    return {"num_experts_per_tok": of.integer("expert_used_count")}


def mistral3(of: Metadata) -> dict[str, Any]:
    """Ministral 3 scales queries by their position. Others of this kind are Llamas."""
    if of.get("attention.temperature_scale") is None:
        return llama(of)
    multiplier = of.number("rope.scaling.yarn_log_multiplier", 0.0)
    parameters = {"rope_type": "default", "type": "default", **(rope_scaling(of) or {})}
    parameters |= {
        "rope_theta": of.number("rope.freq_base", DEFAULT_ROPE_BASE),
        "original_max_position_embeddings": of.integer("rope.scaling.original_context_length"),
        "llama_4_scaling_beta": of.number("attention.temperature_scale"),
        "mscale": multiplier,
        "mscale_all_dim": multiplier,
    }
    return {"model_type": "ministral3", "rope_parameters": parameters}


def qwen2(of: Metadata) -> dict[str, Any]:
    """A text has the same three positions at each token, so models that see images rotate it as the others do."""
    return {"model_type": "qwen2"}


def qwen3(of: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen3"}


def qwen3_moe(of: Metadata) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "num_experts": of.integer("expert_count"),
        **used_experts(of),
        "moe_intermediate_size": of.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def qwen3_5(of: Metadata) -> dict[str, Any]:
    heads = of.integer("ssm.time_step_rank")
    config: dict[str, Any] = {
        "model_type": "qwen3_5",
        "linear_num_value_heads": heads,
        "linear_num_key_heads": of.integer("ssm.group_count"),
        "linear_key_head_dim": of.integer("ssm.state_size"),
        "linear_value_head_dim": of.integer("ssm.inner_size") // max(1, heads),
        "linear_conv_kernel_dim": of.integer("ssm.conv_kernel"),
        "full_attention_interval": of.integer("full_attention_interval", 4),
        "rope_parameters": {
            "type": "default",
            "rope_theta": of.number("rope.freq_base"),
            "partial_rotary_factor": partial_rotary(of),
        },
    }
    if of.architecture == "qwen35moe":
        config |= qwen3_moe(of) | {
            "model_type": "qwen3_5_moe",
            "shared_expert_intermediate_size": of.integer("expert_shared_feed_forward_length"),
        }
    return config


def gemma2(of: Metadata) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "attn_logit_softcapping": of.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": of.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": query_scalar(of, 46),
    }


def query_scalar(of: Metadata, layers_of_largest: int) -> int:
    """The head size, but for the model of 27 billion parameters, which has the hidden size of a head (llama-model.cpp,
    f_attention_scale)."""
    if of.num_layers == layers_of_largest:
        return of.integer("embedding_length") // max(1, of.integer("attention.head_count"))
    return of.head_dim


def gemma3(of: Metadata) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "rope_theta": of.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": of.number("rope.freq_base_swa", DEFAULT_ROPE_BASE),
        "query_pre_attn_scalar": query_scalar(of, 62),
        "sliding_window": of.integer("attention.sliding_window"),
        "sliding_window_pattern": window_pattern(of),
    }


def window_pattern(of: Metadata) -> int:
    """The number of layers of which the last one has no window. Files of Ollama say of each layer whether it has one.
    Raises UnsupportedModelError if these do not repeat."""
    key = "attention.sliding_window_pattern"
    if not isinstance(of.get(key), np.ndarray):
        return of.integer(key, 6)
    sliding = of.integers(key, of.num_layers)
    pattern = [*sliding, 0].index(0) + 1
    if sliding != [int((i + 1) % pattern > 0) for i in range(len(sliding))]:
        raise of.wrong(key)
    return pattern


def gemma4(of: Metadata) -> dict[str, Any]:
    count = of.num_layers
    sliding = of.integers("attention.sliding_window_pattern", count)
    kv_heads = of.integers("attention.head_count_kv", count)
    lengths = of.integers("feed_forward_length", count)
    shared = of.integer("attention.shared_kv_layers", 0)
    full = [i for i in range(count) if not sliding[i]]
    rotary = of.factors("rope_freqs.weight") if of.has("rope_freqs.weight") else [1.0]
    config: dict[str, Any] = {
        "model_type": "gemma4_text",
        "head_dim": of.integer("attention.key_length_swa"),
        "global_head_dim": of.integer("attention.key_length"),
        "intermediate_size": lengths[0] if lengths else 0,
        "use_double_wide_mlp": bool(lengths) and lengths[-1] == 2 * lengths[0],
        "layer_types": [SLIDING if each else FULL for each in sliding],
        "sliding_window": of.integer("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "num_key_value_heads": next((kv_heads[i] for i in range(count) if sliding[i]), 1),
        "num_global_key_value_heads": kv_heads[full[0]] if full else None,
        "attention_k_eq_v": bool(full) and not of.has(f"blk.{full[0]}.attn_v.weight"),
        "hidden_size_per_layer_input": of.integer("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": of.number("final_logit_softcapping", 30.0),
        "rope_scaling": None,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": of.number("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": rotary.count(1.0) / len(rotary),
            },
            SLIDING: {"rope_type": "default", "rope_theta": of.number("rope.freq_base_swa", DEFAULT_ROPE_BASE)},
        },
    }
    if of.has("per_layer_token_embd.weight"):
        config["vocab_size_per_layer_input"] = of.rows("per_layer_token_embd.weight")
    if of.integer("expert_count", 0):
        config |= {
            "enable_moe_block": True,
            "num_experts": of.integer("expert_count"),
            "top_k_experts": of.integer("expert_used_count"),
            "moe_intermediate_size": of.integer("expert_feed_forward_length"),
        }
    return config


def phi3(of: Metadata) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": "phi3", "partial_rotary_factor": partial_rotary(of)}
    if of.has(LONG) and of.has("rope_factors_short.weight"):
        config["original_max_position_embeddings"] = of.integer("rope.scaling.original_context_length")
        config["rope_scaling"] = {
            "type": "longrope",
            "long_factor": of.factors(LONG),
            "short_factor": of.factors("rope_factors_short.weight"),
        }
        before, longer = config["original_max_position_embeddings"], of.integer("context_length")
        expected = math.sqrt(1 + math.log(longer / before) / math.log(before)) if longer > before > 1 else 1.0
        if not math.isclose(of.number("rope.scaling.attn_factor", expected), expected, rel_tol=1e-3):
            raise of.wrong("rope.scaling.attn_factor")
    return config


def partial_rotary(of: Metadata) -> float:
    """The share of a head's dimensions that is rotated."""
    return of.integer("rope.dimension_count", of.head_dim) / max(1, of.head_dim)


def granite(of: Metadata) -> dict[str, Any]:
    return {
        **llama(of),
        "model_type": "granite",
        "logits_scaling": of.number("logit_scale"),
        "attention_multiplier": of.number("attention.scale"),
        "embedding_multiplier": of.number("embedding_scale"),
        "residual_multiplier": of.number("residual_scale"),
    }


def lfm2(of: Metadata) -> dict[str, Any]:
    kv_heads = of.integers("attention.head_count_kv", of.num_layers)
    conv = next((i for i, heads in enumerate(kv_heads) if not heads), 0)
    return {
        "model_type": "lfm2",
        "norm_eps": of.number("attention.layer_norm_rms_epsilon"),
        "conv_bias": of.has(f"blk.{conv}.shortconv.conv.bias"),
        "conv_L_cache": of.integer("shortconv.l_cache"),
        "block_dim": of.integer("embedding_length"),
        "block_ff_dim": of.integer("feed_forward_length"),
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": [FULL if heads else "conv" for heads in kv_heads],
    }


def gpt_oss(of: Metadata) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "num_local_experts": of.integer("expert_count"),
        **used_experts(of),
        "intermediate_size": of.integer("expert_feed_forward_length"),
        "sliding_window": of.integer("attention.sliding_window"),
        "layer_types": [(SLIDING, FULL)[i % 2] for i in range(of.num_layers)],
    }


def glm4(of: Metadata) -> dict[str, Any]:
    return {
        "model_type": "glm4",
        "attention_bias": of.has("blk.0.attn_q.bias"),
        "partial_rotary_factor": partial_rotary(of),
    }


def deepseek(of: Metadata) -> dict[str, Any]:
    rope = of.integer("rope.dimension_count")
    config: dict[str, Any] = {
        "num_key_value_heads": of.integer("attention.head_count"),
        "kv_lora_rank": of.integer("attention.kv_lora_rank"),
        "q_lora_rank": of.integer("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": of.integer("attention.key_length_mla", of.head_dim) - rope,
        "v_head_dim": of.integer("attention.value_length_mla", of.integer("attention.value_length")),
        "n_routed_experts": of.integer("expert_count"),
        **used_experts(of),
        "n_shared_experts": of.integer("expert_shared_count", 0) or None,
        "moe_intermediate_size": of.integer("expert_feed_forward_length"),
        "first_k_dense_replace": of.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": of.number("expert_weights_scale", 1.0) or 1.0,
        "n_group": of.integer("expert_group_count", 1),
        "topk_group": of.integer("expert_group_used_count", 1),
        "moe_layer_freq": 1,
        "attention_bias": False,
    }
    if of.integer("expert_gating_func", 1) == SIGMOID:
        config |= {"model_type": "deepseek_v3", "norm_topk_prob": bool(of.get("expert_weights_norm"))}
    else:
        groups = config["n_group"] > 1
        config |= {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if groups else "greedy"}
    if (scaling := rope_scaling(of)) is not None:
        # The file has a tenth of it (TAG_DEEPSEEK2_YARN_LOG_MUL_FIX in llama.cpp's conversion).
        multiplier = 10 * of.number("rope.scaling.yarn_log_multiplier", 0.0)
        config["rope_scaling"] = scaling | {"mscale": multiplier, "mscale_all_dim": multiplier}
    return config


ARCHITECTURES: Mapping[str, Callable[[Metadata], dict[str, Any]]] = {
    "deepseek2": deepseek,
    "gemma": lambda of: {"model_type": "gemma"},
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "glm4": glm4,
    "gpt-oss": gpt_oss,
    "granite": granite,
    "lfm2": lfm2,
    "llama": llama,
    "mistral3": mistral3,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2vl": qwen2,
    "qwen3": qwen3,
    "qwen35": qwen3_5,
    "qwen35moe": qwen3_5,
    "qwen3moe": qwen3_moe,
    "qwen3vl": qwen3,
    "qwen3vlmoe": qwen3_moe,
}
"""What each architecture (general.architecture) adds to `common`."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """The config.json of a file. Raises UnsupportedModelError if its architecture is not supported, or a key is missing
    or has another type."""
    of = Metadata(file)
    if not isinstance(of.architecture, str) or of.architecture not in ARCHITECTURES:
        found = f"its architecture is {of.architecture!r:.60}"
        if isinstance(of.architecture, str) and "bert" in of.architecture:
            raise UnsupportedModelError(
                f"{found}, of an encoder: serve its repository with safetensors instead, for example "
                "BAAI/bge-small-en-v1.5"
            )
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(
            f"{found}; in GGUF files, these are supported: {known}. Others may be supported as safetensors"
        )
    if not 1 <= of.num_layers <= min(MAX_LAYERS, len(file.tensors)):
        raise of.wrong("block_count")
    return common(of) | ARCHITECTURES[of.architecture](of)
