"""Random assistants for tiny Gemma 4 models, and what they draft after a contiguous sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs
from mlx_lm.utils import load_model as load_plain_model

from tests.models.architectures import FULL, GEMMA4, SLIDING, VOCAB_SIZE, make_architecture, random_weights
from tests.support import SMALL

NUM_CLUSTERS, NUM_BEST = 32, 8

TEXT = (
    SMALL
    | {key: GEMMA4[key] for key in ("head_dim", "global_head_dim", "sliding_window", "rope_parameters")}
    | {
        "model_type": "gemma4_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "layer_types": [SLIDING, SLIDING, FULL],
    }
)


class Inner(nn.Module):  # type: ignore[name-defined]
    def __init__(self, args: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)  # type: ignore[attr-defined]
        self.layers = [DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)  # type: ignore[attr-defined]


class Outer(nn.Module):  # type: ignore[name-defined]
    """The parts of an assistant, with the names of its file."""

    def __init__(self, args: Any, outer: int, has_clusters: bool) -> None:
        super().__init__()
        self.model = Inner(args)
        self.pre_projection = nn.Linear(2 * outer, args.hidden_size, bias=False)  # type: ignore[attr-defined]
        self.post_projection = nn.Linear(args.hidden_size, outer, bias=False)  # type: ignore[attr-defined]
        if has_clusters:
            self.masked_embedding = nn.Module()  # type: ignore[attr-defined]
            self.masked_embedding.centroids = nn.Linear(args.hidden_size, NUM_CLUSTERS, bias=False)  # type: ignore[attr-defined]


class AssistantReference:
    """mlx-lm's model of a directory, with a random assistant in another one. The model has two layers that read the
    keys and values of others, so its last ones that write some are not its last ones."""

    method = "by_assistant"

    def __init__(self, path: Path, has_clusters: bool, dtype: mx.Dtype = mx.float32) -> None:
        self.path, self.mtp = path, str(path.parent / "assistant")
        self.has_clusters = has_clusters
        model: Any = load_plain_model(path)[0]
        self._text = model.language_model
        mx.random.seed(7)
        outer = self._text.args.hidden_size
        self._own = Outer(ModelArgs.from_dict(TEXT), outer, has_clusters)
        weights: Any = random_weights(dict(tree_flatten(self._own)), 1.0)
        weights["model.embed_tokens.weight"] *= 0.1
        self._own.update(tree_unflatten(list(weights.items())))
        self._ordering = mx.random.permutation(VOCAB_SIZE).astype(mx.int64) if has_clusters else None
        Path(self.mtp).mkdir()
        tensors = {"lm_head.weight": weights["model.embed_tokens.weight"], **weights}
        if self._ordering is not None:
            tensors["masked_embedding.token_ordering"] = self._ordering
        mx.save_safetensors(f"{self.mtp}/model.safetensors", tensors)
        self.config: dict[str, Any] = {
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": outer,
            "use_ordered_embeddings": has_clusters,
            "num_centroids": NUM_CLUSTERS,
            "centroid_intermediate_top_k": NUM_BEST,
            "tie_word_embeddings": True,
            "text_config": TEXT,
        }
        self.save()

    def save(self) -> None:
        """Write the configuration."""
        (Path(self.mtp) / "config.json").write_text(json.dumps(self.config))

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The tokens that the assistant expects after these, of which the last one is not computed yet."""
        text, own = self._text.model, self._own
        caches = [KVCache() for _ in self._text.make_cache()]
        hidden = text(mx.array([tokens[:-1]]), cache=caches)[:, -1:]
        read = {}
        for cache, kind in zip(caches, self._text.args.layer_types, strict=False):
            first = max(0, cache.offset - GEMMA4["sliding_window"]) if kind == SLIDING else 0
            assert cache.keys is not None
            assert cache.values is not None
            read[kind] = cache.keys[:, :, first : cache.offset], cache.values[:, :, first : cache.offset]
        found, following = list[int](), tokens[-1]
        for _ in range(count):
            x = mx.concatenate([text.embed_tokens(mx.array([[following]])) * text.embed_scale, hidden], axis=-1)
            x = own.pre_projection(x)
            for layer in own.model.layers:
                x, _, _ = layer(x, shared_kv=read[layer.layer_type], offset=len(tokens) - 1)
            x = own.model.norm(x)
            scores = own.model.embed_tokens.as_linear(x)[0, 0]
            if self._ordering is not None:
                best = mx.argsort(own.masked_embedding.centroids(x)[0, 0])[-NUM_BEST:]
                chosen = self._ordering.reshape(NUM_CLUSTERS, -1)[best].flatten()
                following = int(chosen[mx.argmax(scores[chosen])])
            else:
                following = int(mx.argmax(scores))
            found.append(following)
            hidden = own.post_projection(x)
        return found


def make_assistant(directory: Path, has_clusters: bool) -> AssistantReference:
    """A Gemma 4 model with an assistant beside it."""
    return AssistantReference(make_architecture(directory, "gemma4"), has_clusters)
