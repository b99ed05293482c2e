"""Images that a user shows a model."""

from __future__ import annotations

import base64
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def data_url(path: Path) -> str:
    """Returns the image in a file. Raises ValueError, which names the file, if a model cannot be shown it."""
    from mlxpaged.vision.headers import ImageError, read_header
    from mlxpaged.vision.reading import MAX_BYTES

    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # to open a FIFO would wait
            raise ValueError(f"{path} is not a file")
        if about.st_size > MAX_BYTES:
            raise ValueError(f"{path} has more than {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
        kind = read_header(data).kind.lower()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ImageError as error:
        raise ValueError(f"{path} {error}") from None
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def content(text: str, urls: Sequence[str]) -> Any:
    """Returns the content of a message: a text, or images before it."""
    if not urls:
        return text
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]
