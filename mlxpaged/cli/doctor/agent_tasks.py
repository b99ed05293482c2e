"""The tasks of `mlxpaged doctor --agent`: what a model is asked, and what a right answer has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlxpaged.formats import Tools

SYSTEM = "You are an agent. Do what the user asks with the tools. Take every value exactly as the user writes it."


def tool(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT = {"type": "string"}
PERSON = {
    "type": "object",
    "properties": {"name": TEXT, "email": TEXT, "optional": {"type": "boolean"}},
    "required": ["name", "email", "optional"],
    "additionalProperties": False,
}
START = {
    "type": "object",
    "properties": {"date": TEXT, "hour": {"type": "integer"}},
    "required": ["date", "hour"],
    "additionalProperties": False,
}
TOOLS = [
    tool(
        "get_weather",
        "Returns the weather in a city.",
        ["city", "unit"],
        city=TEXT,
        unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
    ),
    tool(
        "create_event",
        "Adds an event to the calendar.",
        ["title", "start", "people", "reminders"],
        title=TEXT,
        start=START,
        people={"type": "array", "items": PERSON},
        reminders={"type": "array", "items": {"type": "integer"}, "description": "minutes before the start"},
    ),
    tool("write_file", "Writes a text file.", ["path", "content"], path=TEXT, content=TEXT),
]
"""All tasks have the same tools, as the requests of an agent do."""
KNOWN = Tools(TOOLS)

FILE = """import re
import sys

# The signs that formats of tool calls use themselves: "quotes", 'quotes', <tags>, {braces} and \\ backslashes.
PATTERN = re.compile(r"^\\s*<li class=\\"(\\w+)\\">(.*?)</li>\\s*$")
TEMPLATE = '''<ul id="list">
  {items}
</ul>
'''


def read(path):
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\\n") for line in file]


def items_of(lines):
    found = {}
    for number, line in enumerate(lines, 1):
        match = PATTERN.match(line)
        if match is None:
            print(f"{number}: no item: {line!r}", file=sys.stderr)
            continue
        kind, text = match.groups()
        found.setdefault(kind, []).append(text.replace("&lt;", "<").replace("&amp;", "&"))
    return found


def main():
    for kind, texts in items_of(read(sys.argv[1])).items():
        joined = "\\n  ".join(f'<li class="{kind}">{text}</li>' for text in texts)
        print(TEMPLATE.format(items=joined))
    return 0


if __name__ == "__main__":
    sys.exit(main())
"""

Calls = tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Turn:
    """One answer. calls: those that it must have, in any order. says: what its text must have. thinks: whether it must
    have thoughts, or must have none; None for either. results: of its calls, in their order."""

    calls: Calls = ()
    says: tuple[str, ...] = ()
    thinks: bool | None = None
    results: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """name: as the report shows it. then: the answer to the results of the calls, if it is asked for. name_then: its
    name."""

    name: str
    prompt: str
    turn: Turn
    then: Turn | None = None
    name_then: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the request."""


def weather(city: str) -> tuple[str, dict[str, Any]]:
    return "get_weather", {"city": city, "unit": "celsius"}


EVENT = {
    "title": 'Review of "cache" & <pool>',
    "start": {"date": "2031-04-09", "hour": 14},
    "people": [
        {"name": "Zoë Ångström", "email": "zoe@example.org", "optional": False},
        {"name": "Bo", "email": "bo@example.org", "optional": True},
    ],
    "reminders": [60, 5],
}
OFF = {"reasoning_effort": "none"}
ON = {"chat_template_kwargs": {"enable_thinking": True}}

TASKS = (
    Task(
        "one call",
        "How warm is it in Lisbon, in celsius?",
        Turn((weather("Lisbon"),), results=('{"temperature": 17, "sky": "light rain"}',)),
        Turn(says=("17",)),
        "its result",
    ),
    Task(
        "two calls at once",
        "How warm is it in Lisbon and in Oslo, in celsius? Make both calls at once, in the same answer.",
        Turn((weather("Lisbon"), weather("Oslo")), results=('{"temperature": 17}', '{"temperature": 4}')),
        Turn(says=("17", "4")),
        "their results",
    ),
    Task(
        "a nested schema",
        'Add an event with the title `Review of "cache" & <pool>`. It starts on 2031-04-09 at hour 14. Two people '
        "come, in this order: Zoë Ångström, zoe@example.org, who is not optional, and Bo, bo@example.org, who is "
        "optional. The reminders are 60 and 5 minutes before.",
        Turn((("create_event", EVENT),)),
    ),
    Task(
        "a long file",
        "Write the file tools/list_items.py. Its content is what stands between the two lines of equal signs, byte for "
        f"byte. Its last line ends with a line feed.\n\n==========\n{FILE}==========\n",
        Turn((("write_file", {"path": "tools/list_items.py", "content": FILE}),)),
    ),
    Task("no call", "Answer without a tool: what is 17 + 25? Give the number only.", Turn(says=("42",))),
    Task("thinking off", "How warm is it in Porto, in celsius?", Turn((weather("Porto"),), thinks=False), fields=OFF),
    Task(
        "thinking on",
        "Think first: which is larger, 9.11 or 9.9? If it is 9.11, get the weather in Quito, else in Lima. In celsius.",
        Turn((weather("Lima"),), thinks=True),
        fields=ON,
    ),
)
