"""The start-up self-check passes where the kernels are right, names the one that is not, and never stops the server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged.attention import AttentionShape, KVLayout, choose_backend, kernels, resolve_backend
from mlxpaged.attention.self_check import CASES, self_check
from mlxpaged.cli import main
from mlxpaged.engine import EngineConfig, build_engine
from mlxpaged.models import load_model
from tests.support import make_tiny_model, run_requests

SHAPE = AttentionShape(4, KVLayout(2, 32, 32, mx.float32, 32))

BROKEN = {
    "kv_write": ("slot % BLOCK", "(slot + 1) % BLOCK", "kv_write, paged_attention and paged_decode, overlapped steps"),
    "paged_attention": ("softcap", "soft_cap", "kv_write, paged_attention and paged_decode, overlapped steps"),
    "paged_decode": ("softcap", "soft_cap", "kv_write, paged_attention and paged_decode, overlapped steps"),
    "merge_partials": ("HEADS", "HEADZ", "merge_partials, long contexts"),
    "kv_gather": ("key_pool", "value_pool", "kv_gather, mixed chunks"),
    "block_copy": ("key_pool", "keys_pool", "block_write, block_copy and block_read"),
}


@pytest.fixture
def copied_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The Metal sources in a place where a test may change them."""
    directory = tmp_path / "metal_kernels"
    shutil.copytree(kernels.kernel_directory(), directory)
    monkeypatch.setattr(kernels, "kernel_directory", lambda: directory)
    kernels.build.cache_clear()
    yield directory
    kernels.build.cache_clear()


def break_kernel(directory: Path, name: str) -> str:
    """Returns the case that must notice."""
    old, new, case = BROKEN[name]
    source = (directory / f"{name}.metal").read_text()
    assert old in source
    (directory / f"{name}.metal").write_text(source.replace(old, new))
    return case


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        AttentionShape(8, KVLayout(1, 64, 64, mx.float16, 16), window=24),
        AttentionShape(3, KVLayout(3, 128, 128, mx.bfloat16, 8), sinks=True),
        AttentionShape(6, KVLayout(2, 80, 80, mx.float32, 32), window=5, sinks=True),
        AttentionShape(4, KVLayout(2, 48, 32, mx.float16, 32)),
        AttentionShape(4, KVLayout(2, 32, 32, mx.float16, 32), chunk=24),
        AttentionShape(20, KVLayout(1, 40, 32, mx.float32, 32, latent=True)),
    ],
    ids=str,
)
def test_sound_kernels_pass_every_case(shape: AttentionShape) -> None:
    checks = self_check([shape, shape])
    assert [check.case for check in checks] == list(CASES), "equal shapes are checked once"
    assert [check.problem for check in checks] == [None] * len(CASES)
    assert choose_backend("auto", [shape]) == "metal"


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_named_with_what_is_wrong_and_attention_falls_back(
    name: str, copied_kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = break_kernel(copied_kernels, name)
    problems = {check.case: check.problem for check in self_check([SHAPE])}
    assert problems[case] is not None
    assert choose_backend("auto", [SHAPE]) == "gather"
    [record] = caplog.records
    assert name in record.getMessage()
    assert "not used" in record.getMessage()


@pytest.mark.usefixtures("metal")
def test_a_size_that_the_kernels_are_not_made_for_falls_back_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_backend("auto", [AttentionShape(4, KVLayout(2, 18, 18, mx.float32, 32))]) == "gather"
    assert "multiple of 4" in caplog.text


@pytest.mark.skipif(mx.metal.is_available(), reason="there is a Metal device")
def test_without_metal_auto_needs_no_check_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_backend("auto", [SHAPE]) == resolve_backend("auto") != "metal"
    assert not caplog.records


def test_what_was_asked_for_by_name_is_not_second_guessed() -> None:
    assert [choose_backend(name, []) for name in ("gather", "metal", "cpu")] == ["gather", "metal", "cpu"]


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


@pytest.mark.usefixtures("metal")
def test_the_doctor_prints_every_kernel_and_its_outcome(
    capsys: pytest.CaptureFixture[str], copied_kernels: Path
) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(
        any(line.strip().startswith(case) and line.endswith(" ok") for line in out.splitlines()) for case in CASES
    )
    assert "mlx " in out
    case = break_kernel(copied_kernels, "kv_gather")
    kernels.build.cache_clear()
    assert main(["doctor"]) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if case in line]
    assert "differ" in line


@pytest.mark.skipif(mx.metal.is_available(), reason="there is a Metal device")
def test_the_doctor_says_why_there_are_no_kernels_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "there is no Metal device" in capsys.readouterr().out
    assert main(["doctor", "./nothing"]) == 1
    assert "no such directory" in capsys.readouterr().err
