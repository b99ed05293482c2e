"""GGUF files as Ollama converts them compute what the MLX directories with the same values do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import read_tokenizer
from mlxpaged.models.sources.gguf.directory import gguf_directory
from mlxpaged.models.sources.gguf.file import read_gguf
from tests.models.architectures import FULL, make_architecture
from tests.models.gguf_files import Stored, plain, write_gguf
from tests.models.gguf_models import as_gguf
from tests.models.test_gguf import GEMMA4_ROPE, MODELS, PROMPT, YARN, greedy, loaded

Metadata = dict[str, Any]
Tensors = dict[str, Stored]
LINEAR = {"rope_type": "linear", "type": "linear", "factor": 8.0}
GEMMA3 = {
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10_000.0,
}
SCALING = ("rope_type", "type", "factor", "original_max_position_embeddings")
NO_EXPERTS = MODELS["gemma4 with shared layers"][1]


def rename(values: dict[str, Any], old: str, new: str) -> None:
    for name in [name for name in values if old in name]:
        values[name.replace(old, new)] = values.pop(name)


def gemma3(metadata: Metadata, tensors: Tensors) -> None:
    """With a tower, as the models of 4 billion parameters and more: without half of the keys."""
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"):
        metadata.pop(f"gemma3.{key}", None)
    metadata |= {"gemma3.mm.tokens_per_image": 256, "gemma3.vision.block_count": 1}
    tensors |= {"v.patch_embedding.weight": plain(np.zeros(8)), "mm.mm_soft_emb_norm.weight": plain(np.zeros(8))}
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<image_soft_token>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3]


def gemma3_text(metadata: Metadata, tensors: Tensors) -> None:
    """Of the smaller models."""
    rename(metadata, "gemma3.rope.freq_base", "gemma3.rope.global.freq_base")
    metadata["gemma3.rope.local.freq_base"] = 10_000.0
    period = metadata["gemma3.attention.sliding_window_pattern"]
    layers = metadata["gemma3.block_count"]
    metadata["gemma3.attention.sliding_window_pattern"] = [(i + 1) % period != 0 for i in range(layers)]


def gemma4(metadata: Metadata, tensors: Tensors) -> None:
    rename(tensors, "ffn_down_exps.scale", "ffn_gate_inp.per_expert_scale")
    tensors |= {"v.clamp_data": plain(np.zeros(8)), "a.blk.0.conv_dw.weight": plain(np.zeros(8))}


def glm4_moe_lite(metadata: Metadata, tensors: Tensors) -> None:
    sizes = {key: metadata[f"deepseek2.attention.{key}"] for key in ("key_length", "key_length_mla")}
    metadata["deepseek2.attention.key_length"] = sizes["key_length_mla"]
    metadata["deepseek2.attention.value_length"] = metadata["deepseek2.attention.value_length_mla"]
    metadata["deepseek2.attention.key_length_mla"] = sizes["key_length"]
    metadata["deepseek2.attention.value_length_mla"] = metadata["deepseek2.attention.kv_lora_rank"]
    metadata["deepseek2.attention.head_count_kv"] = metadata["deepseek2.attention.head_count"]
    del metadata["deepseek2.expert_gating_func"]
    rename(metadata, "deepseek2.", "glm4moelite.")
    metadata |= {"general.architecture": "glm4moelite", "tokenizer.ggml.pre": "default"}


def gpt_oss(metadata: Metadata, tensors: Tensors) -> None:
    rename(metadata, "gpt-oss.expert_feed_forward_length", "gpt-oss.feed_forward_length")
    metadata.pop("gpt-oss.rope.scaling.type", None)
    rename(metadata, "gpt-oss.", "gptoss.")
    metadata |= {"general.architecture": "gptoss", "tokenizer.ggml.pre": "default"}
    rename(tensors, "attn_output", "attn_out")
    rename(tensors, "attn_sinks.weight", "attn_sinks")
    rename(tensors, "post_attention_norm", "ffn_norm")


def lfm2(metadata: Metadata, tensors: Tensors) -> None:
    metadata["lfm2.feed_forward_length"] *= 2
    metadata["tokenizer.ggml.pre"] = "default"
    rename(tensors, "token_embd_norm", "output_norm")


def mistral3(metadata: Metadata, tensors: Tensors) -> None:
    rename(metadata, "rope.scaling.yarn_log_multiplier", "rope.scaling.mscale_all_dim")
    rename(metadata, "attention.temperature_scale", "rope.scaling_beta")
    metadata |= {"mistral3.rope.scaling.beta_fast": 32.0, "mistral3.rope.scaling.beta_slow": 1.0}
    metadata["tokenizer.ggml.pre"] = ""
    tensors["v.blk.0.attn_q.weight"] = plain(np.zeros((8, 8)))


def qwen35(metadata: Metadata, tensors: Tensors) -> None:
    rename(tensors, "ssm_dt.bias", "ssm_dt")
    key = f"{metadata['general.architecture']}.attention.head_count_kv"
    count = metadata[f"{metadata['general.architecture']}.block_count"]
    metadata[key] = [metadata[key] * (i % 2) for i in range(count)]
    tensors |= {"mtp.fc.weight": plain(np.zeros((8, 16))), "v.blk.0.attn_q.weight": plain(np.zeros((8, 8)))}


def seeing(architecture: str) -> Callable[[Metadata, Tensors], None]:
    def change(metadata: Metadata, tensors: Tensors) -> None:
        rename(metadata, f"{metadata['general.architecture']}.", f"{architecture}.")
        metadata["general.architecture"] = architecture
        tensors["v.blk.0.attn_qkv.weight"] = plain(np.zeros((24, 8)))

    return change


Case = tuple[str, dict[str, Any], Callable[[Metadata, Tensors], None]]
CASES: dict[str, Case] = {
    "gemma3": ("gemma3_text", GEMMA3 | {"rope_scaling": LINEAR, "max_position_embeddings": 131_072}, gemma3),
    "gemma3 without images": ("gemma3_text", GEMMA3, gemma3_text),
    "gemma4": ("gemma4_text", {"rope_parameters": GEMMA4_ROPE}, gemma4),
    "gemma4 without experts": ("gemma4_text", NO_EXPERTS, gemma4),
    "glm4moelite": ("deepseek_v3", {}, glm4_moe_lite),
    "gptoss": ("gpt_oss", {"rope_scaling": {key: YARN[key] for key in SCALING}}, gpt_oss),
    "lfm2": ("lfm2", {"conv_bias": False}, lfm2),
    "mistral3": (
        "ministral3",
        {"layer_types": [FULL, FULL], "sliding_window": None, "rope_parameters": YARN},
        mistral3,
    ),
    "qwen25vl": ("qwen2", {}, seeing("qwen25vl")),
    "qwen35": (*MODELS["qwen3_5"], qwen35),
    "qwen35moe": (*MODELS["qwen3_5_moe"], qwen35),
    "qwen3vl": ("qwen3", {"tie_word_embeddings": True}, seeing("qwen3vl")),
    "qwen3vlmoe": ("qwen3_moe", {"mlp_only_layers": []}, seeing("qwen3vlmoe")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_ollama_computes_what_the_mlx_directory_does(name: str, tmp_path: Path) -> None:
    model_type, changes, change = CASES[name]
    directory = make_architecture(tmp_path / "mlx", model_type, **changes)
    path = as_gguf(directory, tmp_path / "model.gguf", change=change)
    own, theirs = loaded(gguf_directory(path)), loaded(directory)
    assert mx.allclose(own(mx.array([PROMPT])), theirs(mx.array([PROMPT])), rtol=1e-5, atol=1e-5)
    assert greedy(own) == greedy(theirs)


def written(tmp_path: Path, architecture: str, **metadata: Any) -> dict[str, Any]:
    """The metadata of a file with no tensor but the embedding, as it is read."""
    path = tmp_path / "model.gguf"
    write_gguf(path, {"general.architecture": architecture} | metadata, {"token_embd.weight": plain(np.zeros((4, 8)))})
    return read_gguf(path).metadata


def test_gemma_3_has_a_template_and_no_tokens_beyond_its_rows(tmp_path: Path) -> None:
    directory = make_architecture(tmp_path / "mlx", "gemma3_text", **GEMMA3)

    def change(metadata: Metadata, tensors: Tensors) -> None:
        gemma3(metadata, tensors)
        for name in ("<start_of_turn>", "<end_of_turn>"):
            place = 10 if name.startswith("<start") else 11
            metadata["tokenizer.ggml.tokens"][place] = name
            metadata["tokenizer.ggml.token_type"][place] = 3
        metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_ids": [2, 11]}

    path = as_gguf(directory, tmp_path / "model.gguf", change=change)
    made = gguf_directory(path)
    tokenizer = read_tokenizer(str(path))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    rendered = tokenizer.reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert str(rendered).removeprefix(tokenizer.reader.bos_token) == (
        "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == [0, 2, 11]
    assert len(json.loads((made / "tokenizer.json").read_text())["model"]["vocab"]) == 256


@pytest.mark.parametrize("context", [32_768, 131_072])
def test_a_file_of_llama_cpp_keeps_its_rotary_embedding(context: int, tmp_path: Path) -> None:
    keys = {"gemma3.context_length": context, "gemma3.attention.layer_norm_rms_epsilon": 1e-6}
    found = written(tmp_path, "gemma3", **keys)
    assert found == {"general.architecture": "gemma3"} | keys | {
        "gemma3.attention.layer_norm_rms_epsilon": pytest.approx(1e-6)
    }


@pytest.mark.parametrize("named", [None, "default", "qwen2"])
def test_llama_3_splits_texts_as_it_was_trained_to(named: str | None, tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(128_009)]
    keys = {} if named is None else {"tokenizer.ggml.pre": named}
    found = written(tmp_path, "llama", **{"tokenizer.ggml.tokens": [*tokens, "<|eot_id|>"]}, **keys)
    assert found["tokenizer.ggml.pre"] == ("qwen2" if named == "qwen2" else "llama-bpe")
    assert written(tmp_path, "llama", **{"tokenizer.ggml.tokens": tokens}, **keys).get("tokenizer.ggml.pre") == named


def test_names_of_both_are_refused(tmp_path: Path) -> None:
    names = ("blk.0.attn_out.weight", "blk.0.attn_output.weight")
    tensors = {name: plain(np.zeros(8)) for name in names}
    path = write_gguf(tmp_path / "model.gguf", {"general.architecture": "gptoss"}, tensors)
    with pytest.raises(UnsupportedModelError, match="under the names of Ollama and under those of llama"):
        read_gguf(path)


@pytest.mark.parametrize("architecture", ["gemma3", "gemma4", "glm4moelite", "gptoss", "lfm2", "llama", "mistral3"])
def test_values_of_other_types_are_no_reason_to_fail(architecture: str, tmp_path: Path) -> None:
    """What reads them says what is wrong."""
    names = ("context_length", "attention.sliding_window_pattern", "attention.key_length", "feed_forward_length")
    keys = {f"{architecture}.{name}": value for name, value in zip(names, ("a", [0.5], "b", ["c"]), strict=True)}
    tokenizer = {f"tokenizer.ggml.{name}": value for name, value in (("tokens", 1), ("pre", [1]), ("model", [2]))}
    assert written(tmp_path, architecture, **keys, **tokenizer)["general.architecture"]
