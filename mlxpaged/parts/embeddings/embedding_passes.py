"""Forward passes for embeddings, by decoders and by encoders: short inputs together, or a part of a long one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxpaged.models.encoders.embedding import EmbeddingModel
from mlxpaged.models.encoders.encoder_model import EncoderModel

Vectors = NDArray[np.float32]


@dataclass
class Input:
    """One input. second: where the second text of a pair begins. state: what the next pass of a long one needs.
    num_computed: tokens of a decoder's input, or layers of an encoder's. vector: complete if it is done."""

    tokens: Sequence[int]
    second: int
    state: Any = None
    num_computed: int = 0
    vector: Vectors | None = None
    is_done: bool = False


class Passes(Protocol):
    """step_bytes: memory of the largest pass, beside the weights."""

    step_bytes: int

    def num_tokens(self, lengths: Sequence[int]) -> int:
        """The tokens of a pass of whole inputs, padding included."""

    def size(self, inputs: Sequence[Input], budget: int) -> int:
        """The tokens that `run` computes."""

    def run(self, inputs: Sequence[Input], budget: int) -> int:
        """Compute short inputs, or a part of a long one that takes as long as `budget` tokens. Returns the number of
        tokens that were computed. If it raises, the inputs are as before."""


class DecoderPasses:
    """Inputs are padded to the longest one. A long input comes in chunks, with a cache of keys and values."""

    def __init__(self, model: EmbeddingModel) -> None:
        self._model = model
        self.step_bytes = model.kv_bytes

    def num_tokens(self, lengths: Sequence[int]) -> int:
        return len(lengths) * max(lengths)

    def size(self, inputs: Sequence[Input], budget: int) -> int:
        return self.num_tokens([len(chunk) for chunk in self._chunks(inputs, budget)])

    def _chunks(self, inputs: Sequence[Input], budget: int) -> list[Sequence[int]]:
        start = inputs[0].num_computed
        return [each.tokens[start : start + budget] for each in inputs]

    def run(self, inputs: Sequence[Input], budget: int) -> int:
        first, chunks = inputs[0], self._chunks(inputs, budget)
        start, longest = first.num_computed, max(map(len, chunks))
        if first.state is None and longest < len(first.tokens):
            first.state = self._model.make_cache()
        # Padding follows the input, and a causal decoder's states do not depend on later tokens.
        tokens = [[*chunk, *[0] * (longest - len(chunk))] for chunk in chunks]
        states = self._model.decode(mx.array(tokens), first.state)
        pooled = self._pool(states, start, mx.array([len(each.tokens) for each in inputs]))
        mx.eval(pooled)  # if NumPy evaluated it, an error would end the process
        for each, chunk, vector in zip(inputs, chunks, np.array(pooled), strict=True):
            each.num_computed += len(chunk)
            each.vector = vector if each.vector is None else each.vector + vector
            each.is_done = each.num_computed == len(each.tokens)
        return sum(map(len, chunks))

    def _pool(self, states: mx.array, start: int, lengths: mx.array) -> mx.array:
        """Weighted sum [B, D] of states [B, T, D] from position `start` on, for inputs of these lengths."""
        positions = mx.arange(start, start + states.shape[1])
        weights = self._model.spec.pooling.weights(positions[None], lengths[:, None])
        return (states.astype(mx.float32) * weights[..., None]).sum(axis=1)


class EncoderPasses:
    """Inputs are not padded. A token of a long input needs all the others in each layer, so a part of it is some of the
    layers, for all tokens."""

    def __init__(self, model: EncoderModel, max_step_tokens: int) -> None:
        self._model, self._num_layers = model, model.encoder.config.num_layers
        self.step_bytes = model.step_bytes(max(max_step_tokens, model.max_tokens))

    def num_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def size(self, inputs: Sequence[Input], budget: int) -> int:
        return self._num_tokens(inputs) * self._layers(inputs, budget) // self._num_layers

    def _num_tokens(self, inputs: Sequence[Input]) -> int:
        return sum(len(each.tokens) for each in inputs)

    def _layers(self, inputs: Sequence[Input], budget: int) -> int:
        most = max(1, budget * self._num_layers // self._num_tokens(inputs))
        return min(most, self._num_layers - inputs[0].num_computed)

    def run(self, inputs: Sequence[Input], budget: int) -> int:
        encoder, first = self._model.encoder, inputs[0].num_computed
        last = first + self._layers(inputs, budget)
        texts = encoder.texts([each.tokens for each in inputs], [each.second for each in inputs])
        states = encoder.embed(texts) if first == 0 else inputs[0].state
        states = encoder.advance(states, texts, first, last)
        if last < self._num_layers:  # then there is one input
            mx.eval(states)
            inputs[0].state, inputs[0].num_computed = states, last
            return 0
        found = self._model.vectors(encoder.finish(states), texts.ends)
        mx.eval(found)
        for each, vector in zip(inputs, np.array(found), strict=True):
            each.state, each.vector, each.is_done = None, vector, True
        return self._num_tokens(inputs)
