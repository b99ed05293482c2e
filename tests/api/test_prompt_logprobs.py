"""Log-probabilities of prompts over HTTP: `echo` with `logprobs`, `prompt_logprobs`, and answers without a token."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from openai import OpenAI
from pydantic_core import to_json

from mlxpaged.api.openai.renderer import TextOffsets, completion_logprobs, prompt_logprobs
from mlxpaged.core.engine.logprobs import PromptLogprobs, TokenLogprobs
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    ask,
    legacy_logprobs,
    post,
    random_tokens,
    raw,
    run_on,
    stream_events,
    text_of,
    tokens_of,
)
from tests.support import RunningServer, running_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def echoed(server: RunningServer, prompt: Any, num_tokens: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a request that asks for its prompt with log-probabilities."""
    choices = post(server, run_on(prompt, num_tokens, echo=True, logprobs=1) | fields)["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return list(choices)


def test_echoed_log_probabilities_are_those_of_generating_the_same_text(demo_server: RunningServer) -> None:
    start = tokens_of(demo_server, "Once upon a time")
    generated = post(demo_server, run_on(start, 12, logprobs=3))["choices"][0]
    prompt = tokens_of(demo_server, "Once upon a time" + generated["text"])
    assert prompt[: len(start)] == start
    [choice] = echoed(demo_server, prompt, logprobs=3)
    assert choice["text"] == "Once upon a time" + generated["text"]
    assert choice["finish_reason"] == "length"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(choice["logprobs"][name]) == len(prompt)
    assert choice["logprobs"]["tokens"][len(start) :] == generated["logprobs"]["tokens"]
    found = choice["logprobs"]["token_logprobs"][len(start) :]
    assert found == pytest.approx(generated["logprobs"]["token_logprobs"], abs=1e-3)
    tops = zip(choice["logprobs"]["top_logprobs"][len(start) :], generated["logprobs"]["top_logprobs"], strict=True)
    assert all(top == pytest.approx(expected, abs=1e-3) for top, expected in tops)


def test_the_first_token_has_none_and_offsets_go_on_into_the_answer(client: OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="Repeat: one two", echo=True, logprobs=2, max_tokens=4, temperature=0
    )
    logprobs = legacy_logprobs(answer.choices[0])
    assert answer.usage is not None
    assert len(logprobs) == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert logprobs[0][1:] == (None, None)
    for token, logprob, top in logprobs[1:]:
        assert top[token] == logprob <= 0
        assert 2 <= len(top) <= 3
    assert answer.choices[0].text == "".join(token for token, _, _ in logprobs)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_every_prompt_of_a_batch_has_its_own_and_a_stream_has_the_same(
    demo_server: RunningServer, num_tokens: int
) -> None:
    prompts = [random_tokens(40, 1), random_tokens(7, 2), [20], random_tokens(40, 1)]
    alone = [echoed(demo_server, prompt, num_tokens)[0] for prompt in prompts]
    together = echoed(demo_server, prompts, num_tokens)
    for choice, expected, prompt in zip(together, alone, prompts, strict=True):
        assert choice["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + num_tokens
        known = choice["logprobs"]["token_logprobs"][1:]
        assert known == pytest.approx(expected["logprobs"]["token_logprobs"][1:], abs=1e-3)
    body = run_on(prompts, num_tokens, echo=True, logprobs=1)
    chunks = stream_events(demo_server, COMPLETIONS, body)[:-1]
    for index, choice in enumerate(together):
        parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["index"] == index]
        for name, values in choice["logprobs"].items():
            streamed = [value for part in parts for value in part[name]]
            assert name.endswith("logprobs") or streamed == values
            assert len(streamed) == len(values)
        assert text_of([c for c in chunks if c["choices"][0]["index"] == index]) == choice["text"]


def test_several_answers_share_their_prompt_and_its_log_probabilities(demo_server: RunningServer) -> None:
    prompts = [random_tokens(40, 3), random_tokens(9, 4)]
    choices = echoed(demo_server, prompts, 3, n=2, temperature=1, seed=1)
    for i, prompt in enumerate(prompts):
        one, other = (choice["logprobs"]["token_logprobs"] for choice in choices[2 * i : 2 * i + 2])
        assert one[: len(prompt)] == other[: len(prompt)]
        assert len(one) == len(other) == len(prompt) + 3


def test_prompt_logprobs_have_vllms_format(demo_server: RunningServer) -> None:
    prompt = tokens_of(demo_server, "What is 17 + 25?")
    [choice] = post(demo_server, run_on(prompt, 2, prompt_logprobs=2))["choices"]
    assert choice["logprobs"] is None
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, entries in zip(prompt[1:], others, strict=True):
        assert next(iter(entries)) == str(token)
        ranks = [entry["rank"] for entry in entries.values()]
        assert sorted(ranks) == ranks if ranks[0] == 1 else ranks[1:] == [1, 2] or ranks == [2, 1]
        by_rank = sorted(entries.values(), key=lambda entry: entry["rank"])
        assert [entry["logprob"] for entry in by_rank] == sorted((e["logprob"] for e in by_rank), reverse=True)
    assert [next(iter(entries.values()))["decoded_token"] for entries in others] == [
        echoed(demo_server, prompt)[0]["logprobs"]["tokens"][i] for i in range(1, len(prompt))
    ]


def test_prompt_logprobs_and_logprobs_each_have_their_own_number(demo_server: RunningServer) -> None:
    [choice] = echoed(demo_server, "Once upon a time", prompt_logprobs=4, logprobs=0)
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(entries) in (4, 5) for entries in choice["prompt_logprobs"][1:])


def test_of_tokens_with_the_same_text_the_most_likely_one_is_shown(demo_server: RunningServer) -> None:
    """Parts of characters have the same text, and a client has to see that another token is more likely."""
    assert demo_server.engine.info is not None
    tokenizer = demo_server.engine.info.tokenizer
    one, other = [token for token in range(300) if tokenizer.token_text(token) == "\ufffd"][:2]
    token = TokenLogprobs(one, -3.0, ((other, -0.5),))
    assert completion_logprobs(tokenizer, [token], TextOffsets(tokenizer, [1], ""))["top_logprobs"] == [
        {"\ufffd": -0.5}
    ]


def test_a_chat_has_them_once_for_all_its_answers(demo_server: RunningServer) -> None:
    body = ask("What is 17 + 25?", prompt_logprobs=1, n=2, max_tokens=0)
    answer = post(demo_server, body)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    for choice in answer["choices"]:
        assert choice["message"]["content"] == ""
        assert choice["finish_reason"] == "length"
        assert "prompt_logprobs" not in choice
    assert "prompt_logprobs" not in post(demo_server, ask("x", max_tokens=1))


def test_an_answer_may_have_no_token(client: OpenAI, demo_server: RunningServer) -> None:
    for path, body in ((COMPLETIONS, run_on("Once", 0)), (CHAT, ask("Once", max_completion_tokens=0))):
        choice = post(demo_server, body)["choices"][0]
        assert choice["finish_reason"] == "length"
        chunks = stream_events(demo_server, path, body | {"stream_options": {"include_usage": True}})
        assert text_of(chunks) == ""
        assert chunks[-2]["usage"]["completion_tokens"] == 0
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-2]][-1] == "length"
    with running_server(EngineConfig(kv_cache_bytes=8_000_000, max_model_len=100)) as server:
        [filled] = post(server, run_on(random_tokens(100, 5), 0))["choices"]
    assert filled["text"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, run_on("x", 1, prompt_logprobs=1, stream=True), "prompt_logprobs"),
        (COMPLETIONS, run_on("x", 1, prompt_logprobs=21), "prompt_logprobs"),
        (COMPLETIONS, run_on("x", 1, prompt_logprobs=-1), "prompt_logprobs"),
        (COMPLETIONS, run_on("x", -2), "max_tokens"),
        (COMPLETIONS, run_on([20] * 4097, 0, echo=True, logprobs=1), "prompt"),
        (CHAT, ask("x", prompt_logprobs=1, stream=True), "prompt_logprobs"),
        (CHAT, ask("x", max_tokens=0, max_completion_tokens=1), "max_tokens"),
        (CHAT, ask("x", echo=True), "echo"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    demo_server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    with raw(demo_server) as client:
        response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_the_list_of_a_long_prompt_takes_little_more_memory_than_its_text(demo_server: RunningServer) -> None:
    """As dictionaries, a prompt of 100,000 tokens would take a gigabyte."""
    assert demo_server.engine.info is not None
    prompt = PromptLogprobs.unknown(random_tokens(3000, 1), 20)
    prompt.top_ids[:] = random_tokens(20, 2)
    prompt.top_logprobs[:] = -2.345678
    tokenizer = demo_server.engine.info.tokenizer
    tracemalloc.start()
    try:
        text = to_json({"prompt_logprobs": prompt_logprobs(tokenizer, prompt, 20)})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(json.loads(text)["prompt_logprobs"]) == 3000
    assert peak < 2 * len(text)
