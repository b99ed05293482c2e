"""What a format of tool calls is."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Container
from dataclasses import dataclass

from mlxpaged.formats.pieces import InexpressibleError, Piece
from mlxpaged.formats.schemas import Schema
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools

Reader = Callable[[Source, Tools], Reading[list[Call]]]
Writer = Callable[[str, Schema | None], tuple[Piece, ...]]


def first_of(*readers: Reader) -> Reader:
    """Returns a reader for formats that are written in several ways: the first of these that finds calls."""

    def read(source: Source, tools: Tools) -> Reading[list[Call]]:
        start = source.at
        for reader in readers:
            try:
                return (yield from reader(source, tools))
            except NotACall:
                source.at = start
        raise NotACall

    return read


def new_call_id() -> str:
    """Returns an id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class Format:
    """How a model writes tool calls.

    models: who writes them, for the documentation. starts: texts with which a call may begin, anywhere in an answer.
    first: those with which one may begin where no text has come before it. read: reads calls from the beginning of such
    a text. ends: tags that close calls. dropped: tags around text, which are no part of it. tokens: all other tags; of
    all these, special tokens count as text. in_template: each is several texts; a chat template that has all of them
    shows calls in this format. in_vocabulary: tokens that only models of this format have.

    new_id: makes an id of a call that has none. fit_id: turns an id of another server into one that the model knows,
    from the tool's name, which may be empty, and the number of calls before. shown: writes a call, from its name and
    the JSON of its arguments, into a prompt whose template does not show calls or tools; None for Hermes' JSON between
    the first of the starts and of the ends. written: says how the calls of a tool are written after `call_start`, from
    the tool's name and the schema of its arguments; without a schema, they may be anything. It raises
    InexpressibleError. None if calls cannot be enforced. written_json: another way, for schemas that the first cannot
    express. begin_call: what calls begin with if it is more than the first of the starts. begin_text: the tag before a
    text.
    """

    name: str
    models: str
    starts: tuple[str, ...]
    read: Reader
    ends: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    in_template: tuple[tuple[str, ...], ...] = ()
    in_vocabulary: tuple[str, ...] = ()
    new_id: Callable[[], str] = new_call_id
    fit_id: Callable[[str, str, int], str] = lambda given, name, number: given
    shown: Callable[[str, str], str] | None = None
    written: Writer | None = None
    written_json: Writer | None = None
    begin_call: str = ""
    begin_text: str = ""

    def show(self, name: str, arguments: str) -> str:
        """Returns a call as the model writes it. arguments: JSON."""
        if self.shown is not None:
            return self.shown(name, arguments)
        call = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
        return "\n".join((self.starts[0], call, *self.ends[:1]))

    def pieces(self, name: str, schema: Schema | None) -> tuple[Piece, ...]:
        """Returns what the calls of a tool are made of. `written` must be there. Raises InexpressibleError."""
        assert self.written is not None
        try:
            return self.written(name, schema)
        except InexpressibleError:
            if self.written_json is None:
                raise
            return self.written_json(name, schema)

    @property
    def call_start(self) -> str:
        return self.begin_call or self.starts[0]

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.starts, *self.ends, *self.tokens, *self.dropped)

    def is_of(self, template: str, vocabulary: Container[str]) -> bool:
        """template: the text of the chat template."""
        written = template.replace("\\n", "\n").replace('\\"', '"')
        if any(all(text in written for text in texts) for texts in self.in_template):
            return True
        return bool(self.in_vocabulary) and all(token in vocabulary for token in self.in_vocabulary)
