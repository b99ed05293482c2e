"""How keys and values are quantized: in affine groups of a head's elements, as `mx.quantize` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

KEY_GROUPS = {8: (64, 32), 4: (128, 64, 32)}
VALUE_GROUPS = (64, 32)
"""Sizes of groups, the first one that divides a head is taken. MLX has 32, 64 and 128. int8 takes those of mlx-lm's
QuantizedKVCache. int4 takes 128 for its 8-bit keys, so that a head of 128 has 2.51 times as many tokens in the same
memory: with 64 for both it would be 2.46. Groups of 4-bit values stay small, because their steps are coarse."""


@dataclass(frozen=True)
class Quantization:
    """Bits of an element, and elements of a group. Each group has a scale and a bias of the model's type."""

    key_bits: int
    key_group: int
    value_bits: int
    value_group: int

    def __str__(self) -> str:
        keys, values = (
            f"int{bits} {name} in groups of {group}"
            for name, bits, group in (
                ("keys", self.key_bits, self.key_group),
                ("values", self.value_bits, self.value_group),
            )
        )
        return f"{keys}, {values}"

    def num_scales(self, key_size: int, value_size: int) -> int:
        """Scales and biases of a token and KV head."""
        return 2 * (key_size // self.key_group + value_size // self.value_group)

    def quantize(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Rows [..., size] -> what a pool's planes keep of them, in the type of the rows: packed keys, packed values,
        and [scales of keys | biases of keys | scales of values | biases of values]."""
        packed_keys, *of_keys = mx.quantize(keys, self.key_group, self.key_bits)
        packed_values, *of_values = mx.quantize(values, self.value_group, self.value_bits)
        scales = mx.concatenate([*of_keys, *of_values], axis=-1)
        return [packed_keys.view(keys.dtype), packed_values.view(values.dtype), scales]

    def dequantize(self, planes: Sequence[mx.array]) -> list[mx.array]:
        """Rows of the planes -> keys and values."""
        keys, values, scales = planes
        width = scales.dtype.size * 8
        num_keys = keys.shape[-1] * width // self.key_bits // self.key_group
        num_values = scales.shape[-1] // 2 - num_keys
        parts = mx.split(scales, [num_keys, 2 * num_keys, 2 * num_keys + num_values], axis=-1)
        return [
            mx.dequantize(keys.view(mx.uint32), parts[0], parts[1], self.key_group, self.key_bits),
            mx.dequantize(values.view(mx.uint32), parts[2], parts[3], self.value_group, self.value_bits),
        ]


def quantization_of(dtype: str, key_size: int, value_size: int) -> Quantization | None:
    """dtype: "int8", or "int4" for 4-bit values with 8-bit keys. None if no group divides the heads."""
    value_bits = {"int8": 8, "int4": 4}[dtype]
    key_group = next((group for group in KEY_GROUPS[value_bits] if key_size % group == 0), None)
    value_group = next((group for group in VALUE_GROUPS if value_size % group == 0), None)
    if key_group is None or value_group is None:
        return None
    return Quantization(8, key_group, value_bits, value_group)
