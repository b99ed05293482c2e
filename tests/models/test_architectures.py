"""Every architecture of mlx-lm: served with mlx-lm's own tokens in every way through the engine, or refused.

A sample runs by default, all of them with `make test-models`.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models import replacements
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.architectures import Source, source_of
from mlxpaged.models.layers import bytes_per_token, is_per_sequence, keeps_states, state_bytes
from mlxpaged.models.loader import LoadOptions, load_model
from mlxpaged.parts.drafting.drafting import Drafting
from tests.answers import TIE, Answer, greedy_answer
from tests.engine.test_drafting import use_oracle
from tests.models import mlx_vlm_types
from tests.models.architectures import (
    ARCHITECTURES,
    FUSED,
    HALF_FUSED,
    REFUSED,
    VOCAB_SIZE,
    is_installed,
    make_architecture,
)
from tests.support import poison_new_blocks, quantize

BLOCK_SIZE = 8
LENGTHS = (80, 1, 35, 9, 57, 16, 2, 40, 64, 24, 5, 48, 17, 71, 8, 31)
"""If mlx-lm's two best logits are closer, float32 rounding alone may choose either, and the answers go apart."""

SAMPLE = (
    "llama",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "qwen3_moe",
    "step3p5",
    "gemma4",
    "mimo_v2_flash",
    "deepseek_v3",
    "lfm2",
    "qwen3_next",
    "lfm2-4-bit",
)
"""One of each kind: windows, sinks, experts, heads that differ by layer, shared KV, latents, recurrent layers, and
quantized weights."""

OF_MLX_VLM = "mlx-vlm-"
"""Begins the names of types that come from mlx-vlm."""

QUANTIZED = tuple(f"{name}-4-bit" for name in ("qwen3_5", "qwen3_5_moe", "gemma4", "deepseek_v3", "lfm2"))
"""Architectures that are tested with 4-bit weights too."""


@dataclass(frozen=True)
class Size:
    """How much is generated. few_blocks: a pool that is large enough for the longest prompt and not for much more."""

    num_prompts: int
    num_tokens: int
    few_blocks: int


BRIEF, WHOLE = Size(6, 8, 12), Size(16, 24, 15)

SERVED = [name for name, each in ARCHITECTURES.items() if name not in REFUSED and each.cannot_run is None]


class Case:
    """One architecture: prompts, mlx-lm's answers to them, and the model as it is served."""

    def __init__(self, path: Path, name: str, size: Size, plain: Any = None) -> None:
        """plain: computes the answers; None for mlx-lm's model."""
        self.path, self.name, self.size = path, name.removesuffix("-4-bit"), size
        rng = random.Random(name)
        lengths = LENGTHS[: size.num_prompts]
        self.prompts = [[rng.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in lengths]
        first = self.prompts[0]
        self.plain: Any = plain or load_plain_model(path)[0]
        self.plain.eval()
        self.answers = [self.answer(prompt) for prompt in self.prompts]
        turn = first + self.answers[0].tokens[: size.num_tokens * 3 // 4] + self.prompts[3]
        self.branches = [first[:45] + self.prompts[2], first[:16] + self.prompts[5], first[:79], turn]
        self.branch_answers = [self.answer(prompt) for prompt in self.branches]
        self.forked = self.prompts[2]
        fork, banned = self.answers[2], []
        self.forks = [((), fork)]
        for _ in range(2):
            banned.append(fork.tokens[0])
            fork = self.answer(self.forked, tuple(banned))
            self.forks.append((tuple(banned), fork))
        self.served = load_model(str(path))

    def answer(self, prompt: list[int], banned: tuple[int, ...] = ()) -> Answer:
        """Greedy, one prompt at a time, with mlx-lm's own caches."""
        return greedy_answer(self.plain, make_prompt_cache(self.plain), prompt, self.size.num_tokens, banned)

    def engine(self, num_blocks: int = 256, swap_blocks: int = 0, **config: Any) -> EngineCore:
        block = BLOCK_SIZE * bytes_per_token(self.served.layers)
        defaults = {"block_size": BLOCK_SIZE, "attention_backend": "gather", "max_num_seqs": 16, "max_step_ms": 0}
        options = defaults | config
        swapped = swap_blocks * (block + state_bytes(self.served.layers) // 8)
        memory = {"kv_cache_bytes": num_blocks * block or None, "swap_space_bytes": swapped}
        core = build_engine(EngineConfig(str(self.path), **memory, **options), self.served)
        poison_new_blocks(core)
        return core

    def request(
        self, name: str, prompt: list[int], banned: tuple[int, ...] = (), fork_of: str | None = None
    ) -> Request:
        bias = dict.fromkeys(banned, -mx.inf)
        limit = self.size.num_tokens
        params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, logit_bias=bias)
        return Request(name, prompt, params, time.monotonic(), fork_of=fork_of)

    def generate(
        self, core: EngineCore, prompts: list[list[int]], arrivals: tuple[int, ...] | None = None
    ) -> list[list[int]]:
        """The tokens of every prompt. arrivals: the step before which each of them arrives; None for the first."""
        requests = [self.request(f"request-{i}", prompt) for i, prompt in enumerate(prompts)]
        return run(core, requests, arrivals or (0,) * len(prompts))


def run(core: EngineCore, requests: list[Request], arrivals: tuple[int, ...]) -> list[list[int]]:
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting = list(zip(arrivals, requests, strict=True))
    step = 0
    while waiting or core.has_work():
        while waiting and waiting[0][0] <= step:
            core.add(waiting.pop(0)[1])
        for output in core.step():
            assert output.error is None, output.error
            outputs[output.request_id] += output.token_ids
        step += 1
    assert core.scheduler.pool.usage().used == 0
    return list(outputs.values())


def parameters(names: list[str]) -> list[Any]:
    """All architectures if asked for, and a brief sample always. Tests of one model share a process, because they
    share what mlx-lm answers."""
    every = [
        pytest.param((name, WHOLE), id=name, marks=[pytest.mark.models, pytest.mark.xdist_group(name)])
        for name in names
        if is_installed(name.removesuffix("-4-bit"))
    ]
    sample = [pytest.param((name, BRIEF), id=f"{name}-brief") for name in SAMPLE if name in names]
    return every + sample


def types_of_mlx_vlm(served: bool) -> list[Any]:
    """Those that are served, or those that are refused."""
    names = [name for name in mlx_vlm_types.TYPES if (name not in mlx_vlm_types.REFUSED) is served]
    missing = pytest.mark.skipif(importlib.util.find_spec("mlx_vlm") is None, reason="mlx-vlm is not installed")
    marks = [pytest.mark.mlxvlm, missing]
    return [
        pytest.param((OF_MLX_VLM + name, BRIEF), id=OF_MLX_VLM + name, marks=[*marks, pytest.mark.xdist_group(name)])
        for name in names
    ]


@pytest.fixture(scope="module", params=[*parameters([*SERVED, *QUANTIZED]), *types_of_mlx_vlm(served=True)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, size = request.param
    if name.startswith(OF_MLX_VLM):
        path = tmp_path_factory.mktemp("type") / "model"
        yield Case(path, name, size, mlx_vlm_types.make_type(path, name.removeprefix(OF_MLX_VLM)))
        return
    path = make_architecture(tmp_path_factory.mktemp("architecture") / "model", name.removesuffix("-4-bit"))
    yield Case(quantize(path, 4) if name in QUANTIZED else path, name, size)
    mx.clear_cache()


def assert_same(answers: list[list[int]], expected: list[Answer]) -> None:
    """Token for token, up to a tie."""
    assert len(answers) == len(expected)
    for i, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        assert len(answer) == len(wanted.tokens)
        at = wanted.first_difference(answer)
        assert at is None, f"answer {i}: token {at} is {answer[at]}, not {wanted.tokens[at]}"


def test_answers_depend_on_the_prompt_and_are_mostly_no_ties(case: Case) -> None:
    """Or else the comparisons below would show nothing."""
    tokens = [answer.tokens for answer in case.answers]
    margins = [margin for answer in case.answers for margin in answer.margins]
    assert len({tuple(answer) for answer in tokens}) > len(tokens) // 2
    assert len({token for answer in tokens for token in answer}) > len(margins) // 20
    assert sum(margin < TIE for margin in margins) <= len(margins) // 50


def test_alone_a_prompt_gets_the_tokens_of_mlx_lm(case: Case) -> None:
    core = case.engine(prefix_caching=False)
    for i in range(5):
        assert_same(case.generate(core, case.prompts[i : i + 1]), case.answers[i : i + 1])


def test_prompts_that_arrive_in_turn_get_the_tokens_of_mlx_lm_in_one_batch(case: Case) -> None:
    core = case.engine()
    arrivals = tuple(max(0, 3 * (i + 1) - 3 * len(case.prompts) // 2) for i in range(len(case.prompts)))
    assert_same(case.generate(core, case.prompts, arrivals), case.answers)
    assert core.stats().steps_total < 4 * case.size.num_tokens


def test_attention_is_fused_where_its_parts_are_known(case: Case) -> None:
    fused = {spec.qkv is not None for spec in case.served.kv_layers}
    if case.name in HALF_FUSED:
        assert fused == {True, False}
    elif not case.name.startswith(OF_MLX_VLM):
        assert fused <= {case.name in FUSED}


@pytest.mark.parametrize("way", ["separate", "fused as on a GPU"])
@pytest.mark.rotated("models")
def test_fused_and_separate_attention_get_the_tokens_of_mlx_lm(
    case: Case, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other tests run fused, where projections are joined for the CPU. On a GPU, they are joined to be fused."""
    if case.name not in FUSED:
        pytest.skip("not fused")
    other = copy.copy(case)
    if way == "separate":
        other.served = load_model(str(case.path), LoadOptions(joins=False))
    else:
        monkeypatch.setattr(replacements, "optimize_for_cpu", lambda _model: None)
        other.served = load_model(str(case.path))
    assert {spec.qkv is not None for spec in other.served.kv_layers} == {way != "separate"}
    core = other.engine(max_num_batched_tokens=24)
    assert_same(other.generate(core, case.prompts), case.answers)


def test_prompts_in_odd_chunks_get_the_tokens_of_mlx_lm(case: Case) -> None:
    core = case.engine(max_num_seqs=8, max_num_batched_tokens=13, prefix_caching=False)
    assert_same(case.generate(core, case.prompts), case.answers)
    assert core.stats().steps_total > sum(map(len, case.prompts)) // 13


def test_prefix_hits_and_branches_get_the_tokens_of_mlx_lm(case: Case) -> None:
    core = case.engine()
    for _ in range(2):
        assert_same(case.generate(core, case.prompts[:1]), case.answers[:1])
    if not is_per_sequence(case.served.layers):
        assert core.stats().scheduler.prefix_hit_tokens_total > 0
    for _ in range(2):
        assert_same(case.generate(core, case.branches), case.branch_answers)


@pytest.mark.parametrize("swap_blocks", [0, 200], ids=["recompute", "swap"])
@pytest.mark.rotated("models")
def test_preempted_sequences_get_the_tokens_of_mlx_lm(case: Case, swap_blocks: int) -> None:
    """The longest prompt has a higher class and comes last. It needs nearly the whole pool."""
    core = case.engine(num_blocks=case.size.few_blocks, swap_blocks=swap_blocks)
    longest, *others = (case.request(f"request-{i}", prompt) for i, prompt in enumerate(case.prompts))
    requests = [*others, replace(longest, priority=Priority.HIGH)]
    answers = run(core, requests, (*[0] * len(others), 3))
    assert_same([answers[-1], *answers[:-1]], case.answers)
    stats, layers = core.stats().scheduler, case.served.layers
    if bytes_per_token(layers):  # a model without any has room for all
        assert stats.preemptions_total > 0
        assert (stats.blocks_swapped_in_total > 0) == (swap_blocks > 0 and not is_per_sequence(layers))


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
@pytest.mark.rotated("models")
def test_tokens_are_the_same_with_drafts_of_which_many_are_wrong(case: Case, temperature: float) -> None:
    """Prompts arrive in turn, in chunks. A model that runs once per sequence has no drafts."""
    options = {"max_num_batched_tokens": 40, "speculative": "ngram"}
    core = case.engine(**options)
    if is_per_sequence(case.served.layers):
        assert core.part(Drafting) is None
        return
    made = [case.request(f"request-{i}", prompt) for i, prompt in enumerate(case.prompts)]
    requests = [
        replace(each, params=replace(each.params, temperature=temperature, seed=i)) for i, each in enumerate(made)
    ]
    arrivals = tuple(range(0, 3 * len(requests), 3))
    expected = [answer.tokens for answer in case.answers]
    if temperature:
        expected = run(case.engine(**options | {"speculative": "off"}), requests, arrivals)
    drafting = use_oracle(core, {f"request-{i}": tokens for i, tokens in enumerate(expected)})
    answers = run(core, requests, arrivals)
    if temperature:
        assert answers == expected
    else:
        assert_same(answers, case.answers)
    assert len(expected) * case.size.num_tokens // 4 < drafting.stats().accepted_total < drafting.stats().drafted_total


def test_forks_that_go_apart_get_the_tokens_of_mlx_lm(case: Case) -> None:
    """As for n=3. Each fork may not use the first token of those before it."""
    core = case.engine(prefix_caching=False)
    requests = [
        case.request(f"fork-{i}", case.forked, banned, "fork-0" if i else None)
        for i, (banned, _) in enumerate(case.forks)
    ]
    assert_same(run(core, requests, (0,) * len(requests)), [answer for _, answer in case.forks])
    assert (core.stats().scheduler.blocks_copied_total > 0) == (not keeps_states(case.served.layers))


@pytest.mark.parametrize("refused", parameters(list(REFUSED)))
def test_an_architecture_that_is_not_served_is_refused_with_the_reason(
    refused: tuple[str, Size], tmp_path: Path
) -> None:
    name, _ = refused
    path = make_architecture(tmp_path / "model", name)
    with pytest.raises(UnsupportedModelError, match=re.escape(REFUSED[name])):
        load_model(str(path))


@pytest.mark.parametrize("refused", types_of_mlx_vlm(served=False))
def test_a_type_of_mlx_vlm_that_is_not_served_is_refused_with_the_reason(
    refused: tuple[str, Size], tmp_path: Path
) -> None:
    name = refused[0].removeprefix(OF_MLX_VLM)
    mlx_vlm_types.make_type(tmp_path / "model", name)
    with pytest.raises(UnsupportedModelError, match=re.escape(mlx_vlm_types.REFUSED[name])):
        load_model(str(tmp_path / "model"))


@pytest.mark.mlxvlm
def test_the_table_has_every_type_of_mlx_vlm() -> None:
    package = pytest.importorskip("mlx_vlm.models")
    found = set()
    for path in Path(package.__path__[0]).glob("*/__init__.py"):
        with contextlib.suppress(UnsupportedModelError):
            if source_of({"model_type": path.parent.name}) is Source.MLX_VLM:
                found.add(path.parent.name)
    assert found - mlx_vlm_types.ELSEWHERE == mlx_vlm_types.TYPES.keys()


@pytest.mark.models
def test_the_table_has_every_architecture_of_mlx_lm() -> None:
    """Models are recognised by their source: one cannot be imported here."""
    package = importlib.util.find_spec("mlx_lm.models")
    assert package is not None
    assert package.submodule_search_locations is not None
    found = set()
    for path in Path(package.submodule_search_locations[0]).glob("*.py"):
        classes = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
        if {"Model", "ModelArgs"} <= classes or "class Model(" in path.read_text():
            found.add(path.stem)
    assert found <= ARCHITECTURES.keys()
