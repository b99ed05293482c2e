"""Makes MLX arrays of GGUF tensors. Quantized ones stay quantized, in groups of 32 numbers.

A group of MLX has the values scale * q + bias. What q, scale and bias are comes from the types' definitions in ggml
(ggml-common.h and the functions dequantize_row_* of ggml-quants.c). Blocks whose scales hold for 32 numbers give MLX's
groups exactly, but for the rounding of scale and bias. Others are quantized again, and the error is measured. What the
types with code books are, the package `gguf` of llama.cpp knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxpaged.models.sources.gguf.file import CODE_BOOKS, Tensor

GROUP = 32
CHUNK_BYTES = 2**19
"""Bytes of a tensor that are unpacked at once, which takes up to 50 times as much for a moment."""


MOST_STEPS_TRIED = 8
"""Distances of levels of which a group that is quantized again takes the one with the least error. As many lower the
error of Q6_K by a fifth, and that of types with few levels by up to nine tenths; 32 hardly more."""


class Groups(NamedTuple):
    """q: [R, C] uint8. scales, biases: [R, C / 32] float32. The value of an item is scale * q + bias."""

    q: mx.array
    scales: mx.array
    biases: mx.array


@dataclass
class Errors:
    """Sums of squares of what quantizing again changed, and of the values, by the type of the tensors."""

    changed: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, before: mx.array, after: mx.array) -> None:
        difference = mx.square(after.astype(mx.float32) - before).sum()
        self.changed[kind] = self.changed.get(kind, 0.0) + float(difference)
        self.values[kind] = self.values.get(kind, 0.0) + float(mx.square(before).sum())

    def relative(self) -> dict[str, float]:
        """Root mean square of the changes, divided by that of the values."""
        return {kind: (changed / (self.values[kind] or 1.0)) ** 0.5 for kind, changed in self.changed.items()}


def half(data: mx.array) -> mx.array:
    """Bytes [..., 2 n] of n float16 as [..., n] float32."""
    return mx.contiguous(data).view(mx.float16).astype(mx.float32)


def nibbles(data: mx.array) -> mx.array:
    """Low, then high halves of bytes: [..., n] -> [..., 2 n]."""
    return mx.concatenate([data & 15, data >> 4], axis=-1)


def bits(data: mx.array) -> mx.array:
    """Bits of bytes, the lowest first: [..., n] -> [..., 8 n]."""
    shifted = data[..., None] >> mx.arange(8, dtype=mx.uint8)
    return (shifted & 1).flatten(-2)


def q4_0(b: mx.array) -> Groups:
    d = half(b[..., :2])
    return Groups(nibbles(b[..., 2:]), d, -8 * d)


def q4_1(b: mx.array) -> Groups:
    return Groups(nibbles(b[..., 4:]), half(b[..., :2]), half(b[..., 2:4]))


def q5_0(b: mx.array) -> Groups:
    d = half(b[..., :2])
    return Groups(nibbles(b[..., 6:]) | (bits(b[..., 2:6]) << 4), d, -16 * d)


def q5_1(b: mx.array) -> Groups:
    return Groups(nibbles(b[..., 8:]) | (bits(b[..., 4:8]) << 4), half(b[..., :2]), half(b[..., 2:4]))


def q8_0(b: mx.array) -> Groups:
    d = half(b[..., :2])
    return Groups(b[..., 2:] ^ 128, d, -128 * d)


def six_bit_scales(b: mx.array) -> tuple[mx.array, mx.array]:
    """Scales and minima [..., 8] of the 12 bytes that Q4_K and Q5_K pack them into."""
    first, second, third = b[..., :4], b[..., 4:8], b[..., 8:]
    scales = mx.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minima = mx.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales.astype(mx.float32), minima.astype(mx.float32)


def q4_k(b: mx.array) -> Groups:
    scales, minima = six_bit_scales(b[..., 4:16])
    q = nibbles(b[..., 16:].reshape(*b.shape[:-1], 4, 32)).flatten(-2)
    return Groups(q, half(b[..., :2]) * scales, -half(b[..., 2:4]) * minima)


def q5_k(b: mx.array) -> Groups:
    scales, minima = six_bit_scales(b[..., 4:16])
    low = nibbles(b[..., 48:].reshape(*b.shape[:-1], 4, 32)).flatten(-2)
    high = (b[..., 16:48][..., None, :] >> mx.arange(8, dtype=mx.uint8)[:, None]) & 1
    return Groups(low | (high.flatten(-2) << 4), half(b[..., :2]) * scales, -half(b[..., 2:4]) * minima)


def two_bits(data: mx.array) -> mx.array:
    """[..., 64] bytes -> [..., 256]: in each half, the lowest two bits of 32 bytes, then the next two, and so on."""
    parts = data.reshape(*data.shape[:-1], 2, 1, 32) >> mx.array([[0], [2], [4], [6]], mx.uint8)
    return (parts & 3).flatten(-3)


def by_sixteen(q: mx.array, scales: mx.array) -> mx.array:
    """Values [..., n] of q [..., n] and a scale for each 16 of them."""
    return (q.astype(mx.float32).reshape(*scales.shape, 16) * scales[..., None]).flatten(-2)


def q2_k(b: mx.array) -> mx.array:
    scales, d, minimum = b[..., :16], half(b[..., 80:82]), half(b[..., 82:])
    values = by_sixteen(two_bits(b[..., 16:80]), d * (scales & 15).astype(mx.float32))
    return values - by_sixteen(mx.ones_like(values), minimum * (scales >> 4).astype(mx.float32))


def q3_k(b: mx.array) -> mx.array:
    packed = b[..., 96:108]
    low = nibbles(packed[..., :8])
    high = (packed[..., None, 8:] >> mx.array([[0], [2], [4], [6]], mx.uint8)).flatten(-2) & 3
    scales = (low | (high << 4)).astype(mx.float32) - 32
    top = (b[..., None, :32] >> mx.arange(8, dtype=mx.uint8)[:, None]).flatten(-2) & 1
    q = (two_bits(b[..., 32:96]) | (top << 2)).astype(mx.float32) - 4
    return by_sixteen(q, half(b[..., 108:]) * scales)


def q6_k(b: mx.array) -> mx.array:
    low = b[..., :128].reshape(*b.shape[:-1], 2, 64)
    low = mx.concatenate([low & 15, low >> 4], axis=-1).flatten(-2)
    q = (low | (two_bits(b[..., 128:192]) << 4)).astype(mx.float32) - 32
    scales = mx.contiguous(b[..., 192:208]).view(mx.int8).astype(mx.float32)
    return by_sixteen(q, half(b[..., 208:]) * scales)


LEVELS = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
"""The values of IQ4_NL and IQ4_XS (kvalues_iq4nl in ggml-common.h)."""


def iq4_nl(b: mx.array) -> mx.array:
    return mx.array(LEVELS, mx.float32)[nibbles(b[..., 2:])] * half(b[..., :2])


def iq4_xs(b: mx.array) -> mx.array:
    high = (b[..., 2:4, None] >> mx.array([0, 2, 4, 6], mx.uint8)).flatten(-2) & 3
    low = mx.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], axis=-1).flatten(-2)
    scales = half(b[..., :2]) * ((low | (high << 4)).astype(mx.float32) - 32)
    values = mx.array(LEVELS, mx.float32)[nibbles(b[..., 8:].reshape(*b.shape[:-1], 8, 16))]
    return (values * scales[..., None]).flatten(-2)


def by_code_book(kind: str) -> Callable[[mx.array], mx.array]:
    """What makes values of blocks [R, B, bytes of a block] of a type with a code book: [R, B, 256]."""

    def dequantize(b: mx.array) -> mx.array:
        from gguf import GGMLQuantizationType, quants

        with np.errstate(all="ignore"):  # scales of a damaged file
            return mx.array(quants.dequantize(np.array(b), GGMLQuantizationType[kind]))

    return dequantize


def quantized_again(values: mx.array, num_bits: int, dtype: mx.Dtype) -> Groups:
    """The levels of a group are from its least to its largest number, 2**num_bits or some less. The number of steps
    between is the one with the least sum of squared errors. So levels of equal distance, as most types have for their
    own scales, stay what they are in a group that has both ends. values: [R, C] float32. dtype: of scales and biases,
    whose rounding counts in the errors."""
    x = values.reshape(values.shape[0], -1, GROUP)
    low, high = (end.astype(dtype).astype(mx.float32) for end in (x.min(-1, keepdims=True), x.max(-1, keepdims=True)))
    top = 2**num_bits - 1
    best, scales, least = mx.zeros_like(x), mx.zeros_like(low), mx.full(low.shape, math.inf)
    for steps in range(top, max(1, top - MOST_STEPS_TRIED), -1):
        scale = ((high - low) / steps).astype(dtype).astype(mx.float32)
        q = mx.clip(mx.round((x - low) / mx.where(scale == 0, 1, scale)), 0, top)
        error = mx.square(scale * q + low - x).sum(-1, keepdims=True)
        better = error < least
        best, scales = mx.where(better, q, best), mx.where(better, scale, scales)
        least = mx.where(better, error, least)
    return Groups(best.astype(mx.uint8).flatten(1), scales.squeeze(-1), low.squeeze(-1))


EXACT: dict[str, tuple[int, Callable[[mx.array], Groups]]] = {
    "Q4_0": (4, q4_0),
    "Q4_1": (4, q4_1),
    "Q5_0": (5, q5_0),
    "Q5_1": (5, q5_1),
    "Q8_0": (8, q8_0),
    "Q4_K": (4, q4_k),
    "Q5_K": (5, q5_k),
}
"""The bits in MLX, and what unpacks blocks [R, B, bytes of a block]: q is [R, B, items of a block]."""

AGAIN: dict[str, tuple[int, Callable[[mx.array], mx.array]]] = {
    "Q2_K": (3, q2_k),
    "Q3_K": (4, q3_k),
    "Q6_K": (6, q6_k),
    "IQ4_NL": (5, iq4_nl),
    "IQ4_XS": (5, iq4_xs),
    **{kind: (int(kind[2]) + 1, by_code_book(kind)) for kind in CODE_BOOKS},
}
"""The bits with which values are quantized again, and what makes values of blocks. Q6_K keeps its width: 8 bits would
take 1.37 times the memory of the file."""

PLAIN = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


def pack(q: mx.array, num_bits: int) -> mx.array:
    """q [R, C] uint8 as MLX packs it: the bits of consecutive numbers, the lowest first, in words of 32 bits."""
    if num_bits == 8:
        return mx.contiguous(q).view(mx.uint32)
    if num_bits == 4:
        return mx.contiguous(q[:, ::2] | (q[:, 1::2] << 4)).view(mx.uint32)
    eights = q.reshape(q.shape[0], -1, 8).astype(mx.uint64)
    words = (eights << (num_bits * mx.arange(8, dtype=mx.uint64))).sum(axis=-1)
    return mx.contiguous(mx.contiguous(words[..., None]).view(mx.uint8)[..., :num_bits].flatten(-2)).view(mx.uint32)


def bits_of(kind: str) -> int | None:
    """Bits in MLX of the numbers of a tensor type; None if they are not quantized."""
    return 4 if kind == "MXFP4" else (EXACT.get(kind) or AGAIN.get(kind) or (None,))[0]


def memory_bytes(tensor: Tensor) -> int:
    """Bytes of its arrays, if it stays quantized: MXFP4 has a scale of 8 bits for a group, others two numbers of 16."""
    numbers, num_bits = math.prod(tensor.shape), bits_of(tensor.type.name)
    if num_bits is None:
        return tensor.nbytes
    return numbers * num_bits // 8 + numbers // GROUP * (1 if tensor.type.name == "MXFP4" else 4)


def chunk_arrays(tensor: Tensor, first: int, end: int, dtype: mx.Dtype, errors: Errors) -> dict[str, mx.array]:
    """`arrays` of some rows."""
    kind, data = tensor.type.name, mx.array(tensor.read(first, end))
    if kind in PLAIN:
        return {"weight": data.view(PLAIN[kind])}
    blocks = data.reshape(end - first, -1, tensor.type.nbytes)
    if kind == "MXFP4":
        pairs = nibbles(blocks[..., 1:]).reshape(end - first, -1)
        return {"weight": pack(pairs, 4), "scales": mx.contiguous(blocks[..., 0])}
    if kind in EXACT:
        num_bits, unpack = EXACT[kind]
        q, scales, biases = (part.reshape(end - first, -1) for part in unpack(blocks))
        return {"weight": pack(q, num_bits), "scales": scales.astype(dtype), "biases": biases.astype(dtype)}
    num_bits, dequantize = AGAIN[kind]
    values = dequantize(blocks).reshape(end - first, -1)
    q, scales, biases = quantized_again(values, num_bits, dtype)
    found = {"weight": pack(q, num_bits), "scales": scales.astype(dtype), "biases": biases.astype(dtype)}
    errors.add(kind, values, mx.dequantize(found["weight"], found["scales"], found["biases"], GROUP, num_bits))
    return found


def chunk_values(tensor: Tensor, first: int, end: int) -> dict[str, mx.array]:
    """The numbers of some rows, in float32: none is quantized again, and no scale is rounded."""
    kind, data = tensor.type.name, mx.array(tensor.read(first, end))
    if kind in PLAIN:
        values = data.view(PLAIN[kind]).astype(mx.float32)
    elif kind == "MXFP4":
        blocks = data.reshape(end - first, -1, tensor.type.nbytes)
        pairs = nibbles(blocks[..., 1:]).reshape(end - first, -1)
        scales = mx.contiguous(blocks[..., 0])
        values = mx.dequantize(pack(pairs, 4), scales, None, GROUP, 4, mode="mxfp4", dtype=mx.float32)
    elif kind in EXACT:
        q, scales, biases = EXACT[kind][1](data.reshape(end - first, -1, tensor.type.nbytes))
        groups = q.reshape(*q.shape[:2], -1, GROUP).astype(mx.float32)
        values = groups * scales[..., None] + biases[..., None]
    else:
        values = AGAIN[kind][1](data.reshape(end - first, -1, tensor.type.nbytes))
    return {"weight": values.reshape(end - first, -1)}


def arrays(tensor: Tensor, dtype: mx.Dtype, errors: Errors, dense: bool = False) -> dict[str, mx.array]:
    """The arrays of a tensor, evaluated. Not quantized: `weight` in its own type. Quantized: `weight` uint32, `scales`,
    and `biases` but for MXFP4, [..., rows, columns]; scales and biases in `dtype`. dense: `weight` in float32."""
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    step = max(1, CHUNK_BYTES * rows // tensor.nbytes)
    chunks = []
    for first in range(0, rows, step):
        end = min(first + step, rows)
        chunks.append(chunk_values(tensor, first, end) if dense else chunk_arrays(tensor, first, end, dtype, errors))
        mx.eval(chunks[-1])
    names: Any = list(chunks[0])
    found = {name: mx.concatenate([chunk[name] for chunk in chunks]) for name in names}
    found = {name: array.reshape(*tensor.shape[:-1], -1) for name, array in found.items()}
    mx.eval(found)
    return found
