"""Random draft heads for tiny models, and what they draft with mlx-lm's own caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model as load_plain_model

from tests.models.architectures import make_architecture, random_weights

QWEN = {
    "projection": "mtp.fc",
    "embedding": "mtp.pre_fc_norm_embedding",
    "hidden": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0",
}
DEEPSEEK = {
    "projection": "model.layers.{}.eh_proj",
    "embedding": "model.layers.{}.enorm",
    "hidden": "model.layers.{}.hnorm",
    "norm": "model.layers.{}.shared_head.norm",
    "layer": "model.layers.{}",
}
NEMOTRON = {
    "projection": "mtp.layers.0.eh_proj",
    "embedding": "mtp.layers.0.enorm",
    "hidden": "mtp.layers.0.hnorm",
    "norm": "mtp.layers.1.final_layernorm",
    "layer": "mtp",
}
"""Names of the parts in the files of each family."""


class Blocks(nn.Module):  # type: ignore[name-defined]
    """A block that attends, and one with experts."""

    def __init__(self, block: Any, args: Any) -> None:
        super().__init__()
        self.layers = [block(args, "*"), block(args, "E")]

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        return self.layers[1](self.layers[0](x, mask=mask, cache=cache))


class Head(nn.Module):  # type: ignore[name-defined]
    """A draft head for one contiguous sequence."""

    def __init__(self, layer: Any, size: int, eps: float) -> None:
        super().__init__()
        self.projection = nn.Linear(2 * size, size, bias=False)  # type: ignore[attr-defined]
        self.embedding, self.hidden, self.norm = (
            nn.RMSNorm(size, eps)  # type: ignore[attr-defined]
            for _ in range(3)
        )
        self.layer = layer

    def __call__(self, embedding: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        x = self.projection(mx.concatenate([self.embedding(embedding), self.hidden(hidden)], axis=-1))
        return self.norm(self.layer(x, create_attention_mask(x, cache, return_array=True), cache))


class Reference:
    """mlx-lm's model of a directory, with a random draft head."""

    method, mtp, has_clusters = "by_head", None, False

    def __init__(self, path: Path, names: dict[str, str]) -> None:
        self.path = path
        model: Any = load_plain_model(path)[0]
        self._text = getattr(model, "language_model", model)
        self._body = self._text.backbone if names is NEMOTRON else self._text.model
        layers, args = self._body.layers, self._text.args
        mx.random.seed(7)
        if names is NEMOTRON:
            layer, eps = Blocks(type(layers[0]), args), args.layer_norm_epsilon
        else:
            index = max(i for i, layer in enumerate(layers) if hasattr(layer, "self_attn"))
            layer, eps = type(layers[index])(args, index), args.rms_norm_eps
        self._head = Head(layer, args.hidden_size, eps)
        weights: Any = random_weights(dict(tree_flatten(self._head)), 1.0)
        self._head.update(tree_unflatten(list(weights.items())))
        self.tensors = {}
        for name, array in weights.items():
            part, _, rest = name.partition(".")
            self.tensors[f"{names[part].format(len(layers))}.{rest}"] = array

    def save(self, **metadata: str) -> None:
        """Write the head's tensors beside the model's."""
        mx.save_safetensors(str(self.path / "model-head.safetensors"), self.tensors, metadata)

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The tokens that the head expects after these."""
        embed, cache = getattr(self._body, "embed_tokens", None) or self._body.embeddings, KVCache()
        is_tied = getattr(self._text.args, "tie_word_embeddings", False)
        hidden, following, drafts = self._body(mx.array([tokens]))[:, :-1], tokens[1:], list[int]()
        for _ in range(count):
            hidden = self._head(embed(mx.array([following])), hidden, cache)[:, -1:]
            logits = embed.as_linear(hidden) if is_tied else self._text.lm_head(hidden)
            following = [int(mx.argmax(logits[0, -1]))]
            drafts += following
        return drafts


def make_drafting(directory: Path, name: str, **changes: Any) -> Reference:
    """A model directory of an architecture with a draft head, as MLX stores it. changes: of its configuration."""
    names = NEMOTRON if name == "nemotron_h" else QWEN if name.startswith("qwen") else DEEPSEEK
    reference = Reference(make_architecture(directory, name, **changes), names)
    reference.save(format="mlx")
    return reference
