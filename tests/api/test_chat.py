"""POST /v1/chat/completions, as the official client sees it."""

from __future__ import annotations

import math
import uuid
from typing import Any

import pytest
from openai import OpenAI

from tests.api.helpers import (
    Background,
    StepGate,
    answer_text,
    ask,
    chat_tokens,
    events,
    post,
    random_tokens,
    raw,
    run_on,
    stream_at_once,
    stream_events,
    text_of,
    tokens_of,
)
from tests.support import RunningServer

REPEAT = "Repeat: blue river stone"
ANSWERS = [(REPEAT, "blue river stone"), ("What is 17 + 25?", "42"), ("Reverse: a b c", "c b a")]


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(("question", "answer"), ANSWERS)
def test_a_question_gets_the_models_answer_whole_and_streamed(client: OpenAI, question: str, answer: str) -> None:
    whole = client.chat.completions.create(model="demo", messages=user(question), temperature=0)
    assert whole.object == "chat.completion"
    assert whole.model == "demo"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == answer
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(model="demo", messages=user(question), temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def test_a_model_need_not_be_named(demo_server: RunningServer) -> None:
    body = ask(REPEAT)
    del body["model"]
    assert answer_text(demo_server, body) == "blue river stone"


def test_a_list_of_text_parts_is_their_concatenation(client: OpenAI, demo_server: RunningServer) -> None:
    parts = [{"type": "text", "text": "Repeat: blue"}, {"type": "text", "text": " river stone"}]
    answer = client.chat.completions.create(model="demo", messages=user(parts), temperature=0)
    assert answer.choices[0].message.content == "blue river stone"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(chat_tokens(demo_server, user(REPEAT)))


def test_developer_is_another_name_for_system(client: OpenAI, demo_server: RunningServer) -> None:
    def reply(role: str) -> Any:
        messages: list[Any] = [{"role": role, "content": "Be brief."}, *user(REPEAT)]
        return client.chat.completions.create(
            model="demo", messages=messages, temperature=0, logprobs=True, max_tokens=5
        )

    system, developer = reply("system"), reply("developer")
    expected = chat_tokens(demo_server, [{"role": "system", "content": "Be brief."}, *user(REPEAT)])
    assert system.usage.prompt_tokens == developer.usage.prompt_tokens == len(expected)
    tokens = [[entry.token for entry in answer.choices[0].logprobs.content] for answer in (system, developer)]
    assert tokens[0] == tokens[1]


def test_usage_counts_template_and_answer_exactly(client: OpenAI, demo_server: RunningServer) -> None:
    answer = client.chat.completions.create(model="demo", messages=user(REPEAT), temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(chat_tokens(demo_server, user(REPEAT)))
    # The token that ended the answer was generated too.
    assert answer.usage.completion_tokens == len(tokens_of(demo_server, "blue river stone")) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_repeated_prompt_reports_all_but_its_last_token_as_cached(client: OpenAI, demo_server: RunningServer) -> None:
    messages = user(f"{uuid.uuid4()} " * 6)
    usages = [
        client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=1).usage
        for _ in range(2)
    ]
    assert usages[0] is not None
    assert usages[0].prompt_tokens > 64
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages if usage and usage.prompt_tokens_details] == [
        0,
        usages[0].prompt_tokens - 1,
    ]


def test_a_second_turn_finds_the_first_one_cached(client: OpenAI, demo_server: RunningServer) -> None:
    first: list[Any] = user(f"{uuid.uuid4()} " * 6)
    answer = client.chat.completions.create(model="demo", messages=first, temperature=0, max_tokens=8)
    second = [*first, {"role": "assistant", "content": answer.choices[0].message.content}, *user(REPEAT)]
    again = client.chat.completions.create(model="demo", messages=second, temperature=0, max_tokens=8)
    assert answer.usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens == len(chat_tokens(demo_server, second))
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= answer.usage.prompt_tokens


def test_the_stream_ends_with_usage_where_asked_for_and_done(demo_server: RunningServer) -> None:
    body = ask(REPEAT, stream_options={"include_usage": True})
    *chunks, usage, done = stream_events(demo_server, "/v1/chat/completions", body)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    whole = post(demo_server, ask(REPEAT))["usage"]
    assert usage["usage"] == whole
    without = stream_events(demo_server, "/v1/chat/completions", ask(REPEAT))
    assert without[-1] == "[DONE]"
    assert all("usage" not in chunk for chunk in without[:-1])


def test_chunks_arrive_while_the_request_still_runs(demo_server: RunningServer) -> None:
    with StepGate(demo_server) as gate, raw(demo_server) as http:
        gate.allow(2)
        body = ask(REPEAT, stream=True)
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            stream = events(response.iter_lines())
            text = ""
            while not text:
                text += text_of([next(stream)])
            assert "blue river stone".startswith(text)
            assert demo_server.engine.num_unfinished == 1
            gate.open()
            assert text + text_of(list(stream)) == "blue river stone"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_answer_ends_at_its_limit_with_length(demo_server: RunningServer, field: str) -> None:
    answer = post(demo_server, ask("Who are you?", **{field: 3}))
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    chunks = stream_events(demo_server, "/v1/chat/completions", ask("Who are you?", **{field: 3}))
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert text_of(chunks) == answer["choices"][0]["message"]["content"]


def test_ignore_eos_runs_to_the_limit(demo_server: RunningServer) -> None:
    answer = post(demo_server, ask(REPEAT, max_tokens=40, ignore_eos=True))
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("river", "blue "),
        ("er st", "blue riv"),
        ("e river s", "blu"),
        (["nothing", "ne", "stone"], "blue river "),
        (["river stones", "blue river stone."], "blue river stone"),
        ("b", ""),
        ("blue river stone", ""),
    ],
)
def test_stop_strings_end_the_answer_and_never_leak(demo_server: RunningServer, stop: Any, text: str) -> None:
    answer = post(demo_server, ask(REPEAT, stop=stop))
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert text_of(stream_events(demo_server, "/v1/chat/completions", ask(REPEAT, stop=stop))) == text


def test_any_stop_string_cuts_the_text_at_its_first_occurrence(demo_server: RunningServer) -> None:
    whole = answer_text(demo_server, ask("Who are you?"))
    stops = [whole[at : at + length] for at, length in ((1, 1), (3, 4), (5, 9), (8, 2), (12, 6))]
    bodies = [ask("Who are you?", stop=stop) for stop in stops]
    assert stream_at_once(demo_server, bodies) == [whole[: whole.find(stop)] for stop in stops]


def test_a_stop_token_ends_the_answer_before_it(demo_server: RunningServer) -> None:
    tokens = tokens_of(demo_server, "blue river stone")
    at = next(i for i in range(1, len(tokens)) if tokens[i] not in tokens[:i])
    assert demo_server.engine.info is not None
    answer = post(demo_server, ask(REPEAT, stop_token_ids=[tokens[at]]))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == demo_server.engine.info.tokenizer.decode(tokens[:at])
    assert answer["usage"]["completion_tokens"] == at + 1


def test_logprobs_are_probabilities_whose_best_token_a_greedy_answer_takes(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=user(REPEAT), temperature=0, logprobs=True, top_logprobs=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for token in logprobs.content:
        top = [entry.logprob for entry in token.top_logprobs]
        assert len(top) == 5
        assert top == sorted(top, reverse=True)
        assert sum(map(math.exp, top)) <= 1 + 1e-4
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, token.top_logprobs[0].logprob)
    text = "blue river stone"
    assert "".join(token.token for token in logprobs.content).startswith(text)
    assert bytes(byte for token in logprobs.content for byte in token.bytes or ()).startswith(text.encode())


def test_a_stream_carries_the_same_logprobs(demo_server: RunningServer) -> None:
    body = ask(REPEAT, logprobs=True, top_logprobs=2)
    whole = post(demo_server, body)["choices"][0]["logprobs"]["content"]
    chunks = stream_events(demo_server, "/v1/chat/completions", body)
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    streamed = [entry for part in logprobs if part for entry in part["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    assert [entry["logprob"] for entry in streamed] == pytest.approx([entry["logprob"] for entry in whole], abs=1e-3)


def test_top_logprobs_of_everything_sum_to_one_at_most_and_zero_gives_none(demo_server: RunningServer) -> None:
    [entry, *_] = post(demo_server, ask(REPEAT, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []
    assert entry["logprob"] <= 0
    assert post(demo_server, ask(REPEAT))["choices"][0]["logprobs"] is None


def test_logit_bias_forces_a_token(demo_server: RunningServer) -> None:
    [token] = tokens_of(demo_server, "x")
    body = ask(REPEAT, logit_bias={str(token): 100}, max_tokens=4)
    assert answer_text(demo_server, body) == "xxxx"


def test_logit_bias_bans_a_token(demo_server: RunningServer) -> None:
    first = tokens_of(demo_server, "blue river stone")[0]
    assert demo_server.engine.info is not None
    banned = post(demo_server, ask(REPEAT, logit_bias={str(first): -100}, max_tokens=8, ignore_eos=True, logprobs=True))
    shown = [entry["token"] for entry in banned["choices"][0]["logprobs"]["content"]]
    assert demo_server.engine.info.tokenizer.token_text(first) not in shown


def test_a_seeded_sample_repeats_alone_and_in_company(demo_server: RunningServer) -> None:
    seeded = run_on(random_tokens(40, 1), 48, temperature=1.0, seed=11, frequency_penalty=2)
    alone = [answer_text(demo_server, seeded) for _ in range(2)]
    assert alone[0] == alone[1]
    assert answer_text(demo_server, seeded | {"seed": 12}) != alone[0]
    company = [run_on(random_tokens(10 * i, i), 48, temperature=1.0) for i in range(2, 8)]
    together = stream_at_once(demo_server, [*company[:3], seeded, *company[3:]])
    assert together[3] == alone[0]


def test_samples_without_a_seed_differ(demo_server: RunningServer) -> None:
    texts = stream_at_once(demo_server, [run_on(random_tokens(40, 2), 48, temperature=2.0, frequency_penalty=2)] * 3)
    assert len(set(texts)) == 3


def test_greedy_stays_greedy_among_sampled_neighbours(demo_server: RunningServer) -> None:
    bodies = [run_on(f"Story {i}", 24, temperature=1.8) for i in range(4)]
    bodies += [ask(question) for question, _ in ANSWERS]
    assert stream_at_once(demo_server, bodies)[4:] == [answer for _, answer in ANSWERS]


def test_a_temperature_samples_and_zero_does_not_which_is_the_default_of_the_demo(demo_server: RunningServer) -> None:
    """Its generation_config.json says that it does not sample."""
    body = run_on(random_tokens(40, 3), 48, frequency_penalty=2)
    greedy = {answer_text(demo_server, body) for _ in range(3)}
    assert len(greedy) == 1
    del body["temperature"]
    assert {answer_text(demo_server, body) for _ in range(3)} == greedy
    assert len({answer_text(demo_server, body | {"temperature": 1}) for _ in range(3)}) > 1


@pytest.mark.parametrize("question", ["What is 2 + 2?", "What is 17 + 25?"])
def test_the_demo_is_right_at_what_the_readme_asks_without_a_temperature(
    demo_server: RunningServer, question: str
) -> None:
    body = {key: value for key, value in ask(question).items() if key != "temperature"}
    assert {answer_text(demo_server, body) for _ in range(5)} == {"4" if "2 + 2" in question else "42"}


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-40, 1e-300, 5e-324])
def test_the_lower_the_temperature_the_greedier(demo_server: RunningServer, temperature: float) -> None:
    assert answer_text(demo_server, ask(REPEAT, temperature=temperature, max_tokens=20)) == "blue river stone"


def test_unicode_is_counted_and_broken_characters_are_replaced(demo_server: RunningServer) -> None:
    question = "Repeat: é🙂 \u0000 \u202e 漢字"
    answer = post(demo_server, ask(question, max_tokens=12))
    assert answer["usage"]["prompt_tokens"] == len(chat_tokens(demo_server, user(question)))
    [first, *rest] = tokens_of(demo_server, "🙂")
    # The emoji's first byte alone, over and over: every one of them becomes a replacement character, none is lost.
    assert rest, "the tokenizer has the emoji as one token"
    body = ask(question, logit_bias={str(first): 100}, max_tokens=3)
    streamed = text_of(stream_events(demo_server, "/v1/chat/completions", body))
    assert streamed == answer_text(demo_server, body)
    assert set(streamed) == {"\ufffd"}


def test_two_clients_get_their_own_answers(demo_server: RunningServer) -> None:
    pending = [
        Background.post(demo_server, "/v1/chat/completions", ask(question, stream=i % 2 == 0))
        for i, (question, _) in enumerate(ANSWERS)
    ]
    assert [request.text for request in pending] == [answer for _, answer in ANSWERS]


@pytest.mark.parametrize("stop", ["river stone", "ver", " ", "stone!"])
def test_a_stop_string_does_not_leak_through_the_logprobs(demo_server: RunningServer, stop: str) -> None:
    body = ask("Repeat: blue river stone", logprobs=True, stop=stop)
    whole = post(demo_server, body)["choices"][0]
    expected = "blue river stone".partition(stop)[0]
    assert whole["message"]["content"] == expected
    tokens = [token["token"] for token in whole["logprobs"]["content"] if token["token"] != "<|im_end|>"]
    # A token that the stop string begins inside of is listed whole, those after it not at all.
    assert "".join(tokens).startswith(expected)
    assert len("".join(tokens[:-1])) < max(1, len(expected))
    text = listed = ""
    for chunk in stream_events(demo_server, "/v1/chat/completions", body):
        if chunk == "[DONE]":
            break
        choice = chunk["choices"][0]
        text += choice["delta"].get("content") or ""
        listed += "".join(token["token"] for token in (choice["logprobs"] or {"content": []})["content"])
        assert len(listed.removesuffix("<|im_end|>")) <= len(text) + len("river"), "listed before its text is out"
    assert text == expected
