"""Mutants of latent_attention."""

from __future__ import annotations

from typing import Any

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

LENS = [(20, 50), (1, 33), (13, 100)]


def latent_case(lens: list[tuple[int, int]] | None = None, **options: Any) -> Case:
    """Values and k_pe end inside a pair of matrices, and most simdgroups have no columns."""
    sizes = {"head_dim": 44, "value_size": 36, "latent": True, "kv_heads": 1, "group": 3, "chunk_partition": 4096}
    return Case(lens or LENS, **sizes | options)


def is_right(case: Case) -> bool:
    return case.error() <= TOLERANCE[case.dtype]


def plain() -> bool:
    return is_right(latent_case())


def many_columns() -> bool:
    """More pairs of matrices than simdgroups, heads in two tiles."""
    return is_right(latent_case([(2, 40), (1, 20)], head_dim=224, value_size=200, group=26))


def extras() -> bool:
    return is_right(latent_case(window=40, softcap=2.0, has_sinks=True))


def sharp() -> bool:
    return latent_case(sharpness=1000).error() < 1e-3


def ranges() -> bool:
    """Ranges that begin and end inside steps of 16 keys."""
    return is_right(latent_case(chunk_partition=24, decode_partition=24))


def images() -> bool:
    """Tiles before, in and after an image."""
    return is_right(latent_case(window=60, spans={0: [(33, 45)], 2: [(88, 99)]}))


def full_blocks() -> bool:
    """Nothing comes after the last sequence's table."""
    return is_right(latent_case([(2, 40), (3, 40)], block_size=8))


def each_row_once() -> bool:
    with Interpreter().installed() as interpreter:
        ranges()
    loads = interpreter.last_launch("latent_attention").loads
    tiles = [context - query + end for query, context in LENS for end in (*range(8, query, 8), query) if query > 1]
    return loads["rows"] == sum(tiles) * 44


BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"

MUTANTS: dict[str, Mutant] = {
    "no barrier before the softmax": (
        "latent_attention", BARRIER + "\n  if (my_row", "\n  if (my_row", plain, DataRace),
    "no barrier before the values": ("latent_attention", BARRIER + "\n#pragma", "\n#pragma", plain, DataRace),
    "a product that some lanes skip": (
        "latent_attention", "simdgroup_multiply_accumulate(products",
        "if (has_key) simdgroup_multiply_accumulate(products", plain, Divergence),
    "an image is causal": ("latent_attention", "MUTUAL ? max(here, item[7]) : here", "here", images, None),
    "k_pe is a value": (
        "latent_attention", "const int end_of_pair = pair < VALUE_PAIRS ? DV : DK;",
        "const int end_of_pair = DK;", plain, None),
    "values of another step": (
        "latent_attention", "static_cast<float>(part[k * PAIRS_EACH + p][f * 2]);",
        "static_cast<float>(part[p][f * 2]);", plain, None),
    "no barrier before the output": (
        "latent_attention", "}\n" + BARRIER[2:] + "\n#pragma", "}\n\n#pragma", plain, DataRace),
    "a fence for the wrong memory": (
        "latent_attention", BARRIER + "\n  if (my_row",
        BARRIER.replace("mem_threadgroup", "mem_device") + "\n  if (my_row", plain, DataRace),
    "a lane that returns": (
        "latent_attention", "const int key_end", "if (lane == 31) { return; }\nconst int key_end", plain, Divergence),
    "keys before the range": (
        "latent_attention", "key >= first_key && key < key_end", "key < key_end", each_row_once, None),
    "keys after the range": (
        "latent_attention", "key >= first_key && key < key_end", "key >= first_key", full_blocks, MetalRunError),
    "the last step left out": (
        "latent_attention", "start < key_end; start", "start + KEYS < key_end; start", plain, None),
    "scores of one simdgroup": ("latent_attention", "s < SIMDGROUPS; s++", "s < 1; s++", plain, None),
    "scores not transposed": (
        "latent_attention", "+ matrix_row) * PITCH + r * 8 + matrix_column) / 2]",
        "+ matrix_column) * PITCH + r * 8 + matrix_row) / 2]", plain, MetalError),
    "no rescaling": (
        "latent_attention", "thread_elements()[0] *= factor;", "thread_elements()[0] *= 1.0f;", sharp, None),
    "sum not rescaled": ("latent_attention", "denominator * factor_of_row + sum", "denominator + sum", plain, None),
    "a maximum of one lane": (
        "latent_attention", "best = max(best, simd_shuffle_xor(best, ushort(distance)));", "", sharp, None),
    "maximum of the last step alone": ("latent_attention", "max(maximum, score);", "score;", sharp, None),
    "sees the future": ("latent_attention", "last_visible + 1)", "last_visible + 2)", plain, None),
    "text sees no more than an image": ("latent_attention", "max(here, item[7])", "item[7]", images, None),
    "a query sees its tile's keys": ("latent_attention", "max(here, item[7])", "key_end - 1", images, None),
    "a window one too wide": ("latent_attention", "here - window + 1);", "here - window);", extras, None),
    "a range sees its neighbour": (
        "latent_attention", "min(key_end, last_visible + 1)", "last_visible + 1", ranges, None),
    "softcap left out": ("latent_attention", "if (SOFTCAP) {", "if (false) {", extras, None),
    "scale left out": ("latent_attention", "score *= scale;", "", plain, None),
    "sink left out": ("latent_attention", "if (SINKS) {", "if (false) {", extras, None),
    "elements of a pair in another order": (
        "latent_attention", "matrix_row / 2 * 4 + f * 2 + matrix_row % 2;",
        "matrix_row / 2 * 4 + f * 2 + 1 - matrix_row % 2;", plain, None),
    "q_pe of another query": ("latent_attention", "q_pe[of_query * (DK - DV)", "q_pe[0 * (DK - DV)", plain, None),
    "q_pe not divided": ("latent_attention", "+ column - DV] / scale)", "+ column - DV])", plain, None),
    "a head of the first tile": (
        "latent_attention", "const int head = first_head + row % HEADS;\n        if",
        "const int head = row % HEADS;\n        if", many_columns, None),
    "another sequence's table": (
        "latent_attention", "block_tables + size_t(item[0]) *", "block_tables + size_t(0) *", plain, MetalRunError),
    "columns beyond a value": (
        "latent_attention", "first_column[p] >= 0 && first_column[p] < DV", "first_column[p] >= 0", plain, MetalError),
    "a pair of columns left out": ("latent_attention", "(DV + 15) / 16;", "DV / 16;", plain, MetalError),
    "pairs of the first simdgroups alone": (
        "latent_attention", "(PAIRS + SIMDGROUPS - 1) / SIMDGROUPS;", "1;", many_columns, MetalError),
    "scores without room": (
        "latent_attention", "SIMDGROUPS * KEYS * PITCH / 2]", "(SIMDGROUPS - 1) * KEYS * PITCH / 2]", plain,
        OutOfBounds),
}  # fmt: skip

test_mutant_is_caught, test_without_a_mutant_all_is_well = mutant_tests(MUTANTS)
