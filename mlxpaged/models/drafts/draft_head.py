"""The multi-token prediction of a checkpoint: one layer that predicts the token after the next one.

It makes its input of the model's hidden state at a position and the embedding of the next token, and shares embedding
and output head with the model (DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3.5, GLM-4.5 and Nemotron 3 have one
too). mlx-lm leaves these tensors out. What counts is whether they are there: many configurations name layers that a
conversion has dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.base import create_attention_mask

from mlxpaged.models.drafts.draft_assistant import Assistant, is_assistant, load_assistant
from mlxpaged.models.encoders.embedding import weight_bytes
from mlxpaged.models.errors import UnsupportedModelError, in_one_line
from mlxpaged.models.files.weights import quantization
from mlxpaged.models.layers import KV, LayerSpec
from mlxpaged.models.sources.model_files import ModelFiles


class Names(NamedTuple):
    """What a family calls the tensors of its draft head. prefix: of all, with the model's number of layers. parts:
    those of DraftHead, by name. layer: of the decoder layer's. shifts_norms: whether the scales of norms are stored
    less one, until a conversion to MLX adds it."""

    prefix: str
    parts: Mapping[str, str]
    layer: str = ""
    shifts_norms: bool = False


QWEN = {
    "fc": "projection",
    "pre_fc_norm_embedding": "norm_embedding",
    "pre_fc_norm_hidden": "norm_hidden",
    "norm": "norm",
}
DEEPSEEK = {"eh_proj": "projection", "enorm": "norm_embedding", "hnorm": "norm_hidden", "shared_head.norm": "norm"}
FAMILIES = (Names("mtp.", QWEN, "layers.0.", shifts_norms=True), Names("model.layers.{}.", DEEPSEEK))
"""The names of Qwen3-Next, Qwen3.5 and later, and those of DeepSeek V3 and of GLM-4.5 and later."""

SHARED = ("embed_tokens.", "shared_head.head.")
"""Copies of the model's own tensors."""

LAYER = re.compile(r"(^|\.)layers\.\d+$")


NEMOTRON = DEEPSEEK | {"final_layernorm": "norm"}
"""The names of Nemotron 3, after the number of a block: the first block joins the inputs, the last has the norm."""


class Blocks(Module):
    """A decoder layer of blocks with one mixer each, as Nemotron has them. One of them, at most, attends."""

    def __init__(self, blocks: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = blocks

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        for block in self.blocks:
            x = block(x, mask=mask, cache=cache if block.block_type == "*" else None)
        return x


class DraftHead(Module):
    """layer: a decoder layer of the model's kind."""

    def __init__(self, layer: Module, hidden_size: int, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.projection = Linear(2 * hidden_size, hidden_size, bias=False)
        self.norm_embedding = RMSNorm(hidden_size, eps)
        self.norm_hidden = RMSNorm(hidden_size, eps)
        self.layer = layer
        self.norm = RMSNorm(hidden_size, eps)

    def __call__(self, embedding: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """The hidden states [T, 1, D] for the output head. embedding[T, 1, D]: of the next tokens. hidden[T, 1, D]: the
        model's input of its output head, or for a further draft, what this returned."""
        joined = mx.concatenate([self.norm_embedding(embedding), self.norm_hidden(hidden)], axis=-1)
        x = self.projection(joined)
        return self.norm(self.layer(x, create_attention_mask(x, cache), cache))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Mtp:
    """A draft head that is loaded. embed: the model's embedding of tokens. index: of the model's layer that its own is
    like. nbytes: of its weights. num_kv_heads: of its layer, whole as it is on one of several ranks, too."""

    head: DraftHead
    embed: Module
    index: int
    nbytes: int
    num_kv_heads: int

    @property
    def bytes_read(self) -> int:
        """For a draft: its own weights and the output head, which is as large as the embedding."""
        return self.nbytes + weight_bytes(self.embed)

    def __call__(self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any]) -> mx.array:
        """Hidden states [T, 1, D] for the output head and for a further draft. tokens[T]: each after the token that
        hidden[T, 1, D] is of. caches: the last one is its own."""
        embedding: Any = self.embed(tokens[:, None])
        return self.head(embedding, hidden, caches[-1])

    further = __call__
    project = None  # the model's output head does it

    def specs(self, layers: Sequence[LayerSpec], num_ranks: int = 1) -> list[LayerSpec] | None:
        """What its layer keeps; None if the model's layer keeps anything but blocks of keys and values. layers: of one
        of so many ranks."""
        like = layers[self.index]
        if not isinstance(like, KV):
            return None
        heads = like.num_kv_heads if like.latent or num_ranks == 1 else self.num_kv_heads
        like = replace(like, num_kv_heads=heads, num_query_heads=like.num_query_heads * num_ranks)
        return [replace(like, qkv=None, quantization=None, mutual=False)]


class Part(NamedTuple):
    """A module of a model, by its name."""

    name: str
    module: Any


def load_mtp(model: Module, files: ModelFiles) -> Mtp | Assistant:
    """The draft head in the weights, which are not read yet. It may be there alone: then its tensors have no prefix. Or
    the files are those of an assistant. model: as mlx-lm has loaded it. Raises UnsupportedModelError, with the reason
    if there is none."""
    try:
        return load_assistant(model, files) if is_assistant(files) else _load(model, files)
    except UnsupportedModelError:
        raise
    except Exception as error:  # mlx and mlx-lm raise any type for tensors that do not fit
        raise UnsupportedModelError(f"its draft head cannot be loaded: {in_one_line(error)}") from error


def _load(model: Any, files: ModelFiles) -> Mtp:
    parts = [Part(*each) for each in model.named_modules()]
    like = [each for each in parts if LAYER.search(each.name) and hasattr(each.module, "self_attn")]
    embed = next((each.module for each in parts if each.name.endswith("embed_tokens")), None)
    args = next((a for each in parts if hasattr(a := getattr(each.module, "args", None), "hidden_size")), None)
    if hasattr(args, "hybrid_override_pattern"):
        return _load_nemotron(model, args, files)
    if not like or embed is None or args is None:
        raise UnsupportedModelError("models of this kind have no draft head that is known")
    index, layer = max((int(each.name.rpartition(".")[2]), each) for each in like)
    for family, prefix in [(each, prefix) for each in FAMILIES for prefix in (each.prefix, "")]:
        found, is_converted = read_tensors(files, prefix.format(args.num_hidden_layers))
        if any(name.rpartition(".")[0] in family.parts for name in found):
            break
    else:
        raise UnsupportedModelError("it has no draft head")
    shift = 1.0 if family.shifts_norms and not is_converted else 0.0
    weights: dict[str, mx.array] = {}
    of_layer: dict[str, mx.array] = {}
    for name, array in found.items():
        module, _, kind = name.rpartition(".")
        if name.startswith(SHARED):
            continue
        if module in family.parts:
            part = family.parts[module]
            weights[f"{part}.{kind}"] = array + shift if part != "projection" else array
        else:
            of_layer[f"{layer.name}.{name.removeprefix(family.layer)}"] = array
    if shift:  # a convolution that is not converted shows Qwen3.5's `sanitize` that norms are not either
        of_layer[f"{layer.name}.conv1d.weight"] = mx.zeros((1, 1, 2))
    for name, array in model.sanitize(of_layer).items():
        if not name.endswith((".conv1d.weight", ".rotary_emb.inv_freq")):
            weights[f"layer.{name.removeprefix(layer.name + '.')}"] = array
    head = DraftHead(type(layer.module)(args, index), args.hidden_size, args.rms_norm_eps)
    return Mtp(with_weights(head, weights), embed, index, weight_bytes(head), args.num_key_value_heads)


def _load_nemotron(model: Any, args: Any, files: ModelFiles) -> Mtp:
    """Which mixers the blocks have, and in which order, is seen by their tensors."""
    tensors = [read_tensors(files, prefix)[0] for prefix in ("mtp.layers.", "layers.")]
    found = next((own for own in tensors if "0.eh_proj.weight" in own), None)
    if found is None:
        raise UnsupportedModelError("it has no draft head")
    weights: dict[str, mx.array] = {}
    of_blocks: dict[str, mx.array] = {}
    kinds: dict[int, str] = {}
    for name, array in found.items():
        number, _, rest = name.partition(".")
        module, _, kind = rest.rpartition(".")
        if rest.startswith(SHARED):
            continue
        if module in NEMOTRON:
            weights[f"{NEMOTRON[module]}.{kind}"] = array
            continue
        of_blocks[f"backbone.layers.{name}"] = array
        mixer = "*" if module == "mixer.q_proj" else "E" if module == "mixer.gate" else ""
        kinds[int(number)] = mixer or kinds.get(int(number), "-")
    for name, array in model.sanitize(of_blocks).items():
        weights[f"layer.{name.replace('backbone.layers', 'blocks', 1)}"] = array
    pattern = [kinds[number] for number in sorted(kinds)]
    keeping = [kind for kind in args.hybrid_override_pattern if kind in "M*"]
    if pattern.count("*") != 1 or "*" not in keeping:
        raise UnsupportedModelError(f"its draft head has the blocks {''.join(pattern)}, of which one must attend")
    block = type(model.layers[0])
    head = DraftHead(Blocks([block(args, kind) for kind in pattern]), args.hidden_size, args.layer_norm_epsilon)
    embed, index = model.backbone.embeddings, keeping.index("*")
    return Mtp(with_weights(head, weights), embed, index, weight_bytes(head), args.num_key_value_heads)


def with_weights(head: DraftHead, weights: Mapping[str, mx.array]) -> DraftHead:
    quantize(head, class_predicate=partial(quantization, weights=weights))
    head.load_weights(list(weights.items()))
    head.eval()
    return head


def read_tensors(files: ModelFiles, prefix: str) -> tuple[dict[str, mx.array], bool]:
    """The tensors whose names begin with a prefix, without it, and whether MLX has written one of their files."""
    found: dict[str, mx.array] = {}
    is_converted = False
    for arrays, by_mlx in files.stored():
        own = {name.removeprefix("language_model."): array for name, array in arrays.items()}
        own = {name.removeprefix(prefix): array for name, array in own.items() if name.startswith(prefix)}
        found |= own
        is_converted |= bool(own) and by_mlx
    return found, is_converted
