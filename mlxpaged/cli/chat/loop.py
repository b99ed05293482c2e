"""The loop of a chat: read a message, show the answer. And what the keys do meanwhile."""

from __future__ import annotations

import contextlib
import signal
import termios
from collections.abc import Callable, Iterator
from types import FrameType

from mlxpaged.cli.chat import slash
from mlxpaged.cli.chat.chat import Chat
from mlxpaged.cli.client import ServerError
from mlxpaged.cli.os_errors import sentence


def talk(chat: Chat, read: Callable[[], str]) -> None:
    """Talk until the user leaves. read: returns a message, and raises EOFError at Ctrl-D and KeyboardInterrupt at
    Ctrl-C."""
    while True:
        try:
            text = read()
        except KeyboardInterrupt:
            chat.say("Ctrl-D or /bye leaves the chat.")
            continue
        except EOFError:
            return
        if not text:
            continue
        try:
            with silent_keys(), interruptible():
                if not slash.carry_out(chat, text):
                    chat.ask(text)
        except slash.Leave:
            return
        except KeyboardInterrupt:
            chat.line.clear()
        except (ServerError, slash.UsageError, OSError, ValueError) as error:
            chat.line.clear()
            chat.say(sentence(error))


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
