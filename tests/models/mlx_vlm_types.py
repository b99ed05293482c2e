"""Model types that mlx-lm lacks and mlx-vlm has, each as a tiny random model, and whether it is served.

Towers are built with the sizes that mlx-vlm gives them, and have no weights. `REFUSED` has those that are not served: a
test fails if one of them is served after all, or one of the others is refused.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxpaged.models.files.architectures import package_of
from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.models.text_mlx_vlm import configuration
from tests.models.architectures import ARCHITECTURES, FULL, LFM2, SLIDING, VOCAB_SIZE, WINDOW, random_weights
from tests.support import TOKENIZER_FILES

LAYERS = 3

TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "use_qk_norm": True,
    "eos_token_id": 0,
    "sliding_window": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": LAYERS,
    "mlp_hidden_size": 192,
    "embedding_size": VOCAB_SIZE,
    "additional_vocab_size": 16,
}
"""A field for each name that some architecture has for it."""

SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 64, "num_attention_heads": 4, "patch_size": 14}
GLM_TOWER: dict[str, Any] = {
    "model_type": "glm4v",
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "patch_size": 14,
}
SMALL_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
MIXED = [SLIDING, FULL, SLIDING]
QWEN3_5: dict[str, Any] = {"num_hidden_layers": 4}

TYPES: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": SIGLIP, "text_config": {"sliding_window_pattern": 3}},
    "clef": QWEN3_5
    | {
        "head_config": {"hidden_size": 64, "width": 64, "routing_layers": 1, "layers": 1, "heads": 4, "feedforward": 96}
    },
    "cohere2_moe": {},
    "cohere_compass": {},
    "colidefics3": {"vision_config": SIGLIP | {"model_type": "idefics3"}},
    "colqwen2_5": {},
    "d1": {"text_config": LFM2 | {"conv_dim": 64, "conv_dim_out": 64}},
    "decider2": QWEN3_5,
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "num_hash_layers": 1,
        "hc_mult": 2,
    },
    "deepseek_vl_v2": {"vision_config": {"model_type": "vision"}, "projector_config": {}},
    "deepseekocr": {"vision_config": {"model_type": "vision"}, "projector_config": {}},
    "deepseekocr_2": {"vision_config": {"model_type": "vision", "width": {}}, "projector_config": {}},
    "dots_ocr": {},
    "embedding_gemma2": {},
    "ernie4_5_moe_vl": {
        "text_config": {"mrope_section": [3, 3, 2], "moe_num_experts": [4, 4], "moe_intermediate_size": [32, 32]}
        | {"moe_layer_start_index": [1, 1], "moe_layer_end_index": [2, 2]}
    },
    "falcon_ocr": {},
    "falcon_perception": {},
    "fastvlm": {},
    "flint": {},
    "florence2": {},
    "glm4v": {"vision_config": GLM_TOWER},
    "glm4v_moe": {"vision_config": GLM_TOWER | {"model_type": "glm4v_moe"}},
    "glm5_next": {
        "text_config": {"num_hidden_layers": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 0, "qk_nope_head_dim": 16}
        | {"index_topk": 16, "index_kpool": 2, "index_head_dim": 16, "index_n_heads": 2, "linear_head_dim": 16}
        | {"linear_num_heads": 4}
    },
    "glm_ocr": {"vision_config": GLM_TOWER | {"model_type": "glm_ocr"}},
    "got": {},
    "granite4_vision": {},
    "granite_vision": {},
    "hrm_text": {},
    "hunyuan_vl": {
        "text_config": {
            "rope_scaling": {"type": "xdrope", "xdrope_section": [2, 2, 2, 2], "alpha": 1000.0, "factor": 1.0}
        }
    },
    "hy_v4": {},
    "idefics2": {"vision_config": {"model_type": "idefics2"}, "perceiver_config": {"model_type": "idefics2"}},
    "idefics3": {"vision_config": SIGLIP | {"model_type": "idefics3"}},
    "indic_ocr": QWEN3_5,
    "internvl": {"vision_config": {"model_type": "internvl_vision"}},
    "internvl_chat": {"vision_config": {"model_type": "intern_vit_6b"}},
    "jina_vlm": {},
    "k2_horizon": {},
    "kolibri1": {"layer_types": MIXED},
    "limite": {
        "softcap_logits": {"kind": "sigmoid", "a": 15.0, "b": 0.0, "c": 7.5},
        "rope_n_pairs": 8,
        "attn_gate_channels": 16,
        "ve_dim": 16,
        "sliding_window": WINDOW,
        "ve_stored_heads": 2,
    },
    "llada2_moe": {},
    "llama_nemotron_vl_embedding": {},
    "llava_bunny": {"auto_map": {}, "mm_hidden_size": 64},
    "llava_next": {"vision_config": {"model_type": "clip_vision_model"}, "text_config": {"model_type": "llama"}},
    "llava_onevision": {},
    "llmjpvl": {"text_config": {"model_type": "llama"}},
    "locateanything": {"text_config": {"tie_word_embeddings": True}},
    "longcat_flash_sparse": {
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 16,
    },
    "mage_vl": {},
    "mimo_v2": {
        "text_config": {"hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1], "sliding_window_size": WINDOW}
        | {"n_shared_experts": None, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
        | {"swa_v_head_dim": 16, "layernorm_epsilon": 1e-5, "attention_chunk_size": WINDOW}
    },
    "minicpmo": {},
    "minicpmv4_6": QWEN3_5,
    "minicpmv4_7": QWEN3_5 | {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302},
    "minimax_m3": {},
    "mistral_large3": {},
    "mllama": {},
    "molmo": {},
    "molmo2": {},
    "molmo_point": {
        "text_config": {"vocab_size": VOCAB_SIZE - 16},
        "vision_config": SMALL_TOWER,
        "adapter_config": SMALL_TOWER | {"text_hidden_size": 64},
    },
    "moondream2": {},
    "moondream3": {"text_config": {"num_key_value_heads": 4, "prefix_attn": 0, "rope_dim": 8, "moe_start_layer": 1}},
    "nemotron_h_nano_omni": {"text_config": ARCHITECTURES["nemotron_h"].config | {"num_hidden_layers": 6}},
    "nemotron_labs_diffusion": {},
    "nemotron_parse": {},
    "paddleocr_vl": {},
    "paligemma": {
        "vision_config": SIGLIP,
        "text_config": {"model_type": "gemma2", "query_pre_attn_scalar": 16}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    },
    "phi3_v": {"text_config": {}, "vision_config": {"num_hidden_layers": 2}},
    "phi4_siglip": {},
    "phi4mm": {},
    "plamo2vl": {"text_config": {"model_type": "plamo2"}},
    "qwen3_5_moe_text": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_omni_moe": {
        "thinker_config": {"text_config": TEXT, "vision_config": {}, "audio_config": {}},
        "talker_config": {"text_config": TEXT, "code_predictor_config": {}},
        "code2wav_config": {},
    },
    "qwen3_vl_embedding": {},
    "qwen4_exp": QWEN3_5,
    "smolvlm": {},
    "step3p7": {
        "text_config": {"num_attention_groups": 2, "layer_types": MIXED, "moe_num_experts": 4, "moe_top_k": 2}
        | {"share_expert_dim": 32, "moe_layers_enum": [1, 2], "rope_theta": [10000.0] * LAYERS}
        | {"partial_rotary_factors": [0.5, 1.0, 0.5]}
        | {"attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2}}
    },
    "unlimited_ocr": {"vision_config": {"model_type": "vision"}, "projector_config": {}},
    "xing4_0": {},
    "youtu_vl": {},
    "z1t": {},
    "zaya1_vl": {},
}


REFUSED = {
    "colidefics3": "it does not run: TypeError",
    "colqwen2_5": "it does not run: TypeError",
    "embedding_gemma2": "it does not run: TypeError",
    "llama_nemotron_vl_embedding": "Missing 1 parameters: language_model.lm_head.weight",
    "qwen3_vl_embedding": "it does not run: TypeError",
    "deepseek_v4": "does not reproduce its logits",
    "falcon_perception": "does not reproduce its logits",
    "florence2": "does not reproduce its logits",
    "llada2_moe": "does not reproduce its logits",
    "minicpmo": "spatial_merge_size",
    "nemotron_parse": "decoder_input_ids",
    "paligemma": "does not reproduce its logits",
    "zaya1_vl": "'CacheList' object has no attribute 'offset'",
}
"""Types that are not served, each with a part of the reason that the user is told."""

ELSEWHERE = {"klear", "lille_130m", "nemotron_nas", "diffusion_gemma"}
"""Types that mlx-lm has under the names of published models, and one without a module that is a language model."""

SEEDS = {"ernie4_5_moe_vl": 1, "longcat_flash_sparse": 1, "nemotron_h_nano_omni": 1}
"""Of random weights, if those of 0 make ties."""

TOWERS = {"fastvlm": {"vision_tower.vision_model.patch_embed.blocks.1.reparam_conv.weight": (1, 3, 3, 1)}}
"""Shapes of weights for which mlx-vlm's loader looks."""


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a type. Fields of the text model stand at the top too: some types have them there."""
    changes = dict(TYPES[name])
    text = TEXT | {"model_type": name} | {key: changes[key] for key in changes if not key.endswith("_config")}
    known = getattr(importlib.import_module(f"mlx_vlm.models.{name}"), "TextConfig", None)
    of_text = {key: text[key] for key in text if known is None or key in known.__dataclass_fields__}
    own = changes.pop("text_config", {})
    of_text |= own
    return text | own | {"vision_config": {}} | changes | {"model_type": name, "text_config": of_text}


class Plain:
    """A language model of mlx-vlm with its own caches, called as a model of mlx-lm."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        for name in ("_position_ids", "_rope_deltas"):
            if hasattr(self.model, name) and len(tokens[0]) > 1:
                setattr(self.model, name, None)  # mlx-vlm does so for each prompt
        logits: mx.array = self.model(tokens, cache=cache).logits
        return logits

    def eval(self) -> None:
        self.model.eval()

    def make_cache(self) -> list[Any]:
        caches: list[Any] = importlib.import_module("mlx_vlm.models.cache").make_prompt_cache(self.model)
        return caches


def make_type(directory: Path, name: str) -> Plain:
    """A model directory of the type, with random float32 weights and the demo model's tokenizer. Returns mlx-vlm's own
    model of it."""
    package = package_of(name)
    config = config_of(name)
    mx.random.seed(SEEDS.get(name, 0))
    whole = package.Model(configuration(package, config))
    prefix = next(path for path, module in whole.named_modules() if module is whole.language_model)
    parameters: Any = tree_flatten(whole.language_model.parameters())
    weights = random_weights({f"{prefix}.{path}".removeprefix("."): array for path, array in parameters}, 1.0)
    directory.mkdir()
    weights |= {path: mx.zeros(shape) for path, shape in TOWERS.get(name, {}).items()}
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    (directory / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER_FILES:
        shutil.copy(DEMO_PATH / file, directory / file)
    loaded = importlib.import_module("mlx_vlm.utils").load_model(directory, lazy=True, strict=False)
    return Plain(loaded.language_model)
