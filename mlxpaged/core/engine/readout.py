"""Reads the probabilities of whole answers at the end of a prompt, without generating text.

The answers are token sequences that share prefixes, so they form a trie. The root, and each node after which an answer
ends, is a row of a step: the prompt, the tokens up to the node, and the candidates that follow. So the root's row gives
the first tokens of all answers, and no row computes the last token of one. The log-probabilities of the tokens up to a
node are prompt log-probabilities of its row, except those that an earlier row has given. The log-probability of an
answer is the sum along its path (the chain rule).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mlxpaged.core.engine.logprobs import PromptLogprobs, TokenLogprobs
from mlxpaged.core.engine.sampling_params import SamplingParams

Path = tuple[int, ...]


@dataclass(frozen=True)
class ReadoutRow:
    """path: tokens after the prompt that belong to the row's own prompt. first: index of the first of them whose
    log-probability is read. candidates: tokens that may follow, whose log-probabilities are read too."""

    path: Path
    first: int
    candidates: Path

    def params(self, num_prompt_tokens: int) -> SamplingParams:
        """How a request with the prompt and this path is to be run. num_prompt_tokens: of the prompt without the path.
        The token that it samples is not used."""
        reads_path = self.first < len(self.path)
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=0,
            logprob_token_ids=self.candidates,
            prompt_logprobs=0 if reads_path else None,
            prompt_logprobs_from=num_prompt_tokens + self.first if reads_path else 1,
            speculative=False,
        )


@dataclass(frozen=True)
class RowReading:
    """Log-probabilities that one row gives: of its path from `first` on, and of its candidates."""

    path: tuple[float, ...]
    candidates: tuple[float, ...]

    @classmethod
    def of(cls, sampled: TokenLogprobs, prompt: PromptLogprobs | None) -> RowReading:
        """sampled: at the last position. prompt: those of the path, if it is read."""
        path = () if prompt is None else tuple(float(each) for each in prompt.logprobs)
        return cls(path, tuple(logprob for _, logprob in sampled.top))


class Readout:
    """What is read for some answers to one prompt.

    If one answer is a prefix of another, the probability of each answer is that of its tokens and of an end after them.
    Otherwise no answer can be mistaken for another, and its probability is that of its tokens.
    """

    def __init__(self, answers: Sequence[Sequence[int]], ends: Iterable[int] = ()) -> None:
        """answers: their tokens. ends: tokens that may end an answer. Raises ValueError if an answer is empty or given
        twice, or if nothing ends it before a longer one."""
        self.answers = [tuple(answer) for answer in answers]
        if not all(self.answers):
            raise ValueError("an answer needs at least one token")
        if len(set(self.answers)) < len(self.answers):
            raise ValueError("two answers have the same tokens")
        self._followers: dict[Path, dict[int, None]] = {}
        for answer in self.answers:
            for depth, token in enumerate(answer):
                self._followers.setdefault(answer[:depth], {})[token] = None
        self._ends: dict[Path, Path] = {}  # of each answer: those after which it does not go on as a longer one
        if has_prefix(self.answers):
            known = dict.fromkeys(ends)
            for answer in self.answers:
                self._ends[answer] = tuple(each for each in known if each not in self._followers.get(answer, ()))
            if not all(self._ends.values()):
                raise ValueError("an answer is a prefix of another one, and no token ends it")
        self.rows = list(self._rows())

    def _rows(self) -> Iterable[ReadoutRow]:
        """Yields the root, and the shallow nodes first: their candidates are the first tokens of deeper paths."""
        nodes = {(), *(self.answers if self._ends else (answer[:-1] for answer in self.answers))}
        known: set[Path] = set()
        for node in sorted(nodes, key=len):
            first = next((depth for depth in range(len(node)) if node[: depth + 1] not in known), len(node))
            candidates = (*self._followers.get(node, ()), *self._ends.get(node, ()))
            known.update(node[: depth + 1] for depth in range(first, len(node)))
            known.update((*node, token) for token in candidates)
            yield ReadoutRow(node, first, candidates)

    def log_probabilities(self, readings: Sequence[RowReading]) -> list[float]:
        """Those of the answers, in natural units. readings: of the rows, in their order."""
        found: dict[Path, float] = {}
        for row, reading in zip(self.rows, readings, strict=True):
            at = zip(range(row.first, len(row.path)), reading.path, strict=True)
            found.update((row.path[: depth + 1], logprob) for depth, logprob in at)
            found.update(
                ((*row.path, token), logprob) for token, logprob in zip(row.candidates, reading.candidates, strict=True)
            )
        return [self._log_probability(answer, found) for answer in self.answers]

    def _log_probability(self, answer: Path, found: Mapping[Path, float]) -> float:
        total = sum(found[answer[: depth + 1]] for depth in range(len(answer)))
        if (ends := self._ends.get(answer)) is None:
            return total
        paths: list[Path] = [(*answer, end) for end in ends]
        return total + log_sum_exp([found[path] for path in paths])


def has_prefix(answers: Iterable[Path]) -> bool:
    """Whether one of some different answers is a prefix of another."""
    ordered = sorted(answers)
    return any(longer[: len(shorter)] == shorter for shorter, longer in pairwise(ordered))


def log_sum_exp(values: Sequence[float]) -> float:
    """The logarithm of the sum of the exponentials; -inf if there are none."""
    greatest = max(values, default=-math.inf)
    if math.isinf(greatest):
        return greatest
    return greatest + math.log(sum(math.exp(value - greatest) for value in values))


def normalized(log_probabilities: Sequence[float]) -> list[float]:
    """Probabilities that sum to 1, in proportion to these. Raises ValueError if none is above 0."""
    total = log_sum_exp(log_probabilities)
    if not math.isfinite(total):
        raise ValueError("no answer has a probability")
    return [math.exp(value - total) for value in log_probabilities]
