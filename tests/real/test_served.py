"""A real model behind the server's APIs, as official clients use it, beside libraries that are not ours."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.quality.dictation import APIS, dictate_all
from benchmarks.quality.schemas import ask_all
from tests.real.conftest import MODEL, RealServer, path_of
from tests.real.numpy_llama import Llama, log_softmax

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

ASKED = (
    "What is the capital of France?",
    "What is the largest planet of the solar system?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "Translate to French: Good morning.",
    "What does HTTP stand for?",
    "Write a Python function that adds two numbers.",
    "Repeat after me: the river runs past the mill and the inn.",
)
ANSWER = 24
"""Tokens of an answer that is compared."""

DIFFERENCE = {"float32": 1e-3, "gguf": 1e-3 if sys.platform == "linux" else 0.1}
"""Of log-probabilities beside NumPy's. A Mac computes the GGUF file's weights as they are, in 16 bits."""

TOP, PROMPT = 20, 96
"""Most likely tokens of each position that are compared, and tokens of a text."""


REST = 250 * 10**6
"""Bytes for all but weights and KV: the interpreter, libraries, the tokenizer and its grammar tables."""

SEEDS = range(1, 5)
"""Of schemas, and whether an answer is greedy."""


def post(server: RealServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": MODEL} | body, timeout=300).raise_for_status()


def test_openais_client_gets_the_answer_whole_and_as_a_stream(server: RealServer) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    whole = server.openai.chat.completions.create(**asked).choices[0]
    assert "Paris" in whole.message.content
    assert whole.finish_reason == "stop", "the end of a turn is the model's own"
    with server.openai.chat.completions.create(**asked, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == "stop"
    assert (
        server.openai.responses.create(model=MODEL, input=QUESTION, temperature=0).output_text == whole.message.content
    )


def test_anthropics_client_gets_the_answer_whole_and_as_a_stream(server: RealServer) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 50, "extra_body": {"temperature": 0}}
    whole = server.anthropic.messages.create(**asked)
    assert "Paris" in whole.content[0].text
    assert whole.stop_reason == "end_turn"
    with server.anthropic.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    assert stream.get_final_message().usage == whole.usage


def test_ollamas_api_gives_the_answer_whole_and_as_a_stream(server: RealServer) -> None:
    asked: dict[str, Any] = {"messages": QUESTION, "options": {"temperature": 0}}
    whole = post(server, "/api/chat", asked | {"stream": False}).json()
    assert "Paris" in whole["message"]["content"]
    lines = [json.loads(line) for line in post(server, "/api/chat", asked).text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert (lines[-1]["done"], lines[-1]["done_reason"]) == (True, "stop")


def test_texts_have_the_tokens_of_the_library_tokenizers(
    server: RealServer, tokenizer: Tokenizer, texts: list[str]
) -> None:
    for text in texts:
        found = post(server, "/tokenize", {"prompt": text}).json()["tokens"]
        assert found == tokenizer.encode(text).ids, text[:40]
        assert post(server, "/detokenize", {"tokens": found}).json()["prompt"] == text


def logits_of(server: RealServer, tokens: list[int]) -> tuple[Any, Any, Any]:
    """Log-probabilities of the tokens after the first one, and at each of them the most likely tokens and theirs."""
    body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": TOP}
    _, *positions = post(server, "/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    own = [each[str(token)]["logprob"] for each, token in zip(positions, tokens[1:], strict=True)]
    ranked = [sorted(each.items(), key=lambda item: item[1]["rank"])[:TOP] for each in positions]
    best = [[int(token) for token, _ in each] for each in ranked]
    return np.array(own), np.array(best), np.array([[of["logprob"] for _, of in each] for each in ranked])


def test_logits_are_those_of_a_plain_forward_pass_in_numpy(
    server: RealServer, tokenizer: Tokenizer, texts: list[str], oracle: Llama
) -> None:
    for text in texts[:3]:
        tokens = tokenizer.encode(text).ids[:PROMPT]
        expected = log_softmax(oracle.logits(tokens))[:-1]
        own, best, logprobs = logits_of(server, tokens)
        limit = DIFFERENCE[server.form]
        rows = np.arange(len(tokens) - 1)
        np.testing.assert_allclose(own, expected[rows, tokens[1:]], rtol=0, atol=limit)
        np.testing.assert_allclose(logprobs, np.take_along_axis(expected, best, axis=1), rtol=0, atol=limit)
        assert (logprobs.min(axis=1) >= np.sort(expected, axis=1)[:, -TOP] - limit).all(), "these are the most likely"


def greedy(server: RealServer, question: str) -> list[tuple[str, float]]:
    """The tokens of an answer, each with how much more likely it is than the next one."""
    asked = {"messages": [{"role": "user", "content": question}], "max_tokens": ANSWER, "temperature": 0}
    choice = server.openai.chat.completions.create(model=MODEL, **asked, logprobs=True, top_logprobs=2).choices[0]
    return [
        (each.token, each.top_logprobs[0].logprob - each.top_logprobs[1].logprob) for each in choice.logprobs.content
    ]


def test_both_forms_give_the_same_greedy_answers(servers: dict[str, RealServer]) -> None:
    """Up to a token that is hardly more likely than another one, if there is such a token."""
    with ThreadPoolExecutor(len(ASKED)) as pool:
        answers = {form: list(pool.map(greedy, [servers[form]] * len(ASKED), ASKED)) for form in ("float32", "gguf")}
    equal = 0
    for question, float32, gguf in zip(ASKED, answers["float32"], answers["gguf"], strict=True):
        for (token, margin), (other, _) in zip(float32, gguf, strict=False):
            if token != other:
                assert margin < 2 * DIFFERENCE["gguf"], f"{question}: {token!r}, {other!r}"
                break
        else:
            equal += len(float32) == len(gguf)
    assert equal > len(ASKED) / 2


def test_answers_are_valid_json_of_their_schemas(server: RealServer) -> None:
    verdicts = ask_all(server.url, MODEL, SEEDS)
    assert len(verdicts) == len(SEEDS)
    assert [verdict for verdict in verdicts if verdict.problem] == []


def test_dictated_values_are_enforced_as_the_model_copies_them(server: RealServer) -> None:
    """One of each API. `make bench-real-quality` has 504."""
    found = dictate_all(server.url, MODEL, range(len(APIS)))
    assert {each.case.api for each in found} == set(APIS)
    assert [each for each in found if each.problem or each.is_lost] == []


@pytest.mark.parametrize("stop", [" of France", "Paris"])
def test_a_stop_string_ends_an_answer(server: RealServer, stop: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    whole = server.openai.chat.completions.create(**asked).choices[0].message.content
    cut = server.openai.chat.completions.create(**asked, stop=stop).choices[0].message.content
    assert cut == whole.partition(stop)[0] != whole


def test_the_server_keeps_no_more_memory_than_weights_and_kv(server: RealServer) -> None:
    """Computed in float32, in either form. The KV pool counts although nothing has touched most of it yet."""
    if not server.resident:
        pytest.skip("there is no /proc")
    weights = (path_of("float32") / "model.safetensors").stat().st_size
    kv = server.kv_bytes
    assert weights < server.resident < weights + kv + REST
    embedding = 49_152 * 576 * 4  # the largest layer
    assert server.peak < weights + embedding + REST, "while it was loaded"
