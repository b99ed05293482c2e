"""The loop of a chat: read a message, show the answer."""

from __future__ import annotations

import contextlib
import signal
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TextIO

from rich.console import Console

from mlxpaged.cli.answer import Answer, pieces
from mlxpaged.cli.chat import slash
from mlxpaged.cli.chat.conversation import SETTINGS, Conversation
from mlxpaged.cli.chat.markdown import MarkdownStream
from mlxpaged.cli.client import Client, ServerError
from mlxpaged.cli.connection import generating
from mlxpaged.cli.status_line import StatusLine
from mlxpaged.cli.visible import visible

DIM, RESET = "\x1b[2m", "\x1b[0m"


class Chat:
    """answer: the last one. shows_stats: after each answer."""

    def __init__(self, client: Client, conversation: Conversation, out: TextIO, shows_stats: bool) -> None:
        self.client = client
        self.conversation = conversation
        self.answer = Answer()
        self.shows_stats = shows_stats
        self.line = StatusLine(out)
        self._out = out
        self._markdown = MarkdownStream(Console(file=out, highlight=False))

    def run(self, read: Callable[[], str]) -> None:
        """Talk until the user leaves. read: returns a message, and raises EOFError at Ctrl-D and KeyboardInterrupt at
        Ctrl-C."""
        while True:
            try:
                text = read()
            except KeyboardInterrupt:
                self.say("Ctrl-D or /bye leaves the chat.")
                continue
            except EOFError:
                return
            if not text:
                continue
            try:
                with silent_keys(), interruptible():
                    if not slash.carry_out(self, text):
                        self.ask(text)
            except slash.Leave:
                return
            except KeyboardInterrupt:
                self.line.clear()
            except (ServerError, slash.UsageError, OSError, ValueError) as error:
                self.line.clear()
                self.say(f"{error}")

    def ask(self, text: str) -> None:
        """Show the answer to a message and keep both in the conversation. An answer that is interrupted is kept as far
        as it came. Raises ServerError, and KeyboardInterrupt."""
        self.conversation.ask(text)
        self.answer = Answer()
        try:
            self._show_answer()
        finally:
            self.line.clear()
            self._markdown.end()
            self.conversation.answer(self.answer.text)
        if self.answer.finish_reason == "length":
            self.say("The answer is cut: it has reached the most tokens it may have.")
        if self.shows_stats:
            self.say(self.stats())

    def _show_answer(self) -> None:
        self.line.show("...")
        began: float | None = None
        with contextlib.closing(pieces(self.client, self.conversation.request(), self.answer)) as stream:
            for piece in stream:
                if piece.kind == "progress":
                    self.line.show(piece.text)
                elif piece.kind == "thinking":
                    began = time.monotonic() if began is None else began
                    self.line.show(f"thinking, {time.monotonic() - began:.0f} s")
                else:
                    self.line.clear()
                    if began is not None:
                        self.say(f"thought for {time.monotonic() - began:.0f} s, /think shows it")
                        began = None
                    self._markdown.add(piece.text)

    def say(self, text: str) -> None:
        """Show a line that is not the model's."""
        self._out.write(f"{DIM}{visible(text)}{RESET}\n")
        self._out.flush()

    def stats(self) -> str:
        """Describes the speed of the last answer."""
        answer = self.answer
        if answer.ttft is None:
            return "There is no answer yet."
        speed = answer.tokens_per_second
        parts = [f"first token after {answer.ttft:.2f} s"]
        if answer.num_tokens:
            parts.append(f"{answer.num_tokens} tokens" + ("" if speed is None else f", {speed:.1f} tokens/s"))
            parts.append(f"prompt of {answer.num_prompt_tokens} tokens, {answer.num_cached_tokens} of them cached")
        return "; ".join(parts)

    def words(self, command: str) -> Iterable[str]:
        """Returns what may follow a command, for its completion."""
        if command == "model":
            with contextlib.suppress(ServerError):
                return [entry["id"] for entry in generating(self.client)]
        return {"set": tuple(SETTINGS), "stats": ("on", "off")}.get(command, ())


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The first Ctrl-C in the context raises KeyboardInterrupt there. Further ones do nothing, so none can leave the
    chat by hitting what happens after the first."""
    is_first = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        is_first = False
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C does nothing in the context, except where something in it handles it."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def silent_keys() -> Iterator[None]:
    """The terminal does not show keys that are typed during an answer. They are read after it."""
    try:
        before = termios.tcgetattr(0)
    except (termios.error, OSError):  # standard input is no terminal
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(0, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
