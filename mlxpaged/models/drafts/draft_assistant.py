"""Gemma 4's assistants: small models that draft with the keys and values of a Gemma 4 model.

An assistant has no keys and values of its own. Its layers attend to those of the model's last layers that write some,
one of each type. It makes its input of the embedding of the newest token and of the model's hidden state before that
token, and all drafts of a step have the position of that token (ai.google.dev/gemma/docs/mtp). Those of E2B and E4B
choose clusters of the vocabulary first, and only the tokens of the best clusters have logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize

from mlxpaged.attention.layer import PagedLayer
from mlxpaged.models.encoders.embedding import weight_bytes
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.json_files import model_config
from mlxpaged.models.files.weights import quantization
from mlxpaged.models.layers import LayerSpec
from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.sources.preflight import ASSISTANTS


def is_assistant(files: ModelFiles) -> bool:
    """Whether the files are those of an assistant. A draft head may have no config."""
    return model_config(files.directory, missing_is_empty=True).get("model_type") in ASSISTANTS


class Text(Module):
    """The layers of an assistant, with the names that its files have."""

    def __init__(self, args: Any, layer: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed_tokens = Embedding(args.vocab_size, args.hidden_size)
        self.layers = [layer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps)


class Clusters(Module):
    """The choice of the tokens that have logits. token_ordering[V]: the tokens of the first cluster, then those of the
    next one. All have equally many. num_best: clusters that are chosen."""

    def __init__(self, hidden_size: int, vocab_size: int, num_clusters: int, num_best: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.centroids = Linear(hidden_size, num_clusters, bias=False)
        self.token_ordering = mx.arange(vocab_size, dtype=mx.int32)
        self.num_best = num_best

    def __call__(self, hidden: mx.array) -> mx.array:
        """The chosen tokens [T, C] for hidden states [T, D]."""
        scores = self.centroids(hidden)
        best = mx.argpartition(-scores, kth=self.num_best - 1, axis=-1)[:, : self.num_best]
        return self.token_ordering.reshape(scores.shape[-1], -1)[best].flatten(1)


class AssistantModel(Module):
    def __init__(self, config: Mapping[str, Any], args: Any, layer: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        outer = int(config["backbone_hidden_size"])
        self.model = Text(args, layer)
        self.pre_projection = Linear(2 * outer, args.hidden_size, bias=False)
        self.post_projection = Linear(args.hidden_size, outer, bias=False)
        if config.get("use_ordered_embeddings"):
            sizes = int(config.get("num_centroids", 2048)), int(config.get("centroid_intermediate_top_k", 32))
            self.masked_embedding = Clusters(args.hidden_size, args.vocab_size, *sizes)

    @property
    def clusters(self) -> Clusters | None:
        return self.get("masked_embedding")

    def logits(self, hidden: mx.array) -> mx.array:
        """[T, V] of hidden states [T, D]. Tokens that are not chosen have -inf."""
        embed = self.model.embed_tokens
        if self.clusters is None:
            return embed.as_linear(hidden)  # type: ignore[no-any-return]
        chosen = self.clusters(hidden)
        scores = (embed(chosen) @ hidden[:, :, None]).squeeze(-1)
        none = mx.full((len(hidden), self.clusters.token_ordering.size), -mx.inf, scores.dtype)
        return mx.put_along_axis(none, chosen, scores, axis=-1)


@dataclass(frozen=True)
class Assistant:
    """An assistant that is loaded. embed: the model's embedding of tokens, and its scale. sources: the index of the
    model's layer whose keys and values each of its layers reads. nbytes: of its weights. bytes_read: for a draft."""

    head: AssistantModel
    embed: Any
    scale: float
    sources: Sequence[int]
    nbytes: int

    @property
    def bytes_read(self) -> int:
        clusters, embed = self.head.clusters, self.head.model.embed_tokens
        if clusters is None:
            return self.nbytes
        share = 1 - clusters.num_best / clusters.centroids.weight.shape[0]
        return self.nbytes - int(share * weight_bytes(embed))

    def __call__(self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any]) -> mx.array:
        """Hidden states [T, 1, D] for `project` and `further`. tokens[T]: each after the token that hidden[T, 1, O] is
        of, the model's input of its output head. caches: the model's, which are read only."""
        embedding = self.embed(tokens[:, None]) * self.scale
        x = self.head.pre_projection(mx.concatenate([embedding, hidden], axis=-1))
        for layer, source in zip(self.head.model.layers, self.sources, strict=True):
            cache: PagedLayer = caches[source]
            x, _, _ = layer(x, shared_kv=cache.earlier(), offset=cache.offset + 1)
        return self.head.model.norm(x)  # type: ignore[no-any-return]

    def further(self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any]) -> mx.array:
        """The next draft's hidden states. tokens[T]: the drafts that were made of hidden[T, 1, D]."""
        return self(tokens, self.head.post_projection(hidden), caches)

    def project(self, hidden: mx.array) -> mx.array:
        """Logits [T, 1, V]."""
        return self.head.logits(hidden[:, -1])[:, None]

    def specs(self, layers: Sequence[LayerSpec], num_ranks: int = 1) -> list[LayerSpec]:
        """It keeps nothing."""
        return []


def load_assistant(model: Module, files: ModelFiles) -> Assistant:
    """The assistant in these files, whose weights are not read yet. model: as mlx-lm has loaded it. Raises
    UnsupportedModelError if it is not one of the model's, and any exception if its files are damaged."""
    from mlx_lm.models.gemma4_text import DecoderLayer, Gemma4TextModel, ModelArgs

    text: Any = next((module for _, module in model.named_modules() if isinstance(module, Gemma4TextModel)), None)
    if text is None:
        raise UnsupportedModelError("it is an assistant of Gemma 4")
    config = files.config
    own = config["text_config"]
    args = ModelArgs.from_dict(own | {"num_kv_shared_layers": own["num_hidden_layers"]})
    theirs = text.config
    sizes = (
        ("hidden size", config.get("backbone_hidden_size"), theirs.hidden_size),
        ("vocabulary", args.vocab_size, theirs.vocab_size),
        ("head size", args.head_dim, theirs.head_dim),
        ("global head size", args.global_head_dim, theirs.global_head_dim),
        ("window", args.sliding_window, theirs.sliding_window),
    )
    for name, found, needed in sizes:
        if found != needed:
            raise UnsupportedModelError(f"it is an assistant of another model: its {name} is {found}, not {needed}")
    writing = theirs.layer_types[: theirs.num_hidden_layers - theirs.num_kv_shared_layers]
    last = {kind: index for index, kind in enumerate(writing)}
    weights = files.tensors()
    weights.pop("lm_head.weight", None)  # a copy of the embedding
    ordering = weights.get("masked_embedding.token_ordering")
    if ordering is not None:
        weights["masked_embedding.token_ordering"] = ordering.astype(mx.int32)
    head = AssistantModel(config, args, DecoderLayer)
    if head.clusters is not None and args.vocab_size % head.clusters.centroids.weight.shape[0]:
        raise UnsupportedModelError("the clusters of its vocabulary are not equally large")
    quantize(head, class_predicate=partial(quantization, weights=weights))
    head.load_weights(list(weights.items()))
    head.eval()
    sources = [last[kind] for kind in args.layer_types]
    return Assistant(head, text.embed_tokens, float(text.embed_scale), sources, weight_bytes(head))
