"""Encodes the images of prompts between steps, a part at a time."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.part import Need, Part
from mlxpaged.core.engine.request import Request
from mlxpaged.core.scheduling.queue import ORDER
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import FinishReason, Sequence
from mlxpaged.core.scheduling.wait import Wait
from mlxpaged.cpu.streams import synchronize
from mlxpaged.library_errors import public_reason
from mlxpaged.parts.images.images import Images
from mlxpaged.process_memory import is_out_of_memory
from mlxpaged.vision.blocks import pace

logger = logging.getLogger(__name__)

IMAGES = Wait("images")

MOST_SECONDS = 0.1
"""The encoder works at most so long between two steps, and at least for one part: streams keep the pace of reading."""

MULTIPLE, LEAST_SHARE = 1.75, 0.25
"""A step and the encoder's work after it take at most so many times as long as a step without an encoder. A step takes
longer beside it, where tower and text model share caches. The encoder gets at least this share of the step's time."""

PLAIN_STEPS = 9
"""Latest steps without the encoder, whose median counts."""

MAX_PIXELS = 2**20
"""Images of one size are encoded together, up to so many pixels."""


class ImageStats(NamedTuple):
    encoded_total: int
    feature_bytes: int  # that are kept


NO_IMAGES = ImageStats(0, 0)


class NoImages(Part):
    """The part of a model that sees no images. The API refuses most such requests earlier."""

    def admit(self, request: Request, sequence: Sequence) -> None:
        if request.images:
            raise ValueError("this model takes no images")


class ImageEncoder(Part):
    """Holds a sequence back until its images are encoded, except those that the prefix cache covers.

    Streams keep more than half of their pace, see MULTIPLE. The images of the first sequence in order come first.
    invariant: whether each image is encoded alone, in parts of one size, so that its features depend on nothing else.
    fail: ends a sequence. clock: seconds. is_busy: whether the time ended before the work in the last `advance`.
    """

    def __init__(
        self,
        images: Images,
        scheduler: Scheduler,
        fail: Callable[[Sequence, FinishReason, str], None],
        clock: Callable[[], float],
        invariant: bool = False,
    ) -> None:
        self.images = images
        if scheduler.prefix_cache is not None:
            scheduler.prefix_cache.content_of = images.content_of
        self._scheduler = scheduler
        self._fail = fail
        self._clock = clock
        self._is_invariant = invariant
        self._most_pixels = 0 if invariant else MAX_PIXELS
        self._numbers: list[int] = []  # of the images that are being encoded
        self._work: Iterator[mx.array] | None = None
        self._state: mx.array | None = None
        self.is_busy = False
        self._alone = False  # whether the next image is encoded alone: several together have failed
        self._ended = clock()
        self._plain: deque[float] = deque(maxlen=PLAIN_STEPS)

    def admit(self, request: Request, sequence: Sequence) -> None:
        if request.images:
            self.images.add(sequence, request)

    def forget(self, sequence_id: int) -> None:
        self.images.remove(sequence_id)

    def stats(self) -> ImageStats:
        return ImageStats(self.images.num_encoded, self.images.nbytes)

    def wait_of(self, request: Request, sequence: Sequence) -> Wait | None:
        return IMAGES if request.images else None

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        """The encoder's time is its own."""
        if self.has_work and in_flight is not None:
            return Need.FINISHED
        self.advance()
        return Need.NOTHING

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return bool(self._scheduler.held[IMAGES])

    def advance(self) -> None:
        """Do a part of the work, and queue the sequences whose images are encoded."""
        started = self._clock()
        seconds = min(MOST_SECONDS, self._allowed(started - self._ended)) if self._scheduler.running else MOST_SECONDS
        if not self.has_work:
            self._plain.append(started - self._ended)
        self._ended, took, is_first = started, 0.0, True
        self.is_busy = False
        while self.has_work:
            left = seconds - (self._ended - started)
            fits = None if self._is_invariant else pace.fit(left)
            if not is_first and not (took <= left if fits is None else fits):
                self.is_busy = True
                break
            if not self._next_part():
                break
            last, self._ended, is_first = self._ended, self._clock(), False
            took = self._ended - last
            if not self._is_invariant:
                pace.measure(took)

    def _allowed(self, step: float) -> float:
        """Seconds of work after a step that took so long."""
        plain = statistics.median(self._plain) if self._plain else step
        return max(LEAST_SHARE * step, MULTIPLE * plain - step)

    def _next_part(self) -> bool:
        """Returns False if there is nothing to do now."""
        if not any(map(self.images.is_shown, self._numbers)):
            self._work = None  # the requests have ended
        if self._work is None and not self._begin():
            return False
        assert self._work is not None
        if self._is_invariant:
            pace.reset()  # another model's encoder may have made the parts smaller
        try:
            self._state = next(self._work)
            mx.eval(self._state)
        except StopIteration:
            assert self._state is not None
            self.images.put(self._numbers, self._state)
            self._work, self._state, self._alone = None, None, False
            self._release()
        except Exception as error:
            self._recover(error)
        return True

    def _begin(self) -> bool:
        """Choose the next images: the first that is missing of the first sequence, and others of its size."""
        self._release()
        if not self.images.has_room(self._scheduler.held[IMAGES]):
            return False
        missing = dict.fromkeys(
            number
            for sequence in sorted(self._scheduler.held[IMAGES].values(), key=ORDER)
            for number in self._missing(sequence)
        )
        if not missing:
            return False
        first = self.images.pixels(next(iter(missing)))
        together = [number for number in missing if self.images.pixels(number).shape == first.shape]
        most = 1 if self._alone else max(1, self._most_pixels // (first.shape[0] * first.shape[1]))
        self._numbers = together[:most]
        self._work = self.images.encode(self._numbers)
        if not self._is_invariant:
            pace.begin()
        return True

    def _missing(self, sequence: Sequence) -> list[int]:
        return self.images.missing(sequence, self._scheduler.blocks.num_available_tokens(sequence))

    def _release(self) -> None:
        for sequence in list(self._scheduler.held[IMAGES].values()):
            if not self._missing(sequence):
                self._scheduler.release(sequence.sequence_id)

    def _recover(self, error: Exception) -> None:
        """Encode the images one by one, so that only the sequences with the faulty one end."""
        logger.exception("%d images could not be encoded", len(self._numbers))
        synchronize()
        if is_out_of_memory(error):
            mx.clear_cache()
        self._work = None
        if len(self._numbers) > 1:
            self._alone = True
            return
        reason = FinishReason.MEMORY if is_out_of_memory(error) else FinishReason.ERROR
        message = f"an image could not be encoded: {type(error).__name__}: {public_reason(error)}"
        for sequence in list(self._scheduler.held[IMAGES].values()):
            if set(self._numbers) & set(self._missing(sequence)):
                self._fail(sequence, reason, message)
