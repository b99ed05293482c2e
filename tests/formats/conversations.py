"""Random conversations of agents, as the four APIs have them, and what of each must stand in the model's prompt."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

AROUND = (
    *("", "", " and then ", "\n", '\n\n  "indented"\n', " {{ x }} {% if %} ", " <b>&amp;</b> ", " a\\b\t"),
    *(" é 日本 \U0001f600 ", " {'k': [1, 2]} ", "\n```py\nx = 1\n```\n", " </s> ", " [INST] ", " - ", " null "),
)
"""What may stand between the two words of a text."""

STRING = {"type": "string"}
TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place.",
            "parameters": {"type": "object", "properties": {"city": STRING, "days": {"type": "integer"}}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "edit_file",
            "description": "Replaces a text in a file.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": STRING,
                    "text": STRING,
                    "flags": {"type": "array", "items": {"enum": ["all", "first"]}},
                    "where": {"anyOf": [{"type": "object", "properties": {"line": STRING}}, {"type": "null"}]},
                },
                "required": ["path", "text"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "list_tabs", "parameters": {"type": "object", "properties": {}}}},
]


@dataclass(frozen=True)
class Piece:
    """A word that must stand in the prompt. group: words of one group may come in any order, those of the next one come
    after them. None: it may stand anywhere. kind: what has it."""

    word: str
    group: int | None
    kind: str


@dataclass(frozen=True)
class Conversation:
    """messages: of chat completions. continues: whether the last message, an assistant's, is continued."""

    messages: tuple[Message, ...]
    has_tools: bool
    continues: bool


class Writer:
    """Writes one conversation. pieces: of the messages so far. is_plain: without thoughts, empty answers, and
    white space around texts, which some templates take away from earlier turns."""

    def __init__(self, seed: str, is_plain: bool = False) -> None:
        self.is_plain = is_plain
        self.rng = random.Random(seed)
        self.words = (f"w{i:04d}" for i in itertools.count(1))
        self.messages: list[Message] = []
        self.pieces: list[Piece] = []
        self.group = 0

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def word(self, kind: str, group: int | None) -> str:
        word = next(self.words)
        self.pieces.append(Piece(word, group, kind))
        return word

    def text(self, kind: str, group: int | None, empty: float = 0.03) -> str:
        if self.chance(empty):
            return ""
        first, second = self.word(kind, group), self.word(kind, group)
        return (
            ("" if self.is_plain else self.rng.choice(("", "", "\n", "  "))) + first + self.rng.choice(AROUND) + second
        )

    def conversation(self, most: int) -> Conversation:
        """most: turns of the user."""
        for _ in range(self.rng.choice((0, 1, 1, 1, 2, 3))):
            self.say(self.rng.choice(("system", "system", "developer")), None)
        if self.chance(0.15):
            self.answer()
        for _ in range(self.rng.randint(1, most)):
            self.turn()
        continues = self.chance(0.2)
        if continues:
            self.say("assistant", empty=0)
        elif self.messages[-1]["role"] == "assistant" and self.chance(0.8):
            self.say("user", empty=0)
        return Conversation(tuple(self.messages), self.chance(0.8), continues)

    def next_group(self) -> int:
        self.group += 1
        return self.group

    def say(self, role: str, group: int | None = -1, empty: float = 0.03) -> None:
        number = self.next_group() if group == -1 else group
        self.messages.append({"role": role, "content": self.text(role, number, empty)})

    def turn(self) -> None:
        for _ in range(self.rng.choice((1, 1, 1, 1, 2, 3))):
            self.say("user")
        if self.chance(0.1):
            self.say(self.rng.choice(("system", "developer")))
        for _ in range(self.rng.choice((0, 0, 1, 1, 2, 3))):
            self.calls()
        if self.chance(0.85):
            self.answer()
        if self.chance(0.05):
            self.say(self.rng.choice(("system", "developer")))

    def thought(self) -> Message:
        return {"reasoning_content": self.text("thought", None, 0)} if self.chance(0.3) and not self.is_plain else {}

    def answer(self) -> None:
        self.messages.append(
            {"role": "assistant", "content": self.text("answer", self.next_group(), 0 if self.is_plain else 0.08)}
            | self.thought()
        )

    def calls(self) -> None:
        said = self.text("said", self.next_group(), 0.6)
        thought, group = self.thought(), self.next_group()
        made = [self.call(group) for _ in range(self.rng.choice((1, 1, 1, 2, 3, 4)))]
        content = said or self.rng.choice(("", None))
        self.messages.append({"role": "assistant", "content": content, "tool_calls": made} | thought)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": self.text("result", group, 0.1)} for call in made
        ]
        if self.chance(0.3):
            self.rng.shuffle(results)
        if self.chance(0.1):  # the user has stopped them
            lost = results[self.rng.randrange(len(results)) :]
            words = [each["content"] for each in lost]
            self.pieces = [piece for piece in self.pieces if not any(piece.word in text for text in words)]
            results = results[: len(results) - len(lost)]
        self.messages += results

    def call(self, group: int) -> Message:
        name = self.rng.choice(("get_weather", "edit_file", "list_tabs"))
        arguments: dict[str, Any] = {}
        if name == "get_weather":
            arguments = {"city": self.argument(group)} | ({"days": self.rng.randint(0, 9)} if self.chance(0.5) else {})
        if name == "edit_file":
            arguments = {"path": self.argument(group), "text": self.argument(group)}
            arguments |= {"flags": ["all"]} if self.chance(0.3) else {}
            if self.chance(0.3):
                arguments["where"] = {"line": self.argument(group)} if self.chance(0.7) else None
        kinds = ("call_{:024x}", "toolu_{:022x}", "functions.x:{:d}", "{:09x}", "fc-{:08x}")
        call_id = self.rng.choice(kinds).format(self.rng.getrandbits(32))
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=self.chance(0.5))}
        return {"id": call_id, "type": "function", "function": function}

    def argument(self, group: int) -> str:
        return self.text("argument", group, 0.05)


# -- in the other APIs -------------------------------------------------------------------------------------------------


def in_chat(talk: Conversation) -> Message:
    body: Message = {"messages": list(talk.messages), "max_tokens": 1}
    body |= {"tools": TOOLS} if talk.has_tools else {}
    return body | ({"continue_final_message": True} if talk.continues else {})


def in_ollama(talk: Conversation) -> Message:
    messages = []
    for message in talk.messages:
        shown = {name: value for name, value in message.items() if name != "reasoning_content"}
        shown["content"] = message["content"] or ""
        shown["role"] = "system" if message["role"] == "developer" else message["role"]
        if "reasoning_content" in message:
            shown["thinking"] = message["reasoning_content"]
        if "tool_calls" in message:
            shown["tool_calls"] = [
                {
                    "id": call["id"],
                    "function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])},
                }
                for call in message["tool_calls"]
            ]
        messages.append(shown)
    body: Message = {"messages": messages, "stream": False, "options": {"num_predict": 1}}
    return body | ({"tools": TOOLS} if talk.has_tools else {})


def in_responses(talk: Conversation) -> Message:
    items: list[Message] = []
    for message in talk.messages:
        if "reasoning_content" in message:
            part = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "summary": [], "content": [part]})
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output"} | output)
            continue
        if message["content"] or "tool_calls" not in message:
            kind = "output_text" if message["role"] == "assistant" else "input_text"
            content = [{"type": kind, "text": message["content"] or ""}]
            items.append({"type": "message", "role": message["role"], "content": content})
        items += [
            {"type": "function_call", "call_id": call["id"]} | call["function"]
            for call in message.get("tool_calls", ())
        ]
    tools = [{"type": "function"} | each["function"] for each in TOOLS]
    return {"input": items, "max_output_tokens": 1} | ({"tools": tools} if talk.has_tools else {})


def in_messages(talk: Conversation) -> Message:
    """Results of calls stand with what the user says next."""
    messages: list[Message] = []
    for message in talk.messages:
        blocks: list[Message] = []
        role = {"developer": "system", "tool": "user"}.get(message["role"], message["role"])
        if "reasoning_content" in message:
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message["role"] == "tool":
            shown = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
            blocks.append({"type": "tool_result"} | shown)
        elif message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            made = {"id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
            blocks.append({"type": "tool_use"} | made)
        if role == "user" and messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    tools = [
        {
            "name": each["function"]["name"],
            "description": each["function"].get("description", ""),
            "input_schema": each["function"]["parameters"],
        }
        for each in TOOLS
    ]
    return {"messages": messages, "max_tokens": 1} | ({"tools": tools} if talk.has_tools else {})


BODIES = {
    "/v1/chat/completions": in_chat,
    "/v1/responses": in_responses,
    "/v1/messages": in_messages,
    "/api/chat": in_ollama,
}
