"""The whole engine on the Metal backend: token for token what the gather backend gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.step import Step
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from mlxpaged.parts.drafting.draft_stats import NO_DRAFTS
from mlxpaged.parts.drafting.drafting import Drafting
from tests.engine.helpers import part_of
from tests.engine.test_draft_head import logged
from tests.engine.test_drafting import as_many, every_other_step
from tests.metal_on_cpu import Interpreter
from tests.models.architectures import make_architecture
from tests.models.draft_assistants import make_assistant
from tests.models.draft_heads import make_drafting
from tests.support import make_tiny_model, poison_new_blocks, run_requests

MODELS: dict[str, dict[str, Any]] = {
    "demo": {},
    "llama": {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}

KINDS = (
    "gemma3",  # sliding windows
    "gpt_oss",  # sinks
    "gemma4_text",  # heads that differ by layer
    "gemma4",  # shared KV
    "qwen3_next",  # gated delta nets
    "nemotron_h",  # Mamba 2
    "lfm2",  # convolutions
    "deepseek_v3",  # latents
    "kimi_linear",  # latents and linear attention
    "falcon_h1",  # attention and Mamba 2 in one layer
)
"""Architectures with something else than full attention over equal heads."""

SAMPLE = ("qwen3_next", "deepseek_v3")
"""Those of `KINDS` that run by default; `make test-models` runs them all."""

SHARED = list(range(100, 170))  # two full blocks and a bit
PROMPTS = [
    SHARED,
    [5],
    [*SHARED, 7, 8],
    list(range(40, 100)),
    [9] * 31,
    [10, 11] * 16,
    list(range(200, 233)),
    [1, 2, 3],
]
BLOCKS = 10


def parameters() -> list[Any]:
    """All models if asked for, and a sample always."""
    rare = [pytest.param(kind, marks=pytest.mark.models) for kind in KINDS if kind not in SAMPLE]
    return [*MODELS, *SAMPLE, *rare]


@pytest.fixture(scope="module", params=parameters())
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    name = request.param
    if name == "demo":
        return load_model("demo")
    directory = tmp_path_factory.mktemp(name)
    if name in MODELS:
        return load_model(str(make_tiny_model(directory, name, **MODELS[name])))
    return load_model(str(make_architecture(directory, name)))


@pytest.fixture
def interpreter() -> Iterator[Interpreter | None]:
    """On a Mac, None: the kernels run for real."""
    if mx.metal.is_available():
        yield None
        return
    with Interpreter().installed() as interpreter:
        yield interpreter


def make_core(served: ServedModel, backend: str, **options: Any) -> EngineCore:
    cache = BLOCKS * 32 * bytes_per_token(served.layers)
    limits = {"max_num_batched_tokens": 100, "max_step_ms": 0}
    core = build_engine(EngineConfig(kv_cache_bytes=cache, attention_backend=backend, **limits, **options), served)
    poison_new_blocks(core)
    return core


def test_the_engine_gives_the_same_tokens_on_either_backend(
    served: ServedModel, interpreter: Interpreter | None
) -> None:
    """Eight prompts, chunked and mixed with decoding, in a pool too small for them: one hits another's prefix, some
    are preempted. Every block is poisoned when it is handed out."""
    metal, gather = make_core(served, "metal"), make_core(served, "gather")
    assert metal.runner.backend == "metal"
    assert metal.runner.overlaps
    assert not gather.runner.overlaps
    expected = run_requests(gather, PROMPTS, max_tokens=12)
    assert run_requests(metal, PROMPTS, max_tokens=12) == expected
    for core in (metal, gather):
        stats = core.stats().scheduler
        assert stats.preemptions_total > 0
        assert stats.prefix_hit_tokens_total >= 64
    if interpreter is not None:
        kernels = {launch.kernel for launch in interpreter.launches}
        writing = "kv_write" if served.kv_layers[0].qkv is None else "qkv_write"
        attending = {"latent_attention"} if served.kv_layers[0].latent else {"paged_attention", "paged_decode"}
        assert {*attending, writing, "block_move"} <= kernels


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3_text", marks=pytest.mark.models)])
def test_steps_with_drafts_have_the_launches_of_decoding(
    kind: str, tmp_path: Path, interpreter: Interpreter | None
) -> None:
    """Steps with drafts and steps that overlap follow one another. A step with drafts launches what a step of as many
    sequences launches, and its graph is replayed."""
    directory = (
        make_tiny_model(tmp_path / kind, kind, **MODELS[kind]) if kind in MODELS else make_architecture(tmp_path, kind)
    )
    served = load_model(str(directory))
    prompts = PROMPTS[1:4]
    expected = run_requests(make_core(served, "gather"), prompts, max_tokens=16)
    core = make_core(served, "metal", speculative="ngram")
    drafting = part_of(core, Drafting)
    drafting.drafter, drafting.budget.lengths = Known(prompts, expected), every_other_step()
    launched: dict[bool, set[str]] = {False: set(), True: set()}
    forward = core.runner.forward

    def counting(step: Step, *args: Any) -> Any:
        logits = forward(step, *args)
        if interpreter is not None and all(row.decodes for row in step.rows):
            mx.eval(logits)
            launched[step.has_drafts] |= {launch.kernel for launch in interpreter.launches}
            interpreter.launches.clear()
        return logits

    core.runner.forward = counting  # type: ignore[method-assign]
    assert run_requests(core, prompts, max_tokens=16) == expected
    assert core.stats().of(NO_DRAFTS).accepted_total >= 12
    if interpreter is not None:
        assert launched[True] <= launched[False]


@pytest.mark.parametrize(
    "kind",
    ["glm4_moe", *(pytest.param(kind, marks=pytest.mark.models) for kind in ("glm4_moe_lite", "gemma4"))],
)
def test_a_draft_head_runs_on_the_kernels(kind: str, tmp_path: Path, interpreter: Interpreter | None) -> None:
    """Its steps are replayed, and its drafts are those of the gather backend."""
    path = tmp_path / kind
    reference = make_assistant(path, has_clusters=True) if kind == "gemma4" else make_drafting(path, kind)
    directory = reference.path
    prompts = PROMPTS[1:4]
    expected = run_requests(make_core(load_model(str(directory)), "gather"), prompts, max_tokens=16)
    served = load_model(str(directory), LoadOptions(drafts=True, mtp_path=reference.mtp))
    found = []
    for backend in ("gather", "metal"):
        core = make_core(served, backend, speculative="mtp")
        drafting = part_of(core, Drafting)
        drafting.budget.lengths = as_many
        drafts = logged(core)
        assert run_requests(core, prompts, max_tokens=16) == expected
        found.append(sorted(drafts))
        assert not core.runner.overlaps or core.runner.num_traced > 0
    assert found[0] == found[1]
    assert len(found[0]) > 30


class Known:
    """A drafter that knows the answers. A request is known by its prompt."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self._answers = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}

    def begin_step(self) -> None:
        pass

    def propose(self, running: RunningRequest, most: int) -> tuple[list[int], int]:
        sequence = running.sequence
        answer = self._answers[tuple(sequence.token_ids[: sequence.num_prompt_tokens])]
        done = sequence.num_output_tokens
        return answer[done : done + most], 3

    def forget(self, sequence_id: int) -> None:
        pass


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt_oss", marks=pytest.mark.models)])
def test_chunks_on_the_matrix_kernel_give_the_same_tokens(
    kind: str, tmp_path: Path, interpreter: Interpreter | None
) -> None:
    """As above: prefix hits, preemption, chunks beside decoding sequences, poisoned blocks."""
    directory = (
        make_tiny_model(tmp_path / kind, kind, **MODELS[kind]) if kind in MODELS else make_architecture(tmp_path, kind)
    )
    served = load_model(str(directory))
    expected = run_requests(make_core(served, "gather"), PROMPTS, max_tokens=6)
    metal = make_core(served, "metal", attention_tuning="matrix")
    if interpreter is not None:
        interpreter.launches.clear()
    assert run_requests(metal, PROMPTS, max_tokens=6) == expected
    stats = metal.stats().scheduler
    assert stats.preemptions_total > 0
    assert stats.prefix_hit_tokens_total >= 64
    if interpreter is not None:
        names = [launch.kernel for launch in interpreter.launches]
        assert {"matrix_attention", "paged_decode"} <= set(names)
        assert "paged_attention" not in names
        assert "kv_gather" not in names


def test_sampled_requests_survive_aborts_and_a_failing_step_on_either_backend(
    served: ServedModel, interpreter: Interpreter | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On metal, steps overlap: the one that fails has a successor in flight, and a request leaves in between."""
    params: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_p": 0.9, "top_k": 40, "frequency_penalty": 1.0},
        {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.3},
        {"temperature": 1.5, "seed": 4, "min_p": 0.05, "logit_bias": {7: 3.0}},
    ]
    outcomes = []
    for backend in ("gather", "metal"):
        core = make_core(served, backend)
        for i, (prompt, options) in enumerate(zip(PROMPTS, params, strict=False)):
            core.add(Request(str(i), prompt, SamplingParams(max_tokens=8, ignore_eos=True, **options), 0.0))
        core.add(Request("leaves", PROMPTS[4], SamplingParams(max_tokens=8, ignore_eos=True), 0.0))
        read, reads = InFlightStep.read, []

        def failing(step: InFlightStep, read: Any = read, reads: list[int] = reads) -> Any:
            reads.append(1)
            if len(reads) == 3:
                raise DeviceError("injected")
            return read(step)

        monkeypatch.setattr(InFlightStep, "read", failing)
        outputs: dict[str, list[RequestOutput]] = {}
        while core.has_work():
            for output in core.step():
                outputs.setdefault(output.request_id, []).append(output)
            if len(reads) == 2:
                core.abort("leaves")
        monkeypatch.setattr(InFlightStep, "read", read)
        assert core.scheduler.pool.usage().used == 0
        outputs.pop("leaves", None)
        assert not any(output.error for answer in outputs.values() for output in answer)
        tokens = {name: [t for output in answer for t in output.token_ids] for name, answer in outputs.items()}
        logprobs = [entry.logprob for output in outputs["2"] for entry in output.logprobs]
        assert [len(answer) for answer in tokens.values()] == [8] * 4
        outcomes.append((tokens, logprobs))
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[0][1] == pytest.approx(outcomes[1][1], abs=1e-3)


def test_a_long_prompt_takes_the_path_of_long_chunks(served: ServedModel, interpreter: Interpreter | None) -> None:
    prompts = [[(7 * i) % 250 for i in range(150)], [3, 4]]
    config = {"kv_cache_bytes": 20 * 32 * bytes_per_token(served.layers), "max_num_batched_tokens": 300}
    outputs = [
        run_requests(build_engine(EngineConfig(attention_backend=backend, **config), served), prompts, max_tokens=4)
        for backend in ("gather", "metal")
    ]
    assert outputs[0] == outputs[1]
    if interpreter is not None:
        assert "kv_gather" in {launch.kernel for launch in interpreter.launches}


QUANTIZED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "int8": ("qwen3", "int8", {"head_dim": 64}),
    "int4": ("qwen3", "int4", {"head_dim": 128}),
    "windows": ("gemma3_text", "int8", {"head_dim": 64, "sliding_window": 16, "sliding_window_pattern": 2}),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_kv_gives_the_same_tokens_on_either_backend(
    kind: str, interpreter: Interpreter | None, tmp_path: Path
) -> None:
    """As above: prefix hits, preemption to the swap space, chunks beside decoding sequences, poisoned blocks."""
    model_type, dtype, config = QUANTIZED[kind]
    served = load_model(str(make_tiny_model(tmp_path / kind, model_type, **config)), LoadOptions(kv_cache_dtype=dtype))
    assert served.kv_cache_dtype == dtype
    swap = 20 * 32 * bytes_per_token(served.layers)
    metal, gather = (make_core(served, backend, swap_space_bytes=swap) for backend in ("metal", "gather"))
    assert metal.runner.backend == "metal"
    expected = run_requests(gather, PROMPTS, max_tokens=12)
    assert run_requests(metal, PROMPTS, max_tokens=12) == expected
    assert metal.stats().scheduler.preemptions_total > 0
    if interpreter is not None:
        kernels = {launch.kernel for launch in interpreter.launches}
        names = "paged_attention", "paged_decode", "kv_gather", "qkv_write"
        assert {*(f"{name}_quantized" for name in names), "block_move"} <= kernels
