"""A GGUF file of a Llama as a directory of safetensors in float32, without this project's own loader.

    python benchmarks/comparison/checkpoint.py FILE.gguf DIRECTORY

The package gguf dequantizes. llama.cpp's order of the rows of queries and keys is undone here, and the tokenizer is
made of the file's metadata. The directory is what transformers would have published: any server can load it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's names of tensors, and those of a Llama of transformers."""

CONTROL = 3
"""Type of a special token in a GGUF file."""

SPLITS = {"smollm": [{"type": "Digits", "individual_digits": True}]}
"""What comes before the bytes in the pre-tokenizer of the original, by the file's `tokenizer.ggml.pre`."""


def name_of(name: str) -> str:
    """The tensor's name in transformers, of its name in llama.cpp."""
    *layer, kind, end = name.split(".")
    return ".".join(["model.layers", layer[1], NAMES[kind], end] if layer else [NAMES[kind], end])


def halves(rows: Array, num_heads: int) -> Array:
    """The rows of queries or keys in the order of transformers, whose rotary embedding turns the halves of a head.
    llama.cpp's turns neighbours, so its conversion has put the two halves in turn (LlamaModel.permute)."""
    count, width = rows.shape
    return rows.reshape(num_heads, count // num_heads // 2, 2, width).swapaxes(1, 2).reshape(count, width)


def config_of(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    def field(name: str) -> Any:
        return fields[f"llama.{name}"]

    tokens = {f"{name}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    return tokens | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("embedding_length"),
        "num_hidden_layers": field("block_count"),
        "intermediate_size": field("feed_forward_length"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": field("rope.dimension_count"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"),
        "max_position_embeddings": field("context_length"),
        "vocab_size": field("vocab_size"),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }


def tokenizer_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The contents of tokenizer.json: a byte-level BPE."""
    texts, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": number, "content": text, "special": True, **flags}
        for number, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind == CONTROL
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*SPLITS[fields["tokenizer.ggml.pre"]], level],
        },
        "post_processor": None,
        "decoder": level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: number for number, text in enumerate(texts)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def write_directory(gguf_file: Path, directory: Path) -> Path:
    """The directory, written at once or not at all. Raises ValueError if it is no GGUF file of a Llama."""
    from gguf import GGUFReader, dequantize  # only here: the rest of the comparison does not need them
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.pre"] not in SPLITS:
        raise ValueError(f"{gguf_file}: only Llamas with a tokenizer of {', '.join(SPLITS)} are known")
    weights: dict[str, Array] = {}
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in ("attn_q", "attn_k"):
            heads = "head_count" if kind == "attn_q" else "head_count_kv"
            values = halves(values, fields[f"llama.attention.{heads}"])
        weights[name_of(tensor.name)] = np.ascontiguousarray(values)
    texts = fields["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = {f"{name}_token": texts[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    files: dict[str, Any] = {
        "config.json": config_of(fields, tied="lm_head.weight" not in weights),
        "generation_config.json": {"eos_token_id": fields["tokenizer.ggml.eos_token_id"]},
        "tokenizer.json": tokenizer_of(fields),
        # as SmolLM2 is published: mlx-lm and others read the template in the one place or the other
        "tokenizer_config.json": tokens
        | {
            "tokenizer_class": "GPT2Tokenizer",
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    }
    unfinished = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for name, content in files.items():
        (unfinished / name).write_text(json.dumps(content, ensure_ascii=False) + "\n")
    (unfinished / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
    save_file(weights, str(unfinished / "model.safetensors"), metadata={"format": "pt"})
    shutil.rmtree(directory, ignore_errors=True)
    return unfinished.rename(directory)


if __name__ == "__main__":
    write_directory(Path(sys.argv[1]), Path(sys.argv[2]))
