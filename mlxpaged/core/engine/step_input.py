"""Makes what a step uploads from its rows."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxpaged.attention.metadata import IntArray
from mlxpaged.core.step import FIRST_CONTENT_ID, PENDING, Row, Step


class StepInput:
    """What some steps have beside tokens, adapters and states. No step that has it is replayed."""

    def concerns(self, step: Step) -> bool:
        """Whether the step has it."""
        raise NotImplementedError

    def prepare(self, step: Step) -> None:
        """Make what is missing for the step. Other steps may still be in flight."""

    def begin(self, step: Step) -> None:
        """The model is called for the step between this and `end`."""
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError


class SampledTokens(NamedTuple):
    """tokens[R], on the device: those that the step in flight samples, for these sequences. None if R is 0."""

    tokens: mx.array | None = None
    sequence_ids: ListOf[int] = ()


NO_TOKENS = SampledTokens()


def token_vectors(step: Step, sampled_ids: ListOf[int] = ()) -> list[IntArray]:
    """Vectors for a step of T tokens: token_ids[T]; wanted[R + P], the indices of the tokens whose logits are computed,
    first of those that are sampled from, then of the others; and if tokens are pending, the index [T] of each pending
    one among those of the step in flight. sampled_ids: the sequences of these."""
    rows = step.rows
    tokens = step.token_ids
    if step.shows_images:
        tokens = [0 if token >= FIRST_CONTENT_ID else token for token in tokens]
    token_ids: IntArray = np.array(tokens, np.int32)
    wanted: IntArray = np.arange(len(tokens), dtype=np.int32)
    if step.num_sampled < len(tokens):
        wanted = indices_of_wanted(rows)
    if PENDING not in tokens:
        return [token_ids, wanted]
    pending = np.flatnonzero(token_ids == PENDING)
    owners = np.repeat(np.arange(len(rows)), step.query_lens)[pending]
    index = {sequence_id: i for i, sequence_id in enumerate(sampled_ids)}
    indices = np.zeros_like(token_ids)
    indices[pending] = [index[rows[owner].sequence_id] for owner in owners.tolist()]
    return [token_ids, wanted, indices]


def indices_of_wanted(rows: ListOf[Row]) -> IntArray:
    """The indices of the tokens whose logits are computed, in the order of `token_vectors`."""
    sampled: list[int] = []
    others: list[int] = []
    end = 0
    for row in rows:
        offset, end = end - row.start, end + len(row.token_ids)
        first, stop = row.logits.stop - row.num_sampled, row.logits.stop
        sampled += range(offset + first, offset + stop)
        others += range(offset + row.logits.start, offset + first)
    # A step that samples nothing (a chunk in the middle of a prompt) still projects one row: the model always runs its
    # head, and the head cannot take an array without rows.
    return np.array([*(sampled or [end - 1]), *others], np.int32)


def decoding_step(sequence_ids: ListOf[int], position: int, token: int, num_blocks: int, num_groups: int) -> Step:
    """A step of one token at `position` for each of these sequences, in the first blocks, without a scheduler."""
    blocks = np.arange(len(sequence_ids), dtype=np.int32) % num_blocks
    tables = np.repeat(blocks[:, None, None], num_groups, axis=1)
    logits = range(position, position + 1)
    return Step(
        [
            Row(sequence_id, position, [token], logits, num_sampled=1, tables=table)
            for sequence_id, table in zip(sequence_ids, tables, strict=True)
        ]
    )
