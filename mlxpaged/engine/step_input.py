"""What a step runs, in plain numbers: made once from a batch, and run by the model runner of each rank."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxpaged.attention.metadata import IntArray
from mlxpaged.models.states import StateRow
from mlxpaged.scheduler.batch import Batch, ScheduledSequence
from mlxpaged.scheduler.sequence import PENDING


@dataclass(frozen=True)
class SampledTokens:
    """tokens[R], on the device: the token that was sampled for each of R sequences, in the order of `sequence_ids`."""

    tokens: mx.array
    sequence_ids: ListOf[int]


class StepInput(NamedTuple):
    """The n rows of a step, with T tokens.

    token_ids[T]: PENDING for a token of the step in flight. block_tables[G, n, b]: for each cache group, padded as in
    AttentionMetadata. wanted: indices [R + P] of the tokens whose logits are computed. pending[T]: the index of each
    pending token among the `num_sampled` tokens of the step in flight; None if no token is pending. adapters: of each
    row. states: the rows, if the model has recurrent layers. running: ids of all running sequences; recurrent states of
    others are dropped.
    """

    sequence_ids: list[int]
    query_lens: list[int]
    context_lens: list[int]
    token_ids: IntArray
    block_tables: IntArray
    wanted: IntArray
    pending: IntArray | None = None
    num_sampled: int = 0
    adapters: ListOf[str | None] = ()
    states: ListOf[StateRow] = ()
    running: Collection[int] = ()

    @classmethod
    def of(
        cls,
        batch: Batch,
        block_tables: IntArray,
        sampled: SampledTokens | None = None,
        has_states: bool = False,
        running: Collection[int] = (),
    ) -> StepInput:
        """sampled: tokens of the step in flight. They replace the batch's pending tokens."""
        rows = batch.rows
        tokens: list[int] = []
        for row in rows:
            tokens += row.sequence.token_ids[row.start : row.start + row.num_tokens]
        token_ids: IntArray = np.asarray(tokens, dtype=np.int32)
        query_lens = [row.num_tokens for row in rows]
        last = np.cumsum(query_lens, dtype=np.int32) - 1
        wanted = last[[row.samples for row in rows]]
        # A step that samples nothing (a chunk in the middle of a prompt) still projects one row: the model always runs
        # its head, and the head cannot take an array without rows.
        selected = wanted if wanted.size else last[-1:]
        if any(row.prompt_logprobs for row in rows):
            selected = np.concatenate([selected, prompt_tokens(rows, last)])
        pending, num_sampled = None, 0
        if PENDING in tokens:
            assert sampled is not None
            pending, num_sampled = indices_of_pending(batch, token_ids, last, sampled), len(sampled.sequence_ids)
        return cls(
            batch.sequence_ids,
            query_lens,
            [row.start + row.num_tokens for row in rows],
            token_ids,
            block_tables,
            selected,
            pending,
            num_sampled,
            [row.sequence.adapter for row in rows],
            state_rows(batch) if has_states else (),
            running,
        )


def state_rows(batch: Batch) -> list[StateRow]:
    return [
        StateRow(row.sequence.sequence_id, row.start, row.num_tokens, row.restore, row.checkpoints)
        for row in batch.rows
    ]


def indices_of_pending(batch: Batch, token_ids: IntArray, last: IntArray, sampled: SampledTokens) -> IntArray:
    """Indices [T] of the batch's tokens: a token's index in `sampled` if it is pending, else 0. Only the last token of
    a row can be pending. last: the index of each row's last token."""
    index = {sequence_id: i for i, sequence_id in enumerate(sampled.sequence_ids)}
    pending = token_ids[last] == PENDING
    indices = np.zeros_like(token_ids)
    indices[last[pending]] = [
        index[row.sequence.sequence_id] for row in itertools.compress(batch.rows, pending.tolist())
    ]
    return indices


def prompt_tokens(rows: ListOf[ScheduledSequence], last: IntArray) -> IntArray:
    """The indices [P], among the batch's tokens, of the prompt tokens whose logits are wanted. last: of each row."""
    firsts = last + 1 - [row.num_tokens for row in rows]
    found = [
        np.arange(first + row.prompt_logprobs.start - 1 - row.start, first + row.prompt_logprobs.stop - 1 - row.start)
        for first, row in zip(firsts.tolist(), rows, strict=True)
        if row.prompt_logprobs
    ]
    return np.concatenate(found).astype(np.int32)
