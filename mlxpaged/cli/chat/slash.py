"""The `/` commands of a chat."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mlxpaged.cli.chat.chat import Chat
from mlxpaged.cli.chat.conversation import SETTINGS
from mlxpaged.cli.client import model_path
from mlxpaged.cli.connection import cannot_see, chosen, generating, sees
from mlxpaged.cli.image_file import data_url

NAME = re.compile(r"/[a-z]+(\s|$)")
"""A message may begin with a path: /usr/bin is no command."""


LEAVING = {"exit", "quit", "/exit", "/quit"}
"""Words of shells and of other chats that do what /bye does."""


class UsageError(Exception):
    """The command cannot be carried out as it was typed."""


class Leave(Exception):
    """The chat is over."""


@dataclass(frozen=True)
class Command:
    """run: gets what is typed after the name."""

    name: str
    argument: str
    help: str
    run: Callable[[Chat, str], None]


def carry_out(chat: Chat, text: str) -> bool:
    """Returns False if the text is no command. Raises UsageError, ServerError, OSError, ValueError or Leave."""
    if text in LEAVING:
        raise Leave
    if not NAME.match(text):
        return False
    name, *rest = text[1:].split(maxsplit=1)  # a line's end is between them too
    command = next((each for each in COMMANDS if each.name == name), None)
    if command is None:
        near = difflib.get_close_matches(name, [each.name for each in COMMANDS], 1)
        raise UsageError(f"unknown command /{name}: " + (f"/{near[0]}?" if near else "/help lists the commands"))
    command.run(chat, rest[0].strip() if rest else "")
    return True


def show_help(chat: Chat, argument: str) -> None:
    usages = [f"/{command.name} {command.argument}".rstrip() for command in COMMANDS]
    for usage, command in zip(usages, COMMANDS, strict=True):
        chat.say(f"{usage.ljust(max(map(len, usages)))}  {command.help}")
    chat.say('Enter sends the message. Alt-Enter or Ctrl-J begins a new line, and so does Enter after an opening """.')
    chat.say("Ctrl-C ends an answer. Ctrl-D leaves.")


def change_model(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.model = chosen(chat.client, argument, chat.line.show)
        chat.line.clear()
        chat.say(f"model: {chat.conversation.model}")
        return
    for entry in generating(chat.client):
        mark = "*" if entry["id"] == chat.conversation.model else " "
        chat.say(f"{mark} {entry['id']}  {entry['state']}")


def change_system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.system = None if argument == "none" else argument
    chat.say(f"system message: {chat.conversation.system or 'none'}")


def change_setting(chat: Chat, argument: str) -> None:
    settings = chat.conversation.settings
    name, _, value = argument.partition(" ")
    if name and name not in SETTINGS:
        raise UsageError(f"unknown setting {name}: there are {', '.join(SETTINGS)}")
    if value.strip() == "default":
        settings.pop(name, None)
    elif value:
        try:
            settings[name] = SETTINGS[name](value.strip())
        except ValueError as error:
            raise UsageError(f"{name} {error}") from None
    for each in [name] if name else settings:
        chat.say(f"{each}: {json.dumps(settings[each]) if each in settings else 'default'}")
    if not name and not settings:
        chat.say(f"All settings are the model's. Change one with /set NAME VALUE: {', '.join(SETTINGS)}")


def show_thinking(chat: Chat, argument: str) -> None:
    chat.say(chat.answer.thinking.strip() or "There was no thinking in the last answer.")


def show_stats(chat: Chat, argument: str) -> None:
    if argument not in ("", "on", "off"):
        raise UsageError("/stats, /stats on or /stats off")
    if argument:
        chat.shows_stats = argument == "on"
        chat.say(f"speed after each answer: {argument}")
    else:
        chat.say(chat.stats())


def clear(chat: Chat, argument: str) -> None:
    chat.conversation.messages.clear()
    chat.say("The conversation is forgotten. The system message and the settings stay.")


def attach(chat: Chat, argument: str) -> None:
    images = chat.conversation.images
    if argument == "none":
        images.clear()
    elif argument:
        url, model = data_url(file_named(argument, "/image FILE")), chat.conversation.model
        if not sees(chat.client.get(model_path(model))):
            raise UsageError(cannot_see(model, generating(chat.client)))
        images.append(url)
    chat.say(f"images that go with your next message: {len(images)}")


def retry(chat: Chat, argument: str) -> None:
    """Without a new answer, the one before stays."""
    conversation = chat.conversation
    before = replace(conversation, messages=list(conversation.messages))
    question = conversation.last_question()
    if question is None:
        raise UsageError("there is no question to ask again")
    try:
        chat.ask(question)
    finally:
        if not chat.answer.text:
            conversation.messages, conversation.images = before.messages, before.images


def save(chat: Chat, argument: str) -> None:
    path = file_named(argument, "/save FILE")
    chat.conversation.save(path)
    chat.say(f"saved in {path}")


def load(chat: Chat, argument: str) -> None:
    path = file_named(argument, "/load FILE")
    chat.conversation.load(path)
    chat.say(f"loaded {len(chat.conversation.messages) // 2} questions and answers from {path}")


def file_named(argument: str, usage: str) -> Path:
    if not argument:
        raise UsageError(usage)
    try:
        return Path(argument).expanduser()
    except RuntimeError:
        raise UsageError(f"there is no such home directory: {argument}") from None


def leave(chat: Chat, argument: str) -> None:
    raise Leave


COMMANDS = (
    Command("help", "", "list the commands", show_help),
    Command("model", "[NAME]", "list the models, or use another one", change_model),
    Command("system", "[TEXT]", "show or change the system message; none removes it", change_system),
    Command("set", "[NAME [VALUE]]", "show or change a setting, such as temperature 0.2", change_setting),
    Command("think", "", "show the thinking of the last answer", show_thinking),
    Command("stats", "[on|off]", "show the speed of the last answer, or of each one", show_stats),
    Command("image", "[FILE|none]", "show the model an image with your next message", attach),
    Command("retry", "", "ask the last question again", retry),
    Command("clear", "", "forget the conversation", clear),
    Command("save", "FILE", "save the conversation", save),
    Command("load", "FILE", "go on with a saved conversation", load),
    Command("bye", "", "leave; so do /exit, /quit, exit and quit", leave),
)
