"""What the sampler gets of a step's rows."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.request_rows import RequestRows
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.step import Row, Step
from tests.engine.llama import core, served

__all__ = ["core", "served"]


def rows_of(core: EngineCore, *requests: dict[str, Any]) -> RequestRows:
    """Of requests with prompts of four tokens, the sequences 0, 1, ..."""
    for number, fields in enumerate(requests):
        core.add(Request(str(number), [1, 2, 3, 4], SamplingParams(**({"max_tokens": 9} | fields)), 0.0))
    return RequestRows(core.requests, core.grammars)


def last_chunk(sequence_id: int, num_sampled: int = 1) -> Row:
    tokens = [7] * num_sampled
    return Row(sequence_id, 3, tokens, range(3, 3 + num_sampled), num_sampled=num_sampled)


def test_each_sampled_position_is_a_row_with_the_drafts_before_it(core: EngineCore) -> None:
    rows = rows_of(core, {"seed": 5}, {"seed": 6})
    drafts = Row(1, 3, [7, 8, 9], range(3, 6), num_sampled=3)
    found = rows.sampled([last_chunk(0), drafts])
    assert [(each.sequence_id, each.seed, each.position, list(each.drafts)) for each in found] == [
        (0, 5, 4, []),
        (1, 6, 4, []),
        (1, 6, 5, [8]),
        (1, 6, 6, [8, 9]),
    ]


def test_an_answer_that_is_too_short_may_not_end(core: EngineCore) -> None:
    rows = rows_of(core, {"min_tokens": 2, "stop_token_ids": frozenset({3}), "ignore_eos": True})
    forbidden = [each.forbidden for each in rows.sampled([last_chunk(0, num_sampled=3)])]
    assert forbidden == [{3}, {3}, set()]


@pytest.mark.parametrize(
    ("fields", "need"),
    [
        ({}, False),
        ({"seed": 1, "top_k": 3}, False),
        ({"presence_penalty": 0.5}, True),
        ({"thinking_budget": 3}, True),
    ],
)
def test_only_penalties_and_budgets_need_the_tokens_before(core: EngineCore, fields: Any, need: bool) -> None:
    rows = rows_of(core, {}, fields)
    assert not rows.need_tokens([last_chunk(0)])
    assert rows.need_tokens([last_chunk(0), last_chunk(1)]) is need


def test_logits_beyond_the_sampled_ones_are_for_tokens_of_prompts(core: EngineCore) -> None:
    rows = rows_of(core, {}, {"prompt_logprobs": 2}, {"prompt_logprobs": 5})
    plain, asked = last_chunk(0), Row(1, 0, [1, 2, 3, 4], range(4), num_sampled=1)
    assert rows.of_prompts(Step([plain]), 1, least_top=1) == ([], 0)
    assert rows.of_prompts(Step([plain, asked]), 5, least_top=1) == ([2, 3, 4], 2)
    both = Step([asked, asked._replace(sequence_id=2)])
    assert rows.of_prompts(both, 8, least_top=1) == ([2, 3, 4, 2, 3, 4], 5)
    assert rows.of_prompts(both, 8, least_top=8) == ([2, 3, 4, 2, 3, 4], 8)
