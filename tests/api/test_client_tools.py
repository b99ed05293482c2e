"""Anthropic's own tools that the client runs, with the official client: the model is shown functions, and its calls and
their results are those of any other tool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.lib.tools import BetaAbstractMemoryTool
from anthropic.types import beta
from pydantic import TypeAdapter

from mlxpaged.api.anthropic.client_tools import CLIENT_TOOLS
from mlxpaged.api.anthropic.schema import ClientTool
from mlxpaged.api.fields.kinds import MESSAGES_TOOLS, READ
from tests.api.helpers import DEADLINE
from tests.api.test_anthropic import body, both_ways
from tests.api.test_anthropic_agents import prompt_of
from tests.support import RunningServer


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


LS = call("bash", command="ls -l")
VIEW = call("str_replace_based_edit_tool", command="view", path="/repo/a.py", view_range=[1, -1])
OLD_VIEW = call("str_replace_editor", command="undo_edit", path="/repo/a.py")
NOTE = call("memory", command="create", path="/memories/a.md", file_text="Rome is warm.")
MOVE = call("memory", command="rename", old_path="/memories/a.md", new_path="/memories/b.md")
SCRIPT = {
    "Files?": LS,
    "See?": VIEW,
    "Undo?": OLD_VIEW,
    "Note it.": NOTE,
    "total 0": "There are none.",
    "File created successfully": MOVE,
    "Successfully renamed": "Noted.",
}
CALLS = {
    "bash": ("Files?", {"command": "ls -l"}),
    "str_replace_based_edit_tool": ("See?", {"command": "view", "path": "/repo/a.py", "view_range": [1, -1]}),
    "str_replace_editor": ("Undo?", {"command": "undo_edit", "path": "/repo/a.py"}),
    "memory": ("Note it.", {"command": "create", "path": "/memories/a.md", "file_text": "Rome is warm."}),
}


@pytest.fixture
def client(server: RunningServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
        yield client
    server.wait_idle(DEADLINE)


def tool(kind: str, **fields: Any) -> Any:
    return {"type": kind, "name": CLIENT_TOOLS[kind].name} | fields


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
def test_a_call_comes_back_as_a_tool_use_with_its_name(client: Anthropic, kind: str) -> None:
    """The same request without a stream and as a stream."""
    question, arguments = CALLS[CLIENT_TOOLS[kind].name]
    message = both_ways(client, body(question, tools=[tool(kind)]))
    (use,) = message.content
    assert (message.stop_reason, use.type, use.name) == ("tool_use", "tool_use", CLIENT_TOOLS[kind].name)
    assert use.input == arguments


def test_a_result_is_shown_to_the_model_as_that_of_a_function(client: Anthropic) -> None:
    tools = [tool("bash_20250124")]
    use = client.messages.create(**body("Files?", tools=tools)).content[0]
    assert use.type == "tool_use"
    messages: list[Any] = [
        {"role": "user", "content": "Files?"},
        {"role": "assistant", "content": [use.to_dict()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "total 0"}]},
    ]
    message = both_ways(client, body("", messages=messages, tools=tools))
    assert message.content[0].text == "There are none."


class Memory(BetaAbstractMemoryTool):
    """The package's tool, with files in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str] = {}

    def view(self, command: Any) -> str:
        return self.files[command.path]

    def create(self, command: Any) -> str:
        self.files[command.path] = command.file_text
        return "File created successfully"

    def rename(self, command: Any) -> str:
        self.files[command.new_path] = self.files.pop(command.old_path)
        return "Successfully renamed"

    str_replace = insert = delete = view


@pytest.mark.parametrize("stream", [False, True])
def test_the_packages_own_tool_runner_runs_what_the_model_calls(client: Anthropic, stream: bool) -> None:
    memory = Memory()
    fields: Any = body("Note it.", tools=[memory])
    runner: Any = client.beta.messages.tool_runner(**fields, stream=stream)
    messages = [turn.get_final_message() if stream else turn for turn in runner]
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use", "end_turn"]
    assert messages[-1].content[0].text == "Noted."
    assert memory.files == {"/memories/b.md": "Rome is warm."}


def test_the_model_is_shown_a_function_with_the_parameters(client: Anthropic, server: RunningServer) -> None:
    editor = tool("text_editor_20250728", max_characters=10_000, cache_control={"type": "ephemeral"})
    shown = prompt_of(client, server, tools=[tool("bash_20250124"), editor, tool("memory_20250818")])
    for name in ("bash", "str_replace_based_edit_tool", "memory"):
        assert f'"name": "{name}"' in shown
    assert '"enum": ["view", "create", "str_replace", "insert"]' in shown
    assert "A file is shown up to 10,000 characters." in shown
    assert "10,000" not in prompt_of(client, server, tools=[tool("text_editor_20250728")])


def test_nothing_of_them_is_ignored(client: Anthropic) -> None:
    tools = [tool("memory_20250818"), tool("text_editor_20250728", max_characters=9, cache_control=None)]
    response = client.messages.with_raw_response.create(**body("Note it.", tools=tools))
    assert "x-mlxpaged-ignored" not in response.headers


def test_they_stand_beside_functions_and_tools_of_the_server(client: Anthropic, server: RunningServer) -> None:
    function: Any = {"name": "weather", "input_schema": {"type": "object"}}
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    response = client.messages.with_raw_response.create(
        **body("Files?", tools=[search, tool("bash_20250124"), function])
    )
    assert response.headers["x-mlxpaged-ignored"] == "tools.web_search_20250305"
    assert response.parse().content[0].type == "tool_use"
    alone = client.messages.with_raw_response.create(**body("Files?", tools=[search, tool("bash_20250124")]))
    assert alone.parse().stop_reason == "tool_use"
    shown = prompt_of(client, server, tools=[function, tool("bash_20250124", defer_loading=True)])
    assert '"bash"' not in shown


def test_tokens_are_counted_with_the_function(client: Anthropic) -> None:
    def count(**fields: Any) -> int:
        return client.messages.count_tokens(
            model="scripted", messages=[{"role": "user", "content": "Files?"}], **fields
        ).input_tokens

    assert count(tools=[tool("bash_20250124")]) > count() + 100


def test_one_of_them_can_be_required(client: Anthropic) -> None:
    """Its arguments are those of the schema, though the script says something else."""
    choice = {"type": "tool", "name": "memory"}
    tools = [tool("memory_20250818"), tool("bash_20250124")]
    (use,) = client.messages.create(**body("Files?", tools=tools, tool_choice=choice)).content
    assert (use.type, use.name) == ("tool_use", "memory")
    assert use.input["command"] in ("view", "create", "str_replace", "insert", "delete", "rename")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([tool("bash_20250124"), tool("bash_20241022")], "tools: two functions have the same name"),
        (
            [tool("bash_20250124"), {"name": "bash", "input_schema": {"type": "object"}}],
            "tools: two functions have the same name",
        ),
        ([tool("bash_20250124") | {"name": "sh"}], "tools.0.name: that of a bash_20250124 tool is 'bash'"),
        (
            [tool("bash_20250124"), tool("text_editor_20250728") | {"name": "str_replace_editor"}],
            "tools.1.name: that of a text_editor_20250728 tool is 'str_replace_based_edit_tool'",
        ),
        ([{"type": "bash_20250124"}], "name"),
        ([tool("text_editor_20250728", max_characters=0)], "max_characters"),
    ],
)
def test_wrong_tools_are_refused(client: Anthropic, tools: list[Any], message: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(**body("Files?", tools=tools))
    assert message in str(error.value)


# What Anthropic publishes


PARAMS: dict[str, Any] = {
    "bash_20241022": beta.BetaToolBash20241022Param,
    "bash_20250124": beta.BetaToolBash20250124Param,
    "text_editor_20241022": beta.BetaToolTextEditor20241022Param,
    "text_editor_20250124": beta.BetaToolTextEditor20250124Param,
    "text_editor_20250429": beta.BetaToolTextEditor20250429Param,
    "text_editor_20250728": beta.BetaToolTextEditor20250728Param,
    "memory_20250818": beta.BetaMemoryTool20250818Param,
}


def test_names_are_those_of_the_package() -> None:
    assert {kind for kind in CLIENT_TOOLS if MESSAGES_TOOLS[kind] is READ} == PARAMS.keys()
    assert set(get_args(ClientTool.model_fields["type"].annotation)) == PARAMS.keys()
    for kind, params in PARAMS.items():
        TypeAdapter(params).validate_python(tool(kind))


def test_the_parameters_of_the_memory_are_those_of_the_packages_commands() -> None:
    union = get_args(get_args(beta.BetaMemoryTool20250818Command)[0])
    found = {name: field for command in union for name, field in command.model_fields.items()}
    schema = CLIENT_TOOLS["memory_20250818"].schema
    assert schema["properties"].keys() == found.keys()
    commands = {get_args(command.model_fields["command"].annotation)[0] for command in union}
    assert set(schema["properties"]["command"]["enum"]) == commands


@pytest.mark.parametrize(
    ("kind", "undoes", "inserts"),
    [
        ("text_editor_20241022", True, "new_str"),
        ("text_editor_20250124", True, "new_str"),
        ("text_editor_20250429", False, "new_str"),
        ("text_editor_20250728", False, "insert_text"),
    ],
)
def test_editors_differ_in_how_they_undo_and_what_they_insert(kind: str, undoes: bool, inserts: str) -> None:
    function = CLIENT_TOOLS[kind]
    names = function.schema["properties"].keys()
    assert ("undo_edit" in function.schema["properties"]["command"]["enum"]) == undoes
    assert ("insert_text" in names) == (inserts == "insert_text")
    assert "equired for `insert`" in function.parameters[inserts]["description"]
    assert names - {"insert_text"} == {
        *("command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range")
    }
