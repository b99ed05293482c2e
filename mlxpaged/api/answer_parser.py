"""The text of an answer, divided into its parts as it comes. However it is cut into pieces, the parts are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from mlxpaged.api.parts import CallEnd, Part, Text, Thinking
from mlxpaged.api.tool_calls import CallReader
from mlxpaged.engine import Constraint, StructuredOutput
from mlxpaged.engine.stop_strings import overlap
from mlxpaged.models import Tags


class Section(Enum):
    OPENING = auto()
    """Where a grammar holds the answer's text: a tag, which has to come at once, or the text, to its end."""
    VERBATIM = auto()
    TEXT = auto()
    THINKING = auto()
    CALL = auto()
    DONE = auto()
    """All that was wanted is there; what follows is dropped."""


class AnswerParser:
    """Feeds on one answer.

    White space at a tag only separates parts, and is dropped, but for what separates one text from the next.

    thinking: whether the answer begins inside a think block. tools: those that may be called; without any, calls are
    not looked for. one_call: whether no more than one is wanted; what follows it is dropped. form: what a grammar holds
    the answer to, if one does: then a tag in a string of JSON is none.
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
        """Those that are complete."""
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
        self._space = ""  # the end of the section so far, held back until something follows it
        self._trim = thinking  # nothing but white space has come since a tag
        self._texts = False  # there was text: what comes after a tag is set apart from it
        self._call: CallReader | None = None
        self._next_index = 0

    @property
    def thinks(self) -> bool:
        """Whether what comes next is inside a think block, as far as is known."""
        return self._section is Section.THINKING

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain by now."""
        if not self._tags.think_start and self._form is None:
            return [Text(text)] if text else []
        self._buffer += text
        parts: list[Part] = []
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
            self._take(before, parts)
            self._pass(mark, parts)
        keep = max((overlap(self._buffer, mark) for mark in marks), default=0)
        certain = self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(certain) :]
        self._take(certain, parts)
        return parts

    def finish(self) -> list[Part]:
        """What was held back, at the end of the answer."""
        parts: list[Part] = []
        self._take(self._buffer, parts)
        if self._call is not None and self._form is not None:
            self._end_call(self._call, "", not self._form.end, parts)
        elif self._section is Section.TEXT and not self._trim:
            parts += [Text(self._space)] if self._space else []
        return parts

    def _marks(self) -> list[str]:
        """The tags that end the section."""
        form = self._form
        if self._section is Section.TEXT:
            marks = [self._tags.think_start, form.start if form else ""]
        elif self._section is Section.OPENING:
            marks = [self._tags.think_start if self._may_think else "", form.start if form else ""]
        elif self._section is Section.THINKING:
            marks = [self._tags.think_end]
        elif self._section is Section.CALL and form is not None:
            marks = [form.end or form.start]
        else:
            marks = []
        return [mark for mark in marks if mark]

    def _pass(self, mark: str, parts: list[Part]) -> None:
        """Over a tag into the next section."""
        form = self._form
        if self._call is not None and form is not None:
            self._end_call(self._call, form.end, True, parts)
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

    def _end_call(self, call: CallReader, end: str, closed: bool, parts: list[Part]) -> None:
        last = call.finish(end, closed)
        parts += last
        made = sum(isinstance(part, CallEnd) for part in last)
        self._call = None
        self._next_index = call.next_index
        self.calls_made += made
        self._begin(Section.DONE if self._one_call and made else Section.TEXT)
        self._trim = made > 0  # a broken call is text like that around it

    def _take(self, text: str, parts: list[Part]) -> None:
        """Text of the section."""
        if self._call is not None:
            parts += self._call.feed(text)
        elif self._section in (Section.OPENING, Section.VERBATIM):
            parts += [Text(text)] if text else []
        elif self._section is not Section.DONE:
            text = self._space + text
            if self._trim and not (self._texts and self._section is Section.TEXT):
                text = text.lstrip()
            said = text.rstrip()
            self._space = text[len(said) :]
            if said:
                self._trim = False
                self._texts |= self._section is Section.TEXT
                parts.append(Thinking(said) if self._section is Section.THINKING else Text(said))


def alike(text: str, mark: str) -> bool:
    """Whether one begins with the other."""
    return text.startswith(mark) or mark.startswith(text)
