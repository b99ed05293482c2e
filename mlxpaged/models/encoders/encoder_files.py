"""Reads the files of an encoder: its config.json as an `EncoderConfig`, and its weights by one set of names.

Each architecture was published with names of its own, some by several programs. Python code of a repository is never
run: what it computes is known here, or the model is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from mlxpaged.models.encoders.encoder import ACTIVATIONS, Encoder, EncoderConfig, Head, Rope
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.kinds import BERT, GTE, MODERNBERT, MPNET, NOMIC, ROBERTA, judges_pairs

LAYER_TYPES = ("sliding_attention", "full_attention")

PREFIX = re.compile(
    r"^(bert|roberta|mpnet|nomic_bert|new|gte|model)\.(?=(embeddings|encoder|layers|emb_ln|pooler|final_norm)\.)"
)

NAMES = [
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^embeddings\.(word|tok)_embeddings\.", "words."),
    (r"^embeddings\.position_embeddings\.", "positions."),
    (r"^embeddings\.token_type_embeddings\.", "types."),
    (r"^(embeddings\.(LayerNorm|norm)|emb_ln)\.", "norm."),
    (r"^encoder\.relative_attention_bias\.", "relative."),
    (r"^(encoder\.)?layers?\.(\d+)\.", r"layers.\2."),
    (r"^(layers\.\d+)\.attention\.(self|attn)\.([qkv])(uery|ey|alue)?\.", r"\1.\3."),
    (r"^(layers\.\d+)\.(attention\.qkv_proj|attn\.Wqkv)\.", r"\1.qkv."),
    (r"^(layers\.\d+)\.(attention\.(output\.dense|attn\.o|o_proj)|attn\.(out_proj|Wo))\.", r"\1.out."),
    (r"^(layers\.\d+)\.(attention\.(output\.)?LayerNorm|norm1|attn_ln|attn_norm)\.", r"\1.attention_norm."),
    (r"^(layers\.\d+)\.(output\.LayerNorm|norm2|mlp_ln)\.", r"\1.mlp_norm."),
    (r"^(layers\.\d+)\.(intermediate\.dense|mlp\.(fc1|Wi|up_gate_proj))\.", r"\1.up."),
    (r"^(layers\.\d+)\.mlp\.fc11\.", r"\1.up_half."),
    (r"^(layers\.\d+)\.mlp\.fc12\.", r"\1.gate_half."),
    (r"^(layers\.\d+)\.(output\.dense|mlp\.(fc2|Wo|down_proj))\.", r"\1.down."),
    (r"^(pooler|classifier|head)\.dense\.", "dense."),
    (r"^head\.norm\.", "dense_norm."),
    (r"^classifier\.out_proj\.", "classifier."),
]
"""Published names, and those of `Encoder`."""

JOINED = {"qkv": ("q", "k", "v"), "up": ("up_half", "gate_half")}
"""Layers of a model that files have in parts."""

UNUSED = re.compile(r"(^|\.)(position_ids|token_type_ids|inv_freq|num_batches_tracked)$|(^|\.)rotary_emb\.")
OTHER_HEADS = re.compile(r"^(cls|lm_head|decoder|qa_outputs)\.")
OWN_HEAD = re.compile(r"^(dense|dense_norm|classifier|pooler|head)\.")


class Fields:
    """The fields of a config.json, checked as they are read. Each method raises UnsupportedModelError."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there: a number above 0, or of 0 if that is the default."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                if type(value) is int and value >= (default != 0):
                    return value
                raise UnsupportedModelError(f"its config.json has {name} {value!r}, which is no size")
        if default is None:
            raise UnsupportedModelError(f"its config.json has no {names[0]}")
        return default

    def number(self, *names: str, default: float) -> float:
        for name in names:
            value = self.config.get(name)
            if value is not None:
                if isinstance(value, (int, float)) and value > 0:
                    return float(value)
                raise UnsupportedModelError(f"its config.json has {name} {value!r}, which is no number above 0")
        return default

    def activation(self, *names: str, default: str) -> str:
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise UnsupportedModelError(f"its activation is {value!r}; only {', '.join(ACTIVATIONS)} are supported")
        return value

    def require(self, name: str, *allowed: object) -> None:
        """Raises UnsupportedModelError if the field is there with a value that is not computed here."""
        value = self.config.get(name, allowed[0])
        if value not in allowed:
            raise UnsupportedModelError(f"its config.json has {name} {value!r}; only {allowed[0]!r} is supported")


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Raises UnsupportedModelError if the config asks for something that is not computed here."""
    kind, fields = config.get("model_type"), Fields(config)
    head = None
    if judges_pairs(config):
        is_modern = kind in MODERNBERT
        head = Head(
            activation=fields.activation("classifier_activation", default="gelu") if is_modern else "tanh",
            norm=is_modern,
            bias=not is_modern or bool(config.get("classifier_bias")),
            squashes=squashes(config),
        )
    num_layers = fields.size("num_hidden_layers", "n_layer")
    own = OF_KIND[next(kinds for kinds in OF_KIND if kind in kinds)](fields, num_layers)
    found = EncoderConfig(
        vocab_size=fields.size("vocab_size"),
        width=fields.size("hidden_size", "n_embd"),
        num_layers=num_layers,
        num_heads=fields.size("num_attention_heads", "n_head"),
        hidden=fields.size("intermediate_size", "n_inner"),
        head=head,
        **own,
    )
    if found.width % found.num_heads:
        raise UnsupportedModelError(f"its {found.num_heads} heads cannot divide states of {found.width} elements")
    if found.max_tokens < 1:
        raise UnsupportedModelError("its config.json has no positions for tokens")
    return found


def squashes(config: Mapping[str, Any]) -> bool:
    """Whether sentence-transformers' CrossEncoder applies a sigmoid. Raises UnsupportedModelError."""
    own = config.get("sentence_transformers")
    stated = own.get("activation_fn") if isinstance(own, dict) else None
    stated = stated or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    name = str(stated).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise UnsupportedModelError(f"its scores are made by {name}; only Sigmoid and Identity are supported")
    return name == "Sigmoid"


ALL_BIASED = frozenset({"qkv", "out", "up", "down", "norm"})


def of_bert(fields: Fields, num_layers: int) -> dict[str, Any]:
    fields.require("position_embedding_type", "absolute")
    kind, config = fields.config.get("model_type"), fields.config
    first = 0 if kind in BERT else 2
    if kind in ROBERTA and config.get("pad_token_id", 1) != 1:
        first = fields.size("pad_token_id", default=0) + 1
    # RoBERTa counts positions from the row after that of the padding token (fairseq, make_positions).
    return {
        "max_tokens": fields.size("max_position_embeddings") - first,
        "eps": fields.number("layer_norm_eps", default=1e-12 if kind in BERT or kind in MPNET else 1e-5),
        "activation": fields.activation("hidden_act", default="gelu"),
        "biased": ALL_BIASED,
        "ropes": [None] * num_layers,
        "windows": [None] * num_layers,
        "num_types": 0 if kind in MPNET else fields.size("type_vocab_size", default=2 if kind in BERT else 1),
        "first_position": first,
        "num_buckets": fields.size("relative_attention_num_buckets", default=32) if kind in MPNET else 0,
    }


def of_nomic(fields: Fields, num_layers: int) -> dict[str, Any]:
    for name, value in (("prenorm", False), ("rotary_emb_interleaved", False), ("rotary_emb_fraction", 1.0)):
        fields.require(name, value)
    for name in ("use_rms_norm", "parallel_block", "causal"):
        fields.require(name, False, None)
    fields.require("rotary_emb_scale_base", None)
    fields.require("num_experts", 0, None)
    fields.require("activation_function", "swiglu")
    biased = {"norm"}
    for name, layers in (("qkv_proj_bias", {"qkv", "out"}), ("mlp_fc1_bias", {"up"}), ("mlp_fc2_bias", {"down"})):
        # transformers has no biases, and no field for them.
        biased |= layers if fields.config.get(name, False) else set()
    rope = rope_of(fields, ("rotary_emb_base",), 1000.0)
    return {
        # Longer texts need a rotary scaling that the authors leave off by default.
        "max_tokens": fields.size("max_trained_positions", "max_position_embeddings", "n_positions"),
        "eps": fields.number("layer_norm_epsilon", "layer_norm_eps", default=1e-12),
        "activation": fields.activation("hidden_act", default="silu"),
        "biased": frozenset(biased),
        "ropes": [rope] * num_layers,
        "windows": [None] * num_layers,
        "num_types": fields.size("type_vocab_size", default=0),
        "gate": 1,
    }


def of_gte(fields: Fields, num_layers: int) -> dict[str, Any]:
    fields.require("position_embedding_type", "rope")
    fields.require("layer_norm_type", "layer_norm")
    fields.require("pack_qkv", True)
    fields.require("logn_attention_scale", False)
    rope = rope_of(fields, ("rope_theta",), 10_000.0 if "rope_parameters" not in fields.config else 160_000.0)
    return {
        "max_tokens": fields.size("max_position_embeddings"),
        "eps": fields.number("layer_norm_eps", default=1e-12),
        "activation": fields.activation("hidden_act", default="gelu"),
        "biased": frozenset({"qkv", "out", "down", "norm"}),
        "ropes": [rope] * num_layers,
        "windows": [None] * num_layers,
        "num_types": fields.size("type_vocab_size", default=0),
        "gate": 1,
    }


def of_modernbert(fields: Fields, num_layers: int) -> dict[str, Any]:
    config, every = fields.config, fields.size("global_attn_every_n_layers", default=3)
    kinds = config.get("layer_types") or [
        "sliding_attention" if index % every else "full_attention" for index in range(num_layers)
    ]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise UnsupportedModelError(
            f"its config.json does not have one of two layer_types for each of {num_layers} layers"
        )
    is_local = [kind == "sliding_attention" for kind in kinds]
    whole = rope_of(fields, ("global_rope_theta",), 160_000.0, "full_attention")
    local = rope_of(fields, ("local_rope_theta",), 10_000.0, "sliding_attention")
    biased = {"qkv", "out"} if config.get("attention_bias") else set()
    biased |= ({"up", "down"} if config.get("mlp_bias") else set()) | ({"norm"} if config.get("norm_bias") else set())
    window = fields.size("local_attention", default=128) // 2
    return {
        "max_tokens": fields.size("max_position_embeddings"),
        "eps": fields.number("norm_eps", default=1e-5),
        "activation": fields.activation("hidden_activation", default="gelu"),
        "biased": frozenset(biased),
        "ropes": [local if each else whole for each in is_local],
        "windows": [window if each else None for each in is_local],
        "gate": 0,
        "norms_first": True,
    }


OF_KIND = {BERT | ROBERTA | MPNET: of_bert, NOMIC: of_nomic, GTE: of_gte, MODERNBERT: of_modernbert}
"""What reads the fields of an architecture."""


def rope_of(fields: Fields, names: Iterable[str], default: float, layer_type: str | None = None) -> Rope:
    """names: of the field with the base. transformers writes `rope_parameters` since version 5, by layer type if the
    layers differ."""
    parameters = fields.config.get("rope_parameters") or {}
    if layer_type is not None and isinstance(parameters, dict):
        parameters = parameters.get(layer_type) or {}
    scaling = fields.config.get("rope_scaling") or parameters
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        raise UnsupportedModelError("the rotary positions in its config.json are no object")
    base = Fields(parameters).number("rope_theta", default=fields.number(*names, default=default))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(base)
    if kind == "ntk" and scaling.get("mixed_b") is None:
        return Rope(base, Fields(scaling).number("factor", default=1.0))
    raise UnsupportedModelError(f"its rotary positions are scaled by {kind!r}; only 'ntk' is supported")


def canonical(name: str) -> str:
    """The name that `Encoder` has for a published name."""
    name = PREFIX.sub("", name)
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def canonical_weights(published: Mapping[str, mx.array], config: EncoderConfig) -> dict[str, mx.array]:
    """The weights by the names of `Encoder`, without those of heads that are not used. Raises UnsupportedModelError."""
    found: dict[str, mx.array] = {}
    for name, array in published.items():
        ours = canonical(name)
        is_left_out = UNUSED.search(name) or OTHER_HEADS.match(name) or (OWN_HEAD.match(ours) and config.head is None)
        if not is_left_out:
            if ours in found:
                raise UnsupportedModelError(f"its weights have {ours} twice, the second time as {name}")
            found[ours] = array
    for index in range(config.num_layers):
        for joint, parts in JOINED.items():
            for kind in ("weight", "bias", "scales", "biases"):
                names = [f"layers.{index}.{part}.{kind}" for part in parts]
                if all(name in found for name in names):
                    found[f"layers.{index}.{joint}.{kind}"] = mx.concatenate([found.pop(name) for name in names])
    return found


def load_encoder(config: Mapping[str, Any], published: Mapping[str, mx.array]) -> Encoder:
    """The encoder with weights that are not read yet. published: the tensors of its files. Raises UnsupportedModelError
    if they are not those of its config, and any exception of MLX."""
    sizes = read_config(config)
    weights = canonical_weights(published, sizes)
    model = Encoder(sizes)
    quantize_like(model, weights, config)
    expected = dict(tree_flatten(model.parameters()))
    for what, names in (("lack", expected.keys() - weights.keys()), ("also have", weights.keys() - expected.keys())):
        if names:
            first, *others = sorted(names)
            more = f" and {len(others)} more" if others else ""
            raise UnsupportedModelError(f"its weights {what} {first}{more}, by its config.json")
    for name, array in weights.items():
        if array.shape != expected[name].shape:
            raise UnsupportedModelError(
                f"its weights have {name} of {list(array.shape)}, but {list(expected[name].shape)} by its config.json"
            )
    model.load_weights(list(weights.items()))
    return model


def quantize_like(model: Encoder, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> None:
    """Let the layers take quantized weights if the files have such. Raises UnsupportedModelError."""
    if not any(name.endswith(".scales") for name in weights):
        return
    stated = config.get("quantization") or {}
    if stated.get("mode", "affine") != "affine":
        raise UnsupportedModelError(f"its weights are quantized as {stated['mode']!r}; only 'affine' is supported")
    options = Fields(stated).size("group_size", default=64), Fields(stated).size("bits", default=8)
    quantize(model, *options, class_predicate=lambda path, module: f"{path}.scales" in weights)
