"""Decodes images: the program of a child process, which imports Pillow and nothing of this package.

Its argument is the processor time of a request, in whole seconds, after which the system ends it: the process that
watches it may have ended. It first writes an empty line. Then each request is a line in JSON, of the fields of
`pixels_of`, with `num_bytes` of the file that follows. The reply is a line in JSON with `num_bytes` of the pixels that
follow, in rows of RGB; or with the `error` of a file that is refused, or `is_out_of_memory`.

An image is held once in the file's own mode and once in RGB. Between them, it is converted in bands of rows.
"""

from __future__ import annotations

import io
import json
import math
import os
import resource
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageChops, UnidentifiedImageError, WebPImagePlugin

__all__ = ["WebPImagePlugin"]  # the first file of a format that is not loaded loads all formats

NICENESS = 5
"""The steps of running requests go first."""
BAND_PIXELS = 2**20
"""Pixels that are converted at once."""
MAX_MESSAGE = 100
"""Characters of a decoder's error message."""


class RefusedError(Exception):
    """The message is the end of a sentence about the image."""


def pixels_of(
    file: bytes,
    kind: str,
    file_size: Sequence[int],
    key: Sequence[int] | None,
    depth: int,
    turn: str | None,
    size: Sequence[int],
    resampling: str,
) -> bytes:
    """Returns the first frame, upright, on white. kind, resampling: names of Pillow's. file_size: width and height as
    the header has them, and `size` those of the pixels. key: the samples of a PNG that are transparent, of `depth`
    bits. turn: what makes the image upright, by its name in Pillow. Raises RefusedError and MemoryError."""
    try:
        with Image.open(io.BytesIO(file), formats=[kind]) as opened:
            if opened.size != tuple(file_size):
                raise RefusedError(f"is a {kind} with two sizes")
            low = low_bytes(file, kind) if key and depth == 16 and opened.mode == "RGB" else None
            opened.load()
            shown = on_white(opened, low, samples_of(key or (), depth))
        del opened, low
        if turn is not None:
            shown = shown.transpose(Image.Transpose[turn])
        if shown.size != tuple(size):
            shown = shown.resize((size[0], size[1]), Image.Resampling[resampling])
        return shown.tobytes()
    except (RefusedError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise RefusedError(f"is a broken {kind}") from None
    except Exception as error:  # a decoder raises any type
        raise RefusedError(f"is a broken {kind}: {str(error)[:MAX_MESSAGE]!r}") from None


def on_white(image: Image.Image, low: Image.Image | None, samples: Sequence[int]) -> Image.Image:
    """Returns an image in RGB. White shows through where it is transparent."""
    if image.mode == "RGB" and not samples and not image.has_transparency_data:
        return image
    width, height = image.size
    rows = max(1, BAND_PIXELS // width)
    if rows >= height:
        return band_on_white(image, low, samples)
    shown = Image.new("RGB", image.size)
    for top in range(0, height, rows):
        box = (0, top, width, min(height, top + rows))
        shown.paste(band_on_white(image.crop(box), low and low.crop(box), samples), box)
    return shown


def band_on_white(band: Image.Image, low: Image.Image | None, samples: Sequence[int]) -> Image.Image:
    """The same for an image of few pixels."""
    if band.mode.startswith("I"):  # grey of 16 bits, of which Pillow would show all above 255 as white
        data = band.tobytes("raw", "I;16")
        band, low = (Image.frombytes("L", band.size, data[i::2]) for i in (1, 0))
    if samples:
        channels = [*band.convert("RGB" if band.mode == "RGB" else "L").split(), *(low.split() if low else ())]
        shown = band.convert("RGB")
        shown.paste((255, 255, 255), None, where(channels, samples))
        return shown
    if not band.has_transparency_data:
        return band.convert("RGB")
    whole = band.convert("RGBA")
    paper = Image.new("RGBA", whole.size, "white")
    paper.alpha_composite(whole)
    return paper.convert("RGB")


def samples_of(key: Sequence[int], depth: int) -> list[int]:
    """Returns a key as the channels of `band_on_white` have it: those of less than 8 bits are spread over 0 to 255, and
    those of 16 bits are channels of high bytes before channels of low bytes."""
    if depth == 16:
        return [*(sample >> 8 for sample in key), *(sample & 0xFF for sample in key)]
    return [sample * 255 // (2**depth - 1) for sample in key]


def where(channels: Sequence[Image.Image], samples: Sequence[int]) -> Image.Image:
    """Returns a mask of the pixels that have all of the samples."""
    masks = [
        channel.point([255 * (value == sample) for value in range(256)])
        for channel, sample in zip(channels, samples, strict=True)
    ]
    found = masks[0]
    for mask in masks[1:]:
        found = ImageChops.darker(found, mask)
    return found


def low_bytes(file: bytes, kind: str) -> Image.Image:
    """Returns the low bytes of a PNG with RGB of 16 bits, of which Pillow keeps the high ones: it is unpacked as if the
    order of the bytes were the other one."""
    with Image.open(io.BytesIO(file), formats=[kind]) as opened:
        opened.tile = [tile._replace(args="RGB;16L") for tile in opened.tile]
        opened.load()
    low: Image.Image = opened
    return low


def answer(file: bytes, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Returns the reply, and the pixels."""
    try:
        pixels = pixels_of(file, **request)
    except MemoryError:
        return {"is_out_of_memory": True}, b""
    except RefusedError as error:
        return {"error": str(error)}, b""
    return {"num_bytes": len(pixels)}, pixels


def limit_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + seconds, hard))


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # it ends without a word after the process that reads it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its death is a refusal, and needs no file of its memory
    os.nice(NICENESS)
    warnings.simplefilter("ignore")  # the server's log is not for what Pillow says of a client's file
    source, output = sys.stdin.buffer, sys.stdout.buffer
    output.write(b"\n")
    output.flush()
    for line in source:
        limit_time(int(sys.argv[1]))
        request = json.loads(line)
        reply, pixels = answer(source.read(request.pop("num_bytes")), request)
        output.write(json.dumps(reply).encode() + b"\n")
        output.write(pixels)
        output.flush()


if __name__ == "__main__":
    main()
