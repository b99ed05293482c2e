"""`--thinking-budget` limits the thoughts of all answers, and leaves room for what comes after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpaged.core.text.thinking_limit import ThinkingLimit
from tests.api.helpers import raw
from tests.scripted import scripted_server

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
LENGTH = 500
SCRIPT = {"Think!": f"<think>{'a' * LENGTH}</think>{'b' * LENGTH}", "Answer!": "b" * 20}
MORE = 4
"""Tokens that the tags and a line feed take."""


def asked(question: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": question}]} | fields


@pytest.mark.parametrize(
    ("limit", "fields", "most"),
    [
        ("40%", {"max_tokens": 200}, 80),
        ("64", {"max_tokens": 200}, 64),
        ("4000", {"max_tokens": 200}, 100),
        ("64", {"max_tokens": 200, "thinking_budget": 20}, 20),
        ("64", {"max_tokens": 200, "thinking_budget": 150}, 64),
        ("10%", {}, None),
    ],
)
def test_the_smallest_limit_holds_and_leaves_room_for_an_answer(
    tmp_path: Path, limit: str, fields: dict[str, Any], most: int | None
) -> None:
    parsed = ThinkingLimit.parse(limit)
    with scripted_server(tmp_path, "json_tools", SCRIPT, 4096, thinking_limit=parsed) as server, raw(server) as http:
        answer = http.post(CHAT, json=asked("Think!", **fields)).json()
        thoughts = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        text = answer["choices"][0]["message"]["content"]
        room = 4096 - answer["usage"]["prompt_tokens"]
        most = most or room // 10
        assert most <= thoughts <= most + MORE
        assert len(text) > 40
        plain = http.post(CHAT, json=asked("Answer!")).json()["choices"][0]
        assert (plain["message"]["content"], plain["finish_reason"]) == ("b" * 20, "stop")


def test_other_apis_have_the_limit_and_log_probabilities_are_not_refused_for_it(tmp_path: Path) -> None:
    limit = ThinkingLimit.parse("64")
    with scripted_server(tmp_path, "json_tools", SCRIPT, thinking_limit=limit) as server, raw(server) as http:
        answer = http.post(MESSAGES, json=asked("Think!", max_tokens=300)).json()
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        assert 60 <= answer["usage"]["output_tokens_details"]["thinking_tokens"] <= 64 + MORE
        answer = http.post("/api/chat", json=asked("Think!", stream=False)).json()
        assert 60 <= len(answer["message"]["thinking"]) <= 64 + MORE
        answer = http.post(CHAT, json=asked("Think!", max_tokens=300, logprobs=True)).json()
        assert answer["choices"][0]["logprobs"]
        assert "b" not in answer["choices"][0]["message"]["content"], "it has no limit then"
