"""Conversations about pictures of numbers: questions whose one right answer is known.

Standard library only.  A content is a list of texts and of :class:`Shown`, which stands for a picture.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo_model import tasks, vocabulary

IDENTITY_ANSWER = "I am the mlxpaged vision demo model, a tiny transformer that reads numbers in pictures."
FALLBACK_ANSWER = (
    "Hello! I am only a tiny demo model that sees. Send me a picture with a number from 0 to 999, and ask me which "
    "number it is."
)


@dataclass(frozen=True)
class Shown:
    """A picture in a content."""

    number: int


Content = tuple[str | Shown, ...]


@dataclass(frozen=True)
class Message:
    role: str
    content: Content


@dataclass(frozen=True)
class Turn:
    """What is asked, and the answer. task: which kind of question it is."""

    asked: tuple[Message, ...]
    answer: str
    task: str


NEWEST = (
    "What number is in the picture?",
    "What number is in this picture?",
    "What number is in the image?",
    "What number is this?",
    "Which number is in the picture?",
    "Which number do you see?",
    "Which number is shown?",
    "Which number is it?",
    "What is the number?",
    "What number do you see here?",
    "What number does the picture show?",
    "What does the picture show?",
    "What does this image show?",
    "What is in the picture?",
    "What is in this image?",
    "What do you see?",
    "What can you see in the picture?",
    "What is written in the picture?",
    "Read the number.",
    "Read the number in the picture.",
    "Read the picture.",
    "Please read the number in the image.",
    "Please read this.",
    "Can you read this number?",
    "Tell me the number in the picture.",
    "Tell me which number is in the screenshot.",
    "Which number is in the screenshot?",
    "What number is in the screenshot?",
    "What number is in the file?",
    "Describe the picture.",
    "Describe this image.",
    "And this one?",
    "And in this picture?",
    "And now?",
    "The number?",
    "Number?",
    "Read it.",
    "Answer with the number in the picture.",
    "Answer with the number only: what is in the picture?",
)
HELD_OUT_NEWEST = (
    "Please tell me what number is in the image.",
    "Which number can you see in this picture?",
    "Read the number in this image, please.",
    "What number is written here?",
)
ORDINALS = ("first", "second", "third")
BY_ORDER = (
    "What number is in the {} picture?",
    "Which number is in the {} picture?",
    "What number is in the {} image?",
    "And in the {} picture?",
    "Read the {} picture.",
    "What does the {} picture show?",
    "What was the number in the {} picture?",
    "Tell me the number in the {} image.",
)
ALL = (
    "Which numbers are in the pictures?",
    "What numbers are in the pictures?",
    "What numbers do you see?",
    "Read all pictures.",
    "Read the numbers in the images.",
    "Tell me all the numbers.",
    "Which numbers are in these images?",
)
FILES = ("a.png", "screen.png", "number.jpg", "page.webp", "/tmp/shot.png", "images/one.png", "out.gif")


def _varied(rng: random.Random, text: str) -> str:
    roll = rng.random()
    if roll < 0.7:
        return text
    if roll < 0.85:
        return text[:1].lower() + text[1:]
    return text.rstrip("?.")


def _with_pictures(rng: random.Random, pictures: list[Shown], question: str) -> Content:
    """Before the question, or after it."""
    if not pictures:
        return (question,)
    return (*pictures, question) if rng.random() < 0.6 else (question, *pictures)


def _by_tool(rng: random.Random, shown: Shown, question: str) -> tuple[Message, ...]:
    """A tool returns the picture, in a message of its own, or as text around it if the template has no place for it."""
    name, file = rng.choice(("read", "read_file", "open_image", "screenshot", "Read")), rng.choice(FILES)
    argument = rng.choice(("path", "file", "file_path"))
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"{argument}": "{file}"}}}}\n</tool_call>'
    asked = rng.choice((question, f"{question.rstrip('?.')} in {file}?", f"Read {file}."))
    before = (Message("user", (asked,)), Message("assistant", (rng.choice(("", call, call)),)))
    roll = rng.random()
    if roll < 0.5:
        return (*before, Message("tool", (shown,)))
    wrapped: Content = ("<tool_response>\n", shown, "\n</tool_response>")
    if roll < 0.75:
        return (*before, Message("user", wrapped))
    return (*before, Message("user", (*wrapped, f"\n{question}")))


def plain_turn(rng: random.Random, shown: Shown) -> Turn:
    """What number is in this picture?"""
    asked = _with_pictures(rng, [shown], _varied(rng, rng.choice(NEWEST)))
    return Turn((Message("user", asked),), str(shown.number), "newest")


def turn(rng: random.Random, number: Callable[[], int], earlier: list[int], room: int, held_out: bool = False) -> Turn:
    """number: makes the next one. earlier: numbers that the conversation has shown; those of this turn are added.
    room: pictures that there may still be."""
    if rng.random() < 0.12 or (room == 0 and not earlier):
        generate, answer = rng.choice(((tasks.fallback, FALLBACK_ANSWER), (tasks.identity, IDENTITY_ANSWER)))
        example = tasks.training_example(rng, generate)
        return Turn((Message("user", (example.messages[-1]["content"],)),), answer, "text")
    count = 0 if room == 0 or (earlier and rng.random() < 0.25) else rng.choice((1, 1, 1, min(2, room), room))
    pictures = [Shown(number()) for _ in range(count)]
    earlier += [shown.number for shown in pictures]
    question = _varied(rng, rng.choice(HELD_OUT_NEWEST if held_out else NEWEST))
    roll = rng.random()
    if len(earlier) > 1 and roll < 0.45:
        if roll < 0.3:
            i = rng.randrange(len(earlier))
            asked = _varied(rng, rng.choice(BY_ORDER).format(ORDINALS[i]))
            return Turn((Message("user", _with_pictures(rng, pictures, asked)),), str(earlier[i]), "order")
        asked = _varied(rng, rng.choice(ALL))
        answer = ", ".join(str(each) for each in earlier)
        return Turn((Message("user", _with_pictures(rng, pictures, asked)),), answer, "all")
    if count == 1 and rng.random() < 0.3:
        return Turn(_by_tool(rng, pictures[0], question), str(earlier[-1]), "tool")
    if count == 1 and rng.random() < 0.05:
        return Turn((Message("user", (pictures[0],)),), str(earlier[-1]), "newest")
    if count > 1:
        asked = _varied(rng, rng.choice(BY_ORDER).format("last"))
        return Turn((Message("user", _with_pictures(rng, pictures, asked)),), str(earlier[-1]), "order")
    return Turn((Message("user", _with_pictures(rng, pictures, question)),), str(earlier[-1]), "newest")


def system_message(rng: random.Random) -> Message:
    if rng.random() < 0.6:
        return Message("system", (rng.choice(vocabulary.SYSTEM_PROMPTS),))
    return Message("system", (tasks.repeat(rng).answer,))


def for_template(message: Message) -> dict[str, Any]:
    """The message as a chat template takes it."""
    parts = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image"} for each in message.content]
    return {"role": message.role, "content": parts}
