"""The probe: runs a few tokens through a loaded model to check that paged attention reproduces its logits.

Architectures differ in how they use a cache, and a new one may bypass it. So each model is run once with mlx-lm's
caches and once with ours, in a ragged batch. A model whose logits differ is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlxpaged.attention import AttentionMetadata, LayerKVCache, PagedLayer, StepContext
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.head import RowSelection
from mlxpaged.models.layers import LayerSpec

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


@dataclass(frozen=True)
class Reference:
    """Tokens, and the logits after the last of them, [vocabulary], float32."""

    tokens: list[int]
    logits: mx.array


def probe(
    model: Module, layers: Sequence[LayerSpec], reference: Reference, rows: RowSelection | None = None
) -> list[LayerSpec]:
    """Run the reference's tokens in a paged batch: the first sequence is prefilled while the second decodes. Returns
    the layers, completed with what this showed about their attention.

    With `rows`, only the last token's row is projected. Raises UnsupportedModelError if the logits differ.
    """
    tokens, expected = reference.tokens, reference.logits
    step = StepContext()
    caches = [ProbedLayer(LayerKVCache.from_layout(3, spec.kv_layout()), step, spec.window) for spec in layers]
    head = len(tokens) - 1
    run(model, caches, step, tokens[:head], AttentionMetadata.build([head], [head], [[2]]))
    mixed = AttentionMetadata.build([len(tokens), 1], [len(tokens), len(tokens)], [[0], [2]])
    if rows is not None:
        rows.rows = mx.array([len(tokens) - 1, len(tokens)])
    got = run(model, caches, step, [*tokens, tokens[-1]], mixed)[:, 0].astype(mx.float32)
    if rows is not None:
        rows.rows = None
    calls, wanted = step.attention_calls, 2 * len(layers)
    if calls != wanted:
        raise UnsupportedModelError(f"only {calls} of {wanted} attention calls went through the paged KV cache")
    num_rows = len(tokens) + 1 if rows is None else 2
    if got.shape[0] != num_rows:
        raise UnsupportedModelError(f"its output head returns {got.shape[0]} rows of logits instead of {num_rows}")
    last = got if rows is not None else got[len(tokens) - 1 :]
    cosine = (last @ expected) / (mx.linalg.norm(last, axis=-1) * mx.linalg.norm(expected))
    worst = float(cosine.min())
    if not worst >= MIN_COSINE.get(layers[0].dtype, MIN_COSINE_HALF):
        raise UnsupportedModelError(f"paged attention does not reproduce its logits (cosine similarity {worst:.4f})")
    return [
        replace(spec, num_query_heads=cache.num_query_heads, sinks=cache.sinks)
        for spec, cache in zip(layers, caches, strict=True)
    ]


def make_reference(model: Any) -> Reference:
    """Run the model as mlx-lm loads it, with mlx-lm's caches, on tokens whose logits are not all zero: embeddings of
    tokens that were never trained may be zero. Raises UnsupportedModelError if there are no such tokens."""
    tokens = TOKENS
    for i in range(1, MAX_TRIES + 1):
        logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1].astype(mx.float32)
        if not mx.isfinite(logits).all():
            raise UnsupportedModelError("its logits are not finite")
        if mx.any(logits):
            return Reference(tokens, logits)
        vocab_size = logits.shape[0]
        tokens = [(i * vocab_size // MAX_TRIES + token) % vocab_size for token in TOKENS]
    raise UnsupportedModelError("its logits are all zero for every prompt that was tried")


def run(
    model: Any, caches: Sequence[PagedLayer], step: StepContext, tokens: list[int], meta: AttentionMetadata
) -> mx.array:
    step.begin(meta)
    try:
        logits: mx.array = model(mx.array(tokens)[:, None], cache=caches)
        mx.eval(logits, [cache.kv.arrays for cache in caches])
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"it does not run on a paged KV cache: {type(error).__name__}: {error}") from error
    finally:
        step.end()
    return logits
