"""A stand-in for `mx.fast.metal_kernel` that is lazy, as on a Mac: the kernels in MLX's own operations.

The interpreter runs a kernel at once, so that no graph of it can be replayed. Here the contents of the pools are in the
token that kernels pass on. So a read sees exactly the writes that its token depends on, and no others. A reader passes
on the token that it got: the sum of the tokens of several readers of a layer is any of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.qkv import Norm, Qkv, Rope
from mlxpaged.attention.quantization import Quantization

ENABLED, NO_FUSION = 3, 2
"""Values of mlx::core::CompileMode (mlx/compile.h)."""


@contextmanager
def no_fusion() -> Iterator[None]:
    """Lets `mx.compile` keep and replay graphs, and fuse nothing. Python has no function for it."""
    [library] = (Path(str(mx.__file__)).parent / "lib").glob("libmlx.*")
    set_mode = ctypes.CDLL(str(library))["_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"]
    set_mode(NO_FUSION)
    try:
        yield
    finally:
        set_mode(ENABLED)


LEAST = -3.402823466e38


class LazyKernels:
    """calls: of kernels so far. Softcap, sinks, latents and moves of quantized blocks are missing."""

    def __init__(self) -> None:
        self.calls = 0

    @contextmanager
    def installed(self) -> Iterator[LazyKernels]:
        """A view of a pool is the pool itself, because an operation cannot reach beyond its inputs."""
        with (
            mock.patch.object(mx.fast, "metal_kernel", self._metal_kernel),
            mock.patch.object(mx, "as_strided", lambda pool, *_: pool),
            mock.patch.object(mx, "add", lambda a, b: a if a.ndim == 1 else a + b),
        ):
            yield self

    def _metal_kernel(self, name: str, **_options: Any) -> Any:
        kernel = KERNELS.get(name)

        def launch(
            inputs: Sequence[Any], template: Any, output_shapes: Any, grid: Sequence[int], **_sizes: Any
        ) -> list[mx.array]:
            assert kernel is not None, name
            self.calls += 1
            return kernel(inputs, dict(template) | {"COUNT": grid[1]}, output_shapes[0])

        return launch


def contents(token: mx.array, key_pool: mx.array, value_pool: mx.array) -> mx.array:
    """Keys, then values, of a pool. Before the first write, the pool itself."""
    return mx.concatenate([key_pool.flatten(), value_pool.flatten()]) if token.size == 1 else token


def blocks_of(token: mx.array, size: int, t: dict[str, Any]) -> list[mx.array]:
    """Keys and values, [blocks, heads, slots, size]."""
    shape = (-1, t["KV_HEADS"], t["BLOCK"])
    return [token[:size].reshape(*shape, t["DK"]), token[size:].reshape(*shape, t["DV"])]


def kv_write(inputs: Sequence[Any], t: dict[str, Any], _shape: Any) -> list[mx.array]:
    new_keys, new_values, slots, key_pool, value_pool, token = inputs
    pools = blocks_of(contents(token, key_pool, value_pool), key_pool.size, t)
    slots = slots[: len(new_keys)]
    for pool, new in zip(pools, (new_keys, new_values), strict=True):
        pool[slots // t["BLOCK"], :, slots % t["BLOCK"]] = new
    return [mx.concatenate([pool.flatten() for pool in pools])]


def qkv_write(inputs: Sequence[Any], t: dict[str, Any], _shape: Any) -> list[mx.array]:
    *first, key_pool, value_pool, token = inputs
    queries, keys, values, slots = split_rows(first, t)
    return [queries, *kv_write([keys, values, slots, key_pool, value_pool, token], t, None)]


def qkv_write_quantized(inputs: Sequence[Any], t: dict[str, Any], _shape: Any) -> list[mx.array]:
    *first, key_pool, value_pool, token, scales = inputs
    queries, keys, values, slots = split_rows(first, t)
    return [queries, *kv_quantize([keys, values, slots, key_pool, value_pool, token, scales], t, None)]


def split_rows(inputs: Sequence[Any], t: dict[str, Any]) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Queries, the keys and values that are written, and slots."""
    rows, positions, slots, written, query_weight, key_weight, frequencies, settings = inputs
    query_eps, key_eps, log_base, scale, factor = settings.tolist()
    norms = (Norm(query_weight, query_eps), Norm(key_weight, key_eps)) if t["NORMS"] else None
    base, freqs = (None, frequencies) if t["FREQUENCIES"] else (2**log_base, None)
    rope = Rope(t["ROTATED"], t["TRADITIONAL"], base, scale, freqs, factor) if t["ROTATED"] else None
    layout = KVLayout(t["KV_HEADS"], t["DK"], t["DV"], t["T"], t["BLOCK"])
    qkv = Qkv(t["HEADS"], norms, rope, gated=t["GATED"])
    queries, keys, values = (x.squeeze(2) for x in qkv.split(rows, layout, positions))
    return queries, keys[:written], values[:written], slots


def paged_decode(inputs: Sequence[Any], t: dict[str, Any], shape: Any) -> list[mx.array]:
    *first, softcap, token = inputs
    return paged_attention([*first, 2**30, softcap, token], t | {"QUERIES": 1}, shape)


def paged_attention(inputs: Sequence[Any], t: dict[str, Any], shape: Any) -> list[mx.array]:
    queries, key_pool, value_pool, tables, items, _sinks, scale, window, _softcap, token = inputs
    keys, values = (
        pool[mx.maximum(tables[items[:, 0]], 0)].swapaxes(1, 2).flatten(2, 3)
        for pool in blocks_of(contents(token, key_pool, value_pool), key_pool.size, t)
    )
    values = mx.nan_to_num(values)  # of slots that no query sees; a NaN that one sees is in its key too
    key = mx.arange(keys.shape[2])
    begin, end = items[:, 4, None], items[:, 5, None]
    out = mx.zeros((shape[0] + 1, *shape[1:]))
    for j in range(t["QUERIES"]):
        position = items[:, 3, None] + j
        seen = (key >= begin) & (key < end) & (key <= position) & (key > position - window)
        rows = queries[mx.minimum(items[:, 1] + j, len(queries) - 1)]
        grouped = rows.reshape(len(items), t["KV_HEADS"], t["GROUP"], t["DK"])
        scores = mx.where(seen[:, None, None], scale * (grouped @ keys.swapaxes(-1, -2)), LEAST)
        best = scores.max(axis=-1, keepdims=True)
        weights = mx.where(seen[:, None, None], mx.exp(scores - best), 0)
        total, result = weights.sum(axis=-1, keepdims=True), weights @ values
        partial = mx.concatenate([result, best, total, 0 * best, 0 * best], axis=-1)
        result = partial if t["PARTIAL"] else result / total
        out[mx.where(j < items[:, 2], items[:, 6] + j, shape[0])] = result.flatten(1, 2)
    return [out[: shape[0]].astype(mx.float32 if t["PARTIAL"] else queries.dtype), token]


def merge_partials(inputs: Sequence[Any], t: dict[str, Any], shape: Any) -> list[mx.array]:
    partials, ranges, _sinks = inputs
    part = mx.arange(len(partials))
    first, stride, count = (ranges[: shape[0], i, None] for i in range(3))
    rows = partials[mx.minimum(first + part * stride, len(partials) - 1)]  # [T, parts, heads, D + 4]
    best = mx.where((part < count)[..., None], rows[..., t["D"]], LEAST)
    factor = mx.where((part < count)[..., None], mx.exp(best - best.max(axis=1, keepdims=True)), 0)
    total = (factor * rows[..., t["D"] + 1]).sum(axis=1)
    merged = (factor[..., None] * rows[..., : t["D"]]).sum(axis=1) / total[..., None]
    return [merged.astype(t["T"])]


def kv_quantize(inputs: Sequence[Any], t: dict[str, Any], _shape: Any) -> list[mx.array]:
    new_keys, new_values, slots, *pools, token, scales = inputs
    planes = quantized_planes(token, [*pools, scales], t)
    slots = slots[: len(new_keys)]
    for plane, new in zip(planes, quantization(t).quantize(new_keys, new_values), strict=True):
        plane[slots // t["BLOCK"], :, slots % t["BLOCK"]] = new
    return [mx.concatenate([plane.flatten() for plane in planes])]


def quantized_planes(token: mx.array, pools: Sequence[mx.array], t: dict[str, Any]) -> list[mx.array]:
    """Packed keys, packed values and scales, [blocks, heads, slots, ..]; the pools before the first write."""
    ends = [pools[0].size, pools[0].size + pools[1].size]
    parts = list(pools) if token.size == 1 else mx.split(token, ends)
    blocks = pools[2].size // (t["KV_HEADS"] * t["BLOCK"] * t["SCALES"])
    return [part.reshape(blocks, t["KV_HEADS"], t["BLOCK"], -1) for part in parts]


def quantization(t: dict[str, Any]) -> Quantization:
    return Quantization(t["KEY_BITS"], t["KEY_GROUP"], t["VALUE_BITS"], t["VALUE_GROUP"])


def of_quantized(kernel: Callable[..., list[mx.array]]) -> Callable[..., list[mx.array]]:
    """The kernel over dequantized pools."""

    def attend(inputs: Sequence[Any], t: dict[str, Any], shape: Any) -> list[mx.array]:
        queries, *pools = inputs[:3]
        *others, token, scales = inputs[3:]
        exact = quantization(t).dequantize(quantized_planes(token, [*pools, scales], t))
        out, _ = kernel([queries, *exact, *others, mx.zeros(1)], t, shape)
        return [out, token]

    return attend


def block_move(inputs: Sequence[Any], t: dict[str, Any], _shape: Any) -> list[mx.array]:
    *sources, key_pool, value_pool, moves, token = inputs
    both = contents(token, key_pool, value_pool)
    words = 16 // both.dtype.size
    pools = [both[: key_pool.size].reshape(-1, t["A"] * words), both[key_pool.size :].reshape(-1, t["B"] * words)]
    origins = pools if sources[0] is key_pool else [rows.reshape(len(rows), -1) for rows in sources]
    froms, targets = moves[: 2 * t["COUNT"]].reshape(-1, 2).T
    rows = [origin[froms] for origin in origins]
    if not t["INTO_POOL"]:
        return [*(each.view(mx.uint32) for each in rows), both]
    for pool, new in zip(pools, rows, strict=True):
        pool[targets] = new
    return [mx.zeros(1), mx.zeros(1), mx.concatenate([pool.flatten() for pool in pools])]


def add_rms_norm(inputs: Sequence[Any], _t: dict[str, Any], _shape: Any) -> list[mx.array]:
    x, y, weight, eps = inputs
    total = x + y
    squares = total.astype(mx.float32).square().mean(axis=-1, keepdims=True)
    return [total, weight * (total * mx.rsqrt(squares + eps)).astype(total.dtype)]


KERNELS = {
    "add_rms_norm": add_rms_norm,
    "block_move": block_move,
    "kv_write": kv_write,
    "qkv_write": qkv_write,
    "paged_attention": paged_attention,
    "paged_decode": paged_decode,
    "kv_quantize": kv_quantize,
    "qkv_write_quantized": qkv_write_quantized,
    "paged_attention_quantized": of_quantized(paged_attention),
    "paged_decode_quantized": of_quantized(paged_decode),
    "merge_partials": merge_partials,
}
