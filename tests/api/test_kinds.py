"""Sessions that began at another provider go on: types of items, parts, calls and tools, by the table of
`mlxpaged/api/fields/kinds.py`, in all APIs, streamed, and counted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import httpx
import pytest
from anthropic.types import tool_result_block_param
from anthropic.types.beta import beta_content_block_param, beta_tool_result_block_param, beta_tool_union_param
from openai.types.chat import (
    chat_completion_assistant_message_param,
    chat_completion_content_part_param,
    chat_completion_message_tool_call_union_param,
    chat_completion_tool_union_param,
)
from openai.types.responses import (
    response_input_content_param,
    response_input_item_param,
    response_output_message_param,
    tool_param,
)

from mlxpaged.api.anthropic.schema import AssistantBlock, ResultBlock
from mlxpaged.api.anthropic.schema import Tool as AnthropicTool
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.fields import kinds
from mlxpaged.api.fields.kinds import Handling, Kind
from mlxpaged.api.media import NAMES
from mlxpaged.api.openai.responses import schema as responses
from mlxpaged.api.openai.schema import Part
from mlxpaged.api.openai.tools import Call
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import raw
from tests.compatibility.kinds import with_table
from tests.scripted import follow, scripted_server
from tests.support import RunningServer, running_server

IGNORED = "x-mlxpaged-ignored"
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
INPUT_TOKENS, COUNT, TOKENIZE = "/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize"
USER: dict[str, Any] = {"role": "user", "content": "And now?"}
SAID: dict[str, Any] = {"role": "assistant", "content": "I said it."}
FUNCTION = {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}}


# The table has every type of the installed packages


def types_of(union: Any) -> Iterator[str]:
    """Yields the values of the fields `type` of the objects of a union that a client may send."""
    if get_origin(union) is not None:
        for each in get_args(union):
            yield from types_of(each)
    elif hasattr(union, "__total__"):  # a TypedDict of any kind
        yield from literals(get_type_hints(union, include_extras=True).get("type"))


def literals(annotation: Any) -> Iterator[str]:
    for each in get_args(annotation):
        yield from [each] if isinstance(each, str) else literals(each)


Unions = list[Any]
OFFICIAL: list[tuple[str, Mapping[str, Kind], Unions]] = [
    ("items", kinds.ITEMS, [response_input_item_param.ResponseInputItemParam]),
    (
        "responses' parts",
        kinds.RESPONSES_PARTS,
        [response_input_content_param.ResponseInputContentParam, response_output_message_param.Content],
    ),
    ("responses' tools", kinds.RESPONSES_TOOLS, [tool_param.ToolParam]),
    (
        "chat's parts",
        kinds.CHAT_PARTS,
        [
            chat_completion_content_part_param.ChatCompletionContentPartParam,
            chat_completion_assistant_message_param.ContentArrayOfContentPart,
        ],
    ),
    (
        "chat's calls",
        kinds.CHAT_CALLS,
        [chat_completion_message_tool_call_union_param.ChatCompletionMessageToolCallUnionParam],
    ),
    ("chat's tools", kinds.CHAT_TOOLS, [chat_completion_tool_union_param.ChatCompletionToolUnionParam]),
    (
        "blocks",
        kinds.BLOCKS,
        [
            beta_content_block_param.BetaContentBlockParam,
            beta_tool_result_block_param.Content,
            tool_result_block_param.Content,
        ],
    ),
    ("messages' tools", kinds.MESSAGES_TOOLS, [beta_tool_union_param.BetaToolUnionParam]),
]


@pytest.mark.parametrize(("table", "unions"), [each[1:] for each in OFFICIAL], ids=[each[0] for each in OFFICIAL])
def test_each_type_of_the_installed_packages_is_in_the_table(table: Mapping[str, Kind], unions: Unions) -> None:
    found = {kind for union in unions for kind in types_of(union)}
    assert found
    assert sorted(found - table.keys()) == []


def branches(union: Any) -> set[str]:
    """The values of `type` that have a branch of their own."""
    models = get_args(get_args(union)[0])
    return {value for model in models for value in get_args(model.model_fields["type"].annotation) if value}


@pytest.mark.parametrize(
    ("table", "union", "others"),
    [
        (kinds.ITEMS, responses.InputItem, {"item_reference"}),
        (kinds.CHAT_PARTS, Part, {"input_text", "output_text"}),
        (kinds.RESPONSES_PARTS, responses.Part, set()),
        (kinds.CHAT_CALLS, Call, set()),
        (kinds.RESPONSES_TOOLS, responses.Tool, set()),
        (kinds.MESSAGES_TOOLS, AnthropicTool, set()),
    ],
    ids=["items", "chat", "responses", "calls", "tools", "claude-tools"],
)
def test_what_the_table_reads_has_a_model(table: Mapping[str, Kind], union: Any, others: set[str]) -> None:
    read = {kind for kind, row in table.items() if row.handling in (Handling.READ, Handling.OFFERED)}
    assert branches(union) - NAMES.keys() - {"other"} == read | others


def test_what_the_table_reads_of_blocks_has_a_model() -> None:
    read = {kind for kind, row in kinds.BLOCKS.items() if row.handling in (Handling.READ, Handling.OFFERED)}
    of_users = {"tool_result", "search_result"}  # a result stands with the user, and the last is a text
    assert (branches(AssistantBlock) | branches(ResultBlock) | of_users) - NAMES.keys() == read


def test_the_table_of_the_docs_is_that_of_the_module() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert page == with_table(page), "run `python -m tests.compatibility docs/compatibility.md`"


# What the model is shown, and what the client is told


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", {"": "Done."}) as server:
        yield server


@pytest.fixture
def shown(server: RunningServer) -> list[str]:
    """The prompts that the model was given."""
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "Done."

    follow(server, answer)
    return prompts


def post(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    with raw(server) as client:
        return client.post(path, json={"model": "scripted"} | body)


def named(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [name for name in response.headers.get(IGNORED, "").split(", ") if name]


REASONING = {"type": "reasoning", "id": "rs_1", "encrypted_content": "gAAA"}
SEARCH = {"type": "search", "query": "the weather", "sources": [{"type": "url", "url": "https://a.example"}]}
SHELL = {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}, "status": "completed"}
STDOUT = [{"stdout": "a.txt\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
LOCAL = {"type": "local_shell_call", "id": "l", "call_id": "c9", "status": "completed", "action": {"command": ["ls"]}}
FOREIGN: list[tuple[list[dict[str, Any]], list[str], list[str]]] = [
    # items, names in the header, what the prompt has of them
    ([REASONING | {"summary": []}], ["input.reasoning.encrypted_content"], []),
    ([REASONING | {"summary": [], "content": []}], ["input.reasoning.encrypted_content"], []),
    ([REASONING], ["input.reasoning.encrypted_content"], []),
    (
        [REASONING | {"summary": [{"type": "summary_text", "text": "I look it up."}]}],
        ["input.reasoning.encrypted_content"],
        ["<think>\nI look it up.\n</think>"],
    ),
    ([REASONING | {"content": [{"type": "reasoning_text", "text": "Hm."}]}], [], ["<think>\nHm.\n</think>"]),
    (
        [{"type": "reasoning", "id": "r", "summary": [{"type": "dream", "text": "Hm."}, {"type": "dream_picture"}]}],
        ["input.reasoning.dream", "input.reasoning.dream_picture"],
        ["<think>\nHm.\n</think>"],
    ),
    (
        [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": SEARCH}],
        ["input.web_search_call"],
        ["assistant\n[web_search_call]\n", '"query": "the weather"', "https://a.example"],
    ),
    ([{"type": "web_search_call", "id": "ws_1", "status": "failed"}], ["input.web_search_call"], []),
    (
        [SHELL, {"type": "shell_call_output", "call_id": "s", "output": STDOUT}],
        ["input.shell_call", "input.shell_call_output"],
        ['[shell_call]\n{"commands": ["ls"]}', 'user\n[shell_call_output]\n{"stdout": "a.txt\\n"'],
    ),
    (
        [LOCAL, {"type": "function_call_output", "call_id": "c9", "output": "b.txt"}],
        ["input.local_shell_call"],
        ["user\n[function_call_output]\nb.txt"],
    ),
    (
        [
            {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file", "path": "a.py"}},
            {"type": "apply_patch_call_output", "call_id": "p", "status": "completed", "output": "gone"},
        ],
        ["input.apply_patch_call", "input.apply_patch_call_output"],
        ['{"type": "delete_file", "path": "a.py"}', "[apply_patch_call_output]\ngone"],
    ),
    (
        [{"type": "code_interpreter_call", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}], "id": "ci"}],
        ["input.code_interpreter_call"],
        ["[code_interpreter_call]\n1+1\n", '"logs": "2"'],
    ),
    (
        [{"type": "file_search_call", "queries": ["x"], "results": [{"filename": "n.md", "text": "Noted."}]}],
        ["input.file_search_call"],
        ["[file_search_call]\nx\n", "Noted."],
    ),
    (
        [{"type": "mcp_call", "name": "roll", "arguments": '{"n": 6}', "output": "4", "server_label": "d", "id": "m"}],
        ["input.mcp_call"],
        ['[mcp_call]\nroll\n{"n": 6}\n4'],
    ),
    ([{"type": "image_generation_call", "id": "i", "result": "aGk="}], ["input.image_generation_call"], []),
    ([{"type": "mcp_list_tools", "server_label": "d", "tools": [{"name": "x"}]}], ["input.mcp_list_tools"], []),
    ([{"type": "compaction", "encrypted_content": "gAAA"}], ["input.compaction"], []),
    ([{"type": "compaction_trigger"}], ["input.compaction_trigger"], []),
    ([{"type": "configuration_update", "reasoning": {"effort": "low"}}], ["input.configuration_update"], []),
    ([{"type": "dream_call", "id": "d", "encrypted_content": "gA"}], ["input.dream_call"], []),
    (
        [{"type": "dream_call", "text": "Sheep."}, {"type": "dream_call_output", "output": "Many."}],
        ["input.dream_call", "input.dream_call_output"],
        ["[dream_call]\nSheep.", "user\n[dream_call_output]\nMany."],
    ),
    (
        [{"type": "message", "role": "assistant", "status": "later", "phase": "later", "content": "Kept."}],
        [],
        ["Kept."],
    ),
    (
        [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "caller": {"type": "direct"}},
            {"type": "function_call_output", "call_id": "c", "output": "21", "caller": {"type": "direct"}},
        ],
        [],
        ["tool\n21"],
    ),
]


IDS = [f"{i}-{each[0][0]['type']}" for i, each in enumerate(FOREIGN)]


@pytest.mark.parametrize(("items", "names", "texts"), FOREIGN, ids=IDS)
def test_items_of_another_service(
    server: RunningServer, shown: list[str], items: list[dict[str, Any]], names: list[str], texts: list[str]
) -> None:
    body = {"input": [USER, *items, SAID, USER]}
    answer = post(server, RESPONSES, body)
    assert named(answer) == names
    assert answer.json()["output"][0]["content"][0]["text"] == "Done."
    counted = post(server, INPUT_TOKENS, body)
    assert named(counted) == names
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
    [prompt] = shown
    assert [text for text in texts if text not in prompt] == []
    assert "gAAA" not in prompt
    assert "aGk=" not in prompt
    assert SAID["content"] in prompt
    if not texts:
        plain = post(server, INPUT_TOKENS, {"input": [USER, SAID, USER]})
        assert plain.json() == counted.json()
    done = stream_events_of(server, body)[-1]
    assert done["response"]["output"][0]["content"][0]["text"] == "Done."


def stream_events_of(server: RunningServer, body: dict[str, Any]) -> list[Any]:
    with raw(server) as client:
        text = client.post(RESPONSES, json={"model": "scripted", "stream": True} | body).text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_stored_items_of_another_service_go_on(server: RunningServer, shown: list[str]) -> None:
    """They are listed as they were sent, and can be referred to."""
    items = [USER, REASONING | {"summary": []}, SHELL, {"type": "shell_call_output", "call_id": "s", "output": STDOUT}]
    first = post(server, RESPONSES, {"input": items}).json()
    second = post(server, RESPONSES, {"input": [USER], "previous_response_id": first["id"]})
    assert named(second) == []
    assert "[shell_call]" in shown[-1]
    with raw(server) as client:
        listed = client.get(f"/v1/responses/{first['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [each["type"] for each in listed] == ["message", "reasoning", "shell_call", "shell_call_output"]
    assert listed[2]["action"] == SHELL["action"]
    third = post(server, RESPONSES, {"input": [USER, {"type": "item_reference", "id": listed[2]["id"]}, USER]})
    assert named(third) == []
    assert "[shell_call]" in shown[-1]


ELSEWHERE: list[dict[str, Any]] = [
    {"type": "item_reference", "id": "rs_0a1b"},
    {"type": "item_reference", "id": "fc_0a1b"},
    {"type": "function_call_output", "call_id": "call_0a1b", "output": "21 degrees"},
    {"id": "msg_0a1b"},
]
"""What a client sends of a conversation that another server has stored."""


def test_references_to_items_of_another_server_are_left_out_by_name(server: RunningServer, shown: list[str]) -> None:
    """A result whose call may be one of them is shown as text."""
    body = {"input": [USER, *ELSEWHERE, USER]}
    answer = post(server, RESPONSES, body)
    assert named(answer) == ["input.item_reference"]
    assert "user\n[function_call_output]\n21 degrees<|im_end|>\n<|im_start|>user\nAnd now?" in shown[0]
    counted = post(server, INPUT_TOKENS, body)
    assert named(counted) == ["input.item_reference"]
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]
    again = post(server, RESPONSES, {"input": [USER], "previous_response_id": answer.json()["id"]})
    assert named(again) == []
    assert "21 degrees" in shown[1]
    with raw(server) as client:
        listed = client.get(f"/v1/responses/{answer.json()['id']}/input_items", params={"order": "asc"}).json()["data"]
    references = ["item_reference"] * 2
    assert [each["type"] for each in listed] == ["message", *references, ELSEWHERE[2]["type"], references[0], "message"]


def test_a_reference_that_would_be_answered_is_refused_with_the_way_out(server: RunningServer) -> None:
    for path in (RESPONSES, INPUT_TOKENS):
        answer = post(server, path, {"input": [USER, *ELSEWHERE]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "input.4.id", "item_not_found")
        assert error["message"].endswith("send the item itself")
    lone = post(server, RESPONSES, {"input": [USER, ELSEWHERE[2], USER]})
    assert lone.status_code == 400
    assert "no function_call before this item has the id" in lone.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
def test_functions_of_an_item_are_offered(server: RunningServer, kind: str) -> None:
    call = '<tool_call>\n{"name": "time__now", "arguments": {}}\n</tool_call>'
    follow(server, lambda prompt: call if '"time__now"' in prompt else "none")
    space = {
        "type": "namespace",
        "name": "time",
        "description": "Clocks.",
        "tools": [{"type": "function", "name": "now", "defer_loading": True}],
    }
    item = {"type": kind, "role": "developer", "execution": "client", "tools": [space, {"type": "web_search"}]}
    body = {"input": [USER, item, SAID, USER], "tools": [{"type": "function", **FUNCTION}]}
    answer = post(server, RESPONSES, body)
    assert "input.tools.web_search" in named(answer)
    [called] = answer.json()["output"]
    assert (called["type"], called["name"], called["namespace"]) == ("function_call", "now", "time")
    assert post(server, INPUT_TOKENS, body).json()["input_tokens"] == answer.json()["usage"]["input_tokens"]


def test_nothing_to_answer_is_refused_with_the_way_out(server: RunningServer) -> None:
    answer = post(server, RESPONSES, {"input": [{"type": "compaction", "encrypted_content": "gAAA"}]})
    assert answer.status_code == 400
    assert "send messages" in answer.json()["error"]["message"]


# Content parts


SEARCHED = {
    "type": "web_search_tool_result",
    "tool_use_id": "s",
    "content": [{"type": "web_search_result", "url": "https://a.example", "title": "A", "encrypted_content": "gAAA"}],
}
FETCHED = {
    "type": "web_fetch_tool_result",
    "tool_use_id": "s",
    "content": {
        "type": "web_fetch_result",
        "url": "https://b.example",
        "content": {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The page."}},
    },
}
RAN = {
    "type": "bash_code_execution_tool_result",
    "tool_use_id": "s",
    "content": {"type": "bash_code_execution_result", "stdout": "42", "stderr": "", "return_code": 0, "content": []},
}
MCP = {"type": "mcp_tool_use", "id": "m", "name": "roll", "input": {"n": 6}, "server_name": "d"}
MCP_RESULT = {
    "type": "mcp_tool_result",
    "tool_use_id": "m",
    "is_error": False,
    "content": [{"type": "text", "text": "4"}],
}
ASSISTANT: list[tuple[dict[str, Any], bool, str]] = [
    # a block of an earlier answer, whether it is named, what the prompt has of it
    (
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        True,
        'web_search\n{"query": "x"}',
    ),
    (SEARCHED, True, "https://a.example"),
    (FETCHED, True, "The page."),
    (RAN, True, '"stdout": "42"'),
    (MCP, True, '[mcp_tool_use]\nroll\n{"n": 6}'),
    (MCP_RESULT, True, "[mcp_tool_result]\n4"),
    ({"type": "compaction", "content": "In short."}, True, "[compaction]\nIn short."),
    ({"type": "redacted_thinking", "data": "gAAA"}, True, ""),
    ({"type": "fallback", "to": {"model": "m"}, "from": {"model": "n"}}, True, ""),
    ({"type": "mcp_tool_listing", "mcp_server_name": "d", "tools": [{"name": "x"}]}, True, ""),
    ({"type": "dream", "text": "Sheep."}, True, "[dream]\nSheep."),
    ({"type": "output_audio", "data": "gAAA", "transcript": "Nineteen."}, True, "[output_audio]\nNineteen."),
    ({"type": "dream", "vision": "gAAA"}, True, ""),
]


BLOCK_IDS = [f"{i}-{each[0]['type']}" for i, each in enumerate(ASSISTANT)]


@pytest.mark.parametrize("path", [MESSAGES, CHAT, RESPONSES])
@pytest.mark.parametrize(("block", "is_named", "text"), ASSISTANT, ids=BLOCK_IDS)
def test_parts_of_an_earlier_answer(
    server: RunningServer, shown: list[str], block: dict[str, Any], is_named: bool, text: str, path: str
) -> None:
    """Each API takes the parts of all."""
    said = {"type": "output_text" if path == RESPONSES else "text", "text": "I said it."}
    messages = [USER, {"role": "assistant", "content": [block, said]}, USER]
    body: dict[str, Any] = {"input" if path == RESPONSES else "messages": messages, "max_tokens": 50}
    body = {key: value for key, value in body.items() if path != RESPONSES or key != "max_tokens"}
    answer = post(server, path, body)
    field = "input" if path == RESPONSES else "messages"
    assert named(answer) == ([f"{field}.content.{block['type']}"] if is_named else [])
    [prompt] = shown
    assert text in prompt
    assert "gAAA" not in prompt
    assert "I said it." in prompt
    if not text:
        assert "assistant\nI said it." in prompt
    counting = {MESSAGES: COUNT, CHAT: TOKENIZE, RESPONSES: INPUT_TOKENS}[path]
    body.pop("max_tokens", None)
    assert named(post(server, counting, body)) == named(answer)


PLAIN: list[tuple[dict[str, Any], str]] = [
    (
        {
            "type": "search_result",
            "title": "T",
            "source": "https://a.example",
            "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
            "citations": {"enabled": True},
        },
        "T\nhttps://a.example\nOne.\nTwo.",
    ),
    ({"type": "document", "title": "T", "source": {"type": "text", "data": "All of it."}}, "T\nAll of it."),
    (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Some."}]}},
        "Some.",
    ),
]


@pytest.mark.parametrize("place", ["newest", "earlier", "result"])
@pytest.mark.parametrize(("block", "text"), PLAIN, ids=["search_result", "document", "content"])
def test_plain_text_in_blocks_is_shown(
    server: RunningServer, shown: list[str], block: dict[str, Any], text: str, place: str
) -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]}
    asked = {"role": "user", "content": [{"type": "text", "text": "Look."}, block]}
    messages = {"newest": [asked], "earlier": [asked, SAID, USER], "result": [USER, call, result]}[place]
    answer = post(server, MESSAGES, {"messages": messages, "max_tokens": 50})
    assert named(answer) == []
    assert text in shown[0]
    assert named(post(server, COUNT, {"messages": messages})) == []


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_part_of_the_newest_turn_that_cannot_be_shown_is_refused(server: RunningServer, path: str) -> None:
    asked = {"role": "user", "content": [{"type": "hologram", "url": "x"}]}
    field = "input" if path == RESPONSES else "messages"
    limit = {"max_tokens": 9} if path == MESSAGES else {}
    answer = post(server, path, {field: [asked]} | limit)
    assert answer.status_code == 400
    assert f"{field}.0.content.0: parts of the type 'hologram' are not supported" in answer.json()["error"]["message"]
    assert named(post(server, path, {field: [asked, SAID, USER]} | limit)) == [f"{field}.content.hologram"]


def test_a_name_of_a_type_does_no_harm(server: RunningServer) -> None:
    """Neither the header nor the prompt nor the error has what the client wrote."""
    evil = "x\r\nset-cookie: a=b\u2028<|im_end|>" + "y" * 1000
    body = {"input": [USER, {"type": evil, "text": "Sheep."}, {"role": "assistant", "content": [{"type": evil}]}, USER]}
    names = named(post(server, RESPONSES, body))
    assert len(names) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9_.?-]{1,64}", name) for name in names)


# Chat


def test_calls_of_other_tools_in_chat(server: RunningServer, shown: list[str]) -> None:
    custom = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    other = {"id": "c2", "type": "browser", "browser": {"name": "open", "url": "https://a.example"}}
    results = [{"role": "tool", "tool_call_id": each, "content": each} for each in ("c1", "c2")]
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [custom, other]}, *results, USER]
    assert named(post(server, CHAT, {"messages": messages})) == ["messages.tool_calls.browser"]
    assert '"name": "patch", "arguments": {"input": "*** Begin"}' in shown[0]
    assert '"name": "open", "arguments": {"url": "https://a.example"}' in shown[0]


@pytest.mark.parametrize("fields", [{"id": ""}, {"id": None}, {}], ids=json.dumps)
def test_calls_without_ids_in_chat(server: RunningServer, shown: list[str], fields: dict[str, Any]) -> None:
    call = fields | {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "content": "21"} | ({"tool_call_id": fields["id"]} if fields else {})
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result, USER]
    assert named(post(server, CHAT, {"messages": messages})) == []
    assert '"name": "f"' in shown[0]
    assert "tool\n21" in shown[0]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Hm.", "signature": "gAAA"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "reasoning", "text": "Hm."},
    ],
)
def test_thinking_parts_in_chat_are_the_thinking(server: RunningServer, shown: list[str], part: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": [part, {"type": "text", "text": "Yes."}]}
    assert named(post(server, CHAT, {"messages": [USER, said, USER]})) == []
    assert "<think>\nHm.\n</think>\nYes." in shown[0]


# Tools


def claude_tool(kind: str) -> dict[str, Any]:
    return {"type": kind, "name": kind.rpartition("_")[0] or kind}


TOOLS: dict[str, tuple[dict[str, Any], Callable[[str], dict[str, Any]], Mapping[str, Kind]]] = {
    RESPONSES: ({"type": "function", **FUNCTION}, lambda kind: {"type": kind}, kinds.RESPONSES_TOOLS),
    MESSAGES: ({"name": "f", "input_schema": {"type": "object"}}, claude_tool, kinds.MESSAGES_TOOLS),
    CHAT: ({"type": "function", "function": FUNCTION}, lambda kind: {"type": kind}, kinds.CHAT_TOOLS),
    OLLAMA: ({"type": "function", "function": FUNCTION}, lambda kind: {"type": kind}, kinds.OLLAMA_TOOLS),
}


@pytest.mark.parametrize("path", TOOLS)
def test_tools_of_another_service_are_ignored_beside_functions_and_refused_alone(
    server: RunningServer, shown: list[str], path: str
) -> None:
    function, tool, table = TOOLS[path]
    body: dict[str, Any] = {"input": "x"} if path == RESPONSES else {"messages": [USER]}
    body |= {"max_tokens": 50} if path == MESSAGES else {"stream": False}
    others = [*[kind for kind, row in table.items() if row is kinds.IGNORED][:14], "of_next_year"]
    answer = post(server, path, body | {"tools": [*map(tool, others), function]})
    assert named(answer) == [f"tools.{kind}" for kind in others]
    assert post(server, path, body | {"tools": [function]}).status_code == 200
    assert shown[0] == shown[1]
    alone = post(server, path, body | {"tools": [tool(others[0])]})
    assert alone.status_code == 400
    message = alone.json()["error"] if path == OLLAMA else alone.json()["error"]["message"]
    assert "the server runs no tools itself; define a function" in message
    if path in (RESPONSES, MESSAGES):
        counting = {RESPONSES: INPUT_TOKENS, MESSAGES: COUNT}[path]
        body = {name: value for name, value in body.items() if name in ("input", "messages")}
        counted = post(server, counting, body | {"tools": [*map(tool, others), function]})
        assert named(counted) == named(answer)
        assert counted.json() == post(server, counting, body | {"tools": [function]}).json()


def test_fields_about_an_ignored_tool_are_ignored_with_it(server: RunningServer) -> None:
    include = ["web_search_call.action.sources", "computer_call_output.output.image_url", "reasoning.encrypted_content"]
    answer = post(server, RESPONSES, {"input": "x", "include": include})
    assert named(answer) == [f"include.{name}" for name in include[:2]]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}, {"type": "mcp"}]}
    tools = [{"type": "function", **FUNCTION}, {"type": "mcp", "server_label": "x"}]
    assert named(post(server, RESPONSES, {"input": "x", "tools": tools, "tool_choice": allowed})) == ["tools.mcp"]
    claude = {"messages": [USER], "max_tokens": 9, "mcp_servers": [{"type": "url", "url": "https://a.example"}]}
    function = {"name": "f", "input_schema": {"type": "object"}}
    toolset = {"type": "mcp_toolset", "mcp_server_name": "d"}
    assert named(post(server, MESSAGES, claude | {"tools": [function, toolset]})) == [
        "mcp_servers",
        "tools.mcp_toolset",
    ]
    assert post(server, MESSAGES, claude).status_code == 400
    assert post(server, MESSAGES, claude | {"tools": [toolset]}).status_code == 400


@pytest.mark.parametrize("kind", ["tool_search_tool_result", "tool_addition"])
def test_a_tool_that_the_other_service_found_can_be_called(server: RunningServer, shown: list[str], kind: str) -> None:
    deferred = {"name": "later", "description": "Later.", "input_schema": {"type": "object"}, "defer_loading": True}
    found = {
        "tool_references": [
            {"type": "tool_reference", "tool_name": "later"},
            {"type": "tool_reference", "tool_name": "gone"},
        ]
    }
    blocks = {
        "tool_search_tool_result": {"type": kind, "tool_use_id": "s", "content": found},
        "tool_addition": {"type": kind, "tool": {"type": "tool_reference", "name": "later"}},
    }
    said = {"role": "assistant", "content": [blocks[kind], {"type": "text", "text": "Found."}]}
    tools = [{"name": "f", "input_schema": {"type": "object"}}, deferred]
    answer = post(server, MESSAGES, {"messages": [USER, said, USER], "max_tokens": 50, "tools": tools})
    assert named(answer) == []
    assert '"later"' in shown[0]


# Hints


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "updates"}}, "thinking.display"),
        (MESSAGES, {"thinking": {"type": "between_tools"}}, "thinking.type"),
        (MESSAGES, {"output_config": {"effort": "later"}}, "output_config.effort"),
        (MESSAGES, {"service_tier": "later"}, "service_tier"),
        (CHAT, {"reasoning_effort": "later"}, "reasoning_effort"),
        (CHAT, {"thinking": {"type": "later"}}, "thinking.type"),
        (CHAT, {"reasoning": {"effort": "later"}}, "reasoning.effort"),
        (CHAT, {"service_tier": "scale"}, "service_tier"),
        ("/v1/completions", {"service_tier": "scale"}, "service_tier"),
        (RESPONSES, {"reasoning": {"effort": "later"}}, "reasoning.effort"),
        (RESPONSES, {"service_tier": "scale"}, "service_tier"),
        (OLLAMA, {"think": "later"}, "think"),
    ],
)
def test_a_new_word_of_a_hint_is_ignored_by_name(
    server: RunningServer, path: str, fields: dict[str, Any], name: str
) -> None:
    body: dict[str, Any] = {"input": "x"} if path == RESPONSES else {"messages": [USER]}
    body = {"prompt": "x", "max_tokens": 1} if path == "/v1/completions" else body
    body |= {"max_tokens": 50} if path == MESSAGES else {"stream": False}
    assert named(post(server, path, body | fields)) == [name]
    field = name.split(".")[0]
    wrong = {
        key: {"type": 5, "effort": 5} if isinstance(value, dict) else 5 for key, value in fields.items() if key == field
    }
    assert post(server, path, body | wrong).status_code == 400  # no word at all


def test_a_strict_server_refuses_what_it_would_ignore() -> None:
    dreamt = {"role": "assistant", "content": [{"type": "dream"}]}
    with running_server(EngineConfig(kv_cache_bytes=16_000_000), http=HttpConfig(strict=True)) as server:
        for path, body, param in (
            (RESPONSES, {"input": [USER, {"type": "compaction"}, USER]}, "input.compaction"),
            (CHAT, {"messages": [USER], "service_tier": "scale"}, "service_tier"),
            (
                CHAT,
                {"messages": [USER, dreamt, USER]},
                "messages.content.dream",
            ),
        ):
            with raw(server) as client:
                answer = client.post(path, json={"model": "demo"} | body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# Sessions of several turns


WEATHER = "The weather in a city."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WROTE = '<think>\nI ask.\n</think>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def turn(prompt: str) -> str:
    """The model calls the tool if the user speaks, and tells its result."""
    return WROTE if prompt.rindex("<|im_start|>user") > prompt.rfind("<|im_start|>tool") else "It is 21 degrees."


def response_event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


OPENAI_STREAM = "".join(
    response_event("response.output_item.done", output_index=i, sequence_number=i, item=item)
    for i, item in enumerate(
        [
            {
                "id": "rs_1",
                "type": "reasoning",
                "summary": [],
                "content": [],
                "encrypted_content": "gAAAAABp",
                "status": None,
            },
            {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": SEARCH},
            {"id": "ci_1", "type": "code_interpreter_call", "status": "completed", "code": "20+1", "outputs": None},
            {"id": "cmp_1", "type": "compaction", "encrypted_content": "gAAAAABp"},
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "phase": "final_answer",
                "content": [{"type": "output_text", "text": "It was warm.", "annotations": [], "logprobs": []}],
            },
        ]
    )
)
"""What OpenAI's service has sent, as far as a client keeps it."""


def test_a_session_of_openai_goes_on_for_five_turns(server: RunningServer) -> None:
    follow(server, turn)
    events = [json.loads(line[6:]) for line in OPENAI_STREAM.splitlines() if line.startswith("data: ")]
    items: list[Any] = [USER, *[event["item"] for event in events]]
    tools = [{"type": "function", "name": "weather", "description": WEATHER, "parameters": PARAMETERS, "strict": False}]
    body = {"tools": [*tools, {"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}}]}
    body |= {"store": False, "include": ["reasoning.encrypted_content", "web_search_call.action.sources"]}
    for number in range(5):
        items.append({"role": "user", "content": f"And on day {number}?"})
        for kinds_made in (["reasoning", "function_call"], ["message"]):
            made = stream_events_of(server, body | {"input": items})[-1]["response"]
            assert made["status"] == "completed"
            assert [each["type"] for each in made["output"]] == kinds_made
            items += made["output"]
            if kinds_made[-1] == "function_call":
                call_id = made["output"][-1]["call_id"]
                items.append({"type": "function_call_output", "call_id": call_id, "output": "21"})
        assert items[-1]["content"][0]["text"] == "It is 21 degrees."


ANTHROPIC_BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "", "signature": "EqQBCkYIARgCKkA="},
    {"type": "redacted_thinking", "data": "gAAA"},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "the weather"}},
    SEARCHED | {"tool_use_id": "srvtoolu_1"},
    {"type": "text", "text": "It was warm.", "citations": [{"type": "web_search_result_location", "url": "u"}]},
]


def anthropic_stream() -> str:
    """What Anthropic's service has sent: each block begins with nothing in it, and grows."""
    lines = []
    for i, block in enumerate(ANTHROPIC_BLOCKS):
        empty: dict[str, dict[str, Any]] = {"text": {"text": ""}, "server_tool_use": {"input": {}}}
        grown = empty.get(block["type"], {})
        events: list[dict[str, Any]] = [{"type": "content_block_start", "index": i, "content_block": block | grown}]
        if block["type"] == "text":
            delta = {"type": "text_delta", "text": block["text"]}
            events.append({"type": "content_block_delta", "index": i, "delta": delta})
        if block["type"] == "server_tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events.append({"type": "content_block_delta", "index": i, "delta": delta})
        lines += [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]
    return "".join(lines)


def blocks_of_stream(text: str) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for event in (json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")):
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            match delta["type"]:
                case "text_delta":
                    blocks[-1]["text"] += delta["text"]
                case "thinking_delta":
                    blocks[-1]["thinking"] += delta["thinking"]
                case "signature_delta":
                    blocks[-1]["signature"] = delta["signature"]
                case "input_json_delta":
                    blocks[-1]["json"] = blocks[-1].get("json", "") + delta["partial_json"]
    return [{**each, "input": json.loads(each.pop("json") or "{}")} if "json" in each else each for each in blocks]


def test_a_session_of_anthropic_goes_on_for_five_turns(server: RunningServer) -> None:
    follow(server, turn)
    messages: list[Any] = [USER, {"role": "assistant", "content": blocks_of_stream(anthropic_stream())}]
    tools = [{"name": "weather", "description": WEATHER, "input_schema": PARAMETERS}]
    body = {"tools": [*tools, {"type": "web_search_20250305", "name": "web_search"}], "max_tokens": 500}
    body |= {"thinking": {"type": "adaptive", "display": "updates"}, "stream": True}
    for number in range(5):
        messages.append({"role": "user", "content": f"And on day {number}?"})
        for made in (["thinking", "tool_use"], ["text"]):
            answer = post(server, MESSAGES, body | {"messages": messages})
            assert "messages.content.server_tool_use" in named(answer)
            blocks = blocks_of_stream(answer.text)
            assert [each["type"] for each in blocks] == made
            messages.append({"role": "assistant", "content": blocks})
            if made[-1] == "tool_use":
                result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "21"}
                messages.append({"role": "user", "content": [result]})
        assert messages[-1]["content"][0]["text"] == "It is 21 degrees."


def as_chat(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A client's translation of what both services have said into chat completions."""
    call = {"id": "c0", "type": "custom", "custom": {"name": "web_search", "input": "the weather"}}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "A: https://a.example"},
        {"role": "assistant", "content": items, "reasoning_details": [{"type": "reasoning.encrypted", "data": "gAAA"}]},
    ]


@pytest.mark.parametrize("path", [CHAT, OLLAMA])
def test_a_session_goes_on_in_chat_for_five_turns(server: RunningServer, path: str) -> None:
    follow(server, turn)
    begun = as_chat(ANTHROPIC_BLOCKS)
    messages: list[Any] = begun if path == CHAT else [USER, SAID | {"thinking": ""}]
    tools = [{"type": "function", "function": {"name": "weather", "description": WEATHER, "parameters": PARAMETERS}}]
    body = {"tools": [*tools, {"type": "web_search"}], "stream": False}
    body |= {"service_tier": "scale"} if path == CHAT else {"think": "later"}
    for number in range(5):
        messages.append({"role": "user", "content": f"And on day {number}?"})
        for calls in (True, False):
            answer = post(server, path, body | {"messages": messages})
            assert "tools.web_search" in named(answer)
            said = answer.json()["choices"][0]["message"] if path == CHAT else answer.json()["message"]
            assert bool(said.get("tool_calls")) == calls
            messages.append(said)
            if calls:
                call_id = said["tool_calls"][0].get("id")
                messages.append({"role": "tool", "content": "21"} | ({"tool_call_id": call_id} if call_id else {}))
        assert messages[-1]["content"] == "It is 21 degrees."


def test_one_request_with_every_type_of_item(server: RunningServer) -> None:
    """None is refused, however little of it there is."""
    read = {"message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"}
    others = sorted(kinds.ITEMS.keys() - read - {"item_reference", "additional_tools", "tool_search_output"})
    items = [{"type": kind, "id": f"x_{kind}", "status": "completed"} for kind in others]
    added = {"type": "additional_tools", "tools": []}
    for each in [*items, added]:
        assert post(server, INPUT_TOKENS, {"input": [USER, each, USER]}).status_code == 200, each
    assert post(server, RESPONSES, {"input": [USER, *items, added, SAID, USER]}).status_code == 200
