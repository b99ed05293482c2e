"""Drafts from the text itself: what came after the same tokens earlier in the prompt or the answer.

Code that is edited, JSON of one kind and quoted text repeat themselves. A hash of n-grams to their latest places, with
the place after the last match, finds as much as a suffix automaton (the longest match among all places).
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf

from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.step import FIRST_CONTENT_ID

LENGTH, PAIR = 3, 2
"""Tokens of an n-gram, and of the shortest one."""

BASE = 1 << 64
"""More than any token or content id. An n-gram is a number of this base, which no garbage collector looks at."""

PLACES = 8
"""Latest places of an n-gram that are compared. Where none is found, the latest place of the last two tokens counts."""

LONGEST = 64
"""Tokens that are compared, back from the end of the text."""

TOKENS_AT_ONCE, LEAST_TOKENS = 4096, 64
"""Tokens that a step adds to the indexes of all sequences together, and those that it adds to each even so. So long
prompts do not delay it: each token takes about a microsecond."""

MOST_TOKENS, BYTES_PER_TOKEN = 2**19, 256
"""Tokens of all indexes together, and bytes that each takes at most (213 were measured). Sequences for which there is
no room have no drafts of their text: many long ones may share the blocks of one prefix, but not an index."""

NONE = -1
"""Stands between a prediction and the sequence. It is no token."""


class NgramIndex:
    """The tokens of a sequence, and where each n-gram occurs among them. prediction: tokens that are searched too."""

    def __init__(self, prediction: ListOf[int] = ()) -> None:
        self._tokens: list[int] = []
        self._num_predicted = 0  # tokens of the prediction so far
        self._prediction = [*prediction, NONE] if prediction else []
        self._latest: dict[int, int] = {}  # n-gram -> the place after its latest one
        self._before: list[int] = []  # place -> the one before it with the same n-gram, or 0
        self._pairs: dict[int, int] = {}
        self._followed = 0  # after the tokens that were copied last: a copy goes on if a token of it was replaced

    def __len__(self) -> int:
        """Tokens, with those of the prediction."""
        return len(self._tokens)

    def extend(self, token_ids: ListOf[int], end: int, most: int = TOKENS_AT_ONCE) -> int:
        """Add the tokens up to `end`, at most so many of them. token_ids: all of the sequence. Returns how many were
        added."""
        if self._num_predicted < len(self._prediction):
            first = self._num_predicted
            added = self._add(self._prediction[first : first + most])
            self._num_predicted += added
            return added
        start = len(self._tokens) - self._num_predicted
        added = self._add(token_ids[start : min(end, start + most)])
        if self._followed:
            self._followed += added
        return added

    def _add(self, token_ids: ListOf[int]) -> int:
        tokens, latest = self._tokens, self._latest
        for place, token in enumerate(token_ids, len(tokens)):
            before = 0
            if place >= LENGTH:
                gram, pair = self._last_grams()
                before = latest.get(gram, 0)
                latest[gram] = self._pairs[pair] = place
            self._before.append(before)
            tokens.append(token)
        return len(token_ids)

    def _last_grams(self) -> tuple[int, int]:
        """The last n-gram and pair, each as a number."""
        first, second, third = self._tokens[-LENGTH:]
        pair = second * BASE + third
        return first * BASE * BASE + pair, pair

    def continuation(self, end: int, most: int) -> tuple[list[int], int]:
        """Returns up to `most` tokens that came after the longest earlier match of the last tokens, and the length of
        the match, of one token where a copy goes on; nothing if there is none, or if not all tokens up to `end` are
        known here yet."""
        tokens, end = self._tokens, end + len(self._prediction)
        if len(tokens) != end or end < LENGTH:
            return [], 0
        gram, pair = self._last_grams()
        place = self._followed if self._followed < end else 0
        best, candidate = self._match(place), self._latest.get(gram, 0)
        for _ in range(PLACES):
            if not candidate or best == LONGEST:
                break
            length = self._match(candidate)
            if length > best:
                best, place = length, candidate
            candidate = self._before[candidate]
        if best < PAIR and pair in self._pairs:
            best, place = PAIR, self._pairs[pair]
        if not best:
            return [], 0
        self._followed = place
        drafts: list[int] = []
        for at in range(place, place + most):  # a match near the end is the period of a repetition
            token = tokens[at] if at < end else drafts[at - end]
            if token == NONE or token >= FIRST_CONTENT_ID:  # rows of images are never drafts
                break
            drafts.append(token)
        return drafts, best

    def _match(self, place: int) -> int:
        """Tokens before `place` that equal the last ones."""
        tokens, end = self._tokens, len(self._tokens)
        length = 0
        while length < LONGEST and length < place and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


class NgramDrafter:
    """A `Drafter` with an index of the tokens of each sequence."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        """most_tokens: of all indexes together."""
        self._indexes: dict[int, NgramIndex] = {}
        self._left = TOKENS_AT_ONCE  # tokens that this step may still add
        self._room = most_tokens  # tokens that may still be added

    def begin_step(self) -> None:
        self._left = TOKENS_AT_ONCE

    def propose(self, running: RunningRequest, most: int) -> tuple[list[int], int]:
        sequence = running.sequence
        index = self._indexes.get(sequence.sequence_id)
        if index is None:
            index = self._indexes[sequence.sequence_id] = NgramIndex(running.request.params.predicted)
        end = sequence.num_known_tokens
        added = index.extend(sequence.token_ids, end, min(self._room, max(self._left, LEAST_TOKENS)))
        self._left -= added
        self._room -= added
        return index.continuation(end, most)

    @property
    def num_sequences(self) -> int:
        """Sequences that have an index."""
        return len(self._indexes)

    def forget(self, sequence_id: int) -> None:
        index = self._indexes.pop(sequence_id, None)
        self._room += 0 if index is None else len(index)


def index_bytes(most_tokens: int) -> int:
    """The most bytes of the indexes. most_tokens: that all sequences have together."""
    return BYTES_PER_TOKEN * min(MOST_TOKENS, most_tokens)
