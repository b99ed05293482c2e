"""An encoder with what the engine needs to know: pooled vectors of texts, or the scores of pairs (cross-encoders)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxpaged.models.encoders.embedding import (
    EmbeddingFacts,
    EmbeddingSpec,
    Pooling,
    check_dense,
    embedding_spec,
    stated_length,
    weight_bytes,
)
from mlxpaged.models.encoders.encoder import Encoder
from mlxpaged.models.encoders.encoder_files import read_config
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.kinds import judges_pairs
from mlxpaged.models.text.tokenizer import Tokenizer

POOLED = 64
"""Texts of one product. Each has a weight for each token of all of them."""


@dataclass(frozen=True)
class EncoderModel(EmbeddingFacts):
    encoder: Encoder

    def vectors(self, states: mx.array, ends: Sequence[int]) -> mx.array:
        """The vectors [B, width], or the scores [B, 1], in float32. states[T, width]: after the last layer. ends: the
        row after each text."""
        pooled = pool(states.astype(mx.float32), ends, self.spec.pooling)
        return self.encoder.scores(pooled.astype(states.dtype)) if self.is_reranker else pooled

    def step_bytes(self, num_tokens: int) -> int:
        """Bytes that a step of so many tokens takes beside the weights."""
        return self.encoder.config.step_bytes(num_tokens, self.encoder.norm.weight.dtype.size)


def pool(states: mx.array, ends: Sequence[int], pooling: Pooling) -> mx.array:
    """states[T, width] of texts that end before the rows `ends`[B] -> [B, width]"""
    starts = [0, *ends[:-1]]
    if pooling is Pooling.CLS:
        return states[mx.array(np.array(starts))]
    if pooling is Pooling.LAST:
        return states[mx.array(np.array(ends) - 1)]
    if pooling is Pooling.MAX:
        return mx.stack([states[start:end].max(axis=0) for start, end in zip(starts, ends, strict=True)])
    lengths, parts = np.subtract(ends, starts), range(0, len(ends), POOLED)
    each = [weighted(states[starts[i] : ends[i : i + POOLED][-1]], lengths[i : i + POOLED], pooling) for i in parts]
    return mx.concatenate(each)


def weighted(states: mx.array, lengths: NDArray[np.int64], pooling: Pooling) -> mx.array:
    """Weighted sums [B, width] of the states [T, width] of texts of these lengths, by one product."""
    ends = np.cumsum(lengths)
    text = np.repeat(np.arange(len(ends)), lengths)
    positions = mx.array(np.arange(ends[-1]) - np.repeat(ends - lengths, lengths))
    is_own = mx.array(text)[None] == mx.arange(len(ends))[:, None]
    weights = mx.where(is_own, pooling.weights(positions[None], mx.array(lengths)[:, None]), 0.0)
    # A number that is not finite would spoil all texts of the product, and is to spoil its own.
    is_finite = mx.isfinite(states).all(axis=1)
    is_spoilt = (is_own & ~is_finite[None]).any(axis=1, keepdims=True)
    return mx.where(is_spoilt, mx.nan, weights @ mx.where(is_finite[:, None], states, 0.0))


def encoder_model(
    name: str, encoder: Encoder, tokenizer: Tokenizer, spec: EmbeddingSpec, max_tokens: int
) -> EncoderModel:
    """max_tokens: limit of an input, if the encoder takes more. Raises UnsupportedModelError."""
    config = encoder.config
    check_dense(spec, config.width)
    is_reranker = config.head is not None
    if is_reranker and not tokenizer.is_thread_safe:
        raise UnsupportedModelError(
            "its tokenizer is in Python, which encodes no pairs here; it needs a tokenizer.json"
        )
    return EncoderModel(
        name=name,
        tokenizer=tokenizer,
        spec=spec,
        dimensions=1 if is_reranker else spec.dimensions(config.width),
        vocab_size=config.vocab_size,
        context_length=config.max_tokens,
        max_tokens=min(max_tokens, config.max_tokens, spec.max_tokens or config.max_tokens),
        weight_bytes=weight_bytes(encoder),
        is_reranker=is_reranker,
        encoder=encoder,
    )


def check_encoder(path: Path, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError if the small files of a directory ask for something that is not computed here, or do
    not state how an embedding is made."""
    read_config(config)
    if not judges_pairs(config):
        embedding_spec(path)


def pair_spec(path: Path, config: Mapping[str, Any]) -> EmbeddingSpec:
    """What the directory of a cross-encoder states. Raises UnsupportedModelError."""
    return EmbeddingSpec(
        pooling=Pooling.MEAN if config.get("classifier_pooling") == "mean" else Pooling.CLS,
        normalize=False,
        max_tokens=stated_length(path),
    )
