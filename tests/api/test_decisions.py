"""POST /v1/decisions by OpenAI's client, and in mlx-vlm's dialect: typed answers, exact probabilities, clear errors."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_plain_model
from openai import BadRequestError, OpenAI

from mlxpaged.api.config import HttpConfig
from mlxpaged.api.decisions.frame import INSTRUCTION
from mlxpaged.api.generation import readout, readout_waves
from mlxpaged.api.generation.submission import start
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import DEMO_PATH
from tests.api.helpers import (
    DEADLINE,
    Background,
    FakeClock,
    StepGate,
    bearer,
    metrics,
    raw,
    tokens_of,
    within_one_step,
    write_keys,
)
from tests.support import RunningServer, running_server, wait_until

TEXT = "the blue river has a stone. count to nine and say what you are."
PREDICATE = {"type": "predicate", "instructions": "Is the river blue?"}
ROUTE = {
    "type": "choice",
    "name": "route",
    "instructions": "Where does it go?",
    "choices": [{"value": "river"}, {"value": "stone", "description": "hard and grey"}, {"value": "blue river"}],
}
QUALITY = {
    "type": "score",
    "name": "quality",
    "instructions": "How good is it?",
    "levels": [{"label": "bad"}, {"label": "fine", "description": "no complaint"}, {"label": "good"}],
}
QUESTIONS: list[Any] = [PREDICATE, ROUTE, QUALITY]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(EngineConfig(kv_cache_bytes=32_000_000, max_num_seqs=16)) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with server.client(timeout=DEADLINE) as client:
        yield client
    server.wait_idle(DEADLINE)


def decide(server: RunningServer, path: str = "/v1/decisions", **body: Any) -> Any:
    with raw(server) as client:
        response = client.post(path, json={"model": "demo"} | body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(server: RunningServer, **body: Any) -> dict[str, Any]:
    with raw(server) as client:
        response = client.post("/v1/decisions", json={"model": "demo"} | body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert response.json()["detail"] == error["message"], "clients of mlx-vlm read this"
    return error


def of_choice(answer: Any) -> dict[Any, float]:
    return {(type(each["value"]).__name__, each["value"]): each["probability"] for each in answer["probabilities"]}


def plain_probabilities(prompt: str, answers: list[str], server: RunningServer) -> list[float]:
    """By mlx-lm's own model, each answer after the whole prompt."""
    model, _ = load_plain_model(DEMO_PATH)
    before, totals = tokens_of(server, prompt), []
    for answer in answers:
        tokens = tokens_of(server, answer)
        logits = np.array(model(mx.array([[*before, *tokens]]))[0].astype(mx.float32), dtype=np.float64)
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        totals.append(sum(logprobs[len(before) - 1 + i, token] for i, token in enumerate(tokens)))
    odds = np.exp(np.array(totals) - max(totals))
    return [float(each) for each in odds / odds.sum()]


def prompt_of(text: str, question: str) -> str:
    return (
        f"<|im_start|>system\n{INSTRUCTION}<|im_end|>\n"
        f"<|im_start|>user\nInput: {text}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


# -- answers ---------------------------------------------------------------------------------------------------------


def test_openais_client_parses_an_answer_of_each_type_in_order(client: OpenAI) -> None:
    decision = client.decisions.create(model="demo", input=TEXT, questions=QUESTIONS)
    predicate, route, quality = decision.answers
    assert predicate.type == "predicate"
    assert 0 <= predicate.probability <= 1
    assert predicate.name is None
    assert route.type == "choice"
    assert route.name == "route"
    assert [each.value for each in route.probabilities] == ["river", "stone", "blue river"]
    assert sum(each.probability for each in route.probabilities) == pytest.approx(1)
    best = max(route.probabilities, key=lambda each: each.probability)
    assert route.choice == best.value
    assert route.confidence == pytest.approx((3 * best.probability - 1) / 2)
    assert quality.type == "score"
    assert [(each.value, each.label) for each in quality.probabilities] == [(0, "bad"), (1, "fine"), (2, "good")]
    assert quality.score == pytest.approx(sum(each.value * each.probability for each in quality.probabilities))
    assert decision.model == "demo"
    usage = decision.usage
    assert usage.output_tokens == usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens
    details = usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == usage.input_tokens


def test_probabilities_are_those_of_whole_answers_after_the_rendered_conversation(server: RunningServer) -> None:
    question = "Options:\n- river\n- stone: hard and grey\n- blue stone\nQuestion: Where does it go?"
    choices = [{"value": "river"}, {"value": "stone", "description": "hard and grey"}, {"value": "blue stone"}]
    asked = {"type": "choice", "instructions": "Where does it go?", "choices": choices}
    method = {"calibration": "none", "orders": 1, "answers": "text"}
    [answer] = decide(server, input=TEXT, questions=[asked], **method)["answers"]
    expected = plain_probabilities(prompt_of(TEXT, question), ["river", "stone", "blue stone"], server)
    np.testing.assert_allclose(list(of_choice(answer).values()), expected, atol=1e-5)


def test_content_free_calibration_divides_by_what_an_empty_input_gives(server: RunningServer) -> None:
    texts = ["river", "stone"]
    asked = {"type": "choice", "instructions": "What?", "choices": [{"value": each} for each in texts]}
    question = "Options: river, stone\nQuestion: What?"
    own = plain_probabilities(prompt_of(TEXT, question), texts, server)
    free = plain_probabilities(prompt_of("", question), texts, server)
    ratio = [each / other for each, other in zip(own, free, strict=True)]
    for _ in range(2):  # the second time, the empty input is known
        [answer] = decide(server, input=TEXT, questions=[asked], calibration="content_free", orders=1)["answers"]
        np.testing.assert_allclose(list(of_choice(answer).values()), [each / sum(ratio) for each in ratio], atol=1e-4)


def test_two_orders_are_averaged_so_that_no_order_is_preferred(server: RunningServer) -> None:
    choices = [{"value": "river"}, {"value": "stone"}, {"value": "leaf"}]
    found = []
    for each in (choices, choices[::-1]):
        asked = {"type": "choice", "instructions": "What?", "choices": each}
        single = decide(server, input=TEXT, questions=[asked], orders=1, calibration="none")["answers"][0]
        both = decide(server, input=TEXT, questions=[asked], orders=2, calibration="none")["answers"][0]
        found.append((of_choice(single), of_choice(both)))
    (one, mean), (other, again) = found
    for value, probability in mean.items():
        assert probability == pytest.approx((one[value] + other[value]) / 2, abs=1e-5)
        assert probability == pytest.approx(again[value], abs=1e-5)


def test_symbols_are_letters_or_numbers_for_many_options(server: RunningServer) -> None:
    asked = {"type": "choice", "instructions": "What?", "choices": [{"value": "river"}, {"value": "stone"}]}
    question = "Options:\n- A: river\n- B: stone\nQuestion: What?"
    method = {"calibration": "none", "orders": 1, "answers": "symbol"}
    [answer] = decide(server, input=TEXT, questions=[asked], **method)["answers"]
    expected = plain_probabilities(prompt_of(TEXT, question), ["A", "B"], server)
    np.testing.assert_allclose(list(of_choice(answer).values()), expected, atol=1e-5)
    many = {"type": "choice", "instructions": "What?", "choices": [{"value": f"river {i}"} for i in range(100)]}
    [answer] = decide(server, input=TEXT, questions=[many], **method)["answers"]
    assert sum(of_choice(answer).values()) == pytest.approx(1)


def test_a_string_and_a_boolean_of_the_same_text_are_two_choices(client: OpenAI) -> None:
    values: list[Any] = [True, "true", False, "yes"]
    asked: Any = {"type": "choice", "instructions": "Is it?", "choices": [{"value": value} for value in values]}
    [answer] = client.decisions.create(model="demo", input=TEXT, questions=[asked]).answers
    assert answer.type == "choice"
    found = [each.value for each in answer.probabilities]
    assert [(type(each), each) for each in found] == [(type(each), each) for each in values]
    assert sum(each.probability for each in answer.probabilities) == pytest.approx(1)
    assert len({each.probability for each in answer.probabilities}) == 4


@pytest.mark.parametrize("count", [2, 100, 255])
def test_options_with_equal_beginnings_and_prefixes_of_others(client: OpenAI, count: int) -> None:
    values = ["stone" + " river" * (i % 5) + f" {i // 5}" * (i >= 5) for i in range(count)]
    asked: Any = {"type": "choice", "instructions": "What?", "choices": [{"value": value} for value in values]}
    [answer] = client.decisions.create(model="demo", input=TEXT, questions=[asked]).answers
    assert answer.type == "choice"
    assert [each.value for each in answer.probabilities] == values
    assert sum(each.probability for each in answer.probabilities) == pytest.approx(1)


def test_400_questions_are_answered_in_order(client: OpenAI) -> None:
    questions: list[Any] = [
        {"type": "predicate", "name": f"q{i}", "instructions": f"Is it number {i}?"} for i in range(400)
    ]
    answers = client.decisions.create(model="demo", input=TEXT, questions=questions).answers
    assert [answer.name for answer in answers] == [f"q{i}" for i in range(400)]
    alone = client.decisions.create(model="demo", input=TEXT, questions=questions[7:8]).answers
    assert answers[7].model_dump() == pytest.approx(alone[0].model_dump(), abs=1e-5)


def test_messages_calls_and_json_are_shown_to_the_model(client: OpenAI, server: RunningServer) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be fair."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Pay 3?"}, {"type": "input_json", "data": {"sum": 3}}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "phase": "commentary"},
        {"type": "function_call", "call_id": "c1", "name": "pay", "arguments": '{"sum": 3}', "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "paid"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noted"}]},
    ]
    with StepGate(server) as gate:
        asked: Any = [{"type": "predicate", "instructions": [{"type": "input_json", "data": [{"a": 1}]}]}]
        pending = Background.request(
            server, "POST", "/v1/decisions", json={"model": "demo", "input": items, "questions": asked}
        )
        wait_until(lambda: server.core.scheduler.sequences)
        [sequence, *_] = server.core.scheduler.sequences.values()
        assert server.engine.info is not None
        shown = server.engine.info.tokenizer.text_with_specials(sequence.token_ids[: sequence.num_prompt_tokens])
        gate.open()
        assert pending.result().status_code == 200
    places = [
        shown.find(each) for each in ("Be fair.", "Pay 3?", '{"sum": 3}', "I look.", "paid", "noted", '[{"a": 1}]')
    ]
    assert -1 not in places
    assert places == sorted(places)
    answer = client.decisions.create(model="demo", input=items, questions=QUESTIONS)
    assert [each.type for each in answer.answers] == ["predicate", "choice", "score"]


# -- mlx-vlm's dialect -----------------------------------------------------------------------------------------------


def test_an_object_of_questions_is_answered_as_mlx_vlm_does(server: RunningServer) -> None:
    questions = {
        "calm": {"type": "bool", "instructions": "Is the river calm?"},
        "what": {"instructions": "What is it?", "criteria": ["river", "stone"]},
        "why": {"type": "choice", "instructions": "Why?", "criteria": {"river": "it flows", "stone": None}},
        "good": {"type": "score", "instructions": "How good?", "criteria": ["bad", "fine", "good"]},
        "tags": {"type": "multi_label", "criteria": {"blue": "the colour", "grey": None}, "threshold": 0},
    }
    found = decide(server, state={"river": "blue", "stones": [1, 2]}, questions=questions)
    answers = found["answers"]
    assert list(answers) == list(questions)
    assert answers["calm"]["type"] == "bool"
    assert answers["calm"]["value"] == (answers["calm"]["probability"] >= 0.5)
    assert sum(answers["what"]["probabilities"].values()) == pytest.approx(1)
    assert answers["what"]["value"] == max(answers["what"]["probabilities"], key=answers["what"]["probabilities"].get)
    assert answers["what"]["metadata"]["confidence"] == max(answers["what"]["probabilities"].values())
    assert answers["good"]["metadata"]["legend"] == {"0": "bad", "1": "fine", "2": "good"}
    mean = sum(int(key) * p for key, p in answers["good"]["probabilities"].items())
    assert answers["good"]["value"] == pytest.approx(mean)
    assert answers["tags"]["value"] == ["blue", "grey"]
    assert all(0 <= each <= 1 for each in answers["tags"]["scores"].values())
    assert found["usage"]["input_tokens"] > 0


def test_both_dialects_read_the_same_probability(server: RunningServer) -> None:
    [one] = decide(server, input=TEXT, questions=[PREDICATE])["answers"]
    other = decide(server, state=TEXT, questions={"q": {"type": "bool", "instructions": PREDICATE["instructions"]}})
    assert other["answers"]["q"]["probability"] == pytest.approx(one["probability"], abs=1e-4)


# -- errors ----------------------------------------------------------------------------------------------------------

OPTION = {"value": "a"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": TEXT, "questions": []}, "questions"),
        ({"input": TEXT, "questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [PREDICATE]}, "input"),
        ({"input": [], "questions": [PREDICATE]}, "input"),
        ({"input": TEXT}, "questions"),
        ({"input": TEXT, "questions": [{"type": "guess", "instructions": "x"}]}, "questions.0"),
        ({"input": TEXT, "questions": [{"type": "predicate"}]}, "questions.0.instructions"),
        ({"input": TEXT, "questions": [{"type": "predicate", "instructions": " "}]}, "questions.0.instructions"),
        ({"input": TEXT, "questions": [PREDICATE, ROUTE | {"choices": [OPTION]}]}, "questions.1.choices"),
        ({"input": TEXT, "questions": [ROUTE | {"choices": [OPTION, OPTION]}]}, "questions.0.choices.1.value"),
        ({"input": TEXT, "questions": [ROUTE | {"choices": [OPTION, {"value": ""}]}]}, "questions.0.choices.1"),
        ({"input": TEXT, "questions": [ROUTE | {"choices": [OPTION, {"value": 3}]}]}, "questions.0.choices.1.value"),
        (
            {"input": TEXT, "questions": [ROUTE | {"choices": [{"value": str(i)} for i in range(256)]}]},
            "questions.0.choices",
        ),
        ({"input": TEXT, "questions": [QUALITY | {"levels": []}]}, "questions.0.levels"),
        ({"input": TEXT, "questions": [QUALITY | {"levels": [{"label": "a"}]}]}, "questions.0.levels"),
        ({"input": TEXT, "questions": [QUALITY | {"levels": [{"label": "a"}] * 2}]}, "questions.0.levels.1"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}], "questions": [PREDICATE]},
            "input.0.call_id",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_json", "data": 3}]}], "questions": [PREDICATE]},
            "input.0.content.0.data",
        ),
        ({"input": [{"type": "reasoning", "summary": []}], "questions": [PREDICATE]}, "input.0"),
        ({"input": TEXT, "state": "x", "questions": [PREDICATE]}, "state"),
        ({"input": TEXT, "questions": [PREDICATE], "orders": 3}, "orders"),
        ({"input": TEXT, "questions": [PREDICATE], "calibration": "some"}, "calibration"),
        ({"input": TEXT, "questions": [PREDICATE], "stream": True}, "stream"),
        ({"input": "river " * 4000, "questions": [PREDICATE]}, "input"),
        ({"input": TEXT, "questions": [PREDICATE | {"instructions": "river " * 4000}]}, "questions.0"),
        ({"state": TEXT, "questions": {}}, "questions"),
        ({"questions": {"q": {"type": "bool"}}}, "state"),
        ({"input": TEXT, "questions": {"q": {"type": "bool"}}}, "input"),
        ({"state": TEXT, "questions": {"q": {"type": "choice", "criteria": ["a"]}}}, "questions.q.criteria"),
        ({"state": TEXT, "questions": {"q": {"type": "choice", "criteria": ["a", "a"]}}}, "questions.q.criteria.1"),
        ({"state": TEXT, "questions": {"q": {"type": "score", "criteria": []}}}, "questions.q.criteria"),
        ({"state": TEXT, "questions": {"q": {"type": "guess"}}}, "questions.q"),
        (
            {"state": TEXT, "questions": {"q": {"type": "multi_label", "criteria": ["a"], "threshold": 2}}},
            "questions.q.threshold",
        ),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(
    server: RunningServer, body: dict[str, Any], param: str
) -> None:
    error = refusal(server, **body)
    assert error["param"] is not None
    assert f"{error['param']}.".startswith(f"{param}."), error
    assert error["type"] == "invalid_request_error"


def test_json_beyond_openais_limits_is_refused(server: RunningServer) -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"a": deep}
    for data in (deep, {"a": list(range(10_001))}, {"a": "x" * 300_000}):
        items = [{"role": "user", "content": [{"type": "input_json", "data": data}]}]
        assert refusal(server, input=items, questions=[PREDICATE])["code"] == "json_too_large"


def test_an_image_is_refused_by_a_model_that_does_not_see(client: OpenAI) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    asked: Any = {"type": "predicate", "instructions": [{"type": "input_text", "text": "Is it red?"}, image]}
    with pytest.raises(BadRequestError) as error:
        client.decisions.create(model="demo", input=TEXT, questions=[PREDICATE, asked])
    assert error.value.param == "questions.1.instructions.1"
    items: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(BadRequestError) as error:
        client.decisions.create(model="demo", input=items, questions=[PREDICATE])
    assert error.value.param == "input.0.content.0"


# -- in the engine ---------------------------------------------------------------------------------------------------


def test_the_input_is_computed_once_for_all_questions_and_found_again(server: RunningServer) -> None:
    text = " ".join(f"stone {i} river" for i in range(200))
    questions = [{"type": "predicate", "instructions": f"Is {i} in it?"} for i in range(40)]

    def computed(asked: list[Any]) -> float:
        before = metrics(server)
        used = decide(server, input=text, questions=asked, calibration="none", orders=1)["usage"]
        after = metrics(server)
        prompt, hits = (
            after[name] - before[name] for name in ("mlxpaged_prompt_tokens_total", "mlxpaged_prefix_hit_tokens_total")
        )
        assert prompt >= used["input_tokens"]
        return prompt - hits

    own = 64  # tokens of a question, with the instruction and the ends of messages
    block = server.core.scheduler.config.block_size
    assert computed(questions) <= len(tokens_of(server, text)) + 40 * (own + block)
    assert computed(questions) <= 40 * 2 * block, "all but the last blocks are found"
    assert computed(questions[:1]) <= 2 * block


def test_questions_with_the_same_options_share_them(server: RunningServer) -> None:
    choices = [{"value": f"river {i}", "description": "a stone " * 8} for i in range(8)]
    questions = [{"type": "choice", "instructions": f"Is {i} in it?", "choices": choices} for i in range(20)]
    before = metrics(server)
    decide(server, input=TEXT, questions=questions, calibration="none", orders=1, answers="symbol")
    after = metrics(server)
    prompt, hits = (
        after[name] - before[name] for name in ("mlxpaged_prompt_tokens_total", "mlxpaged_prefix_hit_tokens_total")
    )
    options = len(tokens_of(server, "\n- A: river 0: " + "a stone " * 8)) * 8
    assert prompt > 20 * options
    assert prompt - hits < 2 * options + 20 * 32, "the options once, and less than a block for each question"


def test_few_rows_are_in_the_engine_at_once(server: RunningServer) -> None:
    """So other requests get between them."""
    questions = [{"type": "predicate", "instructions": f"Is {i} in it?"} for i in range(300)]
    most = 0
    with StepGate(server) as gate:
        pending = Background.request(
            server, "POST", "/v1/decisions", json={"model": "demo", "input": TEXT, "questions": questions}
        )
        wait_until(lambda: server.engine.num_unfinished)
        most = server.engine.num_unfinished
        gate.open()
        assert len(pending.result().json()["answers"]) == 300
    config = server.engine.config
    assert most <= (config.max_num_seqs + config.max_queue) // 2 < 300


def test_a_cancelled_request_leaves_nothing(server: RunningServer) -> None:
    """Its input takes two steps."""
    with StepGate(server) as gate:
        pending = Background.request(
            server,
            "POST",
            "/v1/decisions",
            json={"model": "demo", "input": "a stone " * 700, "questions": QUESTIONS},
            headers={"X-Request-Id": "mine"},
        )
        assert within_one_step(server, gate, "DELETE", "/v1/requests/mine").status_code == 200
        gate.open()
        assert pending.result().json()["error"]["code"] == "request_cancelled"
    server.wait_idle(DEADLINE)


def test_a_request_is_cancelled_between_two_of_its_waves(server: RunningServer) -> None:
    """None of its sequences is in the engine then."""
    begun, goes_on = list[None](), threading.Event()

    async def start_second_late(*args: Any, **options: Any) -> Any:
        begun.append(None)
        while len(begun) == 2 and not goes_on.is_set():
            await asyncio.sleep(0.01)
        return await start(*args, **options)

    body = {"model": "demo", "input": "a stone " * 50, "questions": QUESTIONS}
    with (
        mock.patch.object(readout_waves, "LEAST_SAVED", 1),
        mock.patch.object(readout, "start", start_second_late),
        raw(server) as client,
    ):
        pending = Background.request(server, "POST", "/v1/decisions", json=body, headers={"X-Request-Id": "mine"})
        wait_until(lambda: len(begun) == 2)
        assert not server.engine.num_unfinished
        cancelled = client.delete("/v1/requests/mine")
        assert (cancelled.status_code, cancelled.json()["cancelled"]) == (200, True)
        goes_on.set()
        assert pending.result().json()["error"]["code"] == "request_cancelled"
        assert client.delete("/v1/requests/mine").status_code == 404
    assert len(begun) == 2
    server.wait_idle(DEADLINE)


def test_priority_and_deadline_are_those_of_the_request(server: RunningServer) -> None:
    with StepGate(server) as gate:
        body = {"model": "demo", "input": TEXT, "questions": QUESTIONS, "service_tier": "flex", "timeout": 1000}
        pending = Background.request(server, "POST", "/v1/decisions", json=body)
        wait_until(lambda: server.core.scheduler.sequences)
        sequences = list(server.core.scheduler.sequences.values())
        assert {each.priority for each in sequences} == {Priority.LOW}
        assert all(math.isfinite(each.deadline) for each in sequences)
        gate.open()
        assert pending.result().status_code == 200


def test_a_deadline_is_that_of_all_rows_together() -> None:
    """They run one after the other here."""
    clock = FakeClock()
    config = EngineConfig(kv_cache_bytes=16_000_000, max_num_seqs=1, max_queue=1)
    with running_server(config, clock=clock) as server, StepGate(server) as gate:
        body = {"model": "demo", "input": TEXT, "questions": QUESTIONS, "timeout": 30}
        pending = Background.request(server, "POST", "/v1/decisions", json=body)
        gate.wait_held()
        clock.now += 20
        gate.allow(1)
        gate.wait_held()
        clock.now += 15
        gate.open()
        assert pending.result().status_code == 408
        assert pending.result().json()["error"]["code"] == "deadline_exceeded"


def test_a_prompt_cache_key_keeps_prefixes_apart(server: RunningServer) -> None:
    text = "a leaf on a hill " * 12

    def cached(key: str | None) -> int:
        body = {"input": text, "questions": [PREDICATE], "prompt_cache_key": key}
        return int(decide(server, **body)["usage"]["input_tokens_details"]["cached_tokens"])

    first = cached("one")
    assert cached("one") > first
    assert cached("two") == first


def test_a_key_is_needed_where_the_server_has_keys(tmp_path: Path) -> None:
    key = write_keys(tmp_path / "keys.json", anna={})["anna"]
    config = EngineConfig(kv_cache_bytes=16_000_000)
    with running_server(config, http=HttpConfig(api_keys=tmp_path / "keys.json")) as server, raw(server) as client:
        body = {"input": TEXT, "questions": [PREDICATE]}
        assert client.post("/v1/decisions", json=body).status_code == 401
        answer = client.post("/v1/decisions", json=body, headers=bearer(key))
        assert answer.status_code == 200
        assert client.post("/v1/systemone", json={}).json().keys() == {"error"}


def test_the_input_counts_once_against_the_limit_of_a_key(tmp_path: Path) -> None:
    key = write_keys(tmp_path / "keys.json", anna={"tokens_per_minute": 100_000})["anna"]
    config, clock = EngineConfig(kv_cache_bytes=16_000_000), FakeClock()
    questions = [{"type": "predicate", "instructions": f"Is {i} in it?"} for i in range(50)]
    with (
        running_server(config, clock=clock, http=HttpConfig(api_keys=tmp_path / "keys.json")) as server,
        raw(server) as client,
    ):
        body = {"input": "a stone " * 300, "questions": questions, "calibration": "none", "orders": 1}
        used = client.post("/v1/decisions", json=body, headers=bearer(key)).json()["usage"]["input_tokens"]
        left = int(client.post("/tokenize", json={}, headers=bearer(key)).headers["x-ratelimit-remaining-tokens"])
        assert used < 100_000 - left < 50 * 300


def test_a_model_says_that_it_decides(server: RunningServer) -> None:
    with raw(server) as client:
        assert client.get("/v1/models/demo").json()["capabilities"]["decisions"] is True
