"""Structured output over HTTP, with the official client: every kind, every way of asking, beside plain requests."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from dataclasses import replace
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from mlxpaged.api import server as api_server
from mlxpaged.core.engine.constraint import GrammarError, StructuredOutput, ToolCallForm
from mlxpaged.formats.pieces import Json
from mlxpaged.parts.grammar import grammar
from mlxpaged.parts.grammar.grammar import Grammars
from tests.api.helpers import (
    DEADLINE,
    Background,
    answer_text,
    ask,
    check_failure,
    post,
    random_tokens,
    run_on,
    stream_at_once,
)
from tests.support import RunningServer, wait_until

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}

LARK = """
start: key "=" value
key: /[a-c]{1,4}/
value: NUMBER | "none"
NUMBER: /[0-9]{1,3}/
"""

KINDS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
    ({"structured_outputs": {"regex": "(ab|cd/){2,3}"}}, r"(ab|cd/){2,3}"),
    ({"guided_choice": ["yes", "no", "perhaps"]}, r"yes|no|perhaps"),
    ({"structured_outputs": {"choice": ['say "x"\n', "ü😀"]}}, 'say "x"\n|ü😀'),
    ({"guided_grammar": LARK}, r"[a-c]{1,4}=([0-9]{1,3}|none)"),
    ({"structured_outputs": {"grammar": 'root ::= "<" [x-z] ">" | "<>"'}}, r"<[x-z]?>"),
    ({"guided_json": {"type": "boolean"}}, r"true|false"),
    ({"guided_json": '{"enum": [1, "b"]}'}, r'1|"b"'),
    ({"structured_outputs": {"json": {"const": None}}}, r"null"),
]


def schema_format(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | fields}


@pytest.mark.parametrize(("fields", "pattern"), KINDS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_every_kind_holds_the_answer_on_both_routes(
    client: OpenAI, fields: dict[str, Any], pattern: str, temperature: float
) -> None:
    options: dict[str, Any] = {"model": "demo", "temperature": temperature, "seed": 5, "extra_body": fields}
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "Add: 4 plus 5"}], n=2, **options)
    plain = client.completions.create(prompt="Once upon", max_tokens=40, n=2, **options)
    answers = [(c.message.content or "", c.finish_reason) for c in chat.choices]
    answers += [(c.text, c.finish_reason) for c in plain.choices]
    for text, reason in answers:
        assert re.fullmatch(pattern, text), text
        assert reason == "stop"


def test_json_object_is_an_object(server: RunningServer) -> None:
    pending = [
        Background.post(
            server,
            "/v1/chat/completions",
            ask("Who are you?", temperature=1, seed=seed, max_tokens=120, **fields),
        )
        for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}})
        for seed in range(2)
    ]
    for request in pending:
        [choice] = request.result().json()["choices"]
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
        else:
            assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_enforced_strict_or_not(client: OpenAI, strict: bool | None) -> None:
    completion = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Who are you?"}],
        response_format=schema_format(PERSON, strict=strict),  # type: ignore[arg-type]
        seed=0,
    )
    jsonschema.validate(json.loads(completion.choices[0].message.content or ""), PERSON)


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: Annotated[int, Field(ge=1, le=99)]


class Square(BaseModel):
    kind: Literal["square"]
    side: Annotated[int, Field(ge=1, le=99)]


class Drawing(BaseModel):
    title: Annotated[str, Field(max_length=10)]
    shape: Annotated[Circle | Square, Field(discriminator="kind")]
    scale: Literal[1, 2, 3] | None


def test_the_client_parses_answers_into_pydantic_models(client: OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": "Reverse: red blue"}],
        response_format=Drawing,
        seed=0,
        n=2,
    )
    for choice in completion.choices:
        assert isinstance(choice.message.parsed, Drawing)


def test_a_stream_of_several_answers_each_fits(client: OpenAI) -> None:
    texts, reasons = ["", "", ""], {}
    pieces = 0
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Repeat: blue river"}],
        response_format=schema_format(PERSON),  # type: ignore[arg-type]
        stream=True,
        temperature=1,
        seed=1,
        n=3,
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            pieces += bool(choice.delta.content)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) == 3
    assert pieces > 10
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}


def test_a_seeded_answer_is_the_same_alone_and_among_several(client: OpenAI) -> None:
    def texts(n: int, seed: int) -> list[str]:
        fields = {"guided_regex": "[a-z0-9]{20}"}
        options: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 60, "seed": seed}
        return [choice.text for choice in client.completions.create(n=n, extra_body=fields, **options).choices]

    assert texts(3, 7) == [*texts(1, 7), *texts(1, 8), *texts(1, 9)]


def test_log_probabilities_are_the_models_own(demo_server: RunningServer) -> None:
    """Those before the constraint: what it wanted to say first is among them, even if the constraint forbids it."""
    free = post(demo_server, ask("Repeat: blue river", logprobs=True, top_logprobs=2, max_tokens=1))
    held = post(demo_server, ask("Repeat: blue river", logprobs=True, top_logprobs=2, guided_choice=["no"]))
    [first, *_] = held["choices"][0]["logprobs"]["content"]
    [wanted] = free["choices"][0]["logprobs"]["content"]
    assert held["choices"][0]["message"]["content"] == "no"
    assert "".join(entry["token"] for entry in held["choices"][0]["logprobs"]["content"]) == "no"
    assert [each["token"] for each in first["top_logprobs"]] == [each["token"] for each in wanted["top_logprobs"]]
    assert [each["logprob"] for each in first["top_logprobs"]] == pytest.approx(
        [each["logprob"] for each in wanted["top_logprobs"]], abs=1e-3
    )
    assert first["logprob"] < -1


def test_best_of_picks_among_constrained_answers(client: OpenAI) -> None:
    completion = client.completions.create(
        model="demo", prompt="x", best_of=4, n=2, seed=1, extra_body={"guided_choice": ["one", "two", "three"]}
    )
    assert all(choice.text in ("one", "two", "three") for choice in completion.choices)


# -- where an answer ends ------------------------------------------------------------------------------------------


def test_max_tokens_cuts_an_answer_short(client: OpenAI) -> None:
    completion = client.completions.create(
        model="demo", prompt="x", max_tokens=5, extra_body={"guided_regex": "(ab){50}"}, temperature=0
    )
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].text != "ab" * 50
    assert ("ab" * 50).startswith(completion.choices[0].text)


def test_an_answer_complete_at_its_last_token_has_stopped(demo_server: RunningServer) -> None:
    answer = post(demo_server, run_on("x", 3, guided_regex="[0-9]{3}", ignore_eos=False))
    assert re.fullmatch("[0-9]{3}", answer["choices"][0]["text"])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3


def test_a_stop_string_ends_an_answer_before_its_constraint_does(demo_server: RunningServer) -> None:
    answer = post(demo_server, run_on("x", 40, guided_regex="ab=(cd){9}", stop="c"))
    assert answer["choices"][0]["text"] == "ab="
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_ignore_eos_and_min_tokens_end_where_nothing_can_follow(demo_server: RunningServer) -> None:
    """But not before: of what may end or go on, the answer goes on."""
    for fields in ({"ignore_eos": True}, {"ignore_eos": False, "min_tokens": 20}):
        answer = post(demo_server, run_on("x", 40, guided_regex="7{1,4}", **fields))
        assert answer["choices"][0]["text"] == "7777"
        assert answer["choices"][0]["finish_reason"] == "stop"
    answer = post(
        demo_server, run_on("x", 40, guided_regex="7*", ignore_eos=False, min_tokens=6, logit_bias={"2": 100})
    )
    assert len(answer["choices"][0]["text"]) >= 6


def test_bias_and_penalties_choose_within_the_constraint(demo_server: RunningServer) -> None:
    digits = {digit: demo_server.engine.info.tokenizer.encode(digit)[-1] for digit in "38"}
    for digit, token in digits.items():
        fields = {"guided_regex": "[0-9]{4}", "logit_bias": {str(token): 100}}
        assert answer_text(demo_server, run_on("x", 20, **fields)) == digit * 4
    fields = {"guided_regex": "[0-9]{8}", "frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 10}
    assert len(set(answer_text(demo_server, run_on("x", 20, **fields)))) > 3


# -- with others ---------------------------------------------------------------------------------------------------


def test_plain_answers_beside_constrained_ones_are_those_alone(demo_server: RunningServer) -> None:
    plain = [run_on(random_tokens(40, seed), 26, **extra) for seed in range(2) for extra in ({}, {"seed": seed})]
    for i, body in enumerate(plain):
        body["temperature"] = i % 2
    alone = [answer_text(demo_server, body) for body in plain]
    held = [run_on("x", 52, guided_json=PERSON, temperature=1, seed=i) for i in range(2)]
    mixed = stream_at_once(demo_server, [*plain[:2], *held, *plain[2:]])
    assert mixed[:2] + mixed[4:] == alone
    for text in mixed[2:4]:
        assert text.startswith("{")
    assert mixed[2:4] == [answer_text(demo_server, body) for body in held]


# -- refusals ------------------------------------------------------------------------------------------------------


def doubled(times: int, first: str) -> str:
    """A grammar whose start is 2^times times `first`."""
    rules = [f"r{i}: r{i - 1} r{i - 1}" for i in range(1, times + 1)]
    return "\n".join([f"start: r{times}", f"r0: {first}", *rules]) + "\n"


def optional_properties(count: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"p{i}": {"enum": [i]} for i in range(count)},
        "additionalProperties": False,
    }


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": schema_format({"not": {}})}, "response_format.json_schema.schema", "not"),
    ({"response_format": schema_format({"type": "objct"})}, "response_format.json_schema.schema", "objct"),
    (
        {"response_format": schema_format({"oneOf": [{"type": "integer"}, {"type": "number"}]}, strict=True)},
        "response_format.json_schema.schema",
        "oneOf",
    ),
    (
        {"response_format": schema_format({"type": "object", "x-guidance": {"lenient": True}, "not": {}})},
        "response_format.json_schema.schema",
        "not",
    ),
    ({"guided_json": {"$ref": "http://localhost/x.json"}}, "guided_json", "'$ref' cannot be enforced"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "no text matches it"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_json": "[]"}, "guided_json", "must be a JSON object"),
    ({"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000}, "guided_json", "nested too deeply"),
    ({"structured_outputs": {"json": '{"items":' * 150 + "{}" + "}" * 150}}, "structured_outputs.json", "too deeply"),
    ({"guided_json": {"enum": ["x" * 140_000]}}, "guided_json", "the limit is 131072"),
    ({"guided_json": {"items": {"pattern": "ab" * 5000}}}, "guided_json", "patterns of 10000 characters"),
    ({"guided_json": {"allOf": [{"multipleOf": p} for p in (1009, 1013)]}}, "guided_json", "multipleOf is above 10000"),
    ({"guided_regex": "[a-z"}, "guided_regex", "unclosed character class"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"structured_outputs": {"regex": "a?" * 5000}}, "structured_outputs.regex", "the limit is 8192"),
    ({"guided_regex": "(){0}"}, "guided_regex", "empty text"),
    ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar", "missing"),
    ({"guided_grammar": "root ::= ((("}, "guided_grammar", "GBNF"),
    ({"guided_grammar": 'start: "a" start'}, "guided_grammar", "Too many items"),
    ({"guided_grammar": doubled(20, '"a"')}, "guided_grammar", "Too many items"),
    ({"guided_grammar": doubled(20, '"a"?')}, "guided_grammar", ""),
    ({"guided_grammar": f"start: /{'.?' * 1001}/"}, "guided_grammar", "with 1001 optional parts; the limit is 1000"),
    ({"guided_regex": ".?" * 4000}, "guided_regex", "with 4000 optional parts"),
    ({"guided_regex": "(|.)" * 1001}, "guided_regex", "with 1001 optional parts"),
    ({"guided_json": {"items": {"pattern": ".?" * 1001}}}, "guided_json", "with 1001 optional parts"),
    ({"guided_regex": "((a{1,100}){1,100}){1,100}"}, "guided_regex", "too many expressions"),
    ({"guided_json": optional_properties(1100)}, "guided_json", "max is 4000"),
    ({"guided_grammar": "start: " + "(" * 900 + '"a"' + ")" * 900}, "guided_grammar", "nested"),
]


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    client: OpenAI, fields: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], extra_body=fields, max_tokens=1
        )
    assert refusal.value.param == param
    assert reason in refusal.value.message, refusal.value.message
    assert refusal.value.code == "unsupported_constraint"


def test_a_request_has_one_constraint(client: OpenAI) -> None:
    both = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    with pytest.raises(openai.BadRequestError, match="cannot be combined with response_format") as refusal:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}], extra_body=both)
    assert refusal.value.param == "guided_regex"


def test_a_slow_constraint_is_given_up_and_holds_no_other_request_up(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that compile for ever: they are refused, a third gets a 503. Plain requests are answered meanwhile, and one
    whose constraint is known."""
    turns = demo_server.app.state.server.grammar_turns
    monkeypatch.setattr(turns, "rules", replace(turns.rules, free_seconds=math.inf))  # however slow the machine is
    release, compiles = threading.Event(), threading.Semaphore(0)
    grammars = demo_server.core.grammars
    assert isinstance(grammars, Grammars)
    compiling = grammars.compile_here

    def slow(constraint: Any, is_checked: bool) -> Any:
        if constraint.text.startswith("slow"):
            compiles.release()
            release.wait(DEADLINE)
        return compiling(constraint, is_checked)

    monkeypatch.setattr(grammars, "compile_here", slow)

    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=demo_server.url, timeout=DEADLINE, trust_env=False, verify=False) as http:

            def send(**fields: Any) -> Any:
                return asyncio.ensure_future(http.post("/v1/completions", json=run_on("x", 2, **fields)))

            async def send_slow(first: int) -> list[Any]:
                slow = [send(guided_regex=f"slow{first + i}") for i in range(2)]
                for _ in slow:
                    assert await asyncio.to_thread(compiles.acquire, timeout=DEADLINE)
                return slow

            first = await send(guided_regex="known")
            slow = await send_slow(0)
            plain, known = await send(), await send(guided_regex="known")
            assert not any(request.done() for request in slow)
            assert known.json()["choices"] == first.json()["choices"]
            release.set()
            assert [answer.status_code for answer in await asyncio.gather(*slow)] == [200, 200]
            release.clear()
            monkeypatch.setattr(api_server, "COMPILE_SECONDS", 0.3)
            slow = await send_slow(2)
            other = await send(guided_regex="fast")
            return [*await asyncio.gather(*slow), other, plain]

    try:
        *slow_answers, other, plain = asyncio.run(together())
    finally:
        release.set()
    assert [answer.status_code for answer in slow_answers] == [400, 400]
    assert slow_answers[0].json()["error"]["param"] == "guided_regex"
    assert "to compile" in slow_answers[0].json()["error"]["message"]
    assert (other.status_code, other.json()["error"]["code"]) == (503, "engine_busy")
    assert plain.status_code == 200
    demo_server.wait_idle()


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_json": optional_properties(900)}, r"\{.*"),
        ({"guided_grammar": "\n".join(f'r{i}: "a"? r{i + 1}' for i in range(800)) + '\nr800: "b"\nstart: r0'}, "a*b"),
        ({"guided_regex": "(.?x){400}"}, r"[^\n]*"),
    ],
)
def test_what_is_large_and_can_go_on_is_answered(
    demo_server: RunningServer, fields: dict[str, Any], pattern: str
) -> None:
    assert re.fullmatch(pattern, answer_text(demo_server, run_on("x", 8, **fields)))


def test_a_form_that_cannot_go_on_after_the_thinking_is_refused(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole answer may begin in other ways. So no trial of the whole finds this."""
    monkeypatch.setattr(grammar, "PARTS_SECONDS", DEADLINE)
    call = ToolCallForm(("<call>", Json('{"$ref": "#"}'), "</call>"), "tools.0")
    form = StructuredOutput("never", "", "", "free", "<call>", (call,))
    with pytest.raises(GrammarError, match="no text matches it") as refusal:
        demo_server.core.grammars.compile(form)
    assert refusal.value.param == "tools.0"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_grammar_becomes_too_complex_ends_with_an_error_and_the_others_go_on(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(grammar, "TRIAL_TOKENS", 0)
    branches = [{"type": "object", "properties": {"a": {"maxLength": i}, f"b{i}": {}}} for i in range(500)]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": branches}, "description": str(stream)}
    bomb = Background.post(demo_server, "/v1/completions", run_on("x", 400, guided_json=schema, stream=stream))
    plain = run_on(random_tokens(20, 1), 30)
    answer_text(demo_server, plain)
    error = check_failure(bomb, 400, "invalid_request_error", "constraint_failed")
    assert "cannot be continued within its constraint" in error["message"]
    wait_until(lambda: demo_server.engine.num_unfinished == 0)
