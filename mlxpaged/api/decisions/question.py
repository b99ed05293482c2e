"""Defines a question as all dialects mean it, and the text by which a model is asked."""

from __future__ import annotations

import dataclasses
import json
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.media import Shown

MAX_QUESTIONS = 400
"""OpenAI's limit."""
MAX_OPTIONS = 255
"""OpenAI's limit."""
MAX_JSON_LEVELS, MAX_JSON_VALUES, MAX_JSON_BYTES = 32, 10_000, 256 * 1024
"""OpenAI's limits of a JSON part."""

HEAD, LISTED_HEAD = "Question:", "Options:"
"""Every question begins with one of them, so that its tokens do not depend on what is before it. Options come first, so
that questions with the same ones share them too."""
SEPARATOR = re.compile(r"[,\n]")
"""What the options of a short list are not to contain."""
YES, NO = "yes", "no"
"""How a model says that a statement is true or false."""


@dataclass(frozen=True)
class Option:
    """text: the whole answer. description: what the model is told of it."""

    text: str
    description: str = ""


@dataclass(frozen=True)
class Question:
    """param: the client's field of the question. options_param: of its options. media: what in its text is no text.
    lists_options: whether the model is told of them."""

    text: str
    options: tuple[Option, ...]
    param: str
    options_param: str
    media: Sequence[Shown] = ()
    lists_options: bool = True

    def __post_init__(self) -> None:
        """Raises ApiError for an option that is empty or there twice."""
        texts = [option.text for option in self.options]
        for index, text in enumerate(texts):
            if not text.strip():
                raise bad_parameter(f"{self.options_param}.{index}", "must not be empty")
            if text in texts[:index]:
                raise bad_parameter(f"{self.options_param}.{index}", f"{text!r} is there twice; options must differ")

    @property
    def head(self) -> str:
        return LISTED_HEAD if self.lists_options else HEAD

    @property
    def body(self) -> str:
        """What follows its head."""
        if not self.lists_options:
            return f" {self.text.strip()}"
        texts = [option.text for option in self.options]
        if not any(each.description for each in self.options) and not any(SEPARATOR.search(text) for text in texts):
            listed = f" {', '.join(texts)}"
        else:
            listed = "".join(
                f"\n- {each.text}: {each.description}" if each.description else f"\n- {each.text}"
                for each in self.options
            )
        return f"{listed}\n{HEAD} {self.text.strip()}"

    def reversed(self) -> Question:
        """Returns the question with its options in the reverse order."""
        return dataclasses.replace(self, options=self.options[::-1])

    def unlisted(self) -> Question:
        """Returns the question as a cloze: the model is not told of its options."""
        return dataclasses.replace(self, lists_options=False)

    def with_symbols(self) -> Question:
        """Returns the question with symbols for answers: a letter for each option, or numbers if there are too many."""
        options = [
            Option(symbol, f"{each.text}: {each.description}" if each.description else each.text)
            for symbol, each in zip(symbols(len(self.options)), self.options, strict=True)
        ]
        return dataclasses.replace(self, options=tuple(options))


def symbols(count: int) -> Sequence[str]:
    letters = string.ascii_uppercase
    return letters[:count] if count <= len(letters) else [str(number) for number in range(1, count + 1)]


def predicate(text: str, param: str, false: str = "", true: str = "", media: Sequence[Shown] = ()) -> Question:
    """Returns the question whether a statement is true. The second option is that it is. false, true: what that
    means."""
    return Question(text, (Option(NO, false), Option(YES, true)), param, param, media)


def literal(value: str | bool, among: Sequence[str | bool]) -> str:
    """Returns the text of a typed value. Among values of several types, each is written as in JSON, so that `true` and
    `"true"` are two answers."""
    if isinstance(value, str) and any(isinstance(each, bool) for each in among):
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) else json.dumps(value)


def as_text(value: Any, param: str) -> str:
    """Returns text as it is, and an object or array as JSON. Raises ApiError for JSON beyond the limits."""
    if isinstance(value, str):
        return value
    for count, level in enumerate(levels(value), 1):
        if count > MAX_JSON_VALUES:
            raise bad_parameter(param, f"has more than {MAX_JSON_VALUES:,} values", code="json_too_large")
        if level > MAX_JSON_LEVELS:
            raise bad_parameter(param, f"has more than {MAX_JSON_LEVELS} levels", code="json_too_large")
    text = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    if len(text.encode(errors="surrogatepass")) > MAX_JSON_BYTES:
        raise bad_parameter(param, f"is longer than {MAX_JSON_BYTES:,} bytes", code="json_too_large")
    return text


def levels(value: Any) -> Iterator[int]:
    """Yields the depth of each object, array and value, from 1 on for the whole."""
    waiting = [(value, 1)]
    while waiting:
        item, level = waiting.pop()
        yield level if isinstance(item, dict | list) else level - 1
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        waiting += ((each, level + 1) for each in inner)
