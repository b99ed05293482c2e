"""Drafts by the model's own draft head (models/draft_head.py).

In each step the head computes the entries of all its tokens, in the blocks that these have, so the prefix cache, swap
space and preemption know nothing of it. An entry is made of a token's hidden state and of the token after it. So the
last entry of a block depends on the first token of the next one, and a prefix hit may end in an entry that was made
with another token. That, like all that the head computes, can change how many drafts are accepted, and no answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from typing import NamedTuple

import mlx.core as mx

from mlxpaged.engine.model_runner import ModelRunner, device_errors
from mlxpaged.engine.running_request import RunningRequest
from mlxpaged.engine.sampler import Sampler, SamplingRow
from mlxpaged.scheduler.scheduler import Scheduler
from mlxpaged.scheduler.sequence import Sequence
from mlxpaged.step import FIRST_CONTENT_ID, Row, Step

logger = logging.getLogger(__name__)

MOST_BY_HEAD = 4
"""Most drafts of a sequence. A head is trained for one or a few: each draft is less likely than the one before it."""


class LaunchedDrafts(NamedTuple):
    """What a step has launched. hidden[T, 1, D]: of its tokens. at: the indices of those that were sampled from.
    first: the index of a sequence's first one in `at`. tokens[R]: the draft after each of them."""

    hidden: mx.array
    at: list[int]
    first: Mapping[int, int]
    tokens: mx.array


class HeadDrafter:
    """Belongs to the engine thread. cost: of a draft, as a share of a step. runs: whether the next step makes some."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, sampler: Sampler, cost: float) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self.cost = cost
        self.runs = False
        self._drafts: dict[int, tuple[int, list[int]]] = {}  # by sequence: the length of its text, and what comes next

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        length, drafts = self._drafts.get(sequence.sequence_id, (0, []))
        is_current = length == len(sequence.token_ids) == sequence.num_known_tokens
        return drafts[:most] if is_current else []

    def forget(self, sequence_id: int) -> None:
        self._drafts.pop(sequence_id, None)

    def launch(
        self, step: Step, sampling: ListOf[SamplingRow], tokens: mx.array | None, sequences: Mapping[int, Sequence]
    ) -> LaunchedDrafts | None:
        """Compute the entries of a step that was launched last, and the first draft after each token that it samples.
        sampling: the rows of these tokens[R]. Returns None if it samples none."""
        sampled = {row.sequence_id for row in sampling}
        following: list[int] = []
        at: list[int] = []
        first: dict[int, int] = {}
        for row in step.rows:
            sequence = sequences.get(row.sequence_id)
            if row.sequence_id in sampled:
                first[row.sequence_id] = len(at)
                end = len(following) + row.num_tokens
                at += range(end - row.num_sampled, end)
            following += [*row.token_ids[1:], after(row, sequence)]
        hidden = self._runner.draft(following, tokens, at)
        if tokens is None:
            mx.async_eval(hidden)
            return None
        logits = self._runner.project(hidden[mx.array(at)])
        next_rows = [row._replace(position=row.position + 1) for row in sampling]
        return LaunchedDrafts(hidden, at, first, self._sampler.guess(logits, next_rows))

    def draft(
        self,
        launched: LaunchedDrafts,
        accepted: Mapping[int, int],
        running: ListOf[RunningRequest],
        lengths: ListOf[int],
    ) -> None:
        """Take the drafts after the tokens that a step has committed, and make further ones. accepted: the accepted
        drafts of the step, by sequence. running: those that decode. lengths: drafts that each is to have."""
        with device_errors():
            firsts: list[int] = launched.tokens.tolist()  # type: ignore[assignment]
        chosen = [launched.first[each.sequence.sequence_id] + accepted[each.sequence.sequence_id] for each in running]
        drafts = [[firsts[i]] for i in chosen]
        more = max(lengths, default=0) - 1
        further = [i for i, each in enumerate(running) if lengths[i] > 1 and self._room(each) >= more]
        if further:
            made = self._draft_further(launched, [running[i] for i in further], [chosen[i] for i in further], more)
            for i, tokens in zip(further, made, strict=True):
                drafts[i] += tokens
        for each, tokens in zip(running, drafts, strict=True):
            self._drafts[each.sequence.sequence_id] = len(each.sequence.token_ids), tokens

    def _room(self, running: RunningRequest) -> int:
        """Entries for which its last block has room. Further drafts take no block."""
        table, block_size = running.sequence.kv.table, self._scheduler.config.block_size
        return 0 if table is None else len(table.ids[0]) * block_size - running.sequence.num_computed_tokens

    def _draft_further(
        self, launched: LaunchedDrafts, running: ListOf[RunningRequest], chosen: ListOf[int], more: int
    ) -> list[list[int]]:
        """Each draft after the first is made of the one before it, and of the hidden state that the head made of that.
        chosen: the index of the first one in `launched.tokens`. The next step overwrites their entries."""
        sequences = [each.sequence for each in running]
        hidden = launched.hidden[mx.array([launched.at[i] for i in chosen])]
        tokens, made = launched.tokens[mx.array(list(chosen))], []
        tables = self._scheduler.tables_of(sequences)
        for number in range(more):
            step = Step(
                [
                    Row(sequence.sequence_id, start, [0], range(start, start + 1), 1, tables=table)
                    for sequence, table in zip(sequences, tables, strict=True)
                    for start in [sequence.num_computed_tokens + number]
                ]
            )
            hidden = self._runner.draft_further(step, tokens, hidden)
            rows = [each.sampling_row(len(each.sequence.token_ids) + number + 1, None, ()) for each in running]
            tokens = self._sampler.guess(self._runner.project(hidden), rows)
            made.append(tokens)
        with device_errors():
            found: list[list[int]] = mx.stack(made, axis=1).tolist()  # type: ignore[assignment]
        return found


def after(row: Row, sequence: Sequence | None) -> int:
    """The token after those of a row, if it is a known token of text."""
    end = row.context_len
    if sequence is None or end >= sequence.num_known_tokens:
        return 0
    token = sequence.token_ids[end]
    return 0 if token >= FIRST_CONTENT_ID else token
