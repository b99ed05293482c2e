"""Drafts from the text itself: what came after the same tokens earlier in the prompt or the answer.

Code that is edited, JSON of one kind and quoted text repeat themselves. A hash of n-grams to their latest places, with
the place after the last match, finds as much as a suffix automaton (the longest match among all places).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as ListOf

from mlxpaged.engine.running_request import RunningRequest
from mlxpaged.step import FIRST_CONTENT_ID

LENGTH, PAIR = 3, 2
"""Tokens of an n-gram, and of the shortest one."""

PLACES = 8
"""Latest places that are kept for each n-gram. Where none is found, the latest place of the last two tokens counts."""

LONGEST = 64
"""Tokens that are compared, back from the end of the text."""

TOKENS_AT_ONCE = 4096
"""Tokens that a step adds to the index, so that a long prompt does not delay it: each takes about a microsecond."""


NONE = -1
"""Stands between a prediction and the sequence. It is no token."""


class NgramIndex:
    """The tokens of a sequence, and where each n-gram occurs among them. prediction: tokens that are searched too."""

    def __init__(self, prediction: ListOf[int] = ()) -> None:
        self._tokens: list[int] = []
        self._num_predicted = 0  # tokens of the prediction so far
        self._prediction = [*prediction, NONE] if prediction else []
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._pairs: dict[tuple[int, ...], int] = {}
        self._followed = 0  # after the tokens that were copied last: a copy goes on if a token of it was replaced

    def extend(self, token_ids: ListOf[int], end: int) -> None:
        """Add the tokens up to `end`, some of them if they are many. token_ids: all of the sequence."""
        if self._num_predicted < len(self._prediction):
            first = self._num_predicted
            self._num_predicted += self._add(self._prediction[first : first + TOKENS_AT_ONCE])
            return
        start = len(self._tokens) - self._num_predicted
        added = self._add(token_ids[start : min(end, start + TOKENS_AT_ONCE)])
        if self._followed:
            self._followed += added

    def _add(self, token_ids: ListOf[int]) -> int:
        tokens = self._tokens
        for token in token_ids:
            if len(tokens) >= LENGTH:
                places = self._places[tuple(tokens[-LENGTH:])]
                places.append(len(tokens))
                if len(places) > PLACES:
                    del places[0]
            if len(tokens) >= PAIR:
                self._pairs[tuple(tokens[-PAIR:])] = len(tokens)
            tokens.append(token)
        return len(token_ids)

    def continuation(self, end: int, most: int) -> tuple[list[int], int]:
        """Returns up to `most` tokens that came after the longest earlier match of the last tokens, and the length of
        the match, of one token where a copy goes on; nothing if there is none, or if not all tokens up to `end` are
        known here yet."""
        tokens, end = self._tokens, end + len(self._prediction)
        if len(tokens) != end or end < PAIR:
            return [], 0
        best, place = 0, 0
        gram = tuple(tokens[-LENGTH:])
        for candidate in (self._followed, *reversed(self._places.get(gram, ()))):
            length = self._match(candidate) if candidate < end else 0
            if length > best:
                best, place = length, candidate
        if best < PAIR and (pair := self._pairs.get(tuple(tokens[-PAIR:]))) is not None:
            best, place = PAIR, pair
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

    def __init__(self) -> None:
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, running: RunningRequest, most: int) -> tuple[list[int], int]:
        sequence = running.sequence
        index = self._indexes.get(sequence.sequence_id)
        if index is None:
            index = self._indexes[sequence.sequence_id] = NgramIndex(running.request.params.predicted)
        end = sequence.num_known_tokens
        index.extend(sequence.token_ids, end)
        return index.continuation(end, most)

    @property
    def num_sequences(self) -> int:
        """Sequences that have an index."""
        return len(self._indexes)

    def forget(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)
