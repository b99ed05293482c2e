"""What each layer of a model keeps for its sequences, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, Union

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlxpaged.attention.layout import AttentionShape, KVLayout
from mlxpaged.attention.qkv import QkvKind, QkvShape
from mlxpaged.attention.quantization import Quantization, quantization_of
from mlxpaged.core.blocks.block_pool import DEFAULT_BLOCK_SIZE


@dataclass(frozen=True)
class KV:
    """A layer keeps keys and values for each token. key_size, value_size: elements of one head.

    latent, quantization: as in KVLayout. window: keys that a query sees, None for all. chunk: as in
    `LayerKVCache.attend`. qkv: of a fused layer. A probe finds num_query_heads, sinks, softcap and qkv. mutual: as in
    `LayerKVCache.attend`.
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
    softcap: bool = False
    qkv: QkvKind | None = None
    mutual: bool = False
    quantization: Quantization | None = None

    def kv_layout(self, block_size: int = DEFAULT_BLOCK_SIZE) -> KVLayout:
        sizes = self.num_kv_heads, self.key_size, self.value_size
        return KVLayout(*sizes, self.dtype, block_size, self.latent, self.quantization)

    @property
    def stored_type(self) -> str:
        """Type of its blocks: those of different types are no blocks of one another."""
        return str(self.dtype) if self.quantization is None else f"{self.dtype} as {self.quantization}"

    def attention_shape(self, block_size: int) -> AttentionShape:
        flags = self.sinks, self.chunk, self.softcap, self.mutual
        return AttentionShape(self.num_query_heads, self.kv_layout(block_size), self.window, *flags)

    def qkv_shape(self, block_size: int) -> QkvShape | None:
        return None if self.qkv is None else QkvShape(self.kv_layout(block_size), self.qkv)


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


def leaves(entries: Iterable[Any]) -> Iterator[Any]:
    """The specs of all layers or mlx-lm's caches, those in a tuple or CacheList one by one, and no None."""
    for entry in entries:
        if isinstance(entry, (tuple, CacheList)):
            yield from leaves(entry.caches if isinstance(entry, CacheList) else entry)
        elif entry is not None:
            yield entry


def kv_layers(specs: Iterable[LayerSpec]) -> list[KV]:
    """The specs of all KV pools, in order."""
    return [spec for spec in leaves(specs) if isinstance(spec, KV)]


def unfused(spec: LayerSpec, broken: Container[object], block_size: int) -> LayerSpec:
    """The spec without the kernel of fused layers, if that is one of the broken ones."""
    if isinstance(spec, tuple):
        return tuple(unfused(each, broken, block_size) for each in spec)
    return replace(spec, qkv=None) if isinstance(spec, KV) and spec.qkv_shape(block_size) in broken else spec


def mutual(specs: Iterable[LayerSpec], which: Literal["none", "windows", "all"]) -> list[LayerSpec]:
    """The specs of a model in whose layers, all or those with a window, tokens of an image see one another."""

    def changed(spec: LayerSpec) -> LayerSpec:
        if isinstance(spec, tuple):
            return tuple(map(changed, spec))
        if isinstance(spec, KV) and (which == "all" or (which == "windows" and spec.window is not None)):
            return replace(spec, mutual=True)
        return spec

    return list(map(changed, specs))


def quantized(specs: Iterable[LayerSpec], dtype: str) -> list[LayerSpec]:
    """The specs of a model whose KV cache is "int8" or "int4". Layers with a window or latents, recurrent states and
    heads that no group divides stay as they are."""

    def changed(spec: LayerSpec) -> LayerSpec:
        if isinstance(spec, tuple):
            return tuple(map(changed, spec))
        if isinstance(spec, KV) and spec.window is None and not spec.latent:
            return replace(spec, quantization=quantization_of(dtype, spec.key_size, spec.value_size))
        return spec

    return list(map(changed, specs))


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


@dataclass(frozen=True)
class StateMemory:
    """The memory for recurrent states: one state for each of `max_num_seqs` sequences and for each checkpoint.

    bytes_per_state: of one sequence, over all layers; 0 if the model has no recurrent layers.
    """

    bytes_per_state: int = 0
    max_num_seqs: int = 0
    num_checkpoints: int = 0

    @property
    def nbytes(self) -> int:
        return self.bytes_per_state * (self.max_num_seqs + self.num_checkpoints)

    @property
    def remedy(self) -> str:
        """The end of a message that says that memory is missing; empty without recurrent layers."""
        if not self.bytes_per_state:
            return ""
        sequences, checkpoints = (
            f"{self.bytes_per_state * count / 1e6:.1f} MB" for count in (self.max_num_seqs, self.num_checkpoints)
        )
        return (
            f"; the recurrent states of {self.max_num_seqs} sequences take {sequences}, and {self.num_checkpoints} "
            f"checkpoints take {checkpoints}: lower --max-num-seqs or --state-cache-memory"
        )


NO_STATES = StateMemory()
