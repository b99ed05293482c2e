"""Finds what each layer of a model keeps, by running a few tokens through it with mlx-lm's own caches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.layers import KV, LayerSpec, PerSequence, Recurrent, leaves


class Way(Enum):
    """How a model computes a step. ROWS: attention takes all rows at once. MODULES: each module with attention is
    called once per sequence. MODEL: the whole model is called once per sequence."""

    ROWS = "rows"
    MODULES = "modules"
    MODEL = "model"


class FoundLayers(NamedTuple):
    """specs: one for each cache of the model. owners: of its caches, with the modules that use each."""

    specs: list[LayerSpec]
    owners: list[Owner]


def find_layers(model: Module, way: Way = Way.ROWS) -> FoundLayers:
    """What the caches of the model keep if it runs in this way, found by running four tokens through it with mlx-lm's
    own caches. Raises UnsupportedModelError if a layer needs anything else than the specs describe."""
    caches = make_prompt_cache(model)
    owners = {id(cache): Owner(cache) for cache in leaves(caches)}
    model(mx.array([[0]]), cache=caches)  # only the shapes of what the caches keep are read: nothing is computed
    first = {id(cache): shapes_of(cache) for cache in leaves(caches) if isinstance(cache, ArraysCache)}
    model(mx.array([[0, 0, 0]]), cache=caches)

    def spec_of(cache: Any, make: Callable[[], Any], alone: bool = False) -> LayerSpec:
        owner = owners.get(id(cache))
        if isinstance(cache, CacheList):
            alone = way is Way.MODULES  # the module of both gets one sequence at a time
            return tuple(spec_of(each, partial(nth, make, i), alone) for i, each in enumerate(cache.caches))
        if way is Way.MODEL:
            return PerSequence(make, bytes_per_token_of(cache))
        if isinstance(cache, ArraysCache):
            return Recurrent(likes_of(cache), alone or shapes_of(cache) != first[id(cache)])
        if way is Way.MODULES:
            return PerSequence(make, bytes_per_token_of(cache))
        if type(cache) in (KVCache, ChunkedKVCache) or (type(cache) is RotatingKVCache and not cache.keep):
            return kv_spec(cache, () if owner is None else owner.modules)
        raise UnsupportedModelError(f"its layers keep a {type(cache).__name__}, which the paged batch does not have")

    specs = [spec_of(cache, partial(cache_of, model, i)) for i, cache in enumerate(caches)]
    if not any(True for _ in leaves(specs)):
        raise UnsupportedModelError("none of its layers keeps anything")
    return FoundLayers(specs, list(owners.values()))


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


def is_latent(module: Module) -> bool:
    """Whether it is mlx-lm's module of multi-head latent attention."""
    return hasattr(module, "embed_q") and hasattr(module, "unembed_out")


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
    if any(map(is_latent, owners)):
        return KV(1, key_size + value_size, key_size, keys.dtype, latent=True)
    window = int(cache.max_size) if isinstance(cache, RotatingKVCache) else None
    chunk = int(cache.chunk_size) if isinstance(cache, ChunkedKVCache) else None
    return KV(heads, key_size, value_size, keys.dtype, window, chunk=chunk)
