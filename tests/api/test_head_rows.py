"""Rows of a model's head that have no token, as most models have some, are never sampled and never reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from tests.api.helpers import raw
from tests.scripted import END, scripted_server
from tests.support import RunningServer

PADDING = 32
SCRIPT = {"Say it.": "It is said.", "JSON?": '{"a": 1}'}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The rows without a token have the largest logits."""
    directory = tmp_path_factory.mktemp("model")
    with scripted_server(directory, "json_tools", SCRIPT, padding=PADDING) as server:
        forward = server.core.runner.forward

        def with_large_rows(*args: Any) -> mx.array:
            logits = forward(*args)
            logits[:, -PADDING:] = 200.0
            return logits

        server.core.runner.forward = with_large_rows  # type: ignore[method-assign]
        yield server


def post(server: RunningServer, path: str, **body: Any) -> Any:
    with raw(server) as http:
        response = http.post(path, json={"model": "scripted", "max_tokens": 40} | body)
    assert response.status_code == 200, response.text
    return response.json()


def ask(server: RunningServer, question: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    return post(server, "/v1/chat/completions", messages=messages, **fields)["choices"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 3, "n": 3},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
        {"temperature": 0, "presence_penalty": 0.5, "logit_bias": {"5": -1}},
        {"temperature": 0, "logprobs": True, "top_logprobs": 5},
    ],
)
def test_the_answer_has_tokens_only(server: RunningServer, fields: dict[str, Any]) -> None:
    for choice in ask(server, "Say it.", **fields):
        assert (choice["message"]["content"], choice["finish_reason"]) == (SCRIPT["Say it."], "stop")
        for entry in (choice["logprobs"] or {"content": []})["content"]:
            assert entry["logprob"] > -0.01
            assert all(each["token"] for each in entry["top_logprobs"])


def test_an_enforced_answer_too(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    [choice] = ask(server, "JSON?", response_format=form)
    assert json.loads(choice["message"]["content"]) == {"a": 1}


def test_log_probabilities_of_a_prompt_name_tokens_only(server: RunningServer) -> None:
    [choice] = post(server, "/v1/completions", prompt="Say it.", echo=True, logprobs=3, max_tokens=3)["choices"]
    assert all(choice["logprobs"]["tokens"])
    assert all(all(each) for each in choice["logprobs"]["top_logprobs"][1:])
    size = server.core.served.vocab_size
    [choice] = post(server, "/v1/completions", prompt=[5, size - 1, 6], prompt_logprobs=2, max_tokens=1)["choices"]
    assert [next(iter(each)) for each in choice["prompt_logprobs"][1:]] == [str(size - 1), "6"]


def test_tokens_beyond_the_vocabulary_are_tokens(server: RunningServer) -> None:
    """The end token is an added one."""
    served = server.core.served
    ends = served.tokenizer.reader.convert_tokens_to_ids(END)
    assert ends not in served.tokenizer.absent_ids(served.vocab_size)
    assert len(served.tokenizer.absent_ids(served.vocab_size)) == PADDING
    assert server.core.sampler.vocab_size == served.vocab_size - PADDING
