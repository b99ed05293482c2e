"""Each refused request is one line of the log and one count in the metrics, without what the client has written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from mlxpaged.api.errors import ApiError, without_keys
from mlxpaged.cli.logs import LineFormatter
from mlxpaged.models.text.tokenizer import ChatTemplateError
from tests.api.helpers import ask, metrics, raw, run_on
from tests.support import RunningServer

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
SECRET = "my secret prompt"


@pytest.fixture(autouse=True)
def _lines_as_the_server_writes_them(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        caplog.handler.setFormatter(LineFormatter("%(levelname)s %(request)s%(message)s"))
        yield


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.text.splitlines() if "refused: " in line]


Send = Callable[[httpx.Client], httpx.Response]
REFUSED: list[tuple[Send, int, str, str]] = [
    (
        lambda client: client.post(f"{CHAT}?key=abc", json=ask(SECRET, top_k="all")),
        400,
        "bad_request",
        f"method=POST path={CHAT} status=400 param=top_k code=bad_request reason=must be a whole number",
    ),
    (
        lambda client: client.post(COMPLETIONS, content=b'{"prompt": "my secret'),
        400,
        "invalid_json",
        f"method=POST path={COMPLETIONS} status=400 param=None code=invalid_json reason=the body is not valid JSON: ",
    ),
    (
        lambda client: client.post(MESSAGES, json={"max_tokens": 1} | ask("x", model=SECRET)),
        404,
        "model_not_found",
        f"method=POST path={MESSAGES} status=404 param=model code=model_not_found reason=... does not exist; ",
    ),
    (
        lambda client: client.get("/v1/no%0Athing"),
        404,
        "not_found",
        "method=GET path=/v1/no%0Athing status=404 param=None code=not_found reason=there is nothing at this path",
    ),
    (
        lambda client: client.put(CHAT),
        405,
        "method_not_allowed",
        f"method=PUT path={CHAT} status=405 param=None code=method_not_allowed reason=PUT is not allowed at this path",
    ),
    (
        lambda client: client.get("/v1/models", headers={"Host": "my-mac.example:80"}),
        403,
        "host_not_allowed",
        "status=403 param=Host code=host_not_allowed reason=the Host header names 'my-mac.example:80', which is not",
    ),
    (
        lambda client: client.get("/v1/models", headers={"Origin": "https://evil.example"}),
        403,
        "origin_not_allowed",
        "status=403 param=Origin code=origin_not_allowed reason=pages from 'https://evil.example' may not use this",
    ),
]


@pytest.mark.parametrize(("send", "status", "code", "line"), REFUSED, ids=[code for _, _, code, _ in REFUSED])
def test_a_refused_request_is_one_line_with_its_reason_and_one_count(
    server: RunningServer, caplog: pytest.LogCaptureFixture, send: Send, status: int, code: str, line: str
) -> None:
    name = f"mlxpaged_requests_refused_total|{code}"
    before = metrics(server).get(name, 0)
    with raw(server) as client:
        client.headers["X-Request-Id"] = "mine"
        assert send(client).status_code == status
    [logged] = refusals(caplog)
    assert logged.startswith("INFO mine refused: ")
    assert line in logged
    assert "secret" not in logged
    assert "abc" not in logged
    assert metrics(server)[name] == before + 1


SECRETS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": SECRET, "content": "x"}]}),
    (CHAT, ask("x", tool_choice={"type": "function", "function": {"name": "my_secret"}})),
    (CHAT, ask("x", tools=[{"type": "function", "function": {"name": SECRET}}])),
    (CHAT, ask("x", logit_bias={SECRET: 1})),
    (CHAT, ask("x", logit_bias={SECRET: 101})),
    (CHAT, ask("x", chat_template_kwargs={SECRET: SECRET})),
    (CHAT, ask("x", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": SECRET}}})),
    (CHAT, ask("x", structured_outputs={"regex": f"({SECRET}"})),
    (CHAT, ask("x", structured_outputs={"grammar": f"{SECRET} ::= "})),
    (COMPLETIONS, run_on([1, SECRET], 1)),
    (COMPLETIONS, run_on("x", 1, model=f'it\'s "{SECRET}", or {SECRET!r}')),
    (RESPONSES, {"input": "x", "previous_response_id": f"resp '{SECRET}"}),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": SECRET, "output": "x"}]}),
    (RESPONSES, {"input": "x", "tools": [{"type": SECRET}]}),
    (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": SECRET}]}]}),
    ("/v1/embeddings", {"input": SECRET, "model": "demo"}),
]


def test_the_log_has_nothing_that_a_client_has_written(
    server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ChatTemplateError(f"the model's chat template refuses these messages: {SECRET}")

    shown = 0
    with raw(server) as client:
        for path, body in SECRETS:
            response = client.post(path, json=body)
            assert 400 <= response.status_code < 500, (body, response.text)
            shown += "secret" in response.text
        assert server.engine.info is not None
        monkeypatch.setattr(server.engine.info.tokenizer, "apply_chat_template", refuse)
        response = client.post(CHAT, json=ask("x"))
        assert (response.status_code, SECRET in response.text) == (400, True)
    lines = refusals(caplog)
    assert len(lines) == len(SECRETS) + 1
    assert shown > len(SECRETS) / 2  # clients see their values, so the log could have them
    assert not [line for line in lines if "secret" in line]


def test_a_reason_keeps_apostrophes_and_loses_values_that_are_cut_off() -> None:
    def reason(message: str) -> str:
        return ApiError(400, message).reason

    assert reason("this model's template has no 'x', so it's \"y\" and 'it\\'s'") == (
        "this model's template has no ..., so it's ... and ..."
    )
    assert reason(f"the name {'x' * 5000!r} is too long") == "the name ..."
    assert without_keys(f"metadata.{SECRET}.x-1") == "metadata.....x-1"


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", {"Host": "x" * 9000}),
        ("GET", {"Origin": f"https://{'x' * 9000}"}),
        ("X" * 9000, {}),
    ],
    ids=["host", "origin", "method"],
)
def test_a_line_is_short_whatever_the_client_sends(
    server: RunningServer, caplog: pytest.LogCaptureFixture, method: str, headers: dict[str, str]
) -> None:
    with raw(server) as client:
        assert client.request(method, "/v1/models", headers=headers).status_code in (403, 405)
    [logged] = refusals(caplog)
    assert len(logged) < 1000


def test_a_request_that_was_accepted_is_not_counted_as_refused(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with raw(server) as client:
        assert client.post(COMPLETIONS, json=run_on("x", 4000, timeout=0.001)).status_code == 408
    assert refusals(caplog) == []
    server.wait_idle()
