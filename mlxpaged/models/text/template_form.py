"""What a chat template takes only in a form of its own: tools, turns, and calls and thoughts of earlier ones. Templates
differ in that, so short conversations are rendered when a model loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[..., str | None]
"""Renders messages, and tools if there are any. Returns None if the template refuses them."""

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
BARE: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "probe_tool"}},
    {"type": "function", "function": {"name": "other_tool", "parameters": {}}},
]
"""Tools with no more than they must have."""
USER = {"role": "user", "content": "probe"}
SYSTEM = {"role": "system", "content": ""}
ANSWER = {"role": "assistant", "content": "answer"}
RULES = {"role": "system", "content": "rules"}
VALUES = ("probe 1", "probe 2")
SAID, THOUGHT, FOUND = "probe 3", "probe 4", "probe 5"
PARTS = "parts"
THOUGHTS = ("reasoning_content", "reasoning", PARTS)
"""Where templates look for a thought: in a field, or among the parts of the content (Ministral 3)."""


@dataclass(frozen=True)
class TemplateForm:
    """shows_calls: whether it shows the calls of earlier turns. text_arguments: their arguments are JSON (DeepSeek V3.1
    and V3.2). one_call: a message has one call (Llama 3, gpt-oss). whole_tools: all tools have a description,
    parameters and properties (gpt-oss, Seed-OSS). tools_in_system: tools are shown after a system message only
    (DeepSeek V3.2). takes_turns: the user and the assistant speak in turn (Gemma, Mistral). no_user_after_result: a
    message of the user may not follow a result (Mistral). text_apart: what is said before calls is shown in a message
    of its own only (Llama 3, Command R7B). user_first: the user has to speak before the assistant does (Gemma,
    Mistral). needs_user: the user has to speak somewhere (Qwen3.5). tools_with_user: tools are shown with what the user
    says first (Llama 3). drops_system: a system message is shown only if the user speaks last (Mistral Nemo). thought:
    where thoughts are, one of THOUGHTS. calls_need_tools: calls are shown only if there are tools (Hunyuan A13B).
    answers_have_text: an answer without a text, or a part, is refused (Ministral 3). drops_results: results of calls
    are not shown (vLLM's template of GLM-4). lists_tools: where there are no tools, their list has to be empty
    (FunctionGemma, Hermes 2 Pro)."""

    shows_calls: bool = False
    text_arguments: bool = False
    one_call: bool = False
    whole_tools: bool = False
    tools_in_system: bool = False
    takes_turns: bool = False
    no_user_after_result: bool = False
    text_apart: bool = False
    user_first: bool = False
    needs_user: bool = False
    tools_with_user: bool = False
    drops_system: bool = False
    thought: str = THOUGHTS[0]
    calls_need_tools: bool = False
    answers_have_text: bool = False
    drops_results: bool = False
    lists_tools: bool = False

    def messages(self, given: Messages, has_tools: bool) -> list[dict[str, Any]]:
        """Returns messages as the template takes them, but for `one_call`."""
        shown: list[dict[str, Any]] = []
        for message in given:
            apart = self.text_apart and message.get("tool_calls") and message["content"]
            shown += with_text_apart(message) if apart else [dict(message)]
        if self.thought != THOUGHTS[0]:
            shown = [with_thought(each, self.thought) if THOUGHTS[0] in each else each for each in shown]
        for message in shown if self.text_arguments else ():
            if "tool_calls" in message:
                message["tool_calls"] = list(map(with_text, message["tool_calls"]))
        if has_tools and self.tools_in_system and all(message["role"] != "system" for message in shown):
            shown.insert(0, dict(SYSTEM))
        return shown

    def tools(self, given: Tools) -> list[dict[str, Any]]:
        return [whole(tool) if self.whole_tools else dict(tool) for tool in given]


def whole(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"description": "", **tool["function"]}
    return {**tool, "function": function | {"parameters": NO_ARGUMENTS | function.get("parameters", {})}}


def plain(schema: Any) -> Any:
    """Returns a schema, or what has some, without what a few templates cannot write: several types of a value (Hermes
    3), a default that is no text where the values are listed (gpt-oss, Apertus), and null in place of a list, as Go
    writes it (Seed-OSS)."""
    if isinstance(schema, list):
        return [plain(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {name: plain(value) for name, value in schema.items() if value is not None}
    if isinstance(kinds := found.get("type"), list):
        found["type"] = next((kind for kind in kinds if kind != "null"), "string")
    if any(isinstance(found.get(listed), list) for listed in ("enum", "oneOf")):
        default = found.get("default", "")
        found |= {} if isinstance(default, str) else {"default": json.dumps(default)}
    return found


def with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def with_text_apart(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The thought stays with the calls: Command R7B's template shows it with these only."""
    return [{"role": message["role"], "content": message["content"]}, {**message, "content": ""}]


def with_thought(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns a message of the assistant with its thought in another place."""
    others = {name: value for name, value in message.items() if name != THOUGHTS[0]}
    thought, content = message[THOUGHTS[0]], message["content"]
    if place != PARTS:
        return others | {place: thought}
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return others | {"content": [{"type": "thinking", "thinking": thought}, *texts]}


def place_of_thoughts(render: Render) -> str:
    answer = {"role": "assistant", "content": SAID, THOUGHTS[0]: THOUGHT}
    for place in THOUGHTS:
        text = render(TemplateForm(thought=place).messages([USER, answer], False)) or ""
        if SAID in text and THOUGHT in text and not any(f"thinking{quote}" in text for quote in "'\""):
            return place
    return THOUGHTS[0]


def form_of(render: Render, new_id: Callable[[], str], shows_tools: bool, may_show_calls: bool) -> TemplateForm:
    """Returns the form that a chat template takes. new_id: makes ids of calls."""
    tools = {"tools": list(map(whole, BARE))} if shows_tools else {}
    found = TemplateForm(lists_tools=render([USER]) is None and render([USER], tools=[]) is not None)
    if found.lists_tools:
        render = partial(render, tools=[])

    def omits(*messages: Mapping[str, Any], **options: Any) -> bool:
        text = render(messages, **options)
        return render([USER], **options) is not None and not all(each["content"] in (text or "") for each in messages)

    found = replace(found, takes_turns=render([USER]) is not None and render([USER, USER]) is None)
    found = replace(found, user_first=omits(ANSWER, USER), needs_user=omits(RULES), thought=place_of_thoughts(render))
    answered = [[USER, answer, USER] for answer in (ANSWER, ANSWER | {"content": ""})]
    found = replace(found, answers_have_text=[render(each) is None for each in answered] == [False, True])
    if shows_tools:
        found = replace(found, tools_with_user=omits(RULES, **tools) and not found.needs_user)
        without, after_system = (render(messages, **tools) or "" for messages in ([USER], [SYSTEM, USER]))
        in_system = "probe_tool" not in without and "probe_tool" in after_system
        found = replace(found, whole_tools=render([USER], tools=BARE) is None, tools_in_system=in_system)

    def shows(form: TemplateForm, count: int, said: str = "") -> bool:
        messages = [*conversation(count, new_id, said), ANSWER, USER]
        text = render(form.messages(messages, shows_tools), **tools)
        return text is not None and all(value in text for value in (*VALUES[:count], said, FOUND))

    for text_arguments in (False, True) if may_show_calls else ():
        form = replace(found, shows_calls=True, text_arguments=text_arguments)
        if shows(form, 1):
            after_result = form.messages([*conversation(1, new_id), USER], shows_tools)
            refused = render(after_result, **tools) is None
            told = render(form.messages([RULES, *conversation(1, new_id)], shows_tools), **tools) or ""
            form = replace(form, one_call=not shows(form, 2), no_user_after_result=refused)
            alone = render(form.messages(conversation(1, new_id), False)) or ""
            form = replace(form, drops_system=RULES["content"] not in told, calls_need_tools=VALUES[0] not in alone)
            apart = replace(form, text_apart=True)
            return apart if not shows(form, 1, SAID) and shows(apart, 1, SAID) else form
    asked, _, *results = conversation(1, new_id)
    text = render([asked, ANSWER, *results, ANSWER, USER], **tools)
    return replace(found, drops_results=text is not None and FOUND not in text)


def takes_tools(render: Render) -> bool:
    """Whether a chat template that reads tools shows a conversation with some."""
    return render([USER]) is None or render([USER], tools=list(map(whole, BARE))) is not None


def conversation(count: int, new_id: Callable[[], str], said: str = "") -> list[dict[str, Any]]:
    """Returns a conversation with this many calls in one message, and a text."""
    calls = [
        {"id": new_id(), "type": "function", "function": {"name": "probe_tool", "arguments": {"key": value}}}
        for value in VALUES[:count]
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "probe_tool", "content": FOUND} for call in calls]
    return [USER, {"role": "assistant", "content": said, "tool_calls": calls}, *results]
