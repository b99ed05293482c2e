"""Images, audio and files for a model that takes text only: they do not end a session, and no answer pretends to have
seen them. test_images.py is about a model that takes images."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import BaseModel

from mlxpaged.api.anthropic.schema import MessagesRequest
from mlxpaged.api.anthropic.translation import messages_of
from mlxpaged.api.body import validate
from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation.images import with_texts
from mlxpaged.api.media import END, START, joined, media_of
from mlxpaged.api.ollama.schema import OllamaChatRequest
from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.schema import ChatRequest
from tests.api.helpers import raw
from tests.support import RunningServer

TEXT = "[an image was left out: this model takes text only]"
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
IMAGE = {"type": "image", "source": SOURCE}
INPUT = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
AUDIO = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
DOCUMENT = {"type": "document", "source": SOURCE, "title": "T"}
USER = {"role": "user", "content": "Go on."}
ANSWER = {"role": "assistant", "content": "I see."}
CLAUDE_CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {}}]}
TOKENS = {"max_tokens": 2}
RESPONSES_CALL = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": [INPUT]}


def looked(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "Look."}, part]}


def asked(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": "Look."}, part]}


def result(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": list(parts)}]}


def chat(*messages: dict[str, Any]) -> BaseModel:
    return validate({"messages": list(messages)}, ChatRequest)


def claude(*messages: dict[str, Any]) -> BaseModel:
    return validate({"model": "m", "max_tokens": 5, "messages": list(messages)}, MessagesRequest)


def responses(*items: dict[str, Any]) -> BaseModel:
    return validate({"input": list(items)}, ResponseRequest)


def ollama(*messages: dict[str, Any]) -> BaseModel:
    return validate({"model": "m", "messages": list(messages)}, OllamaChatRequest)


def conversation_of(body: BaseModel) -> Any:
    return body.input if isinstance(body, ResponseRequest) else getattr(body, "messages", None)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        pytest.param(chat(looked(URL), ANSWER, USER), [("x.0.content.1", "x.content.image_url", False)], id="earlier"),
        pytest.param(
            chat(looked(URL), ANSWER, looked(URL)),
            [("x.0.content.1", "x.content.image_url", False), ("x.2.content.1", "x.content.image_url", True)],
            id="earlier-and-newest",
        ),
        pytest.param(chat(looked(URL), USER), [("x.0.content.1", "x.content.image_url", True)], id="two-messages"),
        pytest.param(chat(looked(URL), ANSWER), [("x.0.content.1", "x.content.image_url", True)], id="before-prefill"),
        pytest.param(
            chat(USER, {"role": "tool", "tool_call_id": "t", "content": [URL]}),
            [("x.1.content.0", "x.content.image_url", False)],
            id="tool",
        ),
        pytest.param(
            claude(USER, CLAUDE_CALL, result(IMAGE)),
            [("x.2.content.0.content.0", "x.content.content.image", False)],
            id="tool-result",
        ),
        pytest.param(
            claude(USER, CLAUDE_CALL, result(IMAGE, DOCUMENT), looked(IMAGE)),
            [
                ("x.2.content.0.content.0", "x.content.content.image", False),
                ("x.2.content.0.content.1", "x.content.content.document", False),
                ("x.3.content.1", "x.content.image", True),
            ],
            id="result-beside-newest",
        ),
        pytest.param(
            claude(USER, CLAUDE_CALL, {"role": "user", "content": [*result(IMAGE)["content"], IMAGE]}),
            [
                ("x.2.content.0.content.0", "x.content.content.image", False),
                ("x.2.content.1", "x.content.image", True),
            ],
            id="result-and-newest-in-one-message",
        ),
        pytest.param(
            responses(asked(URL), RESPONSES_CALL, RESULT),
            [("x.0.content.1", "x.content.image_url", False), ("x.2.output.0", "x.output.input_image", False)],
            id="before-call-and-output",
        ),
        pytest.param(
            ollama(USER | {"images": ["aGk=", "aGk="]}, ANSWER, USER | {"images": ["aGk="]}),
            [
                ("x.0.images.0", "x.images", False),
                ("x.0.images.1", "x.images", False),
                ("x.2.images.0", "x.images", True),
            ],
            id="ollama",
        ),
        pytest.param(
            chat(looked(AUDIO), ANSWER, USER), [("x.0.content.1", "x.content.input_audio", False)], id="audio"
        ),
        pytest.param(chat(USER), [], id="text"),
    ],
)
def test_what_is_no_text_is_found_with_its_place(body: BaseModel, found: list[tuple[str, str, bool]]) -> None:
    shown = media_of(conversation_of(body), "x")
    assert [(each.param, each.field, each.is_newest) for each in shown] == found
    assert len({each.sentinel for each in shown}) == len(shown)


def test_items_of_a_stored_response_have_no_place_in_the_body() -> None:
    items = conversation_of(responses(asked(INPUT), ANSWER, asked(INPUT)))
    assert [each.param for each in media_of(items, "input", 2)] == ["previous_response_id", "input.0.content.1"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (AUDIO, "audio is not supported by this server"),
        ({"type": "video_url", "video_url": {}}, "videos are not supported by this server"),
        ({"type": "file", "file": {}}, "files are not supported by this server"),
        (DOCUMENT, "documents are not supported by this server"),
    ],
)
def test_what_no_model_takes_is_an_error_in_the_newest_turn(part: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError) as caught:
        media_of(conversation_of(chat(USER, ANSWER, looked(part))), "messages")
    assert caught.value.message == f"messages.2.content.1: {said}"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"source": {"type": "text", "media_type": "text/plain", "data": "It rains."}}, "It rains."),
        ({"source": {"type": "text", "data": "It rains."}, "title": "Rome", "context": "May"}, "Rome\nMay\nIt rains."),
        ({"source": {"type": "content", "content": "It rains."}, "title": None}, "It rains."),
        (
            {"source": {"type": "content", "content": [{"type": "text", "text": t} for t in ("It", "rains")]}},
            "It\nrains",
        ),
    ],
)
def test_the_text_of_a_document_is_shown_in_each_turn(fields: dict[str, Any], shown: str) -> None:
    document = {"type": "document", **fields}
    body = claude(looked(document), CLAUDE_CALL, result(document), looked(document))
    assert media_of(body.messages, "x") == []  # type: ignore[attr-defined]
    assert isinstance(body, MessagesRequest)
    asked, _, answered, newest = messages_of(body)
    assert asked["content"] == newest["content"] == f"Look.\n{shown}"
    assert answered["content"] == shown


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "application/pdf", "data": "aGk="},
        {"type": "url", "url": "https://localhost/a.pdf"},
        {"type": "file", "file_id": "f"},
        {"type": "content", "content": [{"type": "text", "text": "a"}, IMAGE]},
        {"type": "text", "data": 5},
        {},
    ],
)
def test_a_document_that_is_no_text_is_left_out_or_refused(source: dict[str, Any]) -> None:
    document = {"type": "document", "source": source}
    assert [each.is_newest for each in media_of(claude(looked(document), ANSWER, USER).messages, "x")] == [False]  # type: ignore[attr-defined]
    with pytest.raises(ApiError, match="documents are not supported"):
        media_of(claude(looked(document)).messages, "x")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("{}", "[T]"),
        ("a{}b", "a\n[T]\nb"),
        ("a\n{}\nb", "a\n[T]\nb"),
        ("{}{}", "[T]\n[T]"),
        ("a{}{}b", "a\n[T]\n[T]\nb"),
    ],
)
def test_a_text_in_the_place_of_an_image_has_its_own_line(content: str, shown: str) -> None:
    sentinel = f"{START}{'0' * 32}{END}"
    assert with_texts(content.replace("{}", sentinel), {sentinel: "[T]"}) == shown


def test_what_looks_like_a_sentinel_is_text() -> None:
    forged = f"a{START}{'0' * 32}{END}b"
    assert with_texts(forged, {}) == forged


def test_texts_are_joined_by_lines_and_images_by_nothing() -> None:
    image = f"{START}{'0' * 32}{END}"
    assert joined(["a", "b", image, image, "c", "", "d"]) == f"a\nb{image}{image}c\n\nd"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", TOKENS | {"messages": [looked(URL), ANSWER, USER]}, "messages.content.image_url"),
        ("/v1/chat/completions", TOKENS | {"messages": [looked(AUDIO), ANSWER, USER]}, "messages.content.input_audio"),
        ("/v1/messages", TOKENS | {"messages": [looked(IMAGE), ANSWER, USER]}, "messages.content.image"),
        (
            "/v1/messages",
            TOKENS | {"messages": [USER, CLAUDE_CALL, result(IMAGE, DOCUMENT)]},
            "messages.content.content.image, messages.content.content.document",
        ),
        (
            "/v1/responses",
            {"max_output_tokens": 2, "input": [{"role": "user", "content": [INPUT]}, ANSWER, USER]},
            "input.content.input_image",
        ),
        (
            "/v1/responses",
            {"max_output_tokens": 2, "input": [USER, RESPONSES_CALL, RESULT]},
            "input.output.input_image",
        ),
        (
            "/api/chat",
            {"options": {"num_predict": 2}, "messages": [USER | {"images": ["aGk="]}, ANSWER, USER]},
            "messages.images",
        ),
        ("/tokenize", {"messages": [looked(URL), ANSWER, USER]}, "messages.content.image_url"),
    ],
)
def test_every_api_goes_on_after_an_image_and_names_it(
    server: RunningServer, path: str, body: dict[str, Any], named: str
) -> None:
    fields = {"model": "demo"} if path == "/tokenize" else {"model": "demo", "stream": False}
    with raw(server) as client:
        response = client.post(path, json=body | fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-mlxpaged-ignored"] == named


def test_a_strict_server_leaves_no_image_out(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = server.app.state.server
    monkeypatch.setattr(inner, "http", dataclasses.replace(inner.http, strict=True))
    with raw(server) as client:
        response = client.post("/v1/chat/completions", json=TOKENS | {"messages": [looked(URL), ANSWER, USER]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("messages.content.image_url", "unsupported_parameter")


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
        ("/v1/messages/count_tokens", {"messages": [USER, ANSWER, looked(IMAGE)]}),
        ("/v1/responses", {"input": [USER, ANSWER, {"role": "user", "content": [INPUT]}]}),
        ("/api/chat", {"messages": [USER, ANSWER, USER | {"images": ["aGk="]}]}),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}),
        ("/tokenize", {"messages": [USER, ANSWER, looked(URL)]}),
    ],
)
def test_an_image_in_the_newest_turn_is_an_error(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    with raw(server) as client:
        response = client.post(path, json=body | {"model": "demo"})
    assert response.status_code == 400
    assert "images are not supported by this model" in response.text
