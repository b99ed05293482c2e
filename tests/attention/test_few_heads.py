"""Decoding with half as many query heads in a threadgroup: on M1 and M2 at head size 512, as the tuner finds."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged.attention import kernels, tuner
from mlxpaged.attention import metal as metal_backend
from mlxpaged.attention.layout import AttentionShape, KVLayout
from mlxpaged.attention.self_check import FEW_CASES, self_check, usable_tuning
from mlxpaged.attention.tuner import workload_of
from mlxpaged.attention.tuning import (
    BY_CONTEXT,
    CONTIGUOUS,
    FEW,
    Choice,
    ShapeClass,
    Tuning,
    candidate_choices,
    parse_choice,
    parse_tuning,
)
from mlxpaged.attention.variants import DecodeVariant, choose_decode, may_spill
from tests.attention.metal_cases import Case
from tests.metal_on_cpu import Interpreter

GLOBAL_LAYER = KVLayout(2, 512, 512, mx.float16, 32)
"""As of Gemma 4, with 8 query heads for each KV head."""
GEMMA = AttentionShape(16, GLOBAL_LAYER)
ALONE = ShapeClass(1, 1, 1024)


@pytest.mark.parametrize(
    ("size", "group", "spills"),
    [(512, 8, True), (512, 4, True), (512, 2, False), (512, 16, False), (256, 8, False), (128, 8, False)],
)
def test_only_the_sums_of_large_heads_may_be_in_memory(size: int, group: int, spills: bool) -> None:
    assert may_spill(KVLayout(2, size, size, mx.bfloat16, 32), group) == spills


def test_few_heads_are_half_of_those_that_fit() -> None:
    all_heads, few = (choose_decode(GLOBAL_LAYER, 8, few=each) for each in (False, True))
    assert isinstance(all_heads, DecodeVariant)
    assert isinstance(few, DecodeVariant)
    assert (all_heads.heads, few.heads) == (4, 2)
    assert (few.head_tiles, few.sums) == (4, 32)
    odd = choose_decode(KVLayout(2, 512, 512, mx.float16, 32), 3, few=True)
    assert isinstance(odd, DecodeVariant)
    assert odd.heads == 3, "three heads are not divided"


@pytest.mark.parametrize(("registers", "shape", "is_timed"), [(True, GEMMA, True), (False, GEMMA, False)])
def test_they_are_timed_on_m1_and_m2_alone(
    registers: bool, shape: AttentionShape, is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "has_fixed_registers", lambda: registers)
    limits = tuner.Limits(4096, 4)
    work = workload_of(ALONE, shape, limits)
    found = tuner.candidates(ALONE, shape, work)
    assert (FEW in found) == is_timed
    assert found[0] == BY_CONTEXT, "the default stays the default"
    small = AttentionShape(16, KVLayout(2, 128, 128, mx.float16, 32))
    assert FEW not in tuner.candidates(ALONE, small, work)
    assert FEW not in candidate_choices(ShapeClass(255, 1, 1024)), "chunks have another kernel"


def test_the_choice_is_kept_in_the_tuners_file_and_can_be_asked_for() -> None:
    assert parse_choice(str(FEW)) == FEW
    assert parse_tuning("few") == Tuning(decode=FEW)
    measured = Tuning(((ALONE, FEW), (ShapeClass(1, 4, 1024), CONTIGUOUS)))
    assert measured.uses_few
    assert measured.without_few() == Tuning(((ShapeClass(1, 4, 1024), CONTIGUOUS),))
    assert Tuning(decode=FEW).without_few() == Tuning()
    assert not Tuning(decode=Choice(512)).uses_few


@pytest.mark.parametrize("partition", [0, 24])
@pytest.mark.parametrize(
    "sizes", [{"head_dim": 512, "kv_heads": 1, "group": 8}, {"head_dim": 32, "kv_heads": 2, "group": 4}]
)
def test_decoding_with_few_heads_is_right(
    metal_on_cpu: Interpreter, sizes: dict[str, int], partition: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metal_backend, "FULL_DEVICE", 0)  # otherwise few sequences have a threadgroup for each head
    tuning = Tuning(decode=Choice(partition, few=True))
    metal_on_cpu.launches.clear()
    Case([(1, 70), (1, 33), (1, 1)], mx.float16, tuning=tuning, **sizes).check()
    groups = [launch.grid[1] for launch in metal_on_cpu.launches if launch.kernel == "paged_decode"]
    assert groups
    assert set(groups) == {sizes["kv_heads"] * sizes["group"] // 2}, "a threadgroup has two heads"


SMALL = AttentionShape(8, KVLayout(2, 32, 32, mx.float32, 32))


@pytest.mark.usefixtures("metal")
def test_sound_kernels_pass_the_cases_and_broken_ones_are_not_chosen(
    copied_kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = Tuning(((ALONE, FEW), (ShapeClass(1, 4, 1024), CONTIGUOUS)))
    assert [check.problem for check in self_check([SMALL], cases=FEW_CASES)] == [None, None]
    assert usable_tuning(SMALL, tuning) is tuning
    path = copied_kernels / "paged_decode.metal"
    source = path.read_text()
    path.write_text(source.replace("constexpr", 'static_assert(HEADS != 2, "");\nconstexpr', 1))
    assert path.read_text() != source

    kernels.build.cache_clear()
    assert usable_tuning(SMALL, tuning) == tuning.without_few()
    assert "decoding takes no fewer heads at once: paged_decode, few heads" in caplog.text
