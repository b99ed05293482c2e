"""min_tokens, echo and the labels that change nothing, over HTTP."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from tests.api.helpers import answer_text, ask, post, raw, run_on, stream_events, text_of, tokens_of
from tests.support import RunningServer

COMPLETIONS = "/v1/completions"


def test_no_end_token_comes_before_min_tokens(demo_server: RunningServer) -> None:
    short = post(demo_server, ask("What is 17 + 25?"))
    assert short["usage"]["completion_tokens"] < 12
    assert short["choices"][0]["finish_reason"] == "stop"
    for temperature in (0, 1):
        long = post(demo_server, ask("What is 17 + 25?", min_tokens=12, max_tokens=12, temperature=temperature, seed=1))
        assert long["usage"]["completion_tokens"] == 12
    text = long["choices"][0]["message"]["content"]
    assert "<|im_end|>" not in text
    whole = post(demo_server, ask("What is 17 + 25?", min_tokens=12, max_tokens=40))
    assert 12 <= whole["usage"]["completion_tokens"] <= 40
    assert whole["choices"][0]["message"]["content"].startswith("42")


def test_stop_tokens_and_strings_wait_for_min_tokens(demo_server: RunningServer) -> None:
    body = run_on("Repeat: one two", 24)
    text = answer_text(demo_server, body)
    first = post(demo_server, body | {"logprobs": 0})["choices"][0]["logprobs"]["tokens"][0]
    info = demo_server.engine.info
    assert info is not None
    ids = [token for token in range(info.vocab_size) if info.tokenizer.token_text(token) == first]
    assert post(demo_server, body | {"stop_token_ids": ids})["usage"]["completion_tokens"] == 1
    assert post(demo_server, body | {"stop_token_ids": ids, "min_tokens": 10})["usage"]["completion_tokens"] >= 10
    assert answer_text(demo_server, body | {"stop": [text[0]]}) == ""
    longer = post(demo_server, body | {"stop": sorted(set(text)), "min_tokens": 10})
    assert longer["usage"]["completion_tokens"] == 10
    assert text.startswith(longer["choices"][0]["text"])


def test_min_tokens_is_refused_where_it_cannot_be_had(demo_server: RunningServer) -> None:
    body = run_on("x", 1, min_tokens=17)
    del body["max_tokens"]
    for request, path in ((body, COMPLETIONS), (ask("x", min_tokens=10**6), "/v1/chat/completions")):
        with raw(demo_server) as client:
            response = client.post(path, json=request)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "min_tokens"


def test_echo_begins_every_answer_with_its_prompt(client: OpenAI, demo_server: RunningServer) -> None:
    texts = ["Once upon", "Repeat: one"]
    prompts: list[Any] = [texts, [tokens_of(demo_server, text) for text in texts]]
    for prompt in prompts:
        body = run_on(prompt, 6, n=2, seed=5, temperature=1)
        plain = [choice["text"] for choice in post(demo_server, body)["choices"]]
        expected = [texts[i // 2] + text for i, text in enumerate(plain)]
        assert [choice["text"] for choice in post(demo_server, body | {"echo": True})["choices"]] == expected
        chunks = stream_events(demo_server, COMPLETIONS, body | {"echo": True})[:-1]
        for index, text in enumerate(expected):
            assert text_of([c for c in chunks if c["choices"][0]["index"] == index]) == text
    answer = client.completions.create(model="demo", prompt=texts[0], echo=True, max_tokens=3, temperature=0)
    assert answer.choices[0].text == texts[0] + answer_text(demo_server, run_on(texts[0], 3))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_fields_that_ask_for_nothing_change_nothing(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = client.chat.completions.create(
        model="demo",
        messages=messages,
        temperature=0,
        max_completion_tokens=20,
        modalities=["text"],
        verbosity="medium",
        store=False,
        user="u",
        metadata={"a": "b"},
        safety_identifier="s",
        prompt_cache_key="k",
        stop="never",
    )
    assert answer.choices[0].message.content == "42"
