"""The vectors that a step uploads."""

from __future__ import annotations

from mlxpaged.core.engine.step_input import decoding_step, token_vectors
from mlxpaged.core.step import FIRST_CONTENT_ID, PENDING, Row, Step


def vectors(*rows: Row, sampled_ids: tuple[int, ...] = ()) -> list[list[int]]:
    return [vector.tolist() for vector in token_vectors(Step(rows), sampled_ids)]


def decoding(sequence_id: int, position: int, token: int) -> Row:
    return Row(sequence_id, position, [token], range(position, position + 1), num_sampled=1)


def test_all_logits_of_decoding_rows_are_wanted() -> None:
    assert vectors(decoding(1, 9, 70), decoding(2, 4, 80)) == [[70, 80], [0, 1]]


def test_of_a_prompts_last_chunk_the_logits_of_its_last_token_are_wanted() -> None:
    chunk = Row(3, 10, [5, 6, 7], range(12, 13), num_sampled=1)
    assert vectors(decoding(1, 9, 70), chunk) == [[70, 5, 6, 7], [0, 3]]


def test_logits_that_are_not_sampled_from_come_last() -> None:
    """The log-probabilities of prompt tokens 1 and 2, and the first token of the answer."""
    asked = Row(3, 0, [5, 6, 7], range(3), num_sampled=1)
    assert vectors(asked, decoding(1, 9, 70)) == [[5, 6, 7, 70], [2, 3, 0, 1]]


def test_a_step_that_samples_nothing_wants_the_logits_of_its_last_token() -> None:
    assert vectors(Row(3, 0, [5, 6, 7])) == [[5, 6, 7], [2]]


def test_a_pending_token_is_found_among_those_of_the_step_in_flight() -> None:
    """One of its sequences has ended, so that the others are at other places."""
    drafts = Row(4, 7, [PENDING, 50], range(7, 9), num_sampled=2)
    rows = decoding(8, 2, PENDING), drafts, decoding(5, 3, 60)
    assert vectors(*rows, sampled_ids=(9, 4, 8)) == [[-1, -1, 50, 60], [0, 1, 2, 3], [2, 1, 0, 0]]


def test_the_model_gets_token_0_in_place_of_content() -> None:
    row = Row(1, 0, [7, FIRST_CONTENT_ID, FIRST_CONTENT_ID + 1, 8], range(3, 4), num_sampled=1)
    assert vectors(row) == [[7, 0, 0, 8], [3]]


def test_a_decoding_step_without_a_scheduler_uses_the_first_blocks() -> None:
    step = decoding_step([-3, -2, -1], position=5, token=9, num_blocks=2, num_groups=2)
    assert [(row.sequence_id, row.start, row.token_ids, row.sampled) for row in step.rows] == [
        (-3, 5, [9], range(6, 7)),
        (-2, 5, [9], range(6, 7)),
        (-1, 5, [9], range(6, 7)),
    ]
    tables = [row.tables.tolist() for row in step.rows if row.tables is not None]
    assert tables == [[[0], [0]], [[1], [1]], [[0], [0]]]
