"""What a launch may use, and that what is not supported never gets as far as one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from mlxpaged.attention import kernels
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KV_DTYPES, KVLayout
from mlxpaged.attention.metadata import AttentionMetadata, Upload, split
from mlxpaged.attention.pool import Locality, bind
from mlxpaged.attention.qkv import Qkv, Rope
from mlxpaged.attention.quantization import quantization_of
from mlxpaged.attention.tile_schedule import make_schedule
from mlxpaged.attention.tuning import MATRIX, Tuning
from mlxpaged.attention.variants import (
    MAX_KEY_FLOATS,
    MAX_SUMS,
    ROWS,
    THREADS,
    DecodeVariant,
    TileVariant,
    choose_decode,
    choose_tile,
)
from mlxpaged.models.joins.joined_norms import Addition
from tests.attention.metal_cases import HEAD_DIMS, Case
from tests.metal_on_cpu import Interpreter

SIZES = [*((size, size) for size in HEAD_DIMS), (192, 128), (96, 64), (36, 20), (64, 96), (576, 512), (320, 256)]
SIZES += [(1280, 512), (1276, 4), (4, 4), (264, 260)]


@pytest.mark.parametrize("single_queries", [True, False])
def test_every_tile_keeps_to_the_limits_of_a_threadgroup(single_queries: bool) -> None:
    for dtype, (key_size, size), group in itertools.product(KV_DTYPES, SIZES, range(1, 130)):
        variant = choose_tile(KVLayout(2, key_size, size, dtype, 32), group, single_queries=single_queries)
        assert variant.threadgroup_memory <= kernels.MAX_THREADGROUP_MEMORY
        assert THREADS <= kernels.MAX_THREADS
        assert variant.heads * variant.head_tiles >= group > variant.heads * (variant.head_tiles - 1)
        assert 1 <= variant.rows <= ROWS
        assert size % variant.vec == 0
        assert size // variant.vec <= THREADS, "a thread per column"
        assert variant.rows * variant.vec <= MAX_SUMS == 64, "sums in the registers of a thread"
        assert -(-key_size // (4 * variant.lanes)) * 4 <= MAX_KEY_FLOATS == 40, "and elements of a key"
        assert variant.vec in (1, 2, 4), "a vector of Metal"
        assert 32 % variant.lanes == 0, "lanes of one simdgroup"
        if group <= 16 and (key_size <= 256 or (key_size <= 576 and dtype is not mx.float32)):
            assert variant.head_tiles == 1, "all heads of a KV head in one threadgroup"


@pytest.mark.parametrize(("size", "largest"), [(64, 16), (128, 16), (192, 8), (256, 8), (512, 4)])
def test_the_decode_kernel_takes_groups_whose_sums_fit_the_registers(size: int, largest: int) -> None:
    layout = KVLayout(2, size, size, mx.bfloat16, 32)
    kinds = [type(choose_decode(layout, group)) for group in range(1, 130)]
    in_two = range(largest + 2 - largest % 2, 2 * largest + 1, 2)
    expected = [DecodeVariant if group <= largest or group in in_two else TileVariant for group in range(1, 130)]
    assert kinds == expected, "an even group may be divided in two"


def test_every_decode_variant_keeps_to_the_limits_of_a_threadgroup() -> None:
    sizes = itertools.product(KV_DTYPES, SIZES, range(1, 130), [False, True], [1, 8])
    for dtype, (key_size, size), group, by_head, kv_heads in sizes:
        variant = choose_decode(KVLayout(kv_heads, key_size, size, dtype, 32), group, by_head=by_head)
        if isinstance(variant, TileVariant):
            assert variant.queries == 1
            continue
        assert variant.threadgroup_memory <= kernels.MAX_THREADGROUP_MEMORY
        assert variant.heads * variant.value_chunks * 4 <= MAX_SUMS
        assert variant.heads * variant.head_tiles == group
        assert variant.heads == 1 if by_head else variant.head_tiles <= 2
        assert variant.threads <= 384, "with the most registers for each"
        assert variant.values * variant.value_chunks <= 8, "vectors of values in the registers of a lane"
        assert variant.keys * -(-key_size // (4 * variant.lanes)) * 4 <= MAX_KEY_FLOATS, "and elements of keys"
        assert variant.tile % (32 // variant.lanes * variant.keys) == 0
        assert variant.tile % (32 // variant.column_lanes * variant.values) == 0
        assert 4 * variant.column_lanes * variant.value_chunks >= size
        assert variant.heads <= 32, "a lane for each head"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "lens"),
    [
        (mx.float32, 256, 16, [(1, 40)]),
        (mx.float32, 256, 2, [(9, 40)]),
        (mx.float32, 192, 8, [(9, 40)]),
        (mx.bfloat16, 128, 33, [(1, 40)]),
        (mx.bfloat16, 128, 32, [(1, 3)] * 64),
        (mx.bfloat16, 512, 8, [(1, 3)] * 64),
        (mx.float32, 256, 8, [(1, 3)] * 128),
        (mx.float16, 80, 1, [(1, 40)]),
        (mx.float16, 112, 3, [(20, 40)]),
        (mx.bfloat16, 512, 16, [(1, 40)]),
        (mx.float32, 512, 4, [(3, 9)]),
        (mx.float16, 64, 8, [(1, 40)]),
    ],
    ids=str,
)
def test_threadgroup_memory_is_what_was_calculated(
    metal_on_cpu: Interpreter, dtype: mx.Dtype, head_dim: int, group: int, lens: list[tuple[int, int]]
) -> None:
    Case(lens, dtype=dtype, head_dim=head_dim, group=group, kv_heads=1).check()
    layout = KVLayout(1, head_dim, head_dim, dtype, 32)
    by_head = len(lens) < 64
    variant = choose_decode(layout, group, by_head=by_head) if lens[0][0] == 1 else choose_tile(layout, group)
    used = metal_on_cpu.last_launch(variant.name).threadgroup_memory
    assert variant.threadgroup_memory - 64 <= used <= variant.threadgroup_memory


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 50}, "keys whose size is a multiple of 4, because a thread loads 4 elements at once, not 50"),
        (
            {"head_dim": 1284, "value_size": 64},
            "keys of up to 1280 elements, because 32 lanes hold a key, .*, not 1284",
        ),
        ({"value_size": 30}, "values whose size is a multiple of 4, .*, not 30"),
        ({"head_dim": 516}, "values of up to 512 elements, because 128 threads sum 4 columns each, not 516"),
        ({"block_size": 64}, "blocks of .* tokens, not 64"),
        ({"block_size": 4}, "blocks of .* tokens, not 4"),
        ({"dtype": mx.int8}, "int8"),
    ],
    ids=str,
)
def test_unsupported_sizes_and_types_are_named_before_any_launch(
    metal_on_cpu: Interpreter, options: dict[str, object], message: str
) -> None:
    arguments = {"num_kv_heads": 2, "head_dim": 64, "dtype": mx.float32, "block_size": 32} | options
    with pytest.raises(ValueError, match=message):
        LayerKVCache(4, backend="metal", **arguments)  # type: ignore[arg-type]
    assert metal_on_cpu.launches == []


def test_bad_arguments_are_named_before_any_launch(metal_on_cpu: Interpreter) -> None:
    kv = LayerKVCache(4, 2, 64, mx.float32, backend="metal")
    meta = AttentionMetadata.build([1], [1], [[3]])
    outside = AttentionMetadata.build([1], [1], [[4]])
    row = mx.zeros((1, 2, 64))
    with pytest.raises(ValueError, match="block id 4 is out of range"):
        kv.write(row, row, outside)
    with pytest.raises(ValueError, match="block id 4 is out of range"):
        kv.attend(row, outside, scale=1.0)
    with pytest.raises(ValueError, match=r"must be .*float32"):
        kv.attend(row.astype(mx.float16), meta, scale=1.0)
    with pytest.raises(ValueError, match="a block is written twice"):
        kv.copy_blocks([(0, 1), (2, 1)])
    with pytest.raises(ValueError, match="block id 4 is out of range"):
        kv.copy_blocks([(4, 1)])
    assert metal_on_cpu.launches == []


def test_a_launch_beyond_metals_limits_is_refused(metal_on_cpu: Interpreter) -> None:
    with pytest.raises(ValueError, match="kv_write: 2048 threads in a threadgroup, but Metal allows 1024"):
        kernels.launch("kv_write", [], [], (2048, 1, 1), (1024, 2, 1), [])
    with pytest.raises(ValueError, match="paged_attention: 32769 bytes of threadgroup memory, but Metal allows 32768"):
        kernels.launch("paged_attention", [], [], (128, 1, 1), (128, 1, 1), [], threadgroup_memory=32769)


def test_a_pool_of_more_elements_than_an_int32_counts_is_bound() -> None:
    """Of 4.3 GB in 16-bit types, as a Mac with 128 GB or more has for a model of few layers. Here all rows are one."""
    pool = mx.broadcast_to(mx.arange(8.0)[None], (2**28 + 1, 8))
    assert pool.size > 2**31
    assert bind(pool).tolist() == list(range(8))


def test_a_kernel_is_built_once(metal_on_cpu: Interpreter) -> None:
    case = Case([(1, 5)])
    builds = kernels.build.cache_info().misses
    for _ in range(3):
        case.check()
    assert kernels.build.cache_info().misses == builds + 1, "paged_decode; the writes had been built before"


def test_every_kernel_file_has_its_names_and_a_header() -> None:
    files = {path.stem: path.read_text() for path in kernels.kernel_directory().glob("*.metal")}
    assert files.keys() == kernels.INPUTS_AND_OUTPUTS.keys()
    for name, source in files.items():
        head = source[: source.index("\nconst")]
        assert all(line.startswith("//") for line in head.splitlines()), name
        assert "// grid (" in head, name
        for word in itertools.chain(*kernels.INPUTS_AND_OUTPUTS[name]):
            assert word in head or word in ("scale", "softcap", "window"), f"{name}: {word}"


def test_mlx_takes_our_launches_and_generates_the_source_that_was_tested(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX's own metal_kernel, traced without running: it prints its source. Ours for the same inputs is compiled."""
    ours = []
    theirs: Any = mx.fast.metal_kernel

    def both(**built: Any) -> Any:
        def call(**launched: Any) -> Any:
            arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in launched["inputs"]]
            kernel = Interpreter().metal_kernel(**built)
            ours.append(kernel.signature(arrays, launched["output_dtypes"], launched["template"]).source)
            return theirs(**built)(**launched, verbose=True)

        return call

    def step(queries: mx.array, rows: mx.array) -> mx.array:
        kv = LayerKVCache(8, 2, 64, mx.bfloat16, backend="metal")
        kv.write_blocks([4], *kv.read_blocks([3]))
        kv.copy_blocks([(4, 5)])
        mixed = AttentionMetadata.build([1, 128, 2], [33, 128, 7], [[6, 7], [0, 1, 2, 3], [4]])
        kv.write(rows, rows, mixed)
        kv.write_rows(mx.zeros((131, 8 * 64), mx.bfloat16), Qkv(4, None, Rope(64, base=1e4)), mixed)
        Addition(norm).compute(queries.reshape(131, -1), queries.reshape(131, -1))
        sinks = mx.zeros((4,))
        long = AttentionMetadata.build([1], [1000], [[0] * 32])
        softcapped = kv.attend(queries[:1], long, scale=0.1, softcap=5.0, sinks=sinks)
        matrix = kv.view(kv.layout, Tuning(chunks=MATRIX)).attend(queries, mixed, scale=0.1)
        latents = LayerKVCache.from_layout(8, KVLayout(1, 64, 48, mx.bfloat16, 32, latent=True), "metal")
        latents.write(rows[:, :1, :48], rows[:, :1, 48:], mixed)
        of_latents = latents.attend(queries[..., :48], mixed, scale=0.1, q_pe=queries[..., 48:])
        matrix += mx.pad(of_latents, [(0, 0), (0, 0), (0, 16)])
        layout = KVLayout(2, 64, 64, mx.bfloat16, quantization=quantization_of("int4", 64, 64), block_size=32)
        packed = LayerKVCache.from_layout(8, layout, "metal")
        packed.write(rows, rows, mixed)
        quantized = packed.attend(queries, mixed, scale=0.1)
        quantized += packed.view(layout, Tuning(chunks=MATRIX)).attend(queries, mixed, scale=0.1)
        return kv.attend(queries, mixed, scale=0.1, window=20, sinks=sinks) + softcapped + matrix + quantized

    norm = nn.RMSNorm(256)
    norm.set_dtype(mx.bfloat16)
    monkeypatch.setattr(kernels, "can_run", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", both)
    capfd.readouterr()
    arrays = mx.zeros((131, 4, 64), mx.bfloat16), mx.zeros((131, 2, 64), mx.bfloat16)
    mx.export_function(str(tmp_path / "step.mlxfn"), step, *arrays)
    printed = capfd.readouterr().out.split("```\n")[1::2]
    assert [source.rstrip("\n") for source in printed] == [source.rstrip("\n") for source in ours]
    launched = {name for name in kernels.INPUTS_AND_OUTPUTS for source in ours if f"custom_kernel_{name}" in source}
    assert launched == kernels.INPUTS_AND_OUTPUTS.keys()
    for name in ("paged_decode", "paged_attention", "matrix_attention", "kv_gather"):
        assert any(f"custom_kernel_{name}_quantized" in source for source in ours), name


def test_steps_and_moves_of_any_size_are_the_same_kernels_to_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX passes an input of fewer than 8 elements in another address space: that would be one more kernel."""
    kernels_of: dict[int, set[Any]] = {}

    def stub(name: str, **_built: Any) -> Any:
        def call(inputs: Any, template: Any, output_shapes: Any, output_dtypes: Any, **_launched: Any) -> Any:
            small = tuple(isinstance(x, mx.array) and x.size < 8 for x in inputs)
            kernels_of[count].add((name, str(template), small))
            return [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]

        return call

    monkeypatch.setattr(mx.fast, "metal_kernel", stub)
    for count in (1, 3, 20):
        kernels_of[count] = set()
        kv = LayerKVCache(41, 2, 64, mx.float16, backend="metal")
        meta = AttentionMetadata.build([1] * count, [count] * count, [[i] for i in range(count)])
        rows = mx.zeros((count, 2, 64), mx.float16)
        kv.write(rows, rows, meta)
        kv.attend(rows, meta, scale=0.1)
        kv.read_context(AttentionMetadata.build([1], [32 * count], [list(range(count))]))
        kv.copy_blocks([(i, 20 + i) for i in range(count)])
        kv.write_blocks(range(count), *kv.read_blocks(range(count)))
    assert len(kernels_of[1]) == 5
    assert kernels_of[1] == kernels_of[3] == kernels_of[20]


# Tile schedule


@pytest.mark.parametrize("window", [None, 50, 5000])
@pytest.mark.parametrize("queries", [1, 4, 32])
@pytest.mark.parametrize("partition", [64, 512])
@pytest.mark.parametrize("spans", [{}, {1: [(690, 697), (698, 700)], 4: [(131045, 131060)], 5: [(0, 3)]}], ids=bool)
def test_work_items_cover_every_visible_key_of_every_query_once(
    window: int | None, queries: int, partition: int, spans: dict[int, list[tuple[int, int]]]
) -> None:
    lens = [(1, 1), (7, 700), (1, 2048), (100, 100), (33, 131072), (3, 3)]
    tables = [list(range(-(-context // 32))) for _, context in lens]
    meta = AttentionMetadata.build([q for q, _ in lens], [c for _, c in lens], tables, spans=spans)
    members = np.array([0, 1, 2, 4, 5])
    upload, locality = Upload(), Locality(window, mutual=True)
    schedule = make_schedule(meta.step, members, locality, queries, partition, upload)
    arrays = split(mx.array(upload.vector), upload.shapes)
    items = np.array(arrays[schedule.items])
    assert len(items) == schedule.num_items
    empty = items[:, 4] == items[:, 5]
    assert not empty.any() or queries == 1
    rows_of_empty = items[empty, 6].tolist()
    items = items[~empty]
    starts = np.concatenate(([0], np.cumsum([q for q, _ in lens])))
    seen: dict[int, list[tuple[int, int, int]]] = {}
    rows_of_out = rows_of_empty
    for sequence, row, count, position, begin, end, first, last_of_image in items.tolist():
        assert 1 <= count <= queries
        assert 0 < end - begin <= partition
        assert begin // partition == (end - 1) // partition, "between two multiples"
        assert position == lens[sequence][1] - lens[sequence][0] + row - starts[sequence]
        for j in range(count):
            images = [last - 1 for start, last in spans.get(sequence, ()) if start <= position + j < last]
            assert [last_of_image] == (images or [0]), "a tile is within an image or beside all"
            seen.setdefault(row + j, []).append((begin, end, first + j))
            rows_of_out.append(first + j)
    assert sorted(rows_of_out) == list(range(schedule.num_partials))
    order = [row for i in members for row in range(starts[i], starts[i + 1])]
    assert sorted(seen) == sorted(order)
    for place, row in enumerate(order):
        sequence = int(np.searchsorted(starts, row, side="right")) - 1
        position = lens[sequence][1] - lens[sequence][0] + row - starts[sequence]
        parts = sorted(seen[row])
        assert parts[0][0] <= (0 if window is None else max(0, position + 1 - window))
        assert parts[-1][1] > locality.last_keys(meta.step, sequence)[row - starts[sequence]]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        if schedule.ranges is None:
            assert [first for _, _, first in parts] == [place]
        else:
            begin, stride, count, _ = np.array(arrays[schedule.ranges])[place].tolist()
            assert [begin + stride * i for i in range(count)] == [first for _, _, first in parts]
