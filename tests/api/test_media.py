"""Images, audio and files in a conversation: they do not end a session, and no answer pretends to have seen them."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.api.media import leave_out
from tests.api.helpers import raw
from tests.support import RunningServer

TEXT = "[an image was left out: this model takes text only]"
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
IMAGE = {"type": "image", "source": SOURCE}
INPUT = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
USER = {"role": "user", "content": "Go on."}
ANSWER = {"role": "assistant", "content": "I see."}


def looked(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "Look."}, part]}


def result(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("conversation", "places"),
    [
        pytest.param([looked(URL), ANSWER, USER], ["content.image_url"], id="earlier"),
        pytest.param([looked(URL), ANSWER, looked(URL)], ["content.image_url"], id="earlier-not-newest"),
        pytest.param([looked(URL)], [], id="newest"),
        pytest.param([looked(URL), USER], [], id="newest-of-two-messages"),
        pytest.param([looked(URL), ANSWER], [], id="newest-before-prefill"),
        pytest.param([{"role": "tool", "tool_call_id": "t", "content": [URL]}], ["content.image_url"], id="tool"),
        pytest.param([result(IMAGE)], ["content.content.image"], id="tool-result"),
        pytest.param(
            [result(IMAGE, {"type": "document", "source": SOURCE}), looked(IMAGE)],
            ["content.content.image", "content.content.document"],
            id="result-beside-newest",
        ),
        pytest.param(
            [{"type": "function_call_output", "call_id": "c", "output": [INPUT]}], ["output.input_image"], id="output"
        ),
        pytest.param(
            [looked(INPUT), {"type": "function_call", "call_id": "c"}, USER], ["content.input_image"], id="before-call"
        ),
        pytest.param([USER | {"images": ["aGk="]}, ANSWER, USER], ["images"], id="ollama"),
        pytest.param([USER | {"images": ["aGk="]}], [], id="ollama-newest"),
        pytest.param("text", [], id="text"),
        pytest.param([1, None, {"content": 5}, {"content": [None, 3, {"type": []}]}, ANSWER, USER], [], id="nonsense"),
    ],
)
def test_what_is_left_out(conversation: Any, places: list[str]) -> None:
    assert leave_out(conversation) == places


CLAUDE_CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {}}]}
TOKENS = {"max_tokens": 2}
RESPONSES_CALL = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", TOKENS | {"messages": [looked(URL), ANSWER, USER]}, "messages.content.image_url"),
        ("/v1/messages", TOKENS | {"messages": [looked(IMAGE), ANSWER, USER]}, "messages.content.image"),
        (
            "/v1/messages",
            TOKENS | {"messages": [USER, CLAUDE_CALL, result(IMAGE)]},
            "messages.content.content.image",
        ),
        (
            "/v1/responses",
            {"max_output_tokens": 2, "input": [{"role": "user", "content": [INPUT]}, ANSWER, USER]},
            "input.content.input_image",
        ),
        (
            "/v1/responses",
            {
                "max_output_tokens": 2,
                "input": [
                    USER,
                    RESPONSES_CALL,
                    {"type": "function_call_output", "call_id": "c", "output": [INPUT]},
                ],
            },
            "input.output.input_image",
        ),
        (
            "/api/chat",
            {"options": {"num_predict": 2}, "messages": [USER | {"images": ["aGk="]}, ANSWER, USER]},
            "messages.images",
        ),
    ],
)
def test_every_api_goes_on_after_an_image_and_names_it(
    server: RunningServer, path: str, body: dict[str, Any], named: str
) -> None:
    with raw(server) as client:
        response = client.post(path, json=body | {"model": "demo", "stream": False})
    assert response.status_code == 200, response.text
    assert response.headers["x-mlxpaged-ignored"] == named


def test_the_model_is_told_of_what_was_left_out(server: RunningServer) -> None:
    """The prompt is the one of a conversation that has the text in the image's place."""
    with raw(server) as client:
        counts = [
            client.post("/v1/messages/count_tokens", json={"model": "demo", "messages": [looked(part), ANSWER, USER]})
            for part in (IMAGE, {"type": "text", "text": TEXT}, {"type": "text", "text": ""})
        ]
    tokens = [response.json()["input_tokens"] for response in counts]
    assert tokens[0] == tokens[1] > tokens[2]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER, ANSWER, looked(URL)]}),
        ("/v1/messages", TOKENS | {"messages": [USER, ANSWER, looked(IMAGE)]}),
        ("/v1/responses", {"input": [USER, ANSWER, {"role": "user", "content": [INPUT]}]}),
        ("/api/chat", {"messages": [USER, ANSWER, USER | {"images": ["aGk="]}]}),
    ],
)
def test_an_image_in_the_newest_turn_is_an_error(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    with raw(server) as client:
        response = client.post(path, json=body | {"model": "demo"})
    assert response.status_code == 400
    assert "images are not supported" in response.text
