"""An engine with a tiny Llama."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import ServedModel, load_model
from tests.support import make_tiny_model, poison_new_blocks

PROMPTS = [[5, 6, 7] * 20, [8, 9], [10] * 40, [11, 12, 13, 14]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_model(str(make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")))


@pytest.fixture
def core(served: ServedModel) -> EngineCore:
    return make_core(served)


def make_core(served: ServedModel, **options: Any) -> EngineCore:
    core = build_engine(EngineConfig(**({"kv_cache_bytes": 1_000_000, "max_step_ms": 0} | options)), served)
    poison_new_blocks(core)
    return core


def submit(core: EngineCore, name: str, prompt: list[int], **params: Any) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params
    core.add(Request(name, prompt, SamplingParams(**options), time.monotonic()))


def run(core: EngineCore) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while core.has_work():
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
