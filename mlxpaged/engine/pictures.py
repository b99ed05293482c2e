"""The pictures of an engine's requests: their ids in sequences, and the features that a tower has made of them.

Picture n has ids FIRST_CONTENT_ID + n * MAX_ROWS and up, one for each row of its features. Pictures of one digest have
one number in all requests that may share blocks of the prefix cache. A number is given once, so an id never stands for
two pictures.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxpaged.attention.metadata import IntArray
from mlxpaged.engine.request import Request
from mlxpaged.scheduler.sequence import Sequence as Owner
from mlxpaged.step import FIRST_CONTENT_ID, Step
from mlxpaged.vision.picture import Picture, Pixels
from mlxpaged.vision.tower import Vision

MAX_ROWS = 2**20
"""Rows of features that a picture may have."""

MAX_KNOWN = 2**16
"""Digests that are remembered. A picture that was forgotten gets a new number, and is not found in the prefix cache."""

FEATURE_BYTES = 2**28
"""Features that are kept for later requests, beside those that a prompt needs now."""


@dataclass
class Shown:
    """A picture that requests show. needed_until: by the id of each sequence, the sequence and the number of its tokens
    up to the last row of the picture."""

    pixels: Pixels
    needed_until: dict[int, tuple[Owner, int]] = field(default_factory=dict)

    def is_needed(self, held: Container[int] = ()) -> bool:
        """Whether a sequence has rows of it to compute, apart from those that are held."""
        return any(
            owner.num_committed_tokens < end and owner.sequence_id not in held
            for owner, end in self.needed_until.values()
        )


class Pictures:
    """Belongs to the engine thread. budget_bytes: see FEATURE_BYTES."""

    def __init__(self, vision: Vision, budget_bytes: int = FEATURE_BYTES) -> None:
        self._tower, self._rows = vision.tower, vision.rows
        self.budget = budget_bytes
        self._numbers: OrderedDict[tuple[bytes, tuple[str, ...]], int] = OrderedDict()
        self._next = 0
        self._shown: dict[int, Shown] = {}
        self._of_sequence: dict[int, list[int]] = {}
        self._features: OrderedDict[int, mx.array] = OrderedDict()  # the least recently used ones first
        self.num_encoded = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def content_ids(self, request: Request) -> list[int]:
        """Returns the tokens of a prompt with the ids of its pictures' rows."""
        ids = list(request.prompt_token_ids)
        for picture in request.pictures:
            first = FIRST_CONTENT_ID + self._number(picture, request.cache_salt) * MAX_ROWS
            for row, position in enumerate(picture.positions):
                ids[position] = first + row
        return ids

    def _number(self, picture: Picture, salt: tuple[str, ...]) -> int:
        number = self._numbers.pop((picture.digest, salt), None)
        if number is None:
            number, self._next = self._next, self._next + 1
        self._numbers[picture.digest, salt] = number
        if len(self._numbers) > MAX_KNOWN:
            self._numbers.popitem(last=False)
        return number

    def add(self, sequence: Owner, request: Request) -> None:
        """Keep the pixels of a sequence's pictures until `remove`: they may be encoded again."""
        numbers = [self._number(picture, request.cache_salt) for picture in request.pictures]
        self._of_sequence[sequence.sequence_id] = numbers
        for number, picture in zip(numbers, request.pictures, strict=True):
            shown = self._shown.setdefault(number, Shown(picture.pixels))
            shown.needed_until[sequence.sequence_id] = sequence, picture.positions[-1] + 1

    def remove(self, sequence_id: int) -> None:
        """A sequence has ended, perhaps one without pictures."""
        for number in self._of_sequence.pop(sequence_id, ()):
            if shown := self._shown.get(number):
                shown.needed_until.pop(sequence_id, None)
                if not shown.needed_until:
                    del self._shown[number]
        self.evict()

    # -- features ------------------------------------------------------------------------------------------------

    def missing(self, sequence: Owner, num_computed: int) -> list[int]:
        """Returns the numbers of a sequence's pictures that have no features and are not within its first
        `num_computed` tokens."""
        return [
            number
            for number in dict.fromkeys(self._of_sequence[sequence.sequence_id])
            if number not in self._features and self._shown[number].needed_until[sequence.sequence_id][1] > num_computed
        ]

    def pixels(self, number: int) -> Pixels:
        return self._shown[number].pixels

    def encode(self, numbers: Sequence[int]) -> Iterator[mx.array]:
        """Yields the states of the tower, and at the end the features, for `put`. The pictures have one size."""
        return self._tower.encode(mx.array(np.stack([self.pixels(number) for number in numbers])))

    def put(self, numbers: Sequence[int], features: mx.array) -> None:
        """Keep features[n, k, D], which are computed."""
        self.num_encoded += len(numbers)
        for number, of_one in zip(numbers, features, strict=True):
            self._features[number] = of_one
        self.evict()

    def has_room(self, held: Container[int]) -> bool:
        """Whether the features that sequences need leave room for others. Those of `held` do not count."""
        needed = sum(
            features.nbytes
            for number, features in self._features.items()
            if number in self._shown and self._shown[number].is_needed(held)
        )
        return needed == 0 or needed < self.budget

    def evict(self) -> None:
        """Drop the features that no prompt needs now, if all take more than the budget."""
        total = sum(features.nbytes for features in self._features.values())
        for number in list(self._features) if total > self.budget else ():
            if number not in self._shown or not self._shown[number].is_needed():
                total -= self._features.pop(number).nbytes
                if total <= self.budget:
                    return

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """The step's rows of pictures replace rows of the embedding until `end`.

        A picture whose features are missing is encoded now. That is rare: its blocks were found in the prefix cache
        when it was queued and are gone, or it is computed once more after a preemption.
        """
        ids = np.asarray(step.token_ids)
        where: IntArray = np.flatnonzero(ids >= FIRST_CONTENT_ID).astype(np.int32)
        numbers, rows = np.divmod(ids[where] - FIRST_CONTENT_ID, MAX_ROWS)
        starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        parts = [
            self._features_of(int(numbers[start]))[mx.array(rows[start:end].astype(np.int32))]
            for start, end in itertools.pairwise(starts)
        ]
        self._rows.where, self._rows.features = mx.array(where), mx.concatenate(parts)

    def end(self) -> None:
        self._rows.where = self._rows.features = None

    def _features_of(self, number: int) -> mx.array:
        if number not in self._features:
            *_, features = self.encode([number])
            mx.eval(features)
            self.put([number], features)
        self._features.move_to_end(number)
        return self._features[number]
