"""Random blocks of GGUF's tensor types, and their values, number by number as ggml defines them (ggml-common.h, and
dequantize_row_* in ggml-quants.c)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.models.gguf_files import TYPES, Stored

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def half(data: bytes) -> float:
    return float(struct.unpack("<e", data)[0])


def low_high(data: bytes) -> list[int]:
    """The low halves of bytes, then the high ones."""
    return [each & 15 for each in data] + [each >> 4 for each in data]


def q4_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (q - 8) for q in low_high(b[2:])]


def q4_1(b: bytes) -> list[float]:
    return [half(b[:2]) * q + half(b[2:4]) for q in low_high(b[4:])]


def fifth_bits(data: bytes) -> list[int]:
    bits = int.from_bytes(data, "little")
    return [bits >> i & 1 for i in range(32)]


def q5_0(b: bytes) -> list[float]:
    pairs = zip(low_high(b[6:]), fifth_bits(b[2:6]), strict=True)
    return [half(b[:2]) * ((q | high << 4) - 16) for q, high in pairs]


def q5_1(b: bytes) -> list[float]:
    pairs = zip(low_high(b[8:]), fifth_bits(b[4:8]), strict=True)
    return [half(b[:2]) * (q | high << 4) + half(b[2:4]) for q, high in pairs]


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * q for q in struct.unpack("<32b", b[2:])]


def scale_and_minimum(j: int, q: bytes) -> tuple[int, int]:
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6 << 4), (q[j + 4] >> 4) | (q[j] >> 6 << 4)


def q4_k(b: bytes) -> list[float]:
    d, minimum, values = half(b[:2]), half(b[2:4]), []
    for j in range(8):
        scale, least = scale_and_minimum(j, b[4:16])
        for each in b[16 + j // 2 * 32 : 48 + j // 2 * 32]:
            values.append(d * scale * (each >> 4 if j % 2 else each & 15) - minimum * least)
    return values


def q5_k(b: bytes) -> list[float]:
    d, minimum, values = half(b[:2]), half(b[2:4]), []
    for j in range(8):
        scale, least = scale_and_minimum(j, b[4:16])
        for i, each in enumerate(b[48 + j // 2 * 32 : 80 + j // 2 * 32]):
            q = (each >> 4 if j % 2 else each & 15) + 16 * (b[16 + i] >> j & 1)
            values.append(d * scale * q - minimum * least)
    return values


def q2_k(b: bytes) -> list[float]:
    d, minimum = half(b[80:82]), half(b[82:84])
    values = []
    for i in range(256):
        part, rest = divmod(i, 128)
        q = b[16 + 32 * part + rest % 32] >> 2 * (rest // 32) & 3
        values.append(d * (b[i // 16] & 15) * q - minimum * (b[i // 16] >> 4))
    return values


def q3_k(b: bytes) -> list[float]:
    values = []
    for i in range(256):
        part, rest = divmod(i, 128)
        q = b[32 + 32 * part + rest % 32] >> 2 * (rest // 32) & 3
        q -= 0 if b[i % 32] >> (i // 32) & 1 else 4
        group = i // 16
        low = b[96 + group % 8] >> 4 * (group // 8) & 15
        high = b[104 + group % 4] >> 2 * (group // 4) & 3
        values.append(half(b[108:]) * ((low | high << 4) - 32) * q)
    return values


def q6_k(b: bytes) -> list[float]:
    values = []
    for i in range(256):
        part, rest = divmod(i, 128)
        low = b[64 * part + rest % 64] >> 4 * (rest // 64) & 15
        high = b[128 + 32 * part + rest % 32] >> 2 * (rest // 32) & 3
        scale = struct.unpack_from("<b", b, 192 + i // 16)[0]
        values.append(half(b[208:]) * scale * ((low | high << 4) - 32))
    return values


def iq4_nl(b: bytes) -> list[float]:
    return [half(b[:2]) * LEVELS[q] for q in low_high(b[2:])]


def iq4_xs(b: bytes) -> list[float]:
    values = []
    for j in range(8):
        low = b[4 + j // 2] >> 4 * (j % 2) & 15
        high = int.from_bytes(b[2:4], "little") >> 2 * j & 3
        scale = half(b[:2]) * ((low | high << 4) - 32)
        values += [scale * LEVELS[q] for q in low_high(b[8 + 16 * j : 24 + 16 * j])]
    return values


def mxfp4(b: bytes) -> list[float]:
    return [2.0 ** (b[0] - 127) * FP4[q] for q in low_high(b[1:])]


VALUES: dict[str, Callable[[bytes], list[float]]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}
HALVES = {
    "Q4_0": {0: 0.03},
    "Q4_1": {0: 0.03, 2: -0.2},
    "Q5_0": {0: 0.015},
    "Q5_1": {0: 0.015, 2: -0.2},
    "Q8_0": {0: 0.002},
    "Q4_K": {0: 0.0008, 2: 0.006},
    "Q5_K": {0: 0.0004, 2: 0.006},
    "Q2_K": {80: 0.01, 82: 0.01},
    "Q3_K": {108: 0.002},
    "Q6_K": {208: 0.0001},
    "IQ4_NL": {0: 0.002},
    "IQ4_XS": {0: 0.0001},
}
"""The places of a block's numbers in float16, and about their values, for weights around 0.2."""


def blocks(data: bytes, kind: str) -> Iterator[bytes]:
    size = TYPES[kind][2]
    return (data[at : at + size] for at in range(0, len(data), size))


def random_tensor(kind: str, shape: tuple[int, ...], seed: int = 0) -> Stored:
    """Random bits, with scales of a sensible size."""
    _, items, nbytes = TYPES[kind]
    random = np.random.default_rng(seed)
    found: Any = random.integers(0, 256, (int(np.prod(shape)) // items, nbytes), np.uint8)
    for place, size in HALVES.get(kind, {}).items():
        numbers = (size * random.uniform(0.5, 1.5, len(found))).astype(np.float16)
        found[:, place : place + 2] = numbers[:, None].view(np.uint8)
    if kind == "MXFP4":
        found[:, 0] = random.integers(122, 126, len(found))
    return Stored(kind, shape, found.tobytes())


def values(tensor: Stored) -> Any:
    """float32, by the definition of the tensor's type."""
    found = [each for block in blocks(tensor.data, tensor.kind) for each in VALUES[tensor.kind](block)]
    return np.array(found, np.float32).reshape(tensor.shape)


def quantized_q8_0(array: Any) -> Stored:
    """Rows of a multiple of 32 numbers as Q8_0."""
    groups = np.asarray(array, np.float32).reshape(-1, 32)
    scales = (np.abs(groups).max(axis=1) / 127).astype(np.float16)
    q = np.rint(groups / np.maximum(scales.astype(np.float32), 1e-9)[:, None]).clip(-128, 127).astype(np.int8)
    data = np.concatenate([scales[:, None].view(np.uint8), q.view(np.uint8)], axis=1)
    return Stored("Q8_0", array.shape, data.tobytes())
