"""With `--batch-invariant`, a request has the same tokens and log-probabilities, to the bit, in any batch.

A few random batches of each model run by default, 200 of each with `make test-fuzz`, which also runs 54 on the kernels
for Metal.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxpaged.core.blocks.groups import CacheGroups
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.core.step import Step
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.cache_groups import cache_layout
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.parts.invariant.tiled_steps import largest_tile
from tests.engine.hybrid import Hybrid, TinyModel, assert_balanced
from tests.metal_on_cpu import Interpreter
from tests.models.architectures import VOCAB_SIZE, make_architecture
from tests.support import make_tiny_model, quantize

SHARED = [(11 * i) % 97 + 16 for i in range(150)]
"""Longer than a range of keys."""

PROBES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "short": ([5], {}),
    "shared": (SHARED[:70], {"logprobs": 3}),
    "longer": ([*SHARED, 7, 8], {"logprobs": 5}),
    "seeded": (SHARED[:40], {"temperature": 1.0, "seed": 1, "logprobs": 0}),
    "again": (SHARED[:40], {"temperature": 1.0, "seed": 2, "logprobs": 1, "fork_of": "seeded"}),
    "filtered": (SHARED[20:60], {"temperature": 0.9, "seed": 3, "top_p": 0.8, "logprobs": 2}),
    "top-k": ([9] * 31, {"temperature": 1.2, "seed": 4, "top_k": 7, "min_p": 0.01, "logprobs": 2}),
    "penalized": ([10, 11] * 16, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2}),
    "biased": (SHARED[3:90], {"logit_bias": {3: 2.5, 8: -4.0}, "logprobs": 1}),
    "of the prompt": (SHARED[:50], {"prompt_logprobs": 4, "logprobs": 4}),
    "prompt only": (SHARED[5:30], {"prompt_logprobs": 1, "max_tokens": 0}),
    "high": (SHARED[::-1][:60], {"priority": Priority.HIGH, "logprobs": 3}),
}
"""Prompts and parameters."""

LONGEST, MOST_TOKENS = 152, 8


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[Any]
    prompt_logprobs: list[bytes]


def make_llama(path: Path) -> Path:
    return make_tiny_model(path, "llama", vocab_size=VOCAB_SIZE)


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": make_llama,
    "quantized": lambda path: quantize(make_llama(path), 4),
    "experts": lambda path: make_architecture(path, "qwen3_moe"),
    "windows": lambda path: make_architecture(path, "gemma3_text", sliding_window=5),
    "sinks": lambda path: make_architecture(path, "gpt_oss"),
    "latents": lambda path: make_architecture(path, "deepseek_v3"),
}


SLOW = MODELS.keys() - {"llama"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(MODELS[request.param](tmp_path_factory.mktemp("models") / request.param))


def probe(name: str, alone: bool = False) -> Request:
    prompt, options = PROBES[name]
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True} | options
    priority, fork_of = params.pop("priority", Priority.NORMAL), params.pop("fork_of", None)
    return Request(name, prompt, SamplingParams(**params), time.monotonic(), priority, None if alone else fork_of)


def replaced(request: Request, **params: Any) -> Request:
    return replace(request, params=replace(request.params, **params))


def other(number: int, rng: random.Random) -> Request:
    """Any request. Many begin as a probe does."""
    first = rng.randint(0, 9)
    prompt = [*SHARED[: rng.choice((0, 16, 64, 140))], *(rng.randrange(1, 200) for _ in range(1 + first))]
    params = SamplingParams(
        max_tokens=rng.randint(1, MOST_TOKENS),
        temperature=rng.choice((0.0, 1.0)),
        top_k=rng.choice((0, 3, 40)),
        top_p=rng.choice((1.0, 0.5)),
        seed=number,
        logprobs=rng.choice((None, 0, 20)),
        prompt_logprobs=rng.choice((None, None, 9)),
        ignore_eos=True,
    )
    return Request(f"other {number}", prompt, params, time.monotonic(), rng.choice(list(Priority)))


def play(core: EngineCore, requests: list[Request], rng: random.Random | None = None) -> dict[str, Answer]:
    """Run requests that arrive in this order, at random steps. Returns the answers of the probes."""
    waiting, answers = list(requests), {name: Answer([], [], []) for name in PROBES}
    while waiting or core.has_work():
        while waiting and (rng is None or not core.has_work() or waiting[0].fork_of or rng.random() < 0.4):
            core.add(waiting.pop(0))
        for output in core.step():
            assert output.error is None, output.error
            answer = answers.get(output.request_id)
            if answer is not None:
                answer.tokens.extend(output.token_ids)
                answer.logprobs.extend(output.logprobs)
                if output.prompt_logprobs is not None:
                    found = output.prompt_logprobs
                    arrays = found.logprobs, found.ranks, found.top_ids, found.top_logprobs
                    answer.prompt_logprobs.extend(np.ascontiguousarray(array).tobytes() for array in arrays)
    assert_balanced(core)
    return answers


def answers_alone(model: TinyModel, names: Iterable[str] = PROBES, **options: Any) -> dict[str, Answer]:
    """Each by itself, in one engine without a prefix cache."""
    core = model.engine(prefix_caching=False, **options)
    return {name: play(core, [probe(name, alone=True)])[name] for name in names}


def answers_in_mix(model: TinyModel, seed: int, **options: Any) -> tuple[dict[str, Answer], int]:
    """Of the probes among random requests, and how many sequences were preempted."""
    rng = random.Random(seed)
    names = [name for name in PROBES if name != "again"]
    rng.shuffle(names)
    names.insert(rng.randint(names.index("seeded") + 1, len(names)), "again")
    requests = [probe(name) for name in names]
    for number in range(rng.randint(0, 12)):
        requests.insert(rng.randint(0, len(requests)), other(number, rng))
    at = {each.request_id: i for i, each in enumerate(requests)}
    requests.insert(at["seeded"] + 1, requests.pop(at["again"]))  # it forks a request that still runs
    block_size, chunk = rng.choice((8, 16, 32)), rng.choice((16, 40, 200))
    windows = cache_layout(model.served.kv_layers, model.served.context_length).windows
    least = CacheGroups(windows, block_size).blocks_needed(LONGEST + MOST_TOKENS, chunk)
    core = model.engine(
        num_blocks=least + rng.choice((0, 0, 8, 200)),
        swap_blocks=rng.choice((0, 8, 100)),
        block_size=block_size,
        max_num_seqs=rng.choice((2, 6, 16)),
        max_num_batched_tokens=chunk,
        prefix_caching=rng.random() < 0.8,
        **options,
    )
    return play(core, requests, rng), core.stats().scheduler.preemptions_total


def differing(found: dict[str, Answer], expected: dict[str, Answer]) -> list[str]:
    return [name for name in expected if found[name] != expected[name]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(make_llama(tmp_path_factory.mktemp("llama") / "llama"))


@pytest.fixture
def interpreter() -> Iterator[Interpreter | None]:
    """On a Mac, None: the kernels run for real."""
    if mx.metal.is_available():
        yield None
        return
    with Interpreter().installed() as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def expected(model: TinyModel) -> dict[str, Answer]:
    return answers_alone(model, batch_invariant=True)


def check_mixes(model: TinyModel, expected: dict[str, Answer], seeds: Iterable[int], **options: Any) -> None:
    preemptions = 0
    for seed in seeds:
        found, preempted = answers_in_mix(model, seed, batch_invariant=True, **options)
        assert differing(found, expected) == [], f"seed {seed}"
        preemptions += preempted
    assert preemptions > 0


def test_answers_in_random_batches_are_those_of_requests_alone(model: TinyModel, expected: dict[str, Answer]) -> None:
    check_mixes(model, expected, range(1))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_answers_in_200_random_batches_are_those_of_requests_alone(
    model: TinyModel, expected: dict[str, Answer], first: int
) -> None:
    check_mixes(model, expected, range(first, first + 20))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
def test_answers_in_9_random_batches_on_metal_are_those_of_requests_alone(model: TinyModel) -> None:
    """A batch takes half a minute without a GPU."""
    expected = answers_alone(model, batch_invariant=True, attention_backend="metal")
    check_mixes(model, expected, range(9), attention_backend="metal")


def test_the_flag_hides_that_roundings_depend_on_the_rows(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some BLAS libraries compute each row of this small model alone, so here the norms depend on their number."""
    norm = nn.RMSNorm.__call__

    def rounded(layer: nn.RMSNorm, x: mx.array) -> mx.array:
        return norm(layer, x) * (1 + 1e-6 * (x.size // x.shape[-1]))

    monkeypatch.setattr(nn.RMSNorm, "__call__", rounded)
    names = ["shared", "longer", "seeded", "filtered"]
    for flag in (False, True):
        found, _ = answers_in_mix(llama, 0, batch_invariant=flag)
        differ = differing(found, answers_alone(llama, names, batch_invariant=flag))
        assert differ == [] if flag else len(differ) > len(names) // 2


def test_the_metal_backend_gives_the_same_answers_in_any_batch(
    llama: TinyModel, interpreter: Interpreter | None
) -> None:
    """Steps overlap here: a tile has tokens of the step in flight."""
    names = ["short", "shared", "top-k"]
    requests = [replaced(probe(name), max_tokens=3) for name in names]

    def run(*chosen: Request) -> dict[str, Answer]:
        core = llama.engine(attention_backend="metal", batch_invariant=True, max_num_batched_tokens=60)
        assert core.runner.overlaps
        return play(core, list(chosen))

    together = run(*requests)
    for each in requests:
        assert run(each)[each.request_id] == together[each.request_id], each.request_id
    if interpreter is not None:
        assert {launch.kernel for launch in interpreter.launches} <= {
            *("paged_decode", "merge_partials", "qkv_write", "block_move", "add_rms_norm")
        }


def test_a_model_with_recurrent_states_is_refused(tmp_path: Path) -> None:
    hybrid = Hybrid(tmp_path / "hybrid", num_layers=2)
    with pytest.raises(UnsupportedModelError, match="its recurrent layers are not batch-invariant"):
        hybrid.engine(batch_invariant=True)


@pytest.mark.parametrize("wrong", [{"attention_backend": "cpu"}, {"attention_tuning": "paged:64"}, {"retune": True}])
def test_contradicting_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"batch_invariant|attention_tuning"):
        EngineConfig(batch_invariant=True, **wrong)


def test_a_device_that_computes_places_differently_gets_smaller_tiles() -> None:
    """As OpenBLAS does with 12 rows: here the fifth row of a product is rounded otherwise."""

    def forward(batch: Step) -> mx.array:
        positions = mx.array([[float(row.start)] for row in batch.rows])
        return positions + (mx.arange(len(batch))[:, None] >= 4) * 1e-3

    assert largest_tile(forward, num_groups=1) == 4
