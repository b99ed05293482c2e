"""What a request's sampling parameters ask of the sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxpaged.core.engine.sampling_params import MIN_TEMPERATURE, SamplingParams

GREEDY = {"temperature": 0.0}


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (MIN_TEMPERATURE / 2, True), (MIN_TEMPERATURE, False)]
)
def test_a_temperature_that_could_overflow_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    ("fields", "filters"),
    [({}, False), ({"top_k": 1}, True), ({"top_p": 0.99}, True), ({"min_p": 0.01}, True)],
)
def test_each_filter_excludes_tokens(fields: dict[str, Any], filters: bool) -> None:
    assert SamplingParams(**fields).filters is filters


@pytest.mark.parametrize(
    "fields", [{"repetition_penalty": 0.9}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.1}], ids=str
)
def test_each_penalty_needs_the_tokens_before(fields: dict[str, Any]) -> None:
    params = SamplingParams(**GREEDY, **fields)
    assert params.penalizes
    assert not params.plain


@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"logit_bias": {3: 1.0}}, {"logprobs": 0}], ids=str)
def test_a_sampler_with_more_to_do_than_the_most_likely_token_is_not_plain(fields: dict[str, Any]) -> None:
    assert SamplingParams(**GREEDY).plain
    assert not SamplingParams(**(GREEDY | fields)).plain


def test_the_bias_is_two_arrays_in_the_order_of_the_request() -> None:
    ids, values = SamplingParams(logit_bias={9: -100.0, 2: 0.5}).bias
    assert (ids.tolist(), values.tolist()) == ([9, 2], [-100.0, 0.5])
    assert (ids.dtype, values.dtype) == (np.int32, np.float32)
