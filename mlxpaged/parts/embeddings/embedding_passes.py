"""Forward passes for embeddings, by decoders and by encoders: short inputs together, or a part of a long one.

A pass may cost as much as one input of `budget` tokens, in multiply-adds. Its attention counts: a late token of a long
input attends to all before it, and may cost ten times as much as the first one. So late parts have fewer tokens, and a
pass takes no longer at the end of an input than at its begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxpaged.core.scheduling.row_tiles import LEAST_CHUNK
from mlxpaged.models.encoders.embedding import EmbeddingModel
from mlxpaged.models.encoders.encoder import Projected, Texts
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

    def cost(self, inputs: Sequence[Input], budget: int) -> float:
        """Multiply-adds of what `run` computes."""

    def size(self, inputs: Sequence[Input], budget: int) -> int:
        """The tokens that `run` computes."""

    def run(self, inputs: Sequence[Input], budget: int) -> int:
        """Compute whole inputs that have at most `budget` tokens together, or a part of a long one that costs at most
        as much as one input of `budget` tokens. A part has at least LEAST_CHUNK tokens, or the rest. Returns the number
        of tokens that were computed. If it raises, the inputs are as before."""


class DecoderPasses:
    """Inputs are padded to the longest one. A long input comes in chunks, with a cache of keys and values."""

    def __init__(self, model: EmbeddingModel, held_tokens: int) -> None:
        """held_tokens: most tokens of the inputs that have a state at the same time."""
        self._model = model
        self.step_bytes = model.kv_bytes * held_tokens // model.max_tokens

    def num_tokens(self, lengths: Sequence[int]) -> int:
        return len(lengths) * max(lengths)

    def cost(self, inputs: Sequence[Input], budget: int) -> float:
        longest = max(map(len, self._chunks(inputs, budget)))
        return len(inputs) * self._model.cost.of(inputs[0].num_computed, longest)

    def size(self, inputs: Sequence[Input], budget: int) -> int:
        return self.num_tokens([len(chunk) for chunk in self._chunks(inputs, budget)])

    def _chunks(self, inputs: Sequence[Input], budget: int) -> list[Sequence[int]]:
        start, tokens, cost = inputs[0].num_computed, inputs[0].tokens, self._model.cost
        if len(inputs) > 1 or (start == 0 and len(tokens) <= budget):
            return [each.tokens for each in inputs]
        most = max(LEAST_CHUNK, cost.most_within(cost.of(0, budget), start, budget))
        return [tokens[start : start + min(budget, most)]]

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


class Part(NamedTuple):
    """Some rows of a text in a layer. mixes: whether they attend, or are projected before."""

    layer: int
    mixes: bool
    rows: range
    cost: int


class State(NamedTuple):
    """A long text in the midst of a layer: the rows before the layer, those that are projected, and those after it.
    Each [T or fewer, ...]."""

    before: mx.array
    projected: Projected | None = None
    after: mx.array | None = None


class EncoderPasses:
    """Inputs are not padded. A token of a long input needs all the others in each layer. So a part of it is some
    layers, and some rows of the next one: first their queries, keys and values, and if all of these are there, the
    rest."""

    def __init__(self, model: EncoderModel, most_tokens: int) -> None:
        """most_tokens: of a pass, or of the inputs that have a state at the same time."""
        self._model, self._num_layers = model, model.encoder.config.num_layers
        self.step_bytes = model.step_bytes(most_tokens)

    def num_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def cost(self, inputs: Sequence[Input], budget: int) -> float:
        if self._are_whole(inputs, budget):
            return sum(self._model.encoder.config.cost(len(each.tokens)) for each in inputs)
        return sum(part.cost for part in self._parts(inputs[0], budget))

    def size(self, inputs: Sequence[Input], budget: int) -> int:
        tokens = self.num_tokens([len(each.tokens) for each in inputs])
        if self._are_whole(inputs, budget):
            return tokens
        rows = sum(len(part.rows) for part in self._parts(inputs[0], budget))
        return max(1, rows // (2 * self._num_layers))

    def _are_whole(self, inputs: Sequence[Input], budget: int) -> bool:
        return len(inputs) > 1 or (inputs[0].state is None and len(inputs[0].tokens) <= budget)

    def _parts(self, text: Input, budget: int) -> Iterator[Part]:
        """What the next pass of a long text computes. The first part has LEAST_CHUNK rows also if they cost more."""
        config, length = self._model.encoder.config, len(text.tokens)
        left, least = config.cost(budget), LEAST_CHUNK
        for layer in range(text.num_computed, self._num_layers):
            state = text.state if layer == text.num_computed else None
            projected, after = (None, None) if state is None else (state.projected, state.after)
            num_projected, num_after = 0 if projected is None else len(projected[0]), 0 if after is None else len(after)
            costs = config.projecting_cost, config.mixing_cost(layer, length)
            for mixes, begin, each in zip((False, True), (num_projected, num_after), costs, strict=True):
                rows = range(begin, min(length, begin + max(least, left // each)))
                if rows:
                    yield Part(layer, mixes, rows, len(rows) * each)
                    left, least = left - len(rows) * each, 0
                if rows.stop < length:
                    return

    def run(self, inputs: Sequence[Input], budget: int) -> int:
        encoder, first = self._model.encoder, inputs[0]
        texts = encoder.texts([each.tokens for each in inputs], [each.second for each in inputs])
        if self._are_whole(inputs, budget):
            states = encoder(texts)
        else:
            state = first.state or State(encoder.embed(texts))
            num_computed = first.num_computed
            for part in self._parts(first, budget):
                state = self._advance(state, texts, part)
                if state.after is not None and len(state.after) == len(first.tokens):
                    state, num_computed = State(state.after), part.layer + 1
            if num_computed < self._num_layers:
                mx.eval(state)
                first.state, first.num_computed = state, num_computed
                return 0
            states = encoder.finish(state.before)
        found = self._model.vectors(states, texts.ends)
        mx.eval(found)
        for each, vector in zip(inputs, np.array(found), strict=True):
            each.state, each.vector, each.is_done = None, vector, True
        return self.num_tokens(texts.lengths)

    def _advance(self, state: State, texts: Texts, part: Part) -> State:
        encoder, rows = self._model.encoder, slice(part.rows.start, part.rows.stop)
        layer, before = encoder.layers[part.layer], state.before[rows]
        if not part.mixes:
            new = layer.project(before, texts.positions[rows])
            q, k, v = (joined(old, more) for old, more in zip(state.projected or (None,) * 3, new, strict=True))
            return state._replace(projected=(q, k, v))
        assert state.projected is not None
        attention = encoder.attention(texts.lengths, part.layer, part.rows)
        return state._replace(after=joined(state.after, layer.mix(before, state.projected, attention)))


def joined(first: mx.array | None, second: mx.array) -> mx.array:
    """The rows of both."""
    return second if first is None else mx.concatenate([first, second])
