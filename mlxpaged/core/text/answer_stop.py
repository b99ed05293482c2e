"""Ends an answer before a stop string in its text. Thoughts, calls, and the tags and headers around both are none."""

from __future__ import annotations

from mlxpaged.core.text.answer_parser import AnswerParser
from mlxpaged.core.text.stop_strings import StopStrings


class AnswerStop:
    """Takes the pieces of one answer, and lets out what is before the stop string. It holds back what may begin one,
    and what may be text or not.

    parser: divides the answer; None if all of it is text. A stop string is found in one text, not partly before and
    partly after a thought or a call.
    """

    def __init__(self, stop: tuple[str, ...], parser: AnswerParser | None) -> None:
        self._stop = stop
        self._strings = StopStrings(stop)
        self._parser = parser
        if parser is not None:
            parser.texts = []
        self._held = ""
        self._num_out = 0  # characters of the answer that were let out
        self._text_end = 0  # where the latest text ends
        self._counts_from = 0

    @property
    def found(self) -> str | None:
        return self._strings.found

    def feed(self, piece: str, counts: bool = True) -> tuple[str, bool]:
        """Returns the text to send, and whether a stop string was found. counts: whether one in this piece counts."""
        if self._parser is None:
            return self._strings.feed(piece) if counts else (piece, False)
        self._held += piece
        if not counts:
            self._counts_from = self._num_out + len(self._held)
        self._parser.feed(piece)
        return self._let_out(self._parser)

    def finish(self, is_cut: bool) -> tuple[str, bool]:
        """Does the same at the end of the answer. is_cut: whether the model would have gone on."""
        if self._parser is None:
            return self._strings.finish(), False
        self._parser.finish(is_cut)
        text, stopped = self._let_out(self._parser)
        return (text, True) if stopped else (text + self._held, False)

    def _let_out(self, parser: AnswerParser) -> tuple[str, bool]:
        texts, parser.texts = parser.texts or (), []
        for start, text in texts:
            skipped = max(0, self._counts_from - start)
            if start > self._text_end or skipped:
                self._strings = StopStrings(self._stop)
            num_held = self._strings.num_held
            before, stopped = self._strings.feed(text[skipped:])
            if stopped:
                return self._held[: start + skipped - num_held + len(before) - self._num_out], True
            self._text_end = start + len(text)
        end = parser.num_read
        if end == self._text_end:
            end -= self._strings.num_held
        text, self._held = self._held[: end - self._num_out], self._held[end - self._num_out :]
        self._num_out = end
        return text, False
