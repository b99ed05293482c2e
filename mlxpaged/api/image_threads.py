"""Decodes the images of requests: which may be decoded now, and on which threads. The latest pixels are kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from mlxpaged.api.turns import Rules, Turns
from mlxpaged.vision.image import Pixels
from mlxpaged.vision.reading import CheckedImage, ImageReader

IMAGES = Rules("images", at_once=2, places=128, seconds=1.5e-9)
"""Two, each in a process of its own, so that a slow one does not block the next one. The size of a turn is the bytes
that decoding may take."""
LARGE_BYTES = 2**28
"""Bytes that decoding may take, from which on an image is large. One of these is decoded at a time: the others do not
wait for it, and what is decoded takes about a gigabyte at most. A photo of 12 million pixels is not large."""


class ImageThreads:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._reader = ImageReader()
        self._threads = ThreadPoolExecutor(IMAGES.at_once, thread_name_prefix="mlxpaged-image")
        self.turns = Turns(IMAGES, has_room=self._has_room)

    async def decode(self, client: str, image: CheckedImage) -> Pixels:
        """Raises as `decoder.decode`, and TurnRefusedError."""
        if (kept := self._reader.kept(image)) is not None:
            return kept
        return await self.turns.run(client, image.memory, self._threads, lambda: self._reader.pixels(image))

    def _has_room(self, size: int) -> bool:
        """Whether no large image is decoded, or this one is small."""
        return size < LARGE_BYTES or self.turns.size < LARGE_BYTES

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
