"""What one layer keeps for a token, how many bytes that takes, and how the layer attends."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxpaged.attention.quantization import Quantization

KV_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
"""Types that keys and values can have."""


@dataclass(frozen=True)
class Plane:
    """What a block has in one array of its pool. shape: KV heads, slots, elements of one token and head.

    The array is the planes of all blocks, one after the other. With two KV heads, blocks of 16 tokens, and 64 elements:

        | block 0                       | block 1                       | ...
        | head 0        | head 1        | head 0        | head 1        |
        | s0 s1 ... s15 | s0 s1 ... s15 | s0 s1 ... s15 | s0 s1 ... s15 |
          |
          +-- e0 e1 ... e63, of the token in slot 0 of block 0, for head 0

    Code that moves whole blocks needs to know the `nbytes` of each plane, and nothing else.
    """

    name: str
    shape: tuple[int, int, int]
    dtype: mx.Dtype

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape) * int(self.dtype.size)


@dataclass(frozen=True)
class KVLayout:
    """key_size, value_size: elements of one head. block_size: tokens. Raises ValueError if a value is out of range.

    latent: a token has one row [latent | rotary part] of key_size elements for all query heads (multi-head latent
    attention, DeepSeek-V2). Its value is the first value_size elements of the row and is not stored again.

    quantization: None if keys and values are stored as they are. dtype: also of quantized keys and values before they
    are stored, of their scales, and of the arrays that hold their packed bits.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    block_size: int
    latent: bool = False
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "key_size", "value_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"KV dtype must be float32, float16 or bfloat16, got {self.dtype}")
        if self.latent and (self.num_kv_heads != 1 or self.value_size >= self.key_size):
            raise ValueError(
                "a latent layout has one KV head, and rows that are longer than values, "
                f"got {self.num_kv_heads} heads, key_size {self.key_size} and value_size {self.value_size}"
            )
        if (kind := self.quantization) is not None and (
            self.latent or self.key_size % kind.key_group or self.value_size % kind.value_group
        ):
            raise ValueError(f"{kind} do not divide heads of {self.key_size} and {self.value_size} elements")

    @property
    def input_sizes(self) -> tuple[int, int]:
        """Elements of a key and a value, or of a latent and k_pe, as a layer writes them. Queries have the first size,
        and q_pe the second."""
        return (self.value_size, self.key_size - self.value_size) if self.latent else (self.key_size, self.value_size)

    def rows(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """What the planes keep of keys and values [..., size], or of latents and k_pe."""
        if self.quantization is not None:
            return self.quantization.quantize(keys, values)
        return [mx.concatenate([keys, values], axis=-1)] if self.latent else [keys, values]

    @property
    def stored_value_size(self) -> int:
        """Elements of one head that are stored for values beside the keys."""
        return 0 if self.latent else self.value_size

    @functools.cached_property
    def planes(self) -> tuple[Plane, ...]:
        """What a pool of this layout keeps, in the order of its arrays."""
        widths = {"keys": self.key_size, "values": self.stored_value_size}
        shape, bits = (self.num_kv_heads, self.block_size), int(self.dtype.size) * 8
        if (kind := self.quantization) is not None:
            widths = {
                "keys": self.key_size * kind.key_bits // bits,
                "values": self.value_size * kind.value_bits // bits,
                "scales": kind.num_scales(self.key_size, self.value_size),
            }
        return tuple(Plane(name, (*shape, width), self.dtype) for name, width in widths.items() if width)

    @functools.cached_property
    def bytes_per_block(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    @functools.cached_property
    def bytes_per_token(self) -> int:
        return self.bytes_per_block // self.block_size

    @property
    def unquantized(self) -> KVLayout:
        """The layout of a copy of its keys and values."""
        return replace(self, quantization=None)

    def blocks_of(self, other: KVLayout) -> int:
        """How many blocks of another layout take exactly the memory of one block, in every plane; 0 if that is no whole
        number. Blocks that are not quantized have no scales."""
        own, wanted = list(self.planes), other.planes
        if other.quantization is None and not other.latent and self.quantization is not None:
            own.pop()
        ratio = own[0].nbytes // wanted[0].nbytes
        fits = [(plane.nbytes, plane.dtype) for plane in own] == [
            (ratio * plane.nbytes, plane.dtype) for plane in wanted
        ]
        return ratio if fits and self.block_size == other.block_size else 0


@dataclass(frozen=True)
class AttentionShape:
    """All that the choice of kernels depends on. The last fields are as in `LayerKVCache.attend`."""

    num_query_heads: int
    layout: KVLayout
    window: int | None = None
    sinks: bool = False
    chunk: int | None = None
    softcap: bool = False
    mutual: bool = False

    def __str__(self) -> str:
        layout = self.layout
        local = f", window {self.window}" * bool(self.window) + f", local chunks of {self.chunk}" * bool(self.chunk)
        extras = local + ", sinks" * self.sinks + ", softcap" * self.softcap + ", images" * self.mutual
        sizes = f"{layout.key_size}" + f"/{layout.value_size}" * (layout.value_size != layout.key_size)
        kv_heads = f"latents of {sizes}" if layout.latent else f"{layout.num_kv_heads} KV heads of {sizes}"
        heads = f"{self.num_query_heads} query heads on {kv_heads}"
        extras += f", {layout.quantization}" * (layout.quantization is not None)
        return f"{heads}, {str(layout.dtype).removeprefix('mlx.core.')}, blocks of {layout.block_size}{extras}"
