"""The start-up self-check passes where the kernels are right, names the one that is not, and never stops the server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.attention import kernels, precision
from mlxpaged.attention.kv_cache import resolve_backend
from mlxpaged.attention.layout import AttentionShape, KVLayout
from mlxpaged.attention.self_check import (
    CASES,
    MATRIX_CASES,
    NEEDED_CASES,
    BackendChoice,
    choose_backend,
    self_check,
    usable_tuning,
)
from mlxpaged.attention.tuner import Limits, choose_tunings
from mlxpaged.attention.tuning import BY_CONTEXT, CONTIGUOUS, DEFAULT_TUNING, MATRIX, ShapeClass, Tuning
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import load_model
from tests.metal_on_cpu import Interpreter
from tests.support import every, make_tiny_model, run_requests

SHAPE = AttentionShape(4, KVLayout(2, 32, 32, mx.float32, 32))
LATENT = AttentionShape(20, KVLayout(1, 40, 32, mx.float32, 32, latent=True))
OTHERS = [
    AttentionShape(8, KVLayout(1, 64, 64, mx.float16, 16), window=24),
    AttentionShape(3, KVLayout(3, 128, 128, mx.bfloat16, 8), sinks=True),
    AttentionShape(6, KVLayout(2, 80, 80, mx.float32, 32), window=5, sinks=True),
    AttentionShape(4, KVLayout(2, 48, 32, mx.float16, 32)),
    AttentionShape(4, KVLayout(2, 32, 32, mx.float16, 32), chunk=24),
    AttentionShape(4, KVLayout(2, 32, 32, mx.float32, 32), softcap=True),
    LATENT,
    AttentionShape(4, KVLayout(2, 32, 32, mx.float32, 32), window=40, mutual=True),
]

BROKEN = {
    "kv_write": ("slot % BLOCK", "(slot + 1) % BLOCK", "kv_write, paged_attention and paged_decode, overlapped steps"),
    "paged_attention": ("softcap", "soft_cap", "kv_write, paged_attention and paged_decode, overlapped steps"),
    "paged_decode": ("softcap", "soft_cap", "kv_write, paged_attention and paged_decode, overlapped steps"),
    "merge_partials": ("HEADS", "HEADZ", "merge_partials, long contexts"),
    "kv_gather": ("key_pool", "value_pool", "kv_gather, mixed chunks"),
    "block_move": ("INTO_POOL ?", "!INTO_POOL ?", "block_move"),
}
BY_MATRICES = Tuning(((ShapeClass(31, 1, 1024), MATRIX), (ShapeClass(1, 1, 1024), CONTIGUOUS)))


def break_kernel(directory: Path, name: str) -> str:
    """Returns the case that must notice."""
    old, new, case = BROKEN[name]
    source = (directory / f"{name}.metal").read_text()
    assert old in source
    (directory / f"{name}.metal").write_text(source.replace(old, new))
    return case


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("shape", every(3, [SHAPE, *OTHERS]), ids=str)
def test_sound_kernels_pass_every_case(shape: AttentionShape) -> None:
    checks = self_check([shape, shape], cases=NEEDED_CASES)
    names = [name for name, case in NEEDED_CASES.items() if case.latent in (None, shape.layout.latent)]
    assert [check.case for check in checks] == names, "equal shapes are checked once"
    assert [check.problem for check in checks] == [None] * len(names)
    assert choose_backend("auto", [shape]) == BackendChoice("metal")


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("shape", every(10, [shape for shape in (SHAPE, *OTHERS) if shape is not LATENT]), ids=str)
def test_a_sound_matrix_kernel_may_be_chosen(shape: AttentionShape) -> None:
    assert [check.problem for check in self_check([shape], cases=MATRIX_CASES)] == [None, None]
    assert usable_tuning(shape, BY_MATRICES) is BY_MATRICES


@pytest.mark.parametrize("shape", [SHAPE, LATENT], ids=str)
def test_a_case_is_named_after_kernels_that_it_runs(metal_on_cpu: Interpreter, shape: AttentionShape) -> None:
    for name, case in CASES.items():
        metal_on_cpu.launches.clear()
        if self_check([shape], cases={name: case}):
            named = {kernel for kernel in kernels.INPUTS_AND_OUTPUTS if kernel in name}
            assert named
            assert named <= {launch.kernel for launch in metal_on_cpu.launches}, name


@pytest.mark.usefixtures("metal")
def test_a_broken_matrix_kernel_is_not_chosen_and_the_other_kernels_are_used(
    copied_kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied_kernels / "matrix_attention.metal"
    path.write_text(path.read_text().replace("sum * factor / divisor", "sum"))
    assert choose_backend("auto", [SHAPE]) == BackendChoice("metal")
    problems = {check.case: check for check in self_check([SHAPE])}
    assert "differ" in str(problems["matrix_attention, mixed chunks"].problem)
    assert not any(check.stops_metal for check in problems.values())
    assert usable_tuning(SHAPE, BY_MATRICES) == Tuning(BY_MATRICES.choices[1:])
    assert usable_tuning(SHAPE, Tuning(chunks=MATRIX)) == DEFAULT_TUNING
    assert usable_tuning(SHAPE, DEFAULT_TUNING) is DEFAULT_TUNING
    assert choose_tunings("metal", "matrix", [SHAPE], Limits(1024, 1)) == {SHAPE: Tuning(decode=BY_CONTEXT)}
    assert len(caplog.records) == 3
    assert "the matrix kernel is not used" in caplog.text
    assert str(SHAPE) in caplog.text


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_named_with_what_is_wrong_and_attention_falls_back(
    name: str, copied_kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = break_kernel(copied_kernels, name)
    problems = {check.case: check.problem for check in self_check([SHAPE])}
    assert problems[case] is not None
    choice = choose_backend("auto", [SHAPE])
    assert choice.backend == "gather"
    assert name in str(choice.kernels_off)
    [record] = caplog.records
    assert name in record.getMessage()
    assert "not used" in record.getMessage()


@pytest.mark.usefixtures("metal")
def test_a_kernel_that_is_wrong_about_images_is_noticed_if_layers_have_them(copied_kernels: Path) -> None:
    path = copied_kernels / "paged_attention.metal"
    path.write_text(path.read_text().replace("MUTUAL ? max(here, item[7]) : here", "here"))
    assert choose_backend("auto", [SHAPE]).backend == "metal"
    assert choose_backend("auto", [replace(SHAPE, mutual=True)]).backend == "gather"


@pytest.mark.usefixtures("metal")
def test_a_size_that_the_kernels_are_not_made_for_falls_back_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_backend("auto", [AttentionShape(4, KVLayout(2, 18, 18, mx.float32, 32))]).backend == "gather"
    assert "multiple of 4" in caplog.text


def to_tf32(array: mx.array) -> mx.array:
    """Rounded to a significand of 11 bits."""
    rounded: mx.array = ((array.astype(mx.float32).view(mx.int32) + 0x1000) & ~0x1FFF).view(mx.float32)
    return rounded


def attention_in_tf32(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
    force_fused: bool,
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention` as the GPU of an M5 computes it in float32."""
    assert sinks is None
    assert not force_fused
    keys, values = (mx.repeat(each, queries.shape[1] // each.shape[1], axis=1) for each in (keys, values))
    scores = scale * (to_tf32(queries) @ to_tf32(keys).swapaxes(-1, -2))
    if isinstance(mask, str):
        length, num_keys = scores.shape[-2:]
        mask = mx.arange(num_keys) <= mx.arange(num_keys - length, num_keys)[:, None]
    weights = mx.softmax(mx.where(mask, scores, -mx.inf), axis=-1)
    return to_tf32(weights) @ to_tf32(values)


@pytest.mark.usefixtures("metal")
def test_float32_passes_if_mlxs_own_attention_is_rounded_to_tf32_and_a_wrong_key_does_not(
    copied_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = AttentionShape(4, KVLayout(2, 128, 128, mx.float32, 32))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention_in_tf32)
    assert choose_backend("auto", [shape]).backend == "gather", "the limit for exact products is too tight"
    monkeypatch.setattr(precision, "rounds_float32", lambda: True)
    assert choose_backend("auto", [shape]) == BackendChoice("metal")
    case = break_kernel(copied_kernels, "kv_write")
    kernels.build.cache_clear()
    assert case in str(choose_backend("auto", [shape]).kernels_off)


@pytest.mark.usefixtures("metal", "warm_up")
def test_kernels_that_were_asked_for_by_name_are_compiled_too_and_one_that_fails_is_logged(
    copied_kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[tuple[int, int]] = []
    assert choose_backend("metal", [SHAPE, SHAPE], lambda done, total: reports.append((done, total))).backend == "metal"
    total = sum(not case.latent for case in NEEDED_CASES.values())
    assert reports == [(done, total) for done in range(total + 1)]
    assert not caplog.records
    case = break_kernel(copied_kernels, "block_move")
    kernels.build.cache_clear()
    assert choose_backend("metal", [SHAPE]) == BackendChoice("metal")
    [record] = caplog.records
    assert f"{case} failed" in record.getMessage()


@pytest.mark.skipif(mx.metal.is_available(), reason="there is a Metal device")
def test_without_metal_auto_needs_no_check_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_backend("auto", [SHAPE]) == BackendChoice(resolve_backend("auto")) != BackendChoice("metal")
    assert not caplog.records


def test_what_was_asked_for_by_name_is_not_second_guessed() -> None:
    for name in ("gather", "metal", "cpu"):
        assert choose_backend(name, []) == BackendChoice(name)


@pytest.mark.usefixtures("metal")
def test_the_engine_serves_on_metal_if_the_check_passes_else_on_gather(tmp_path: Path, copied_kernels: Path) -> None:
    served = load_model(str(make_tiny_model(tmp_path / "m", "llama", head_dim=32)))
    assert [(spec.num_query_heads, spec.num_kv_heads) for spec in served.layers] == [(4, 2), (4, 2)]
    core = build_engine(EngineConfig(kv_cache_bytes=1_000_000), served)
    assert core.runner.backend == "metal"
    expected = run_requests(core, [[1, 2, 3]], max_tokens=4)
    break_kernel(copied_kernels, "merge_partials")
    kernels.build.cache_clear()
    core = build_engine(EngineConfig(kv_cache_bytes=1_000_000), served)
    assert core.runner.backend == "gather"
    assert run_requests(core, [[1, 2, 3]], max_tokens=4) == expected
