"""Asks a child process for the pixels of an image. What it may take of memory is known before, by the format of the
file and its number of pixels; a child that takes more is ended, and so is one that has become large.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np

from mlxpaged.library_errors import public_reason
from mlxpaged.process_memory import is_out_of_memory
from mlxpaged.vision.headers import Header, ImageError
from mlxpaged.vision.image import Pixels, Resampling
from mlxpaged.watched_program import LimitError, Limits, WatchedProgram

PROGRAM = Path(__file__).with_name("program.py")
SECONDS = 8.0
"""Processor time of one image."""
CHILD_BYTES = 2**26
"""Bytes of a child beside the image. It begins with 20 MB, and converts a band of rows in 20 MB."""
BYTES_PER_FILE_BYTE = 4
"""The file, what Pillow joins it of, and what a decoder copies."""
BYTES_PER_PIXEL = {"PNG": 13, "JPEG": 13, "GIF": 7, "WEBP": 18}
"""Bytes that a child takes at most for a pixel of the file, by Pillow's name of the format. Measured: 12 for a PNG of
16 bits with a key, which is decoded twice, and 8 for others; 12 for a progressive JPEG of CMYK, which has coefficients
of two bytes, and 8 for others of RGB; 6 for a GIF; 16 for a WEBP, of which libwebp holds the canvas twice."""
MAX_IDLE = 2
"""Children that wait for work. Two images are decoded at a time."""
IDLE_MEMORY = 2**27
"""Bytes of a child that is kept."""
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(96 * 2**20), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
"""glibc's settings (mallopt(3)): a child keeps what it frees up to this, as much as a photo of 12 million pixels needs.
Otherwise page faults are a fourth of the time of an ordinary image."""
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""What turns an image upright, by its orientation in EXIF."""

_program = WatchedProgram("decodes it", MAX_IDLE, MALLOC)
end_children = _program.end


class PillowMissingError(Exception):
    """There is no Pillow. The message says how to install it."""

    def __init__(self) -> None:
        super().__init__("images need Pillow: pip install 'mlxpaged[vision]'")


class DecoderError(Exception):
    """No process can be started that decodes images. It may be tried again."""


def memory_of(header: Header) -> int:
    """Returns the bytes that a child may take for an image."""
    pixels = BYTES_PER_PIXEL[header.kind] * header.width * header.height
    return CHILD_BYTES + BYTES_PER_FILE_BYTE * len(header.data) + pixels


def decode(header: Header, size: tuple[int, int], resampling: Resampling) -> Pixels:
    """Returns the first frame, upright, on white, at a width and height. Any thread may call it. Raises ImageError,
    DecoderError, PillowMissingError, and MemoryError or OSError without memory."""
    require_pillow()
    request = request_of(header, size, resampling)
    limits = Limits(SECONDS, IDLE_MEMORY + memory_of(header))  # a child may keep what others have freed
    try:
        line, pixels = _program.ask(PROGRAM, request, limits, idle_memory=IDLE_MEMORY, following=num_bytes)
    except LimitError as error:
        raise ImageError(f"cannot be decoded: {error}") from None
    except OSError as error:
        if is_out_of_memory(error):
            raise
        raise DecoderError(f"the process that decodes images cannot be started: {public_reason(error)}") from error
    reply = json.loads(line)
    if "is_out_of_memory" in reply:
        raise MemoryError("there is not enough memory to decode the image")
    if "error" in reply:
        raise ImageError(public_reason(reply["error"]))
    found = np.frombuffer(pixels, np.uint8).reshape(size[1], size[0], 3)
    found.flags.writeable = False  # it is kept for other requests
    return found


def request_of(header: Header, size: tuple[int, int], resampling: Resampling) -> bytes:
    fields = {
        "num_bytes": len(header.data),
        "kind": header.kind,
        "file_size": (header.width, header.height),
        "key": header.key,
        "depth": header.depth,
        "turn": TURNS.get(header.orientation),
        "size": size,
        "resampling": resampling,
    }
    return json.dumps(fields).encode() + b"\n" + header.data


def num_bytes(line: bytes) -> int:
    return int(json.loads(line).get("num_bytes", 0))


def require_pillow() -> None:
    """Raises PillowMissingError. This process does not load it."""
    if importlib.util.find_spec("PIL") is None:
        raise PillowMissingError
