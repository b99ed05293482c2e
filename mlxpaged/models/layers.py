"""What each layer of a model keeps for its sequences: found at load from mlx-lm's own caches, for any architecture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
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
)
from mlxpaged.cache.block_pool import DEFAULT_BLOCK_SIZE
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.states import RecurrentLayer, SequenceCaches, StateRow, StateStep, call_in_groups


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
    An entry is None if the layer never sets it. alone: the shapes grow with the first tokens, so that states of
    different sequences cannot be stacked."""

    arrays: tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]
    alone: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(prod(like[0]) * int(like[1].size) for like in self.arrays if like is not None)


@dataclass(frozen=True)
class PerSequence:
    """A layer keeps one of mlx-lm's own caches for each sequence, because its module cannot take rows of many. It is
    slower. bytes_per_token: what such a cache takes."""

    make: Callable[[], Any]
    bytes_per_token: int


LayerSpec = Union[KV, Recurrent, PerSequence, None, "tuple[LayerSpec, ...]"]
"""What one of mlx-lm's caches holds: a CacheList several things, an unused cache nothing."""


class Way(Enum):
    """How a model computes a step. ROWS: attention takes all rows at once. MODULES: each module with attention is
    called once per sequence. MODEL: the whole model is called once per sequence."""

    ROWS = "rows"
    MODULES = "modules"
    MODEL = "model"


def layer_specs(model: Module, way: Way = Way.ROWS) -> list[LayerSpec]:
    """One spec per cache of the model, found by running four tokens through it with mlx-lm's own caches.

    Modules that own recurrent states or caches of single sequences are changed to run in groups of a step. Raises
    UnsupportedModelError if a layer needs anything else than these specs describe.
    """
    caches = make_prompt_cache(model)
    owners = {id(cache): Owner(cache) for cache in leaves(caches)}
    mx.eval(model(mx.array([[0]]), cache=caches))
    first = {id(cache): shapes_of(cache) for cache in leaves(caches) if isinstance(cache, ArraysCache)}
    mx.eval(model(mx.array([[0, 0, 0]]), cache=caches))

    def spec_of(cache: Any, make: Callable[[], Any], alone: bool = False) -> LayerSpec:
        owner = owners.get(id(cache))
        if isinstance(cache, CacheList):
            alone = way is Way.MODULES  # the module of both gets one sequence at a time
            return tuple(spec_of(each, partial(nth, make, i), alone) for i, each in enumerate(cache.caches))
        if way is Way.MODEL:
            return PerSequence(make, bytes_per_token_of(cache))
        if type(cache) is ArraysCache:
            return Recurrent(likes_of(cache), alone or shapes_of(cache) != first[id(cache)])
        if way is Way.MODULES:
            return PerSequence(make, bytes_per_token_of(cache))
        if type(cache) in (KVCache, ChunkedKVCache) or (type(cache) is RotatingKVCache and not cache.keep):
            return kv_spec(cache, () if owner is None else owner.modules)
        raise UnsupportedModelError(f"its layers keep a {type(cache).__name__}, which the paged batch does not have")

    specs = [spec_of(cache, partial(cache_of, model, i)) for i, cache in enumerate(caches)]
    if not any(True for _ in leaves(specs)):
        raise UnsupportedModelError("none of its layers keeps anything")
    owning = [owner for owner in owners.values() if way is Way.MODULES or isinstance(owner.cache, ArraysCache)]
    for module in [model] if way is Way.MODEL else [module for owner in owning for module in owner.modules]:
        call_in_groups(module)
    return specs


def bytes_per_token_of(cache: Any) -> int:
    """What a cache of mlx-lm takes for a token, about: it grows in steps of 256 tokens."""
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if isinstance(keys, mx.array) and isinstance(values, mx.array):
        return int(keys.nbytes + values.nbytes) // keys.shape[2]
    return int(getattr(cache, "nbytes", 0)) // 256


def cache_of(model: Module, index: int) -> Any:
    """A new cache of mlx-lm's own."""
    return make_prompt_cache(model)[index]


def nth(make: Callable[[], Any], index: int) -> Any:
    """A new cache of mlx-lm's own, from a CacheList."""
    return make().caches[index]


def likes_of(cache: ArraysCache) -> tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]:
    """Shapes, without the batch axis, and types of the arrays."""
    return tuple(None if array is None else (tuple(array.shape[1:]), array.dtype) for array in iter(cache.cache))


def shapes_of(cache: ArraysCache) -> list[Any]:
    return [None if like is None else like[0] for like in likes_of(cache)]


class Owner:
    """Finds the modules that use a cache: the innermost callers of the cache's methods that are modules."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.modules: list[Module] = []
        if isinstance(cache, ArraysCache):
            cache.cache = WatchedList(cache.cache, self.find)
        elif hasattr(cache, "update_and_fetch"):
            update = cache.update_and_fetch

            def update_and_fetch(*args: Any) -> Any:
                self.find()
                return update(*args)

            cache.update_and_fetch = update_and_fetch

    def find(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Module):
                if not any(caller is module for module in self.modules):
                    self.modules.append(caller)
                return
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


def kv_spec(cache: Any, owners: Sequence[Module]) -> KV | None:
    keys, values = cache.keys, cache.values
    if keys is None or values is None:
        return None  # the layer does not attend (Llama-Nemotron)
    (_, heads, _, key_size), (_, value_heads, _, value_size) = keys.shape, values.shape
    if keys.dtype != values.dtype or heads != value_heads or not key_size or not value_size:
        raise UnsupportedModelError(
            f"it keeps {heads} heads of {key_size} {keys.dtype} as keys, and {value_heads} of {value_size} "
            f"{values.dtype} as values"
        )
    if any(hasattr(owner, "embed_q") and hasattr(owner, "unembed_out") for owner in owners):
        return KV(1, key_size + value_size, key_size, keys.dtype, latent=True)
    window = int(cache.max_size) if isinstance(cache, RotatingKVCache) else None
    chunk = int(cache.chunk_size) if isinstance(cache, ChunkedKVCache) else None
    return KV(heads, key_size, value_size, keys.dtype, window, chunk=chunk)


def kv_layers(specs: Iterable[LayerSpec]) -> list[KV]:
    """The specs of all KV pools, in order."""
    return [spec for spec in leaves(specs) if isinstance(spec, KV)]


def bytes_per_token(specs: Iterable[LayerSpec]) -> int:
    """KV bytes of one token over all layers."""
    own = sum(spec.bytes_per_token for spec in leaves(specs) if isinstance(spec, PerSequence))
    return own + sum(spec.kv_layout(block_size=1).bytes_per_token for spec in kv_layers(specs))


def keeps_states(specs: Iterable[LayerSpec]) -> bool:
    """Whether a layer keeps something that a sequence cannot share with others from the middle of a prompt on."""
    return any(isinstance(spec, (Recurrent, PerSequence)) for spec in leaves(specs))


def is_per_sequence(specs: Iterable[LayerSpec]) -> bool:
    return any(isinstance(spec, PerSequence) for spec in leaves(specs))


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
