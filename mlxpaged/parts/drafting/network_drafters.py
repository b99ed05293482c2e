"""Drafts by the model's own draft head, by its assistant, or by a smaller model (models/drafts/).

Their keys and values are further layers in the blocks of the sequences, and an assistant has none. So the prefix cache,
swap space and preemption know nothing of them. Whatever they compute, and miss, changes how many drafts are
accepted, and no answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ListOf
from typing import NamedTuple

import mlx.core as mx

from mlxpaged.core.engine.model_runner import device_errors
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.engine.sampler import Sampler, SamplingRow
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.step import FIRST_CONTENT_ID, Row, Step
from mlxpaged.parts.drafting.draft_passes import DraftPasses

MOST_BY_NETWORK = 4
"""Most drafts of a sequence. A head is trained for one or a few: each draft is less likely than the one before it."""

CATCH_UP = 256
"""Most tokens that a smaller model computes of a sequence at once beside the chunks of its prompt."""


class LaunchedDrafts(NamedTuple):
    """What a head has launched with a step. hidden[T, 1, D]: of its tokens. at: the indices of those that were sampled
    from. first: the index of a sequence's first one in `at`. tokens[R]: the draft after each of them. rows: of
    each, for an assistant. All are empty for a smaller model, which begins when the tokens are known."""

    at: ListOf[int] = ()
    first: Mapping[int, int] = {}
    tokens: mx.array | None = None
    hidden: mx.array | None = None
    rows: ListOf[Row] = ()


class NetworkDrafter:
    """Belongs to the engine thread. name: of DRAFTERS. cost: of a draft, as a share of a step. passes: the
    forward passes that it makes."""

    name = ""

    def __init__(self, scheduler: Scheduler, passes: DraftPasses, sampler: Sampler, cost: float) -> None:
        self._scheduler = scheduler
        self.passes = passes
        self._sampler = sampler
        self.cost = cost
        self._drafts: dict[int, tuple[int, list[int]]] = {}  # by sequence: the length of its text, and what comes next

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        length, drafts = self._drafts.get(sequence.sequence_id, (0, []))
        is_current = length == len(sequence.token_ids) == sequence.num_known_tokens
        return drafts[:most] if is_current else []

    def forget(self, sequence_id: int) -> None:
        self._drafts.pop(sequence_id, None)

    def skip(self, step: Step) -> None:
        """No drafts are made in a step that was launched."""

    def launch(
        self, step: Step, sampling: ListOf[SamplingRow], tokens: mx.array | None, sequences: Mapping[int, Sequence]
    ) -> LaunchedDrafts | None:
        """Begin after a step that was launched last. sampling: the rows of its sampled tokens[R]. Returns None if it
        samples none."""
        raise NotImplementedError

    def draft(
        self,
        launched: LaunchedDrafts,
        accepted: Mapping[int, int],
        running: ListOf[RunningRequest],
        lengths: ListOf[int],
    ) -> None:
        """Make the drafts after the tokens that a step has committed. accepted: its accepted drafts, by sequence.
        running: those that decode. lengths: drafts that each is to have."""
        raise NotImplementedError

    def _keep(self, running: ListOf[RunningRequest], drafts: ListOf[list[int]]) -> None:
        for each, tokens in zip(running, drafts, strict=True):
            self._drafts[each.sequence.sequence_id] = len(each.sequence.token_ids), tokens

    def _room(self, running: RunningRequest) -> int:
        """Tokens after the computed ones for which its last block has room. Drafts take no block."""
        table, block_size = running.sequence.kv.table, self._scheduler.config.block_size
        return 0 if table is None else len(table.ids[0]) * block_size - running.sequence.num_computed_tokens

    def _guess(self, logits: mx.array, running: ListOf[RunningRequest], number: int) -> mx.array:
        """The draft of this number, from 0 on, for each sequence."""
        rows = [each.sampling_row(len(each.sequence.token_ids) + number, None, ()) for each in running]
        return self._sampler.guess(logits, rows)

    def _step(self, sequences: ListOf[Sequence], parts: ListOf[range]) -> Step:
        """A step of these parts of the sequences. The tokens are known later."""
        tables = self._scheduler.tables_of(sequences)
        return Step(
            [
                Row(sequence.sequence_id, part.start, [0] * len(part), part[-1:], 1, tables=table)
                for sequence, part, table in zip(sequences, parts, tables, strict=True)
            ]
        )


class HeadDrafter(NetworkDrafter):
    """In each step the head computes the entries of all its tokens. An entry is made of a token's hidden state and of
    the token after it. So the last entry of a block depends on the first token of the next one, and a prefix hit may
    end in an entry that was made with another token."""

    name = "mtp"

    def launch(
        self, step: Step, sampling: ListOf[SamplingRow], tokens: mx.array | None, sequences: Mapping[int, Sequence]
    ) -> LaunchedDrafts | None:
        """Compute the entries of the step, and the first draft after each token that it samples."""
        sampled = {row.sequence_id for row in sampling}
        following: list[int] = []
        at: list[int] = []
        first: dict[int, int] = {}
        for row in step.rows:
            if row.sequence_id in sampled:
                first[row.sequence_id] = len(at)
                end = len(following) + row.num_tokens
                at += range(end - row.num_sampled, end)
            following += [*row.token_ids[1:], after(row, sequences.get(row.sequence_id))]
        hidden = self.passes.by_head(following, tokens, at)
        if tokens is None:
            mx.async_eval(hidden)
            return None
        return LaunchedDrafts(at, first, self._first_drafts(hidden[mx.array(at)], sampling), hidden)

    def _first_drafts(self, hidden: mx.array, sampling: ListOf[SamplingRow]) -> mx.array:
        rows = [row._replace(position=row.position + 1) for row in sampling]
        return self._sampler.guess(self.passes.project(hidden), rows)

    def draft(
        self,
        launched: LaunchedDrafts,
        accepted: Mapping[int, int],
        running: ListOf[RunningRequest],
        lengths: ListOf[int],
    ) -> None:
        assert launched.tokens is not None
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
        self._keep(running, drafts)

    def _draft_further(
        self, launched: LaunchedDrafts, running: ListOf[RunningRequest], chosen: ListOf[int], more: int
    ) -> list[list[int]]:
        """Each draft after the first is made of the one before it, and of the hidden state that the head made of that.
        chosen: the index of the first one in `launched.tokens`. The next step overwrites their entries."""
        assert launched.tokens is not None
        assert launched.hidden is not None
        sequences = [each.sequence for each in running]
        hidden = launched.hidden[mx.array([launched.at[i] for i in chosen])]
        tokens, made = launched.tokens[mx.array(list(chosen))], []
        for number, step in zip(range(more), self._further_steps(launched, sequences, chosen), strict=False):
            hidden = self.passes.further(step, tokens, hidden)
            tokens = self._guess(self.passes.project(hidden), running, number + 1)
            made.append(tokens)
        return read_columns(made)

    def _further_steps(
        self, launched: LaunchedDrafts, sequences: ListOf[Sequence], chosen: ListOf[int]
    ) -> Iterator[Step]:
        """Yields the steps of the drafts after the first one."""
        for number in itertools.count():
            ends = [each.num_computed_tokens + number for each in sequences]
            yield self._step(sequences, [range(end, end + 1) for end in ends])


class AssistantDrafter(HeadDrafter):
    """An assistant runs for the sampled tokens only, and all drafts after one have its position. It reads their blocks
    before the next step can take any of them."""

    def launch(
        self, step: Step, sampling: ListOf[SamplingRow], tokens: mx.array | None, sequences: Mapping[int, Sequence]
    ) -> LaunchedDrafts | None:
        if tokens is None:
            return None
        rows: list[Row] = []
        at: list[int] = []
        first: dict[int, int] = {}
        sampled, end = {row.sequence_id for row in sampling}, 0
        for row in step.rows:
            end += row.num_tokens
            if row.sequence_id in sampled:
                first[row.sequence_id] = len(at)
                at += range(end - row.num_sampled, end)
                last = row._replace(checkpoints=(), restore=None, spans=())
                rows += [
                    last._replace(start=position, token_ids=[0], logits=range(position, position + 1), num_sampled=1)
                    for position in range(row.context_len - row.num_sampled, row.context_len)
                ]
        hidden = self.passes.by_assistant(Step(rows), tokens, at)
        return LaunchedDrafts(range(len(at)), first, self._first_drafts(hidden, sampling), hidden, rows)

    def _further_steps(
        self, launched: LaunchedDrafts, sequences: ListOf[Sequence], chosen: ListOf[int]
    ) -> Iterator[Step]:
        return itertools.repeat(Step([launched.rows[i] for i in chosen]))

    def _room(self, running: RunningRequest) -> int:
        return MOST_BY_NETWORK  # drafts are not written


class ModelDrafter(NetworkDrafter):
    """A smaller model computes the chunks of prompts beside the steps, and the tokens of answers when they are known,
    together with the first draft after them."""

    name = "model"

    def __init__(self, scheduler: Scheduler, passes: DraftPasses, sampler: Sampler, cost: float) -> None:
        super().__init__(scheduler, passes, sampler, cost)
        self._computed: dict[int, int] = {}  # by sequence: leading tokens whose keys and values it has

    @property
    def num_sequences(self) -> int:
        """Sequences that it has computed a part of."""
        return len(self._computed)

    def forget(self, sequence_id: int) -> None:
        super().forget(sequence_id)
        self._computed.pop(sequence_id, None)

    def skip(self, step: Step) -> None:
        for row in step.rows:
            if row.sequence_id in self._scheduler.sequences:  # else it has ended since the step was launched
                computed = self._computed.get(row.sequence_id, row.start)
                self._computed[row.sequence_id] = min(computed, row.start)

    def launch(
        self, step: Step, sampling: ListOf[SamplingRow], tokens: mx.array | None, sequences: Mapping[int, Sequence]
    ) -> LaunchedDrafts | None:
        """Compute the chunks of the step. What a prefix hit has, the model has too, unless it did not run then."""
        chunks = [row for row in step.rows if not row.decodes]
        for row in step.rows:
            if row.sequence_id not in sequences:  # it has ended since the step was launched
                continue
            computed = self._computed.setdefault(row.sequence_id, row.start)
            if not row.decodes:
                is_next = computed >= row.start
                self._computed[row.sequence_id] = row.context_len if is_next else computed
        if chunks:
            ids = [0 if token >= FIRST_CONTENT_ID else token for row in chunks for token in row.token_ids]
            mx.async_eval(self.passes.by_model(Step(chunks), mx.array(ids), [len(ids) - 1]))
        return None if tokens is None else LaunchedDrafts()

    def draft(
        self,
        launched: LaunchedDrafts,
        accepted: Mapping[int, int],
        running: ListOf[RunningRequest],
        lengths: ListOf[int],
    ) -> None:
        most = max(lengths, default=0)
        behind = [each for each, length in zip(running, lengths, strict=True) if length and self._room(each) >= most]
        if not behind:
            return
        sequences = [each.sequence for each in behind]
        parts = [range(start, min(len(each.token_ids), start + CATCH_UP)) for each, start in self._behind(sequences)]
        known = [each.token_ids[part.start : part.stop] for each, part in zip(sequences, parts, strict=True)]
        ids = [0 if token >= FIRST_CONTENT_ID else token for tokens in known for token in tokens]
        ends: list[int] = []
        for part in parts:
            ends.append((ends[-1] if ends else -1) + len(part))
        logits = self.passes.by_model(self._step(sequences, parts), mx.array(ids), ends)
        for sequence, part in zip(sequences, parts, strict=True):
            self._computed[sequence.sequence_id] = part.stop
        ready = [i for i, part in enumerate(parts) if part.stop == len(sequences[i].token_ids)]
        if not ready:
            mx.async_eval(logits)
            return
        drafting = [behind[i] for i in ready]
        tokens = self._guess(logits[mx.array(ready)], drafting, 0)
        made = [tokens]
        for number in range(1, most):
            starts = [len(each.sequence.token_ids) + number - 1 for each in drafting]
            step = self._step([each.sequence for each in drafting], [range(start, start + 1) for start in starts])
            tokens = self._guess(self.passes.by_model(step, tokens, range(len(drafting))), drafting, number)
            made.append(tokens)
        self._keep(drafting, read_columns(made))

    def _behind(self, sequences: ListOf[Sequence]) -> list[tuple[Sequence, int]]:
        """Each sequence with the first token to compute, of which it always has one: the last one is new. Tokens are
        left out if blocks that they see have left a window since: the model did not run for long."""
        firsts = [max(self._computed.get(each.sequence_id, 0), self._first_whole(each)) for each in sequences]
        return [(each, min(first, len(each.token_ids) - 1)) for each, first in zip(sequences, firsts, strict=True)]

    def _first_whole(self, sequence: Sequence) -> int:
        """The first token all of whose windows are in blocks."""
        table, groups = sequence.kv.table, self._scheduler.blocks.groups
        assert table is not None
        seen = zip(table.firsts, groups.windows, strict=True)
        return max((first * groups.block_size + window - 1 for first, window in seen if first and window), default=0)


def read_columns(made: ListOf[mx.array]) -> list[list[int]]:
    """The drafts of each sequence. made: those of each number, [S]. Raises DeviceError."""
    with device_errors():
        found: list[list[int]] = mx.stack(list(made), axis=1).tolist()  # type: ignore[assignment]
    return found


def after(row: Row, sequence: Sequence | None) -> int:
    """The token after those of a row, if it is a known token of text."""
    end = row.context_len
    if sequence is None or end >= sequence.num_known_tokens:
        return 0
    token = sequence.token_ids[end]
    return 0 if token >= FIRST_CONTENT_ID else token
