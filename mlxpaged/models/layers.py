"""What each layer of a model keeps for its sequences: found at load from mlx-lm's own caches, for any architecture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import FrameType
from typing import Any, Union

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from mlxpaged.attention import (
    DEFAULT_TUNING,
    AttentionMetadata,
    AttentionShape,
    KVLayout,
    LatentLayer,
    LayerKVCache,
    PagedLayer,
    StepContext,
    Tuning,
    route_attention,
)
from mlxpaged.cache.block_pool import DEFAULT_BLOCK_SIZE
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.states import RecurrentLayer, StateRow, StateStep, call_in_groups


@dataclass(frozen=True)
class KV:
    """A layer keeps keys and values for each token. key_size, value_size: elements of one head.

    latent: one row for all heads, as in KVLayout. window: keys that a query sees, None for all. chunk: as in
    `LayerKVCache.attend`. A probe finds num_query_heads and sinks.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    window: int | None = None
    num_query_heads: int = 0
    sinks: bool = False
    latent: bool = False
    chunk: int | None = None

    def kv_layout(self, block_size: int = DEFAULT_BLOCK_SIZE) -> KVLayout:
        return KVLayout(self.num_kv_heads, self.key_size, self.value_size, self.dtype, block_size, self.latent)

    def attention_shape(self, block_size: int) -> AttentionShape:
        return AttentionShape(self.num_query_heads, self.kv_layout(block_size), self.window, self.sinks, self.chunk)


@dataclass(frozen=True)
class Recurrent:
    """A layer keeps a state of fixed size for each sequence: arrays of these shapes, without the batch axis, and types.
    An entry is None if the layer never sets it."""

    arrays: tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(prod(like[0]) * int(like[1].size) for like in self.arrays if like is not None)


LayerSpec = Union[KV, Recurrent, None, "tuple[LayerSpec, ...]"]
"""What one of mlx-lm's caches holds: a CacheList several things, an unused cache nothing."""


def layer_specs(model: Module) -> list[LayerSpec]:
    """One spec per cache of the model, found by running four tokens through it with mlx-lm's own caches.

    Modules that own recurrent states are changed to run in groups of a step. Raises UnsupportedModelError if a layer
    needs anything else than these specs describe.
    """
    caches = make_prompt_cache(model)
    owners = {id(cache): Owner(cache) for cache in leaves(caches)}
    route_attention(model)
    for tokens in ([[0, 0, 0]], [[0]]):
        mx.eval(model(mx.array(tokens), cache=caches))
    specs = [spec_of(cache, owners) for cache in caches]
    if not any(True for _ in leaves(specs)):
        raise UnsupportedModelError("none of its layers keeps anything")
    for owner in owners.values():
        if isinstance(owner.cache, ArraysCache) and owner.module is not None:
            call_in_groups(owner.module)
    return specs


class Owner:
    """Finds the module that uses a cache: the innermost caller of the cache's methods that is a module."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.module: Module | None = None
        if isinstance(cache, ArraysCache):
            cache.cache = WatchedList(cache.cache, self.find)
        else:
            update = cache.update_and_fetch

            def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
                self.find()
                return update(keys, values)

            cache.update_and_fetch = update_and_fetch

    def find(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while self.module is None and frame is not None:
            caller = frame.f_locals.get("self")
            self.module = caller if isinstance(caller, Module) else None
            frame = frame.f_back


class WatchedList(list[Any]):
    """The arrays of an ArraysCache, with a call when one is read."""

    def __init__(self, arrays: list[Any], when_read: Callable[[], None]) -> None:
        super().__init__(arrays)
        self._when_read = when_read

    def __getitem__(self, index: Any) -> Any:
        self._when_read()
        return super().__getitem__(index)


def leaves(entries: Iterable[Any]) -> Iterator[Any]:
    """The caches or specs of all layers, those in a CacheList or tuple one by one, and no None."""
    for entry in entries:
        if isinstance(entry, (tuple, CacheList)):
            yield from leaves(entry.caches if isinstance(entry, CacheList) else entry)
        elif entry is not None:
            yield entry


def spec_of(cache: Any, owners: Mapping[int, Owner]) -> LayerSpec:
    if isinstance(cache, CacheList):
        return tuple(spec_of(each, owners) for each in cache.caches)
    if type(cache) is ArraysCache:
        return Recurrent(
            tuple(None if array is None else (tuple(array.shape[1:]), array.dtype) for array in iter(cache.cache))
        )
    if type(cache) is KVCache or type(cache) is ChunkedKVCache or (type(cache) is RotatingKVCache and not cache.keep):
        return kv_spec(cache, owners[id(cache)].module)
    raise UnsupportedModelError(f"its layers keep a {type(cache).__name__}, which the paged batch does not have")


def kv_spec(cache: Any, owner: Module | None) -> KV | None:
    keys, values = cache.keys, cache.values
    if keys is None or values is None:
        return None  # the layer does not attend (Llama-Nemotron)
    (_, heads, _, key_size), (_, value_heads, _, value_size) = keys.shape, values.shape
    if keys.dtype != values.dtype or heads != value_heads:
        raise UnsupportedModelError(
            f"it keeps {heads} heads of {keys.dtype} as keys, and {value_heads} of {values.dtype} as values"
        )
    if hasattr(owner, "embed_q") and hasattr(owner, "unembed_out"):
        return KV(1, key_size + value_size, key_size, keys.dtype, latent=True)
    window = int(cache.max_size) if isinstance(cache, RotatingKVCache) else None
    chunk = int(cache.chunk_size) if isinstance(cache, ChunkedKVCache) else None
    return KV(heads, key_size, value_size, keys.dtype, window, chunk=chunk)


def kv_layers(specs: Iterable[LayerSpec]) -> list[KV]:
    """The specs of all KV pools, in order."""
    return [spec for spec in leaves(specs) if isinstance(spec, KV)]


def bytes_per_token(specs: Iterable[LayerSpec]) -> int:
    """KV bytes of one token over all layers."""
    return sum(spec.kv_layout(block_size=1).bytes_per_token for spec in kv_layers(specs))


def state_bytes(specs: Iterable[LayerSpec]) -> int:
    """Bytes of the recurrent states of one sequence over all layers."""
    return sum(spec.nbytes for spec in leaves(specs) if isinstance(spec, Recurrent))


class ModelCaches:
    """What an unmodified mlx-lm model gets as its caches: paged KV pools and recurrent states, by the specs.

    layers: the KV layers; states: the recurrent ones. `begin` and `end` enclose each call of the model.
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
        self.states: list[RecurrentLayer] = []
        self._make_pool = partial(LayerKVCache.from_layout, num_blocks, backend=backend)
        self._block_size, self._tunings, self._types = block_size, tunings or {}, layer_types
        self.caches = [self._make(spec) for spec in specs]

    def _make(self, spec: LayerSpec) -> Any:
        if spec is None:
            return None
        if isinstance(spec, tuple):
            return CacheList(*map(self._make, spec))
        if isinstance(spec, Recurrent):
            self.states.append(RecurrentLayer(spec.arrays, self.state_step))
            return self.states[-1]
        tuning = self._tunings.get(spec.attention_shape(self._block_size), DEFAULT_TUNING)
        pool = self._make_pool(spec.kv_layout(self._block_size), tuning=tuning)
        self.layers.append(self._types[spec.latent](pool, self.step, spec.window, spec.chunk))
        return self.layers[-1]

    @property
    def arrays(self) -> list[mx.array]:
        """Evaluated at the end of a step, so that its writes are done."""
        pools = [array for layer in self.layers for array in layer.kv.arrays]
        return [*pools, *(array for state in self.states for array in state.arrays)]

    def run(self, model: Any, tokens: mx.array, meta: AttentionMetadata, rows: Sequence[StateRow]) -> mx.array:
        """Logits [T, 1, V] of the tokens [T]. rows: the sequences of the step, if the model has recurrent layers.

        The new states are pending until `commit`.
        """
        self.step.begin(meta)
        self.state_step.begin(rows if self.states else ())
        for state in self.states:
            state.discard()
        try:
            return model(tokens[:, None], cache=self.caches)  # type: ignore[no-any-return]
        finally:
            self.step.end()
            self.state_step.end()

    def commit(self, running: Container[int]) -> None:
        """Make the states of the last `run` those of its sequences. running: all sequences that need a state."""
        for state in self.states:
            state.commit(running)

    def clear(self) -> None:
        """Make all pools anew and drop all states."""
        for layer in self.layers:
            layer.kv.clear()
        for state in self.states:
            state.clear()
