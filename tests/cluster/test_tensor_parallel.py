"""Tensor parallel: several ranks give token for token what one gives, and send no more than they have to."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import faults
from tests.cluster.ranks import RankFailed, Setup, play, play_alone
from tests.cluster.scenes import (
    GREEDY,
    NUM_TOKENS,
    Outcome,
    mixed,
    overlapping,
    requests,
    sizes,
    until_a_rank_is_lost,
    with_drafts,
    with_images,
)
from tests.engine.hybrid import TinyModel
from tests.models.architectures import QWEN3_5, linear_attention, make_architecture, nested
from tests.models.draft_heads import make_drafting
from tests.support import make_tiny_model
from tests.vision.tiny_qwen import make_seeing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts bytes by the kernel's counters of Linux")

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": HEADS,
    "llama": HEADS,
    "qwen3_5": nested(model_type="qwen3_5_text", **QWEN3_5 | linear_attention(heads=4) | {"num_hidden_layers": 2}),
    "qwen3_next": linear_attention(heads=4),
    "bailing_hybrid": {"group_norm_size": 4},
    "deepseek_v3": {},
    "gpt_oss": HEADS,
}
CASES = [(kind, count) for count in (2, 4) for kind in KINDS]

CONTROL_BYTES = 64 * 1024


def make_setup(path: Path, **options: Any) -> Setup:
    """A pool that grows, and in which not all requests find room."""
    limits = {"block_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 64, "speculative": "off"}
    return Setup(path, num_blocks=54, swap_slots=40, start_tokens=64, options=limits, **options)


class Case:
    """One model, and what one rank and several have made of the same requests."""

    def __init__(self, path: Path, count: int) -> None:
        self.model = TinyModel(path)
        self.expected: Outcome = play_alone(make_setup(path), mixed)
        self.got: Outcome = play(count, make_setup(path), mixed)


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=pytest.mark.cluster) for case in CASES],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, count = request.param
    return Case(make_architecture(tmp_path_factory.mktemp(kind) / kind, kind, **KINDS[kind]), count)


def test_ranks_give_the_tokens_of_one(case: Case) -> None:
    """In chunks, after prefix hits, preempted and swapped, with two answers of a prompt, grammars and seeds."""
    for request in requests(0):
        if request.params == GREEDY:
            answer = case.model.answer(request.prompt_token_ids, NUM_TOKENS)
            assert answer.equals(case.got.tokens[request.request_id])
    assert case.got == case.expected
    assert case.got.preemptions
    assert case.got.swapped_in
    assert case.got.hits
    assert case.got.copied or case.model.served.layers != case.model.served.kv_layers  # states are shared whole


def test_ranks_send_what_tensor_parallelism_needs_and_little_more(case: Case) -> None:
    ratio, largest = case.got.sent / case.got.needed, max(case.got.messages)
    print(f"{ratio:.3f} times what is needed, in {case.got.model_calls} steps; the largest message has {largest} bytes")
    assert 0.95 < ratio < 1.05
    assert largest < CONTROL_BYTES


@pytest.mark.cluster
@pytest.mark.parametrize("count", [2, 4])
def test_steps_of_several_ranks_overlap(count: int, tmp_path: Path) -> None:
    """Tokens that are pending reach the other ranks on the device, in steps that are replayed too."""
    path = make_tiny_model(tmp_path / "m", "llama", **HEADS)
    expected = play_alone(Setup(path, options={"attention_backend": "gather"}), overlapping)
    got = play(count, Setup(path, lazy_metal=True), overlapping)
    assert got.tokens == expected.tokens
    assert expected.overlapped == 0
    assert got.overlapped > 0.9 * got.model_calls


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_ranks_see_the_images_that_rank_0_encodes(tmp_path: Path, kind: str) -> None:
    """With positions in three axes, and features for layers. Their features are dropped and made again."""
    text = nested(model_type="qwen3", **HEADS, num_hidden_layers=3) if kind == "qwen3_vl" else KINDS[kind]
    path = make_seeing(make_architecture(tmp_path / "m", kind, **text), kind)
    expected = play_alone(make_setup(path), with_images)
    got = play(2, make_setup(path), with_images)
    assert got == expected
    assert got.hits >= 6, "of images that were encoded"


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_ranks_verify_drafts_together(tmp_path: Path, kind: str) -> None:
    """All ranks take the states of rejected drafts back: where rows begin says how many tokens were accepted."""
    path = make_architecture(tmp_path / "m", kind, **KINDS[kind])
    setup = make_setup(path)
    drafting = replace(setup, options={**setup.options, "speculative": "ngram"})
    expected, got = play_alone(setup, with_drafts), play(2, drafting, with_drafts)
    assert got == expected
    assert (expected.hits, got.hits >= 60) == (0, True)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3"])
def test_rank_0_drafts_alone_by_a_head_or_a_smaller_model(tmp_path: Path, kind: str) -> None:
    """The others have no layers for it, and their blocks are smaller. Sequences are preempted both ways."""
    path = tmp_path / "m"
    if kind != "qwen3":
        text = KINDS["qwen3_5"]["text_config"] | {"tie_word_embeddings": True}
        make_drafting(path, kind, **({"text_config": text} if kind == "qwen3_5" else {}))
        options = {"speculative": "mtp"}
    else:
        make_architecture(path, kind, **KINDS[kind])
        options = {"speculative": "draft", "draft_model": str(path)}
    setup = make_setup(path)
    drafting = replace(setup, options={**setup.options, **options})
    expected, got = play_alone(setup, with_drafts), play(2, drafting, with_drafts)
    assert got == expected
    assert (expected.hits, got.hits >= 30) == (0, True)


@pytest.mark.cluster
@pytest.mark.parametrize("count", [2, 4])
def test_memory_is_planned_by_the_rank_that_has_least(count: int, tmp_path: Path) -> None:
    path = make_architecture(tmp_path / "m", "qwen3_5", **KINDS["qwen3_5"])
    assert play_alone(make_setup(path), sizes) == (54, 24, 40)
    assert play(count, make_setup(path, fault=faults.have_little_memory), sizes) == (31, 5, 7)


@pytest.mark.cluster
def test_a_pool_grows_later_if_another_rank_lacks_the_memory(tmp_path: Path) -> None:
    path = make_architecture(tmp_path / "m", "qwen3", **KINDS["qwen3"])
    expected = play_alone(make_setup(path), mixed)
    got = play(2, make_setup(path, fault=faults.lack_memory), mixed)
    assert got.tokens == expected.tokens


@pytest.mark.cluster
def test_a_rank_that_fails_ends_the_engine_of_rank_0(tmp_path: Path) -> None:
    path = make_architecture(tmp_path / "m", "qwen3", **KINDS["qwen3"])
    with pytest.raises(RankFailed) as failed:
        play(2, make_setup(path, fault=faults.fail_in_a_step), until_a_rank_is_lost)
    assert list(failed.value.errors) == [1]
    assert "injected" in failed.value.errors[1]
    assert failed.value.result == "a step of several ranks failed: RuntimeError: [ring] connection to a peer was lost"
