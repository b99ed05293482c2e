"""Reads what an image's file says before its pixels: its format, its size and how it is turned. Nothing is decoded.

A file of 20 MiB comes from anyone. So each loop here has a bound, and a decoder gets no more of a file than it needs:
Pillow would read all tags of a JPEG's EXIF, which may name the same megabytes 65,535 times, and join the comments of a
GIF piece by piece.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_PIECES = 10_000
"""Segments or blocks before the pixels, or chunks of a PNG. A photo with a large colour profile has some hundred, and a
PNG of 20 MiB 2,560 if it has chunks of 8 KiB, as libpng writes them."""
MAX_SCANS = 100
"""Scans of a JPEG. Encoders make about ten. One of 40 million pixels takes 3 ms, however few bytes it has."""
ORIENTATION = 0x0112
"""The EXIF tag that says how an image is turned (Exif 3.0, 4.6.5)."""
FILL = re.compile(rb"\xff+")
SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""Among the pixels of a JPEG: a marker that a segment follows, or the end. The others have no length."""
SIZES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""Markers of a JPEG's segments that have its size, SOF0 to SOF15 (ITU-T T.81, table B.1)."""
TABLES = {0xC4, 0xCC, 0xDB, 0xDD}
"""Markers of the segments that a JPEG's pixels need: DHT, DAC, DQT, DRI."""
CHUNKS = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
"""Chunks of a PNG that its pixels need (PNG 3.0, 11.2 and 11.3.1)."""
KEY_SAMPLES = {0: 1, 2: 3}
"""Samples of the key of a PNG, by its type of colour: grey and RGB. A palette has its own transparency."""
COLOURS = {0xE0, 0xEE}
"""Markers of the segments that say how a JPEG's colours are stored: JFIF's and Adobe's."""


class ImageError(ValueError):
    """An image is refused. The message is the end of a sentence about it, without text of the client's."""


@dataclass(frozen=True)
class Header:
    """kind: Pillow's name of the format. width, height: as the file has them. orientation: by EXIF, from 1 to 8.
    data: what a decoder needs of the file. key: the sample of grey, or the three of RGB, that is transparent in a PNG.
    depth: bits of a sample of a PNG."""

    kind: str
    width: int
    height: int
    orientation: int
    data: bytes
    key: tuple[int, ...] | None = None
    depth: int = 8

    @property
    def size(self) -> tuple[int, int]:
        """Returns the width and height of the image when it is turned upright."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def read_header(data: bytes) -> Header:
    """Raises ImageError for a file of another format, and for one that ends before its pixels."""
    for magic, read in READERS.items():
        if magic.match(data):
            try:
                return read(data)
            except (struct.error, IndexError):
                raise ImageError(f"is a {read.__name__.upper()} that ends before its pixels") from None
    raise ImageError("is no PNG, JPEG, WEBP or GIF")


def bounded(kind: str) -> Iterator[None]:
    """Yields once for each piece of a file. Raises ImageError if there are too many."""
    for _ in range(MAX_PIECES):
        yield
    raise ImageError(f"is a {kind} with more than {MAX_PIECES:,} pieces")


def png(data: bytes) -> Header:
    """The chunks are those of PNG 3.0, 11. Only those stay that the pixels need: Pillow refuses a file whose texts or
    colour profile have more than a megabyte when they are unpacked. A key does not stay: Pillow compares it with pixels
    of 8 bits, whatever the depth."""
    if data[12:16] != b"IHDR":
        raise ImageError("is a PNG without a header")
    width, height, depth, colour = struct.unpack_from(">IIBB", data, 16)
    orientation, place, kept, key, has_pixels = 1, 8, [data[:8]], None, False
    for _ in bounded("PNG"):
        length, kind = struct.unpack_from(">I4s", data, place)
        if kind == b"eXIf":
            orientation = orientation_of(data[place + 8 : place + 8 + length])
        has_pixels = has_pixels or kind == b"IDAT"
        if kind == b"tRNS" and colour in KEY_SAMPLES:
            if not has_pixels:  # its place is before them
                key = key_of(data[place + 8 : place + 8 + length], KEY_SAMPLES[colour], depth)
        elif kind in CHUNKS:
            kept.append(data[place : place + 12 + length])
        place += 12 + length
        if kind == b"IEND" or (kind == b"IDAT" and place + 8 > len(data)):  # the decoder says what is missing
            break
    return Header("PNG", width, height, orientation, b"".join(kept), key, depth)


def key_of(chunk: bytes, num_samples: int, depth: int) -> tuple[int, ...] | None:
    """Returns the samples that are transparent (PNG 3.0, 11.3.1.1), or None if the chunk has another length. Of each,
    the lowest `depth` bits count."""
    if len(chunk) != 2 * num_samples:
        return None
    return tuple(sample & ((1 << depth) - 1) for sample in struct.unpack(f">{num_samples}H", chunk))


def jpeg(data: bytes) -> Header:
    """The segments are those of ITU-T T.81, B.1. Only those stay that the pixels and their colours need."""
    size, orientation, place, pixels = None, 1, 2, b""
    kept = [data[:2]]
    for _ in bounded("JPEG"):
        fill = FILL.match(data, place)
        if data[place] != 0xFF or fill is None:
            raise ImageError("is a JPEG with a segment that has no marker")
        marker, place = data[fill.end()], fill.end() + 1
        (length,) = struct.unpack_from(">H", data, place)
        segment = data[place : place + length]
        if marker in SIZES and size is None:
            size = struct.unpack_from(">HH", segment, 3)
        elif marker == 0xE1 and segment[2:8] == b"Exif\0\0":
            orientation = orientation_of(segment[8:])
        if marker == 0xDA:  # the pixels follow; among them, 0xFF is followed by 0
            # Phones write a video or another image after the end. A video has these two bytes every 64 KiB.
            pixels = data[place : end_of_scans(data, place)]
            if pixels.count(b"\xff\xda") >= MAX_SCANS:
                raise ImageError(f"is a JPEG with more than {MAX_SCANS} scans")
            break
        if marker in SIZES | TABLES | COLOURS:
            kept.append(bytes([0xFF, marker]) + segment)
        place += length
    if size is None:
        raise ImageError("is a JPEG without a size")
    return Header("JPEG", size[1], size[0], orientation, b"".join([*kept, b"\xff\xda", pixels]))


def end_of_scans(data: bytes, place: int) -> int:
    """The end of the scans of a JPEG, of which the first one begins at `place`. Segments between them can have any
    bytes, and tables of a progressive one are there. Without an end, it is that of the data."""
    for _ in bounded("JPEG"):
        found = SEGMENT.search(data, place)
        if found is None:
            break
        place = found.end()
        if data[place - 1] == 0xD9:
            return place
        place += int.from_bytes(data[place : place + 2], "big")
    return len(data)


def gif(data: bytes) -> Header:
    """The blocks are those of GIF89a, 17 to 26. Of those before the first image, only the one with its transparent
    colour stays. The image may be larger than the screen."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    kept, block = [data[:place]], b""
    pieces = bounded("GIF")
    while data[place] == 0x21:  # an extension
        start, label = place, data[place + 1]
        place += 2
        while data[place]:
            next(pieces)
            place += 1 + data[place]
        place += 1
        if label == 0xF9:
            block = data[start:place]
        next(pieces)
    if data[place] != 0x2C:
        raise ImageError("is a GIF without an image")
    left, top, inner_width, inner_height = struct.unpack_from("<HHHH", data, place + 1)
    width, height = max(width, left + inner_width), max(height, top + inner_height)
    return Header("GIF", width, height, 1, b"".join([*kept, block, data[place:]]))


def webp(data: bytes) -> Header:
    """The chunks are those of RFC 9649, 2.5 to 2.7."""
    kind, place, orientation = data[12:16], 12, 1
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(data[i : i + 3], "little") for i in (24, 27))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise ImageError("is a WEBP without an image")
    for _ in bounded("WEBP"):
        if place + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, place)
        if kind == b"EXIF":
            orientation = orientation_of(data[place + 8 : place + 8 + length])
        place += 8 + length + length % 2
    return Header("WEBP", width, height, orientation, data)


def orientation_of(exif: bytes) -> int:
    """Returns how EXIF says that an image is turned; 1, upright, if it does not say so in the first directory."""
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        for entry in range(start + 2, start + 2 + 12 * count, 12):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, entry)
            if tag == ORIENTATION:
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


READERS: dict[re.Pattern[bytes], Callable[[bytes], Header]] = {
    re.compile(rb"\x89PNG\r\n\x1a\n"): png,
    re.compile(rb"\xff\xd8\xff"): jpeg,
    re.compile(rb"GIF8[79]a"): gif,
    re.compile(rb"RIFF.{4}WEBP", re.DOTALL): webp,
}
"""What reads each format, by the beginning of its files."""
