"""Every architecture of mlx-lm as a tiny random model, and whether it is served.

Each configuration has every kind of layer of its architecture at least once. Windows, chunks and top-k selections are
so short that the prompts of the tests pass them. Those in `REFUSED` are not served: a test fails if one of them is
served after all, or one of the others is refused.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.support import SMALL, make_tiny_model

VOCAB_SIZE = 256

SLIDING, FULL = "sliding_attention", "full_attention"

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The scaling of Llama 3.1's rotary positions."""
WINDOW = 12


@dataclass(frozen=True)
class Architecture:
    """A tiny model of one module of `mlx_lm.models`.

    config: what differs from `tests.support.SMALL`. cannot_run: why mlx-lm alone cannot run it here, None if it can.
    embedding: factor on its embeddings, small if they are tied to the head or multiplied, or else every answer repeats
    one token. weights: a change of the random weights, given by name.
    """

    config: dict[str, Any] = field(default_factory=dict)
    cannot_run: str | None = None
    seed: int = 0
    embedding: float = 1.0
    weights: Callable[[dict[str, mx.array]], dict[str, mx.array]] | None = None


EMBEDDING = re.compile(r"(embed\w*|wte)\.weight$")

DECAYS = ("A_log", "recurrent_param", "w_lora.lora.2.bias")
"""Weights of recurrent layers that decide how fast a state decays: the less, the longer it remembers."""


def random_weights(weights: dict[str, mx.array], embedding: float) -> dict[str, mx.array]:
    """Weights that make greedy choices clear-cut, and that leave no part of a model without effect.

    Matrices three times as large as by default, constant ones (routers, some convolutions) random, and noise on
    vectors: scales of norms, biases, sinks. embedding: an additional factor on embeddings.
    """
    changed = {}
    for name, array in weights.items():
        if not mx.issubdtype(array.dtype, mx.floating):
            changed[name] = array
        elif name.endswith(DECAYS):
            changed[name] = array - 3
        elif array.ndim < 2:
            changed[name] = array + 0.1 * mx.random.normal(array.shape).astype(array.dtype)
        elif float(mx.abs(array - array.reshape(-1)[0]).max()) == 0.0:
            changed[name] = array + 1.7 * mx.random.normal(array.shape).astype(array.dtype) / array[0].size ** 0.5
        elif EMBEDDING.search(name):
            changed[name] = array * 3 * embedding
        else:
            changed[name] = array * 3
    return changed


def is_installed(name: str) -> bool:
    """Whether this version of mlx-lm has the architecture."""
    return importlib.util.find_spec(f"mlx_lm.models.{name}") is not None


def make_architecture(directory: Path, name: str, **changes: Any) -> Path:
    """A model directory of the architecture, with random float32 weights and the demo model's tokenizer.

    changes: of its configuration."""
    architecture = ARCHITECTURES[name]

    def weights(default: dict[str, mx.array]) -> dict[str, mx.array]:
        changed = random_weights(default, architecture.embedding)
        return changed if architecture.weights is None else architecture.weights(changed)

    config = {"vocab_size": VOCAB_SIZE} | architecture.config | changes
    return make_tiny_model(directory, config.pop("model_type", name), architecture.seed, weights, **config)


def nested(**config: Any) -> dict[str, Any]:
    """The text part of a multimodal configuration."""
    return {"text_config": {"vocab_size": VOCAB_SIZE} | SMALL | config}


def experts(num: str, per_token: str, size: str | None = "moe_intermediate_size") -> dict[str, Any]:
    """Four experts, two of them per token, under the names that the architecture has for this."""
    return {num: 4, per_token: 2} | ({} if size is None else {size: 32})


def linear_attention(heads: int = 2) -> dict[str, Any]:
    """Gated delta nets as Qwen has them."""
    return {
        "linear_num_value_heads": 2 * heads,
        "linear_num_key_heads": heads,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }


NORMAL_EXPERTS = experts("num_experts", "num_experts_per_tok")
ROUTED_EXPERTS = experts("n_routed_experts", "num_experts_per_tok")

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

DEEPSEEK = (
    LATENT
    | ROUTED_EXPERTS
    | {
        "num_hidden_layers": 3,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "n_group": 2,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "attention_bias": False,
        "rope_scaling": YARN,
    }
)
DEEPSEEK_V3 = DEEPSEEK | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}

INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 16}

LONGCAT = LATENT | {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 2,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}

BAILING = NORMAL_EXPERTS | {
    "num_hidden_layers": 4,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

GRANITE = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.5,
    "attention_bias": False,
    "mlp_bias": False,
}

GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        SLIDING: {"rope_theta": 10000.0},
    },
    "tie_word_embeddings": True,
}

GEMMA3 = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 16,
}

LFM2 = {
    "num_hidden_layers": 4,
    "norm_eps": 1e-5,
    "conv_bias": True,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "layer_types": ["conv", FULL, "conv", FULL],
}

LLAMA4 = {
    "num_hidden_layers": 4,
    "attention_bias": False,
    "attention_chunk_size": WINDOW,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "rope_scaling": None,
    "use_qk_norm": True,
}

QWEN3_5 = linear_attention() | {"num_hidden_layers": 4, "full_attention_interval": 2, "partial_rotary_factor": 0.5}

QWEN3_MOE = NORMAL_EXPERTS | {
    "num_hidden_layers": 3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}

HUNYUAN = {
    "attention_bias": False,
    "use_qk_norm": True,
    "rope_scaling": {
        "alpha": 1000.0,
        "factor": 1.0,
        "type": "dynamic",
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "original_max_position_embeddings": 8192,
    },
}

GPT2 = {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "layer_norm_epsilon": 1e-5}

MIXED_ROPE = {FULL: {"rope_theta": 10000.0, "rope_type": "default"}, SLIDING: {"rope_theta": 1000.0}}


def hadamard_config() -> dict[str, Any]:
    """A Hadamard pack: a few projections are 2-bit, with rotated inputs."""
    paths = {"model.layers.0.mlp.down_proj": 512, "model.layers.1.self_attn.q_proj": 0}
    text = {"vocab_size": VOCAB_SIZE} | SMALL | QWEN3_5 | {"hidden_size": 128, "intermediate_size": 512}
    return {
        "text_config": text,
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "gdn_activation_layout": "grouped",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": path, "block": block, "embedding": False, "dtype": "float16"} for path, block in paths.items()
        ],
    }


def hadamard_weights(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Random 2-bit values around zero, and signs of -1 or 1."""
    changed = dict(weights)
    for name, array in weights.items():
        if array.dtype == mx.uint32:
            changed[name] = mx.random.randint(0, 1 << 31, array.shape).astype(mx.uint32)
            changed[name.replace(".weight", ".scales")] = mx.full(
                weights[name.replace(".weight", ".scales")].shape, 0.1, mx.float16
            )
            changed[name.replace(".weight", ".biases")] = mx.full(
                weights[name.replace(".weight", ".biases")].shape, -0.15, mx.float16
            )
        elif name.endswith(".signs"):
            changed[name] = 2.0 * mx.random.bernoulli(0.5, array.shape).astype(mx.float32) - 1.0
    return changed


ARCHITECTURES: dict[str, Architecture] = {
    "Klear": Architecture(
        NORMAL_EXPERTS
        | {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        }
    ),
    "afm7": Architecture(
        {
            "hidden_dim": 64,
            "num_layers": 4,
            "num_kv_reuse_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        }
    ),
    "afmoe": Architecture(
        NORMAL_EXPERTS
        | {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": WINDOW}
    ),
    "apertus": Architecture({"mlp_bias": True, "attention_bias": False, "post_norm": True, "qk_norm": True}),
    "baichuan_m1": Architecture(
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_layers": [0, 2], "conv_window": 2}
    ),
    "bailing_hybrid": Architecture(
        LATENT | BAILING | {"layer_group_size": 2, "group_norm_size": 2, "routed_scaling_factor": 1.5}
    ),
    "bailing_moe": Architecture(BAILING),
    "bailing_moe_linear": Architecture(BAILING | {"layer_group_size": 2, "group_norm_size": 2, "use_qk_norm": True}),
    "bailing_moe_v3": Architecture(
        LATENT | BAILING | {"moe_shared_expert_intermediate_size": 32, "layer_group_size": 2}
    ),
    "bitnet": Architecture(cannot_run="its linear layers are a Metal kernel"),
    "cohere": Architecture({"layer_norm_eps": 1e-5, "logit_scale": 1.0, "use_qk_norm": True}, embedding=0.1),
    "cohere2": Architecture(
        {"layer_norm_eps": 1e-5, "logit_scale": 0.5, "sliding_window": WINDOW, "sliding_window_pattern": 2}
    ),
    "dbrx": Architecture(
        {
            "d_model": 64,
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000},
            "n_layers": 2,
            "n_heads": 4,
        }
    ),
    "deepseek": Architecture(ROUTED_EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1}),
    "deepseek_v2": Architecture(DEEPSEEK | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": Architecture(DEEPSEEK_V3),
    "deepseek_v32": Architecture(DEEPSEEK_V3 | INDEXER),
    "deepseek_v41": Architecture(
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "o_groups": 2,
            "o_lora_rank": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-6,
            "sliding_window": WINDOW,
            "compress_ratios": [0, 4, 4, 4],
            "kv_source_layer_ids": [1, 3],
            "index_source_layer_ids": [1, 3],
            "candidate_source_layer_id": 1,
            "candidate_topk_blocks": 4,
            "candidate_block_size": 2,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_topk": 4,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
        }
    ),
    "dots1": Architecture(
        ROUTED_EXPERTS
        | {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
        }
    ),
    "ernie4_5": Architecture({"use_bias": True}),
    "ernie4_5_moe": Architecture(
        {
            "num_hidden_layers": 3,
            "use_bias": False,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        }
    ),
    "exaone": Architecture({"num_layers": 2, "layer_norm_epsilon": 1e-5}),
    "exaone4": Architecture(
        {
            "num_hidden_layers": 4,
            "rope_scaling": None,
            "sliding_window": WINDOW,
            "sliding_window_pattern": "LLGL",
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        }
    ),
    "exaone_moe": Architecture(
        NORMAL_EXPERTS
        | {
            "num_hidden_layers": 4,
            "num_shared_experts": 1,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "is_moe_layer": [False, True, True, True],
        }
    ),
    "falcon_h1": Architecture(
        {
            "mamba_d_ssm": 64,
            "mamba_d_head": 16,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "embedding_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
        }
    ),
    "gear": Architecture(
        {
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, "conv_mixer", FULL],
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    ),
    "gemma": Architecture({}, embedding=0.1),
    "gemma2": Architecture({"query_pre_attn_scalar": 16}, embedding=0.1),
    "gemma3": Architecture(nested(model_type="gemma3_text", **GEMMA3)),
    "gemma3_text": Architecture(GEMMA3),
    "gemma3n": Architecture(
        nested(
            model_type="gemma3n",
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=VOCAB_SIZE,
            sliding_window=WINDOW,
            rope_local_base_freq=1000.0,
            final_logit_softcapping=30.0,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
            activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0],
            hidden_size_per_layer_input=16,
            altup_num_inputs=2,
            altup_coef_clip=120.0,
            altup_correct_scale=True,
            altup_active_idx=0,
            laurel_rank=8,
        ),
        embedding=0.1,
    ),
    "gemma4": Architecture(nested(model_type="gemma4_text", **GEMMA4), embedding=0.1),
    "gemma4_text": Architecture(
        GEMMA4
        | {
            "num_kv_shared_layers": 0,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        embedding=0.1,
    ),
    "glm": Architecture({}),
    "glm4": Architecture({"attention_bias": True, "partial_rotary_factor": 0.5}),
    "glm4_moe": Architecture(
        ROUTED_EXPERTS
        | {
            "num_hidden_layers": 3,
            "norm_topk_prob": True,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "rope_scaling": None,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        }
    ),
    "glm4_moe_lite": Architecture(DEEPSEEK_V3 | {"rope_scaling": None}),
    "glm_moe_dsa": Architecture(
        DEEPSEEK_V3 | INDEXER | {"rope_scaling": None, "rope_parameters": {"rope_theta": 10000.0}}
    ),
    "gpt2": Architecture(GPT2),
    "gpt_bigcode": Architecture(GPT2 | {"n_inner": 96}),
    "gpt_neox": Architecture({"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25}),
    "gpt_oss": Architecture(
        experts("num_local_experts", "num_experts_per_tok", None)
        | {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}
    ),
    "gptj": Architecture({"n_embd": 64, "n_positions": 512, "n_head": 4, "rotary_dim": 8, "n_layer": 2}),
    "granite": Architecture(GRANITE),
    "granitemoe": Architecture(GRANITE | experts("num_local_experts", "num_experts_per_tok", None)),
    "granitemoehybrid": Architecture(
        GRANITE
        | experts("num_local_experts", "num_experts_per_tok", None)
        | {
            "num_hidden_layers": 4,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_proj_bias": False,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 1,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
        }
    ),
    "helium": Architecture({"attention_bias": False, "mlp_bias": False}),
    "hunyuan": Architecture(
        HUNYUAN
        | {
            "num_hidden_layers": 4,
            "moe_topk": 2,
            "num_experts": 4,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_cla": True,
            "cla_share_factor": 2,
        }
    ),
    "hunyuan_v1_dense": Architecture(HUNYUAN),
    "internlm2": Architecture({}),
    # Beyond max_position_embeddings, its rotary base depends on the length of the call, in mlx-lm too.
    "internlm3": Architecture(
        {"rope_scaling": {"factor": 4.0, "rope_type": "dynamic"}, "max_position_embeddings": 512}
    ),
    "iquestloopcoder": Architecture({"loop_num": 2, "loop_window_size": WINDOW}),
    "jamba": Architecture(
        NORMAL_EXPERTS
        | {
            "num_hidden_layers": 4,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
        }
    ),
    "kimi_k25": Architecture(nested(**DEEPSEEK_V3)),
    "kimi_k3": Architecture(
        nested(
            **LATENT,
            num_hidden_layers=4,
            linear_attn_config={
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 3],
                "full_attn_layers": [2, 4],
            },
            attn_res_block_size=2,
            mla_use_output_gate=True,
            num_experts=4,
            num_experts_per_token=2,
            num_shared_experts=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            routed_expert_hidden_size=32,
            latent_moe_use_norm=True,
        )
    ),
    "kimi_linear": Architecture(
        LATENT
        | {
            "num_hidden_layers": 4,
            "linear_attn_config": {
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 3],
                "full_attn_layers": [2, 4],
            },
            "model_max_length": 512,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        }
    ),
    "kimi_vl": Architecture(nested(**DEEPSEEK_V3)),
    "laguna": Architecture(
        NORMAL_EXPERTS
        | {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "shared_expert_intermediate_size": 32,
            "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_attention_heads_per_layer": [4, 4, 2, 4],
            "rope_parameters": {
                FULL: YARN | {"rope_theta": 10000.0, "rope_type": "yarn", "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            },
        }
    ),
    "lfm2": Architecture(LFM2),
    "lfm2-vl": Architecture(nested(model_type="lfm2", **LFM2)),
    "lfm2_moe": Architecture(
        LFM2 | NORMAL_EXPERTS | {"norm_topk_prob": True, "use_expert_bias": True, "num_dense_layers": 1}
    ),
    "lille-130m": Architecture(
        {"block_size": 512, "n_layer": 2, "n_head": 4, "n_kv_heads": 2, "n_embd": 64, "layer_norm_eps": 1e-5}
    ),
    "llama": Architecture(
        {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "sliding_window": WINDOW}, seed=1
    ),
    "llama4": Architecture(nested(model_type="llama4", **LLAMA4)),
    "llama4_text": Architecture({"intermediate_size_mlp": 96, "no_rope_layers": [0, 1], "use_qk_norm": True}),
    "longcat_flash": Architecture(LONGCAT),
    "longcat_flash_ngram": Architecture(LONGCAT | {"ngram_vocab_size_ratio": 4, "emb_neighbor_num": 3}),
    "mamba": Architecture(
        {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4}
    ),
    "mamba2": Architecture(
        {
            "num_heads": 8,
            "head_dim": 16,
            "intermediate_size": 128,
            "state_size": 16,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 2,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_limit": [0.01, 10.0],
            "time_step_rank": "auto",
        }
    ),
    "mellum": Architecture(
        NORMAL_EXPERTS
        | {
            "num_hidden_layers": 3,
            "norm_topk_prob": True,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": MIXED_ROPE,
        }
    ),
    "mimo": Architecture({}),
    "mimo_v2_flash": Architecture(
        ROUTED_EXPERTS
        | {
            "num_hidden_layers": 4,
            "hybrid_layer_pattern": [0, 1, 0, 1],
            "moe_layer_freq": [0, 1, 1, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "n_shared_experts": None,
            "routed_scaling_factor": None,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 1000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "head_dim": 24,
            "v_head_dim": 16,
            "swa_head_dim": 24,
            "swa_v_head_dim": 16,
            "partial_rotary_factor": 0.5,
        }
    ),
    "minicpm": Architecture({"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 4.0}),
    "minicpm3": Architecture(
        LATENT
        | {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 4.0}
        | {
            "rope_scaling": {
                "long_factor": [1.0] * 4,
                "short_factor": [1.0] * 4,
                "original_max_position_embeddings": 512,
            }
        }
    ),
    "minimax": Architecture(
        experts("num_local_experts", "num_experts_per_tok", None) | {"shared_intermediate_size": 32, "rotary_dim": 8}
    ),
    "minimax_m3_vl": Architecture(
        nested(
            num_hidden_layers=3,
            dense_intermediate_size=96,
            shared_intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_layer_freq=[0, 1, 1],
            sparse_attention_freq=[0, 1, 1],
            index_n_heads=2,
            index_head_dim=16,
            index_block_size=4,
            index_topk_blocks=4,
        )
    ),
    "ministral3": Architecture(
        {
            "layer_types": [FULL, SLIDING],
            "sliding_window": WINDOW,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.5,
                "rope_type": "default",
                "type": "default",
            },
        }
    ),
    "mistral3": Architecture(nested(model_type="mistral")),
    "mistral4": Architecture(
        DEEPSEEK_V3
        | {
            "head_dim": 24,
            "qk_head_dim": 24,
            "rope_scaling": None,
            "rope_parameters": YARN
            | {"rope_type": "yarn", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5, "max_position_embeddings": 512},
        }
    ),
    "mixtral": Architecture(experts("num_local_experts", "num_experts_per_tok", None)),
    "muse_glimmer": Architecture({"num_hidden_layers": 4, "sliding_window": WINDOW}),
    "muse_spark": Architecture(cannot_run="its norms, rotary positions and experts are Metal kernels"),
    "nanbeige": Architecture({"num_loops": 2}),
    "nanochat": Architecture({"num_key_value_heads": 2}),
    "nemotron": Architecture({"hidden_act": "relu2", "norm_eps": 1e-5}),
    "nemotron-nas": Architecture(
        {
            "num_hidden_layers": 4,
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            ],
        }
    ),
    "nemotron_h": Architecture(
        {
            "attention_bias": False,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 2,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "hybrid_override_pattern": ["M", "*", "E", "M", "-", "*"],
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
        }
    ),
    "olmo": Architecture(cannot_run="mlx-lm needs the package ai2-olmo for it"),
    "olmo2": Architecture({}),
    "olmo3": Architecture(
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        }
    ),
    "olmo_hybrid": Architecture(
        linear_attention()
        | {
            "num_hidden_layers": 4,
            "linear_num_value_heads": 2,
            "linear_allow_neg_eigval": True,
            "attention_bias": False,
            "layer_types": ["linear_attention", FULL, "linear_attention", FULL],
        }
    ),
    "olmoe": Architecture(experts("num_experts", "num_experts_per_tok", None)),
    "openelm": Architecture(
        {
            "num_transformer_layers": 2,
            "model_dim": 64,
            "ffn_dim_divisor": 16,
            "num_query_heads": [4, 6],
            "num_kv_heads": [2, 3],
            "ffn_multipliers": [1.0, 1.5],
        },
        embedding=0.05,
    ),
    "phi": Architecture({"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "num_key_value_heads": 4}),
    "phi3": Architecture({}),
    "phi3small": Architecture(
        {
            "vocab_size": 100352,  # it masks tokens of this vocabulary by number, whatever its size is
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "dense_attention_every_n_layers": 2,
            "ff_intermediate_size": 96,
            "gegelu_limit": 20.0,
            "layer_norm_epsilon": 1e-5,
            "blocksparse_block_size": 32,
            "blocksparse_num_local_blocks": 1,
            "blocksparse_vert_stride": 2,
        }
    ),
    "phimoe": Architecture(
        experts("num_local_experts", "num_experts_per_tok", None)
        | {
            "rope_scaling": {
                "long_factor": [1.0] * 8,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 512,
                "short_factor": [1.0] * 8,
                "short_mscale": 1.2,
                "type": "longrope",
            }
        }
    ),
    "phixtral": Architecture(
        experts("num_local_experts", "num_experts_per_tok", None)
        | {"num_vocab": VOCAB_SIZE, "model_dim": 64, "num_heads": 4, "num_layers": 2, "rotary_dim": 8}
    ),
    "pixtral": Architecture(nested(model_type="llama")),
    "plamo": Architecture({"n_shared_head": 2}),
    "plamo2": Architecture(
        {
            "num_hidden_layers": 4,
            "hidden_size_per_head": 16,
            "attention_window_size": WINDOW,
            "full_attention_idx": [3],
            "mamba_d_state": 16,
            "mamba_num_heads": 4,
        }
    ),
    "plamo3": Architecture({"num_hidden_layers": 4, "window_size": WINDOW, "sliding_window_pattern": 2}),
    "prism_hadamard_qwen35": Architecture(hadamard_config(), weights=hadamard_weights, seed=5),
    "qwen": Architecture({"kv_channels": 16}),
    "qwen2": Architecture({}),
    "qwen2_moe": Architecture(NORMAL_EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen2_vl": Architecture(nested(model_type="qwen2")),
    "qwen3": Architecture({}),
    "qwen3_5": Architecture(nested(model_type="qwen3_5_text", **QWEN3_5)),
    "qwen3_5_moe": Architecture(
        nested(model_type="qwen3_5_moe_text", **QWEN3_5, **NORMAL_EXPERTS, shared_expert_intermediate_size=32)
    ),
    "qwen3_moe": Architecture(QWEN3_MOE),
    "qwen3_next": Architecture(
        QWEN3_5
        | NORMAL_EXPERTS
        | {"decoder_sparse_step": 1, "mlp_only_layers": [0]}
        | {"shared_expert_intermediate_size": 32}
    ),
    "qwen3_vl": Architecture(nested(model_type="qwen3")),
    "qwen3_vl_moe": Architecture(nested(model_type="qwen3_moe", **QWEN3_MOE)),
    "recurrent_gemma": Architecture(
        {
            "num_hidden_layers": 3,
            "attention_bias": False,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "num_key_value_heads": 1,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "recurrent", "attention"],
        }
    ),
    "rwkv7": Architecture(
        {
            "num_hidden_layers": 3,
            "norm_eps": 1e-5,
            "a_low_rank_dim": 16,
            "v_low_rank_dim": 16,
            "gate_low_rank_dim": 16,
            "decay_low_rank_dim": 16,
        }
    ),
    "seed_oss": Architecture({}),
    "smollm3": Architecture({"no_rope_layers": [1, 0]}),
    "solar_open": Architecture(
        ROUTED_EXPERTS
        | {
            "num_hidden_layers": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "partial_rotary_factor": 1.0,
        }
    ),
    "spark2_5": Architecture(
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "rope_parameters": MIXED_ROPE,
        }
    ),
    "stablelm": Architecture(
        {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "use_qkv_bias": True, "qk_layernorm": True}
    ),
    "starcoder2": Architecture({"norm_epsilon": 1e-5}),
    "step3p5": Architecture(
        {
            "num_hidden_layers": 4,
            "num_attention_groups": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": [10000.0] * 4,
            "sliding_window": WINDOW,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
            "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
            "moe_layers_enum": "1,2,3",
        }
    ),
    "talkie": Architecture({}),
    "telechat3": Architecture({}),
    "youtu_llm": Architecture(LATENT),
}

REFUSED = {
    "gear": "The `layer_types` entries must be in",
    "plamo3": "the model masks a window of 13 keys, and its cache keeps 12",
    "phi3small": "its logits are not finite",
}
"""Architectures that are not served, each with a part of the reason that the user is told."""


FUSED = frozenset(
    [
        *("Klear", "apertus", "cohere2", "deepseek", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4"),
        *("exaone_moe", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss"),
        *("gptj", "granite", "granitemoe", "granitemoehybrid", "helium", "jamba", "lfm2", "lfm2-vl", "lfm2_moe"),
        *("llama", "mellum", "mimo", "mimo_v2_flash", "minicpm", "mistral3", "mixtral", "nanbeige", "nemotron"),
        *("nemotron-nas", "nemotron_h", "openelm", "phi", "phi3", "phimoe", "pixtral", "qwen2", "qwen2_moe"),
        *("qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
        *("seed_oss", "smollm3", "solar_open", "starcoder2", "telechat3"),
    ]
)
"""Architectures whose attention layers are all fused."""

HALF_FUSED = frozenset(["prism_hadamard_qwen35"])
"""Architectures of which one of two attention layers is fused: the weights of the other are rotated apart. In all
others, none is."""
