"""Whether a model decodes with drafts. One with recurrent states is tried before the first request: it must go on
rightly after rejected drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence as ListOf
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.step import Row, Step
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import is_per_sequence, keeps_states
from mlxpaged.models.loader import ServedModel
from mlxpaged.models.turns import Turns
from mlxpaged.parts.graphs.warm_up import MAX_DIFFERENCE
from mlxpaged.parts.memory.step_memory import small_layout
from mlxpaged.parts.ranks.ranks import Ranks, least
from mlxpaged.progress import Stage

logger = logging.getLogger(__name__)

LENGTH = 10
"""Tokens of the sequences."""

WHOLE, ACCEPTED, REJECTED, SHORT, FIRST = range(5)
"""The sequences: one prompt; one whose drafts are all accepted; one of whose drafts some are rejected; one whose only
draft is rejected; one whose drafts are all rejected."""


class Sequences:
    """Sequences of the same tokens, each with blocks of its own."""

    def __init__(self, served: ServedModel, block_size: int, pads: bool) -> None:
        layout = small_layout(served)
        shape = 5, len(layout.windows), -(-LENGTH // block_size)
        self._runner = ModelRunner(served, int(np.prod(shape)), block_size, "auto", layout=layout)
        self._runner.rollback.pad(pads)
        self._tables = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        self._vocab_size = served.vocab_size
        self._tokens = [(7 * i + 3) % served.vocab_size for i in range(LENGTH)]

    def row(self, number: int, start: int, end: int, wrong: int = 0, has_drafts: bool = True) -> Row:
        """A row that samples after each token. wrong: drafts at its end that are other tokens."""
        tokens, count = self._tokens[start:end], end - start
        tokens[count - wrong :] = [(token + 1) % self._vocab_size for token in tokens[count - wrong :]]
        return Row(number, start, tokens, range(start, end), count if has_drafts else 1, tables=self._tables[number])

    def logits(self, *rows: Row) -> mx.array:
        logits = self._runner.forward(Step(rows), running=range(5)).astype(mx.float32)
        self._runner.finish_step(logits)
        return logits


class DraftSupport(NamedTuple):
    """works: whether drafts are verified. pads: as in Rollback."""

    works: bool
    pads: bool = False


def draft_support(config: EngineConfig, served: ServedModel, turns: Turns, ranks: Ranks | None) -> DraftSupport:
    """What all ranks can do. `works` is false too if no drafts are wanted."""
    if config.speculative == "off":
        return DraftSupport(False)
    if is_per_sequence(served.layers):
        logger.warning(
            "%s decodes without drafts: it runs once per sequence, and its caches change in place", served.name
        )
        return DraftSupport(False)
    if not keeps_states(served.layers):
        return DraftSupport(True)
    turns.begin(Stage.CHECKING_DRAFTS)
    for pads in (True, False):
        if least(takes_drafts_back(served, config.block_size, pads), ranks):
            return DraftSupport(True, pads)
    logger.warning("%s decodes without drafts: its logits are wrong after rejected ones", served.name)
    return DraftSupport(False)


def takes_drafts_back(served: ServedModel, block_size: int, pads: bool) -> bool:
    """Whether rows with drafts, and rows that go on before the last ones, have the logits of one prompt. pads: as in
    Rollback.

    In half types, a router of experts that chooses another one because of rounding moves single rows far. So the median
    of the rows of a kind counts. A model that does not run such rows does not take them back either."""
    try:
        return gives_equal_logits(Sequences(served, block_size, pads))
    except Exception:  # MLX and mlx-lm raise any type
        logger.info("rows with drafts do not run%s", ", padded" if pads else "", exc_info=True)
        return False


def gives_equal_logits(sequences: Sequences) -> bool:
    last, *others = sequences.logits(sequences.row(WHOLE, 0, LENGTH, has_drafts=False))
    expected = mx.stack([*others, last])
    row, drafting = sequences.row, (SHORT, ACCEPTED, REJECTED, FIRST)
    sequences.logits(*(row(number, 0, 4, has_drafts=False) for number in drafting))
    drafts = sequences.logits(
        row(SHORT, 4, 6, wrong=1), row(ACCEPTED, 4, 8), row(REJECTED, 4, 8, wrong=2), row(FIRST, 4, 8, wrong=3)
    )
    after = sequences.logits(row(ACCEPTED, 8, 10), row(SHORT, 5, 9), row(REJECTED, 6, 10), row(FIRST, 5, 9))
    kinds = (
        (drafts[mx.array([0, 2, 3, 4, 5, 6, 7, 10])], [4, 4, 5, 6, 7, 4, 5, 4]),
        (after[:2], [8, 9]),
        (after[2:6], [5, 6, 7, 8]),
        (after[6:10], [6, 7, 8, 9]),
        (after[10:], [5, 6, 7, 8]),
    )
    return all(is_close(found, expected[mx.array(positions)]) for found, positions in kinds)


def is_close(found: mx.array, expected: mx.array) -> bool:
    differences: Any = (mx.abs(found - expected).max(axis=-1) / mx.abs(expected).max()).tolist()
    values: ListOf[float] = differences
    return median(values) <= MAX_DIFFERENCE
