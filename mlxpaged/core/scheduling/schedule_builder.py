"""Collects the rows of the step that is being scheduled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf

from mlxpaged.core.blocks.table_rows import IntArray
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.step import Row


class ScheduleBuilder:
    """The rows so far. Their block tables are selected at the end, for all rows at once.

    preempted: ids of the sequences preempted for this step. They are not admitted again in it.
    """

    def __init__(self) -> None:
        self.preempted: set[int] = set()
        self._sequences: dict[int, Sequence] = {}
        self._rows: list[
            tuple[int, int, list[int], range, int, int | None, tuple[tuple[int, int], ...], str | None, str]
        ] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._sequences

    def add(
        self,
        sequence: Sequence,
        start: int,
        num_sampled: int,
        restore: int | None,
        checkpoints: tuple[tuple[int, int], ...],
        drafts: ListOf[int] = (),
    ) -> None:
        """The step computes the tokens from `start` on that the sequence counts as computed, the last ones of which are
        these drafts."""
        end = sequence.num_computed_tokens
        logits = range(end - num_sampled, end)
        if sequence.logits_from is not None:
            first, last = max(start, sequence.logits_from), min(end, sequence.num_prompt_tokens - 1)
            if first < last:  # no token was sampled yet, so the logits for the first one follow
                logits = range(first, last + num_sampled)
        sequence_id, more = sequence.sequence_id, (restore, checkpoints)
        token_ids = [*sequence.token_ids[start : end - len(drafts)], *drafts]
        self._rows.append(
            (sequence_id, start, token_ids, logits, num_sampled, *more, sequence.adapter, sequence.request_id)
        )
        self._sequences[sequence_id] = sequence

    def sort_by_length(self) -> None:
        """Make rows of as many tokens neighbours: recurrent modules compute them together."""
        order = sorted(range(len(self._rows)), key=lambda i: len(self._rows[i][2]))
        sequences = list(self._sequences.items())
        self._rows = [self._rows[i] for i in order]
        self._sequences = dict(sequences[i] for i in order)

    @property
    def num_drafts(self) -> int:
        return sum(max(0, num_sampled - 1) for *_, num_sampled, _, _, _, _ in self._rows)

    @property
    def contexts(self) -> list[int]:
        """The context length of each token so far."""
        return [
            position + 1 for _, start, token_ids, *_ in self._rows for position in range(start, start + len(token_ids))
        ]

    @property
    def first_contexts(self) -> list[int]:
        """The context length of each row's first token: without drafts, of every token."""
        return [start + 1 for _, start, *_ in self._rows]

    def build(self, tables_of: Callable[[Iterable[Sequence]], IntArray]) -> tuple[Row, ...]:
        """The rows. tables_of: selects the block tables of some sequences."""
        if not self._rows:
            return ()
        tables = tables_of(self._sequences.values())
        return tuple(
            [
                Row(*row, table, sequence.shifts, sequence.spans and spans_within(sequence.spans, row[1], row[2]))
                for row, table, sequence in zip(self._rows, tables, self._sequences.values(), strict=True)
            ]
        )


def spans_within(spans: ListOf[tuple[int, int]], start: int, token_ids: list[int]) -> list[tuple[int, int]]:
    """The spans with several of the tokens from `start` on."""
    end = start + len(token_ids)
    return [(first, last) for first, last in spans if min(last, end) - max(first, start) > 1]
