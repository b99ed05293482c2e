"""Makes the caches of a model from the specs of its layers, and runs the model on them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlxpaged.attention import (
    DEFAULT_TUNING,
    AttentionMetadata,
    AttentionShape,
    LatentLayer,
    LayerKVCache,
    PagedLayer,
    StepContext,
    Tuning,
)
from mlxpaged.cache.block_pool import DEFAULT_BLOCK_SIZE
from mlxpaged.models.layers import LayerSpec, PerSequence, Recurrent
from mlxpaged.models.states import RecurrentLayer, SequenceCaches, StateRow, StateStep


class ModelCaches:
    """What an unmodified mlx-lm model gets as its caches: paged KV pools and recurrent states, by the specs.

    layers: the KV layers. states: the layers with states or caches of single sequences.
    """

    def __init__(
        self,
        specs: Iterable[LayerSpec],
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        backend: str = "auto",
        tunings: Mapping[AttentionShape, Tuning] | None = None,
        layer_types: tuple[type[PagedLayer], type[LatentLayer]] = (PagedLayer, LatentLayer),
    ) -> None:
        self.step = StepContext()
        self.state_step = StateStep()
        self.layers: list[PagedLayer] = []
        self.states: list[RecurrentLayer | SequenceCaches] = []
        self._make_pool = partial(LayerKVCache.from_layout, num_blocks, backend=backend)
        self._block_size, self._tunings, self._types = block_size, tunings or {}, layer_types
        self.caches = [self._make(spec) for spec in specs]

    def _make(self, spec: LayerSpec) -> Any:
        if spec is None:
            return None
        if isinstance(spec, tuple):
            return CacheList(*map(self._make, spec))
        if isinstance(spec, Recurrent):
            self.states.append(RecurrentLayer(spec.arrays, self.state_step, spec.alone))
            return self.states[-1]
        if isinstance(spec, PerSequence):
            self.states.append(SequenceCaches(spec.make, self.state_step))
            return self.states[-1]
        tuning = self._tunings.get(spec.attention_shape(self._block_size), DEFAULT_TUNING)
        pool = self._make_pool(spec.kv_layout(self._block_size), tuning=tuning)
        self.layers.append(self._types[spec.latent](pool, self.step, spec.window, spec.chunk))
        return self.layers[-1]

    @property
    def recurrent(self) -> list[RecurrentLayer]:
        """The states that can be swapped out. Caches of single sequences cannot."""
        return [state for state in self.states if isinstance(state, RecurrentLayer)]

    @property
    def arrays(self) -> list[mx.array]:
        """Evaluated at the end of a step, so that its writes are done."""
        pools = [array for layer in self.layers for array in layer.kv.arrays]
        return [*pools, *(array for state in self.states for array in state.arrays)]

    def run(
        self,
        model: Any,
        tokens: mx.array,
        meta: AttentionMetadata,
        rows: Sequence[StateRow] = (),
        running: Container[int] = (),
    ) -> mx.array:
        """Logits [T, 1, V] of the tokens [T]. rows: the sequences of the step, if the model has recurrent layers.

        running: ids of all sequences that need a state; the states of others are dropped.
        """
        self.step.begin(meta)
        self.state_step.begin(rows if self.states else ())
        try:
            logits: mx.array = model(tokens[:, None], cache=self.caches)
            for state in self.states:
                state.commit(running)
            return logits
        finally:
            for state in self.states:
                state.discard()
            self.step.end()
            self.state_step.end()

    def clear(self) -> None:
        """Make all pools anew and drop all states."""
        for layer in self.layers:
            layer.kv.clear()
        for state in self.states:
            state.clear()
