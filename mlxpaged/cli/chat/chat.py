"""A chat: asks, and shows the answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console

from mlxpaged.cli.answer import Answer, pieces
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
