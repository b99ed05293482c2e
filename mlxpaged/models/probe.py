"""The probe: runs a few tokens through a loaded model to check that paged attention reproduces its logits.

Architectures differ in how they use a cache, and a new one may bypass it. So each model is run once with mlx-lm's
caches and once with ours, in a ragged batch. A model whose logits differ is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlxpaged.attention import AttentionMetadata, LatentLayer, PagedLayer, layer, route_attention
from mlxpaged.models.caches import ModelCaches
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.head import RowSelection
from mlxpaged.models.layers import KV, LayerSpec, is_per_sequence
from mlxpaged.models.states import StateRow

TOKENS = [3, 1, 4, 1, 5, 9, 2]
MAX_TRIES = 8
"""How many regions of the vocabulary are tried if all logits are zero."""
MIN_COSINE = {mx.float32: 0.9999}
MIN_COSINE_HALF = 0.98  # batch shapes change the rounding of half types, and with it the choices of an expert router


class ProbedLayer(PagedLayer):
    """Records how the model calls its attention."""

    num_query_heads = 0
    sinks = False

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        self.num_query_heads = int(queries.shape[1])
        self.sinks = sinks is not None
        return super().attend(queries, scale, mask, sinks)


class ProbedLatentLayer(ProbedLayer, LatentLayer):
    """Records how the model calls its latent attention. Short chunks are expanded too, so that both paths run."""

    expand_from = 5


@dataclass(frozen=True)
class Reference:
    """Tokens, the logits after the last of them, [vocabulary], float32, and the attention calls of one forward pass."""

    tokens: list[int]
    logits: mx.array
    attention_calls: int


def probe(
    model: Module, specs: Sequence[LayerSpec], reference: Reference, rows: RowSelection | None = None
) -> list[LayerSpec]:
    """Run the reference's tokens as three sequences in ragged batches: in chunks, at once, and decoding in a batch.
    Returns the specs, completed with what this showed about the layers' attention.

    With `rows`, only the sequences' last rows are projected. Raises UnsupportedModelError if the logits differ.
    """
    tokens, expected = reference.tokens, reference.logits
    caches = ModelCaches(specs, 3, layer_types=(ProbedLayer, ProbedLatentLayer))
    end = len(tokens) - 1
    steps = [  # (sequence, tokens before the step, tokens of the step)
        [(0, 0, end), (1, 0, 3)],
        [(1, 3, end - 3), (2, 0, end + 1)],
        [(0, end, 1), (1, end, 1)],
    ]
    results = []
    for step in steps:
        lens, contexts = [n for _, _, n in step], [start + n for _, start, n in step]
        meta = AttentionMetadata.build(lens, contexts, [[sequence] for sequence, _, _ in step])
        last = mx.cumsum(mx.array(lens)) - 1
        if rows is not None:
            rows.rows = last
        ids = [token for _, start, n in step for token in tokens[start : start + n]]
        logits = run(model, caches, ids, meta, [StateRow(*row) for row in step])
        if rows is None and logits.shape[0] != len(ids):
            raise UnsupportedModelError(f"its output head returns {logits.shape[0]} rows of logits, not {len(ids)}")
        if rows is not None and logits.shape[0] != len(step):
            raise UnsupportedModelError(f"its output head returns {logits.shape[0]} rows of logits, not {len(step)}")
        results.append(logits[last] if rows is None else logits)
    if rows is not None:
        rows.rows = None
    calls, wanted = caches.step.attention_calls, len(steps) * reference.attention_calls
    if calls < wanted and not is_per_sequence(specs):
        raise UnsupportedModelError(f"only {calls} of {wanted} attention calls went through the paged KV cache")
    got = mx.concatenate([results[1][1:], results[2]])[:, 0].astype(mx.float32)
    cosine = (got @ expected) / (mx.linalg.norm(got, axis=-1) * mx.linalg.norm(expected))
    worst = float(cosine.min())
    if not worst >= MIN_COSINE.get(weights_dtype(model), MIN_COSINE_HALF):
        raise UnsupportedModelError(f"the paged batch does not reproduce its logits (cosine similarity {worst:.4f})")
    layers = iter(caches.layers)
    return [completed(spec, layers) for spec in specs]


def weights_dtype(model: Module) -> mx.Dtype:
    """The type of most floating-point weights' computation: half if any weight is."""
    weights: Any = tree_flatten(model.parameters())
    dtypes = {array.dtype for _, array in weights if mx.issubdtype(array.dtype, mx.floating)}
    return mx.float32 if dtypes == {mx.float32} else mx.float16


def completed(spec: LayerSpec, layers: Iterator[PagedLayer]) -> LayerSpec:
    if isinstance(spec, tuple):
        return tuple(completed(each, layers) for each in spec)
    if not isinstance(spec, KV):
        return spec
    probed: Any = next(layers)
    return replace(spec, num_query_heads=probed.num_query_heads, sinks=probed.sinks)


def make_reference(model: Any) -> Reference:
    """Run the model as mlx-lm loads it, with mlx-lm's caches, on tokens whose logits are not all zero: embeddings of
    tokens that were never trained may be zero. Raises UnsupportedModelError if there are no such tokens."""
    route_attention(model)
    tokens = TOKENS
    for i in range(1, MAX_TRIES + 1):
        calls = layer.attention_calls
        logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1].astype(mx.float32)
        if not mx.isfinite(logits).all():
            raise UnsupportedModelError("its logits are not finite")
        if mx.any(logits):
            return Reference(tokens, logits, layer.attention_calls - calls)
        vocab_size = logits.shape[0]
        tokens = [(i * vocab_size // MAX_TRIES + token) % vocab_size for token in TOKENS]
    raise UnsupportedModelError("its logits are all zero for every prompt that was tried")


def run(
    model: Any, caches: ModelCaches, tokens: list[int], meta: AttentionMetadata, rows: Sequence[StateRow]
) -> mx.array:
    try:
        logits = caches.run(model, mx.array(tokens), [meta], rows, range(3))
        mx.eval(logits, caches.arrays)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"it does not run on paged caches: {type(error).__name__}: {error}") from error
    return logits
