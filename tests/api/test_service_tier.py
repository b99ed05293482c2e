"""service_tier: a request may lower its priority, and not raise it above the server's default."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.api.helpers import ask, post, raw, run_on, stream_events
from tests.support import RunningServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = [ask("x", max_tokens=2), run_on("x", 2)]


@pytest.mark.parametrize("body", BODIES, ids=["chat", "completion"])
@pytest.mark.parametrize(
    ("asked", "used"),
    [({}, "default"), (None, "default"), ("auto", "default"), ("default", "default"), ("flex", "flex")],
)
def test_the_response_says_what_was_used(
    demo_server: RunningServer, body: dict[str, Any], asked: Any, used: str
) -> None:
    fields = asked if asked == {} else {"service_tier": asked}
    assert post(demo_server, body | fields)["service_tier"] == used
    path = CHAT if "messages" in body else COMPLETIONS
    *chunks, _ = stream_events(demo_server, path, body | fields)
    assert {chunk["service_tier"] for chunk in chunks} == {used}


@pytest.mark.parametrize("body", BODIES, ids=["chat", "completion"])
def test_priority_needs_a_key_that_allows_it(demo_server: RunningServer, body: dict[str, Any]) -> None:
    with raw(demo_server) as client:
        path = CHAT if "messages" in body else COMPLETIONS
        response = client.post(path, json=body | {"service_tier": "priority"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("service_tier", "service_tier_not_allowed")
    assert "'flex'" in error["message"]


def test_the_official_client_knows_the_field(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, service_tier="flex")
    assert (answer.choices[0].message.content, answer.service_tier) == ("42", "flex")
    with pytest.raises(openai.BadRequestError, match="service_tier"):
        client.chat.completions.create(model="demo", messages=messages, service_tier="priority")
