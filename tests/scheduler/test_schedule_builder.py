"""The rows of a step that is being scheduled."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mlxpaged.core.blocks.table_rows import IntArray
from mlxpaged.core.scheduling.schedule_builder import ScheduleBuilder, spans_within
from mlxpaged.core.scheduling.sequence import Sequence
from tests.scheduler.simulation import sequence


def tables_of(sequences: Iterable[Sequence]) -> IntArray:
    """[sequences, 1, 1]: the id of each as its only block."""
    return np.array([[[each.sequence_id]] for each in sequences], np.int32)


def computed(number: int, prompt: int, upto: int, logprobs: bool = False) -> Sequence:
    """A sequence that counts `upto` tokens as computed."""
    new = sequence(number, prompt, logprobs=logprobs)
    new.num_computed_tokens = upto
    return new


def test_a_chunk_has_its_tokens_and_no_logits() -> None:
    builder, prompt = ScheduleBuilder(), computed(1, 10, 8)
    builder.add(prompt, 4, num_sampled=0, restore=None, checkpoints=())
    [row] = builder.build(tables_of)
    assert (row.start, row.token_ids, row.logits, row.samples) == (4, [1004, 1005, 1006, 1007], range(8, 8), False)
    assert prompt in builder
    assert computed(2, 4, 4) not in builder
    assert builder.contexts == [5, 6, 7, 8]


def test_the_last_chunk_samples_from_its_last_token() -> None:
    builder = ScheduleBuilder()
    builder.add(computed(1, 10, 10), 8, num_sampled=1, restore=None, checkpoints=())
    [row] = builder.build(tables_of)
    assert (row.logits, row.sampled) == (range(9, 10), range(10, 11))


def test_prompt_log_probabilities_take_the_logits_of_the_chunk() -> None:
    """The last token of the prompt has the logits of the first one of the answer: these are sampled from."""
    builder, prompt = ScheduleBuilder(), computed(1, 10, 10, logprobs=True)
    builder.add(prompt, 6, num_sampled=1, restore=None, checkpoints=())
    [row] = builder.build(tables_of)
    assert (row.logits, row.prompt_logprobs, row.sampled) == (range(6, 10), range(7, 10), range(10, 11))


def test_drafts_stand_after_the_token_that_is_known() -> None:
    builder, decoding = ScheduleBuilder(), computed(1, 5, 7)
    builder.add(decoding, 4, num_sampled=3, restore=None, checkpoints=(), drafts=[70, 71])
    [row] = builder.build(tables_of)
    assert (row.token_ids, row.drafts, row.sampled) == ([1004, 70, 71], [70, 71], range(5, 8))
    assert builder.num_drafts == 2


def test_rows_that_are_sorted_keep_their_tables() -> None:
    builder = ScheduleBuilder()
    for number, end in ((1, 4), (2, 1), (3, 2)):
        builder.add(computed(number, 5, end), 0, num_sampled=0, restore=None, checkpoints=())
    builder.sort_by_length()
    rows = builder.build(tables_of)
    assert [(row.sequence_id, row.num_tokens) for row in rows] == [(2, 1), (3, 2), (1, 4)]
    assert [row.tables.tolist() for row in rows if row.tables is not None] == [[[2]], [[3]], [[1]]]


def test_no_rows_need_no_tables() -> None:
    assert ScheduleBuilder().build(lambda _: 1 / 0) == ()  # type: ignore[arg-type, return-value]


def test_an_image_counts_if_a_row_has_several_of_its_tokens() -> None:
    spans = [(2, 6), (8, 12), (20, 24)]
    assert spans_within(spans, 5, [0] * 5) == [(8, 12)], "one token of the first, two of the second"
    assert spans_within(spans, 0, [0] * 30) == spans
