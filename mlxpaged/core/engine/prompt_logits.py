"""Computes the log-probabilities of prompt tokens in a step.

The logits of a token take megabytes. So a step computes those of a limited number of prompt tokens, and the memory for
them is reserved at the start.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf

import mlx.core as mx
import numpy as np

from mlxpaged.core.engine.logprobs import PromptRows
from mlxpaged.core.engine.sampler import most_likely, without
from mlxpaged.core.step import Row

MAX_BYTES = 256 * 2**20
"""Most bytes that the logits of prompt tokens take in a step, with all arrays that are computed from them."""

BYTES_PER_LOGIT = 32
"""The logits in the model's type and in float32, negated ones, and the indices and buffers of a sort."""

INVARIANT_TOP = 32
"""How many of the most likely tokens a batch-invariant engine finds at least for each prompt token of a step, more than
a request of the API can ask for. Then the number does not depend on the other requests."""


def max_prompt_logits(vocab_size: int, max_num_batched_tokens: int) -> int:
    """The most prompt tokens of a step whose logits are computed: 55 for a vocabulary of 152,000."""
    return max(1, min(max_num_batched_tokens, MAX_BYTES // (BYTES_PER_LOGIT * vocab_size)))


def prompt_logits_bytes(vocab_size: int, max_num_batched_tokens: int) -> int:
    """The most bytes that they take in a step."""
    return max_prompt_logits(vocab_size, max_num_batched_tokens) * vocab_size * BYTES_PER_LOGIT


class StepLogprobs:
    """The log-probabilities of all prompt tokens of a step, on the device until `read`.

    rows: those with such tokens. tokens[n]: these. logits[n, V]: those that predict them. top: how many of the most
    likely tokens to report for each. absent[V]: tokens that do not exist, if there are any.
    """

    def __init__(
        self, rows: ListOf[Row], tokens: list[int], logits: mx.array, top: int, absent: mx.array | None = None
    ) -> None:
        self._rows = rows
        scores = logits.astype(mx.float32)
        if absent is not None:
            scores = without(scores, absent)
        own = mx.take_along_axis(scores, mx.array(tokens)[:, None], axis=-1)
        total = mx.logsumexp(scores, axis=-1, keepdims=True)
        best = most_likely(scores, top)
        best_logprobs = mx.take_along_axis(scores, best, axis=-1) - total
        ranks = (scores > own).sum(axis=-1) + 1
        self.arrays = [total[:, 0], (own - total)[:, 0], ranks, best, best_logprobs]

    def read(self) -> dict[int, tuple[range, PromptRows]]:
        """Wait for the device. Returns the positions and the rows of each sequence, by its id."""
        mx.eval(self.arrays)  # if NumPy evaluated them, an error would end the process
        totals, *tables = (np.array(array) for array in self.arrays)
        found, start = {}, 0
        for row in self._rows:
            at = slice(start, start + len(row.prompt_logprobs))
            rows = PromptRows(bool(np.isfinite(totals[at]).all()), *(table[at] for table in tables))
            found[row.sequence_id] = (row.prompt_logprobs, rows)
            start = at.stop
        return found
