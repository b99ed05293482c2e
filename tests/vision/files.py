"""Image files for tests: ordinary ones, hostile ones, and mutations of both."""

from __future__ import annotations

import base64
import importlib.util
import io
import random
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from mlxpaged.vision.image import ImageFormat, Resampling

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class Grid:
    """A made-up format: an image is cut into patches of 8 x 8 pixels, and each row of them ends with a token. As in
    Pixtral's."""

    settings = b"grid"
    joins: ClassVar[Mapping[tuple[int, int], int]] = {}

    def __init__(self, template_token: int = 1, placeholder: int = 2, end_of_row: int = 3, longest: int = 48) -> None:
        """longest: a longer side is made this long."""
        self.resampling: Resampling = "BICUBIC"
        self.template_token, self.placeholder, self.end_of_row = template_token, placeholder, end_of_row
        self._longest = longest

    def size(self, width: int, height: int) -> tuple[int, int]:
        scale = min(1.0, self._longest / max(width, height))
        return max(1, round(scale * width / 8)) * 8, max(1, round(scale * height / 8)) * 8

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // 8, width // 8

    def tokens(self, width: int, height: int) -> list[int]:
        return [*[self.placeholder] * (width // 8), self.end_of_row] * (height // 8)


FORM: ImageFormat = Grid()


def halves(width: int = 64, height: int = 32, left: str = "red", right: str = "blue", mode: str = "RGB") -> Image.Image:
    """An image of two colours, side by side."""
    image = Image.new(mode, (width, height), right)
    image.paste(left, (0, 0, width // 2, height))
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{text_of(data)}"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def compressed_zeros(size: int) -> bytes:
    """What zlib makes of `size` zero bytes, with the same block for each MiB: to compress each takes 5 ms."""
    block, end = (zlib.compressobj(9, wbits=-zlib.MAX_WBITS) for _ in range(2))
    mebibyte = block.compress(bytes(2**20)) + block.flush(zlib.Z_FULL_FLUSH)
    count, rest = divmod(size, 2**20)
    checksum = size % 65521 << 16 | 1  # Adler-32 of zeros
    return b"\x78\xda" + count * mebibyte + end.compress(bytes(rest)) + end.flush() + struct.pack(">I", checksum)


def black_png(width: int, height: int, depth: int = 1, channels: int = 1, key: Sequence[int] = ()) -> bytes:
    """A PNG of grey or RGB, which is tiny however large the image is. depth: bits of a sample. key: as in `png_of`."""
    rows = compressed_zeros(((width * channels * depth + 7) // 8 + 1) * height)
    return packed_png(width, height, depth, channels, key, b"", rows)


def packed_png(
    width: int, height: int, depth: int, channels: int, key: Sequence[int], more: bytes, rows: bytes
) -> bytes:
    """rows: compressed, each with the number of its filter."""
    header = struct.pack(">IIBBBBB", width, height, depth, 2 if channels == 3 else 0, 0, 0, 0)
    keyed = chunk(b"tRNS", struct.pack(f">{len(key)}H", *key)) if key else b""
    parts = (chunk(b"IHDR", header), keyed, more, chunk(b"IDAT", rows), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_of(samples: npt.NDArray[np.uint16], depth: int, key: Sequence[int] = (), more: bytes = b"") -> bytes:
    """A PNG of samples [H, W] of grey or [H, W, 3] of RGB, each of `depth` bits. key: the samples that are transparent.
    more: chunks before the pixels."""
    height, width = samples.shape[:2]
    channels = samples.size // (width * height)
    bits = np.unpackbits(samples.astype(">u2").reshape(height, -1, 1).view(np.uint8), axis=-1)[..., 16 - depth :]
    rows = np.packbits(bits.reshape(height, -1), axis=-1)
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return packed_png(width, height, depth, channels, key, more, packed)


def png_with(extra: bytes) -> bytes:
    """A PNG with a chunk after its header."""
    data = encoded(halves())
    return data[:33] + extra + data[33:]


def text_bomb() -> bytes:
    """A PNG with a text of 128 MiB, compressed."""
    return png_with(chunk(b"zTXt", b"k\0\0" + compressed_zeros(128 * 2**20)))


def exif_bomb() -> bytes:
    """A JPEG whose EXIF has 5,000 tags of the same 60,000 bytes: Pillow would keep 300 MB."""
    entry = b"".join(struct.pack("<HHII", 0x8000 + i, 7, 60_000, 8) for i in range(5000))
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 5000) + entry
    return with_segment(encoded(halves(), "JPEG"), 0xE1, exif)


def with_segment(jpeg: bytes, marker: int, data: bytes) -> bytes:
    """A JPEG with a segment after its first two bytes."""
    return jpeg[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data + jpeg[2:]


def without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, Pillow is not found."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "PIL" else real(name, *rest))


def turned(orientation: int, order: str = "<") -> bytes:
    """EXIF that says how an image is turned."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return mark + struct.pack(f"{order}IHHHIHH", 8, 1, 0x0112, 3, 1, orientation, 0)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "30,000 x 30,000 pixels": (black_png(30_000, 30_000), "30,000 x 30,000 pixels; the limit of a side is 16,384"),
    "half a JPEG": (encoded(halves(600, 400), "JPEG")[:900], "is a broken JPEG"),
    "a JPEG's beginning": (encoded(halves(), "JPEG")[:40], "is a JPEG that ends before its pixels"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "is no PNG, JPEG, WEBP or GIF"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no PNG, JPEG, WEBP or GIF"),
    "TIFF": (encoded(halves(), "TIFF"), "is no PNG, JPEG, WEBP or GIF"),
    "BMP": (encoded(halves(), "BMP"), "is no PNG, JPEG, WEBP or GIF"),
    "PDF": (b"%PDF-1.7\n", "is no PNG, JPEG, WEBP or GIF"),
    "41 MP": (black_png(8200, 5000), "8,200 x 5,000 pixels; the limit is 40,000,000 pixels"),
    "too narrow": (black_png(10_000, 40), "at most 200 times the shorter one"),
    "no pixels": (black_png(0, 10), "has 0 x 10 pixels"),
    "empty": (b"", "is empty"),
}
"""Files, and what the error says of each."""


def mutated(number: int, seed: int = 1) -> bytes:
    """A file with a few mutations."""
    source = random.Random(f"{seed} {number}")
    kind = source.choice(FORMATS)
    mode = source.choice(("RGB", "L", "P", "RGBA", "1") if kind != "JPEG" else ("RGB", "L", "CMYK"))
    image = halves(source.randrange(1, 90), source.randrange(1, 90)).convert(mode)
    options: dict[str, Any] = {"exif": b"Exif\0\0" + turned(source.randrange(10))} if kind != "GIF" else {}
    data = bytearray(encoded(image, kind, **options))
    for _ in range(source.randrange(1, 4)):
        place, most = source.randrange(len(data)), source.choice((1, 4, 64))
        match source.randrange(6):
            case 0:
                data[place] = source.randrange(256)
            case 1:
                data[place] ^= 1 << source.randrange(8)
            case 2:
                del data[place : place + most]
            case 3:
                data[place:place] = data[place : place + most]
            case 4:
                data[place:place] = source.randbytes(most)
            case 5:
                del data[max(1, place) :]
        data = data or bytearray(b"\0")
    return bytes(data)
