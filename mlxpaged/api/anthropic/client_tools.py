"""Anthropic's tools that the client runs: a shell, a text editor and a memory. Claude knows their parameters, so that a
request has only their type and name. Other models are shown functions, with the parameters that Anthropic documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VIEW_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}


def text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def line(description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description}


@dataclass(frozen=True)
class ClientFunction:
    """name: the only one that a request may give it. parameters: their schemas, by name."""

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    required: Sequence[str]

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments."""
        return {"type": "object", "properties": dict(self.parameters), "required": list(self.required)}


BASH = ClientFunction(
    "bash",
    "Runs a command in a bash session that lasts: its directory and its variables stay for the next command. It "
    "returns what the command prints. It cannot run commands that ask for input.",
    {
        "command": text("The command to run. Required unless `restart` is true."),
        "restart": {"type": "boolean", "description": "Starts a new session instead of running a command."},
    },
    (),
)

COMMANDS = ("view", "create", "str_replace", "insert")
FILES = {
    "path": text("The file, or the directory that `view` lists."),
    "file_text": text("What the new file contains. Required for `create`."),
    "old_str": text("The text to replace, exactly as in the file, once in it. Required for `str_replace`."),
    "new_str": text("What replaces `old_str`; nothing if it is left out. For `str_replace`."),
    "insert_line": line("The text is inserted after this line; 0 is the beginning. Required for `insert`."),
    "insert_text": text("The text to insert. Required for `insert`."),
    "view_range": VIEW_RANGE | {"description": "First and last line to view, from 1; -1 is the end. For `view`."},
}


def command(names: Sequence[str]) -> dict[str, Any]:
    return {"type": "string", "enum": list(names), "description": "What to do."}


def editor(name: str, *more: str, of_insert: str = "new_str") -> ClientFunction:
    """more: commands. of_insert: the parameter that has the text to insert."""
    parameters = {"command": command((*COMMANDS, *more))} | FILES
    if of_insert == "new_str":
        del parameters["insert_text"]
        parameters["new_str"] = text("What replaces `old_str`, or the text to insert. Required for `insert`.")
    undoes = " `undo_edit` takes back the last change of a file." if more else ""
    return ClientFunction(
        name,
        "Views and edits files. `view` shows a file or lists a directory, `create` writes a new file, `str_replace` "
        f"replaces a text in a file, and `insert` inserts lines.{undoes}",
        parameters,
        ("command", "path"),
    )


MEMORY = ClientFunction(
    "memory",
    "Keeps files in the directory /memories, which is there in later conversations too. View it before you begin a "
    "task, and write down what will be needed again. `view` shows a file or lists a directory, `create` writes a file, "
    "`str_replace` replaces a text, `insert` inserts lines, `delete` removes a file or a directory, and `rename` moves "
    "one.",
    {"command": command((*COMMANDS, "delete", "rename"))}
    | FILES
    | {
        "path": text("A path that begins with /memories. Required for all but `rename`."),
        "old_path": text("What is to be moved. Required for `rename`."),
        "new_path": text("Where it is moved to. Required for `rename`."),
    },
    ("command",),
)

OLD_EDITOR = editor("str_replace_editor", "undo_edit")
CLIENT_TOOLS: Mapping[str, ClientFunction] = {
    "bash_20241022": BASH,
    "bash_20250124": BASH,
    "text_editor_20241022": OLD_EDITOR,
    "text_editor_20250124": OLD_EDITOR,
    "text_editor_20250429": editor("str_replace_based_edit_tool"),
    "text_editor_20250728": editor("str_replace_based_edit_tool", of_insert="insert_text"),
    "memory_20250818": MEMORY,
}
"""The functions, by the types of the tools."""
