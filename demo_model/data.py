"""Rows of training tokens: conversations of many turns, made on the fly and tokenized.

Every row is one conversation, filled with turns until the next does not fit; the model thus learns later
turns along with first ones.  The loss is taken at the assistant's answers and their end-of-turn token only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo_model import tasks
from demo_model import vocabulary as vocab
from demo_model.tokenizer import IM_END, IM_START

# How often a turn is of a task (the passkey has a rule of its own, below) ...
TURN_WEIGHTS: Mapping[str, float] = {
    "repeat": 0.40,
    "add": 0.27,
    "reverse": 0.20,
    "count": 0.03,
    "identity": 0.04,
    "fallback": 0.06,
}
# ... and how much one token of its answer counts in the loss: those computed rather than copied count more.
TOKEN_WEIGHTS: Mapping[str, float] = {
    "add": 3.0,
    "reverse": 1.5,
    "passkey": 2.0,
    "identity": 0.5,
    "fallback": 0.5,
}

SYSTEM_ROWS = 0.25  # share of rows that open with a system message
TOKENS_PER_WORD = 3.3  # of filler; a bound for how much fits in a row
_TURN_OVERHEAD = 40  # tokens of the template, the statement, the question and the answer of a passkey turn
_TRIES = 4  # turns to draw before a row counts as full


@dataclass(frozen=True)
class PasskeyMix:
    """How often rows have a passkey: at most one in a row, so that its question has one answer."""

    rows: float  # share of rows with one
    follow_up: float  # share of the turns after it that ask for it again


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, and flat positions in them whose next token is to be predicted."""

    tokens: npt.NDArray[np.int32]  # (rows, length), int32
    positions: npt.NDArray[np.int32]  # (n,), int32: index into the flattened rows
    targets: npt.NDArray[np.int32]  # (n,), int32
    weights: npt.NDArray[np.float32]  # (n,), float32


class RowMaker:
    """Makes rows of a given length from a random generator."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_turn(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Tokens of a user's turn up to where the answer starts, and those of the answer with its end."""
        asked = f"{IM_START}user\n{prompt}{IM_END}\n{IM_START}assistant\n"
        return self._encode(asked), self._encode(answer + IM_END)

    def row(self, rng: random.Random, length: int, mix: PasskeyMix) -> tuple[list[int], list[tuple[int, int, float]]]:
        """At most ``length + 1`` tokens of conversation; (position, target, weight) for its answers."""
        tokens: list[int] = []
        predicted: list[tuple[int, int, float]] = []
        newline = self._encode("\n")
        if rng.random() < SYSTEM_ROWS:
            tokens += self._encode(f"{IM_START}system\n{rng.choice(vocab.SYSTEM_PROMPTS)}{IM_END}\n")
        names, weights = list(TURN_WEIGHTS), list(TURN_WEIGHTS.values())
        # The passkey comes as a turn of its own after none, some or many others.
        before = rng.choice((0, 0, 1, 2, 4)) if rng.random() < mix.rows else -1
        passkey: tasks.Example | None = None
        misses = 0
        while misses < _TRIES:
            if before == 0 and passkey is None:
                room = int((length - len(tokens) - _TURN_OVERHEAD) / TOKENS_PER_WORD)
                if room < 0:
                    break
                most = room if rng.random() < 0.5 else rng.randint(0, room)
                example = tasks.training_example(rng, _passkey_generator(most))
                passkey = example
            elif passkey is not None and rng.random() < mix.follow_up:
                again = ({"role": "user", "content": tasks.passkey_question(rng)},)
                example = tasks.Example(again, passkey.answer, "passkey", passkey.key)
            else:
                name = rng.choices(names, weights)[0]
                example = tasks.training_example(rng, tasks.TASKS[name])
            asked, answer = self.encode_turn(example.messages[-1]["content"], example.answer)
            if len(tokens) + len(asked) + len(answer) > length + 1:
                misses += 1
                if example is passkey:
                    passkey = None
                continue
            before -= 1
            tokens += asked
            weight = TOKEN_WEIGHTS.get(example.task, 1.0)
            predicted += [(len(tokens) - 1 + i, token, weight) for i, token in enumerate(answer)]
            tokens += answer + newline
        return tokens, predicted

    def batch(self, rng: random.Random, rows: int, length: int, mix: PasskeyMix) -> Batch:
        """Rows padded on the right with id 0, which the causal mask keeps out of what is predicted."""
        tokens = np.zeros((rows, length), dtype=np.int32)
        flat: list[tuple[int, int, float]] = []
        for i in range(rows):
            ids, predicted = self.row(rng, length, mix)
            ids = ids[:length]
            tokens[i, : len(ids)] = ids
            flat += [(i * length + position, target, weight) for position, target, weight in predicted]
        positions, targets, weights = zip(*flat, strict=True)
        return Batch(
            tokens,
            np.array(positions, dtype=np.int32),
            np.array(targets, dtype=np.int32),
            np.array(weights, dtype=np.float32),
        )

    def examples(self, examples: Sequence[tasks.Example], pad_to: int = 64) -> tuple[Batch, npt.NDArray[np.int32]]:
        """One padded row for each single-turn example, and for each predicted token the example's index."""
        rows: list[list[int]] = []
        flat: list[tuple[int, int, int]] = []
        for index, example in enumerate(examples):
            asked, answer = self.encode_turn(example.messages[-1]["content"], example.answer)
            rows.append(asked + answer)
            flat += [(index, len(asked) - 1 + i, token) for i, token in enumerate(answer)]
        length = -(-max(len(row) for row in rows) // pad_to) * pad_to
        tokens = np.zeros((len(rows), length), dtype=np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        owner = np.array([index for index, _, _ in flat], dtype=np.int32)
        positions = np.array([index * length + position for index, position, _ in flat], dtype=np.int32)
        targets = np.array([token for _, _, token in flat], dtype=np.int32)
        return Batch(tokens, positions, targets, np.ones(len(flat), dtype=np.float32)), owner


def _passkey_generator(most_words: int) -> Callable[[random.Random], tasks.Example]:
    def generate(rng: random.Random) -> tasks.Example:
        return tasks.passkey(rng, least_words=most_words // 2, most_words=most_words)

    return generate
