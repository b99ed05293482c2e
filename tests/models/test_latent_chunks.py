"""Long prompt chunks of models with latent attention: expanded as mlx-lm does it, with the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention import latent
from mlxpaged.attention.latent import ExpandedChunk, Identity, LatentLayer, make_latent_groups
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.pool import Locality, Options
from mlxpaged.core.step import Step
from tests.metal_on_cpu.fixtures import metal, metal_on_cpu
from tests.models.architectures import is_installed, make_architecture
from tests.models.test_architectures import BRIEF, WHOLE, Case, assert_same

__all__ = ["metal", "metal_on_cpu"]

SAMPLE = ("deepseek_v3", "kimi_linear", "mistral4")
OTHERS = (
    "glm4_moe_lite",
    "kimi_k25",
    "kimi_vl",
    "kimi_k3",
    "longcat_flash",
    "longcat_flash_ngram",
    "bailing_moe_v3",
    "bailing_hybrid",
)
NAMES = [
    *SAMPLE,
    *(pytest.param(name, marks=[pytest.mark.models, pytest.mark.xdist_group(name)]) for name in OTHERS),
]


def groups_of(lens: list[int], contexts: list[int], num_heads: int = 4, expand_from: int = 10) -> list[Any]:
    tables = [list(range(100 * i, 100 * i - (-context // 8))) for i, context in enumerate(contexts)]
    meta = AttentionMetadata.build(lens, contexts, tables, 8)
    return make_latent_groups(meta, num_heads, expand_from)


def test_the_product_of_queries_and_the_identity_is_no_operation_and_mlx_sees_a_matrix() -> None:
    q_pe, k_pe = mx.random.normal((3, 2, 1, 4)), Identity(mx.eye(4))
    assert (q_pe @ k_pe.swapaxes(-1, -2)) is q_pe
    assert mx.array_equal(mx.matmul(q_pe, mx.swapaxes(k_pe, -1, -2)), q_pe)


def test_copied_rows_are_divided_by_the_scale_itself_as_in_the_kernel() -> None:
    """In bfloat16, the scale of DeepSeek V3 is 0.3 % smaller."""
    scale, q_pe = 0.13523, mx.random.normal((64, 2, 8), key=mx.random.key(0)).astype(mx.bfloat16)
    whole = Options(scale, Locality(), None, None, q_pe).whole(mx.zeros((64, 2, 4), mx.bfloat16))
    ratios = np.array(whole[..., 4:].astype(mx.float32)) / (np.array(q_pe.astype(mx.float32)) / scale)
    assert abs(ratios.mean() - 1) < 1e-3


def test_a_step_without_a_long_chunk_is_one_call() -> None:
    assert groups_of([1, 9, 1], [40, 9, 3]) == []


def test_long_chunks_are_calls_of_their_own_and_the_rows_between_them_stay_together() -> None:
    groups = groups_of([1, 1, 10, 3, 2, 20], [40, 5, 10, 3, 9, 33])
    assert [(group.first, group.last, group.is_rows) for group in groups] == [
        (0, 2, True),
        (2, 12, False),
        (12, 17, True),
        (17, 37, False),
    ]
    assert [group.meta.step.context_lens for group in groups] == [[40, 5], [10], [3, 9], [33]]
    assert groups[2].meta.positions.tolist() == [0, 1, 2, 7, 8]
    assert groups[2].meta.slot_mapping.tolist() == [2400, 2401, 2402, 3207, 3208]
    assert groups[3].meta.block_tables.tolist() == [[500, 501, 502, 503, 504, -1, -1, -1]]


def test_a_chunk_with_too_many_scores_is_cut_and_each_piece_sees_what_is_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent, "MAX_SCORES", 4 * 50 * 12)
    pieces = groups_of([30], [50])
    assert [(piece.last - piece.first, piece.meta.step.context_lens) for piece in pieces] == [
        (12, [32]),
        (12, [44]),
        (6, [50]),
    ]
    assert pieces[1].meta.positions.tolist() == list(range(32, 44))
    mask = np.array(pieces[1].mask)
    assert (mask.sum(axis=1) == np.arange(33, 45)).all()
    assert groups_of([30], [61]) == [], "pieces would be too short to pay"


@pytest.fixture(params=NAMES, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    if not is_installed(request.param):
        pytest.skip("not in this version of mlx-lm")
    path: Path = make_architecture(tmp_path_factory.mktemp("architecture") / "model", request.param)
    yield Case(path, request.param, BRIEF if request.param in SAMPLE else WHOLE)
    mx.clear_cache()


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pieces that are expanded: all of 9 tokens and more."""
    sizes: list[int] = []
    update_and_fetch = ExpandedChunk.update_and_fetch

    def noting(self: ExpandedChunk, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        sizes.append(keys.shape[2])
        return update_and_fetch(self, keys, values)

    monkeypatch.setattr(ExpandedChunk, "update_and_fetch", noting)
    monkeypatch.setattr(LatentLayer, "expand_from", 9)
    return sizes


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_expanded_chunks_give_the_tokens_of_mlx_lm(case: Case, expanded: list[int], backend: str) -> None:
    """Prompts in chunks beside decoding sequences, then again from the prefix cache."""
    core = case.engine(max_num_batched_tokens=39, attention_backend=backend)
    for _ in range(2):
        assert_same(case.generate(core, case.prompts), case.answers)
    assert min(expanded) >= 9
    assert len(set(expanded)) > 2
    assert_same(case.generate(core, case.branches), case.branch_answers)


def test_after_a_step_that_failed_in_a_chunk_the_others_go_on(
    case: Case, expanded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed call leaves nothing behind that a later step would take for its own."""
    core = case.engine(max_num_batched_tokens=39)
    update_and_fetch, forward = ExpandedChunk.update_and_fetch, core.runner.forward
    rows, failures = [0], []

    def noting(batch: Step, *args: Any) -> mx.array:
        rows[0] = len(batch)
        return forward(batch, *args)

    def failing(self: ExpandedChunk, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if rows[0] > 1 and not failures:  # a request that fails alone would end
            failures.append(rows[0])
            raise ValueError("injected")
        return update_and_fetch(self, keys, values)

    monkeypatch.setattr(core.runner, "forward", noting)
    monkeypatch.setattr(ExpandedChunk, "update_and_fetch", failing)
    assert_same(case.generate(core, case.prompts), case.answers)
    assert failures


def test_expanded_chunks_give_the_tokens_of_mlx_lm_on_metal(metal: None, tmp_path: Path, expanded: list[int]) -> None:
    case = Case(make_architecture(tmp_path / "model", "deepseek_v3"), "deepseek_v3", BRIEF)
    core = case.engine(max_num_batched_tokens=39, attention_backend="metal")
    assert_same(case.generate(core, case.prompts), case.answers)
    assert expanded
