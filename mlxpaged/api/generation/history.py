"""Makes a conversation one that the model's chat template takes, whatever server its earlier turns came from."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from mlxpaged.api.generation.tool_prompt import with_tools
from mlxpaged.api.media import joined
from mlxpaged.formats import HARMONY
from mlxpaged.models.text.template_form import PARTS, TemplateForm
from mlxpaged.models.text.tokenizer import Tags, Tokenizer


def adapted(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Returns the messages as the chat template expects them: system messages where it shows them, calls and their ids
    in its form, and thoughts under its name. A result without an id belongs to the first call, of its tool if that is
    named, that has no result yet. Results are in the order of their calls: most templates show no ids. Equal messages
    become equal prompts."""
    adapted_messages = []
    open_calls: dict[str, str] = {}  # names of tools by the ids of their calls
    fitting: dict[str, list[str]] = {}  # of the latest message with such an id; clients may give several calls the same
    numbers = itertools.count()
    given = messages if tokenizer.takes_late_system else with_early_system(messages)
    thoughtful = calls_with_thoughts(given) if tokenizer.tags.tools is HARMONY else range(0)
    for place, message in enumerate(given):
        changed = dict(message)
        if "tool_calls" in message:
            changed["tool_calls"] = []
            fitting |= {call["id"]: [] for call in message["tool_calls"]}
            for call in message["tool_calls"]:
                open_calls[call["id"]] = name = call["function"]["name"]
                fitted = tokenizer.tags.tools.fit_id(call["id"], name, next(numbers))
                fitting[call["id"]].append(fitted)
                changed["tool_calls"].append(call | {"id": fitted})
            if place in thoughtful:
                thought = "\n\n".join(filter(None, (message.get("reasoning_content"), message["content"])))
                changed |= {"thinking": thought, "content": ""} if thought else {}
        if message["role"] == "tool":
            tool, answered = message.get("name"), message.get("tool_call_id")
            if answered is None:
                answered = next((key for key, name in open_calls.items() if tool in (None, name)), None)
                changed |= {"name": open_calls[answered]} if answered is not None else {}
            if answered is not None:
                open_calls.pop(answered, None)
                known = fitting.get(answered) or [tokenizer.tags.tools.fit_id(answered, tool or "", 0)]
                changed["tool_call_id"] = known.pop(0) if len(known) > 1 else known[0]
        adapted_messages.append(changed)
    return one_by_one(adapted_messages) if tokenizer.form.one_call else in_call_order(adapted_messages)


def calls_with_thoughts(messages: Sequence[Mapping[str, Any]]) -> range:
    """Returns the places of the messages whose thoughts Harmony's template shows: those after the last answer. It
    refuses a text beside a thought and a call, and takes a text of its own for an answer, so one is shown as a thought
    there. Empty if there are no thoughts: the texts then stay the same in the next turn."""
    answers = (i for i, each in enumerate(messages) if each["role"] == "assistant" and "tool_calls" not in each)
    first = max(answers, default=-1) + 1
    return range(first, len(messages)) if any(each.get("reasoning_content") for each in messages[first:]) else range(0)


def in_call_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with results in the order of their calls, those of unknown calls after them."""
    ordered: list[dict[str, Any]] = []
    for is_result, group in itertools.groupby(messages, lambda each: each["role"] == "tool"):
        if is_result and ordered:
            places = {call["id"]: -i for i, call in enumerate(reversed(ordered[-1].get("tool_calls", ())))}
            ordered += sorted(group, key=lambda each: places.get(each.get("tool_call_id"), 1))
        else:
            ordered += group
    return ordered


def as_shown(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Returns `adapted` messages in the form in which the chat template shows all of them: with tools and calls
    as text, without system messages, and in turns, if it needs that."""
    shown, form = with_tools(messages, tools, tokenizer), tokenizer.form
    user_first = form.user_first or (form.tools_with_user and bool(tools))
    shown = in_turns(with_user(shown, user_first) if user_first or form.needs_user else shown, form)
    if tokenizer.takes_system and (shown[-1]["role"] == "user" or not form.drops_system):
        return shown
    return with_system_as_user(shown, last=tokenizer.takes_system)


def one_by_one(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Divides messages with several calls into messages with one, each before its results."""
    divided: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls", ())
        for number, call in enumerate(calls):
            divided.append({**(message if number == 0 else {"role": "assistant", "content": ""}), "tool_calls": [call]})
        if message["role"] == "tool":
            divided.insert(after_call(divided, message.get("tool_call_id")), dict(message))
        elif not calls:
            divided.append(dict(message))
    return divided


def after_call(messages: Sequence[Mapping[str, Any]], call_id: str | None) -> int:
    """Returns the place after the call with this id and its results; the end if the last calls have another id."""
    for place in range(len(messages), 0, -1):
        before = messages[place - 1]
        if before["role"] != "tool" and "tool_calls" not in before:
            break
        if call_id in (before.get("tool_call_id"), *(call["id"] for call in before.get("tool_calls", ()))):
            return place
    return len(messages)


def with_thought_apart(message: Mapping[str, Any], tags: Tags) -> dict[str, Any] | None:
    """Returns an assistant's message whose text begins with a whole thought, with the thought as its reasoning; None if
    the text does not."""
    text = str(message["content"]).lstrip()
    thought, end, rest = text.removeprefix(tags.think_start).partition(tags.think_end or "\0")
    if not end or not tags.think_start or not text.startswith(tags.think_start) or message.get("reasoning_content"):
        return None
    return {**message, "reasoning_content": thought.strip("\n"), "content": rest.lstrip("\n")}


def with_early_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Joins the system messages at the beginning. Later ones become text of the user, together with what the user says
    before and after them."""
    shown: list[dict[str, Any]] = []
    turned = False  # whether the last message has such a text
    for message in messages:
        last = shown[-1] if shown else {"role": ""}
        if message["role"] == "system":
            if all(each["role"] == "system" for each in shown):
                join(shown, message, "\n\n")
            else:
                text = f"<system>\n{message['content']}\n</system>"
                join(shown, {"role": "user", "content": text}, "\n")
                turned = True
        elif message["role"] == "user" and turned and last["role"] == "user":
            join(shown, message, "\n")
        else:
            shown.append(dict(message))
            turned = False
    return list(shown)


def with_system_as_user(messages: Sequence[Mapping[str, Any]], last: bool = False) -> list[dict[str, Any]]:
    """Returns the messages for a template without system messages: the only one, the first, becomes the beginning
    of what the user says first. last: of what the user says last, where the template showed it before the answer."""
    shown = [dict(message) for message in messages]
    if shown and shown[0]["role"] == "system":
        told = shown.pop(0)["content"]
        if not shown or shown[0]["role"] != "user":
            shown.insert(0, {"role": "user", "content": ""})
        said = [message for message in shown if message["role"] == "user"][-1 if last else 0]
        said["content"] = "\n\n".join(filter(None, (told, said["content"])))
    return shown


def with_user(messages: Sequence[Mapping[str, Any]], first: bool) -> list[Mapping[str, Any]]:
    """Returns the messages with an empty one of the user before those of others, if there is none, or none there.
    Clients that play roles begin with a greeting, and agents whose conversation gets too long may keep no more than
    calls and results."""
    start = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    end = start + 1 if first else len(messages)
    has_user = any(each["role"] == "user" for each in messages[start:end])
    return [*messages[:start], *([] if has_user else [{"role": "user", "content": ""}]), *messages[start:]]


def join(messages: list[dict[str, Any]], message: Mapping[str, Any], separator: str) -> None:
    """Adds a message's text to the last message, if that has the same role."""
    if messages and messages[-1]["role"] == message["role"]:
        messages[-1]["content"] = separator.join((messages[-1]["content"], message["content"]))
    else:
        messages.append(dict(message))


def in_turns(messages: Sequence[Mapping[str, Any]], form: TemplateForm) -> list[dict[str, Any]]:
    """Returns the messages for a template that takes the user and the assistant in turn only: several of one in a row
    become one, and what the user says after a result, or in its place, becomes the end of the result, if the template
    refuses these. Ministral 3 refuses an answer without text, which clients keep if the user has stopped it."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        shown_without_text = message.get("tool_calls") or (form.thought == PARTS and message.get("reasoning_content"))
        says_nothing = message["role"] == "assistant" and not (message["content"] or shown_without_text)
        if form.answers_have_text and says_nothing and message is not messages[-1]:
            continue
        last: dict[str, Any] = shown[-1] if shown else {"role": ""}
        role = message["role"]
        repeats = role == last["role"] and role in ("user", "assistant") and "tool_calls" not in last
        if role == "user" and "tool_calls" in last and form.no_user_after_result:  # the user has stopped them
            shown += [{"role": "tool", "tool_call_id": call["id"], "texts": []} for call in last["tool_calls"]]
            last = shown[-1]
        after_result = role == "user" and last["role"] == "tool"
        if (repeats and form.takes_turns) or (after_result and form.no_user_after_result):
            thoughts = [each["reasoning_content"] for each in (last, message) if "reasoning_content" in each]
            last["texts"].append(message["content"])
            last |= {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
            last |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        else:
            shown.append({**message, "texts": [message["content"]]})
    for message in shown:
        message["content"] = joined(list(filter(None, message.pop("texts"))))
    return shown
