"""Which way each part of a step takes: how it is looked up, that every way gives the right numbers, and how it is
measured (with a fake clock, and for real on the stand-in)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import AttentionShape, KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.tuner import PARTIAL_BYTES, POOL_BYTES, Limits, candidates, classes_of, workload_of
from mlxpaged.attention.tuning import (
    BY_CONTEXT,
    CONTIGUOUS,
    DEFAULT_TUNING,
    MATRIX,
    Choice,
    ShapeClass,
    Tuning,
    chunk_class,
    decode_class,
    decode_ranges,
    parse_tuning,
)
from tests.attention.metal_cases import TOLERANCE, Case
from tests.metal_on_cpu import Interpreter
from tests.support import every

SHAPE = AttentionShape(4, KVLayout(2, 32, 32, mx.float32, 32))
LIMITS = Limits(context_length=40960, max_num_seqs=32)
EXTRAS: list[dict[str, Any]] = [{}, {"window": 20}, {"window": 9, "softcap": 3.0, "has_sinks": True}]


# Classes


@pytest.mark.parametrize(
    ("contexts", "expected"),
    [
        ([1], ShapeClass(1, 1, 1024)),
        ([1024], ShapeClass(1, 1, 1024)),
        ([1025], ShapeClass(1, 1, 8192)),
        ([8193], ShapeClass(1, 1, 32768)),
        ([10**6], ShapeClass(1, 1, 32768)),
        ([5, 5], ShapeClass(1, 4, 1024)),
        ([5] * 4, ShapeClass(1, 4, 1024)),
        ([5] * 5, ShapeClass(1, 16, 1024)),
        ([5] * 17, ShapeClass(1, 64, 1024)),
        ([5] * 200, ShapeClass(1, 64, 1024)),
        ([3000, 10], ShapeClass(1, 4, 8192, ragged=True)),
        ([400, 200], ShapeClass(1, 4, 1024)),
        ([400, 199], ShapeClass(1, 4, 1024, ragged=True)),
    ],
)
def test_decoding_sequences_share_a_class_by_number_longest_context_and_raggedness(
    contexts: list[int], expected: ShapeClass
) -> None:
    assert decode_class(np.array(contexts)) == expected


@pytest.mark.parametrize(
    ("queries", "context", "expected"),
    [(2, 2, (31, 1024)), (31, 1024, (31, 1024)), (32, 1025, (127, 8192)), (127, 9000, (127, 32768)),
     (128, 128, (255, 1024)), (256, 256, (2048, 1024)), (5000, 10**6, (2048, 32768))],
)  # fmt: skip
def test_a_chunk_has_a_class_by_its_tokens_and_keys(queries: int, context: int, expected: tuple[int, int]) -> None:
    assert chunk_class(queries, context) == ShapeClass(expected[0], 1, expected[1])


def test_without_measurements_decoding_and_short_chunks_are_paged_and_long_chunks_copied() -> None:
    lone, crowd = decode_class(np.array([7])), decode_class(np.array([9000, 5, 5]))
    assert {DEFAULT_TUNING.choice(entry) for entry in (lone, crowd)} == {BY_CONTEXT}
    for queries, context in ((2, 2), (31, 31), (31, 2114), (8, 8192), (2, 32768)):
        assert DEFAULT_TUNING.chunk_choice(queries, context) == Choice(4096)
    for queries, context in ((32, 32), (31, 2115), (8, 8193), (2, 32769), (4000, 4000)):
        assert DEFAULT_TUNING.chunk_choice(queries, context) == CONTIGUOUS


def test_the_default_of_a_class_is_that_of_its_largest_step() -> None:
    for entry in classes_of(SHAPE, LIMITS):
        if entry.queries > 1:
            assert DEFAULT_TUNING.choice(entry) == DEFAULT_TUNING.chunk_choice(entry.queries, entry.context)


def test_an_entry_decides_for_its_class_alone() -> None:
    entry = chunk_class(500, 500)
    tuning = Tuning(((entry, Choice(4096)),))
    assert tuning.choice(entry) == tuning.chunk_choice(500, 500) == Choice(4096)
    assert tuning.choice(chunk_class(200, 500)) == tuning.chunk_choice(200, 500) == CONTIGUOUS
    assert tuning == Tuning(((entry, Choice(4096)),))
    assert hash(tuning) == hash(Tuning(((entry, Choice(4096)),)))
    assert tuning != DEFAULT_TUNING


@given(
    context=st.integers(16, 200_000),
    batch=st.integers(1, 300),
    window=st.none() | st.integers(16, 40_000),
)
def test_what_is_timed_for_a_class_is_a_step_of_that_class(context: int, batch: int, window: int | None) -> None:
    shape, limits = AttentionShape(4, KVLayout(2, 32, 32, mx.float32, 32), window), Limits(context, batch)
    classes = classes_of(shape, limits)
    assert len(set(classes)) == len(classes)
    for entry in classes:
        workload = workload_of(entry, shape, limits)
        keys = np.minimum(workload.context_lens, window or context)
        queries = workload.query_lens[0]
        assert entry == (decode_class(keys) if queries == 1 else chunk_class(queries, int(keys[0])))
        assert max(workload.context_lens) <= context
        assert len(workload.context_lens) <= batch


@pytest.mark.parametrize(
    ("limits", "window", "batches", "contexts"),
    [
        (Limits(40960, 32), None, {1, 4, 16, 64}, {1024, 8192, 32768}),
        (Limits(8193, 17), None, {1, 4, 16, 64}, {1024, 8192, 32768}),
        (Limits(8192, 16), None, {1, 4, 16}, {1024, 8192}),
        (Limits(1024, 1), None, {1}, {1024}),
        (Limits(40960, 2), 1024, {1, 4}, {1024}),
    ],
)
def test_what_the_server_cannot_meet_is_not_measured(
    limits: Limits, window: int | None, batches: set[int], contexts: set[int]
) -> None:
    classes = classes_of(AttentionShape(4, KVLayout(2, 32, 32, mx.float32, 32), window), limits)
    decode = [entry for entry in classes if entry.queries == 1]
    assert {entry.batch for entry in decode} == batches
    assert {entry.context for entry in classes} == contexts
    assert {entry.queries for entry in classes} == {1, 31, 127, 255}
    assert {entry.ragged for entry in decode} == ({False, True} if len(batches) > 1 else {False})
    assert len({str(entry) for entry in classes}) == len(classes), "each has a name of its own"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (ShapeClass(1, 1, 1024), "paged paged:128 paged:256 paged:512 paged:1024 contiguous"),
        (ShapeClass(1, 4, 8192), "paged paged:256 paged:512 paged:1024 paged:4096 contiguous"),
        (ShapeClass(1, 16, 8192), "paged paged:256 paged:512 paged:1024 paged:4096"),
        (ShapeClass(31, 1, 1024), "paged:4096 paged:512 contiguous matrix"),
        (ShapeClass(31, 1, 8192), "contiguous paged:512 paged:4096 matrix"),
        (ShapeClass(127, 1, 8192), "contiguous paged:4096 matrix"),
        (ShapeClass(255, 1, 8192), "contiguous paged:4096 matrix"),
    ],
    ids=str,
)
def test_a_class_has_the_default_and_what_differs_from_it_as_candidates(entry: ShapeClass, expected: str) -> None:
    found = candidates(entry, SHAPE, workload_of(entry, SHAPE, LIMITS))
    assert " ".join(map(str, found)) == expected


def test_contexts_that_would_fill_the_memory_are_not_copied_to_decode() -> None:
    entry = ShapeClass(1, 1, 32768)
    wide = AttentionShape(64, KVLayout(64, 128, 128, mx.bfloat16, 32))
    assert CONTIGUOUS in candidates(entry, SHAPE, workload_of(entry, SHAPE, LIMITS))
    assert POOL_BYTES < 32768 * 64 * 128 * 4
    assert CONTIGUOUS not in candidates(entry, wide, workload_of(entry, wide, LIMITS))


def test_ranges_whose_partial_results_would_fill_the_memory_are_not_timed() -> None:
    entry, wide = ShapeClass(1, 64, 8192), AttentionShape(64, KVLayout(8, 128, 128, mx.bfloat16, 32))
    found = candidates(entry, wide, workload_of(entry, wide, Limits(8192, 64)))
    assert [choice.partition for choice in found] == [0, 512, 1024, 4096], "the default and what fits"
    assert 64 * (8192 // 512) * 64 * (128 + 4) * 4 <= PARTIAL_BYTES < 64 * (8192 // 256) * 64 * (128 + 4) * 4


def test_an_override_holds_for_all_classes() -> None:
    assert parse_tuning("auto") is None
    assert parse_tuning("default") == DEFAULT_TUNING
    classes = [*classes_of(SHAPE, LIMITS), chunk_class(3000, 3000)]
    contiguous, paged, matrix = (parse_tuning(text) for text in ("contiguous", "paged:256", "matrix"))
    assert contiguous is not None
    assert paged is not None
    assert matrix is not None
    assert {contiguous.choice(entry) for entry in classes} == {CONTIGUOUS}
    assert {paged.choice(entry) for entry in classes if entry.queries == 1} == {Choice(256)}
    assert {paged.choice(entry) for entry in classes if entry.queries > 1} == {Choice(4096)}, "or it takes gigabytes"
    assert parse_tuning("paged") == Tuning(decode=BY_CONTEXT, chunks=Choice(4096))
    assert {matrix.choice(entry) for entry in classes if entry.queries == 1} == {BY_CONTEXT}
    assert {matrix.choice(entry) for entry in classes if entry.queries > 1} == {MATRIX}
    assert {matrix.chunk_choice(queries, 5000) for queries in (2, 20, 5000)} == {MATRIX}


def test_what_remains_without_the_matrix_kernel_is_what_was_not_chosen_for_it() -> None:
    measured = Tuning(((ShapeClass(31, 1, 1024), MATRIX), (ShapeClass(1, 1, 1024), Choice(256))), chunks=None)
    assert measured.uses_matrix
    assert measured.without_matrix() == Tuning(((ShapeClass(1, 1, 1024), Choice(256)),))
    assert Tuning(decode=Choice(512), chunks=MATRIX).without_matrix() == Tuning(decode=Choice(512))
    assert not DEFAULT_TUNING.uses_matrix
    assert not Tuning(decode=CONTIGUOUS, chunks=CONTIGUOUS).uses_matrix


@given(st.integers(1, 2_000_000))
def test_a_decoding_sequence_has_one_range_or_few_and_none_of_several_is_short(keys: int) -> None:
    ranges = decode_ranges(KVLayout(8, 128, 128, mx.bfloat16, 32), 4)
    size, count = int(ranges.sizes(np.array(keys))), BY_CONTEXT.num_ranges(keys, ranges)
    assert (count - 1) * size < keys <= count * size
    if keys <= 512:
        assert count == 1
        return
    assert size % 32 == 0
    assert size >= 128
    assert count <= 64
    assert size == 128 or keys > 8192


@pytest.mark.parametrize(
    ("kv_heads", "size", "group", "expected"),
    [(8, 128, 2, 128), (8, 128, 8, 128), (8, 64, 8, 128), (2, 128, 4, 64), (8, 128, 16, 128), (1, 128, 32, 224)],
)
def test_many_heads_have_longer_ranges_and_few_have_shorter_ones(
    kv_heads: int, size: int, group: int, expected: int
) -> None:
    """Results of ranges must not take more memory traffic than the keys, and simdgroups must not be few."""
    ranges = decode_ranges(KVLayout(kv_heads, size, size, mx.bfloat16, 32), group)
    assert int(ranges.sizes(np.array(513))) == expected


def test_tiles_of_one_token_have_short_ranges() -> None:
    """The simdgroups of latent_attention share the keys' columns, not the keys."""
    ranges = decode_ranges(KVLayout(1, 576, 512, mx.bfloat16, 32, latent=True), 20)
    assert [int(ranges.sizes(np.array(keys))) for keys in (100, 300, 513)] == [224, 224, 224]


@pytest.mark.parametrize(("kv_heads", "group"), [(8, 2), (8, 4), (4, 8), (4, 4), (2, 8), (2, 4)])
def test_one_sequence_of_1024_keys_fills_a_device(metal_on_cpu: Interpreter, kv_heads: int, group: int) -> None:
    """As many simdgroups as 256 threadgroups of 128 threads have, each with keys."""
    Case([(1, 1024)], head_dim=32, kv_heads=kv_heads, group=group).check()
    launch = metal_on_cpu.last_launch("paged_decode")
    assert launch.threadgroup == (256, 1, 1)
    assert np.prod(launch.grid) // 32 >= 1024


@pytest.mark.parametrize("extras", [{}, {"window": 512}], ids=["", "window"])
def test_contexts_of_up_to_512_keys_are_not_merged(metal_on_cpu: Interpreter, extras: dict[str, Any]) -> None:
    """Windows begin and end at no multiple of a range."""
    lens = [(1, 512), (1, 3)] if not extras else [(1, 1300), (1, 700)]
    assert kernels_of(metal_on_cpu, Case(lens, head_dim=32, **extras))["merge_partials"] == 0
    assert kernels_of(metal_on_cpu, Case([(1, 513), (1, 3)], head_dim=32))["merge_partials"] == 1


@pytest.mark.parametrize("context", [300, 700])
def test_the_heads_of_a_sequence_are_the_same_to_the_bit_alone_and_together(
    metal_on_cpu: Interpreter, context: int
) -> None:
    """A large batch has all heads of a KV head in a threadgroup, and more keys in its longest context."""
    case = Case([(1, context), *[(1, 900)] * 9], head_dim=32, group=4, kv_heads=4, dtype=mx.bfloat16)
    together = case.attend()[0]
    assert metal_on_cpu.last_launch("paged_decode").grid[1] == 4
    case.lens, case.queries = case.lens[:1], case.queries[:1]
    case.meta = AttentionMetadata.build([1], [context], case.tables[:1], case.block_size)
    assert np.array_equal(case.attend()[0], together)
    assert metal_on_cpu.last_launch("paged_decode").grid[1] == 16


# Numbers


def everywhere(choice: Choice) -> Tuning:
    return Tuning(decode=choice, chunks=choice)


def gather_error(case: Case) -> float:
    """Largest difference from the gather backend."""
    kv = LayerKVCache(case.kv.num_blocks, case.kv_heads, case.head_dim, case.dtype, case.block_size, "gather")
    contexts = [context for _, context in case.lens]
    tokens = AttentionMetadata.build(contexts, contexts, case.tables, case.block_size)
    kv.write(case.array(np.concatenate(case.keys)), case.array(np.concatenate(case.values)), tokens)
    expected = kv.attend(case.array(np.concatenate(case.queries)), case.meta, **case.options)
    return float(np.abs(case.attend() - np.array(expected.astype(mx.float32))).max())


CHOICES = [CONTIGUOUS, BY_CONTEXT, *map(Choice, (64, 256, 4096))]
DECODE = [(1, 600), (1, 33), (1, 1), (1, 1030)]
CHUNKS = [(1, 33), (5, 5), (140, 300), (1, 600), (2, 70)]


@pytest.mark.parametrize("choice", every(2, CHOICES), ids=str)
@pytest.mark.parametrize("extras", every(2, EXTRAS), ids=str)
@pytest.mark.parametrize("lens", [DECODE, CHUNKS, [(1, 40)]], ids=["decode", "chunks", "lone"])
def test_every_choice_gives_the_same_numbers(
    unchecked: None, choice: Choice, extras: dict[str, Any], lens: list[tuple[int, int]]
) -> None:
    case = Case(lens, head_dim=32, tuning=everywhere(choice), **extras)
    case.check()
    assert gather_error(case) <= 2 * TOLERANCE[case.dtype]


@pytest.mark.parametrize("choice", every(2, CHOICES), ids=str)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_every_choice_gives_the_same_numbers_in_half_types(unchecked: None, choice: Choice, dtype: mx.Dtype) -> None:
    lens = [(1, 33), (130, 150), (1, 600), (3, 9)]
    case = Case(lens, dtype, head_dim=64, block_size=16, group=4, kv_heads=1, tuning=everywhere(choice))
    assert case.error() <= 2 * TOLERANCE[dtype], "MLX's own attention rounds more than the kernels"


def kernels_of(interpreter: Interpreter, case: Case) -> dict[str, int]:
    before = len(interpreter.launches)
    case.check()
    names = [launch.kernel for launch in interpreter.launches[before:]]
    return {name: names.count(name) for name in ("paged_attention", "paged_decode", "merge_partials", "kv_gather")}


def test_a_step_takes_the_ways_of_the_classes_of_its_parts(metal_on_cpu: Interpreter) -> None:
    """Decoding copied, two kinds of chunks in ranges of different lengths, one chunk copied."""
    choices = [(ShapeClass(1, 4, 1024, ragged), CONTIGUOUS) for ragged in (False, True)]
    choices += [(ShapeClass(31, 1, 1024), Choice(16)), (ShapeClass(255, 1, 1024), Choice(64))]
    lens = [(5, 40), (1, 70), (130, 200), (1, 9), (300, 300), (9, 20)]
    launched = kernels_of(metal_on_cpu, Case(lens, head_dim=32, tuning=Tuning(tuple(choices))))
    assert launched == {"paged_attention": 2, "paged_decode": 0, "merge_partials": 2, "kv_gather": 3}


@pytest.mark.parametrize(
    ("lens", "window", "copied"),
    [
        ([(1, 1000)], None, True),
        ([(1, 1030)], None, False),
        ([(1, 1030)], 1000, True),  # what counts are keys that are seen
        ([(1, 100), (1, 90)], None, False),
        ([(1, 100), (2, 90)], None, True),  # chunks do not decode
    ],
)
def test_the_batch_picks_the_class_of_decoding(
    metal_on_cpu: Interpreter, lens: list[tuple[int, int]], window: int | None, copied: bool
) -> None:
    tuning = Tuning(((ShapeClass(1, 1, 1024), CONTIGUOUS),))
    launched = kernels_of(metal_on_cpu, Case(lens, head_dim=32, kv_heads=1, window=window, tuning=tuning))
    assert bool(launched["kv_gather"]) == copied


def test_raggedness_picks_the_class_of_decoding(metal_on_cpu: Interpreter) -> None:
    tuning = Tuning(((ShapeClass(1, 4, 1024, ragged=True), CONTIGUOUS),))
    for lens, copies in (([(1, 200), (1, 20)], 2), ([(1, 200), (1, 190)], 0)):
        assert kernels_of(metal_on_cpu, Case(lens, head_dim=32, tuning=tuning))["kv_gather"] == copies


def test_pools_with_different_tunings_share_a_step(metal: None) -> None:
    """Layers of one model: what is planned for one tuning is not taken for another."""
    case = Case([(1, 70), (5, 40)], head_dim=32)
    expected = case.attend()
    other = Case([(1, 70), (5, 40)], head_dim=32, tuning=everywhere(CONTIGUOUS))
    other.meta = case.meta
    case.check()
    other.check()
    assert np.array_equal(case.attend(), expected)
    assert len(case.meta.derived) == 2


@pytest.mark.parametrize("tuning", [everywhere(choice) for choice in CHOICES], ids=lambda t: str(t.decode))
def test_a_forced_choice_keeps_the_bits_of_an_answer_whatever_its_company(metal: None, tuning: Tuning) -> None:
    lone = Case([(1, 600)], head_dim=32, tuning=tuning)
    crowd = Case([(1, 600), *[(1, 20)] * 5, (9, 9)], head_dim=32, tuning=tuning)
    crowd.queries[0], crowd.keys[0], crowd.values[0] = lone.queries[0], lone.keys[0], lone.values[0]
    crowd.fill(crowd.kv.num_blocks)
    assert np.array_equal(crowd.attend()[:1], lone.attend())


def test_a_cache_keeps_its_tuning_when_it_is_cleared(metal_on_cpu: Interpreter) -> None:
    case = Case([(1, 40)], head_dim=32, tuning=everywhere(CONTIGUOUS))
    case.kv.clear()
    case.fill(case.kv.num_blocks)
    assert kernels_of(metal_on_cpu, case)["kv_gather"] == 1
