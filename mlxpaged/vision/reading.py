"""Turns what a client sends as an image into pixels at the size that a tower takes. A child process decodes it.

Nothing is fetched and no file is opened: an image is base64, alone or in a `data:` URL. The limits are checked by the
text's length and the file's header, so that nothing is decoded of an image that is refused.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from mlxpaged.vision.decoding import decoder
from mlxpaged.vision.headers import Header, ImageError, read_header
from mlxpaged.vision.image import ImageFormat, Pixels, Resampling

Detail = Literal["auto", "low", "high", "original"]
"""All but "low" are the same here."""

MAX_BYTES = 20 * 2**20
"""Bytes of an image's file."""
PIECE = 2**20
"""Characters of base64 that are decoded at once, which takes 3 ms. No other thread runs meanwhile."""
MAX_PIXELS = 40_000_000
"""A phone's photo has 12 to 24 million, and some have 48 in a mode of their own. Decoding 40 million takes 0.3 s."""
MAX_SIDE = 16_384
"""Pixels."""
MAX_RATIO = 200
"""The most that the longer side may be of the shorter one."""
LOW_SIDE = 512
"""The longer side of an image that is asked for with little detail."""
CACHE_BYTES = 64 * 2**20
DATA_URL = re.compile(r"data:[\w.+/-]{0,100}(; ?[\w.+-]{1,50}=[^;,]{1,200}){0,5};base64,", re.ASCII | re.IGNORECASE)
DATA_URL_CHARS = 1500
"""The beginning of a `data:` URL is within these."""
FILES = "the server fetches no URL and opens no file; send the image itself, as a data: URL with base64"


@dataclass(frozen=True)
class ClientImage:
    """An image as a client sends it. data: base64, or a URL if `is_url`."""

    data: str
    is_url: bool
    detail: Detail = "auto"


@dataclass(frozen=True)
class CheckedImage:
    """An image within the limits. digest: of the file, and of all else that its pixels depend on. width, height: those
    that the tower takes. resampling: how the image gets them."""

    digest: bytes
    header: Header
    width: int
    height: int
    resampling: Resampling = "BICUBIC"

    @property
    def memory(self) -> int:
        """Bytes that decoding it may take."""
        return decoder.memory_of(self.header)


def check(image: ClientImage, form: ImageFormat, data: bytes | None = None) -> CheckedImage:
    """Reads an image's header. data: its file, if the image is a URL from which it was fetched. Raises
    ImageError."""
    data = decoded(image) if data is None else data
    header = read_header(data)
    width, height = header.size
    check_size(width, height)
    if image.detail == "low":
        scale = min(1.0, LOW_SIDE / max(width, height))
        width, height = max(1, round(scale * width)), max(1, round(scale * height))
    digest = hashlib.blake2b(digest_size=16)
    for part in (form.settings, b"low" if image.detail == "low" else b"", data):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return CheckedImage(digest.digest(), header, *form.size(width, height), form.resampling)


def decoded(image: ClientImage) -> bytes:
    """Returns the bytes of the file. Raises ImageError."""
    text = image.data
    if image.is_url:
        start = DATA_URL.match(text, 0, DATA_URL_CHARS)
        if start is None:
            raise ImageError(f"is not in the request: {FILES}")
        text = text[start.end() :]
    text = text.replace("\n", "").replace("\r", "")  # as Ollama does: many programs write lines of 60 or 76 characters
    if len(text) > (MAX_BYTES + 2) // 3 * 4:
        raise ImageError(f"has more than {MAX_BYTES >> 20} MiB")
    if len(text) % 4:  # Python 3.10 takes some of these
        raise ImageError("is not valid base64")
    try:
        pieces = [base64.b64decode(text[i : i + PIECE], validate=True) for i in range(0, len(text), PIECE)]
    except ValueError:
        raise ImageError("is not valid base64") from None
    if any(len(piece) < PIECE // 4 * 3 for piece in pieces[:-1]):  # it ends before the text does
        raise ImageError("is not valid base64")
    data = b"".join(pieces)
    if not data:
        raise ImageError("is empty")
    return data


def check_size(width: int, height: int) -> None:
    """Raises ImageError for an image that is too large or too narrow."""
    shape = f"has {width:,} x {height:,} pixels"
    if not width or not height:
        raise ImageError(shape)
    if max(width, height) > MAX_SIDE:
        raise ImageError(f"{shape}; the limit of a side is {MAX_SIDE:,}")
    if width * height > MAX_PIXELS:
        raise ImageError(f"{shape}; the limit is {MAX_PIXELS:,} pixels")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError(f"{shape}; the longer side may be at most {MAX_RATIO} times the shorter one")


class ImageReader:
    """Decodes images, on any thread, and keeps the latest: a chat sends all of its images again in each turn."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        """max_bytes: of the pixels that are kept."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Pixels] = OrderedDict()  # by digest, the latest used last
        self._num_bytes = 0
        self._lock = threading.Lock()

    def kept(self, image: CheckedImage) -> Pixels | None:
        """Returns the pixels of an image that is kept."""
        with self._lock:
            if (found := self._kept.get(image.digest)) is not None:
                self._kept.move_to_end(image.digest)
            return found

    def pixels(self, image: CheckedImage) -> Pixels:
        """Raises as `decoder.decode`."""
        if (found := self.kept(image)) is not None:
            return found
        pixels = decode(image)
        with self._lock:
            if image.digest not in self._kept:
                self._kept[image.digest] = pixels
                self._num_bytes += pixels.nbytes
            while self._num_bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= dropped.nbytes
        return pixels


def decode(image: CheckedImage) -> Pixels:
    """Returns the first frame, upright, on white, at the size that the tower takes. Raises as `decoder.decode`."""
    return decoder.decode(image.header, (image.width, image.height), image.resampling)
