"""Finding stop strings in a text that arrives in pieces, without letting any part of one out."""

from __future__ import annotations


def overlap(text: str, wanted: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `wanted`."""
    return next((n for n in range(min(len(text), len(wanted) - 1), 0, -1) if text.endswith(wanted[:n])), 0)


class StopStrings:
    """Feeds on the pieces of one answer. Holds back the longest tail that could still become a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """Returns the text that may go out, and whether a stop string was found; the text then ends before it."""
        if not self._stop:
            return text, False
        text = self._held + text
        # The one that is complete first, as if the text had come character by character; of several, the longest.
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
        """The text still held back, once no more can follow."""
        held, self._held = self._held, ""
        return held
