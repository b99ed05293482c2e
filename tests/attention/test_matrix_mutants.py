"""Mutants of matrix_attention."""

from __future__ import annotations

from dataclasses import replace

from mlxpaged.attention.tuning import MATRIX, Tuning
from tests.attention.metal_cases import TOLERANCE, Case
from tests.attention.mutants import Mutant, mutant_tests
from tests.metal_on_cpu import (
    DataRace,
    Divergence,
    Interpreter,
    MetalError,
    MetalRunError,
    OutOfBounds,
)

SIZES = {"head_dim": 12, "value_size": 20, "group": 3}
"""Neither keys nor values fill their pairs of matrices, and two simdgroups have no columns."""

LENS = [(20, 50), (2, 33), (13, 100)]


def in_ranges(partition: int | None) -> Tuning:
    return Tuning(chunks=replace(MATRIX, partition=partition))


def is_right(case: Case) -> bool:
    return case.error() <= TOLERANCE[case.dtype]


def plain() -> bool:
    return is_right(Case(LENS, tuning=in_ranges(None), **SIZES))


def extras() -> bool:
    return is_right(Case(LENS, tuning=in_ranges(None), window=40, softcap=2.0, has_sinks=True, **SIZES))


def sharp() -> bool:
    return Case(LENS, tuning=in_ranges(None), sharpness=1000, **SIZES).error() < 1e-3


def ranges() -> bool:
    """Ranges that begin and end inside steps of 32 keys."""
    return is_right(Case(LENS, tuning=in_ranges(24), **SIZES))


def images() -> bool:
    """Tiles before, in and after an image."""
    return is_right(Case(LENS, tuning=in_ranges(None), window=60, spans={0: [(33, 45)], 2: [(80, 99)]}, **SIZES))


def full_blocks() -> bool:
    """Nothing comes after the last sequence's table."""
    return is_right(Case([(2, 40), (3, 40)], tuning=in_ranges(None), block_size=8, **SIZES))


def each_key_once() -> bool:
    with Interpreter().installed() as interpreter:
        ranges()
    loads = interpreter.last_launch("matrix_attention").loads
    tiles = [context - query + end for query, context in LENS for end in (*range(10, query, 10), query)]
    return (loads["keys"], loads["values"]) == (sum(tiles) * 2 * 12, sum(tiles) * 2 * 20)


BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"

MUTANTS: dict[str, Mutant] = {
    "no barrier before the softmax": (
        "matrix_attention", BARRIER + "\n  float weights", "\n  float weights", plain, DataRace),
    "a product that some lanes skip": (
        "matrix_attention", "simdgroup_multiply_accumulate(products",
        "if (has_key) simdgroup_multiply_accumulate(products", plain, Divergence),
    "values of unused slots": (
        "matrix_attention", "of_value >= first_key && of_value < key_end", "of_value < key_end + 1", plain, None),
    "an image is causal": ("matrix_attention", "MUTUAL ? max(here, item[7]) : here", "here", images, None),
    "scores not transposed": (
        "matrix_attention", "(r * 8 + matrix_column + e) * PITCH + simdgroup * 8 + matrix_row",
        "(r * 8 + matrix_row) * PITCH + simdgroup * 8 + matrix_column + e", plain, None),
    "one tile of scores": ("matrix_attention", "start / KEYS % 2 *", "0 *", plain, DataRace),
    "keys before the range": (
        "matrix_attention", "key >= first_key && key < key_end", "key < key_end", each_key_once, None),
    "no rescaling": (
        "matrix_attention", "thread_elements()[0] *= factor;", "thread_elements()[0] *= 1.0f;", plain, None),
    "no barrier after the query tile": ("matrix_attention", BARRIER[2:] + "\nfor (int", "\nfor (int", plain, DataRace),
    "no barrier before the values": (
        "matrix_attention", BARRIER + "\n#pragma", "\n#pragma", plain, DataRace),
    "no barrier before the output": (
        "matrix_attention", "}\n" + BARRIER[2:] + "\n#pragma", "}\n\n#pragma", plain, DataRace),
    "a fence for the wrong memory": (
        "matrix_attention", BARRIER + "\n  float weights",
        BARRIER.replace("mem_threadgroup", "mem_device") + "\n  float weights", plain, DataRace),
    "a lane that returns": (
        "matrix_attention", "const int key_end", "if (lane == 31) { return; }\nconst int key_end", plain, Divergence),
    "keys after the range": (
        "matrix_attention", "key >= first_key && key < key_end", "key >= first_key", full_blocks, MetalRunError),
    "values before the range": (
        "matrix_attention", "of_value >= first_key && of_value < key_end", "of_value < key_end", each_key_once, None),
    "the last step left out": (
        "matrix_attention", "start < key_end; start", "start + KEYS < key_end; start", plain, None),
    "sees the future": ("matrix_attention", "last_visible + 1)", "last_visible + 2)", plain, None),
    "text sees no more than an image": ("matrix_attention", "max(here, item[7])", "item[7]", images, None),
    "a query sees its tile's keys": ("matrix_attention", "max(here, item[7])", "key_end - 1", images, None),
    "a window one too wide": ("matrix_attention", "here - window + 1);", "here - window);", extras, None),
    "a range sees its neighbour": (
        "matrix_attention", "min(key_end, last_visible + 1)", "last_visible + 1", ranges, None),
    "softcap left out": ("matrix_attention", "if (SOFTCAP) {", "if (false) {", extras, None),
    "scale left out": ("matrix_attention", "+ k] * scale;", "+ k];", plain, None),
    "sink left out": ("matrix_attention", "if (SINKS) {", "if (false) {", extras, None),
    "a maximum of one lane": (
        "matrix_attention", "best = max(best, simd_shuffle_xor(best, ushort(distance)));", "", sharp, None),
    "maximum of the last step alone": (
        "matrix_attention", "float best = maximum;", "float best = MASKED;", sharp, None),
    "sum not rescaled": ("matrix_attention", "denominator * factor_of_row + sum", "denominator + sum", plain, None),
    "elements of a pair in another order": (
        "matrix_attention", "column % 16 / 2 + e % 2;", "column % 16 / 2 + 1 - e % 2;", plain, None),
    "wrong KV head of the values": (
        "matrix_attention", "((its_block * KV_HEADS + kv_head)", "((its_block * KV_HEADS)", plain, None),
    "another sequence's table": (
        "matrix_attention", "block_tables + size_t(item[0]) *", "block_tables + size_t(0) *", plain, MetalRunError),
    "columns beyond a value": ("matrix_attention", "      if (column < DV) {", "      if (true) {", plain, MetalError),
    "a pair of columns left out": (
        "matrix_attention", "(DV + 15) / 16;", "DV / 16;", plain, None),
    "a query tile one matrix short": (
        "matrix_attention", "KEY_PAIRS * 2 * ROW_TILES * 32]", "(KEY_PAIRS * 2 * ROW_TILES - 1) * 32]", plain,
        OutOfBounds),
}  # fmt: skip

test_mutant_is_caught, test_without_a_mutant_all_is_well = mutant_tests(MUTANTS)
