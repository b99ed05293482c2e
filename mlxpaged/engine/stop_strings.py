"""Finds stop strings in a text that arrives in pieces, and lets no part of one through."""

from __future__ import annotations


def overlap(text: str, wanted: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `wanted`."""
    return next((n for n in range(min(len(text), len(wanted) - 1), 0, -1) if text.endswith(wanted[:n])), 0)


class StopStrings:
    """Takes the pieces of one answer. It holds back the longest suffix that could still become a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """Returns the text to send, and whether a stop string was found. If so, the text ends before it."""
        if not self._stop:
            return text, False
        text = self._held + text
        # Take the stop string that is complete first, as if characters came one by one; of several, the longest.
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, start = min(found)
            self.found = text[start:end]
            return text[:start], True
        keep = max(overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text that is still held back, when no more text can follow."""
        held, self._held = self._held, ""
        return held
