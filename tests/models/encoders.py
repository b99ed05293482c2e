"""Tiny encoders with random weights by their published names, and what they compute, in NumPy, one text at a time.

The formulas are those of the papers that mlxpaged/models/encoders/encoder.py names. Nothing of mlxpaged is used here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

Array = NDArray[np.float64]
Weights = Mapping[str, Array]

WIDTH, HIDDEN, LAYERS, HEADS = 32, 64, 3, 4

WORDS = ["blue", "river", "stone", "passkey", "count", "nine", "which", "is", "the", "in", "of", "and", "to"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789?.,"
VOCABULARY = [*SPECIAL, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]

SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
BERT = {**SIZES, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "position_embedding_type": "absolute"}

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**BERT, "model_type": "bert", "max_position_embeddings": 128, "type_vocab_size": 2},
    "roberta": {
        **BERT,
        "model_type": "roberta",
        "max_position_embeddings": 130,
        "type_vocab_size": 1,
        "pad_token_id": 1,
        "layer_norm_eps": 1e-5,
    },
    "xlm-roberta": {
        **BERT,
        "model_type": "xlm-roberta",
        "max_position_embeddings": 130,
        "type_vocab_size": 1,
        "pad_token_id": 1,
        "layer_norm_eps": 1e-5,
    },
    "mpnet": {**BERT, "model_type": "mpnet", "max_position_embeddings": 516, "relative_attention_num_buckets": 32},
    "nomic_bert": {
        "model_type": "nomic_bert",
        "vocab_size": len(VOCABULARY),
        "n_embd": WIDTH,
        "n_inner": HIDDEN,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "type_vocab_size": 2,
        "n_positions": 512,
        "max_trained_positions": 128,
        "rotary_scaling_factor": None,
        "use_rms_norm": False,
        "auto_map": {
            "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
            "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
        },
    },
    "new": {
        **SIZES,
        "model_type": "new",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "position_embedding_type": "rope",
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
        "pack_qkv": True,
        "layer_norm_type": "layer_norm",
        "rope_theta": 500.0,
        "rope_scaling": {"factor": 2.0, "type": "ntk"},
        "logn_attention_scale": False,
        "auto_map": {
            "AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
            "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
        },
    },
    "modernbert": {
        **SIZES,
        "model_type": "modernbert",
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 512,
        "local_attention": 16,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "classifier_pooling": "mean",
    },
}
"""config.json by model_type, with the fields that the published ones have."""

LONGEST = {kind: config.get("max_trained_positions", 128) for kind, config in CONFIGS.items()}
LONGEST |= {"mpnet": 514, "modernbert": 512}
"""The most tokens of a text."""

CLASSES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "mpnet": "MPNet", "new": "New"}
CLASSES |= {"modernbert": "ModernBert", "nomic_bert": "NomicBert"}
PAIRS = ("bert", "roberta", "xlm-roberta", "new", "modernbert")
"""Kinds of which cross-encoders are published."""

PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "new": "new.", "modernbert": "model."}
"""Before the names of a cross-encoder's weights, but for those of its head."""


def shapes(kind: str, config: Mapping[str, Any], pairs: bool) -> dict[str, tuple[int, ...]]:
    """The published names of the weights."""
    found: dict[str, tuple[int, ...]] = {}

    def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> None:
        found[f"{name}.weight"] = (outputs, inputs)
        if bias:
            found[f"{name}.bias"] = (outputs,)

    def norm(name: str, bias: bool = True) -> None:
        found.update({f"{name}.weight": (WIDTH,)} | ({f"{name}.bias": (WIDTH,)} if bias else {}))

    modern = kind == "modernbert"
    found[f"embeddings.{'tok' if modern else 'word'}_embeddings.weight"] = (len(VOCABULARY), WIDTH)
    if kind in ("bert", "roberta", "xlm-roberta", "mpnet"):
        found["embeddings.position_embeddings.weight"] = (config["max_position_embeddings"], WIDTH)
    if config.get("type_vocab_size"):
        found["embeddings.token_type_embeddings.weight"] = (config["type_vocab_size"], WIDTH)
    if kind == "nomic_bert":
        norm("emb_ln")
    else:
        norm("embeddings.norm" if modern else "embeddings.LayerNorm", bias=not modern)
    if kind == "mpnet":
        found["encoder.relative_attention_bias.weight"] = (32, HEADS)
    for index in range(LAYERS):
        if kind in ("bert", "roberta", "xlm-roberta", "mpnet"):
            layer, own = f"encoder.layer.{index}", kind == "mpnet"
            parts = ("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o")
            others = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
            for part in parts if own else others:
                linear(f"{layer}.{part}", WIDTH, WIDTH)
            norm(f"{layer}.attention.LayerNorm" if own else f"{layer}.attention.output.LayerNorm")
            linear(f"{layer}.intermediate.dense", WIDTH, HIDDEN)
            linear(f"{layer}.output.dense", HIDDEN, WIDTH)
            norm(f"{layer}.output.LayerNorm")
        elif kind == "nomic_bert":
            layer = f"encoder.layers.{index}"
            linear(f"{layer}.attn.Wqkv", WIDTH, 3 * WIDTH, bias=False)
            linear(f"{layer}.attn.out_proj", WIDTH, WIDTH, bias=False)
            linear(f"{layer}.mlp.fc11", WIDTH, HIDDEN, bias=False)
            linear(f"{layer}.mlp.fc12", WIDTH, HIDDEN, bias=False)
            linear(f"{layer}.mlp.fc2", HIDDEN, WIDTH, bias=False)
            norm(f"{layer}.norm1")
            norm(f"{layer}.norm2")
        elif kind == "new":
            layer = f"encoder.layer.{index}"
            linear(f"{layer}.attention.qkv_proj", WIDTH, 3 * WIDTH)
            linear(f"{layer}.attention.o_proj", WIDTH, WIDTH)
            linear(f"{layer}.mlp.up_gate_proj", WIDTH, 2 * HIDDEN, bias=False)
            linear(f"{layer}.mlp.down_proj", HIDDEN, WIDTH)
            norm(f"{layer}.attn_ln")
            norm(f"{layer}.mlp_ln")
        else:
            layer = f"layers.{index}"
            linear(f"{layer}.attn.Wqkv", WIDTH, 3 * WIDTH, bias=False)
            linear(f"{layer}.attn.Wo", WIDTH, WIDTH, bias=False)
            linear(f"{layer}.mlp.Wi", WIDTH, 2 * HIDDEN, bias=False)
            linear(f"{layer}.mlp.Wo", HIDDEN, WIDTH, bias=False)
            if index:
                norm(f"{layer}.attn_norm", bias=False)
            norm(f"{layer}.mlp_norm", bias=False)
    if modern:
        norm("final_norm", bias=False)
    if not pairs:
        if kind in ("bert", "mpnet"):
            linear("pooler.dense", WIDTH, WIDTH)  # is there, and not used for embeddings
        return found
    if kind in ("bert", "new"):
        linear("pooler.dense", WIDTH, WIDTH)
    found = {PREFIXES[kind] + name: shape for name, shape in found.items()}
    if modern:
        linear("head.dense", WIDTH, WIDTH, bias=False)
        norm("head.norm", bias=False)
    if kind in ("roberta", "xlm-roberta"):
        linear("classifier.dense", WIDTH, WIDTH)
    linear("classifier.out_proj" if kind in ("roberta", "xlm-roberta") else "classifier", WIDTH, 1)
    return found


def make_encoder(
    directory: Path,
    kind: str,
    pairs: bool = False,
    pooling: str = "mean",
    dtype: mx.Dtype = mx.float32,
    rename: Callable[[str], str] = str,
    **fields: Any,
) -> Path:
    """A model's directory. pairs: a cross-encoder. fields: of its config.json. rename: changes the names of weights."""
    directory.mkdir(parents=True, exist_ok=True)
    architecture = CLASSES[kind] + ("ForSequenceClassification" if pairs else "Model")
    config = CONFIGS[kind] | {"architectures": [architecture]} | fields
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(7)
    weights = {}
    for name, shape in shapes(kind, config, pairs).items():
        is_norm = name.lower().endswith(("norm.weight", "_ln.weight", "norm1.weight", "norm2.weight"))
        values = rng.normal(size=shape) * (0.25 if len(shape) > 1 else 0.2) + is_norm
        weights[rename(name)] = mx.array(values.astype(np.float32)).astype(dtype)
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    write_tokenizer(directory, kind)
    if not pairs:
        write_modules(directory, pooling)
    return directory


def write_modules(
    directory: Path, pooling: str = "mean", kinds: Sequence[str] = ("Transformer", "Pooling", "Normalize")
) -> None:
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))


def make_dense(path: Path, activation: str, outputs: int) -> tuple[Any, Any]:
    """Adds a layer. Returns its weight and bias."""
    write_modules(path, "mean", ("Transformer", "Pooling", "Dense", "Normalize"))
    (path / "2_Dense").mkdir()
    rng = np.random.default_rng(2)
    weight, bias = rng.normal(size=(outputs, WIDTH)).astype(np.float32), rng.normal(size=outputs).astype(np.float32)
    arrays = {"linear.weight": mx.array(weight), "linear.bias": mx.array(bias)}
    mx.save_safetensors(str(path / "2_Dense" / "model.safetensors"), arrays)
    sizes = {"in_features": WIDTH, "out_features": outputs, "bias": True}
    (path / "2_Dense" / "config.json").write_text(json.dumps(sizes | {"activation_function": activation}))
    return weight, bias


def write_tokenizer(directory: Path, kind: str) -> None:
    """BERT's word pieces. RoBERTa's kinds have no types of tokens, and two separators in a pair."""
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ids = [(token, VOCABULARY.index(token)) for token in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] [SEP] $B [SEP]" if "roberta" in kind else "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ids)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.enable_truncation(8)  # as sentence-transformers saves it; the server must not follow it
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": "[MASK]", **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(options))


def tokens_of(text: str) -> list[int]:
    """A text of known words as tokens, without the special ones."""
    return [VOCABULARY.index(word) for word in text.split()]


class Reference:
    """A model's directory, computed in float64."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.kind, self.config = kind, json.loads((directory / "config.json").read_text())
        stored: Any = mx.load(str(directory / "model.safetensors"))
        prefix = PREFIXES.get(kind, "none.")
        self.weights: Weights = {
            name.removeprefix(prefix): np.array(array.astype(mx.float32)).astype(np.float64)
            for name, array in stored.items()
        }
        self.eps = next(
            self.config[name] for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps") if name in self.config
        )

    def linear(self, x: Array, name: str) -> Array:
        out: Array = x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", np.zeros(1))
        return out

    def norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.eps)
        out: Array = scaled * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", np.zeros(1))
        return out

    def states(self, tokens: Sequence[int], second: int | None = None) -> Array:
        """[T, width]. second: where the second text of a pair begins, by the types of its tokens."""
        w, kind, count = self.weights, self.kind, len(tokens)
        x = w["embeddings.tok_embeddings.weight" if kind == "modernbert" else "embeddings.word_embeddings.weight"][
            tokens
        ]
        first = {"bert": 0, "roberta": 2, "xlm-roberta": 2, "mpnet": 2}.get(kind)
        if first is not None:
            x = x + w["embeddings.position_embeddings.weight"][first : first + count]
        if "embeddings.token_type_embeddings.weight" in w:
            types = [
                int(second is not None and self.config["type_vocab_size"] > 1 and i >= second) for i in range(count)
            ]
            x = x + w["embeddings.token_type_embeddings.weight"][types]
        names = {"nomic_bert": "emb_ln", "modernbert": "embeddings.norm"}
        x = self.norm(x, names.get(kind, "embeddings.LayerNorm"))
        for index in range(LAYERS):
            x = self.layer(x, index)
        return self.norm(x, "final_norm") if kind == "modernbert" else x

    def layer(self, x: Array, index: int) -> Array:
        if self.kind in ("bert", "roberta", "xlm-roberta", "mpnet"):
            return self.bert_layer(x, f"encoder.layer.{index}")
        if self.kind == "nomic_bert":
            name = f"encoder.layers.{index}"
            q, k, v = np.split(self.linear(x, f"{name}.attn.Wqkv"), 3, axis=-1)
            mixed = attention(rotated(q, 1000.0), rotated(k, 1000.0), v)
            x = self.norm(x + self.linear(mixed, f"{name}.attn.out_proj"), f"{name}.norm1")
            gate = self.linear(x, f"{name}.mlp.fc12")
            inner = self.linear(x, f"{name}.mlp.fc11") * gate / (1 + np.exp(-gate))
            return self.norm(x + self.linear(inner, f"{name}.mlp.fc2"), f"{name}.norm2")
        if self.kind == "new":
            name, theta = f"encoder.layer.{index}", self.config["rope_theta"]
            factor = (self.config.get("rope_scaling") or {"factor": 1.0})["factor"]
            q, k, v = np.split(self.linear(x, f"{name}.attention.qkv_proj"), 3, axis=-1)
            mixed = attention(rotated(q, theta, factor), rotated(k, theta, factor), v)
            x = self.norm(x + self.linear(mixed, f"{name}.attention.o_proj"), f"{name}.attn_ln")
            up, gate = np.split(self.linear(x, f"{name}.mlp.up_gate_proj"), 2, axis=-1)
            return self.norm(x + self.linear(gelu(gate) * up, f"{name}.mlp.down_proj"), f"{name}.mlp_ln")
        name, is_local = f"layers.{index}", index % 3 != 0
        q, k, v = np.split(
            self.linear(self.norm(x, f"{name}.attn_norm") if index else x, f"{name}.attn.Wqkv"), 3, axis=-1
        )
        theta = self.config["local_rope_theta" if is_local else "global_rope_theta"]
        far = np.abs(np.subtract.outer(np.arange(len(x)), np.arange(len(x)))) > self.config["local_attention"] // 2
        mixed = attention(rotated(q, theta), rotated(k, theta), v, np.where(far & is_local, -np.inf, 0.0))
        x = x + self.linear(mixed, f"{name}.attn.Wo")
        active, gate = np.split(self.linear(self.norm(x, f"{name}.mlp_norm"), f"{name}.mlp.Wi"), 2, axis=-1)
        return x + self.linear(gelu(active) * gate, f"{name}.mlp.Wo")

    def bert_layer(self, x: Array, name: str) -> Array:
        own = self.kind == "mpnet"
        parts = ("q", "k", "v") if own else ("query", "key", "value")
        q, k, v = (self.linear(x, f"{name}.attention.{'attn' if own else 'self'}.{part}") for part in parts)
        mixed = attention(q, k, v, self.relative_bias(len(x)) if own else 0.0)
        mixed = self.linear(mixed, f"{name}.attention.attn.o" if own else f"{name}.attention.output.dense")
        x = self.norm(x + mixed, f"{name}.attention.LayerNorm" if own else f"{name}.attention.output.LayerNorm")
        inner = gelu(self.linear(x, f"{name}.intermediate.dense"))
        return self.norm(x + self.linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def relative_bias(self, count: int) -> Array:
        """[heads, T, T]"""
        buckets = np.array([[bucket(key - query) for key in range(count)] for query in range(count)])
        return self.weights["encoder.relative_attention_bias.weight"][buckets].transpose(2, 0, 1)

    def score(self, tokens: Sequence[int], second: int) -> float:
        """Of a pair: the sigmoid of the classifier's output."""
        states, names = self.states(tokens, second), self.weights
        if self.kind == "modernbert":
            x = self.norm(gelu(self.linear(states.mean(axis=0), "head.dense")), "head.norm")
        else:
            x = np.tanh(
                self.linear(states[0], "pooler.dense" if "pooler.dense.weight" in names else "classifier.dense")
            )
        logit = self.linear(x, "classifier" if "classifier.weight" in names else "classifier.out_proj")
        return float(1 / (1 + np.exp(-logit[0])))


def attention(q: Array, k: Array, v: Array, bias: Array | float = 0.0) -> Array:
    """q, k, v[T, width] -> [T, width]. bias: of the scores, [T, T] or [heads, T, T]."""
    q, k, v = (x.reshape(len(x), HEADS, -1).transpose(1, 0, 2) for x in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]) + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed: Array = weights / weights.sum(axis=-1, keepdims=True) @ v
    return mixed.transpose(1, 0, 2).reshape(len(mixed[0]), -1)


def rotated(x: Array, theta: float, factor: float = 1.0) -> Array:
    """Element i of a head turns with element i + size / 2. factor: of NTK scaling, https://kexue.fm/archives/9706."""
    size = WIDTH // HEADS
    heads = x.reshape(len(x), HEADS, 2, size // 2)
    frequencies = (theta * factor) ** (-2 * np.arange(size // 2) / size) / factor ** (2 / size)
    angles = (np.arange(len(x))[:, None] * frequencies)[:, None]
    a, b = heads[:, :, 0], heads[:, :, 1]
    turned = np.stack([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=2)
    return turned.reshape(len(x), -1)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def bucket(distance: int) -> int:
    """Of a relative position, key minus query, as T5 has it for both directions: 32 buckets, up to 128 positions."""
    half, steps = 16, abs(distance)
    if steps >= 8:
        steps = min(8 + int(math.log(steps / 8) / math.log(128 / 8) * 8), half - 1)
    return steps + (half if distance > 0 else 0)
