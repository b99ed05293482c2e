"""Draws pictures of numbers: different sizes, fonts, positions, angles and colours, on plain or busy grounds.

It needs Pillow.  A number belongs either to training or to the held-out set, as in :mod:`demo_model.tasks`;
numbers of one digit are never held out.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter, ImageFont

from demo_model.tasks import is_held_out

Color = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

BUILT_IN = Path()
"""Stands for the font that Pillow brings along."""

MOST = 999
LEAST_HEIGHT = 22
"""Of a digit in pixels, as the tower gets them."""
MARGIN = 2
LEAST_CONTRAST = 90
"""Difference of the luminances of the number and its ground, of 255."""


TOO_THIN = re.compile(r"Thin|ExtraLight")
"""Fonts of which nothing is left in small pictures."""


def fonts_in(directories: Sequence[Path]) -> list[Path]:
    """The fonts in directories, and Pillow's own, as often as three of them."""
    found = [path for each in directories for path in sorted(each.glob("**/*.[to]tf"))]
    return [BUILT_IN] * 3 + [path for path in found if not TOO_THIN.search(path.name)]


def is_held_out_number(number: int) -> bool:
    return number > 9 and is_held_out(f"number:{number}")


def any_number(rng: random.Random, held_out: bool, most_digits: int = 3) -> int:
    """One to three digits have the same chance, as far as the set has them."""
    while True:
        first, last = rng.choice(((0, 9), (10, 99), (100, MOST))[: max(most_digits, 1 + held_out)])
        number = rng.randint(first, last)
        if is_held_out_number(number) == held_out:
            return number


@functools.lru_cache(maxsize=4000)
def font_of(path: Path, size: int) -> Font:
    return ImageFont.load_default(size) if path == BUILT_IN else ImageFont.truetype(str(path), size)


def _luminance(color: Color) -> float:
    return 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]


def _color(rng: random.Random) -> Color:
    if rng.random() < 0.35:
        return rng.choice(((0, 0, 0), (255, 255, 255), (250, 250, 250), (20, 20, 30)))
    return (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))


def _near(rng: random.Random, color: Color, most: int) -> Color:
    red, green, blue = (min(255, max(0, value + rng.randint(-most, most))) for value in color)
    return red, green, blue


def _ground(rng: random.Random, color: Color, width: int, height: int) -> Image.Image:
    """Mostly plain; at times it changes towards another colour, or has lines and boxes that are hardly seen."""
    ground = Image.new("RGB", (width, height), color)
    roll = rng.random()
    if roll < 0.15:
        ramp = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize((width, height))
        ground = Image.composite(Image.new("RGB", (width, height), _near(rng, color, 40)), ground, ramp)
    elif roll < 0.30:
        draw = ImageDraw.Draw(ground)
        for _ in range(rng.randint(1, 6)):
            at = [rng.randint(0, width), rng.randint(0, height), rng.randint(0, width), rng.randint(0, height)]
            if rng.random() < 0.5:
                draw.line(at, fill=_near(rng, color, 25), width=rng.randint(1, 3))
            else:
                box = (min(at[0], at[2]), min(at[1], at[3]), max(at[0], at[2]), max(at[1], at[3]))
                draw.rectangle(box, fill=_near(rng, color, 25))
    elif roll < 0.40:
        noise = Image.effect_noise((width, height), rng.uniform(5, 40)).convert("RGB")
        ground = Image.blend(ground, noise, rng.uniform(0.05, 0.2))
    return ground


def _mask(text: str, path: Path, size: int, angle: float) -> Image.Image:
    """The text in white on black, cut to what it covers."""
    font = font_of(path, size)
    left, top, right, bottom = font.getbbox(text)
    mask = Image.new("L", (int(right - left) + 4, int(bottom - top) + 4))
    ImageDraw.Draw(mask).text((2 - left, 2 - top), text, fill=255, font=font)
    if angle:
        mask = mask.rotate(angle, Image.Resampling.BICUBIC, expand=True)
    return mask.crop(mask.getbbox())


def picture(
    rng: random.Random, number: int, width: int, height: int, fonts: Sequence[Path], scale: float = 1.0
) -> Image.Image:
    """A picture of that size.  scale: its pixels for each that the tower gets."""
    text, path = str(number), rng.choice(fonts)
    angle = rng.uniform(-8, 8) if rng.random() < 0.3 else 0.0
    sample = _mask(text, path, 100, angle)
    fitting = min((width - 2 * MARGIN) / sample.width, (height - 2 * MARGIN) / sample.height)
    least = min(fitting, LEAST_HEIGHT * scale / font_of(path, 100).getbbox("0")[3])
    mask = _mask(text, path, max(8, int(100 * rng.uniform(least, fitting))), angle)
    if mask.width > width or mask.height > height:
        mask = mask.resize((min(mask.width, width), min(mask.height, height)))
    behind = _color(rng)
    front = _color(rng)
    while abs(_luminance(front) - _luminance(behind)) < LEAST_CONTRAST:
        front, behind = _color(rng), _color(rng)
    image = _ground(rng, behind, width, height)
    place = (rng.randint(0, width - mask.width), rng.randint(0, height - mask.height))
    image.paste(front, place, mask)
    if rng.random() < 0.1:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.7) * scale))
    return image
