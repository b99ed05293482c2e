"""Batches of conversations about pictures, drawn on the fly and tokenized."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from tokenizers import Tokenizer

from demo_model.tokenizer import IM_END, IM_START
from demo_model.vision import tasks
from demo_model.vision.model import FORMAT, IMAGE_ID, LONGEST, SIDE
from demo_model.vision.pictures import any_number, picture

TOKEN_WEIGHT = {"text": 0.1}
"""How much a token of an answer counts in the loss; 1 for the others."""


MOST_PARTS = 40
"""Rows of features of the largest pictures."""


LONG_ROW = 140
"""Tokens after which a conversation gets no more turns."""


@dataclass(frozen=True)
class Batch:
    """tokens: (rows, length). pixels: pictures of one size in each. digits: for each picture, how often each digit is
    in its number. sources: as `hidden_states` takes them. positions: in the flattened rows, whose next token is to be
    predicted. owners: the row of each."""

    tokens: npt.NDArray[np.int32]
    pixels: list[npt.NDArray[np.uint8]]
    digits: list[npt.NDArray[np.float32]]
    sources: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    owners: npt.NDArray[np.int32]


Size = tuple[int, int]


def any_size(rng: random.Random, most_parts: int = MOST_PARTS) -> Size:
    """Width and height of a picture, as the tower takes it. most_parts: rows of features."""
    while True:
        width, height = (SIDE * rng.randint(least, LONGEST // SIDE) for least in (3, 2))
        if width * height <= most_parts * SIDE**2 and width * 3 >= height * 2:
            return width, height


def reduced(image: Image.Image) -> npt.NDArray[np.uint8]:
    """The picture as the tower takes it."""
    size = FORMAT.size(*image.size)
    return np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC))


def drawn(rng: random.Random, number: int, size: Size, fonts: Sequence[Path]) -> Image.Image:
    """A picture that the tower takes at that size."""
    width, height = size
    if max(size) == LONGEST and rng.random() < 0.5:
        scale = rng.uniform(1.0, 5.0)
        return picture(rng, number, round(width * scale), round(height * scale), fonts, scale)
    return picture(rng, number, width - rng.randrange(SIDE), height - rng.randrange(SIDE), fonts)


def _counts(number: int) -> list[int]:
    return [str(number).count(digit) for digit in "0123456789"]


class BatchMaker:
    """Makes batches from a random generator."""

    def __init__(self, tokenizer: Tokenizer, fonts: Sequence[Path], held_out: bool = False) -> None:
        """held_out: numbers and questions are those that training never has."""
        self._tokenizer = tokenizer
        self._fonts = fonts
        self._held_out = held_out

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def batch(
        self,
        rng: random.Random,
        rows: int,
        most_turns: int,
        most_pictures: int,
        most_parts: Sequence[int] = (MOST_PARTS,),
        most_digits: int = 3,
    ) -> Batch:
        """All pictures have one of two sizes.  most_parts: one of these is the limit of both."""
        parts = rng.choice(most_parts)
        sizes = [any_size(rng, parts), any_size(rng, parts)]
        shown: list[list[tuple[int, npt.NDArray[np.uint8]]]] = [[], []]
        all_tokens, places, predicted = [], [], []
        for row in range(rows):
            tokens, of_pictures, answers = self._row(rng, sizes, shown, most_turns, most_pictures, most_digits)
            all_tokens.append(tokens)
            places.append(of_pictures)
            predicted += [(row, *answer) for answer in answers]
        length = -(-max(map(len, all_tokens)) // 16) * 16
        filled = np.zeros((rows, length), np.int32)
        sources = np.arange(rows * length, dtype=np.int32)
        per_picture = [width * height // SIDE**2 for width, height in sizes]
        starts = (rows * length, rows * length + per_picture[0] * len(shown[0]))
        for row, tokens in enumerate(all_tokens):
            filled[row, : len(tokens)] = tokens
            for at, group, index in places[row]:
                width, height = sizes[group]
                ids = np.array(FORMAT.tokens(width, height))
                features = starts[group] + index * per_picture[group] + np.arange(per_picture[group])
                sources[row * length + at + np.flatnonzero(ids == IMAGE_ID)] = features
        owners, positions, targets, weights = zip(*predicted, strict=True)
        return Batch(
            filled,
            [np.stack([pixels for _, pixels in group]) for group in shown if group],
            [np.array([_counts(number) for number, _ in group], np.float32) for group in shown if group],
            sources,
            np.array([row * length + at for row, at in zip(owners, positions, strict=True)], np.int32),
            np.array(targets, np.int32),
            np.array(weights, np.float32),
            np.array(owners, np.int32),
        )

    def _row(
        self,
        rng: random.Random,
        sizes: Sequence[Size],
        shown: list[list[tuple[int, npt.NDArray[np.uint8]]]],
        most_turns: int,
        most_pictures: int,
        most_digits: int,
    ) -> tuple[list[int], list[tuple[int, int, int]], list[tuple[int, int, float]]]:
        """Tokens of a conversation; (position, group, index in it) of each picture; (position, target, weight) for each
        token of an answer."""
        tokens: list[int] = []
        places: list[tuple[int, int, int]] = []
        predicted: list[tuple[int, int, float]] = []
        newline = self._encode("\n")

        def add(message: tasks.Message) -> None:
            text = f"{IM_START}{message.role}\n"
            for each in message.content:
                if isinstance(each, str):
                    text += each
                    continue
                tokens.extend(self._encode(text))
                group = rng.randrange(2)
                places.append((len(tokens), group, len(shown[group])))
                shown[group].append((each.number, reduced(drawn(rng, each.number, sizes[group], self._fonts))))
                tokens.extend(FORMAT.tokens(*sizes[group]))
                text = ""
            tokens.extend(self._encode(f"{text}{IM_END}\n"))

        if most_turns > 1 and rng.random() < 0.25:
            add(tasks.system_message(rng))

        def number() -> int:
            return any_number(rng, self._held_out, most_digits)

        earlier: list[int] = []
        for _ in range(min(most_turns, rng.choice((1, 2, 3)))):
            if len(tokens) > LONG_ROW:
                break
            if most_turns == 1:
                turn = tasks.plain_turn(rng, tasks.Shown(number()))
            else:
                room = most_pictures - len(earlier)
                turn = tasks.turn(rng, number, earlier, room, self._held_out)
            for message in turn.asked:
                add(message)
            tokens += self._encode(f"{IM_START}assistant\n")
            answer = self._encode(f"{turn.answer}{IM_END}")
            weight = TOKEN_WEIGHT.get(turn.task, 1.0)
            predicted += [(len(tokens) - 1 + i, token, weight) for i, token in enumerate(answer)]
            tokens += [*answer, *newline]
        return tokens, places, predicted
