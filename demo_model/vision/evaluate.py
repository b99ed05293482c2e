"""Greedy accuracy of the demo model that sees: ``python demo_model/vision/evaluate.py [--model DIR]``.

Cases go the way of any chat request: messages through the saved chat template, pictures through the tower of the saved
weights, generation through mlx-lm on one row.  Numbers and questions are those that training never has.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

with contextlib.suppress(OSError):
    ctypes.CDLL("libopenblas.so.0", ctypes.RTLD_GLOBAL)  # see ../train.py

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, from a clone

from demo_model.vision import tasks
from demo_model.vision.data import any_size, drawn, reduced
from demo_model.vision.pictures import BUILT_IN, any_number, fonts_in
from demo_model.vision.reader import Reader

MODEL = Path(__file__).resolve().parents[2] / "mlxpaged" / "models" / "demo_vision"


def main() -> None:
    """Print right / asked for each kind of question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument(
        "--fonts", type=Path, nargs="*", default=[], help="directories of TrueType fonts, instead of Pillow's own"
    )
    parser.add_argument(
        "--cases", type=int, default=200, help="conversations of up to three turns, and single pictures"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    reader, rng = Reader(arguments.model), random.Random(f"held-out {arguments.seed}")
    fonts = [path for path in fonts_in(arguments.fonts) if path != BUILT_IN or not arguments.fonts]
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for case in range(2 * arguments.cases):
        alone = case % 2 == 0
        messages: list[tasks.Message] = []
        pictures: list[np.ndarray[Any, Any]] = []
        earlier: list[int] = []
        for _ in range(1 if alone else 3):
            if alone:
                number = any_number(rng, held_out=True)
                turn = tasks.Turn(tasks.plain_turn(rng, tasks.Shown(number)).asked, str(number), "one picture")
            else:
                turn = tasks.turn(rng, lambda: any_number(rng, True), earlier, 3 - len(earlier), held_out=True)
            for message in turn.asked:
                messages.append(message)
                for each in message.content:
                    if isinstance(each, tasks.Shown):
                        pictures.append(reduced(drawn(rng, each.number, any_size(rng), fonts)))
            answer = reader.answer(messages, pictures)
            asked[turn.task] += 1
            right[turn.task] += answer == turn.answer
            if answer != turn.answer:
                print(f"    {turn.task}: {turn.answer!r} was read as {answer!r}", flush=True)
            messages.append(tasks.Message("assistant", (turn.answer,)))
    for task, count in asked.items():
        print(f"{task}: {right[task]}/{count} = {right[task] / count:.3f}", flush=True)


if __name__ == "__main__":
    main()
