"""Answers go on where another engine stopped: the same tokens, texts and log-probabilities, and none twice."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from mlxpaged.cluster.unfinished import Unfinished
from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import ServedModel, load_model

LENGTH = 40


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return load_model("demo")


def core(served: ServedModel) -> EngineCore:
    return build_engine(EngineConfig(kv_cache_bytes=4_000_000, max_num_batched_tokens=64), served)


def steps(engine: EngineCore, unfinished: Unfinished, most: int | None = None) -> list[RequestOutput]:
    """The outputs of a request, as its client gets them."""
    outputs: list[RequestOutput] = []
    while engine.has_work() and (most is None or len(outputs) < most):
        outputs += [unfinished.note(output) for output in engine.step()]
    return outputs


def total(outputs: list[RequestOutput]) -> tuple[Any, ...]:
    return (
        "".join(output.text for output in outputs),
        [token for output in outputs for token in output.token_ids],
        [output.prompt_logprobs is not None for output in outputs].count(True),
        outputs[-1].finish_reason,
        outputs[-1].num_output_tokens,
    )


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [each.logprob for output in outputs for each in output.logprobs]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 3, "logprobs": 0, "stop": ("zq~ never",)},
        {"temperature": 1.0, "seed": 2, "logprobs": 0, "stop": ("o never",)},  # the 18th token is "demo"
        {"temperature": 1.0, "seed": 1, "constraint": Constraint("regex", "[a-z]{5,9}( [a-z]{2,9}){3,9}")},
        {"temperature": 0.9, "seed": 5, "stop": ("e ", "qqqqqqqqqq"), "min_tokens": 12},
    ],
    ids=lambda options: ",".join(options),
)
def test_an_answer_goes_on_in_another_engine(served: ServedModel, options: dict[str, Any]) -> None:
    params = SamplingParams(**({"max_tokens": LENGTH, "ignore_eos": True} | options))
    request = Request("a", served.tokenizer.encode("Tell me about numbers"), params, time.monotonic())
    alone = core(served)
    alone.submit([request])
    expected = steps(alone, Unfinished(request))

    for stop_after in (1, 7, 18):
        first, unfinished = core(served), Unfinished(request)
        first.submit([request])
        begun = steps(first, unfinished, stop_after)
        assert begun[-1].finish_reason is None
        second = core(served)
        second.submit([unfinished.resumed()])
        found = begun + steps(second, unfinished)
        assert total(found) == total(expected)
        assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-3)  # chunks of the prompt differ


def test_an_answer_that_goes_on_has_no_more_cached_tokens_than_its_prompt_has_tokens(served: ServedModel) -> None:
    given = tuple(served.tokenizer.encode("two blocks of tokens " * 10))
    params = SamplingParams(max_tokens=len(given) + 1, temperature=0.0, ignore_eos=True)
    request = Request("a", served.tokenizer.encode("Hello"), params, time.monotonic(), resumed=given)
    engine = core(served)
    engine.submit([request, dataclasses.replace(request, request_id="b")])
    last = {output.request_id: output for output in steps(engine, Unfinished(request))}
    assert last["b"].num_cached_tokens == len(request.prompt_token_ids)


def test_what_was_not_begun_is_asked_for_as_it_was(served: ServedModel) -> None:
    params = SamplingParams(prompt_logprobs=1)
    request = Request("a", [1, 2], params, 0.0, fork_of="b")
    assert Unfinished(request).resumed() == dataclasses.replace(request, fork_of=None)
