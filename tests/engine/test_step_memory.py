"""What the largest step needs is known before the pools are sized."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.attention.gather import scores_bytes
from mlxpaged.attention.layout import AttentionShape, KVLayout
from mlxpaged.core.engine.prompt_logits import prompt_logits_bytes
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import state_bytes
from mlxpaged.models.loader import LoadOptions, load_model
from mlxpaged.parts.memory import fitting as memory
from mlxpaged.parts.memory import step_memory
from mlxpaged.parts.memory.fitting import LEAST_STEP
from mlxpaged.parts.memory.step_memory import extrapolated, measure_encoding, measure_step
from mlxpaged.vision.tower import Vision
from tests.engine.helpers import make_core
from tests.engine.hybrid import Hybrid
from tests.engine.seeing import PatchFormat, PatchTower
from tests.engine.test_drafting import use_oracle
from tests.models.architectures import make_architecture
from tests.support import make_tiny_model


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_the_measured_step_is_extrapolated_to_the_token_budget(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"intermediate_size": 1024}
    path = make_tiny_model(tmp_path / "m", kind, **options) if kind == "llama" else make_architecture(tmp_path, kind)
    served = load_model(str(path))
    before = mx.get_active_memory()
    size = json.loads((served.path / "config.json").read_text())["hidden_size"]
    # At least one array between two layers exists. More do while MLX's CPU backend allocates ahead of its threads.
    assert measure_step(served, EngineConfig(max_num_batched_tokens=128)) >= 128 * size * 4
    assert mx.get_active_memory() - before < served.weight_bytes + 10_000_000
    monkeypatch.setattr(step_memory, "peak_of_chunk", lambda _served, tokens, _block_size: 1_000_000 * tokens)
    small, large = (measure_step(served, EngineConfig(max_num_batched_tokens=count)) for count in (64, 128))
    assert large - small == 64_000_000


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ({64: 100}, 3200),
        ({256: 1000, 512: 2000}, 8000),  # all layers at once
        ({256: 1000, 512: 1000}, 2000),  # as many command buffers as MLX lets wait; it may grow all the same
        ({256: 1000, 512: 1400}, 3800),
        ({256: 100, 512: 2000}, 8000),  # no line of more than all its tokens
        ({256: 1100, 512: 1000}, 2000),
    ],
)
def test_peaks_are_extrapolated_by_the_lower_of_two_lines_and_the_root_at_least(
    peaks: dict[int, int], expected: int
) -> None:
    assert extrapolated(peaks, 2048) == expected


def test_a_gpu_runs_two_short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    served, chunks = load_model("demo", LoadOptions(joins=False)), list[int]()
    info = {"memory_size": 2**33, "max_recommended_working_set_size": 2**32}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(step_memory, "peak_of_chunk", lambda _served, tokens, _size: chunks.append(tokens) or 2**33)
    assert measure_step(served, EngineConfig()) > 2**33
    assert chunks == [256, 512]
    chunks.clear()
    measure_step(served, EngineConfig(max_num_batched_tokens=128))
    assert chunks == [128]


def test_what_drafts_keep_of_recurrent_layers_is_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as much as the most sequences keep that have as many drafts as a step may have."""
    served, most = load_model(str(make_architecture(tmp_path, "qwen3_5"))), 0
    monkeypatch.setattr(step_memory, "peak_of_chunk", lambda *_: 0)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, speculative="off")
    drafts = replace(config, speculative="ngram")
    added = measure_step(served, drafts) - measure_step(served, config)
    core = make_core(served, speculative="ngram", max_num_seqs=4)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    requests = [Request(str(i), [5 + i] * 9, params, 0.0) for i in range(4)]
    use_oracle(core, {each.request_id: [7] * 30 for each in requests})
    core.submit(requests)
    while core.has_work():
        core.step()
        most = max(most, core.runner.rollback.argument_bytes)
    assert added == 2 * 4 * state_bytes(served.layers) + most


def test_measuring_leaves_no_state_behind(tmp_path: Path) -> None:
    model = Hybrid(tmp_path / "m", num_layers=2)
    measure_step(model.served, EngineConfig())
    core = model.engine()
    assert core.stats().scheduler.blocks.used == 0
    assert all(not array.size or mx.all(mx.isfinite(array)) for pool in core.runner.pools for array in pool.arrays)


def test_a_gpu_keeps_at_least_a_gigabyte_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = load_model("demo", LoadOptions(joins=False))  # no kernel runs here
    small = EngineConfig(max_num_batched_tokens=256)
    assert measure_step(served, small) < LEAST_STEP
    info = {"memory_size": 2**33, "max_recommended_working_set_size": 2**32}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert measure_step(served, small) == LEAST_STEP
    monkeypatch.setattr(memory, "LEAST_STEP", 0)
    logits = prompt_logits_bytes(served.vocab_size, 2048)
    assert measure_step(served, EngineConfig()) >= logits > 50_000_000


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (AttentionShape(16, KVLayout(8, 128, 128, mx.float16, 32)), 0),
        (AttentionShape(16, KVLayout(8, 256, 256, mx.float16, 32)), 2**30),
        (AttentionShape(4, KVLayout(2, 256, 256, mx.float16, 32), window=512), 4 * 4 * 2048 * (512 + 2048)),
        (AttentionShape(4, KVLayout(2, 128, 128, mx.float16, 32), softcap=True), 2**30),
        (AttentionShape(1, KVLayout(1, 128, 128, mx.float16, 32), window=1, softcap=True), 4 * 4 * 2048 * 2049),
    ],
    ids=str,
)
def test_the_scores_of_a_long_prompt_are_bounded(shape: AttentionShape, expected: int) -> None:
    """Gemma 3 has heads of 256: at 77,000 tokens, the scores of a layer would take 5 GB."""
    assert scores_bytes(shape, 2048, 77_000) == expected


def test_the_measured_image_is_extrapolated_to_the_largest() -> None:
    class UpTo448(PatchFormat):
        def size(self, width: int, height: int) -> tuple[int, int]:
            return min(448, width), min(448, height)

    tower = PatchTower(64)
    needed = measure_encoding(Vision(UpTo448(), tower))
    assert tower.calls == [(1, 224, 224, 3)]
    values = 448 * 448 * 3
    assert values * 4 <= needed <= values * 40, "its state is as large as the image, in float32"
