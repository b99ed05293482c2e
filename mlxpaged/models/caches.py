"""Makes the caches of a model from the specs of its layers, and runs the model on them."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.latent import LatentLayer
from mlxpaged.attention.layer import PagedLayer, StepContext
from mlxpaged.attention.layout import AttentionShape
from mlxpaged.attention.metadata import AttentionMetadata, HostStep, Planner, TableView
from mlxpaged.attention.tuning import DEFAULT_TUNING, Tuning
from mlxpaged.core.blocks.block_pool import DEFAULT_BLOCK_SIZE
from mlxpaged.core.step import Row
from mlxpaged.models.cache_groups import CacheLayout, one_group
from mlxpaged.models.layers import LayerSpec, PerSequence, Recurrent, kv_layers
from mlxpaged.models.states.rollback import Adapters, Rollback
from mlxpaged.models.states.states import RecurrentLayer, SequenceCaches


class ModelCaches:
    """What an unmodified mlx-lm model gets as its caches: paged KV pools and recurrent states, by the specs.

    layout: places the KV layers in the pools; by default each has its own. pools: the memory of all blocks. layers: the
    KV layers. views: the block tables that they use. drafting: the caches of the last `num_drafting` specs, which
    a draft head or model uses instead of the model. states: the
    layers with states or caches of single sequences. recurrent: those with states, which can be swapped out. Caches of
    single sequences cannot. rollback: of the recurrent ones.
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
        num_drafting: int = 0,
    ) -> None:
        self.step = StepContext()
        self.layers: list[PagedLayer] = []
        self.states: list[RecurrentLayer | SequenceCaches] = []
        self.recurrent: list[RecurrentLayer] = []
        self.rollback = Rollback()
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
        own = len(self.caches) - num_drafting
        self.caches, self.drafting = self.caches[:own], self.caches[own:]

    def _make(self, spec: LayerSpec) -> Any:
        if spec is None:
            return None
        if isinstance(spec, tuple):
            return CacheList(*map(self._make, spec))
        if isinstance(spec, Recurrent):
            self.recurrent.append(RecurrentLayer(spec.arrays, self.step, spec.alone, self.rollback))
            self.states.append(self.recurrent[-1])
            return self.states[-1]
        if isinstance(spec, PerSequence):
            self.states.append(SequenceCaches(spec.make, self.step))
            return self.states[-1]
        place, view = next(self._places)
        tuning = self._tunings.get(spec.attention_shape(self._block_size), DEFAULT_TUNING)
        kv = self.pools[place].view(spec.kv_layout(self._block_size), tuning, fuses=spec.qkv is not None)
        local = spec.window, spec.chunk
        planner = kv.planner(spec.num_query_heads, *local, spec.mutual) if spec.num_query_heads else None
        self._planners[planner and planner.key] = planner
        layer = self._types[spec.latent](kv, self.step, *local, self.views.index(view))
        layer.mutual = spec.mutual
        if isinstance(layer, LatentLayer):
            layer.num_heads = max(1, spec.num_query_heads)
            self._latent.append(layer)
        self.layers.append(layer)
        return layer

    @property
    def planners(self) -> list[Planner]:
        """The planners of all plans that the layers will ask for in a step. Empty if some are unknown."""
        known = [planner for planner in self._planners.values() if planner is not None]
        return known if self.plans_are_known else []

    @property
    def plans_are_known(self) -> bool:
        """Whether `planners` are all of them."""
        return None not in self._planners.values()

    def check_blocks(self, step: HostStep) -> None:
        """Raises ValueError if a layer's pool does not have a block of its table."""
        for layer in self.layers:
            layer.kv.check_block(step.max_blocks[layer.view])

    @property
    def replays(self) -> bool:
        """Whether graphs of decode steps can serve later ones, with the states as inputs and outputs. A cache of a
        single sequence changes in place, and a plan that is made in a step would be a constant of its graph."""
        return self.plans_are_known and len(self.recurrent) == len(self.states)

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence of the running step decodes, as far as its states say."""
        if not self.states:
            return True
        return self.step.decodes and (self.rollback.replays or all(length == 1 for _, length in self.step.sizes))

    @property
    def state_shapes(self) -> Hashable:
        """What the graph of a step depends on: the rows of each call, and the shapes of the states that grow. Those of
        other layers depend on the number of sequences only."""
        growing = [
            array.shape
            for layer in self.recurrent
            if layer.alone
            for state in layer.before
            for array in state
            if array is not None
        ]
        return self.step.sizes, tuple(growing)

    @property
    def arrays(self) -> list[mx.array]:
        """Evaluated at the end of a step, so that its writes are done."""
        pools = [array for pool in self.pools for array in pool.arrays]
        return [*pools, *(array for state in self.states for array in state.arrays), *self.rollback.arrays]

    def run(
        self,
        model: Any,
        tokens: mx.array,
        metas: Sequence[AttentionMetadata],
        rows: Sequence[Row] = (),
        running: Container[int] = (),
    ) -> mx.array:
        """Logits [T, 1, V] of the tokens [T], of a whole step: `begin`, `forward`, `commit` and `end`."""
        self.begin(rows)
        try:
            logits = self.forward(model, tokens, metas)
            self.commit(running)
            return logits
        finally:
            self.end()

    def roll_back(self, rows: Sequence[Row], adapters: Adapters) -> None:
        """Take back the drafts that were rejected before these rows. Call it before `begin`."""
        if self.rollback.is_empty:
            return
        for row in rows:
            if row.start == 0 or row.restore is not None:
                self.rollback.forget(row.sequence_id)
        self.rollback.roll_back({row.sequence_id: row.start for row in rows}, adapters)

    def saved(self, sequence_id: int, num_tokens: int, adapters: Adapters) -> list[mx.array]:
        """The states of a sequence after so many tokens, to be kept elsewhere."""
        self.rollback.roll_back({sequence_id: num_tokens}, adapters)
        return [array for state in self.recurrent for array in state.saved(sequence_id)]

    def begin(self, rows: Sequence[Row]) -> None:
        """rows: the sequences of the step, if the model has recurrent layers."""
        self.step.cut(rows if self.states else ())

    def forward(self, model: Any, tokens: mx.array, metas: Sequence[AttentionMetadata]) -> mx.array:
        """Logits [T, 1, V] of the tokens [T]. The new states are pending. metas: for each of `views`."""
        self.step.begin(metas)
        self.discard()
        try:
            logits: mx.array = model(tokens[:, None], cache=self.caches)
            return logits
        finally:
            self._end_pass()

    def forward_draft(self, run: Callable[[Sequence[Any]], mx.array], metas: Sequence[AttentionMetadata]) -> mx.array:
        """What a draft head or model makes of all caches in a pass of its own. Those that only draft are the last."""
        self.step.begin(metas)
        try:
            return run([*self.caches, *self.drafting])
        finally:
            self._end_pass()

    def _end_pass(self) -> None:
        for layer in self._latent:
            layer.discard()
        for pool in self.pools:
            pool.end_step()
        self.step.end()

    def commit(self, running: Container[int]) -> None:
        """Keep the new states. running: ids of all sequences that need a state; the states of others are dropped."""
        for state in self.states:
            state.commit(running)
        self.rollback.commit(running)

    def end(self) -> None:
        """Forget the states that are pending still: the step has failed."""
        self.discard()
        self.step.cut(())

    def discard(self) -> None:
        """Forget what is pending."""
        for state in self.states:
            state.discard()
        self.rollback.discard()

    def clear(self) -> None:
        """Make all pools anew and drop all states."""
        for pool in self.pools:
            pool.clear()
        for state in self.states:
            state.clear()
        self.rollback.clear()
