"""Which images are decoded beside which: a small one waits for no large one, and one that is kept waits for none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mlxpaged.api.image_threads import IMAGES, LARGE_BYTES, ImageThreads
from mlxpaged.vision import reading
from mlxpaged.vision.image import Pixels
from mlxpaged.vision.reading import CheckedImage, ClientImage, check
from tests.api.helpers import DEADLINE
from tests.vision.files import FORM, black_png, text_of


def checked(width: int, height: int) -> CheckedImage:
    return check(ClientImage(text_of(black_png(width, height)), False), FORM)


LARGE = [checked(8000, 4000 + i) for i in range(3)]
ONE, OTHER = "a client", "another"
SMALL = [checked(64, 64 + i) for i in range(3)]


class Held:
    """A decoder that waits for a word for each image. begun: their digests."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.may_end = {each.digest: threading.Event() for each in (*LARGE, *SMALL)}

    def decode(self, image: CheckedImage) -> Pixels:
        self.begun.append(image.digest)
        assert self.may_end[image.digest].wait(DEADLINE)
        return np.zeros((image.height, image.width, 3), np.uint8)

    def end(self, *images: CheckedImage) -> None:
        for each in images:
            self.may_end[each.digest].set()

    async def wait_for(self, *images: CheckedImage) -> None:
        """Until these have begun, and no others."""
        for _ in range(round(DEADLINE / 0.001)):
            if len(self.begun) >= len(images):
                break
            await asyncio.sleep(0.001)
        assert sorted(self.begun) == sorted(each.digest for each in images)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()
    monkeypatch.setattr(reading, "decode", held.decode)
    yield held
    held.end(*LARGE, *SMALL)


@pytest.fixture
def images() -> Iterator[ImageThreads]:
    threads = ImageThreads()
    yield threads
    threads.close()


def test_the_images_here_are_large_and_small() -> None:
    assert all(each.memory >= LARGE_BYTES for each in LARGE)
    assert all(each.memory < LARGE_BYTES for each in SMALL)


def test_a_large_image_waits_for_another_and_a_small_one_does_not(held: Held, images: ImageThreads) -> None:
    async def run() -> None:
        large = [asyncio.ensure_future(images.decode(ONE, each)) for each in LARGE[:2]]
        await held.wait_for(LARGE[0])
        held.end(SMALL[0])
        await images.decode(OTHER, SMALL[0])
        await held.wait_for(LARGE[0], SMALL[0])
        held.end(*LARGE)
        await asyncio.gather(*large)
        await held.wait_for(LARGE[0], SMALL[0], LARGE[1])

    asyncio.run(run())


def test_a_large_image_whose_client_has_left_still_counts_until_it_is_decoded(held: Held, images: ImageThreads) -> None:
    async def run() -> None:
        left, next_one = (asyncio.ensure_future(images.decode(ONE, each)) for each in LARGE[:2])
        await held.wait_for(LARGE[0])
        left.cancel()
        held.end(*SMALL)
        for each in SMALL:
            await images.decode(OTHER, each)
        await held.wait_for(LARGE[0], *SMALL)
        held.end(*LARGE)
        await next_one
        await held.wait_for(LARGE[0], *SMALL, LARGE[1])

    asyncio.run(run())


def test_an_image_that_waits_and_whose_client_has_left_is_not_decoded(held: Held, images: ImageThreads) -> None:
    async def run() -> None:
        first, left, last = (asyncio.ensure_future(images.decode(ONE, each)) for each in LARGE)
        await held.wait_for(LARGE[0])
        left.cancel()
        held.end(*LARGE)
        await asyncio.gather(first, last)
        await held.wait_for(LARGE[0], LARGE[2])

    asyncio.run(run())


def test_an_image_that_is_kept_waits_for_none(held: Held, images: ImageThreads) -> None:
    async def run() -> None:
        held.end(SMALL[0])
        await images.decode(OTHER, SMALL[0])
        others = [asyncio.ensure_future(images.decode(ONE, each)) for each in SMALL[1:]]
        assert len(others) == IMAGES.at_once
        await held.wait_for(*SMALL)
        await images.decode(OTHER, SMALL[0])
        held.end(*SMALL)
        await asyncio.gather(*others)
        await held.wait_for(*SMALL)

    asyncio.run(run())
