"""Gives the files that Ollama has converted itself the keys and names that llama.cpp's conversion writes.

Most of Ollama's library since 2025 is of this kind: Gemma 3 and 4, gpt-oss, Qwen 3.5, Mistral Small and others. What
differs is what Ollama changes when it loads them with llama.cpp (llama/compat in https://github.com/ollama/ollama).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GEMMA3_TEMPLATE = """\
{{- bos_token -}}
{%- set system = messages[0]['content'] | trim + '\\n\\n' if messages[0]['role'] == 'system' else '' -%}
{%- for message in messages if message['role'] != 'system' -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\\n' + (system if loop.first else '') -}}
{{- message['content'] | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
"""Some files of Gemma 3 have none."""

LONG_GEMMA3 = 131_072
"""Least context of the models of Gemma 3 whose rotary embedding is scaled: those of 4 billion parameters and more."""
LLAMA3_END = 128_009, "<|eot_id|>"
UNNAMED = (None, "", "default")
"""Values of tokenizer.ggml.pre that name no way to split a text."""


class Header:
    """Keys and tensors of a file, to be changed. Values may have any type: what reads them later checks that."""

    def __init__(self, metadata: dict[str, Any], tensors: Mapping[str, Any]) -> None:
        self.metadata, self.tensors = metadata, tensors
        self.architecture: Any = metadata.get("general.architecture")

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.metadata

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def put(self, key: str, value: Any) -> None:
        self.metadata[f"{self.architecture}.{key}"] = value

    def add(self, key: str, value: Any) -> None:
        if not self.has(key):
            self.put(key, value)


@dataclass(frozen=True)
class Conversion:
    """What is changed in files of an architecture.

    architecture: its name in llama.cpp's files; None for the same. keys: names of keys by those in the file; the values
    of these hold where the file has none under llama.cpp's. tensors: expressions for parts of names, and what stands
    there instead. split: the value of tokenizer.ggml.pre for files without one; `forced`: for all files. change:
    whatever else is to be done.
    """

    architecture: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    tensors: Sequence[tuple[str, str]] = ()
    split: str | None = None
    forced: bool = False
    change: Callable[[Header], None] = lambda header: None


def gemma3(header: Header) -> None:
    marks = ("mm.tokens_per_image", "rope.global.freq_base", "rope.local.freq_base")
    is_own = any(map(header.has, marks)) or not header.has("attention.layer_norm_rms_epsilon")
    if not is_own and not any(name.startswith(("v.", "mm.")) for name in header.tensors):
        return
    header.add("attention.layer_norm_rms_epsilon", 1e-6)
    length = header.get("context_length")
    if type(length) is int and length >= LONG_GEMMA3:
        header.add("rope.scaling.type", "linear")
        header.add("rope.scaling.factor", 8.0)
    header.metadata.setdefault("tokenizer.chat_template", GEMMA3_TEMPLATE)
    if "token_embd.weight" in header.tensors:  # the tokenizer has tokens for images that the model has no row for
        rows = header.tensors["token_embd.weight"].shape[0]
        for name in ("tokens", "scores", "token_type"):
            if isinstance(found := header.metadata.get(f"tokenizer.ggml.{name}"), list | np.ndarray):
                header.metadata[f"tokenizer.ggml.{name}"] = found[:rows]


def gemma4(header: Header) -> None:
    """Its tokens are not merged by scores."""
    if header.metadata.get("tokenizer.ggml.model") == "llama":
        header.metadata["tokenizer.ggml.model"] = "gemma4"


def gpt_oss(header: Header) -> None:
    if header.has("rope.scaling.factor"):
        header.add("rope.scaling.type", "yarn")


def glm4_moe_lite(header: Header) -> None:
    """Sizes of a head stand where llama.cpp has those of the latent."""
    for key in ("attention.key_length", "attention.value_length"):
        header.put(f"{key}_mla", header.get(key))
    header.add("expert_gating_func", 2)


def lfm2(header: Header) -> None:
    """The length in the file is not always that of its tensors."""
    if "blk.0.ffn_gate.weight" in header.tensors:
        header.put("feed_forward_length", header.tensors["blk.0.ffn_gate.weight"].shape[0])


def llama(header: Header) -> None:
    """Early files of Llama 3 do not say how texts are split."""
    place, end = LLAMA3_END
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens[place : place + 1] == [end]:
        name_split(header.metadata, "llama-bpe")


def name_split(metadata: dict[str, Any], name: str) -> None:
    if metadata.get("tokenizer.ggml.pre") in UNNAMED:
        metadata["tokenizer.ggml.pre"] = name


QWEN35 = Conversion(tensors=[(r"\.ssm_dt$", ".ssm_dt.bias")])

CONVERSIONS: Mapping[str, Conversion] = {
    "gemma3": Conversion(
        keys={"rope.global.freq_base": "rope.freq_base", "rope.local.freq_base": "rope.freq_base_swa"}, change=gemma3
    ),
    "gemma4": Conversion(tensors=[(r"\.ffn_gate_inp\.per_expert_scale$", ".ffn_down_exps.scale")], change=gemma4),
    "glm4moelite": Conversion("deepseek2", split="glm4", forced=True, change=glm4_moe_lite),
    "gptoss": Conversion(
        "gpt-oss",
        keys={"feed_forward_length": "expert_feed_forward_length"},
        tensors=[
            (r"\.attn_out\.", ".attn_output."),
            (r"\.attn_sinks$", ".attn_sinks.weight"),
            (r"\.ffn_norm\.", ".post_attention_norm."),
        ],
        split="gpt-4o",
        forced=True,
        change=gpt_oss,
    ),
    "lfm2": Conversion(split="lfm2", change=lfm2),
    "llama": Conversion(change=llama),
    "mistral3": Conversion(
        keys={
            "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
            "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
            "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "rope.scaling_beta": "attention.temperature_scale",
        },
        split="tekken",
    ),
    "qwen25vl": Conversion("qwen2vl"),
    "qwen35": QWEN35,
    "qwen35moe": QWEN35,
}
"""What is changed, by the architecture. Files of llama.cpp stay as they are."""


def as_llama_cpp(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The metadata, and the name of each tensor."""
    old = metadata.get("general.architecture")
    conversion = CONVERSIONS.get(old) if isinstance(old, str) else None
    if conversion is None:
        return dict(metadata), {name: name for name in tensors}
    new = conversion.architecture or old
    header = Header({**metadata, "general.architecture": new}, tensors)
    for key, value in metadata.items():
        if key.startswith(f"{old}."):
            header.add(key[len(f"{old}.") :], value)
    for key, name in conversion.keys.items():
        if header.has(key):
            header.add(name, header.get(key))
    if conversion.split is not None:
        if conversion.forced:
            header.metadata["tokenizer.ggml.pre"] = conversion.split
        name_split(header.metadata, conversion.split)
    conversion.change(header)
    names = {name: name for name in tensors}
    for pattern, text in conversion.tensors:
        names = {name: re.sub(pattern, text, own) for name, own in names.items()}
    return header.metadata, names
