"""The Metal backend against float64: every type and size it takes, ragged batches, windows, softcap, sinks, and what
must never be read."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention import kernels
from mlxpaged.attention.kv_cache import LayerKVCache, resolve_backend
from mlxpaged.attention.layout import KV_DTYPES, KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.pool import Memory
from mlxpaged.attention.tuning import CONTIGUOUS, MATRIX, Choice, Tuning
from mlxpaged.attention.variants import BLOCK_SIZES
from tests.attention.metal_cases import HEAD_DIMS, Case
from tests.attention.scenes import fill_blocks, write
from tests.metal_on_cpu import Interpreter, is_supported
from tests.support import every

on_cpu = pytest.mark.skipif(not is_supported(), reason="needs the kernels to run on the CPU")

LENGTHS = (1, 31, 32, 33, 511, 512, 513)
DECODE = [(1, n) for n in LENGTHS]
SHORT_DECODE = [(1, 1), (1, 33), (1, 70)]
MIXED = [(1, 33), (5, 5), (20, 50), (1, 1), (33, 64), (2, 140)]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"window": 20},
    {"softcap": 2.0},
    {"has_sinks": True},
    {"window": 9, "softcap": 3.0, "has_sinks": True},
    {"chunk": 30},
]
GROUPS = (1, 2, 3, 4, 7, 8)

TYPES_AND_SIZES = [(i, *both) for i, both in enumerate(itertools.product(KV_DTYPES, HEAD_DIMS))]
CHECKERED = [entry for entry in TYPES_AND_SIZES if (entry[0] + entry[0] // len(HEAD_DIMS)) % 2 == 0]
"""Half of them, each type and each size among them."""


def nth(choices: Any, i: int) -> Any:
    return choices[i % len(choices)]


@pytest.mark.parametrize(("i", "dtype", "head_dim"), every(4, TYPES_AND_SIZES))
def test_decode_is_exact_for_every_type_and_head_size(metal: None, i: int, dtype: mx.Dtype, head_dim: int) -> None:
    """Beside them block sizes, groups and extras in turns; the slow tests take the product. A context is one
    range by default here."""
    options = {
        "dtype": dtype,
        "head_dim": head_dim,
        "block_size": nth(BLOCK_SIZES, i),
        "group": nth(GROUPS, i),
        "seed": i,
    }
    Case(SHORT_DECODE, decode_partition=nth((None, 32), i), **options, **nth(EXTRAS, i)).check()


@pytest.mark.parametrize(("i", "dtype", "head_dim"), every(4, CHECKERED))
def test_chunks_are_exact_for_every_type_and_head_size(metal: None, i: int, dtype: mx.Dtype, head_dim: int) -> None:
    options = {"dtype": dtype, "head_dim": head_dim, "block_size": nth(BLOCK_SIZES, i + 1), "seed": i, "kv_heads": 1}
    lens = nth(([(5, 5), (20, 50)], [(33, 64), (2, 140)], [(2, 33), (13, 13)]), i)
    group = nth(GROUPS, i + 2)
    Case(lens, chunk_partition=nth((4096, 48), i), group=group, **options, **nth(EXTRAS, i + 1)).check()


DEEPSEEK = {"head_dim": 576, "value_size": 512, "latent": True, "kv_heads": 1}
"""Its rows of multi-head latent attention."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "MiMo-V2-Flash": {"head_dim": 192, "value_size": 128, "kv_heads": 1, "group": 16, "dtype": mx.bfloat16},
    "DeepSeek-V2-Lite": {"head_dim": 192, "value_size": 128, "group": 1},
    "MiniCPM3": {"head_dim": 96, "value_size": 64, "group": 1, "dtype": mx.float16, "softcap": 3.0},
    "values larger than keys": {"head_dim": 64, "value_size": 96, "group": 3, "block_size": 8},
    "no chunk is whole": {"head_dim": 36, "value_size": 20, "group": 2, "window": 20},
    "a small latent": {"head_dim": 44, "value_size": 36, "latent": True, "kv_heads": 1, "group": 4, "block_size": 16},
    "Mistral 4": {"head_dim": 320, "value_size": 256, "latent": True, "kv_heads": 1, "group": 32, "window": 30},
    "GLM-4.7-Flash": DEEPSEEK | {"group": 20, "dtype": mx.bfloat16},
    "DeepSeek-V3 in float32": DEEPSEEK | {"group": 5, "has_sinks": True, "block_size": 8},
}


@pytest.mark.parametrize("name", every(4, LAYOUTS))
def test_values_of_their_own_size_and_latents_are_exact(metal: None, name: str) -> None:
    options = LAYOUTS[name]
    Case([(1, 1), (1, 33), (1, 70)], decode_partition=32, **options).check()
    Case([(1, 40), (2, 33), (9, 20)], chunk_partition=16, **options).check()
    if options.get("dtype") is not mx.bfloat16:  # MLX's own attention rounds weights to bfloat16 on a CPU
        Case([(128, 140)], **options).check()


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_at_the_edges_of_blocks_and_partitions(metal: None, length: int) -> None:
    Case([(1, length), (1, length + 1)], kv_heads=1, head_dim=32).check()


def test_decode_of_all_lengths_together(metal: None) -> None:
    Case([*DECODE, (1, 4097), (1, 1)], kv_heads=1, group=4, head_dim=64).check()


def test_decode_over_128k_tokens(unchecked: None) -> None:
    Case([(1, 131072), (1, 7)], head_dim=32, kv_heads=1).check()


@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("decode_partition", [64, 512])
def test_extras_in_decode(metal: None, extras: dict[str, Any], decode_partition: int) -> None:
    Case([(1, 5), (1, 64), (1, 200)], head_dim=32, decode_partition=decode_partition, **extras).check()


@pytest.mark.parametrize("extras", every(2, EXTRAS), ids=str)
@pytest.mark.parametrize("chunk_partition", [32, 4096])
def test_extras_in_a_mixed_batch(metal: None, extras: dict[str, Any], chunk_partition: int) -> None:
    Case(MIXED, head_dim=32, chunk_partition=chunk_partition, **extras).check()


@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_long_chunks_are_exact(metal: None, extras: dict[str, Any]) -> None:
    Case([(130, 150), (128, 128)], head_dim=32, **extras).check()
    Case([(130, 150)], head_dim=32, block_size=8, **extras).check()


IMAGES = {2: [(35, 48)], 4: [(31, 60), (62, 64)], 5: [(138, 140)]}
"""Of MIXED: within a chunk, from before it on, two in one chunk, and one of two tokens."""


@pytest.mark.parametrize("extras", [*EXTRAS[:2], EXTRAS[4]], ids=str)
@pytest.mark.parametrize("chunk_partition", every(2, [16, 4096]))
def test_images_whose_tokens_see_one_another(
    metal_on_cpu: Interpreter, extras: dict[str, Any], chunk_partition: int
) -> None:
    Case(MIXED, head_dim=32, chunk_partition=chunk_partition, spans=IMAGES, **extras).check()
    names = [launch.kernel for launch in metal_on_cpu.launches]
    assert [names.count(name) for name in ("kv_gather", "paged_attention", "paged_decode")] == [0, 1, 1]


@pytest.mark.parametrize("extras", [*EXTRAS[:2], EXTRAS[4]], ids=str)
def test_images_in_long_chunks_are_exact(metal_on_cpu: Interpreter, extras: dict[str, Any]) -> None:
    """MLX's own attention takes their masks."""
    Case([(1, 33), (130, 150)], head_dim=32, spans={1: [(18, 60), (70, 150)]}, **extras).check()
    names = [launch.kernel for launch in metal_on_cpu.launches]
    assert [names.count(name) for name in ("kv_gather", "paged_attention")] == [1, 0]


@pytest.mark.parametrize("seed", every(8, range(24)))
def test_images_in_random_batches_are_exact(unchecked: None, seed: int) -> None:
    """Text beside images, chunks that begin within an image, windows shorter than one. All kernels for chunks."""
    source = random.Random(seed)
    lens, spans = [], {}
    for i in range(5):
        query = source.choice((1, 2, 9, 20, 45))
        context = query + source.choice((0, 3, 40))
        start, images = max(0, context - query - source.randrange(6)), []
        while query > 1 and context - start > 2 and len(images) < 3 and source.random() < 0.8:
            end = source.randint(max(start, context - query) + 2, context)
            images.append((start, end))
            start = end + source.randrange(4)
        spans |= {i: images} if images else {}
        lens.append((query, context))
    chunks = replace(source.choice((MATRIX, Choice(4096))), partition=source.choice((32, 4096)))
    sizes = {"head_dim": nth((32, 20), seed), "block_size": nth(BLOCK_SIZES, seed), "group": nth(GROUPS, seed)}
    window, sinks = source.choice((None, None, 12, 50)), source.random() < 0.5
    tuning = Tuning(chunks=nth((chunks, CONTIGUOUS, chunks), seed))
    Case(lens, tuning=tuning, window=window, has_sinks=sinks, seed=seed, spans=spans, **sizes).check()


@pytest.mark.parametrize("matrix", [False, True])
def test_only_steps_with_images_take_the_variant_for_them(metal_on_cpu: Interpreter, matrix: bool) -> None:
    """Text has the bits that it has without images."""
    chunks = MATRIX if matrix else Choice(4096)
    case = Case([(1, 33), (20, 50), (9, 40)], head_dim=32, tuning=Tuning(chunks=chunks), spans={1: [(33, 46)]})
    with_images = case.attend()
    text = AttentionMetadata.build([1, 20, 9], [33, 50, 40], case.tables, case.block_size)
    queries = case.array(np.concatenate(case.queries))
    plain = np.array(case.kv.attend(queries, text, **case.options))
    of_image = np.arange(len(plain)) - 1 - 3
    is_text = (of_image < 0) | (of_image >= 12)
    assert np.array_equal(with_images[is_text], plain[is_text])
    assert not np.isclose(with_images[~is_text], plain[~is_text]).all(axis=(1, 2)).any()


def test_long_chunks_go_through_mlx_attention(metal_on_cpu: Interpreter) -> None:
    Case([(1, 40), (130, 150), (3, 9), (128, 128)], head_dim=32).check()
    names = [launch.kernel for launch in metal_on_cpu.launches]
    assert names.count("kv_gather") == 2
    assert names.count("paged_decode") == 1, "for the decoding sequence"
    assert names.count("paged_attention") == 1, "for the short chunk"


def test_layers_of_one_step_may_have_groups_of_their_own(metal: None) -> None:
    """A softcap's scores are masked head by head. Kernels for these two groups have tiles of as many tokens."""
    kv = LayerKVCache(16, 1, 32, mx.float32, 8, backend="metal")
    keys = mx.random.normal((128, 1, 32), key=mx.random.key(0))

    def attend(group: int, meta: AttentionMetadata) -> mx.array:
        queries = mx.random.normal((128, group, 32), key=mx.random.key(group))
        return kv.attend(queries, meta, scale=0.2, softcap=2.0)

    def step() -> AttentionMetadata:
        return AttentionMetadata.build([128], [128], [list(range(16))], 8)

    shared = step()
    kv.write(keys, keys, shared)
    for group in (7, 8):
        assert mx.array_equal(attend(group, shared), attend(group, step()))


@pytest.mark.parametrize("group", every(2, [12, 16, 33, 71]))
def test_any_group_size_up_to_multi_query_attention(metal: None, group: int) -> None:
    Case(SHORT_DECODE, kv_heads=1, group=group, head_dim=64).check()
    Case(MIXED[:3], kv_heads=1, group=group, head_dim=64, chunk_partition=32).check()


@pytest.mark.parametrize("decode_partition", [64, 512])
def test_scores_in_the_hundreds(metal: None, decode_partition: int) -> None:
    """Their exponentials overflow without a running maximum."""
    case = Case([(1, 300), (1, 33)], sharpness=300, decode_partition=decode_partition)
    assert case.error() < 1e-3


def test_weights_of_other_ranges_of_keys_vanish(metal: None) -> None:
    """One key far above all others, in one partition of many."""
    case = Case([(1, 200)], sharpness=1000, decode_partition=32, window=50)
    assert case.error() < 1e-3


@pytest.mark.parametrize("company", [[(1, 33), (1, 600)], [(9, 40), (3, 3)], [(130, 140)]], ids=str)
@pytest.mark.parametrize("extras", [{}, EXTRAS[-1]], ids=str)
def test_the_bits_of_an_answer_do_not_depend_on_its_company(
    metal: None, company: list[tuple[int, int]], extras: dict[str, Any]
) -> None:
    case = Case([(1, 70), (1, 40), *company], **extras)
    together = case.attend()
    for i, context in enumerate((70, 40)):  # of two ranges, and of one
        alone = AttentionMetadata.build([1], [context], case.tables[i : i + 1], case.block_size)
        out = case.kv.attend(case.array(case.queries[i]), alone, **case.options)
        assert np.array_equal(np.array(out)[0], together[i])


@on_cpu
@pytest.mark.parametrize("lens", [DECODE[:4], MIXED], ids=["decode", "mixed"])
def test_any_order_of_threads_gives_the_same(lens: list[tuple[int, int]]) -> None:
    with Interpreter(seeds=range(3)).installed():
        Case(lens, head_dim=32, window=30, decode_partition=32, chunk_partition=48).check()


@on_cpu
def test_unchecked_execution_gives_the_same_numbers() -> None:
    with Interpreter().installed():
        checked = Case(MIXED).attend()
    with Interpreter(checked=False).installed():
        assert np.array_equal(Case(MIXED).attend(), checked)


# Reading no more than there is


WINDOWS_AND_SIZES = [(None, 128), (100, 128), (None, 120)]


@pytest.mark.parametrize("group", every(2, [4, 1, 8]))
@pytest.mark.parametrize(("window", "head_dim"), WINDOWS_AND_SIZES)
@pytest.mark.rotated("slow")
def test_decode_reads_every_key_and_value_once(
    metal_on_cpu: Interpreter, group: int, window: int | None, head_dim: int
) -> None:
    options = {"kv_heads": 16 if window is None else 44, "dtype": mx.float16, "window": window}
    case = Case([(1, 1), (1, 33), (1, 600)], group=group, head_dim=head_dim, **options)
    case.check()
    launch = metal_on_cpu.last_launch("paged_decode")
    for pool in ("keys", "values"):
        assert case.elements <= launch.loads[pool] <= 1.05 * case.elements


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("window", "head_dim"), WINDOWS_AND_SIZES)
def test_decode_with_few_simdgroups_reads_keys_and_values_once_for_each_head(
    metal_on_cpu: Interpreter, group: int, window: int | None, head_dim: int
) -> None:
    options = {"kv_heads": 2, "dtype": mx.float16, "window": window}
    case = Case([(1, 1), (1, 33), (1, 600)], group=group, head_dim=head_dim, **options)
    case.check()
    launch = metal_on_cpu.last_launch("paged_decode")
    for pool in ("keys", "values"):
        assert group * case.elements <= launch.loads[pool] <= 1.05 * group * case.elements


@pytest.mark.parametrize(("head_dim", "group"), [(512, 8), (256, 16)])
def test_large_heads_of_large_groups_are_decoded_in_two_passes(
    metal_on_cpu: Interpreter, head_dim: int, group: int
) -> None:
    case = Case([(1, 40)] * 64, kv_heads=1, group=group, head_dim=head_dim, dtype=mx.bfloat16)
    case.check()
    launch = metal_on_cpu.last_launch("paged_decode")
    for pool in ("keys", "values"):
        assert launch.loads[pool] == 2 * case.elements


@pytest.mark.parametrize("group", [1, 4, 8])
def test_a_mixed_batch_reads_keys_and_values_once_per_query_tile(metal_on_cpu: Interpreter, group: int) -> None:
    case = Case([(1, 100), (40, 90), (9, 9)], group=group, head_dim=32, chunk_partition=4096)
    case.check()
    launches = [launch for launch in metal_on_cpu.launches if launch.kernel in ("paged_attention", "paged_decode")]
    assert len(launches) == 2
    queries = 32 // group
    passes = [group if query == 1 else -(-query // queries) for query, _ in case.lens]
    tiles = sum(count * context for count, (_, context) in zip(passes, case.lens, strict=True))
    tiles *= case.kv_heads * case.head_dim
    for pool in ("keys", "values"):
        assert sum(launch.loads[pool] for launch in launches) <= 1.05 * tiles


def test_nothing_that_belongs_to_another_is_read(metal_on_cpu: Interpreter) -> None:
    """All that is not the sequences' own is NaN. What a block held before shows neither in scores nor in values."""
    latent = {"latent": True, "value_size": 40, "kv_heads": 1}
    for lens, layout in itertools.product((SHORT_DECODE, MIXED, [(130, 140)]), ({}, latent)):
        out = Case(lens, window=25, block_size=16, **layout).attend()
        assert np.isfinite(out).all()


def test_a_nan_among_later_tokens_does_not_reach_earlier_ones(metal: None) -> None:
    """Kernels with simdgroup matrices promise it between sequences only."""
    case = Case([(12, 40)], head_dim=32)
    before = case.attend()
    case.keys[0][-1] = case.values[0][-1] = np.nan
    case.write()
    after = case.attend()
    assert np.array_equal(after[:-1], before[:-1])
    assert np.isnan(after[-1]).all()


# Writing


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_a_write_fills_its_slots_and_nothing_else(metal: None, dtype: mx.Dtype) -> None:
    kv = LayerKVCache(5, 2, 80, dtype, block_size=8, backend="metal")
    keys = mx.random.normal((5, 2, 80)).astype(dtype)
    meta = AttentionMetadata.build([3, 2], [10, 2], [[4, 1], [0]], block_size=8)
    kv.write(keys, -keys, meta)
    got_keys, got_values = kv.read_blocks(range(5))
    expected = np.zeros((5, 2, 8, 80), np.float32)
    rows = np.array(keys.astype(mx.float32))
    for row, (block, slot) in enumerate([(4, 7), (1, 0), (1, 1), (0, 0), (0, 1)]):
        expected[block, :, slot] = rows[row]
    assert np.array_equal(np.array(got_keys.astype(mx.float32)), expected)
    assert np.array_equal(np.array(got_values.astype(mx.float32)), -expected)


@pytest.mark.parametrize(("value_size", "latent"), [(12, False), (40, False), (20, True)])
def test_writes_copies_and_moves_of_other_layouts_change_their_blocks_and_nothing_else(
    metal: None, value_size: int, latent: bool
) -> None:
    layout = KVLayout(1 if latent else 2, 24, value_size, mx.float32, 8, latent)
    kv = LayerKVCache.from_layout(5, layout, backend="metal")
    keys, values = (mx.random.normal((3, layout.num_kv_heads, size)) for size in (24, value_size))
    write(kv, keys, values, AttentionMetadata.build([3], [10], [[4, 1]], block_size=8))
    expected = [np.zeros((5, *plane.shape), np.float32) for plane in layout.planes]
    for pool, rows in zip(expected, (keys, values), strict=False):
        for row, (block, slot) in enumerate([(4, 7), (1, 0), (1, 1)]):
            pool[block, :, slot] = np.array(rows[row])
    new = [mx.random.normal((2, *plane.shape)) for plane in layout.planes]
    kv.write_blocks([3, 2], *new)
    kv.copy_blocks([(4, 0)])
    for pool, blocks in zip(expected, new, strict=True):
        pool[[3, 2]] = np.array(blocks)
        pool[0] = pool[4]
    for got, pool in zip(kv.read_blocks(range(5)), expected, strict=True):
        assert np.array_equal(np.array(got), pool)
    assert [array.shape[1:] for array in kv.read_blocks([])] == [plane.shape for plane in layout.planes]
    assert kv.nbytes == 6 * layout.bytes_per_block, "with the block that is never allocated"


def test_a_write_is_in_place(metal: None) -> None:
    kv = LayerKVCache(5, 2, 64, mx.float32, backend="metal")
    mx.eval(kv.arrays)
    addresses = [np.asarray(array).ctypes.data for array in kv.arrays[:2]]
    meta = AttentionMetadata.build([3], [3], [[4]])
    rows = mx.ones((3, 2, 64))
    kv.write(rows, rows, meta)
    mx.eval(kv.arrays)
    assert [np.asarray(array).ctypes.data for array in kv.arrays[:2]] == addresses
    assert float(kv.arrays[0].sum().item()) == rows.size  # type: ignore[arg-type]


def test_no_step_copies_a_pool(metal: None) -> None:
    kv = LayerKVCache(1000, 2, 64, mx.float32, backend="metal")
    mx.eval(kv.arrays)
    rows = mx.ones((3, 2, 64))
    meta = AttentionMetadata.build([1, 2], [600, 40], [list(range(900, 920)), [7, 8]])
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    kv.write(rows, rows, meta)
    kv.attend(rows, meta, scale=1.0)
    kv.copy_blocks([(7, 5)])
    mx.eval(kv.arrays)
    assert mx.get_peak_memory() - before < kv.nbytes / 50


def test_slot_minus_one_leaves_the_pool_untouched(metal: None) -> None:
    kv = LayerKVCache(5, 2, 64, mx.float32, backend="metal")
    meta = AttentionMetadata.build([8], [8], [[4]])
    skipping = mx.where(mx.arange(8) == 3, -1, meta.slot_mapping)
    object.__setattr__(meta, "padded_slots", skipping)
    rows = mx.ones((8, 2, 64))
    kv.write(rows, rows, meta)
    keys, values = kv.read_blocks(range(5))
    assert float(keys.sum().item()) == float(values.sum().item()) == rows.size * 7 / 8  # type: ignore[arg-type]
    assert not keys[4, :, 3].any().item()
    everything = mx.full((8,), -1, dtype=mx.int32)
    object.__setattr__(meta, "padded_slots", everything)
    kv.write(-rows, -rows, meta)
    assert mx.array_equal(kv.read_blocks(range(5))[0], keys)


def test_keys_that_are_not_contiguous_are_written_as_they_are_seen(metal: None) -> None:
    kv = LayerKVCache(2, 2, 32, mx.float32, backend="metal")
    both = mx.random.normal((3, 32, 2)).swapaxes(1, 2)
    kv.write(both, both, AttentionMetadata.build([3], [3], [[1]]))
    assert mx.array_equal(kv.read_blocks([1])[0][0, :, :3], both.swapaxes(0, 1))


def test_readers_wait_for_the_write_before_them_and_a_writer_for_every_reader(
    metal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tokens that pass between the kernels: MLX knows of no other order."""
    calls: list[tuple[str, mx.array, mx.array]] = []
    launch = kernels.launch

    def recording(name: str, inputs: list[Any], *rest: Any, **options: Any) -> list[mx.array]:
        results = launch(name, inputs, *rest, **options)
        if name != "merge_partials":  # it does not touch the pools
            calls.append((name, inputs[-1], results[-1]))
        return results

    case = Case([(1, 600), (5, 40), (130, 140)], head_dim=32)
    monkeypatch.setattr(kernels, "launch", recording)
    case.kv.write(case.of_step(case.keys), case.of_step(case.values), case.meta)
    case.attend()
    case.kv.copy_blocks([(0, 1)])
    case.kv.read_blocks([1])
    names, after, done = zip(*calls, strict=True)
    assert names == ("kv_write", "paged_decode", "paged_attention", "kv_gather", "block_move", "block_move")
    assert after[1] is after[2] is after[3] is done[0]
    assert int(after[4].item()) == 3, "the sum of three tokens"  # type: ignore[arg-type]
    assert after[5] is done[4]
    assert case.kv.arrays[2] is done[5]


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("pairs", [[(0, 3)], [(0, 3), (0, 4), (2, 5)], [(0, 1), (1, 2), (2, 0)], [(1, 1)]], ids=str)
def test_block_copy_reads_the_pool_as_it_was(metal: None, dtype: mx.Dtype, pairs: list[tuple[int, int]]) -> None:
    kv = LayerKVCache(6, 2, 32, dtype, block_size=8, backend="metal")
    keys, values = (mx.random.normal((6, 2, 8, 32)).astype(dtype) for _ in range(2))
    kv.write_blocks(range(6), keys, values)
    kv.copy_blocks(pairs)
    source = list(range(6))
    for src, dst in pairs:
        source[dst] = src
    for got, plane in zip(kv.read_blocks(range(6)), (keys, values), strict=True):
        assert mx.array_equal(got, plane[mx.array(source)])


def test_blocks_come_back_as_they_were_read(metal: None) -> None:
    kv = LayerKVCache(6, 3, 112, mx.float16, block_size=16, backend="metal")
    keys, values = (mx.random.normal((2, 3, 16, 112)).astype(mx.float16) for _ in range(2))
    kv.write_blocks([4, 1], keys, values)
    for got, plane in zip(kv.read_blocks([1, 0, 4, 1]), (keys, values), strict=True):
        assert mx.array_equal(got, mx.stack([plane[1], mx.zeros_like(plane[0]), plane[0], plane[1]]))
    kv.write_blocks([], keys[:0], values[:0])
    assert kv.read_blocks([])[0].shape == (0, 3, 16, 112)
    kv.clear()
    assert not kv.read_blocks(range(6))[0].any().item()


@pytest.mark.parametrize("in_place", [True, False])
def test_any_number_of_planes_of_any_type_move_together(metal: None, in_place: bool) -> None:
    """As data, scales and biases do: blocks of 768, 16 and 32 bytes."""
    shapes = {mx.uint8: 768, mx.float16: 8, mx.bfloat16: 16}
    planes = [mx.random.randint(0, 99, (5 + in_place, size)).astype(dtype) for dtype, size in shapes.items()]
    expected = [plane[mx.array([3, 1, 0, 3, 0])] for plane in planes]
    mx.eval(expected)
    memory = Memory(5, planes, mx.zeros((1,), mx.int32) if in_place else None)
    memory.move(1, [0, 3], [2, 4])
    copies = memory.move(1, [2, 4], None)
    assert [(copy.shape, copy.dtype) for copy in copies] == [((2, size), dtype) for dtype, size in shapes.items()]
    memory.move(1, None, [4, 0], copies)
    for got, plane in zip(memory.move(1, range(5), None), expected, strict=True):
        assert mx.array_equal(got, plane)


def test_a_moved_sequence_attends_the_same(metal: None) -> None:
    """Swapped out, its blocks poisoned, and swapped in elsewhere."""
    case = Case([(1, 70), (6, 40)])
    before = case.attend()
    blocks = [block for table in case.tables for block in table]
    saved = case.kv.read_blocks(blocks)
    fill_blocks(case.kv, blocks)
    moved = blocks[1:] + blocks[:1]
    case.kv.write_blocks(moved, *saved)
    place = dict(zip(blocks, moved, strict=True))
    tables = [[place[block] for block in table] for table in case.tables]
    case.meta = AttentionMetadata.build([1, 6], [70, 40], tables)
    assert np.array_equal(case.attend(), before)


# Where it cannot run


@on_cpu
def test_without_metal_the_backend_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="'metal' is not available: it needs a Mac with a Metal device"):
        resolve_backend("metal")
    assert "metal" not in (resolve_backend("auto"), resolve_backend("gather"))


def test_with_metal_it_is_taken_when_asked_for(metal: None) -> None:
    assert resolve_backend("metal") == "metal"
    assert LayerKVCache(2, 1, 64, mx.float32, backend="metal").backend == "metal"
