"""The images of an engine's requests: their ids in sequences, and the features that a tower has made of them.

Image n has ids FIRST_CONTENT_ID + n * MAX_ROWS and up, one for each row of its features. Images of one digest have
one number in all requests that may share blocks of the prefix cache, and nearly always in all processes. The keys of
the prefix cache have the digest too, so blocks of another image with the same number are never found.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxpaged.attention.metadata import IntArray
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.step_input import StepInput
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.step import FIRST_CONTENT_ID, Row, Step
from mlxpaged.engine_config import EngineConfig
from mlxpaged.vision.image import LARGEST, Pixels, PromptImage
from mlxpaged.vision.positions import Positions, shifts_of
from mlxpaged.vision.tower import Vision

MAX_NUMBERS = 2**42
"""Numbers of images: ids are int64."""

MAX_ROWS = 2**20
"""Rows of features that an image may have."""

MAX_KNOWN = 2**16
"""Digests that are remembered."""

Key = tuple[bytes, tuple[str, ...]]
"""The digest of an image, and the salt of the requests that share it."""

FEATURE_BYTES = 2**28
"""Features that are kept for later requests, beside those that a prompt needs now."""


@dataclass
class Shown:
    """An image that requests show. needed_until: by the id of each sequence, the sequence and the number of its tokens
    up to the last row of the image."""

    pixels: Pixels
    needed_until: dict[int, tuple[Sequence, int]] = field(default_factory=dict)

    def is_needed(self, held: Container[int] = ()) -> bool:
        """Whether a sequence has rows of it to compute, apart from those that are held, and their forks."""
        return any(
            owner.num_committed_tokens < end and (owner.fork_of or owner).sequence_id not in held
            for owner, end in self.needed_until.values()
        )


def number_of(key: Key) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") % MAX_NUMBERS


def cannot_see(vision: Vision, config: EngineConfig) -> str:
    """The reason for which the engine cannot compute images whole; empty if it can, or need not."""
    if vision.mutual == "none":
        return ""
    if config.batch_invariant:
        return "tokens of its images see one another, and --batch-invariant computes each token by itself"
    rows, columns = vision.format.grid(*vision.format.size(*LARGEST))
    least = rows * columns + config.max_num_seqs
    if config.max_num_batched_tokens < least:
        most = rows * columns
        return f"an image has up to {most} tokens, which take one step: --max-num-batched-tokens {least} allows that"
    return ""


class Images(StepInput):
    """Belongs to the engine thread. budget_bytes: see FEATURE_BYTES.

    If several ranks compute a model, rank 0 encodes, and calls on_put(number, grid, features) and on_drop(number). The
    others keep what `receive` and `forget` tell them.
    """

    on_put: Callable[[int, tuple[int, int], mx.array], None] = staticmethod(lambda number, grid, features: None)
    on_drop: Callable[[int], None] = staticmethod(lambda number: None)

    def __init__(self, vision: Vision, budget_bytes: int = FEATURE_BYTES) -> None:
        self._tower, self._rows, self._format, self._axes = vision.tower, vision.rows, vision.format, vision.axes
        self._is_mutual = vision.mutual != "none"
        self.budget = budget_bytes
        self._numbers: OrderedDict[Key, int] = OrderedDict()
        self._keys: dict[int, Key] = {}
        self._shown: dict[int, Shown] = {}
        self._of_sequence: dict[int, list[int]] = {}
        self._grids: dict[int, tuple[int, int]] = {}  # rows and columns of features, of those that are shown or kept
        self._features: OrderedDict[int, mx.array] = OrderedDict()  # the least recently used ones first
        self.num_encoded = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def content_ids(self, request: Request) -> list[int]:
        """Returns the tokens of a prompt with the ids of its images' rows."""
        ids = list(request.prompt_token_ids)
        for image in request.images:
            first = FIRST_CONTENT_ID + self._number(image, request.cache_salt) * MAX_ROWS
            for row, position in enumerate(image.positions):
                ids[position] = first + row
        return ids

    def _number(self, image: PromptImage, salt: tuple[str, ...]) -> int:
        key = image.digest, salt
        number = self._numbers.pop(key, None)
        if number is None:
            number = number_of(key)
            while self._keys.get(number, key) != key:  # it is another image's
                number = (number + 1) % MAX_NUMBERS
        self._numbers[key], self._keys[number] = number, key
        if len(self._numbers) > MAX_KNOWN:
            _, forgotten = self._numbers.popitem(last=False)
            if forgotten not in self._grids:
                del self._keys[forgotten]
        return number

    def content_of(self, token_id: int) -> bytes:
        """What an id in a sequence stands for, in all processes."""
        return repr(self._keys[(token_id - FIRST_CONTENT_ID) // MAX_ROWS]).encode()

    def add(self, sequence: Sequence, request: Request) -> None:
        """Let a sequence show a request's images, and keep their pixels until `remove`: they may be encoded again."""
        sequence.token_ids[: sequence.num_prompt_tokens] = self.content_ids(request)
        sequence.shifts, sequence.spans = self.shifts(request), self.spans(request)
        numbers = [self._number(image, request.cache_salt) for image in request.images]
        self._of_sequence[sequence.sequence_id] = numbers
        for number, (image, grid) in zip(numbers, self._with_grids(request), strict=True):
            self._grids[number] = grid
            shown = self._shown.setdefault(number, Shown(image.pixels))
            shown.needed_until[sequence.sequence_id] = sequence, image.positions[-1] + 1

    def shifts(self, request: Request) -> ListOf[tuple[int, int]]:
        """Returns those of the request's sequence, see Row."""
        return shifts_of(self._with_grids(request)) if self._axes is not None else ()

    def spans(self, request: Request) -> ListOf[tuple[int, int]]:
        """Returns those of the request's sequence, see Sequence."""
        whole = request.images if self._is_mutual else ()
        return [(image.positions[0], image.positions[-1] + 1) for image in whole]

    def _with_grids(self, request: Request) -> list[tuple[PromptImage, tuple[int, int]]]:
        return [(each, self._format.grid(*reversed(each.pixels.shape[:2]))) for each in request.images]

    def remove(self, sequence_id: int) -> None:
        """A sequence has ended, perhaps one without images."""
        for number in self._of_sequence.pop(sequence_id, ()):
            if shown := self._shown.get(number):
                shown.needed_until.pop(sequence_id, None)
                if not shown.needed_until:
                    del self._shown[number]
                    if number not in self._features:
                        del self._grids[number]
        self.evict()

    # -- features ------------------------------------------------------------------------------------------------

    def missing(self, sequence: Sequence, num_computed: int) -> list[int]:
        """Returns the numbers of a sequence's images that have no features and are not within its first
        `num_computed` tokens."""
        return [
            number
            for number in dict.fromkeys(self._of_sequence[sequence.sequence_id])
            if number not in self._features and self._shown[number].needed_until[sequence.sequence_id][1] > num_computed
        ]

    def is_shown(self, number: int) -> bool:
        """Whether a request has the image."""
        return number in self._shown

    def pixels(self, number: int) -> Pixels:
        return self._shown[number].pixels

    def encode(self, numbers: ListOf[int]) -> Iterator[mx.array]:
        """Yields the states of the tower, and at the end the features, for `put`. The images have one size."""
        return self._tower.encode(mx.array(np.stack([self.pixels(number) for number in numbers])))

    def put(self, numbers: ListOf[int], features: mx.array) -> None:
        """Keep features[n, k, D], which are computed, but for those of requests that have ended."""
        self.num_encoded += len(numbers)
        for number, of_one in zip(numbers, features, strict=True):
            if (grid := self._grids.get(number)) is not None:
                self.on_put(number, grid, of_one)
                self._features[number] = of_one
        self.evict()

    def receive(self, number: int, grid: tuple[int, int], features: mx.array) -> None:
        """Keep the features [k, D] of an image that rank 0 has encoded."""
        self._grids[number], self._features[number] = grid, features

    def forget(self, number: int) -> None:
        """Drop what `receive` was given."""
        del self._grids[number], self._features[number]

    def has_room(self, held: Container[int]) -> bool:
        """Whether the features that sequences need leave room for others. Those of `held` do not count."""
        needed = sum(
            features.nbytes
            for number, features in self._features.items()
            if number in self._shown and self._shown[number].is_needed(held)
        )
        return needed == 0 or needed < self.budget

    @property
    def nbytes(self) -> int:
        """Bytes of the features."""
        return sum(features.nbytes for features in self._features.values())

    def evict(self) -> None:
        """Drop the features that no prompt needs now, if all take more than the budget."""
        total = self.nbytes
        for number in list(self._features) if total > self.budget else ():
            if number not in self._shown or not self._shown[number].is_needed():
                total -= self._features.pop(number).nbytes
                self.on_drop(number)
                if number not in self._shown:
                    del self._grids[number]
                if total <= self.budget:
                    return

    # -- steps ---------------------------------------------------------------------------------------------------

    def concerns(self, step: Step) -> bool:
        return step.shows_images

    def prepare(self, step: Step) -> None:
        """Encode the images of a step whose features are missing.

        That is rare: their blocks were found in the prefix cache when they were queued and are gone, or they are
        computed once more after a preemption.
        """
        ids = np.asarray(step.token_ids)
        for number in np.unique((ids[ids >= FIRST_CONTENT_ID] - FIRST_CONTENT_ID) // MAX_ROWS).tolist():
            if number not in self._features:
                *_, features = self.encode([number])
                mx.eval(features)
                self.put([number], features)
            self._features.move_to_end(number)

    def begin(self, step: Step) -> None:
        """The step's rows of images replace rows of the embedding until `end`. All have features."""
        ids = np.asarray(step.token_ids)
        where: IntArray = np.flatnonzero(ids >= FIRST_CONTENT_ID).astype(np.int32)
        numbers, rows = np.divmod(ids[where] - FIRST_CONTENT_ID, MAX_ROWS)
        starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        parts = [
            self._features[int(numbers[start])][mx.array(rows[start:end].astype(np.int32))]
            for start, end in itertools.pairwise(starts)
        ]
        positions = None
        if self._axes is not None:
            positions = mx.array(np.concatenate([self._positions_of(row) for row in step.rows], axis=1))
        self._rows.show(mx.array(where), mx.concatenate(parts), positions)

    def end(self) -> None:
        self._rows.clear()

    def _positions_of(self, row: Row) -> Positions:
        """[3, n], as `positions_of` has them for a whole prompt."""
        at = np.arange(row.start, row.context_len, dtype=np.int32)
        shifts = np.zeros_like(at)
        for position, shift in row.shifts:
            shifts[at >= position] = shift
        positions: Positions = np.tile(at + shifts, (3, 1))
        ids = np.asarray(row.token_ids)
        where = np.flatnonzero(ids >= FIRST_CONTENT_ID)
        if where.size:
            numbers, rows = np.divmod(ids[where] - FIRST_CONTENT_ID, MAX_ROWS)
            columns = np.array([self._grids[number][1] for number in numbers.tolist()])
            time = positions[0, where] - rows
            positions[:, where] = [time, time + rows // columns, time + rows % columns]
        return positions
