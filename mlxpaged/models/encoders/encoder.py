"""Encoders: BERT and its successors, whose tokens attend in both directions. They make embeddings, or judge pairs.

One module computes them all; an `EncoderConfig` has what tells them apart. A step has the tokens of many texts, one
after the other, without padding. Sources:

- BERT (arXiv 1810.04805), RoBERTa (1907.11692) and XLM-RoBERTa (1911.02116): learned positions, norms after the sums.
- MPNet (2004.09297): a bias by relative position too, in the buckets of T5 (1910.10683).
- Nomic BERT (2402.01613), GTE (2407.19669): rotary positions (2104.09864), gated feed-forward networks (2002.05202).
- ModernBERT (2412.13663): as these, with norms before the sums, and windows in two of three layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu, gelu_approx, relu, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from mlxpaged.models.encoders.ragged_attention import MAX_SCORES, Attention, keys_per_query, plan_attention

ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "gelu": lambda x: gelu(x),  # by its name: `optimize_for_cpu` replaces it
    "gelu_new": gelu_approx,
    "gelu_pytorch_tanh": gelu_approx,
    "relu": relu,
    "silu": silu,
    "tanh": mx.tanh,
}

MAX_DISTANCE = 128
"""Positions from which on MPNet's last bucket holds (transformers, modeling_mpnet.py)."""

STATES = 12
"""Arrays of a layer that exist at once, in states of a token: residual, projections, and what is gathered of them."""

SCORES = 3
"""Arrays of scores that exist at once if MLX has no fused kernel, in float32."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions. factor: of GTE's NTK scaling (https://kexue.fm/archives/9706), 1 for none."""

    base: float
    factor: float = 1.0

    def periods(self, size: int) -> mx.array:
        """The period of each pair of elements divided by 2 pi, [size / 2]. size: of a head."""
        exponents = mx.arange(0, size, 2, dtype=mx.float32) / size
        periods: mx.array = (self.base * self.factor) ** exponents * self.factor ** (2 / size)
        return periods


@dataclass(frozen=True)
class Head:
    """What makes the score of a pair of its pooled state: one layer, and the classifier.

    norm: whether there is one after the activation. bias: of the layer before it. squashes: whether the score is the
    sigmoid of the classifier's output.
    """

    activation: str
    norm: bool
    bias: bool
    squashes: bool


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of an encoder, and the choices of its architecture.

    width: of a state. hidden: units of a feed-forward network. max_tokens: of a text. first_position: row of the first
    token's position; None without learned positions. gate: which half of the first projection is activated and
    multiplied by the other; None without a gate. ropes, windows: of each layer. num_buckets: of relative positions.
    biased: the layers with a bias, of "qkv", "out", "up", "down" and "norm". norms_first: whether norms come before the
    sums, and after the last layer. head: None for embeddings.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    hidden: int
    max_tokens: int
    eps: float
    activation: str
    biased: frozenset[str]
    ropes: Sequence[Rope | None]
    windows: Sequence[int | None]
    num_types: int = 0
    first_position: int | None = None
    gate: int | None = None
    num_buckets: int = 0
    norms_first: bool = False
    head: Head | None = None

    @property
    def head_size(self) -> int:
        return self.width // self.num_heads

    @property
    def projecting_cost(self) -> int:
        """Multiply-adds of a token before the attention of a layer."""
        return 3 * self.width * self.width

    def mixing_cost(self, layer: int, length: int) -> int:
        """Multiply-adds of a token in the attention of a layer and after it. length: of the text."""
        keys = keys_per_query(length, self.windows[layer])
        return self.width * (self.width + self.hidden * (2 if self.gate is None else 3) + 2 * keys)

    def cost(self, length: int) -> int:
        """Multiply-adds of a text of this length."""
        mixing = sum(self.mixing_cost(layer, length) for layer in range(self.num_layers))
        return length * (self.num_layers * self.projecting_cost + mixing)

    def step_bytes(self, num_tokens: int, item_size: int) -> int:
        """Bytes that a step of so many tokens takes beside the weights. item_size: bytes of an element of a state."""
        of_token = STATES * self.width + 3 * self.hidden * (1 if self.gate is None else 2)
        scores = self.num_heads * num_tokens * min(num_tokens, self.max_tokens)
        return num_tokens * of_token * item_size + SCORES * min(MAX_SCORES, scores) * 4


@dataclass(frozen=True)
class Texts:
    """The texts of a step. tokens, types and positions[T]; types: 1 for the second text of a pair. lengths: of each
    text. ends: the row after each."""

    tokens: mx.array
    types: mx.array
    positions: mx.array
    lengths: Sequence[int]
    ends: Sequence[int]


Projected = tuple[mx.array, mx.array, mx.array]
"""Queries, keys and values of tokens in a layer, [T, heads, D] each."""


class Layer(Module):
    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        width, has_bias = config.width, config.biased.__contains__
        self._config, rope = config, config.ropes[index]
        self._periods = None if rope is None else rope.periods(config.head_size)
        self.qkv = Linear(width, 3 * width, bias=has_bias("qkv"))
        self.out = Linear(width, width, bias=has_bias("out"))
        self.up = Linear(width, config.hidden * (1 if config.gate is None else 2), bias=has_bias("up"))
        self.down = Linear(config.hidden, width, bias=has_bias("down"))
        if index or not config.norms_first:  # ModernBERT's first layer begins with the norm of the embeddings
            self.attention_norm = LayerNorm(width, config.eps, bias=has_bias("norm"))
        self.mlp_norm = LayerNorm(width, config.eps, bias=has_bias("norm"))

    def __call__(self, x: mx.array, positions: mx.array, attention: Attention) -> mx.array:
        """[T, width] -> [T, width]"""
        return self.mix(x, self.project(x, positions), attention)

    def project(self, x: mx.array, positions: mx.array) -> Projected:
        """x: any rows [R, width] of the step. positions: theirs."""
        if self._config.norms_first and "attention_norm" in self:
            x = self.attention_norm(x)
        heads, size = self._config.num_heads, self._config.head_size
        qkv = self.qkv(x).reshape(-1, 3, heads, size)
        q, k, v = (qkv[:, index] for index in range(3))
        if self._periods is not None:
            both = qkv[:, :2].reshape(-1, 2 * heads, 1, size)  # each token is a row of a batch, with its own position
            rotated = mx.fast.rope(
                both, size, traditional=False, base=None, scale=1.0, offset=positions, freqs=self._periods
            )
            q, k = rotated[:, :heads, 0], rotated[:, heads:, 0]
        return q, k, v

    def mix(self, x: mx.array, projected: Projected, attention: Attention) -> mx.array:
        """What follows the projections, [R, width]. x: the rows [R, width] that attend by `attention`, before the
        layer. projected: of all rows of the step."""
        mixed = self.out(attention(*projected, self._config.head_size**-0.5))
        if self._config.norms_first:
            x = x + mixed
            return x + self._feed_forward(self.mlp_norm(x))
        x = self.attention_norm(x + mixed)
        out: mx.array = self.mlp_norm(x + self._feed_forward(x))
        return out

    def _feed_forward(self, x: mx.array) -> mx.array:
        x, gate, act = self.up(x), self._config.gate, ACTIVATIONS[self._config.activation]
        if gate is not None:
            halves = mx.split(x, 2, axis=-1)
        out: mx.array = self.down(act(x) if gate is None else act(halves[gate]) * halves[1 - gate])
        return out


class Encoder(Module):
    """Its weights have the names of `encoder_files.canonical`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.words = Embedding(config.vocab_size, width)
        if config.first_position is not None:
            self.positions = Embedding(config.first_position + config.max_tokens, width)
        if config.num_types:
            self.types = Embedding(config.num_types, width)
        self.norm = LayerNorm(width, config.eps, bias="norm" in config.biased)
        self.layers = [Layer(config, index) for index in range(config.num_layers)]
        if config.num_buckets:
            self.relative = Embedding(config.num_buckets, config.num_heads)
        if config.norms_first:
            self.final_norm = LayerNorm(width, config.eps, bias="norm" in config.biased)
        if (head := config.head) is not None:
            self.dense = Linear(width, width, bias=head.bias)
            if head.norm:
                self.dense_norm = LayerNorm(width, config.eps, bias="norm" in config.biased)
            self.classifier = Linear(width, 1)

    def texts(self, inputs: Sequence[Sequence[int]], seconds: Sequence[int] = ()) -> Texts:
        """inputs: the tokens of each text, at most `max_tokens`. seconds: where the second text of each pair begins;
        nothing if no text is a pair."""
        config, lengths = self.config, [len(each) for each in inputs]
        positions = np.concatenate([np.arange(length) for length in lengths])
        types = np.zeros(len(positions), np.int32)
        if seconds and config.num_types > 1:
            types = (positions >= np.repeat(seconds, lengths)).astype(np.int32)
        return Texts(
            tokens=mx.array(np.concatenate(inputs).astype(np.int32)),
            types=mx.array(types),
            positions=mx.array(positions.astype(np.int32)),
            lengths=lengths,
            ends=np.cumsum(lengths).tolist(),
        )

    def attention(self, lengths: Sequence[int], layer: int, rows: range | None = None) -> Attention:
        """Attention of a layer in texts of these lengths. rows: those that attend; None for all."""
        bias = self._bias if self.config.num_buckets else None
        return plan_attention(lengths, self.config.num_heads, self.config.windows[layer], bias, rows)

    def embed(self, texts: Texts) -> mx.array:
        """The states [T, width] before the first layer."""
        x = self.words(texts.tokens)
        if self.config.first_position is not None:
            x = x + self.positions(texts.positions + self.config.first_position)
        if self.config.num_types:
            x = x + self.types(texts.types)
        out: mx.array = self.norm(x)
        return out

    def __call__(self, texts: Texts) -> mx.array:
        """The states [T, width] after the last layer."""
        x, windows = self.embed(texts), self.config.windows
        attention = {window: self.attention(texts.lengths, windows.index(window)) for window in set(windows)}
        for layer, window in zip(self.layers, windows, strict=True):
            x = layer(x, texts.positions, attention[window])
        return self.finish(x)

    def finish(self, x: mx.array) -> mx.array:
        """What follows the last layer. [T, width] -> [T, width]"""
        return self.final_norm(x) if self.config.norms_first else x

    def scores(self, pooled: mx.array) -> mx.array:
        """The scores [B, 1], float32, of pairs whose states were pooled to [B, width]."""
        head = self.config.head
        assert head is not None
        x = ACTIVATIONS[head.activation](self.dense(pooled))
        logits = self.classifier(self.dense_norm(x) if head.norm else x).astype(mx.float32)
        return mx.sigmoid(logits) if head.squashes else logits

    def _bias(self, distances: mx.array) -> mx.array:
        """MPNet's: [B, Q, K] -> [B, heads, Q, K]. Half of the buckets are for keys after the query. Half of these are
        for one distance each, and the others grow logarithmically up to MAX_DISTANCE."""
        half = self.config.num_buckets // 2
        exact, steps = half // 2, mx.abs(distances)
        ratio = mx.log(mx.maximum(steps, 1).astype(mx.float32) / exact) / math.log(MAX_DISTANCE / exact)
        large = mx.minimum(exact + (ratio * (half - exact)).astype(mx.int32), half - 1)
        buckets = mx.where(steps < exact, steps, large) + half * (distances > 0)
        bias: mx.array = self.relative(buckets).transpose(0, 3, 1, 2)
        return bias
