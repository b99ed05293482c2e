"""Reads the user's messages: several lines, a history file, completion of `/` commands."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from mlxpaged.cli.chat.slash import COMMANDS
from mlxpaged.durable_files import OWNER_ONLY, owner_only

QUOTES = '"""'
PROMPT, CONTINUED = ">>> ", "... "


class Reader:
    """words: returns what may follow a command, by the command's name; for `/model`, the names of the models."""

    def __init__(self, history: Path, words: Callable[[str], Iterable[str]]) -> None:
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=CONTINUED,
            history=open_history(history),
            key_bindings=key_bindings(),
            completer=SlashCompleter(words),
            complete_while_typing=True,
        )

    def read(self) -> str:
        """Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        text = self._session.prompt().strip()
        if text.startswith(QUOTES) and text.endswith(QUOTES):  # code can begin with a docstring
            text = text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
        return text


def open_history(path: Path) -> History:
    """Only the user may read the file. If it cannot be written, the history is that of this chat."""
    try:
        make_file(path)
    except OSError:
        return InMemoryHistory()
    return OwnHistory(path)


def make_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", opener=owner_only) as file:
        os.fchmod(file.fileno(), OWNER_ONLY)


class OwnHistory(FileHistory):
    """A file that may be deleted during the chat, or that the disk has no room for: then the message is sent all the
    same."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            make_file(Path(os.fsdecode(self.filename)))
            super().store_string(string)


def key_bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        """Send the message, unless it has begun with three quotes that are still open."""
        buffer = event.current_buffer
        if buffer.text.lstrip().startswith(QUOTES) and buffer.text.count(QUOTES) % 2:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class SlashCompleter(Completer):
    def __init__(self, words: Callable[[str], Iterable[str]]) -> None:
        self._words = words
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text.partition(" ")
        if not space:
            for command in COMMANDS:
                if f"/{command.name}".startswith(name):
                    yield Completion(f"/{command.name}", -len(name), display_meta=command.help)
        elif name in ("/save", "/load", "/image"):
            yield from self._paths.get_completions(Document(rest), complete_event)
        elif " " not in rest:
            yield from (Completion(word, -len(rest)) for word in self._words(name[1:]) if word.startswith(rest))
