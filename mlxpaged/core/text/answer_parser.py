"""Divides the text of an answer into deltas as it comes. The result does not depend on how the text was cut, and
nothing is said that later turns out to be something else: where a call may have begun, the text waits until it is one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from mlxpaged.core.engine.constraint import Constraint, StructuredOutput
from mlxpaged.core.text.deltas import Delta, Text, Thinking, ToolCall
from mlxpaged.formats import HARMONY, Call, Format, NotACall, Source, Tools, harmony
from mlxpaged.models.text.tokenizer import Tags


@dataclass(frozen=True)
class AnswerForm:
    """How one answer is divided. thinking: whether it begins inside a think block. The rest is as in the parsers."""

    thinking: bool
    tools: Sequence[Mapping[str, Any]]
    one_call: bool
    form: StructuredOutput | None
    goes_on: bool

    def parser(self, tags: Tags) -> AnswerParser | None:
        """Returns None if all of the answer is text."""
        if tags.tools is HARMONY:
            return HarmonyParser(self.tools, self.one_call)
        if not tags.think_start and not self.tools:
            return None
        return TagParser(tags, self.thinking, self.tools, self.one_call, self.form, self.goes_on)


class Section(Enum):
    OPENING = auto()
    """With structured output, an answer that does not begin with a tag is all text."""
    VERBATIM = auto()
    TEXT = auto()
    THINKING = auto()
    DONE = auto()
    """The only allowed call is complete. What follows is dropped."""


class AnswerParser(ABC):
    """Parses one answer.

    White space at a tag is dropped, unless it separates one text from the next.

    tools: the tools that may be called, in OpenAI's form; without any, the parser does not look for calls. one_call:
    whether to drop what follows the first call.
    """

    def __init__(self, form: Format, tools: Sequence[Mapping[str, Any]], one_call: bool, begin: Section) -> None:
        self.calls_made = 0
        """The number of complete calls."""
        self.texts: list[tuple[int, str]] | None = None
        """If it is a list, each part of the text is added to it, after the place in the answer where it begins. White
        space before the first word is a part of it once that has come."""
        self._format = form
        self._tools = Tools(tools)
        self._one_call = one_call
        self._section = begin
        self._buffer = ""
        self._num_fed = 0  # characters of the answer so far
        self._space = ""  # white space that is held back until something follows it in this section
        self._trim = begin is Section.THINKING  # only white space has come since a tag
        self._said = False  # whether there was text, which white space separates from text after a tag
        self._source = Source()  # the buffer, while it may be a call
        self._reading: Generator[None, None, Any] | None = None
        self._ids: set[str] = set()
        self._is_cut = False

    @property
    def thinks(self) -> bool:
        """Whether what comes next is inside a think block, as far as is known."""
        return self._section is Section.THINKING

    @property
    def is_done(self) -> bool:
        """Whether all that follows is dropped."""
        return self._section is Section.DONE

    @property
    def num_read(self) -> int:
        """How many characters of the answer are known to be text or not."""
        num_open = len(self._space) if self._section is Section.TEXT and not self._said else 0
        return self._num_fed - len(self._buffer) - num_open

    def feed(self, text: str) -> list[Delta]:
        """Returns the deltas that no further text can change."""
        self._buffer += text
        self._num_fed += len(text)
        return self._parse(ended=False)

    def finish(self, is_cut: bool = False) -> list[Delta]:
        """Ends the answer. Returns the deltas of the text that was held back. is_cut: whether the model would have gone
        on. What then began like another call after a call is dropped: no text comes after calls."""
        self._is_cut = is_cut
        deltas = self._parse(ended=True)
        if self._section is Section.TEXT and self._space and not self._trim:
            deltas.append(Text(self._space))
        return deltas

    def _parse(self, ended: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while self._step(ended, deltas) if self._reading is None else self._read(self._reading, ended, deltas):
            pass
        return deltas

    @abstractmethod
    def _step(self, ended: bool, deltas: list[Delta]) -> bool:
        """Take the buffer to the next tag. Returns False if no tag is in it, and all that is certain was taken."""

    def _to_next(self, marks: Sequence[str], ended: bool, deltas: list[Delta]) -> str | None:
        """Take the buffer to the first of these tags, or as far as it is none. Returns the tag."""
        places = ((at, -len(mark), mark) for mark in marks if (at := self._buffer.find(mark)) >= 0)
        found = min(places, default=None)
        keep = 0 if ended and not self._drops_rest else max((overlap(self._buffer, mark) for mark in marks), default=0)
        at = len(self._buffer) - keep if found is None else found[0]
        before, self._buffer = self._buffer[:at], self._buffer[at:]
        self._take(before, deltas)
        return None if found is None else found[2]

    @property
    def _drops_rest(self) -> bool:
        return self._is_cut and self.calls_made > 0

    def _begin(self, section: Section) -> None:
        self._section, self._space, self._trim = section, "", True

    def _read(self, reading: Generator[None, None, Any], ended: bool, deltas: list[Delta]) -> bool:
        """Read on in what may be a call. Returns False if it waits for more text."""
        source = self._source
        source.text, source.ended = self._buffer, ended
        is_whole = False
        try:
            next(reading)
            return False
        except StopIteration as result:
            found, is_whole = result.value, True
            end = source.at
        except NotACall:
            found, end = source.complete if ended and not source.thinking else ([], 0)
        self._reading = None
        if found:
            self._buffer = self._buffer[end:]
            self._found(found, deltas)
        if self._drops_rest and not is_whole:
            self._buffer = ""
        elif not found:
            first, self._buffer = self._buffer[:1], self._buffer[1:]
            self._take(first, deltas)
        return True

    def _found(self, calls: Sequence[Call], deltas: list[Delta]) -> None:
        for call in calls[:1] if self._one_call else calls:
            call_id = call.id if call.id and call.id not in self._ids else self._format.new_id()
            self._ids.add(call_id)
            index = self.calls_made
            deltas.append(ToolCall(index, call_id, call.name, call.arguments))
            self.calls_made += 1
        self._begin(Section.DONE if self._one_call else Section.TEXT)

    def _take(self, text: str, deltas: list[Delta]) -> None:
        """Add text of this section."""
        if self._section in (Section.OPENING, Section.VERBATIM):
            deltas += [Text(text)] if text else []
            self._note(text)
        elif self._section is not Section.DONE:
            added, text = text, self._space + text
            if self._trim and not (self._said and self._section is Section.TEXT):
                text = text.lstrip()
            said = text.rstrip()
            self._space = text[len(said) :]
            if self._section is Section.TEXT and (said or self._said):
                self._note(added if self._said else text)
            if said:
                self._trim = False
                self._said |= self._section is Section.TEXT
                deltas.append(Thinking(said) if self._section is Section.THINKING else Text(said))

    def _note(self, text: str) -> None:
        """Text ends where the buffer begins."""
        if self.texts is not None and text:
            self.texts.append((self._num_fed - len(self._buffer) - len(text), text))


class TagParser(AnswerParser):
    """Parses an answer in which tags are around thoughts and calls.

    thinking: whether the answer begins inside a think block. form: the answer's structured output, if any. A tag inside
    a string of its JSON is part of the string. goes_on: whether the answer goes on in the middle of a thought: then it
    may begin with a space.
    """

    def __init__(
        self,
        tags: Tags,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]],
        one_call: bool,
        form: StructuredOutput | None = None,
        goes_on: bool = False,
    ) -> None:
        self._text = Section.OPENING if form is not None and isinstance(form.text, Constraint) else Section.TEXT
        super().__init__(tags.tools, tools, one_call, Section.THINKING if thinking else self._text)
        self._tags = tags
        self._trim &= not goes_on
        self._starts = tags.tools.starts if tools else ()
        # A grammar of the text begins after the tag that closes a thought, so it must come then.
        self._next = tags.think_next if self._text is Section.TEXT else ()
        self._first = tags.tools.first if tools and form is None else ()
        self._spaced = form is not None and form.spaced
        self._may_think = form is not None and form.thinking == "may"

    def feed(self, text: str) -> list[Delta]:
        if not self._tags.think_start and not self._starts:
            return [Text(text)] if text else []
        return super().feed(text)

    def _step(self, ended: bool, deltas: list[Delta]) -> bool:
        marks = self._marks()
        if self._section is Section.OPENING:
            self._buffer = self._buffer.lstrip("\n") if self._spaced else self._buffer
            if self._buffer and not any(alike(self._buffer, mark) for mark in marks):
                self._section, marks = Section.VERBATIM, []
        elif self._section is Section.TEXT and self._first and not self._said and not self.calls_made:
            said = self._buffer.lstrip()
            if said.startswith(self._first):
                self._begin_call(self._buffer[: len(self._buffer) - len(said)])
                return True
            if not ended and any(first.startswith(said) for first in self._first):
                return False
        mark = self._to_next(marks, ended, deltas)
        if mark is None:
            return False
        if self._section is Section.THINKING and mark in self._next:
            self._begin(self._text)
            return True
        if mark in self._starts:
            self._begin_call("")
            return True
        self._buffer = self._buffer[len(mark) :]
        if self._section is Section.THINKING:
            self._may_think = False
            self._begin(self._text)
        elif mark == self._tags.think_start:
            self._begin(Section.THINKING)
        return True

    def _marks(self) -> list[str]:
        """Returns the tags that divide this section from the next."""
        tags, dropped = self._tags, self._tags.tools.dropped
        begins = not self._said and alike(self._buffer.lstrip(), tags.think_start)
        think_start = tags.think_start if begins or tags.think_anywhere else ""
        marks: dict[Section, tuple[str, ...]] = {
            Section.TEXT: (think_start, *self._starts, *dropped),
            Section.OPENING: (think_start if self._may_think else "", *self._starts),
            Section.THINKING: (tags.think_end, *self._next, *self._starts),
        }
        return [mark for mark in marks.get(self._section, ()) if mark]

    def _begin_call(self, space: str) -> None:
        """space: before it, in the buffer."""
        self._space += space
        self._buffer = self._buffer[len(space) :]
        self._source = Source(thinking=self._section is Section.THINKING)
        read = self._in_thought if self._source.thinking else self._tags.tools.read
        self._reading = read(self._source, self._tools)

    def _in_thought(self, source: Source, tools: Tools) -> Generator[None, None, list[Call]]:
        """Reads calls in a thought that is not closed. They count if they fit, and if nothing comes after them."""
        calls: list[Call] = []
        while True:
            calls += yield from self._tags.tools.read(source, tools)
            yield from source.space()
            if not all(map(tools.fit, calls)):
                raise NotACall
            if (yield from source.is_at_end()):
                return calls
            if not (yield from source.ahead(*self._starts)):
                raise NotACall


class HarmonyParser(AnswerParser):
    """Parses the messages of an answer in Harmony. Text outside of a message, or with a malformed header, is text."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], one_call: bool) -> None:
        super().__init__(HARMONY, tools, one_call, Section.TEXT)

    def _step(self, ended: bool, deltas: list[Delta]) -> bool:
        mark = None if self._section is Section.DONE else self._to_next(harmony.MARKS, ended, deltas)
        if mark is None:
            return False
        if mark in harmony.ENDS:
            self._buffer = self._buffer[len(mark) :]
            self._begin(Section.TEXT)
        else:
            self._source = Source()
            self._reading = harmony.read(self._source, self._tools)
        return True

    def _found(self, calls: Any, deltas: list[Delta]) -> None:
        if isinstance(calls, harmony.Header):
            self._begin(Section.THINKING if calls.channel == harmony.THOUGHTS else Section.TEXT)
            self._space = "\n\n" if self._said and not self.thinks else ""  # a message is a paragraph of its own
        else:
            super()._found(calls, deltas)


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def alike(text: str, mark: str) -> bool:
    """Whether one begins with the other."""
    return text.startswith(mark) or mark.startswith(text)
