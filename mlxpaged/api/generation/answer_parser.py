"""Divides the text of an answer into deltas as it comes. The result does not depend on how the text was cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from mlxpaged.api.generation.deltas import CallEnd, Delta, Text, Thinking
from mlxpaged.api.generation.tool_calls import CallReader
from mlxpaged.engine import Constraint, StructuredOutput
from mlxpaged.models import Tags


class Section(Enum):
    OPENING = auto()
    """With structured output, an answer that does not begin with a tag is all text."""
    VERBATIM = auto()
    TEXT = auto()
    THINKING = auto()
    CALL = auto()
    DONE = auto()
    """The only allowed call is complete. What follows is dropped."""


class AnswerParser:
    """Parses one answer.

    White space at a tag is dropped, unless it separates one text from the next.

    thinking: whether the answer begins inside a think block. tools: the tools that may be called, in OpenAI's form;
    without any, the parser does not look for calls. one_call: whether to drop what follows the first call. form: the
    answer's structured output, if any. A tag inside a string of its JSON is part of the string.
    """

    def __init__(
        self,
        tags: Tags,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]],
        one_call: bool,
        form: StructuredOutput | None = None,
    ) -> None:
        self.calls_made = 0
        """The number of complete calls."""
        self._tags = tags
        self._tools = tools
        self._one_call = one_call
        self._form = tags.tools if tools else None
        self._held = form is not None
        self._spaced = form is not None and form.spaced
        self._may_think = form is not None and form.thinking == "may"
        self._text = Section.OPENING if form is not None and isinstance(form.text, Constraint) else Section.TEXT
        self._section = Section.THINKING if thinking else self._text
        self._buffer = ""
        self._space = ""  # white space that is held back until something follows it in this section
        self._trim = thinking  # only white space has come since a tag
        self._texts = False  # whether there was text, which white space separates from text after a tag
        self._call: CallReader | None = None
        self._next_index = 0

    @property
    def thinks(self) -> bool:
        """Whether what comes next is inside a think block, as far as is known."""
        return self._section is Section.THINKING

    def feed(self, text: str) -> list[Delta]:
        """Returns the deltas that no further text can change."""
        if not self._tags.think_start and self._form is None:
            return [Text(text)] if text else []
        self._buffer += text
        deltas: list[Delta] = []
        while True:
            marks = self._marks()
            if self._section is Section.OPENING:
                self._buffer = self._buffer.lstrip("\n") if self._spaced else self._buffer
                if self._buffer and not any(alike(self._buffer, mark) for mark in marks):
                    self._section, marks = Section.VERBATIM, []
            start = self._call.ahead(self._buffer) if self._call is not None and self._held else 0
            found = min(((at, mark) for mark in marks if (at := self._buffer.find(mark, start)) >= 0), default=None)
            if found is None:
                break
            at, mark = found
            before, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            self._take(before, deltas)
            self._pass(mark, deltas)
        keep = max((overlap(self._buffer, mark) for mark in marks), default=0)
        certain = self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(certain) :]
        self._take(certain, deltas)
        return deltas

    def finish(self) -> list[Delta]:
        """Ends the answer. Returns the deltas of the text that was held back."""
        deltas: list[Delta] = []
        self._take(self._buffer, deltas)
        if self._call is not None and self._form is not None:
            self._end_call(self._call, "", not self._form.end, deltas)
        elif self._section is Section.TEXT and not self._trim:
            deltas += [Text(self._space)] if self._space else []
        return deltas

    def _marks(self) -> list[str]:
        """Returns the tags that end this section."""
        think_start, call_start = self._tags.think_start, self._form.start if self._form else ""
        marks = {
            Section.TEXT: [think_start, call_start],
            Section.OPENING: [think_start if self._may_think else "", call_start],
            Section.THINKING: [self._tags.think_end],
            Section.CALL: [self._form.end or call_start] if self._form else [],
        }
        return [mark for mark in marks.get(self._section, ()) if mark]

    def _pass(self, mark: str, deltas: list[Delta]) -> None:
        """Enter the section that follows a tag."""
        form = self._form
        if self._call is not None and form is not None:
            self._end_call(self._call, form.end, True, deltas)
        elif self._section is Section.THINKING:
            self._may_think = False
            self._begin(self._text)
        elif mark == self._tags.think_start:
            self._begin(Section.THINKING)
        if form is not None and mark == form.start and self._section in (Section.TEXT, Section.OPENING):
            limit = 1 if self._one_call else None
            self._call = CallReader(form, self._tools, self._space + mark, self._next_index, limit)
            self._begin(Section.CALL)

    def _begin(self, section: Section) -> None:
        self._section, self._space, self._trim = section, "", True

    def _end_call(self, call: CallReader, end: str, closed: bool, deltas: list[Delta]) -> None:
        last = call.finish(end, closed)
        deltas += last
        made = sum(isinstance(delta, CallEnd) for delta in last)
        self._call = None
        self._next_index = call.next_index
        self.calls_made += made
        self._begin(Section.DONE if self._one_call and made else Section.TEXT)
        self._trim = made > 0  # a broken call is text like that around it

    def _take(self, text: str, deltas: list[Delta]) -> None:
        """Add text of this section."""
        if self._call is not None:
            deltas += self._call.feed(text)
        elif self._section in (Section.OPENING, Section.VERBATIM):
            deltas += [Text(text)] if text else []
        elif self._section is not Section.DONE:
            text = self._space + text
            if self._trim and not (self._texts and self._section is Section.TEXT):
                text = text.lstrip()
            said = text.rstrip()
            self._space = text[len(said) :]
            if said:
                self._trim = False
                self._texts |= self._section is Section.TEXT
                deltas.append(Thinking(said) if self._section is Section.THINKING else Text(said))


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def alike(text: str, mark: str) -> bool:
    """Whether one begins with the other."""
    return text.startswith(mark) or mark.startswith(text)
