"""Decode steps whose graphs are replayed: the same tokens as without, in a growing context, after errors too."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention import kernels, metadata, metal
from mlxpaged.attention.metadata import Planner
from mlxpaged.core.engine import model_runner
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.caches import ModelCaches
from mlxpaged.models.layers import PerSequence, bytes_per_token
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from mlxpaged.parts.graphs import step_graphs
from mlxpaged.parts.graphs.warm_up import warm_up
from tests.engine.fuzz import play_all
from tests.engine.hybrid import Hybrid, TinyModel, request, run
from tests.engine.test_drafting import answers, tokens_of, use_oracle
from tests.engine.test_model_runner import CountingMlx
from tests.lazy_kernels import LazyKernels, no_fusion
from tests.models.architectures import make_architecture
from tests.support import make_adapter, make_tiny_model, run_requests

LAYERS = 2
KERNELS = 4
"""Of a layer: a write, attention, and two additions with norms."""
PROMPTS = [list(range(3, 33)), [5, 6, 7], list(range(40, 100))]
"""Their decode steps begin with one, two and three blocks, in different slots."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = tmp_path_factory.mktemp("model") / "m"
    return load_model(str(make_tiny_model(directory, "llama", num_hidden_layers=LAYERS)))


@pytest.fixture
def lazy() -> Iterator[LazyKernels]:
    """Without fusion, for which MLX would call a C++ compiler here."""
    with no_fusion(), LazyKernels().installed() as lazy:
        yield lazy


def make_core(served: ServedModel, backend: str, tuning: str = "paged", **options: Any) -> EngineCore:
    cache = 40 * 32 * (bytes_per_token(served.layers) or 1)
    config = EngineConfig(
        kv_cache_bytes=cache,
        attention_backend=backend,
        attention_tuning=tuning if backend == "metal" else "default",
        **options,
    )
    return build_engine(config, served)


def add(core: EngineCore, max_tokens: int, prompt: list[int] = PROMPTS[0]) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    core.add(Request("one", prompt, params, 0.0))


def count_replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Returns a list that grows with each step that is replayed, its first time excepted."""
    compiled, replays = mx.compile, []

    def compile_function(function: Any) -> Any:
        replay = compiled(function)

        def run(*args: Any) -> Any:
            replays.append(None)
            return replay(*args)

        return run

    monkeypatch.setattr(mx, "compile", compile_function)
    return replays


@pytest.mark.parametrize("tuning", ["paged", "paged:64"])
def test_replayed_steps_give_the_tokens_of_the_gather_backend(
    served: ServedModel, lazy: LazyKernels, tuning: str
) -> None:
    """With "paged:64", ranges are merged, and their number grows with the contexts."""
    expected = run_requests(make_core(served, "gather"), PROMPTS, max_tokens=80)
    core, before = make_core(served, "metal", tuning), lazy.calls
    assert run_requests(core, PROMPTS, max_tokens=80) == expected
    steps = core.stats().model_calls_total
    assert lazy.calls - before < steps * LAYERS * KERNELS / 2, "most steps call no kernel: they are replayed"
    assert core.stats().attention_calls_total == steps * LAYERS


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])  # windows and groups of caches; keys of other layers
def test_layers_that_share_memory_or_keys_are_replayed(kind: str, lazy: LazyKernels, tmp_path: Path) -> None:
    served = load_model(str(make_architecture(tmp_path / kind, kind)))
    expected = run_requests(make_core(served, "gather"), PROMPTS, max_tokens=40)
    core = make_core(served, "metal")
    assert run_requests(core, PROMPTS, max_tokens=40) == expected
    assert lazy.calls < core.stats().attention_calls_total


def test_steps_over_quantized_pools_are_replayed(lazy: LazyKernels, tmp_path: Path) -> None:
    path = make_architecture(tmp_path / "qwen3", "qwen3", head_dim=64)
    served = load_model(str(path), LoadOptions(kv_cache_dtype="int8"))
    assert served.kv_cache_dtype == "int8"
    expected = run_requests(make_core(served, "gather"), PROMPTS, max_tokens=40)
    core, before = make_core(served, "metal"), lazy.calls
    assert run_requests(core, PROMPTS, max_tokens=40) == expected
    assert lazy.calls - before < core.stats().attention_calls_total


HYBRIDS = [
    "qwen3_5",
    "qwen3_next",
    "lfm2",
    "jamba",
    "granitemoehybrid",
    "falcon_h1",
    "nemotron_h",
    "mamba",
    "mamba2",
    "rwkv7",
    "recurrent_gemma",
    "bailing_moe_linear",
]
QUICK = ("qwen3_5", "lfm2", "mamba2", "rwkv7", "recurrent_gemma")
"""Each kind of state, with layers that attend and without."""


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.models) for kind in HYBRIDS]
)
def test_recurrent_states_go_through_replayed_graphs(
    kind: str, lazy: LazyKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = load_model(str(make_architecture(tmp_path / kind, kind)))
    expected = run_requests(make_core(served, "gather"), PROMPTS, max_tokens=30)
    core, replays = make_core(served, "metal"), count_replays(monkeypatch)
    assert run_requests(core, PROMPTS, max_tokens=30) == expected
    assert len(replays) >= 20, "of 30 steps; the others have a prompt or begin a signature"


@pytest.mark.parametrize("kind", ["qwen3_5", "nemotron_h", "rwkv7"])
def test_steps_with_drafts_of_recurrent_layers_are_replayed(
    kind: str, lazy: LazyKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of modules that may run again are outputs of the graph."""
    served = load_model(str(make_architecture(tmp_path / kind, kind)))
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    requests = [Request(str(i), prompt, params, float(i)) for i, prompt in enumerate(PROMPTS[:2])]
    expected = tokens_of(answers(make_core(served, "gather"), requests))
    core, replays = make_core(served, "metal", speculative="ngram"), count_replays(monkeypatch)
    drafting = use_oracle(core, expected)
    drafting.budget.lengths = lambda contexts, chances, *_: [min(2, len(each)) for each in chances]
    assert tokens_of(answers(core, requests)) == expected
    assert len(replays) > 10
    assert core.runner.rollback.module_calls > 5
    assert drafting.stats().accepted_total > 40


def test_caches_of_single_sequences_are_never_in_a_graph(
    lazy: LazyKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change in place."""
    served = load_model(str(make_architecture(tmp_path / "m", "plamo2")))
    assert any(isinstance(layer, PerSequence) for layer in served.layers)
    expected = run_requests(make_core(served, "gather"), PROMPTS, max_tokens=12)
    core, replays = make_core(served, "metal"), count_replays(monkeypatch)
    warm_up(core.runner)
    assert run_requests(core, PROMPTS, max_tokens=12) == expected
    assert not replays


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("hybrid") / "model", num_layers=2)


def test_a_hybrid_model_is_warmed_up(hybrid: Hybrid, lazy: LazyKernels) -> None:
    core = hybrid.engine(64, attention_backend="metal")
    warm_up(core.runner)
    calls = lazy.calls
    result = run(core, [request("0", PROMPTS[1], 12)])
    assert hybrid.answer(PROMPTS[1], 12).equals(result.tokens("0"))
    assert lazy.calls < calls + 12, "its steps are replayed from the first token on"


def test_states_are_replayed_in_any_order_of_the_batch(
    hybrid: Hybrid, lazy: LazyKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that is too small: sequences are preempted, swapped out and forked, hit the prefix cache, are cancelled
    and fail, while others decode."""
    monkeypatch.setattr(step_graphs, "TRACE_AT", 1)
    replays = count_replays(monkeypatch)

    def make_engine(model: TinyModel, rng: random.Random) -> EngineCore:
        return model.engine(
            num_blocks=rng.choice((14, 18, 30)),
            swap_blocks=rng.choice((0, 60)),
            num_checkpoints=rng.choice((0, 2, 30)),
            max_num_seqs=rng.choice((3, 6)),
            max_num_batched_tokens=rng.choice((16, 40)),
            attention_backend="metal",
            attention_tuning="paged",
        )

    play_all(hybrid, make_engine, range(6), 16)
    assert len(replays) > 20


def test_steps_with_adapters_are_replayed(lazy: LazyKernels, tmp_path: Path) -> None:
    """A graph has the layers of its adapters. Which row has which adapter is in the upload."""
    path = make_tiny_model(tmp_path / "m", "llama", num_hidden_layers=LAYERS)
    adapters = [AdapterPath(name, make_adapter(path, tmp_path / name, i)) for i, name in enumerate(("red", "blue"))]
    served = load_model(str(path), LoadOptions(adapters=adapters))
    chosen = [(None, "red", "blue"), ("blue", "red", None), ("red", None, None), ("red", "red", "red")]

    def answers(core: EngineCore) -> list[list[int]]:
        return [tokens for names in chosen for tokens in run_requests(core, PROMPTS, names, max_tokens=30)]

    expected = answers(make_core(served, "gather", prefix_caching=False))
    core, before = make_core(served, "metal", prefix_caching=False), lazy.calls
    assert answers(core) == expected
    assert lazy.calls - before < core.stats().attention_calls_total * KERNELS / 2


def test_a_context_that_grows_within_its_bucket_builds_no_new_graph(served: ServedModel, lazy: LazyKernels) -> None:
    """Positions 78 to 198: four blocks are added, in a table of eight columns."""
    core = make_core(served, "metal")
    add(core, 140, list(range(70)))
    for _ in range(8):
        core.step()
    calls = lazy.calls
    for _ in range(120):
        core.step()
    assert core.has_work()
    assert lazy.calls == calls


def test_warming_up_changes_no_answer_and_no_count(served: ServedModel, lazy: LazyKernels) -> None:
    expected = run_requests(make_core(served, "gather"), PROMPTS[:1], max_tokens=3)
    core = make_core(served, "metal")
    warm_up(core.runner)
    assert core.stats().model_calls_total == core.stats().attention_calls_total == 0
    assert run_requests(core, PROMPTS[:1], max_tokens=3) == expected


def test_a_pool_of_one_block_is_warmed_up(served: ServedModel, lazy: LazyKernels) -> None:
    """With --max-model-len 32 the pool starts with one block."""
    config = EngineConfig(kv_cache_bytes=32 * bytes_per_token(served.layers), attention_backend="metal")
    core = build_engine(config, served)
    warm_up(core.runner)
    assert len(run_requests(core, [[5, 6, 7]], max_tokens=8)[0]) == 8


def test_what_was_warmed_up_is_replayed(served: ServedModel, lazy: LazyKernels) -> None:
    core = make_core(served, "metal")
    warm_up(core.runner)
    calls = lazy.calls
    warm_up(core.runner)
    assert lazy.calls == calls + 2 * LAYERS * KERNELS, "one step of each batch is computed without a graph, to compare"


def test_the_first_request_is_decoded_with_graphs_of_the_warm_up(served: ServedModel, lazy: LazyKernels) -> None:
    """Its tokens are in flight. MLX joins the operations that insert them into a kernel of its own too."""
    core = make_core(served, "metal")
    warm_up(core.runner)
    add(core, 20, PROMPTS[1])
    core.step()
    calls = lazy.calls
    for _ in range(10):
        core.step()
    assert lazy.calls == calls


class Replay:
    """A compiled function that the test can refer to weakly."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)


def test_a_graph_that_is_not_kept_is_freed_at_once(
    served: ServedModel, lazy: LazyKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the garbage collector runs: that may be much later, and on a thread other than the engine's."""
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 1)
    compile_function, replays = mx.compile, []

    def recording(function: Any) -> Replay:
        replay = Replay(compile_function(function))
        replays.append(weakref.ref(replay))
        return replay

    monkeypatch.setattr(mx, "compile", recording)
    core = make_core(served, "metal")
    gc.disable()
    try:
        warm_up(core.runner)
        assert [replay() is None for replay in replays] == [True, False]
    finally:
        gc.enable()


def test_where_replayed_steps_are_wrong_none_is_replayed(
    served: ServedModel, lazy: LazyKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run_requests(make_core(served, "gather"), PROMPTS[:1], max_tokens=20)
    core, compiled = make_core(served, "metal"), mx.compile

    def spoiling(function: Any) -> Any:
        replay = compiled(function)

        def wrong(vector: mx.array, *args: Any) -> Any:
            return replay(mx.concatenate([vector[:1] - 1, vector[1:]]), *args)  # another position

        return wrong

    monkeypatch.setattr(mx, "compile", spoiling)
    warm_up(core.runner)
    assert run_requests(core, PROMPTS[:1], max_tokens=20) == expected
    assert "replayed decode steps give other logits" in caplog.text


def test_a_decode_step_is_one_upload(served: ServedModel, lazy: LazyKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(served, "metal", "paged:64")
    add(core, 20)
    core.step()
    seen = CountingMlx()
    for module in (model_runner, metadata, metal, kernels):
        monkeypatch.setattr(module, "mx", seen)
    for steps in range(1, 9):  # built, traced, replayed
        core.step()
        assert len(seen.uploads) == steps


def test_replayed_graphs_see_the_pools_that_replace_lost_ones(
    served: ServedModel, lazy: LazyKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_requests(make_core(served, "gather"), PROMPTS[:1], max_tokens=40)
    core, read, reads = make_core(served, "metal"), InFlightStep.read, []

    def failing(step: InFlightStep) -> Any:
        reads.append(1)
        if len(reads) == 20:
            raise DeviceError("injected")
        return read(step)

    monkeypatch.setattr(InFlightStep, "read", failing)
    assert run_requests(core, PROMPTS[:1], max_tokens=40) == expected


def test_a_step_that_mlx_cannot_trace_is_built_without_a_graph(
    served: ServedModel, lazy: LazyKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run_requests(make_core(served, "gather"), PROMPTS, max_tokens=12)
    launch = kernels.launch

    def evaluating(name: str, inputs: Any, *args: Any, **options: Any) -> Any:
        mx.eval(inputs[0])
        return launch(name, inputs, *args, **options)

    monkeypatch.setattr(kernels, "launch", evaluating)
    assert run_requests(make_core(served, "metal"), PROMPTS, max_tokens=12) == expected
    assert len([record for record in caplog.records if "cannot trace" in record.message]) == 1


def test_a_plan_that_is_made_during_a_step_is_never_part_of_a_graph(
    served: ServedModel, lazy: LazyKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its work items would be those of the step that was traced."""
    expected = run_requests(make_core(served, "gather"), PROMPTS, max_tokens=20)
    core = make_core(served, "metal", "paged:64")
    other = Planner("other", lambda _lengths, upload: upload.add(np.zeros(8, np.int32)))
    monkeypatch.setattr(ModelCaches, "planners", [other])
    assert run_requests(core, PROMPTS, max_tokens=20) == expected
