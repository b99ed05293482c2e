"""Custom tools of the responses API: calls whose input is a text, which a grammar may enforce, and their histories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.responses import ResponseCustomToolCall

from mlxpaged.api.openai.responses.renderer import text_of
from tests.api.helpers import DEADLINE, raw
from tests.formats.written import WRITTEN
from tests.scripted import scripted_server
from tests.support import RunningServer

PATCH = '*** Begin Patch\n+a "quoted" line\n*** End Patch\n'
LARK = """start: "*** Begin Patch\\n" line+ "*** End Patch\\n"
line: "+" /[a-z ]{0,8}/ "\\n"
"""
FITTING = re.compile(r"\*\*\* Begin Patch\n(\+[a-z ]{0,8}\n)+\*\*\* End Patch\n")
PATCH_TOOL = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
WITH_LARK = PATCH_TOOL | {"format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
WITH_REGEX = PATCH_TOOL | {"format": {"type": "grammar", "syntax": "regex", "definition": "[A-C]{3}-[0-9]"}}
FUNCTION = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
NAMED = {"type": "custom", "name": "apply_patch"}
FORMATS = ("json_tools", "qwen3_coder", "harmony")


@pytest.fixture(scope="module", params=FORMATS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    script = {
        "Patch it.": WRITTEN[request.param]("apply_patch", {"input": PATCH}),
        "Talk.": "I would rather talk.",
        "Done!": "All is done.",
    }
    with scripted_server(tmp_path_factory.mktemp("model"), request.param, script) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with server.client(timeout=DEADLINE) as client:
        yield client


def ask(said: Any, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "scripted", "input": said, "tools": list(tools or (PATCH_TOOL,)), "temperature": 0}
    return body | {"max_output_tokens": 300} | fields


def calls_in(output: list[Any]) -> list[ResponseCustomToolCall]:
    return [item for item in output if item.type == "custom_tool_call"]


def test_a_call_has_its_text_as_input(client: OpenAI) -> None:
    response = client.responses.create(**ask("Patch it.", PATCH_TOOL, FUNCTION))
    [call] = calls_in(response.output)
    assert (call.name, call.input) == ("apply_patch", PATCH)
    assert response.tools[0].model_dump(exclude_none=True)["type"] == "custom"


def test_the_events_of_a_call_have_one_id_and_its_text(client: OpenAI) -> None:
    events = list(client.responses.create(**ask("Patch it."), stream=True))
    of_input = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
    assert [event.type.rpartition(".")[2] for event in of_input] == ["delta", "done"]
    assert [getattr(event, "delta", None) or getattr(event, "input", None) for event in of_input] == [PATCH, PATCH]
    [added] = [e.item for e in events if e.type == "response.output_item.added" and e.item.type == "custom_tool_call"]
    [done] = [e.item for e in events if e.type == "response.output_item.done" and e.item.type == "custom_tool_call"]
    assert {added.id, done.id, *(event.item_id for event in of_input)} == {added.id}  # type: ignore[union-attr]
    assert (added.call_id, done.input) == (done.call_id, PATCH)


def test_a_call_and_its_result_go_back_into_the_conversation(client: OpenAI, server: RunningServer) -> None:
    first = client.responses.create(**ask("Patch it."))
    [call] = calls_in(first.output)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done!"}
    stored = client.responses.create(**ask([result], previous_response_id=first.id))
    user = {"role": "user", "content": "Patch it."}
    sent = client.responses.create(**ask([user, call.model_dump(exclude_none=True), result]))
    assert stored.output_text == sent.output_text == "All is done."
    listed = client.responses.input_items.list(stored.id).data
    assert [item.type for item in listed] == ["custom_tool_call_output"]
    with raw(server) as http:
        unknown = http.post("/v1/responses", json=ask([user, result | {"call_id": "other"}]))
    assert unknown.status_code == 400
    assert "no custom_tool_call before this item" in unknown.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["required", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}])
def test_a_regular_expression_holds_for_the_input(client: OpenAI, choice: Any) -> None:
    """This Harmony model would think for ever."""
    body = ask("Talk.", WITH_REGEX, tool_choice=choice, parallel_tool_calls=False, reasoning={"effort": "minimal"})
    [call] = calls_in(client.responses.create(**body | {"max_output_tokens": 500}).output)
    assert re.fullmatch("[A-C]{3}-[0-9]", call.input)


def test_a_grammar_holds_for_the_input_where_the_format_writes_text(server: RunningServer, client: OpenAI) -> None:
    """In JSON, a text has quotes and escapes. The header says that the grammar is not enforced there."""
    body = ask("Talk.", WITH_LARK, FUNCTION, tool_choice=NAMED)
    assert server.engine.info is not None
    if server.engine.info.tokenizer.tags.tools.name == "qwen3_coder":
        [call] = calls_in(client.responses.create(**body).output)
        assert FITTING.fullmatch(call.input), call.input
    else:
        with pytest.raises(BadRequestError, match=r"tools\.0: .*Lark's notation does not hold for a string in JSON"):
            client.responses.create(**body)
        answer = client.responses.with_raw_response.create(**ask("Patch it.", WITH_LARK))
        assert answer.headers["x-mlxpaged-ignored"] == "tools.strict"
        assert calls_in(answer.parse().output)[0].input == PATCH


def test_the_model_sees_what_the_input_must_be(server: RunningServer) -> None:
    with raw(server) as http:
        counts = [
            http.post("/v1/responses/input_tokens", json={"model": "scripted", "input": "x", "tools": [tool]}).json()
            for tool in (WITH_LARK, PATCH_TOOL)
        ]
    assert counts[0]["input_tokens"] > counts[1]["input_tokens"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (PATCH_TOOL | {"format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}, "tools.0.format.syntax"),
        (PATCH_TOOL | {"format": {"type": "grammar", "syntax": "regex"}}, "tools.0.format.definition"),
        (PATCH_TOOL | {"format": {"type": "json"}}, "tools.0.format"),
        (PATCH_TOOL | {"name": "no name"}, "tools.0.name"),
        (PATCH_TOOL | {"format": {"type": "grammar", "syntax": "regex", "definition": "("}}, "tool"),
    ],
)
def test_what_is_no_custom_tool_is_refused(client: OpenAI, tool: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**ask("Talk.", tool, tool_choice="required"))
    assert str(caught.value.param).startswith(param)


def test_other_names_of_the_only_argument_count_as_the_text() -> None:
    assert text_of(json.dumps({"input": "a", "b": 1})) == "a"
    assert text_of(json.dumps({"patch": "a"})) == "a"
    assert text_of(json.dumps({"a": 1})) == '{"a": 1}'
    assert text_of("{}") == "{}"
