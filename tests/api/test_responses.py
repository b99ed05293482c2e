"""/v1/responses with the official client: answers, events, remembered conversations, refusals."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from mlxpaged.api.config import HttpConfig
from mlxpaged.api.openai.responses import store as response_store
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    DEADLINE,
    Background,
    StepGate,
    ask,
    chat_tokens,
    events,
    metrics,
    post,
    queued_commands,
    raw,
    raw_post,
    within_one_step,
)
from tests.support import RunningServer, running_server, wait_until

QUESTION = "What is 17 + 25?"
PATH = "/v1/responses"


def test_an_answer_is_the_one_of_chat(client: OpenAI, demo_server: RunningServer) -> None:
    response = client.responses.create(
        model="demo",
        input=QUESTION,
        instructions="Be brief.",
        temperature=0,
        metadata={"a": "b"},
        user="u",
        service_tier="flex",
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = post(demo_server, ask("") | {"messages": messages})
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.instructions, response.metadata, response.service_tier) == ("Be brief.", {"a": "b"}, "flex")
    assert response.usage is not None
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert response.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert response.usage.total_tokens == chat["usage"]["total_tokens"]


def test_parts_and_roles_are_the_same_conversation(client: OpenAI, demo_server: RunningServer) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Repeat: "}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "one", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": QUESTION},
    ]
    response = client.responses.create(model="demo", input=items, temperature=0)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Repeat: "},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": QUESTION},
    ]
    assert response.usage is not None
    assert response.usage.input_tokens == len(chat_tokens(demo_server, messages))


def test_a_conversation_goes_on_without_its_instructions(client: OpenAI, demo_server: RunningServer) -> None:
    first = client.responses.create(model="demo", input=QUESTION, instructions="Be brief.", temperature=0)
    second = client.responses.create(model="demo", input="Repeat: x", previous_response_id=first.id, temperature=0)
    third = client.responses.create(model="demo", input="And?", previous_response_id=second.id, temperature=0)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Repeat: x"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "And?"},
    ]
    assert third.usage is not None
    assert third.usage.input_tokens == len(chat_tokens(demo_server, messages))
    assert (third.previous_response_id, third.instructions) == (second.id, None)


def test_a_stored_response_can_be_read_and_forgotten(client: OpenAI) -> None:
    response = client.responses.create(model="demo", input=QUESTION, temperature=0)
    assert client.responses.retrieve(response.id).model_dump() == response.model_dump()
    [item] = client.responses.input_items.list(response.id)
    assert item.model_dump(exclude_none=True)["content"] == [{"type": "input_text", "text": QUESTION}]
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match=response.id):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="demo", input="x", previous_response_id=response.id)
    unkept = client.responses.create(model="demo", input=QUESTION, temperature=0, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_large_conversation_is_read_off_the_event_loop(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    conversation: Any = response_store.StoredResponse.conversation

    def recorded(stored: Any) -> Any:
        threads.append(threading.current_thread().name)
        return conversation.fget(stored)

    monkeypatch.setattr(response_store.StoredResponse, "conversation", property(recorded))
    for size in (1, 100_000):
        part = {"type": "output_text", "text": "42", "annotations": ["x" * size]}  # the model does not see annotations
        said: Any = [{"role": "assistant", "content": [part]}]
        first = client.responses.create(model="demo", input=said, max_output_tokens=1)
        client.responses.create(model="demo", input="x", previous_response_id=first.id, max_output_tokens=1)
    assert [name.startswith("mlxpaged-body") for name in threads] == [False, True]


@pytest.mark.parametrize(("limit", "value"), [("MAX_RESPONSES", 3), ("MAX_BYTES", 3000)])
def test_the_store_forgets_the_oldest(client: OpenAI, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(response_store, limit, value)
    made = [client.responses.create(model="demo", input="x" * 90, max_output_tokens=1).id for _ in range(5)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made[1])
    assert client.responses.retrieve(made[-1]).id == made[-1]


def test_events_come_in_openais_order(client: OpenAI) -> None:
    whole = client.responses.create(model="demo", input=QUESTION, temperature=0)
    received = list(client.responses.create(model="demo", input=QUESTION, temperature=0, stream=True))
    kinds = [event.type.removeprefix("response.") for event in received]
    deltas = [event for event in received if event.type == "response.output_text.delta"]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in received] == list(range(len(received)))
    assert "".join(event.delta for event in deltas) == whole.output_text
    last = received[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.total_tokens == whole.usage.total_tokens
    assert client.responses.retrieve(last.response.id).output_text == whole.output_text
    with client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_a_cut_answer_is_incomplete(client: OpenAI) -> None:
    response = client.responses.create(model="demo", input="Repeat: one two three", max_output_tokens=1, temperature=0)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(model="demo", input="Repeat: one two", max_output_tokens=1, stream=True)
    assert last.type == "response.incomplete"


def test_logprobs_are_those_of_chat(client: OpenAI, demo_server: RunningServer) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    response = client.responses.create(model="demo", input=QUESTION, **fields)
    chat = post(demo_server, ask(QUESTION, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    found = response.output[0].model_dump()["content"][0]["logprobs"]
    assert [entry["token"] for entry in found] == [entry["token"] for entry in chat]
    assert [entry.keys() for entry in found] == [entry.keys() for entry in chat]
    for one, other in zip(
        found, chat, strict=True
    ):  # the second prompt is in the prefix cache: a chunk of another size
        assert [each["logprob"] for each in (one, *one["top_logprobs"])] == pytest.approx(
            [each["logprob"] for each in (other, *other["top_logprobs"])], abs=1e-3
        )
    parts = client.responses.create(model="demo", input=QUESTION, stream=True, **fields)
    tokens = [entry.token for e in parts if e.type == "response.output_text.delta" for entry in e.logprobs]
    assert tokens == [entry["token"] for entry in chat]


def test_a_stream_that_is_ended_says_why(demo_server: RunningServer) -> None:
    with StepGate(demo_server) as gate:
        body = {"input": QUESTION, "stream": True, "max_output_tokens": 50}
        pending = Background.post(demo_server, PATH, body, X_Request_Id="ended")
        assert within_one_step(demo_server, gate, "DELETE", "/v1/requests/resp_ended").status_code == 200
    lines = (line for line in pending.result().text.splitlines() if not line.startswith("event: "))
    last = list(events(iter(lines)))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "request_cancelled"
    demo_server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_response(demo_server: RunningServer, stream: bool) -> None:
    requests = demo_server.app.state.server.open_requests
    before = metrics(demo_server)
    with StepGate(demo_server) as gate:
        leaving = raw_post(demo_server, PATH, {"input": "Repeat: one two three four", "stream": stream})
        gate.wait_held()
        leaving.close()
        wait_until(lambda: not list(requests) and queued_commands(demo_server) == 1)
        gate.open()
    demo_server.wait_idle()
    after = metrics(demo_server)
    assert after["mlxpaged_requests_finished_total|stop"] == before["mlxpaged_requests_finished_total|stop"]


def test_a_response_that_is_stored_keeps_its_id(demo_server: RunningServer) -> None:
    with raw(demo_server) as client:
        statuses = [
            client.post(PATH, json={"input": "x", "max_output_tokens": 1}, headers={"X-Request-Id": name})
            for name in ("resp_mine", "resp_mine", "mine")
        ]
    assert [response.status_code for response in statuses] == [200, 409, 409]
    assert statuses[0].json()["id"] == "resp_mine"


def test_references_have_as_many_bytes_as_a_body_may_have() -> None:
    """A small body could refer to a large item ten thousand times."""
    http = HttpConfig(max_body_bytes=3000)
    config = EngineConfig(kv_cache_bytes=16_000_000)
    with running_server(config, http=http) as server, raw(server) as client:
        text = [{"type": "input_text", "text": "x"}] * 40
        stored = client.post(PATH, json={"input": [{"role": "user", "content": text}], "max_output_tokens": 1})
        assert stored.status_code == 200, stored.text
        reference = {"type": "item_reference", "id": f"{stored.json()['id']}-input-0"}
        for count, status in ((1, 200), (3, 400)):
            response = client.post(PATH, json={"input": [reference] * count, "max_output_tokens": 1})
            assert response.status_code == status, response.text
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == ("input", "body_too_large")


def test_a_response_whose_request_has_a_foreign_id_can_be_continued(client: OpenAI, demo_server: RunningServer) -> None:
    """VS Code sends an id with each request, and continues only responses whose ids begin as OpenAI's."""
    first = client.responses.create(model="demo", input=QUESTION, extra_headers={"X-Request-Id": "0c1b-5d"})
    assert first.id == "resp_0c1b-5d"
    for name in (first.id, "0c1b-5d"):
        second = client.responses.create(model="demo", input="And twice that?", previous_response_id=name)
        assert second.id.startswith("resp_")
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.total_tokens
        assert client.responses.retrieve(name).id == first.id
    client.responses.delete(first.id)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input.0"),
    ({"input": [{}]}, "input.0.id"),
    ({"input": [{"type": ["message"]}]}, "input.0"),
    ({"input": [{"role": "king", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
    ({"input": "x" * 10_000_000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": [1]}, "include.0"),
    ({"stream_options": 1}, "stream_options"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_what_is_not_supported_is_refused_by_name(
    demo_server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    with raw(demo_server) as client:
        response = client.post(PATH, json={"model": "demo", "input": "x", "max_output_tokens": 1} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


def test_the_asynchronous_client_can_do_it_too(demo_server: RunningServer) -> None:
    async def run() -> tuple[str, str]:
        async with (
            httpx.AsyncClient(trust_env=False, verify=False, timeout=DEADLINE) as http,
            AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
        ):
            response = await client.responses.create(model="demo", input=QUESTION, temperature=0)
            stream = await client.responses.create(model="demo", input=QUESTION, temperature=0, stream=True)
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            return response.output_text, text

    assert asyncio.run(run()) == ("42", "42")
