"""Shows tools, calls and results as plain text, for models whose chat template has no place for them.

If it has none for calls, they have Hermes' format, so the parsers and the grammars of that format apply. The text
depends on the request alone: the prompt of the next turn begins with the same tokens, which are in the prefix cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxpaged.formats import HERMES, Format
from mlxpaged.models.text.tokenizer import Tokenizer

RESULT_START, RESULT_END = "<tool_response>", "</tool_response>"


def tool_prompt(tools: Sequence[Mapping[str, Any]], form: Format) -> str:
    """Returns the text that tells the model of the tools, in their order. tools: as `Tool.for_template` makes them."""
    lines = []
    for tool in tools:
        lines.append(as_json({name: value for name, value in tool["function"].items() if name != "strict"}))
    listed = "\n".join(lines)
    example = form.show("the tool's name", as_json({"argument": "value"}))
    results = f", each between {RESULT_START} and\n{RESULT_END}" if form is HERMES else ""
    end = "If you need no tool, answer without these tags."
    return f"""# Tools

You can call these tools. Each line is one tool in JSON: its name, what it does, and the JSON schema of its arguments.

{listed}

To call a tool, write its name and its arguments as JSON between two tags. Then end your answer:

{example}

For several calls, write several such blocks. The next message has the results{results}. {end}"""


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Returns the messages with what the chat template does not show of tools, calls and results. tools: as for
    `tool_prompt`."""
    form = tokenizer.tags.tools
    if tokenizer.shows_tools:
        shows_calls = tokenizer.shows_calls and (bool(tools) or not tokenizer.form.calls_need_tools)
        if tokenizer.form.drops_results:
            return in_plain_text(messages, form)
        return [dict(each) if shows_calls else with_calls_as_text(each, form) for each in messages]
    shown = [dict(each) for each in messages] if tokenizer.shows_calls else in_plain_text(messages)
    if not tools:
        return shown
    system = shown.pop(0) if shown[0]["role"] == "system" else {"role": "system", "content": ""}
    content = "\n\n".join(filter(None, (system["content"], tool_prompt(tools, form))))
    return [system | {"content": content}, *shown]


def in_plain_text(messages: Sequence[Mapping[str, Any]], form: Format = HERMES) -> list[dict[str, Any]]:
    """Returns the messages with calls and results as text. form: of the calls.

    Results become a message of the user, together with the user's text after them: many templates accept only messages
    of user and assistant in turn.
    """
    shown: list[dict[str, Any]] = []
    results: list[str] | None = None  # the texts of the last message, if it has results
    for message in messages:
        if message["role"] == "tool":
            if results is None:
                results = []
                shown.append({"role": "user", "content": results})
            results.append(f"{RESULT_START}\n{message['content']}\n{RESULT_END}")
        elif message["role"] == "user" and results is not None:
            results.append(message["content"])
        else:
            results = None
            shown.append(with_calls_as_text(message, form))
    for message in shown:
        if isinstance(message["content"], list):
            message["content"] = "\n".join(message["content"])
    return shown


def with_calls_as_text(message: Mapping[str, Any], form: Format) -> dict[str, Any]:
    texts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        texts.append(form.show(call["function"]["name"], as_json(call["function"]["arguments"])))
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": "\n".join(texts)}


def as_json(value: Any) -> str:
    """Returns JSON as models write it: other scripts than Latin are not escaped."""
    return json.dumps(value, ensure_ascii=False)
