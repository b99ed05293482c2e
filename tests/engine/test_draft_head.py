"""Drafts by a model's own head are those of a contiguous sequence, and change no answer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from mlxpaged.attention.metadata import HostStep
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.step import Step
from mlxpaged.models.features import Feature
from mlxpaged.models.loader import LoadOptions, load_model
from mlxpaged.parts.drafting import drafting as engine_drafting
from mlxpaged.parts.drafting.draft_passes import DraftPasses
from mlxpaged.parts.drafting.draft_stats import DRAFTERS, NO_DRAFTS
from mlxpaged.vision.positions import Axes
from tests.engine.helpers import make_core, part_of
from tests.engine.seeing import image, load_seeing, shown
from tests.engine.test_drafting import answers, as_many, prompt, requests, tokens_of
from tests.models.draft_assistants import AssistantReference, make_assistant
from tests.models.draft_heads import Reference, make_drafting

Drafting: TypeAlias = Reference | AssistantReference

ASSISTANTS = {"gemma4": False, "gemma4 with clusters": True}
NAMES = ("glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_next", "nemotron_h", *ASSISTANTS)

LARGE_SUITE = ("gemma4", "nemotron_h", "qwen3_next")


ONE_OF_EACH_KIND = pytest.mark.parametrize(
    "reference",
    [
        name if name in ("qwen3_5", "gemma4 with clusters") else pytest.param(name, marks=pytest.mark.models)
        for name in NAMES
    ],
    indirect=True,
)
"""A head in the model, and a model of its own."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.models] if name in LARGE_SUITE else []) for name in NAMES],
)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    path = tmp_path_factory.mktemp("heads") / "m"
    if request.param in ASSISTANTS:
        return make_assistant(path, ASSISTANTS[request.param])
    return make_drafting(path, request.param)


def core_of(reference: Drafting, drafts: bool = True, **options: Any) -> EngineCore:
    served = load_model(str(reference.path), LoadOptions(drafts=drafts, mtp_path=reference.mtp if drafts else None))
    core = make_core(served, speculative="mtp" if drafts else "off", **options)
    if drafts:
        assert served.mtp is not None, served.missing[Feature.DRAFT_HEAD]
        drafting = part_of(core, engine_drafting.Drafting)
        drafting.budget.lengths = as_many
    return core


@pytest.fixture(scope="module")
def expected(reference: Drafting) -> dict[str, tuple[int, ...]]:
    """The answers without drafts."""
    return tokens_of(answers(core_of(reference, drafts=False), requests()))


def logged(core: EngineCore) -> list[tuple[str, list[int], list[int]]]:
    """Returns what the head drafts: request, tokens before, drafts."""
    drafting = part_of(core, engine_drafting.Drafting)
    head = drafting.network
    assert head is not None
    found: list[tuple[str, list[int], list[int]]] = []
    propose = head.propose

    def propose_and_log(sequence: Sequence, most: int) -> list[int]:
        drafts = propose(sequence, most)
        if drafts:
            found.append((sequence.request_id, list(sequence.token_ids), drafts))
        return drafts

    head.propose = propose_and_log  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"blocks": 14}, {"blocks": 14, "swap_blocks": 40}],
    ids=["plain", "chunks", "recompute", "swap"],
)
@pytest.mark.rotated("models")
def test_drafts_are_those_of_a_contiguous_sequence_and_answers_those_without(
    reference: Drafting, expected: dict[str, tuple[int, ...]], options: dict[str, Any]
) -> None:
    core = core_of(reference, **options)
    drafts = logged(core)
    got = answers(core, requests())
    assert tokens_of(got) == expected
    greedy = [each for each in drafts if each[0] in ("r0", "r4")]
    assert len(greedy) > 60
    assert {len(found) for _, _, found in greedy} >= {1, 4}
    for _, tokens, found in greedy[::5]:
        assert reference.drafts(tokens, len(found)) == found


@pytest.mark.parametrize(
    ("reference", "axes"),
    [("qwen3_5", Axes((1, 1, 0), interleaved=True)), ("gemma4 with clusters", None)],
    indirect=["reference"],
)
def test_drafts_beside_images(reference: Drafting, axes: Axes | None) -> None:
    """A head in the model, and an assistant. Answers are those without drafts, and drafts for a text in the same batch
    are those that it gets alone."""
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompts = [
        shown(prompt(1, 20), image(1, 32, 24), prompt(2, 9)),
        shown(prompt(3, 40)),
        shown(image(2, 24, 32), prompt(5, 12)),
    ]
    asked = [Request(f"r{i}", tokens, params, 0.0, images=images) for i, (tokens, images) in enumerate(prompts)]
    expected = answers(make_core(load_seeing(reference.path, axes)[0]), asked)
    served, _ = load_seeing(reference.path, axes, drafts=True, mtp=reference.mtp)
    core = make_core(served, speculative="mtp")
    drafting = part_of(core, engine_drafting.Drafting)
    drafting.budget.lengths = as_many
    drafts = logged(core)
    assert tokens_of(answers(core, asked)) == tokens_of(expected)
    assert {name for name, _, _ in drafts} == {"r0", "r1", "r2"}
    for tokens, found in [(tokens, found) for name, tokens, found in drafts if name == "r1"][::5]:
        assert reference.drafts(tokens, len(found)) == found


def passes_of(core: EngineCore) -> DraftPasses:
    network = part_of(core, engine_drafting.Drafting).network
    assert network is not None
    return network.passes


@pytest.mark.parametrize("reference", ["gemma4 with clusters"], indirect=True)
def test_what_all_drafts_of_an_assistant_need_is_uploaded_once(
    reference: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_of(reference)
    further, build = passes_of(core).further, HostStep.build
    uploads, drafts = [0], list[int]()

    def build_and_count(*arguments: Any) -> HostStep:
        uploads[0] += 1
        return build(*arguments)

    def draft_and_count(step: Step, *arguments: Any) -> Any:
        before = uploads[0]
        found = further(step, *arguments)
        drafts.append(uploads[0] - before)
        return found

    monkeypatch.setattr(HostStep, "build", build_and_count)
    monkeypatch.setattr(passes_of(core), "further", draft_and_count)
    answers(core, requests())
    assert len(drafts) > 60
    assert set(drafts) == {0, 1}
    assert sum(drafts) <= len(drafts) / 2, "three drafts after the first one, or fewer at the end of an answer"


@ONE_OF_EACH_KIND
def test_later_turns_forks_and_ends_within_drafts(reference: Drafting) -> None:
    """The bias makes model and head repeat a token, so that drafts are accepted."""
    params = SamplingParams(max_tokens=40, temperature=0.0, logit_bias={50: 30.0}, ignore_eos=True)
    several = SamplingParams(max_tokens=30, temperature=0.8, seed=3, logit_bias={50: 9.0}, stop=("zq",))

    def play(core: EngineCore) -> dict[str, tuple[int, ...]]:
        first = [Request(f"a{i}", prompt(i, 40), params, 0.0) for i in range(3)]
        found = tokens_of(answers(core, first))
        later = [
            Request(f"b{i}", (*prompt(i, 40), *found[f"a{i}"], 7, 8, 9), replace(several, seed=i), 1.0)
            for i in range(3)
        ]
        return found | tokens_of(answers(core, later))

    core = core_of(reference)
    assert play(core) == play(core_of(reference, drafts=False))
    stats = core.stats()
    assert stats.of(NO_DRAFTS).accepted_total > (20 if reference.has_clusters else 90), "clusters leave the token out"
    assert stats.of(NO_DRAFTS).counts[DRAFTERS.index("mtp")].accepted == stats.of(NO_DRAFTS).accepted_total
    # A model with states starts at the checkpoint after the first prompt, which is before the answer.
    assert stats.scheduler.prefix_hit_tokens_total > (90 if core.runner.is_recurrent else 150)
    assert core.scheduler.pool.usage().used == 0


@ONE_OF_EACH_KIND
def test_the_head_runs_only_where_it_can_pay(reference: Drafting, expected: dict[str, tuple[int, ...]]) -> None:
    core = core_of(reference)
    drafting = part_of(core, engine_drafting.Drafting)
    drafting.budget.lengths = lambda contexts, chances, *_: [0] * len(contexts)
    setattr(passes_of(core), reference.method, None)
    assert tokens_of(answers(core, requests())) == expected
    assert core.stats().of(NO_DRAFTS).counts == NO_DRAFTS.counts


@ONE_OF_EACH_KIND
def test_a_head_that_fails_is_left_out(
    reference: Drafting, expected: dict[str, tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    core = core_of(reference)
    draft, calls = getattr(passes_of(core), reference.method), itertools.count()

    def failing_later(*arguments: Any) -> Any:
        if next(calls) == 5:
            raise ValueError("injected")
        return draft(*arguments)

    setattr(passes_of(core), reference.method, failing_later)
    assert tokens_of(answers(core, requests())) == expected
    drafting = part_of(core, engine_drafting.Drafting)
    assert drafting.names == ["grammar"]
    assert "the draft head or model fails" in caplog.text


@ONE_OF_EACH_KIND
def test_text_and_head_draft_together(reference: Drafting, expected: dict[str, tuple[int, ...]]) -> None:
    """What has come before is drafted from the text if that is more likely to be accepted."""
    served = load_model(str(reference.path), LoadOptions(drafts=True, mtp_path=reference.mtp))
    core = make_core(served, speculative="auto")
    drafting = part_of(core, engine_drafting.Drafting)
    assert drafting.names == ["grammar", "ngram", "mtp"]
    drafting.budget.lengths = as_many
    assert tokens_of(answers(core, requests())) == expected
    by = dict(zip(DRAFTERS, core.stats().of(NO_DRAFTS).counts, strict=True))
    assert by["mtp"].drafted > 0
    repeating = [
        Request("r", prompt(1, 20), SamplingParams(max_tokens=60, temperature=0.0, logit_bias={50: 50.0}), 0.0)
    ]
    answers(core, repeating)
    by = dict(zip(DRAFTERS, core.stats().of(NO_DRAFTS).counts, strict=True))
    assert by["ngram"].accepted > 20
