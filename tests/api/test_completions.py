"""POST /v1/completions: the four kinds of prompts, choices, log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import answer_text, ask, legacy_logprobs, post, random_tokens, run_on, stream_events, tokens_of
from tests.support import RunningServer, make_tiny_model, running_server


def test_text_and_tokens_are_the_same_prompt(client: OpenAI, demo_server: RunningServer) -> None:
    text = "Once upon a time there was"
    tokens = tokens_of(demo_server, text)
    answers = [
        client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=12, logprobs=0)
        for prompt in (text, tokens, [text], [tokens])
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1
    for answer in answers:
        assert answer.object == "text_completion"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(tokens)


@pytest.mark.parametrize("as_tokens", [False, True])
def test_every_prompt_of_a_list_gets_its_own_choice(demo_server: RunningServer, as_tokens: bool) -> None:
    texts = ["Repeat: one two", "Reverse: a b c", "What is 1 + 1?", "Repeat: one two"]
    prompts: list[Any] = [tokens_of(demo_server, text) for text in texts] if as_tokens else list(texts)
    answer = post(demo_server, run_on(prompts, 10))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [
        answer_text(demo_server, run_on(prompt, 10)) for prompt in prompts
    ]
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["usage"]["prompt_tokens"] == sum(len(tokens_of(demo_server, text)) for text in texts)


def test_several_prompts_stream_interleaved(demo_server: RunningServer) -> None:
    prompts = [random_tokens(20, seed) for seed in range(3)]
    body = run_on(prompts, 24, stream_options={"include_usage": True})
    *chunks, usage, done = stream_events(demo_server, "/v1/completions", body)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3 * 24
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(3)]
    assert texts == [answer_text(demo_server, run_on(prompt, 24)) for prompt in prompts]
    assert order != sorted(order)
    ends = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert sorted(end for end in ends if end[1]) == [(0, "length"), (1, "length"), (2, "length")]


def test_sixteen_tokens_are_the_default(demo_server: RunningServer) -> None:
    body = run_on("Once", 1)
    del body["max_tokens"]
    answer = post(demo_server, body)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs_have_the_legacy_format(client: OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="Once upon", temperature=0, max_tokens=6, logprobs=3)
    logprobs = legacy_logprobs(answer.choices[0])
    assert answer.usage is not None
    assert len(logprobs) == answer.usage.completion_tokens
    for token, logprob, top in logprobs:
        assert len(top) <= 3
        assert top[token] == logprob == max(top.values())


def test_streamed_logprobs_continue_their_offsets(demo_server: RunningServer) -> None:
    body = run_on("Once upon", 8, logprobs=1)
    whole = post(demo_server, body)["choices"][0]["logprobs"]
    parts = [c["choices"][0]["logprobs"] for c in stream_events(demo_server, "/v1/completions", body)[:-1]]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [offset for part in parts for offset in part["text_offset"]] == whole["text_offset"]


def test_the_sampled_token_is_among_its_top_logprobs_even_when_unlikely(demo_server: RunningServer) -> None:
    """OpenAI: the API returns the sampled token's log-probability too, so there may be up to logprobs+1 elements."""
    body = run_on("Once upon", 12, logprobs=1, temperature=2.0, seed=3)
    logprobs = post(demo_server, body)["choices"][0]["logprobs"]
    assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


def test_a_long_stop_string_holds_nothing_back_in_the_end(demo_server: RunningServer) -> None:
    whole = answer_text(demo_server, run_on("Once upon", 16))
    assert answer_text(demo_server, run_on("Once upon", 16, stop=whole + "x" * 900)) == whole


def test_the_prompt_may_fill_the_context_but_for_one_token(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "tiny", "llama", max_position_embeddings=128))
    with running_server(EngineConfig(model=model, served_model_name="demo", kv_cache_bytes=4_000_000)) as server:
        assert post(server, run_on(random_tokens(127, 1), 1))["usage"]["completion_tokens"] == 1
        chat = ask("x", ignore_eos=True)
        assert post(server, chat)["usage"]["total_tokens"] == 128
        server.wait_idle()
