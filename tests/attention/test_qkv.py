"""Fused layers: heads are normalized and rotated as in float64, and keys and values go into their slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxpaged.attention import kernels
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KV_DTYPES, KVLayout
from mlxpaged.attention.qkv import QkvKind, QkvShape
from mlxpaged.attention.self_check import check_fusions, choose_backend
from tests.attention.qkv_cases import KINDS, SMALL, QkvCase, retyped
from tests.metal_on_cpu import Interpreter, is_supported
from tests.support import every

on_cpu = pytest.mark.skipif(not is_supported(), reason="needs the kernels to run on the CPU")


@pytest.mark.parametrize("name", every(3, KINDS))
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_the_kernel_computes_what_float64_does(metal: None, name: str, dtype: mx.Dtype) -> None:
    assert QkvCase(**retyped(dtype, KINDS[name])).is_right()


@pytest.mark.parametrize("backend", ["gather", "cpu"])
@pytest.mark.parametrize("name", KINDS)
def test_the_other_backends_compute_what_float64_does(name: str, backend: str) -> None:
    if backend == "cpu" and mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("only on a CPU")
    assert QkvCase(**KINDS[name]).is_right(backend)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_types_are_rounded_where_the_separate_kernels_of_mlx_round_them(metal: None, dtype: mx.Dtype) -> None:
    """To the bit in nearly all elements. A float32 sum in another order may be on the other side of a tie."""
    case = QkvCase(**retyped(dtype, KINDS["Qwen 3"] | {"factor": 0.8}))
    for got, expected in zip(case.run("metal"), case.expected(case.round), strict=True):
        assert (got == expected).mean() > 0.99


@pytest.mark.parametrize("lens", [((1, 1),), ((1, 300), (1, 7)), ((40, 50), (1, 33))], ids=str)
def test_any_number_of_tokens(metal: None, lens: tuple[tuple[int, int], ...]) -> None:
    assert QkvCase(**KINDS["Qwen 3"], lens=lens).is_right()


def test_every_element_is_read_once(metal_on_cpu: Interpreter) -> None:
    case = QkvCase(**KINDS["values of another size"])
    assert case.is_right()
    launch = metal_on_cpu.last_launch("qkv_write")
    assert launch.loads["rows"] == case.rows.size
    assert launch.loads["key_pool"] == launch.loads["value_pool"] == 0


@on_cpu
def test_any_order_of_threads_gives_the_same() -> None:
    with Interpreter(seeds=range(3)).installed():
        assert QkvCase(**KINDS["a part"]).is_right()


def test_the_kernel_and_readers_run_in_the_order_of_their_calls(metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tokens that pass between the kernels: MLX knows of no other order."""
    calls: list[tuple[str, mx.array, mx.array]] = []
    launch = kernels.launch

    def recording(name: str, inputs: list[Any], *rest: Any, **options: Any) -> list[mx.array]:
        results = launch(name, inputs, *rest, **options)
        calls.append((name, inputs[-1], results[-1]))
        return results

    case = QkvCase(**SMALL, lens=((1, 9), (1, 20)))
    kv = LayerKVCache.from_layout(case.blocks, case.layout, "metal")
    monkeypatch.setattr(kernels, "launch", recording)
    for _ in range(2):
        kv.attend(kv.write_rows(case.rows, case.qkv, case.meta), case.meta, scale=1.0)
    names, after, done = zip(*calls, strict=True)
    assert names == ("qkv_write", "paged_decode") * 2
    assert all(this is before for this, before in zip(after[1:], done[:-1], strict=True))
    assert kv.arrays[2] is done[-1]


def test_without_the_kernel_the_models_own_rope_is_called() -> None:
    calls = []

    class Own(nn.RoPE):
        """Without arrays it is false, as MLX's modules are dictionaries."""

        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            calls.append(x.shape)
            return super().__call__(x, offset)

    case = QkvCase(**SMALL)
    expected = case.run("gather")
    case.qkv = replace(case.qkv, own_rope=Own(32))
    assert all(np.array_equal(got, own) for got, own in zip(case.run("gather"), expected, strict=True))
    assert calls == [(9, 6, 1, 32)]  # queries and keys at once


def test_repeated_rows_of_a_tile_are_not_written(metal: None) -> None:
    """Two threads must not write one slot. The interpreter would find the race."""
    case = QkvCase(**SMALL, lens=((1, 9), (1, 20)))
    expected = case.run("metal")
    case.repeat_last()
    queries, keys, values = case.run("metal")
    assert np.array_equal(queries, expected[0][[0, 1, 1]])
    assert np.array_equal(keys, expected[1])
    assert np.array_equal(values, expected[2])


def test_a_layer_without_the_kernel_gives_the_same(metal_on_cpu: Interpreter) -> None:
    case = QkvCase(**SMALL)
    kv = LayerKVCache.from_layout(case.blocks, case.layout, "metal")
    fused, separate = (kv.view(case.layout, fuses=fuses) for fuses in (True, False))
    own, other = (each.write_rows(case.rows, case.qkv, case.meta) for each in (fused, separate))
    assert mx.allclose(own, other, atol=1e-4)
    assert [launch.kernel for launch in metal_on_cpu.launches] == ["qkv_write", "kv_write"]


@pytest.mark.parametrize(
    "rows", [mx.zeros((9, 255)), mx.zeros((8, 256)), mx.zeros((9, 256), mx.float16)], ids=lambda rows: str(rows.shape)
)
def test_rows_of_another_shape_or_type_are_refused(rows: mx.array) -> None:
    case = QkvCase(**SMALL)
    kv = LayerKVCache.from_layout(case.blocks, case.layout, "gather")
    with pytest.raises(ValueError, match=r"rows must be mlx.core.float32 \(9, 256\), got"):
        kv.write_rows(rows, case.qkv, case.meta)


# The self-check

SHAPES = [
    QkvShape(KVLayout(2, 32, 32, mx.float32, 32), QkvKind(4, 32)),
    QkvShape(KVLayout(1, 128, 128, mx.bfloat16, 16), QkvKind(3, 128, norms=True)),
    QkvShape(KVLayout(2, 64, 48, mx.float16, 8), QkvKind(2, 24, traditional=True, frequencies=True, norms=True)),
    QkvShape(KVLayout(2, 64, 64, mx.bfloat16, 8), QkvKind(2)),
    QkvShape(KVLayout(2, 64, 64, mx.bfloat16, 32), QkvKind(8, 16, norms=True, gated=True)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sound_kernel_passes(metal: None, shape: QkvShape) -> None:
    [check] = check_fusions([shape, shape])
    assert (check.shape, check.problem, check.stops_metal) == (shape, None, False)
    assert choose_backend("auto", [], fusions=[shape]).unfused == frozenset()


def test_a_broken_kernel_is_named_and_its_layers_run_without_it(
    metal: None, copied_kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied_kernels / "qkv_write.metal"
    path.write_text(path.read_text().replace("NORMS", "NORM"))
    choice = choose_backend("auto", [], fusions=SHAPES[:2])
    assert (choice.backend, choice.kernels_off, choice.unfused) == ("metal", None, frozenset(SHAPES[:2]))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert str(SHAPES[0]) in caplog.text
    assert "the kernel of fused layers is not used" in caplog.text


def test_loops_over_the_pairs_of_a_lane_are_unrolled() -> None:
    """From head size 256 on, clang leaves them as loops otherwise, and the arrays that they index are in memory in
    place of registers."""
    lines = (kernels.kernel_directory() / "qkv_write.metal").read_text().splitlines()
    loops = [number for number, line in enumerate(lines) if line.startswith("  for (int i = 0; i < PAIRS_OF_LANE")]
    assert len(loops) == 2
    assert all(lines[number - 1] == "#pragma clang loop unroll(full)" for number in loops)
