"""The benchmark model, made from a seed, and texts of a given number of tokens.

Llama's architecture, 12 layers of 768, 12 query and 4 KV heads, float32: about 80 million parameters, so that on a CPU
a step is bound by memory as a larger model's is on a Mac. Random weights, so nothing is downloaded.

Its vocabulary is made for measuring. A word is four letters, consonant vowel consonant vowel, and one token; text
has no spaces. Even if a server changes white space, an answer sent back as history has the tokens that it was made
of, and every token is text that can be streamed at once. Only words can be generated: the rows of every other token in
the (tied) embedding are a tenth as large, and so are their logits. No answer ends early.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

VERSION = 1
"""Part of the cached directory's name; to be raised when what is made here changes."""

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, START, END)
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvzjh" for vowel in "aeiou"]
WORDS = [first + second for first, second in itertools.product(SYLLABLES, SYLLABLES)]

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE: 3 special tokens, 256 bytes, 80 syllables, 6,400 words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet, *SYLLABLES, *WORDS])}
    merges = [(syllable[0], syllable[1]) for syllable in SYLLABLES] + [(word[:2], word[2:]) for word in WORDS]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[a-z]{4}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def make_weights(config: dict[str, Any], num_fixed: int, seed: int) -> dict[str, Any]:
    """float32 arrays by their names in a Llama checkpoint. `num_fixed`: how many ids come before the words.

    Projections have a variance of 1 / fan-in and the embedding is small, so that the next token depends on all layers
    and is not the last one again."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int) -> Any:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(columns**-0.5)

    embedding = rng.standard_normal((config["vocab_size"], hidden), dtype=np.float32) * np.float32(0.05)
    embedding[:num_fixed] *= np.float32(0.1)
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(hidden, np.float32)}
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            weights[f"{prefix}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = np.ones(hidden, np.float32)
    return weights


MakeWeights = Callable[[dict[str, Any], int, int], dict[str, Any]]
"""From a config, the number of ids before the words, and a seed: float32 arrays by their names in a checkpoint."""


def make_model(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """A Llama in `directory`, made if it is not there; `overrides` replace entries of its config."""
    return write_model(directory, CONFIG | overrides, make_weights, seed)


def write_model(directory: Path, config: dict[str, Any], weights: MakeWeights, seed: int = 0) -> Path:
    """The model's directory, written at once or not at all. The config needs no token ids."""
    if (directory / "model.safetensors").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    ids = {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    config = ids | config
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [START],
    }
    generation = {name: ids[name] for name in ("eos_token_id", "pad_token_id")} | {"do_sample": False}
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        # transformers reads either; peers with an older one only the entry
        ("tokenizer_config.json", tokenizer_config | {"chat_template": CHAT_TEMPLATE}),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    arrays = weights(config, tokenizer.get_vocab_size() - len(WORDS), seed)
    unfinished = directory / "model.safetensors.part"
    save_file(arrays, str(unfinished), metadata={"format": "pt"})
    unfinished.rename(directory / "model.safetensors")
    return directory


def benchmark_model(cache: Path) -> Path:
    """Where the model is, made if need be."""
    return make_model(cache / "models" / f"llama-80m-{VERSION}")


class Texts:
    """Random words. What has the same name has the same words; two names share a first word in one of 6,400 cases, and
    hardly ever more, so that no prefix cache helps where it is not meant to."""

    def __init__(self, model: Path) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        sample = "".join(random.Random("sample").choices(WORDS, k=1000))
        self._tokens_per_word = len(tokenizer.encode(sample, add_special_tokens=False)) / 1000

    def of(self, name: str, tokens: int) -> str:
        """About `tokens` tokens; exactly as many with the benchmark model."""
        count = max(1, round(tokens / self._tokens_per_word))
        return "".join(random.Random(name).choices(WORDS, k=count))
