"""/v1/responses as agents use it: tools, thoughts and structured answers, with the official client, on a model that
really calls and thinks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.api.helpers import DEADLINE, raw, side_by_side
from tests.api.test_tools import CALL, ROME
from tests.support import RunningServer

THOUGHT = "They ask for 2 < 3. Simple."
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
LONG = " ".join(map(str, range(100, 190)))
SCRIPT = {
    "Rome?": f"<think>I need the weather.</think>\n{CALL}",
    "21 degrees": "It is 21 degrees in Rome.",
    "Both?": f"I ask both.\n{CALL}\n{CLOCK_CALL}",
    "Broken?": 'I try. <tool_call>\n{"name": "weather", "arguments": {"city": ]}\n</tool_call>',
    "Why?": f"<think>\n{THOUGHT}\n</think>\n\nBecause.",
    "Long?": f"<think>{LONG}</think>Yes.",
    "<think>\n\n</think>": "At once.",
    "Time?": '<tool_call>\n{"name": "time__now", "arguments": {}}\n</tool_call>',
    "noon": "It is noon.",
    "Hello": "Hello <b>there</b>.",
    "Nothing": "",
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "parameters": None, "strict": None}
TIME: dict[str, Any] = {
    "type": "namespace",
    "name": "time",
    "description": "Of clocks.",
    "tools": [{"type": "function", "name": "now", "description": "The time.", "strict": False, "parameters": {}}],
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def question(text: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": text, "tools": [WEATHER, CLOCK]} | fields


def chat_tool(tool: dict[str, Any]) -> Any:
    """The same tool for chat completions."""
    return {"type": "function", "function": {name: value for name, value in tool.items() if value and name != "type"}}


def raw_events(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Each checked: its name, its number, and every field against the official client's types."""
    with raw(server) as client:
        response = client.post("/v1/responses", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    received = []
    for number, block in enumerate(response.text.rstrip("\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        EVENT.validate_python(event)
        received.append(event)
    return received


def same(response: dict[str, Any]) -> dict[str, Any]:
    """But for what is new each time."""
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    times = {"created_at": 0, "completed_at": 0}
    return response | times | {"id": "", "output": output, "usage": response["usage"]["total_tokens"]}


def kinds(received: list[dict[str, Any]]) -> list[str]:
    """The order of events, a run of deltas as one."""
    names = [event["type"].removeprefix("response.") for event in received]
    return [name for i, name in enumerate(names) if not (name.endswith(".delta") and names[i - 1] == name)]


FUNCTION = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def content(kind: str) -> list[str]:
    parts = ["content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done"]
    return ["output_item.added", *parts, "output_item.done"]


@pytest.mark.parametrize(
    ("text", "items", "last"),
    [
        ("Hello", content("output_text"), "completed"),
        ("Why?", content("reasoning_text") + content("output_text"), "completed"),
        ("Rome?", content("reasoning_text") + FUNCTION, "completed"),
        ("Both?", content("output_text") + FUNCTION + FUNCTION, "completed"),
        ("Long?", content("reasoning_text"), "incomplete"),
        ("Nothing", [each for each in content("output_text") if not each.endswith("delta")], "completed"),
    ],
)
def test_events_announce_grow_and_end_each_item(
    server: RunningServer, client: OpenAI, text: str, items: list[str], last: str
) -> None:
    body = question(text, max_output_tokens=150)
    received, whole_response = side_by_side(
        lambda: raw_events(server, body), lambda: client.responses.with_raw_response.create(**body).text
    )
    assert kinds(received) == ["created", "in_progress", *items, last]
    response = received[-1]["response"]
    done = [event for event in received if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == response["output"]
    assert [event["output_index"] for event in done] == list(range(len(done)))
    assert same(response) == same(json.loads(whole_response))
    for index, item in enumerate(response["output"]):
        pieces = [e["delta"] for e in received if e.get("output_index") == index and "delta" in e]
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(pieces) == whole
        if item["type"] == "function_call":
            assert len(pieces) == 1  # it is sent when it is complete
        else:
            assert len(pieces) > 5 or not whole


def test_a_call_and_its_result_make_an_answer(client: OpenAI) -> None:
    """As the Agents SDK goes on: everything is sent back."""
    first = client.responses.create(**question("Rome?", store=False))
    thought, call = first.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "I need the weather.", [])  # type: ignore[union-attr, index]
    assert (call.type, call.name, call.arguments, call.status) == ("function_call", "weather", ROME, "completed")  # type: ignore[union-attr]
    items = [
        {"role": "user", "content": "Rome?"},
        *[item.model_dump(exclude_unset=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"},  # type: ignore[union-attr]
    ]
    second = client.responses.create(**question(items, store=False))
    assert (second.output_text, second.status) == ("It is 21 degrees in Rome.", "completed")
    chat = client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "user", "content": "Rome?"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "I need the weather.",  # type: ignore[typeddict-unknown-key]
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ROME}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
        ],
        tools=[chat_tool(WEATHER), chat_tool(CLOCK)],
    )
    assert chat.usage is not None and second.usage is not None  # noqa: PT018
    assert second.usage.input_tokens == chat.usage.prompt_tokens


def test_a_stored_call_is_answered_by_its_result_alone(client: OpenAI) -> None:
    first = client.responses.create(**question("Rome?"))
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "21 degrees"}  # type: ignore[union-attr]
    second = client.responses.create(**question([result], previous_response_id=first.id))
    assert second.output_text == "It is 21 degrees in Rome."
    items = [item.model_dump(exclude_none=True) for item in client.responses.input_items.list(second.id)]
    assert items == [result | {"id": f"{second.id}-input-0", "status": "completed"}]
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    stored = [item.id for item in client.responses.input_items.list(first.id)]
    third = client.responses.create(**question([{"id": stored[0]}, *references, result]))
    assert third.output_text == second.output_text
    assert third.usage is not None and second.usage is not None  # noqa: PT018
    assert third.usage.input_tokens == second.usage.input_tokens
    client.responses.delete(first.id)
    without = client.responses.with_raw_response.create(**question([*references, result]))
    assert without.headers["x-mlxpaged-ignored"] == "input.item_reference"


def test_a_prompt_is_counted_without_an_answer(client: OpenAI) -> None:
    first = client.responses.create(**question("Rome?", instructions="Be brief."))
    count = client.responses.input_tokens.count
    assert first.usage is not None
    assert count(**question("Rome?", instructions="Be brief.")).input_tokens == first.usage.input_tokens
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "21 degrees"}  # type: ignore[union-attr]
    body = question([result], previous_response_id=first.id, reasoning={"effort": "none"})
    second = client.responses.create(**body)
    assert second.usage is not None
    assert count(**body).input_tokens == second.usage.input_tokens
    with pytest.raises(BadRequestError) as caught:
        count(**question("x", tool_choice={"type": "function", "name": "king"}))
    assert caught.value.param == "tool_choice"


def test_several_calls_or_one(client: OpenAI) -> None:
    both = client.responses.create(**question("Both?"))
    assert [item.type for item in both.output] == ["message", "function_call", "function_call"]
    assert both.output_text == "I ask both."
    one = client.responses.create(**question("Both?", parallel_tool_calls=False))
    assert [item.type for item in one.output] == ["message", "function_call"]
    assert (both.parallel_tool_calls, one.parallel_tool_calls) == (True, False)
    for parallel, status in ((True, "incomplete"), (False, "completed")):  # cut in the second call
        cut = client.responses.create(**question("Both?", parallel_tool_calls=parallel, max_output_tokens=100))
        assert cut.status == status


def test_a_malformed_call_is_text(client: OpenAI, server: RunningServer) -> None:
    body = question("Broken?")
    whole = client.responses.create(**body)
    assert whole.output_text == SCRIPT["Broken?"]
    assert [item.type for item in whole.output] == ["message"]
    received = raw_events(server, body)
    assert "function_call" not in json.dumps(received)
    assert same(received[-1]["response"]) == same(whole.to_dict())
    with client.responses.stream(**body) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_a_call_that_is_cut_off_is_text_of_an_incomplete_answer(client: OpenAI) -> None:
    response = client.responses.create(**question("Both?", max_output_tokens=50))
    assert (response.status, [item.type for item in response.output]) == ("incomplete", ["message"])
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert "<tool_call>" in response.output_text


def test_tool_choice_may_leave_tools_out(client: OpenAI, server: RunningServer) -> None:
    def tokens(**fields: Any) -> int:
        response = client.responses.create(**question("Rome?", **fields))
        assert response.usage is not None
        return response.usage.input_tokens

    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]}
    assert tokens(tool_choice=allowed) == tokens(tools=[CLOCK])
    response = client.responses.create(**question("Rome?", tool_choice=allowed))
    assert response.output_text == CALL  # of a tool that it may not call
    assert response.model_dump()["tool_choice"] == allowed
    assert [tool.name for tool in response.tools] == ["weather", "clock"]  # type: ignore[union-attr]
    assert tokens(tool_choice="none") == tokens(tools=[])


def test_chat_has_allowed_tools_too(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": name}} for name in ("weather", "clock")]
    fields: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "Both?"}], "tools": tools}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[1:]}}
    message = client.chat.completions.create(**fields, tool_choice=allowed).choices[0].message
    assert [call.function.name for call in message.tool_calls or ()] == ["clock"]  # type: ignore[union-attr]
    assert message.content == f"I ask both.\n{CALL}"
    allowed["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "king"}}]  # type: ignore[index]
    with pytest.raises(BadRequestError, match="king") as caught:
        client.chat.completions.create(**fields, tool_choice=allowed)
    assert caught.value.param == "tool_choice"


def test_usage_tells_thinking_and_what_was_cached(client: OpenAI) -> None:
    body = question("Why?", tools=[])
    client.responses.create(**body)
    usage = client.responses.create(**body, instructions=None).usage
    assert usage is not None
    assert usage.output_tokens_details.reasoning_tokens == len(f"\n{THOUGHT}\n") + 2  # a token for each byte and tag
    long = client.responses.create(**question("Hello", tools=[], instructions="Be brief. " * 20))
    again = client.responses.create(**question("Hello", tools=[], instructions="Be brief. " * 20))
    assert long.usage is not None and again.usage is not None  # noqa: PT018
    assert long.usage.output_tokens_details.reasoning_tokens == 0
    assert again.usage.input_tokens_details.cached_tokens >= 192


def test_effort_limits_or_forbids_thinking(client: OpenAI) -> None:
    short = client.responses.create(**question("Long?", tools=[], reasoning={"effort": "minimal", "summary": "auto"}))
    assert short.output[0].content[0].text == LONG[:256].rstrip()  # type: ignore[union-attr, index]
    assert (short.reasoning.effort, short.reasoning.summary) == ("minimal", None)  # type: ignore[union-attr]
    none = client.responses.create(**question("Why?", tools=[], reasoning={"effort": "none"}))
    assert (none.output_text, [item.type for item in none.output]) == ("At once.", ["message"])
    chat = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "Why?"}], reasoning_effort="none"
    )
    assert chat.choices[0].message.content == "At once."


def test_logprobs_are_those_of_the_text(client: OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [], "include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    response = client.responses.create(**question("Why?", **fields))
    [part] = response.output[1].content  # type: ignore[union-attr, misc]
    assert "".join(entry.token for entry in part.logprobs).strip() == "Because.<|im_end|>"  # type: ignore[union-attr]
    assert "encrypted_content" not in response.output[0].model_fields_set


def test_what_codex_sends(server: RunningServer, client: OpenAI) -> None:
    """The shape of its requests: nothing stored, everything sent back, and web search among the tools."""
    body: dict[str, Any] = {
        "model": "scripted",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You code."}]},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
        ],
        "tools": [WEATHER | {"strict": False}, TIME, {"type": "web_search", "external_web_access": True}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019b",
        "client_metadata": {"session": "1"},
    }
    received = raw_events(server, body)
    items = [event["item"] for event in received if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "function_call"]
    assert [tool["type"] for tool in received[0]["response"]["tools"]] == ["function", "namespace"]
    back = [items[0] | {"content": None}, items[0] | {"encrypted_content": "abcd"}, items[1]]
    output = {"type": "function_call_output", "id": "fco_1", "call_id": items[1]["call_id"], "output": "21 degrees"}
    last = raw_events(server, body | {"input": [*body["input"], *back, output]})[-1]
    assert last["response"]["output"][0]["content"][0]["text"] == "It is 21 degrees in Rome."
    one = body | {"input": [{"role": "system", "content": "You code.\n\n<permissions>"}, body["input"][2]]}
    assert client.responses.input_tokens.count(**prompt_of(one)) == client.responses.input_tokens.count(
        **prompt_of(body)
    )


def prompt_of(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("model", "input", "tools")}


def test_a_call_of_a_namespace_names_it(client: OpenAI, server: RunningServer) -> None:
    body = question("Time?", tools=[TIME])
    received = raw_events(server, body)
    [call] = received[-1]["response"]["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("time", "now", "{}")
    assert received[2]["item"]["namespace"] == "time"
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    items = [{"role": "user", "content": "Time?"}, call, output]
    plain = {"type": "function", "name": "time__now", "description": "Of clocks.\nThe time."}
    named = {name: value for name, value in call.items() if name != "namespace"} | {"name": "time__now"}
    count = client.responses.input_tokens.count
    flat = count(**question([items[0], named, output], tools=[plain | {"parameters": {}, "strict": False}]))
    assert count(**question(items, tools=[TIME])) == flat
    assert client.responses.create(**question(items, tools=[TIME])).output_text == "It is noon."


class City(BaseModel):
    name: str
    people: int


def test_structured_answers_are_parsed(demo_server: RunningServer) -> None:
    """On the demo model, which knows no cities: the form is what is enforced."""
    with demo_server.client(timeout=DEADLINE) as client:
        fields: dict[str, Any] = {"model": "demo", "input": "Rome?", "temperature": 0, "max_output_tokens": 200}
        parsed = client.responses.parse(**fields, text_format=City)
        assert isinstance(parsed.output_parsed, City)
        assert parsed.text is not None
        assert parsed.text.format.type == "json_schema"  # type: ignore[union-attr]
        with client.responses.stream(**fields, text_format=City) as stream:
            assert stream.get_final_response().output_parsed == parsed.output_parsed
        free = client.responses.create(**fields, text={"format": {"type": "json_object"}})
        assert free.status == "incomplete" or isinstance(json.loads(free.output_text), dict)
        assert free.output_text.startswith("{")


def test_the_asynchronous_client_and_its_stream(server: RunningServer) -> None:
    async def run() -> tuple[Any, ...]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE) as client:
            whole = await client.responses.create(**question("Rome?"))
            pieces = ""
            async with client.responses.stream(**question("Rome?")) as stream:
                async for event in stream:
                    if event.type == "response.function_call_arguments.delta":
                        pieces += event.delta
                last = await stream.get_final_response()
            return whole.output[1].arguments, pieces, last.output[1].arguments

    assert asyncio.run(run()) == (ROME, ROME, ROME)


def test_only_background_responses_could_be_cancelled(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="DELETE /v1/requests/resp-1"):
        client.responses.cancel("resp-1")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "file_search"}, {"type": "mcp", "server_label": "x"}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search"}] * 1025}, "tools"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools.0.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "king"}}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        (
            {"tools": [], "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "king"}}}},
            "text.format.schema",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input.0.call_id"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input.0.id"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_own_name(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**question("Rome?") | fields)
    assert caught.value.param == param
    assert str(caught.value.body["message"]).startswith(f"{param}: ")  # type: ignore[index]


def test_a_model_that_does_not_think_says_so(demo_server: RunningServer) -> None:
    with demo_server.client(timeout=DEADLINE) as client:
        body = question("x", model="demo", tools=[], reasoning={"effort": "low"}, max_output_tokens=16)
        answer = client.responses.with_raw_response.create(**body)
        assert answer.headers["x-mlxpaged-ignored"] == "reasoning.effort"
        unthinking: Response = client.responses.create(
            **question("x", model="demo", tools=[], reasoning={"effort": "none"}, max_output_tokens=1)
        )
        assert unthinking.status == "incomplete"
