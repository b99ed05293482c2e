"""Each phase of a start is named while it lasts."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from mlxpaged.engine.builder import load_core
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.progress import Progress, Stage
from tests.models.architectures import make_architecture
from tests.support import make_adapter

CHECKS = [Stage.CHECKING_MODEL, Stage.CHECKING_LAYERS, Stage.CHECKING_MODEL]


def reports_of(config: EngineConfig) -> list[Progress]:
    reports: list[Progress] = []
    load_core(config, lambda: 0.0, reports.append).close()
    return reports


def stages_of(reports: list[Progress]) -> list[Stage]:
    return [stage for stage, _ in groupby(each.stage for each in reports)]


def test_adapters_quantized_keys_and_prefixes_on_a_disk(tmp_path: Path) -> None:
    path = make_architecture(tmp_path / "model", "llama", head_dim=64)
    adapter = make_adapter(path, tmp_path / "adapter", seed=1)
    reports = reports_of(
        EngineConfig(
            str(path),
            kv_cache_bytes=2**22,
            adapters=(AdapterPath("a", adapter),),
            kv_cache_dtype="int8",
            prefix_cache_dir=tmp_path / "prefixes",
        )
    )
    assert stages_of(reports) == [
        *(Stage.LOADING, Stage.TOKENIZER, Stage.CHECKING_MODEL, Stage.CHECKING_ADAPTERS, *CHECKS[1:]),
        *(Stage.CHECKING_ADAPTERS, Stage.CHECKING_KV_CACHE, Stage.MEASURING, Stage.HASHING, Stage.TIMING_STEPS),
    ]
    for stage in (Stage.CHECKING_ADAPTERS, Stage.CHECKING_KV_CACHE):
        counted = [each.done for each in reports if each.stage is stage and each.total]
        assert counted == sorted(counted)
        assert counted[-1] == next(each.total for each in reports if each.stage is stage and each.total)
    assert all(0 <= each.done <= each.total for each in reports if each.total)


def test_drafts_of_a_model_with_recurrent_states(tmp_path: Path) -> None:
    path = make_architecture(tmp_path / "model", "qwen3_5")
    stages = stages_of(reports_of(EngineConfig(str(path), kv_cache_bytes=2**22)))
    assert stages[-3:] == [Stage.MEASURING, Stage.CHECKING_DRAFTS, Stage.TIMING_STEPS]
