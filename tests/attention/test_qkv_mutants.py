"""Mutants of qkv_write."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from tests.attention.mutants import Mutant, mutant_tests
from tests.attention.qkv_cases import KINDS, SMALL, QkvCase, retyped
from tests.metal_on_cpu import (
    DataRace,
    Divergence,
    MetalCompileError,
    MetalError,
    OutOfBounds,
    UninitialisedOutput,
)


def halves() -> bool:
    """Two pairs for each lane."""
    return QkvCase(**KINDS["Qwen 3"]).is_right()


def neighbours() -> bool:
    return QkvCase(**KINDS["a part"]).is_right()


def part() -> bool:
    return QkvCase(**KINDS["the first half of a part"]).is_right()


def frequencies() -> bool:
    return QkvCase(**KINDS["a factor"]).is_right()


def gated() -> bool:
    return QkvCase(**KINDS["gates"]).is_right()


def unequal() -> bool:
    return QkvCase(**KINDS["values of another size"]).is_right()


def wide() -> bool:
    """More values than 32 lanes load at once."""
    return QkvCase(**KINDS["heads of 256"]).is_right()


def bfloat() -> bool:
    return QkvCase(**retyped(mx.bfloat16, KINDS["a factor"])).is_right()


def rounded() -> bool:
    """To the bit as separate kernels do, in nearly all elements."""
    case = QkvCase(**retyped(mx.bfloat16, KINDS["a factor"]))
    results = zip(case.run("metal"), case.expected(case.round), strict=True)
    return all((got == expected).mean() > 0.99 for got, expected in results)


def repeats() -> bool:
    """The last token is the one before again."""
    case = QkvCase(**SMALL, lens=((1, 9), (1, 20)))
    case.repeat_last()
    return bool(np.isfinite(case.run("metal")[0]).all())


def skipped() -> bool:
    """A token without a slot."""
    case = QkvCase(**SMALL, lens=((1, 9), (1, 20)))
    case.meta.padded_slots[1] = -1
    keys = case.run("metal")[1]
    return int((keys != 7).any(axis=(1, 3)).sum()) == 1


MUTANTS: dict[str, Mutant] = {
    "a wrong row": ("qkv_write", "rows + token * (", "rows + size_t(0) * (", halves, None),
    "a row without values": ("qkv_write", " + KV_HEADS * DV);", ");", halves, None),
    "the first head for all": ("qkv_write", "? head * QUERY :", "? 0 :", halves, None),
    "the first key for all": ("qkv_write", "QUERY + kv_head * DK;", "QUERY;", halves, None),
    "gates for queries": ("qkv_write", "? head * QUERY :", "? head * DK :", gated, None),
    "gates for keys": ("qkv_write", ": HEADS * QUERY + kv", ": HEADS * DK + kv", gated, None),
    "keys for values": ("qkv_write", "from += HEADS * QUERY + KV", "from += HEADS * DK + KV", gated, None),
    "rows without gates": ("qkv_write", "token * (HEADS * QUERY", "token * (HEADS * DK", gated, None),
    "the first values for all": ("qkv_write", " + kv_head * DV;", ";", halves, None),
    "values of the keys' size": ("qkv_write", "kv_head * DV;", "kv_head * DK;", unequal, MetalError),
    "half of the lanes' pairs": (
        "qkv_write", "PAIRS_OF_LANE = (PAIRS + 31) / 32", "PAIRS_OF_LANE = (PAIRS + 31) / 64", halves,
        UninitialisedOutput),
    "pairs beyond the head": ("qkv_write", "pair >= PAIRS ||", "false ||", unequal, MetalError),
    "pairs beyond the head in the sum": (
        "qkv_write", "second[i] = pair < PAIRS ?", "second[i] = true ?", unequal, None),
    "neighbours for halves": ("qkv_write", "!TRADITIONAL && pair < HALF;\n    const int at = halves ? pair",
        "false;\n    const int at = halves ? pair", halves, None),
    "halves of the whole head": ("qkv_write", "HALF = ROTATED / 2", "HALF = DK / 2", part, None),
    "no sum over lanes": ("qkv_write", "simd_sum(squares)", "squares", halves, None),
    "half of a pair in the sum": ("qkv_write", " + second[i] * second[i];", ";", halves, None),
    "a sum for a mean": ("qkv_write", "simd_sum(squares) / DK", "simd_sum(squares)", halves, None),
    "the queries' epsilon": ("qkv_write", "settings[is_query ? 0 : 1]", "settings[0]", halves, None),
    "a sum of some lanes": (
        "qkv_write", "if (NORMS) {\n    inverse", "if (NORMS && lane < 16) {\n    inverse", halves, Divergence),
    "the queries' weights": (
        "qkv_write", "is_query ? query_weight[at] : key_weight[at]", "query_weight[at]", halves, None),
    "one weight for a pair": ("qkv_write", "query_weight[other]", "query_weight[at]", halves, None),
    "no norm": ("qkv_write", "if (NORMS) {\n      const", "if (false) {\n      const", halves, None),
    "a norm after the weight": (
        "qkv_write", "x_weight * static_cast<float>(static_cast<T>(x * inverse_norm))",
        "x_weight * x * inverse_norm", rounded, None),
    "no rounding before rope": (
        "qkv_write", "x = static_cast<float>(static_cast<T>(factor * x));", "x = factor * x;", rounded, None),
    "no factor": ("qkv_write", "static_cast<T>(factor * y)", "static_cast<T>(y)", frequencies, None),
    "all is rotated": ("qkv_write", "if (pair < HALF) {", "if (true) {", neighbours, None),
    "no positions": ("qkv_write", "static_cast<float>(positions[token])", "1.0f", halves, None),
    "positions not scaled": ("qkv_write", "settings[3] * static", "static", part, None),
    "slots for positions": ("qkv_write", "(positions[token])", "(slot_mapping[token])", halves, None),
    "a base by its number": ("qkv_write", "* settings[2])", "* settings[3])", halves, None),
    "a pair's index among all": (
        "qkv_write", "static_cast<float>(HALF)", "static_cast<float>(PAIRS)", part, None),
    "frequencies for wavelengths": (
        "qkv_write", "1.0f / static_cast<float>(frequencies[pair])", "static_cast<float>(frequencies[pair])",
        frequencies, None),
    "turned the other way": ("qkv_write", "x * cosine - y * sine", "x * cosine + y * sine", halves, None),
    "y of the rotated x": ("qkv_write", "const float rotated = x", "const float rotated = x = x", halves, None),
    "a wrong KV head": ("qkv_write", "* KV_HEADS + kv_head) * BLOCK", "* KV_HEADS) * BLOCK", halves, DataRace),
    "keys where values are": (
        "qkv_write", "head - HEADS - KV_HEADS;", "head - HEADS;", halves, MetalError),
    "the next slot": ("qkv_write", "+ slot % BLOCK;", "+ (slot + 1) % BLOCK;", halves, None),
    "two tokens in one slot": ("qkv_write", "+ slot % BLOCK;", "+ 0;", halves, DataRace),
    "slot for block": ("qkv_write", "size_t(slot / BLOCK)", "size_t(slot)", halves, OutOfBounds),
    "a skipped slot not skipped, keys": (
        "qkv_write", "(is_key && slot < 0)", "false", skipped, OutOfBounds),
    "a skipped slot not skipped, values": ("qkv_write", "else if (slot >= 0)", "else", skipped, OutOfBounds),
    "queries of a skipped slot skipped": (
        "qkv_write", "(is_key && slot < 0)", "slot < 0", skipped, UninitialisedOutput),
    "repeats written": ("qkv_write", "int(token) < written ?", "true ?", repeats, DataRace),
    "values of 32 lanes alone": ("qkv_write", "column += 128", "column += DV", wide, None),
    "values loaded twice": ("qkv_write", "column += 128", "column += 64", wide, DataRace),
    "queries of the next token": (
        "qkv_write", "(token * HEADS + head)", "((token + 1) * HEADS + head)", halves, OutOfBounds),
    "no token": ("qkv_write", "  done[0] = 1;\n", "", halves, UninitialisedOutput),
    "a token by every lane": ("qkv_write", "lane == 0 && head == 0 &&", "head == 0 &&", halves, DataRace),
    "const not cast away": (
        "qkv_write", "const_cast<device T*>(key_pool)", "key_pool", halves, MetalCompileError),
    "an implicit bfloat": ("qkv_write", "to[at] = static_cast<T>(x);", "to[at] = x;", bfloat, MetalCompileError),
}  # fmt: skip

test_mutant_is_caught, test_without_a_mutant_all_is_well = mutant_tests(MUTANTS)
