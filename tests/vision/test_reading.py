"""What becomes of a client's image: its pixels, its digest and its limits. Files of any content are images or are
refused, and nothing else happens."""

from __future__ import annotations

import base64
import os
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from mlxpaged.vision import reading
from mlxpaged.vision.decoding import decoder
from mlxpaged.vision.decoding.decoder import PillowMissingError
from mlxpaged.vision.headers import MAX_PIECES, MAX_SCANS, ImageError, read_header
from mlxpaged.vision.image import Pixels, Resampling
from mlxpaged.vision.reading import (
    MAX_BYTES,
    CheckedImage,
    ClientImage,
    Detail,
    ImageReader,
    check,
    decode,
)
from tests.vision.files import (
    FORM,
    FORMATS,
    HOSTILE,
    Grid,
    black_png,
    chunk,
    compressed_zeros,
    encoded,
    exif_bomb,
    halves,
    mutated,
    png_of,
    png_with,
    text_bomb,
    text_of,
    turned,
    url_of,
    with_segment,
    without_pillow,
)

WHITE, RED, BLUE = (255, 255, 255), (255, 0, 0), (0, 0, 255)
CASES = int(os.environ.get("MLXPAGED_FUZZ_CASES", "20000"))
SEED = int(os.environ.get("MLXPAGED_FUZZ_SEED", "1"))
FIRST = int(os.environ.get("MLXPAGED_FUZZ_FIRST", "0"))


def checked(data: bytes, detail: Detail = "auto") -> CheckedImage:
    return check(ClientImage(text_of(data), False, detail), FORM)


def pixels_of(data: bytes) -> Pixels:
    return decode(checked(data))


def corners(pixels: Pixels) -> list[tuple[int, ...]]:
    """Upper left, upper right, lower left, lower right; of a JPEG about."""
    return [tuple(int(round(int(v) / 51) * 51) for v in pixels[y, x]) for y, x in ((0, 0), (0, -1), (-1, 0), (-1, -1))]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_of_each_format_becomes_pixels_of_the_size_that_the_tower_takes(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    image = checked(encoded(halves(100, 50), kind, **options))
    pixels = decode(image)
    assert (image.width, image.height) == FORM.size(100, 50) == (48, 24)
    assert (pixels.shape, pixels.dtype) == ((24, 48, 3), np.uint8)
    assert corners(pixels) == [RED, BLUE, RED, BLUE]


@pytest.mark.parametrize("resampling", ["BICUBIC", "BILINEAR"])
def test_pixels_are_resized_as_pillow_does(resampling: Resampling) -> None:
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 130, 3), dtype=np.uint8))
    form = Grid()
    form.resampling = resampling
    image = check(ClientImage(text_of(encoded(noise)), False), form)
    expected = noise.resize((image.width, image.height), Image.Resampling[resampling])
    np.testing.assert_array_equal(decode(image), np.asarray(expected))


def test_an_image_that_has_the_right_size_stays_as_it_is() -> None:
    np.testing.assert_array_equal(pixels_of(encoded(halves(48, 24))), np.asarray(halves(48, 24)))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright(kind: str, orientation: int, order: str) -> None:
    """Pillow's own way of turning it is the reference."""
    image = Image.new("RGB", (48, 24), "white")
    image.paste("red", (0, 0, 24, 12))
    image.paste("blue", (24, 0, 48, 12))
    turns: dict[int, Any] = {int(value): name for value, name in enumerate(("", *decoder.TURNS.values()), 1)}
    upright = image if orientation == 1 else image.transpose(Image.Transpose[turns[orientation]])
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(image, kind, exif=b"Exif\0\0" + turned(orientation, order), **options)
    assert read_header(data).size == upright.size
    assert corners(pixels_of(data)) == corners(np.asarray(upright))


@pytest.mark.parametrize(
    "exif", [b"", b"II*\0", b"MM\0*\xff\xff\xff\xff", turned(0), turned(9), turned(6)[:16], b"x" * 9]
)
def test_broken_exif_turns_nothing(exif: bytes) -> None:
    data = with_segment(encoded(halves(48, 24), "JPEG"), 0xE1, b"Exif\0\0" + exif)
    assert corners(pixels_of(data)) == [RED, BLUE, RED, BLUE]


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_what_is_transparent_is_white(kind: str) -> None:
    image = halves(48, 24, mode="RGBA")
    image.paste((0, 0, 0, 0), (24, 0, 48, 24))
    options = {"lossless": True} if kind == "WEBP" else {}
    assert corners(pixels_of(encoded(image, kind, **options))) == [RED, WHITE, RED, WHITE]


def test_a_colour_of_a_palette_can_be_transparent() -> None:
    image = halves(48, 24).convert("P", palette=Image.Palette.ADAPTIVE)
    data = encoded(image, transparency=image.getpixel((47, 0)))
    assert corners(pixels_of(data)) == [RED, WHITE, RED, WHITE]


def test_grey_of_sixteen_bits_keeps_its_brightness() -> None:
    image = Image.fromarray(np.full((24, 48), 0x8012, dtype=np.uint16))
    assert pixels_of(encoded(image))[0, 0].tolist() == [0x80] * 3


def keyed(depth: int, channels: int) -> tuple[npt.NDArray[np.uint16], tuple[int, ...]]:
    """Samples of 48 x 24 pixels, and a key that some of them have. Others have all but one bit of it."""
    samples = np.random.default_rng(depth).integers(0, 2**depth, (24, 48, channels), dtype=np.uint16)
    key = samples[-1, -1].copy()
    samples[:3] = key
    flat = samples.reshape(-1, channels)
    for i in range(channels * depth):
        flat[i, i // depth] ^= 1 << i % depth
    return samples, tuple(int(sample) for sample in key)


@pytest.mark.rotated("more")
@pytest.mark.parametrize(("depth", "channels"), [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 3), (16, 3)])
@pytest.mark.parametrize("above", [0, 0xFFFF])
def test_what_has_the_samples_of_a_key_is_white_and_nothing_else(depth: int, channels: int, above: int) -> None:
    """Of a key, the bits that the depth has count."""
    samples, key = keyed(depth, channels)
    grey_or_rgb = samples if channels == 3 else samples[..., 0]
    data = png_of(grey_or_rgb, depth, [(sample | above << depth) & 0xFFFF for sample in key])
    levels = samples >> 8 if depth == 16 else samples * (255 // (2**depth - 1))
    expected = np.where((samples == key).all(-1, keepdims=True), 255, levels)
    np.testing.assert_array_equal(pixels_of(data), np.broadcast_to(expected, (24, 48, 3)))


@pytest.mark.parametrize("extra", [chunk(b"tRNS", b"\0"), chunk(b"tRNS", bytes(6))], ids=["short", "long"])
def test_a_key_of_another_length_is_none(extra: bytes) -> None:
    samples, _ = keyed(8, 1)
    np.testing.assert_array_equal(
        pixels_of(png_of(samples[..., 0], 8, more=extra)), pixels_of(png_of(samples[..., 0], 8))
    )


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    data = encoded(halves(48, 24, "white", "black").convert(mode), "JPEG" if mode == "CMYK" else "PNG")
    assert corners(pixels_of(data)) == [WHITE, (0, 0, 0)] * 2


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    later = [halves(48, 24, "green", "black")]
    data = encoded(halves(48, 24), kind, save_all=True, append_images=later, duration=100, **options)
    assert corners(pixels_of(data)) == [RED, BLUE, RED, BLUE]


def test_little_detail_makes_an_image_smaller() -> None:
    form = Grid(longest=5000)
    data = text_of(encoded(halves(1000, 250)))
    sizes = [check(ClientImage(data, False, detail), form) for detail in ("auto", "high", "low")]
    assert [(each.width, each.height) for each in sizes] == [(1000, 248), (1000, 248), (512, 128)]
    assert decode(sizes[2]).shape == (128, 512, 3)


def test_little_detail_makes_no_image_larger() -> None:
    assert (checked(encoded(halves(40, 16)), "low").width) == 40


def test_the_digest_is_of_all_that_the_pixels_depend_on() -> None:
    one, other = encoded(halves()), encoded(halves(left="green"))
    form = Grid()
    form.settings = b"another"
    digests = [
        checked(one).digest,
        checked(other).digest,
        checked(one, "low").digest,
        check(ClientImage(text_of(one), False), form).digest,
    ]
    assert len(set(digests)) == 4
    assert {len(digest) for digest in digests} == {16}
    assert checked(one).digest == digests[0] == check(ClientImage(url_of(one), True), FORM).digest
    assert checked(one, "high").digest == checked(one, "original").digest == digests[0]


@pytest.mark.parametrize(
    "start",
    [
        "data:image/png;base64,",
        "data:;base64,",
        "DATA:image/jpeg;BASE64,",
        "data:image/png;charset=utf-8;base64,",
        "data:image/png; charset=utf-8;base64,",
        "data:image/png;name=photo%20(1).png;base64,",
        'data:image/png;name="größe 1.png";base64,',
    ],
)
def test_a_data_url_is_read_whatever_type_it_states(start: str) -> None:
    data = encoded(halves())
    assert check(ClientImage(start + text_of(data), True), FORM).digest == checked(data).digest


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://example.com/a.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "",
        "data:image/png,hello",
        "data:text/plain;base64",
        f"data:{'x' * 2000};base64,aGk=",
        text_of(encoded(halves())),
    ],
)
def test_no_other_url_is_read(url: str) -> None:
    with pytest.raises(
        ImageError, match="the server fetches no URL and opens no file; send the image itself, as a data: URL"
    ):
        check(ClientImage(url, True), FORM)


@pytest.mark.parametrize("text", ["a", "aGk", "aGk=aGk=", "aGk!", "größe", " aGk=", "data:image/png;base64,aGk="])
def test_wrong_base64_is_refused(text: str) -> None:
    with pytest.raises(ImageError, match="is not valid base64"):
        check(ClientImage(text, False), FORM)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "data:image/png;base64,"])
def test_base64_may_be_in_lines(start: str, end: str) -> None:
    """`base64` of Linux and Ruby's encode64 write it so."""
    data = encoded(halves())
    text = start + base64.encodebytes(data).decode().replace("\n", end)
    assert check(ClientImage(text, bool(start)), FORM).digest == checked(data).digest


def test_long_base64_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end in the middle is no end of the text."""
    data = encoded(halves(32, 32))
    text = text_of(data)
    digest = checked(data).digest
    for piece in (4, 8, 40, len(text) - len(text) % 4, 4 * len(text)):
        monkeypatch.setattr(reading, "PIECE", piece)
        assert checked(data).digest == digest
    monkeypatch.setattr(reading, "PIECE", 8)
    for wrong in ("aGloaGk=" + text, text[:-1], text + "=", "aGk=" + text):
        with pytest.raises(ImageError, match="is not valid base64"):
            check(ClientImage(wrong, False), FORM)


def test_a_long_text_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    most = text_of(bytes(MAX_BYTES))
    with pytest.raises(ImageError, match="is no PNG"):
        check(ClientImage(most, False), FORM)
    monkeypatch.setattr(reading.base64, "b64decode", None)
    with pytest.raises(ImageError, match="has more than 20 MiB"):
        check(ClientImage(most + "AAAA", False), FORM)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_the_reason(name: str) -> None:
    data, said = HOSTILE[name]
    with pytest.raises(ImageError) as caught:
        pixels_of(data)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["30,000 x 30,000 pixels", "41 MP", "too narrow", "no pixels", "SVG", "PostScript"])
def test_size_and_kind_are_checked_without_a_decoder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "decode", None)
    with pytest.raises(ImageError):
        checked(HOSTILE[name][0])


def test_a_decoder_gets_no_exif_of_a_jpeg() -> None:
    """Pillow would read all of its tags, each of which can be as large as the rest of the file."""
    bomb = exif_bomb()
    assert len(bomb) > 60_000
    assert len(checked(bomb).header.data) < 2000
    assert corners(pixels_of(bomb)) == [RED, BLUE, RED, BLUE]


def test_a_decoder_gets_no_texts_and_no_colour_profile_of_a_png() -> None:
    """Pillow refuses those of more than a megabyte. Programs keep whole histories and workflows in them."""
    large = compressed_zeros(2 * 2**20)
    named = png_with(chunk(b"iTXt", b"xmp\0\1\0\0\0" + large))
    coloured = png_with(chunk(b"iCCP", b"wide\0\0" + large))
    for data in (text_bomb(), named, coloured):
        assert checked(data).header.data == encoded(halves())
        assert corners(pixels_of(data)) == [RED, BLUE, RED, BLUE]


def test_a_decoder_gets_no_comments_of_a_gif() -> None:
    plain = encoded(halves(48, 24), "GIF")
    assert plain[:6] == b"GIF87a"
    place = plain.index(b",", 13 + 3 * 2 ** ((plain[10] & 7) + 1))
    said = b"!\xfe" + (b"\xff" + b"x" * 255) * 1000 + b"\0"
    data = plain[:place] + said + plain[place:]
    assert checked(data).header.data == plain
    assert corners(pixels_of(data)) == [RED, BLUE, RED, BLUE]


def test_a_gif_may_be_larger_than_its_screen() -> None:
    gif = encoded(halves(48, 24), "GIF")
    small = gif[:6] + struct.pack("<HH", 1, 1) + gif[10:]
    assert checked(small).header.size == (48, 24)
    assert corners(pixels_of(small)) == [RED, BLUE, RED, BLUE]


@pytest.mark.parametrize(
    "data",
    [
        encoded(halves())[:-12] + chunk(b"IDAT", b"") * MAX_PIECES + chunk(b"IEND", b""),
        encoded(halves(), "JPEG")[:2] + b"\xff\xfe\0\2" * MAX_PIECES + encoded(halves(), "JPEG")[2:],
        b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0, 0, 0) + b"!\xfe\x01x\0" * MAX_PIECES,
        b"RIFF\0\0\0\0WEBPVP8L" + struct.pack("<I", 10) + b"\x2f" + bytes(9) + b"EXIF\0\0\0\0" * MAX_PIECES,
    ],
    ids=FORMATS,
)
def test_a_file_of_many_pieces_is_refused(data: bytes) -> None:
    with pytest.raises(ImageError, match="with more than 10,000 pieces"):
        read_header(data)


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Each is a pass over all pixels, and needs a few bytes only: a file of 240 kB would take seconds."""
    data = encoded(halves(), "JPEG", progressive=True)
    first, second = data.index(b"\xff\xda"), data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)
    scan, num_scans = data[second : data.index(b"\xff\xda", second + 2)], data.count(b"\xff\xda", first)
    for more, is_refused in ((MAX_SCANS - num_scans, False), (MAX_SCANS - num_scans + 1, True)):
        many = data[:second] + scan * more + data[second:]
        if is_refused:
            with pytest.raises(ImageError, match="is a JPEG with more than 100 scans"):
                read_header(many)
        else:
            assert corners(pixels_of(many)) == [RED, BLUE, RED, BLUE]


@pytest.mark.parametrize("progressive", [False, True])
def test_what_follows_a_jpeg_is_no_part_of_it(progressive: bool) -> None:
    """A phone's photo with motion has a video there, which has all bytes: 7 MiB of it look like 100 scans."""
    data = encoded(halves(), "JPEG", progressive=progressive)
    video = b"ftypmp42" + b"\xff\xda\0" * (MAX_SCANS + 1) + data
    assert read_header(data + video).data == read_header(data).data
    assert corners(pixels_of(data + video)) == [RED, BLUE, RED, BLUE]


def test_a_segment_between_two_scans_of_a_jpeg_may_have_the_bytes_of_an_end() -> None:
    data = encoded(halves(), "JPEG", progressive=True)
    second = data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)
    said = data[:second] + b"\xff\xfe\0\6\xff\xd9\xff\xd9" + data[second:]
    assert read_header(said + b"\xff\xda" * MAX_SCANS).data == read_header(said).data
    assert corners(pixels_of(said)) == [RED, BLUE, RED, BLUE]


def test_a_jpeg_without_an_end_is_read_to_the_end_of_its_file() -> None:
    data = encoded(halves(), "JPEG")
    assert read_header(data[:-2]).data == read_header(data).data[:-2]


def test_a_file_with_two_sizes_is_refused() -> None:
    """The limits are checked by the header as this server reads it. A decoder may take a later one."""
    header = struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0)
    with pytest.raises(ImageError, match="is a PNG with two sizes"):
        pixels_of(png_with(chunk(b"IHDR", header)))


def test_every_beginning_of_a_file_is_refused_or_shown() -> None:
    for kind in FORMATS:
        data = encoded(halves(9, 9), kind)
        for end in range(len(data)):
            attempt(data[:end])


def attempt(data: bytes) -> bool:
    """Whether a file is an image. Any other outcome than an image or a refusal raises."""
    try:
        image = checked(data)
        pixels = decode(image)
    except ImageError:
        return False
    assert (pixels.shape, pixels.dtype) == ((image.height, image.width, 3), np.uint8)
    return True


def test_a_sample_of_mutated_files_is_refused_or_shown() -> None:
    shown = sum(attempt(mutated(number)) for number in range(400))
    assert 40 < shown < 360


@pytest.mark.slow
def test_many_mutated_files_are_refused_or_shown() -> None:
    for number in range(FIRST, FIRST + CASES):
        try:
            attempt(mutated(number, SEED))
        except Exception as error:
            raise AssertionError(f"make test-fuzz SEED={SEED} FIRST={number} CASES=1") from error


def test_an_image_is_decoded_once_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(reading, "decode", lambda image: (decoded.append(image.digest), decode(image))[1])
    size = 48 * 24 * 3
    reader = ImageReader(2 * size)
    one, two, three = (checked(encoded(halves(48, 24, left))) for left in ("red", "green", "white"))
    for image in (one, one, two, one, three, one):  # two is the one that was used least lately
        np.testing.assert_array_equal(reader.pixels(image), decode(image))
    assert decoded == [one.digest, two.digest, three.digest]
    reader.pixels(two)
    assert decoded[3:] == [two.digest]


def test_an_image_that_is_larger_than_the_cache_is_decoded_all_the_same() -> None:
    reader = ImageReader(10)
    assert reader.pixels(checked(encoded(halves(48, 24)))).shape == (24, 48, 3)


def test_a_server_without_pillow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its images can be counted all the same."""
    without_pillow(monkeypatch)
    image = checked(black_png(10, 10))
    with pytest.raises(PillowMissingError, match=r"pip install 'mlxpaged\[vision\]'"):
        decode(image)
