"""Whatever way the engine computes a text of a real model, it says the same of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.quality.scoring import (
    Scores,
    all_drafts,
    engine,
    perplexity,
    score,
    score_as_answer,
    whole_prompts,
)
from mlxpaged.models.loader import ServedModel, load_model
from tests.real.conftest import ROOT, path_of
from tests.real.numpy_llama import Llama, log_softmax

LENGTH, FIRST = 192, 128
"""Tokens of the text, and the first one that counts. Those before it may be a prefix hit."""
BLOCKS = 96
"""Tokens of whole blocks before the one whose logits are wanted first, which is the last one of the prefix."""
SAME = 1e-3
"""Of the perplexity, and of a token's log-probability."""


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return load_model(str(path_of("float32")))


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode((ROOT / "docs" / "scheduling.md").read_text()).ids[:LENGTH]


@pytest.fixture(scope="module")
def expected(oracle: Llama, tokens: list[int]) -> Scores:
    """NumPy's."""
    logprobs = log_softmax(oracle.logits(tokens))[range(LENGTH - 1), tokens[1:]]
    return Scores(logprobs[FIRST - 1 :], 1, 0)


def assert_same(found: Scores, expected: Scores) -> None:
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=SAME)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=SAME)


def test_a_prompt_in_one_step(served: ServedModel, tokens: list[int], expected: Scores) -> None:
    with whole_prompts():
        found = score(engine(served), tokens, FIRST)
    assert (found.steps, found.cached) == (1, 0)
    assert_same(found, expected)


def test_a_prompt_in_chunks(served: ServedModel, tokens: list[int], expected: Scores) -> None:
    found = score(engine(served, max_num_batched_tokens=40, max_num_seqs=4), tokens, FIRST)
    assert found.steps >= LENGTH // 40
    assert_same(found, expected)


def test_a_prefix_hit_in_memory(served: ServedModel, tokens: list[int], expected: Scores) -> None:
    core = engine(served)
    assert score(core, tokens[: FIRST + 1], FIRST).cached == 0
    found = score(core, tokens, FIRST)
    assert found.cached == FIRST - 1
    assert_same(found, expected)


def test_a_prefix_hit_on_the_disk(served: ServedModel, tokens: list[int], expected: Scores, tmp_path: Path) -> None:
    before = engine(served, prefix_cache_dir=tmp_path)
    for _ in range(2):  # a prefix is stored once it was found again
        score(before, tokens[: FIRST + 1], FIRST)
    before.keep_prefixes()
    before.close()
    after = engine(served, prefix_cache_dir=tmp_path)
    found = score(after, tokens, FIRST)
    after.close()
    assert found.cached == BLOCKS
    assert_same(found, expected)


def test_an_answer_whose_drafts_are_verified_together(served: ServedModel, tokens: list[int], expected: Scores) -> None:
    with all_drafts():
        found = score_as_answer(engine(served, speculative="ngram"), tokens, FIRST)
    assert found.steps < 0.75 * (LENGTH - FIRST), "there are drafts"
    assert_same(found, expected)


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.02), ("int4", 0.05)])
def test_a_quantized_kv_cache_costs_some_per_cent(
    dtype: str, most: float, served: ServedModel, tokens: list[int], expected: Scores
) -> None:
    found = score(engine(served, dtype), tokens, FIRST)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=most)
    assert not np.allclose(found.logprobs, expected.logprobs, rtol=0, atol=SAME), "it is quantized"


def test_the_text_is_one_that_the_model_understands(expected: Scores) -> None:
    """Of random weights it would be 49,152."""
    assert 5 < perplexity(expected.logprobs) < 200
