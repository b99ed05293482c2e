"""Images are decoded in child processes: as Pillow decodes them, within known memory, and without harm to this process
if a child dies."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from mlxpaged.vision.decoding import decoder
from mlxpaged.vision.decoding.decoder import DecoderError
from mlxpaged.vision.headers import ImageError, read_header
from mlxpaged.vision.image import Pixels
from tests.vision.files import black_png, encoded, halves, turned

SIDES = (2100, 1100)
"""Of images that are converted in several bands."""
LARGE = (3000, 2000)
"""Of images whose memory is measured."""
TURNED = {"exif": b"Exif\0\0" + turned(6)}


def decoded(data: bytes, size: tuple[int, int] | None = None) -> Pixels:
    header = read_header(data)
    return decoder.decode(header, size or header.size, "BICUBIC")


def noise(mode: str, width: int, height: int) -> Image.Image:
    """An image whose rows, colours and alpha differ."""
    values = np.random.default_rng(0).integers(0, 256, (height // 10, width // 10, 4), dtype=np.uint8)
    image = Image.fromarray(values).resize((width, height))
    return image if mode == "RGBA" else image.convert(mode)


def shown_by_pillow(data: bytes) -> Image.Image:
    """The whole image on white, at once."""
    with Image.open(io.BytesIO(data)) as opened:
        if opened.mode == "I;16":
            return Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8)).convert("RGB")
        whole = opened.convert("RGBA" if opened.has_transparency_data else "RGB")
    if whole.mode == "RGB":
        return whole
    paper = Image.new("RGBA", whole.size, "white")
    paper.alpha_composite(whole)
    return paper.convert("RGB")


def grey_of_16_bits(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.arange(width * height, dtype=np.uint32).reshape(height, width).astype(np.uint16))


FILES: dict[str, Callable[[int, int], bytes]] = {
    "PNG RGB": lambda *size: encoded(noise("RGB", *size)),
    "PNG RGBA": lambda *size: encoded(noise("RGBA", *size)),
    "PNG LA": lambda *size: encoded(noise("LA", *size)),
    "PNG L": lambda *size: encoded(noise("L", *size)),
    "PNG 1": lambda *size: encoded(noise("1", *size)),
    "PNG P": lambda *size: encoded(noise("P", *size)),
    "PNG P, a transparent colour": lambda *size: encoded(noise("P", *size), transparency=17),
    "PNG P, colours with alpha": lambda *size: encoded(noise("P", *size), transparency=bytes(range(256))),
    "PNG I;16": lambda *size: encoded(grey_of_16_bits(*size)),
    "JPEG RGB": lambda *size: encoded(noise("RGB", *size), "JPEG"),
    "JPEG L": lambda *size: encoded(noise("L", *size), "JPEG", progressive=True),
    "JPEG CMYK": lambda *size: encoded(noise("CMYK", *size), "JPEG"),
    "GIF": lambda *size: encoded(noise("P", *size), "GIF"),
    "GIF, a transparent colour": lambda *size: encoded(noise("P", *size), "GIF", transparency=17),
    "WEBP RGB": lambda *size: encoded(noise("RGB", *size), "WEBP", method=0),
    "WEBP RGBA": lambda *size: encoded(noise("RGBA", *size), "WEBP", method=0),
}


@pytest.mark.parametrize("name", FILES)
def test_an_image_in_bands_is_the_one_that_pillow_shows_at_once(name: str) -> None:
    data = FILES[name](*SIDES)
    shown = shown_by_pillow(data)
    np.testing.assert_array_equal(decoded(data), np.asarray(shown))
    resized = shown.resize((301, 203), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(decoded(data, (301, 203)), np.asarray(resized))


# Memory


def peak_of(data: bytes) -> int:
    """Bytes of a new child at most, when it has decoded an image."""
    header = read_header(data)
    request = decoder.request_of(header, (32, 32), "BICUBIC")
    command = [sys.executable, str(decoder.PROGRAM), "60"]
    environment = {**os.environ, **decoder.MALLOC}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        child.stdin.write(request)
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == {"num_bytes": 32 * 32 * 3}
        assert len(child.stdout.read(32 * 32 * 3)) == 32 * 32 * 3
        status = Path(f"/proc/{child.pid}/status").read_text()
        child.stdin.close()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def flat(mode: str) -> Image.Image:
    return Image.new("RGBA", LARGE, (9, 99, 200, 128)).convert(mode)


HUNGRY: dict[str, Callable[[], bytes]] = {
    "PNG RGBA": lambda: encoded(flat("RGBA"), **TURNED),
    "PNG of 16 bits, a key": lambda: black_png(*LARGE, 16, 3, (0, 0, 1)),
    "PNG of 16 bits, grey, a key": lambda: encoded(grey_of_16_bits(*LARGE), transparency=7, **TURNED),
    "JPEG, progressive": lambda: encoded(flat("CMYK"), "JPEG", progressive=True, subsampling=0, **TURNED),
    "GIF": lambda: encoded(flat("RGB").convert("P"), "GIF", transparency=1),
    "WEBP, lossless": lambda: encoded(flat("RGBA"), "WEBP", lossless=True, method=0, **TURNED),
    "WEBP": lambda: encoded(flat("RGBA"), "WEBP", method=0, **TURNED),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say how large a process has been")
@pytest.mark.parametrize("name", HUNGRY)
def test_an_image_takes_the_memory_that_is_counted(name: str) -> None:
    data = HUNGRY[name]()
    header = read_header(data)
    assert peak_of(black_png(32, 32)) < decoder.CHILD_BYTES
    assert peak_of(data) < decoder.memory_of(header)


@pytest.mark.skipif(sys.platform != "linux", reason="no other process can be limited")
def test_without_memory_the_image_is_not_at_fault() -> None:
    decoder.end_children()
    decoded(black_png(32, 32))
    (child,) = children()
    most = child.memory_info().vms + 2**22
    resource.prlimit(child.pid, resource.RLIMIT_AS, (most, most))
    with pytest.raises(MemoryError, match="not enough memory to decode the image"):
        decoded(black_png(8000, 4000))
    decoder.end_children()


def children() -> list[psutil.Process]:
    """The processes that decode, of this one."""
    return [each for each in psutil.Process().children() if str(decoder.PROGRAM) in each.cmdline()]


def test_one_child_decodes_again_and_again_and_ends_with_the_others() -> None:
    decoder.end_children()
    for _ in range(9):
        np.testing.assert_array_equal(decoded(encoded(halves())), np.asarray(halves()))
    assert len(children()) == 1
    decoder.end_children()
    assert children() == []


def test_a_child_that_has_become_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its memory is the system's again."""
    decoder.end_children()
    monkeypatch.setattr(decoder, "IDLE_MEMORY", 2**20)
    decoded(encoded(halves()))
    assert children() == []


# Children that fail


def test_a_child_that_was_killed_is_replaced() -> None:
    decoded(encoded(halves()))
    for child in children():
        child.kill()
        child.wait()
    assert decoded(encoded(halves())).shape == (32, 64, 3)


DIES = "import os, sys; print(flush=True); sys.stdin.buffer.readline(); os.kill(os.getpid(), 11)"
GROWS = "import sys; print(flush=True); sys.stdin.buffer.readline(); kept = []\nwhile True: kept.append('x' * 2**20)"
LOOPS = "import sys; print(flush=True); sys.stdin.buffer.readline()\nwhile True: pass"
PROGRAMS = {
    DIES: "the process that decodes it ended with status -11",
    GROWS: "it takes more than 192 MB of memory",
    LOOPS: r"it takes more than 0\.05 seconds",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_image_that_ends_its_child_is_refused_and_the_next_one_is_shown(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder.end_children()
    (tmp_path / "program.py").write_text(program)
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "PROGRAM", tmp_path / "program.py")
        patch.setattr(decoder, "SECONDS", 0.05 if program == LOOPS else 8.0)
        with pytest.raises(ImageError, match=f"^cannot be decoded: {PROGRAMS[program]}$"):
            decoded(encoded(halves()))
    assert decoded(encoded(halves())).shape == (32, 64, 3)


def test_without_a_process_the_image_is_not_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder.end_children()
    monkeypatch.setattr(decoder, "PROGRAM", Path("/nowhere"))
    with pytest.raises(DecoderError, match="cannot be started: the process that decodes it did not start"):
        decoded(encoded(halves()))
    monkeypatch.setattr("sys.executable", "/nowhere")
    with pytest.raises(DecoderError, match="cannot be started"):
        decoded(encoded(halves()))


def test_a_child_whose_first_line_no_one_reads_ends_without_a_word() -> None:
    """As when the server ends while it starts."""
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [sys.executable, str(decoder.PROGRAM), "1"], stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE
    ) as child:
        os.close(writer)
        assert child.stderr is not None
        assert child.stderr.read() == b""
