"""Bad input gets a 4xx in OpenAI's format that names the field, and disturbs no other request."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from mlxpaged.api.body import validate
from mlxpaged.api.endpoints import ENDPOINTS
from mlxpaged.api.errors import ApiError
from mlxpaged.api.reading import Reading
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import Background, StepGate, answer_text, ask, block_bytes, random_tokens, raw, raw_post, run_on
from tests.support import RunningServer, demo_vocab_size, running_server, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MIB = 1024 * 1024
Case = tuple[str, Any, int, str]
"""Path, body (a JSON value, or bytes), status, what `param` or the message must name."""

COMMON: list[tuple[str, Any]] = [
    ("model", 3),
    ("model", ["demo"]),
    ("max_tokens", -2),
    ("max_tokens", "twelve"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("temperature", 9),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("top_p", -0.1),
    ("top_p", 1.5),
    ("top_p", []),
    ("top_k", -2),
    ("top_k", "all"),
    ("min_p", 2),
    ("min_p", {}),
    ("repetition_penalty", -1),
    ("repetition_context_size", 1),
    ("presence_context_size", 20),
    ("repetition_penalty", False),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("frequency_penalty", "x"),
    ("logit_bias", []),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", {"99999999": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"²": 1}),
    ("seed", 2**64),
    ("seed", "one"),
    ("seed", 1.5),
    ("stop", 3),
    ("stop", ["a", 3]),
    ("stop", ["x"] * 17),
    ("stop", "x" * 1025),
    ("stop_token_ids", "1"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**9]),
    ("stop_token_ids", [10**30]),
    ("ignore_eos", "yes"),
    ("speculative", 9),
    ("speculative", -1),
    ("speculative", "ngram"),
    ("speculative", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 2),  # more than max_tokens, which is 1
    ("min_tokens", "one"),
    ("stream", "true"),
    ("stream", 1),
    ("stream_options", {"include_usage": "x"}),
    ("stream_options", 1),
    ("n", 17),
    ("n", 0),
    ("n", -1),
    ("n", "one"),
    ("n", 1.5),
    ("n", True),
    ("service_tier", ["flex"]),
    ("service_tier", "priority"),
    ("service_tier", 1),
    ("timeout", 0),
    ("timeout", -1),
    ("timeout", "soon"),
    ("timeout", True),
    ("timeout", float("nan")),
    ("timeout", float("inf")),
    ("ttft_timeout", 0),
    ("ttft_timeout", [1]),
    ("ttft_timeout", 10**400),
    ("guided_json", "{"),
    ("guided_json", "3"),
    ("guided_json", 3),
    ("guided_json", {"not": {}}),
    ("guided_regex", "[a"),
    ("guided_regex", ""),
    ("guided_regex", "a" * 10_000),
    ("guided_choice", []),
    ("guided_choice", [""]),
    ("guided_choice", "yes"),
    ("guided_grammar", "start: nothing"),
    ("structured_outputs", {}),
    ("structured_outputs", {"json_object": False}),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}),
    ("structured_outputs", {"structural_tag": "{}"}),
    ("logits_processors", ["p"]),
    ("extra_body", {"top_k": 1}),
    ("lora", [{"id": 0}]),
]

ONLY_CHAT: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", None),
    ("messages", "hi"),
    ("messages", {}),
    ("messages", [None]),
    ("messages", ["hi"]),
    ("messages", [{}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": 3}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 3}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
    ("messages", [{"role": "king", "content": "x"}]),
    ("messages", [{"role": "user", "content": "x", "tool_call_id": "1"}]),
    ("messages", [{"role": 3, "content": "x"}]),
    ("messages", [{"role": "user", "content": "x"}, {"role": "assistant", "audio": "a"}]),
    ("max_completion_tokens", -2),
    ("max_completion_tokens", "x"),
    ("logprobs", 3),
    ("logprobs", "yes"),
    ("top_logprobs", 21),
    ("top_logprobs", 2),
    ("top_logprobs", -1),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objct"}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
    ("response_format", {"type": "text", "json_schema": {"name": "x", "schema": {}}}),
    ("tool_choice", "required"),
    ("modalities", []),
    ("modalities", ["text", "audio"]),
    ("best_of", 2),
]

ONLY_COMPLETIONS: list[tuple[str, Any]] = [
    ("prompt", ""),
    ("prompt", None),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", ["a", ""]),
    ("prompt", [[]]),
    ("prompt", [[1], []]),
    ("prompt", 3),
    ("prompt", {}),
    ("prompt", [1, "a"]),
    ("prompt", ["a", 1]),
    ("prompt", [["a"]]),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", [-1]),
    ("prompt", [10**9]),
    ("prompt", [2**31]),
    ("prompt", [2**70]),
    ("prompt", [[1], [10**9]]),
    ("prompt", ["a"] * 129),
    ("prompt", [1] * 5000),
    ("logprobs", True),
    ("logprobs", 21),
    ("logprobs", -1),
    ("echo", "yes"),
    ("best_of", 17),
    ("best_of", 0),
    ("best_of", "two"),
    ("suffix", "x"),
]

NOT_JSON: dict[str, bytes] = {
    "empty": b"",
    "blank": b"  \n ",
    "text": b"hello",
    "cut": b'{"model": "demo", "messages": [{"role": "us',
    "trailing": b'{"model": "demo"} x',
    "comma": b'{"model": "demo",}',
    "single quotes": b"{'model': 'demo'}",
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "half a character": '{"model": "é'.encode()[:-1],
    "UTF-16": '{"model": "demo"}'.encode("utf-16"),
    "lone surrogate": b'{"model": "\\ud800"}',
    "trailing surrogate": b'{"model": "\\udc00x"}',
    "NUL": b"\x00" * 100,
    "deep list": b"[" * 100_000,
    "deep object": b'{"messages":' * 50_000,
    "deep and closed": b'{"messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "number": b"3",
    "string": b'"x"',
    "null": b"null",
    "list": b"[]",
    "huge number": b'{"max_tokens": 1' + b"0" * 5000 + b"}",
    "NaN": b"NaN",
    "form": b"model=demo&prompt=x",
    "empty object": b"{}",
}


def check_error(response: httpx.Response, status: int, named: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["message"], str)
    assert named in f"{error['param']} {error['message']}"
    return error


def body_with(path: str, field: str, value: Any) -> bytes:
    body = ask("x", max_tokens=1) if path == CHAT else run_on("x", 1)
    body |= {"presence_penalty": 1} if field == "presence_context_size" else {}
    return json.dumps(body | {field: value}).encode()  # NaN and Infinity included


FIELD_CASES = [
    *[(path, field, value) for path in (CHAT, COMPLETIONS) for field, value in COMMON],
    *[(CHAT, field, value) for field, value in ONLY_CHAT],
    *[(COMPLETIONS, field, value) for field, value in ONLY_COMPLETIONS],
]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    FIELD_CASES,
    ids=[f"{path.split('/')[2]}-{field}-{i}" for i, (path, field, _) in enumerate(FIELD_CASES)],
)
def test_a_bad_field_is_refused_by_name(demo_server: RunningServer, path: str, field: str, value: Any) -> None:
    with raw(demo_server) as client:
        response = client.post(path, content=body_with(path, field, value))
    no_json = isinstance(value, float) and not math.isfinite(value)  # the parser refuses it, without a field
    error = check_error(response, 400, "" if no_json else field)
    assert len(error["message"]) < 1000
    assert not no_json or "not valid JSON" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_a_body_that_is_no_request_is_refused(demo_server: RunningServer, path: str, content: bytes) -> None:
    with raw(demo_server) as client:
        error = check_error(client.post(path, content=content), 400, "")
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_model_is_not_found(demo_server: RunningServer, path: str) -> None:
    with raw(demo_server) as client:
        error = check_error(client.post(path, content=body_with(path, "model", "gpt-4")), 404, "model")
    assert error["code"] == "model_not_found"
    assert "demo" in error["message"]


def test_claude_code_is_told_how_to_name_the_model(demo_server: RunningServer) -> None:
    body = {"model": "claude-sonnet-4-5", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    with raw(demo_server) as client:
        answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 404
    assert "`ANTHROPIC_MODEL=demo`" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", [{"model": "m" * 100_000}, {"f" * 100_000: 1}, {"logit_bias": {"x" * 100_000: 1}}])
def test_what_the_client_sent_is_not_echoed_at_length(demo_server: RunningServer, field: dict[str, Any]) -> None:
    with raw(demo_server) as client:
        response = client.post(COMPLETIONS, json=run_on("x", 1) | field)
    assert response.status_code in ((200,) if "f" * 100_000 in field else (400, 404))
    assert len(response.content) + len(str(response.headers)) < 2000


def test_the_path_to_a_bad_value_is_named(demo_server: RunningServer) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": 3}]}]
    with raw(demo_server) as client:
        response = client.post(CHAT, json=ask("x") | {"messages": messages})
    assert response.json()["error"]["param"] == "messages.1.content.0.text"


@pytest.mark.parametrize(
    "model", dict.fromkeys(each.body for each in ENDPOINTS if each.body is not None), ids=lambda model: model.__name__
)
def test_a_bad_value_is_named_by_its_path_in_the_body(model: type[BaseModel]) -> None:
    """The path has no names of types: all of it is in the body, but for a last part that is missing there."""
    whole: dict[str, Any] = ask("x") | {"input": "x", "prompt": "x", "query": "x", "documents": ["x"]}
    whole |= {"model": "m", "text_1": "x", "text_2": "x"}
    smallest = {name: value for name, value in whole.items() if name in model.model_fields}
    values: list[Any] = [5, "x", {}, [{}], [5], {"type": "enabled", "budget_tokens": "x"}]
    for name, value in itertools.product(model.model_fields, values):
        body = smallest | {name: value}
        param: str | None = None
        try:
            validate(body, model, Reading(model, strict=False))
        except ApiError as error:
            param = error.param
        *path, last = (param or name).split(".")
        place: Any = body
        for part in path:
            place = place[int(part) if isinstance(place, list) else part]
        assert isinstance(place, dict) or (isinstance(place, list) and int(last) < len(place)), param


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", CHAT), ("PUT", COMPLETIONS), ("DELETE", CHAT), ("POST", "/health"), ("POST", "/v1/models")],
)
def test_a_wrong_method_is_not_allowed(demo_server: RunningServer, method: str, path: str) -> None:
    with raw(demo_server) as client:
        response = client.request(method, path)
    check_error(response, 405, method)
    assert response.headers["allow"]


@pytest.mark.parametrize("path", ["/v1", "/v1/audio/speech", "/v1/chat", "/v1/chat/completions/x", "/%00"])
def test_an_unknown_path_is_not_found(demo_server: RunningServer, path: str) -> None:
    with raw(demo_server) as client:
        check_error(client.post(path, json={}), 404, "")


def test_a_prompt_longer_than_the_context_is_refused_with_both_sizes(demo_server: RunningServer) -> None:
    with raw(demo_server) as client:
        error = check_error(client.post(COMPLETIONS, json=run_on([20] * 4096, 1)), 400, "prompt")
        assert "4096" in error["message"]
        assert error["code"] == "context_length_exceeded"
        error = check_error(client.post(CHAT, json=ask("word " * 5000)), 400, "messages")
        assert error["code"] == "context_length_exceeded"


def test_a_prompt_longer_than_the_pool_is_refused_naming_the_flag(demo_server: RunningServer) -> None:
    with (
        running_server(EngineConfig(kv_cache_bytes=4 * block_bytes(demo_server))) as server,
        raw(server) as client,
    ):
        error = check_error(client.post(COMPLETIONS, json=run_on([20] * 129, 2)), 400, "prompt")
        assert "--kv-cache-memory" in error["message"]
        assert "129 tokens" in error["message"]
        assert "128 tokens" in error["message"]
        # The last token's KV is never needed, so 29 tokens just fit.
        for limit in (30, None, -1):
            response = client.post(COMPLETIONS, json=run_on([20] * 100, 29) | {"max_tokens": limit})
            assert response.json()["usage"]["completion_tokens"] == 29
            assert response.json()["choices"][0]["finish_reason"] == "length"
        server.wait_idle()


def test_one_bad_prompt_of_several_starts_none(demo_server: RunningServer) -> None:
    before = demo_server.engine.stats
    with raw(demo_server) as client:
        check_error(client.post(COMPLETIONS, json=run_on([[20] * 40, [20] * 4096], 4)), 400, "prompt")
    demo_server.wait_idle()
    after = demo_server.engine.stats
    assert before is not None
    assert after is not None
    assert after.generated_tokens_total - before.generated_tokens_total <= 4
    assert demo_server.engine.num_unfinished == 0


@pytest.mark.parametrize("announced", [False, True], ids=["chunked", "with length"])
def test_a_200_mb_body_is_refused(demo_server: RunningServer, announced: bool) -> None:
    pieces, size = 50, 4 * MIB

    def body() -> Iterator[bytes]:
        for _ in range(pieces):
            yield b" " * size

    headers = {"Content-Length": str(pieces * size)} if announced else {}
    with raw(demo_server) as client:
        response = client.post(CHAT, content=body(), headers=headers)
    error = check_error(response, 413, "body")
    assert "32 MiB" in error["message"]


def test_a_body_just_below_the_limit_is_read(demo_server: RunningServer) -> None:
    body = json.dumps(ask("What is 17 + 25?")).encode()
    with raw(demo_server) as client:
        response = client.post(CHAT, content=body + b" " * (32 * MIB - len(body)))
    assert response.json()["choices"][0]["message"]["content"] == "42"


def test_text_that_cannot_fit_the_context_is_refused_without_being_tokenized(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions of characters would hold the only tokenizer thread, and with it all other requests, for minutes."""
    assert demo_server.engine.info is not None
    tokenizer, seen = demo_server.engine.info.tokenizer, []

    def encode(*_: object, **__: object) -> list[int]:
        seen.append("text")
        return [1] * 5000

    monkeypatch.setattr(tokenizer, "encode", encode)
    monkeypatch.setattr(tokenizer, "apply_chat_template", encode)
    text = "word " * 2_000_000
    with raw(demo_server) as client:
        check_error(client.post(COMPLETIONS, json=run_on(text, 1)), 400, "prompt")
        check_error(client.post(CHAT, json=ask(text)), 400, "messages")
    assert not seen


@pytest.mark.parametrize(("path", "reason"), [(CHAT, "has at least"), ("/tokenize", "bytes in UTF-8")])
def test_calls_that_cannot_fit_the_context_are_refused_without_being_tokenized(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, reason: str
) -> None:
    """Their arguments are no content, and the template decides how they are shown."""
    assert demo_server.engine.info is not None
    encoded: list[str] = []
    monkeypatch.setattr(demo_server.engine.info.tokenizer, "encode", lambda text, **_: encoded.append(text) or [1])
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"x": ["word"] * 200_000})},
    }
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    with raw(demo_server) as client:
        error = check_error(client.post(path, json={"messages": messages}), 400, "messages")
    assert reason in error["message"]
    assert not encoded


@pytest.mark.parametrize("field", ["top_k", "seed"])
@pytest.mark.parametrize("value", [2**31, 2**63, 10**30])
def test_a_number_of_any_size_is_honoured_or_refused(demo_server: RunningServer, field: str, value: int) -> None:
    with raw(demo_server) as client:
        response = client.post(COMPLETIONS, json=run_on("x", 2, temperature=1) | {field: value})
    assert response.status_code in (200, 400), response.text


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_server_error(
    demo_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    connection = raw_post(demo_server, COMPLETIONS, run_on("x", 1), missing=5)
    answer_text(demo_server, ask("x", max_tokens=1))
    connection.close()
    for _ in range(3):
        answer_text(demo_server, ask("x", max_tokens=1))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_bad_input_does_not_disturb_a_stream(demo_server: RunningServer) -> None:
    body = run_on(random_tokens(40, 77), 120)
    expected = answer_text(demo_server, body)
    with StepGate(demo_server) as gate:
        stream = Background.post(demo_server, COMPLETIONS, body | {"stream": True})
        wait_until(lambda: demo_server.engine.num_unfinished == 1)
        with raw(demo_server) as client:
            for path, field, value in FIELD_CASES[::4]:
                gate.allow(1)
                assert client.post(path, content=body_with(path, field, value)).status_code == 400
            for content in NOT_JSON.values():
                gate.allow(1)
                assert client.post(CHAT, content=content).status_code == 400
        assert demo_server.engine.num_unfinished == 1
        gate.open()
        assert stream.text == expected
    demo_server.wait_idle()


def test_every_token_of_the_vocabulary_may_be_prompted_and_the_next_one_not(demo_server: RunningServer) -> None:
    size = demo_vocab_size()
    with raw(demo_server) as client:
        assert client.post(COMPLETIONS, json=run_on(list(range(size)), 1)).status_code == 200
        error = check_error(client.post(COMPLETIONS, json=run_on([size], 1)), 400, "prompt")
    assert str(size) in error["message"]


def test_a_field_that_needs_another_one_is_named(demo_server: RunningServer) -> None:
    with raw(demo_server) as client:
        assert client.post(CHAT, json=ask("x", top_logprobs=2)).json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 3, "best_of": 2}, "at least n, which is 3"),
        ({"n": 2, "best_of": 3, "stream": True}, "stream"),
        ({"best_of": 2, "stream": True}, "stream"),
    ],
)
def test_best_of_must_fit_n_and_the_stream(demo_server: RunningServer, fields: dict[str, Any], reason: str) -> None:
    with raw(demo_server) as client:
        error = check_error(client.post(COMPLETIONS, json=run_on("x", 1) | fields), 400, "best_of")
    assert error["param"] == "best_of"
    assert reason in error["message"]


@pytest.mark.parametrize("prompt", ['"a",' * 500_000 + "1", "[1]," * 500_000 + "[1]", "1," * 1_000_000 + '"a"'])
def test_a_long_list_of_prompts_is_refused_at_its_first_fault(demo_server: RunningServer, prompt: str) -> None:
    """One error each for a million elements held all requests up for half a minute."""
    with raw(demo_server) as client:
        error = check_error(client.post(COMPLETIONS, content=f'{{"prompt":[{prompt}]}}'.encode()), 400, "prompt")
    assert error["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("prompt", ["a"] * 129, "limit is 128"),
        ("prompt", [-1], "token ids"),
        ("prompt", [1.5], "prompt"),
        ("prompt", [[]], "empty"),
        ("prompt", ["a", 1], "same kind"),
        ("stop", ["a"] * 17, "limit is 16"),
    ],
)
def test_the_message_gives_the_real_reason(demo_server: RunningServer, field: str, value: Any, reason: str) -> None:
    with raw(demo_server) as client:
        response = client.post(COMPLETIONS, json=run_on("x", 1) | {field: value})
    assert reason in check_error(response, 400, field)["message"]
