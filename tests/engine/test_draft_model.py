"""Drafts by a smaller model are the tokens that it would give, and change no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.models.turns import Turns
from mlxpaged.parts.drafting.draft_loading import with_draft_model
from mlxpaged.parts.drafting.draft_stats import NO_DRAFTS
from mlxpaged.parts.drafting.drafting import Drafting
from mlxpaged.parts.drafting.network_drafters import ModelDrafter
from mlxpaged.vision.positions import Axes
from tests.engine.helpers import make_core, part_of
from tests.engine.seeing import image, load_seeing, shown
from tests.engine.test_draft_head import logged
from tests.engine.test_drafting import answers, as_many, prompt, requests, tokens_of
from tests.models.architectures import make_architecture

PAIRS = {"llama": "qwen3", "gpt_oss": "llama", "gemma3_text": "gemma3_text"}
"""Models, some with windows, and the kind of their draft model."""


@pytest.fixture(scope="module", params=PAIRS)
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("drafts")
    small = make_architecture(directory / "small", PAIRS[request.param])
    return make_architecture(directory / "m", request.param), small


def core_of(paths: tuple[Path, Path], drafts: bool = True, **options: Any) -> EngineCore:
    served = load_model(str(paths[0]))
    if not drafts:
        return make_core(served, **options)
    chosen = {"speculative": "draft", "draft_model": str(paths[1])}
    core = make_core(with_draft_model(EngineConfig(**chosen), served, Turns()), **chosen, **options)
    drafting = part_of(core, Drafting)
    drafting.budget.lengths = as_many
    return core


@pytest.fixture(scope="module")
def expected(paths: tuple[Path, Path]) -> dict[str, tuple[int, ...]]:
    """The answers without drafts."""
    return tokens_of(answers(core_of(paths, drafts=False), requests()))


def continuation(model: Any, tokens: list[int], count: int) -> list[int]:
    """What a model gives after these tokens."""
    cache, found, given = make_prompt_cache(model), list[int](), tokens
    for _ in range(count):
        found.append(int(mx.argmax(model(mx.array([given]), cache=cache)[0, -1])))
        given = found[-1:]
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"blocks": 24}, {"blocks": 24, "swap_blocks": 60}],
    ids=["plain", "chunks", "recompute", "swap"],
)
@pytest.mark.rotated("models")
def test_drafts_are_the_small_models_tokens_and_answers_those_without(
    paths: tuple[Path, Path], expected: dict[str, tuple[int, ...]], options: dict[str, Any]
) -> None:
    core = core_of(paths, **options)
    drafts = logged(core)
    assert tokens_of(answers(core, requests())) == expected
    model: Any = load_plain_model(paths[1])[0]
    greedy = [each for each in drafts if each[0] in ("r0", "r4")]
    assert sum(len(found) == 4 for _, _, found in greedy) > 8, "fewer at the end of an answer, and where few are right"
    for _, tokens, found in greedy[::5]:
        assert continuation(model, tokens, len(found)) == found


def test_a_model_that_drafts_for_itself_is_always_right(tmp_path: Path) -> None:
    """Greedy or with a seed: it samples its drafts with the noise and the filters of the request."""
    path = make_architecture(tmp_path / "m", "qwen3")
    asked = [
        Request(f"r{i}", prompt(i, 9), SamplingParams(max_tokens=60, ignore_eos=True, **params), float(i))
        for i, params in enumerate(({"temperature": 0.0}, {"temperature": 0.9, "seed": 1, "top_p": 0.9}))
    ]
    core, plain = core_of((path, path)), core_of((path, path), drafts=False)
    assert tokens_of(answers(core, asked)) == tokens_of(answers(plain, asked))
    counts = core.stats().of(NO_DRAFTS)
    assert counts.accepted_total == counts.drafted_total > 80
    assert core.stats().steps_total < plain.stats().steps_total / 2


def test_a_model_that_did_not_run_for_longer_than_a_window_goes_on_drafting(tmp_path: Path) -> None:
    path = make_architecture(tmp_path / "m", "gemma3_text", sliding_window=5)
    core, plain = core_of((path, path)), core_of((path, path), drafts=False)
    drafting = part_of(core, Drafting)
    asked = Request("a", prompt(1, 20), SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True), 0.0)
    drafting.budget.lengths = lambda contexts, *_: [0] * len(contexts)
    core.add(asked)
    tokens: list[int] = []
    while core.has_work():
        tokens += (token for output in core.step() for token in output.token_ids)
        if len(tokens) == 100:
            drafting.budget.lengths = as_many
    assert tuple(tokens) == answers(plain, [asked])["a"].token_ids
    assert drafting.network is not None
    assert core.stats().of(NO_DRAFTS).drafted_total > 0


def test_nothing_is_kept_of_requests_that_end_beside_one_with_penalties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step was launched before they ended, and its sampler waits for the penalties."""
    monkeypatch.setattr(ModelRunner, "overlaps", True)
    path = make_architecture(tmp_path / "m", "qwen3")
    core, plain = core_of((path, path)), core_of((path, path), drafts=False)
    drafting = part_of(core, Drafting)
    drafting.budget.lengths = lambda contexts, *_: [0] * len(contexts)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    stops = answers(plain, [Request("a", prompt(1, 9), params, 0.0)])["a"].token_ids[3]
    ended = replace(params, stop_token_ids=frozenset({stops}))
    asked = [Request(f"r{i}", prompt(1, 9), ended, 0.0) for i in range(4)]
    answers(core, [*asked, Request("penalties", prompt(2, 9), replace(params, presence_penalty=0.5), 0.0)])
    assert isinstance(drafting.network, ModelDrafter)
    assert drafting.network.num_sequences == 0


def test_later_turns_find_the_small_models_entries_in_the_prefix_cache(paths: tuple[Path, Path]) -> None:
    core, plain = core_of(paths), core_of(paths, drafts=False)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    first = Request("a", prompt(1, 70), params, 0.0)
    answer = answers(core, [first])["a"].token_ids
    computed = list[int]()
    network = part_of(core, Drafting).network
    assert network is not None
    draft = network.passes.by_model

    def counting(step: Any, tokens: Any, wanted: Any) -> Any:
        computed.append(step.num_tokens)
        return draft(step, tokens, wanted)

    network.passes.by_model = counting  # type: ignore[method-assign]
    drafts = logged(core)
    later = replace(first, request_id="b", prompt_token_ids=[*prompt(1, 70), *answer, 9, 8, 7])
    assert tokens_of(answers(core, [later])) == tokens_of(answers(plain, [later]))
    assert max(computed) < 40, "the chunk after the hit"
    model: Any = load_plain_model(paths[1])[0]
    assert [continuation(model, tokens, len(found)) == found for _, tokens, found in drafts].count(False) == 0


@pytest.mark.parametrize(
    ("kind", "small", "axes"),
    [("qwen3_vl", "qwen3", Axes((4, 2, 2), interleaved=True)), ("gemma3", "gemma3_text", None)],
)
def test_drafts_beside_images(tmp_path: Path, kind: str, small: str, axes: Axes | None) -> None:
    """The small model sees no image, and drafts on. Answers are those without it."""
    path, draft = make_architecture(tmp_path / "m", kind), make_architecture(tmp_path / "small", small)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompts = [
        shown(prompt(1, 20), image(1, 32, 24), prompt(2, 9)),
        shown(prompt(3, 40)),
        shown(image(2, 24, 32), prompt(5, 12)),
    ]
    asked = [Request(f"r{i}", tokens, params, 0.0, images=images) for i, (tokens, images) in enumerate(prompts)]

    def seeing() -> ServedModel:
        return load_seeing(path, axes, num_deep=2 if axes else 0, mutual="none" if axes else "all")[0]

    expected = answers(make_core(seeing()), asked)
    chosen = {"speculative": "draft", "draft_model": str(draft)}
    core = make_core(with_draft_model(EngineConfig(**chosen), seeing(), Turns()), **chosen)
    drafting = part_of(core, Drafting)
    drafting.budget.lengths = as_many
    drafts = logged(core)
    assert tokens_of(answers(core, asked)) == tokens_of(expected)
    assert {name for name, _, _ in drafts} == {"r0", "r1", "r2"}
    assert core.stats().of(NO_DRAFTS).accepted_total > 0


@pytest.mark.parametrize(("kind", "reason"), [("mamba", "more than keys and values"), ("demo", "its vocabulary")])
def test_a_model_that_cannot_draft_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    served = load_model(str(make_architecture(tmp_path / "m", "llama")))
    small = "demo-vision" if kind == "demo" else str(make_architecture(tmp_path / "small", kind))
    with pytest.raises(UnsupportedModelError, match=f"cannot draft: .*{reason}"):
        with_draft_model(EngineConfig(speculative="draft", draft_model=small), served, Turns())


@pytest.mark.parametrize(
    ("tokens", "logit_bias"),
    [(prompt(1, 30), {767: -1.0}), ([640 + i for i in range(30)], {}), ([*prompt(1, 29), 767], {767: -1.0, 9: -2.0})],
    ids=["bias", "prompt", "both"],
)
def test_a_small_model_with_fewer_logits(tmp_path: Path, tokens: list[int], logit_bias: dict[int, float]) -> None:
    """Heads of one family are padded to different sizes. A token that only the larger one has would crash the
    process."""
    paths = (
        make_architecture(tmp_path / "m", "llama", vocab_size=768),
        make_architecture(tmp_path / "small", "qwen3", vocab_size=640),
    )
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logit_bias=logit_bias)
    asked = [Request("r", tokens, params, 0.0)]
    core = core_of(paths)
    drafts = logged(core)
    assert tokens_of(answers(core, asked)) == tokens_of(answers(core_of(paths, drafts=False), asked))
    drafting = part_of(core, Drafting)
    assert drafting.network is not None
    assert drafts
    if not logit_bias:
        model: Any = load_plain_model(paths[1])[0]
        for _, text, found in drafts:
            assert continuation(model, [min(token, 639) for token in text], len(found)) == found
