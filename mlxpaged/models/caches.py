"""Makes the caches of a model from the specs of its layers, and runs the model on them."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
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
    TableView,
    Tuning,
)
from mlxpaged.attention.metadata import HostStep, Planner
from mlxpaged.cache.block_pool import DEFAULT_BLOCK_SIZE
from mlxpaged.models.cache_groups import CacheLayout, one_group
from mlxpaged.models.layers import LayerSpec, PerSequence, Recurrent, kv_layers
from mlxpaged.models.states import RecurrentLayer, SequenceCaches, StateRow, StateStep


class ModelCaches:
    """What an unmodified mlx-lm model gets as its caches: paged KV pools and recurrent states, by the specs.

    layout: places the KV layers in the pools; by default each has its own. pools: the memory of all blocks. layers: the
    KV layers. views: the block tables that they use. states: the layers with states or caches of single sequences.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        backend: str = "auto",
        tunings: Mapping[AttentionShape, Tuning] | None = None,
        layer_types: tuple[type[PagedLayer], type[LatentLayer]] = (PagedLayer, LatentLayer),
        layout: CacheLayout | None = None,
    ) -> None:
        self.step = StepContext()
        self.state_step = StateStep()
        self.layers: list[PagedLayer] = []
        self.states: list[RecurrentLayer | SequenceCaches] = []
        self._block_size, self._tunings, self._types = block_size, tunings or {}, layer_types
        layout = layout or one_group(kv_layers(specs))
        self.pools = [
            LayerKVCache.from_layout(num_blocks, spec.kv_layout(block_size), backend) for spec in layout.places
        ]
        self._latent: list[LatentLayer] = []
        self._planners: dict[Hashable, Planner | None] = {}
        self._places = iter(layout.layers)
        self.views = list(dict.fromkeys(each.view for each in layout.layers)) or [TableView()]
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
        place, view = next(self._places)
        tuning = self._tunings.get(spec.attention_shape(self._block_size), DEFAULT_TUNING)
        kv = self.pools[place].view(spec.kv_layout(self._block_size), tuning)
        planner = kv.planner(spec.num_query_heads, spec.window, spec.chunk) if spec.num_query_heads else None
        self._planners[planner and planner.key] = planner
        layer = self._types[spec.latent](kv, self.step, spec.window, spec.chunk, self.views.index(view))
        if isinstance(layer, LatentLayer):
            layer.num_heads = max(1, spec.num_query_heads)
            self._latent.append(layer)
        self.layers.append(layer)
        return layer

    @property
    def planners(self) -> list[Planner]:
        """Of all plans that the layers will ask for in a step. Empty if some are unknown."""
        known = [planner for planner in self._planners.values() if planner is not None]
        return known if len(known) == len(self._planners) else []

    def check_blocks(self, step: HostStep) -> None:
        """Raises ValueError if a layer's pool does not have a block of its table."""
        for layer in self.layers:
            layer.kv.check_block(step.max_blocks[layer.view])

    @property
    def recurrent(self) -> list[RecurrentLayer]:
        """The states that can be swapped out. Caches of single sequences cannot."""
        return [state for state in self.states if isinstance(state, RecurrentLayer)]

    @property
    def arrays(self) -> list[mx.array]:
        """Evaluated at the end of a step, so that its writes are done."""
        pools = [array for pool in self.pools for array in pool.arrays]
        return [*pools, *(array for state in self.states for array in state.arrays)]

    def run(
        self,
        model: Any,
        tokens: mx.array,
        metas: Sequence[AttentionMetadata],
        rows: Sequence[StateRow] = (),
        running: Container[int] = (),
    ) -> mx.array:
        """Logits [T, 1, V] of the tokens [T]. metas: for each of `views`. rows: the sequences of the step, if the model
        has recurrent layers.

        running: ids of all sequences that need a state; the states of others are dropped.
        """
        self.step.begin(metas)
        self.state_step.begin(rows if self.states else ())
        try:
            logits: mx.array = model(tokens[:, None], cache=self.caches)
            for state in self.states:
                state.commit(running)
            return logits
        finally:
            for layer in (*self.states, *self._latent):
                layer.discard()
            for pool in self.pools:
                pool.end_step()
            self.step.end()
            self.state_step.end()

    def clear(self) -> None:
        """Make all pools anew and drop all states."""
        for pool in self.pools:
            pool.clear()
        for state in self.states:
            state.clear()
