"""Finds stop strings in a text that arrives in pieces, and lets no part of one through.

One automaton searches for all stop strings at once (Aho and Corasick, "Efficient string matching: an aid to
bibliographic search", 1975). Its time for a character does not depend on how many stop strings there are, or on how
long they are.
"""

from __future__ import annotations

import functools

KEPT = 8
"""Automata that are kept for the candidates of a request, and for clients that send the same stop strings each time.
The largest, for 16 strings of 1,024 characters, has 5 MB and is made in 40 ms."""


class Automaton:
    """Several answers may use it. A state stands for the longest beginning of a stop string that the text so far ends
    with: `length` has its length. complete: the length of the longest stop string that the text ends with, or 0."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.length = [0]
        self.complete = [0]
        self._longer: list[dict[str, int]] = [{}]  # the state after one more character of a stop string
        self._shorter = [0]  # the state of the longest proper ending that begins a stop string too
        states = [0] * len(stop)
        for at in range(max(map(len, stop), default=0)):  # all shorter beginnings have their states
            for i, text in enumerate(stop):
                if at < len(text):
                    states[i] = self._longer[states[i]].get(text[at]) or self._add(states[i], text[at])
                    if at + 1 == len(text):
                        self.complete[states[i]] = len(text)

    def _add(self, state: int, char: str) -> int:
        shorter = self.after(self._shorter[state], char) if state else 0
        added = self._longer[state][char] = len(self.length)
        self._longer.append({})
        self._shorter.append(shorter)
        self.length.append(self.length[state] + 1)
        self.complete.append(self.complete[shorter])
        return added

    def after(self, state: int, char: str) -> int:
        """The state after a character."""
        while state and char not in self._longer[state]:
            state = self._shorter[state]
        return self._longer[state].get(char, 0)


automaton = functools.lru_cache(KEPT)(Automaton)


class StopStrings:
    """Takes the pieces of one answer. It holds back the longest suffix that could still become a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._automaton: Automaton | None = None  # made with the first piece: requests that wait have none
        self._state = 0
        self._held = ""
        self.found: str | None = None

    @property
    def num_held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, bool]:
        """Returns the text to send, and whether a stop string was found. If so, the text ends before it."""
        if not self._stop:
            return text, False
        if self._automaton is None:
            self._automaton = automaton(self._stop)
        num_held = len(self._held)
        text = self._held + text
        for at in range(num_held, len(text)):
            self._state = self._automaton.after(self._state, text[at])
            # The stop string that is complete first counts. Of several that end here, it is the longest.
            if length := self._automaton.complete[self._state]:
                start = at + 1 - length
                self._held, self.found = "", text[start : at + 1]
                return text[:start], True
        keep = self._automaton.length[self._state]
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text that is still held back, when no more text can follow."""
        held, self._held = self._held, ""
        return held
