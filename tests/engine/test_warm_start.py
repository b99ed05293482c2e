"""The start compiles every kernel that serving can meet: none is compiled while a request waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import load_model
from tests.metal_on_cpu import Interpreter, is_supported
from tests.models.architectures import make_architecture
from tests.support import make_tiny_model

BLOCKS = 14
LOADS = [
    ("gpt_oss", "paged:64"),  # sinks and windows
    ("deepseek_v3", "default"),  # latents
]
MORE_LOADS = [
    ("llama", "default"),
    ("llama", "contiguous"),
    ("llama", "paged:64"),
    ("gemma2", "default"),  # softcap
    ("gemma2", "contiguous"),
    ("gemma3_text", "paged:64"),  # windows, several cache groups
    ("gemma4_text", "paged:64"),  # heads that differ by layer
    ("deepseek_v3", "contiguous"),
    ("gpt_oss", "contiguous"),
]
"""They run in `make test-models`."""


@pytest.fixture
def interpreter() -> Iterator[Interpreter]:
    if not is_supported():
        pytest.skip("only the interpreter knows which sources were compiled")
    with Interpreter(checked=False).installed() as interpreter:
        yield interpreter


def serve_mixed_load(core: EngineCore) -> None:
    """Prompts from 1 to 330 tokens, with shared prefixes and a fork, in a pool that is too small for them. They are
    decoded alone and in batches. Some are swapped out and in, and a shared block is copied."""
    shared = [(7 * i) % 200 for i in range(330)]
    prompts = [[5], shared[:3], shared[:31], shared[:45], shared, [*shared[:300], 9, 8], [6] * 90]
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        core.add(Request(str(i), prompt, params, time.monotonic()))
    core.add(Request("fork", prompts[3], params, time.monotonic(), fork_of="3"))
    for _ in range(4):
        core.step()
    core.add(Request("urgent", [8] * 200, params, time.monotonic(), Priority.HIGH))
    while core.has_work():
        assert not any(output.error for output in core.step())


@pytest.mark.usefixtures("warm_up")
@pytest.mark.parametrize(
    ("kind", "tuning"), [*LOADS, *(pytest.param(*load, marks=pytest.mark.models) for load in MORE_LOADS)]
)
def test_a_mixed_load_meets_no_kernel_that_the_start_had_not_compiled(
    tmp_path: Path, interpreter: Interpreter, kind: str, tuning: str
) -> None:
    if kind == "llama":
        path = make_tiny_model(tmp_path / kind, kind, head_dim=32)
    else:
        path = make_architecture(tmp_path / kind, kind)
    served = load_model(str(path))
    block = 32 * bytes_per_token(served.layers)
    config = EngineConfig(
        kv_cache_bytes=BLOCKS * block, swap_space_bytes=40 * block, attention_backend="metal", attention_tuning=tuning
    )
    core = build_engine(config, served)
    compiled, launches = set(interpreter.sources), len(interpreter.launches)
    serve_mixed_load(core)
    stats = core.stats().scheduler
    assert stats.prefix_hit_tokens_total > 0
    assert stats.blocks_copied_total > 0
    assert stats.blocks_swapped_in_total > 0
    assert len(interpreter.launches) > launches
    late = {source.partition("(")[0].split()[-1] for source in interpreter.sources - compiled}
    assert not late, "compiled while a request waits"
