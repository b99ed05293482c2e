"""A limit on the tokens of thinking: the closing tag comes when it is reached, however steps overlap."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.text.thinking_budget import ThinkingBudget
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import ServedModel, load_model
from tests.support import make_tiny_model, run_requests

START, END = [7, 8], [9, 8]


@given(
    sampled=st.lists(st.sampled_from([1, 7, 8, 9, *(2, 3)]), max_size=40), limit=st.integers(0, 6), inside=st.booleans()
)
def test_no_block_is_longer_than_the_limit(sampled: list[int], limit: int, inside: bool) -> None:
    budget, answer = ThinkingBudget(limit, START, END, inside), []
    for token in sampled:
        forced = budget.forced()
        budget.add(token if forced is None else forced)
        answer.append(token if forced is None else forced)
    run, thinking = 0, inside
    recent: list[int] = []
    for token in answer:
        run, recent = run + thinking, [*recent, token][-2:]
        if recent == (END if thinking else START):
            thinking, run, recent = not thinking, 0, []
        assert run <= limit + len(END)


def test_a_token_that_comes_between_postpones_the_tag() -> None:
    """A grammar may want a character completed first."""
    budget = ThinkingBudget(1, START, END, inside=True)
    for token, forced in ((2, 9), (3, 9), (9, 8), (3, 9), (9, 8), (8, None)):
        budget.add(token)
        assert budget.forced() == forced


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    served = load_model(str(make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")))
    served.tokenizer.think_start_ids, served.tokenizer.think_end_ids = [3], [4, 5]
    return served


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 5])
def test_the_closing_tag_is_forced_and_the_answer_goes_on_from_it(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, overlaps: bool, limit: int
) -> None:
    monkeypatch.setattr(ModelRunner, "overlaps", overlaps)
    prompts = [[10, 11, 12], [20, 21]]

    def generate(prompts: list[list[int]], **params: Any) -> list[list[int]]:
        return run_requests(build_engine(EngineConfig(kv_cache_bytes=1_000_000), served), prompts, **params)

    penalty = {"repetition_penalty": 1.5}
    free = generate(prompts, max_tokens=limit, **penalty)
    limited = generate(prompts, thinking_budget=limit, begins_thinking=True, **penalty)
    for prompt, before, got in zip(prompts, free, limited, strict=True):
        assert got[: limit + 2] == [*before, 4, 5]
        (rest,) = generate([prompt + got[: limit + 2]], max_tokens=14 - limit, **penalty)
        assert got[limit + 2 :] == rest


def test_without_a_block_nothing_is_forced(served: ServedModel) -> None:
    core = build_engine(EngineConfig(kv_cache_bytes=1_000_000), served)
    assert run_requests(core, [[10, 11, 12]], thinking_budget=1) == run_requests(core, [[10, 11, 12]])


@pytest.mark.parametrize(
    ("inside", "tokens", "close"),
    [
        (True, [], 5),
        (True, [1, 2], 5),
        (False, [], None),
        (False, [3], 5),
        (False, [1, 3, 2], 5),
        (True, [5], None),
        (True, [1, 5, 2, 3], None),  # a further block
        (True, [1, 8, 9], None),  # a call
        (True, [1, 7], None),  # the next channel
    ],
)
def test_an_end_token_closes_the_first_block_only(inside: bool, tokens: list[int], close: int | None) -> None:
    budget = ThinkingBudget(math.inf, [3], [5], inside, following=[[7]], calls=[[8, 9]])
    assert budget.after(tokens).close == close
    assert budget.close == (5 if inside else None)
    assert ThinkingBudget(math.inf, [3], [5, 6], True).close is None  # its first token alone closes nothing
