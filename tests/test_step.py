"""What a row of a step says, and that a row may sample several tokens."""

from __future__ import annotations

import mlx.core as mx

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.sampler import SampledToken, Samples
from mlxpaged.core.engine.step_input import token_vectors
from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.core.scheduling.prefill_budget import PrefillLimits
from mlxpaged.core.step import PENDING, Row, Step
from tests.scheduler.simulation import answer, commit, make_scheduler, sequence

DRAFTED = Row(1, 5, [7, 8, 9], range(5, 8), num_sampled=3)
"""A known token and two drafts, all of which are sampled after."""

CHUNK = Row(2, 0, [4, 5, 6, 7], range(1, 4), num_sampled=1)
"""The end of a prompt, with the log-probabilities of its last two tokens."""


def test_a_row_says_which_tokens_it_samples_and_which_prompt_tokens_it_predicts() -> None:
    assert (DRAFTED.sampled, DRAFTED.prompt_logprobs) == (range(6, 9), range(6, 6))
    assert (CHUNK.sampled, CHUNK.prompt_logprobs) == (range(4, 5), range(2, 4))
    middle = Row(3, 8, [1, 2])
    assert not middle.samples
    assert not middle.sampled
    assert not middle.prompt_logprobs


def test_the_tokens_of_a_row_want_the_same_logits_alone() -> None:
    alone = [(row.start, row.token_ids, row.logits, row.num_sampled) for row in CHUNK.tokens()]
    assert alone == [
        (0, [4], range(0), 0),
        (1, [5], range(1, 2), 0),
        (2, [6], range(2, 3), 0),
        (3, [7], range(3, 4), 1),
    ]
    assert [row.num_sampled for row in DRAFTED.tokens()] == [1, 1, 1]


def test_logits_are_selected_first_for_sampled_tokens_and_then_for_those_of_prompts() -> None:
    pending = Row(9, 3, [PENDING], range(3, 4), num_sampled=1)
    tokens, wanted, indices = token_vectors(Step([DRAFTED, pending, CHUNK]), sampled_ids=[4, 9])
    assert tokens.tolist() == [7, 8, 9, PENDING, 4, 5, 6, 7]
    assert wanted.tolist() == [0, 1, 2, 3, 7, 5, 6]
    assert indices.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_a_step_reads_all_tokens_of_a_row_in_order() -> None:
    other = Row(2, 9, [3], range(9, 10), num_sampled=1)
    step = InFlightStep(Step([DRAFTED, other]), 0.0, mx.array([[0.0], [1.0], [2.0], [3.0]]), [])
    assert step.logits_of([1, 1, 1]).tolist() == [[0.0], [1.0], [2.0]]
    step.set_samples([1, 1, 1, 2], Samples(mx.array([10, 11, 12, 13])))
    assert step.read().tokens == {1: [*map(SampledToken, (10, 11, 12))], 2: [SampledToken(13)]}


def test_the_rejected_tokens_of_a_row_are_taken_back() -> None:
    scheduler, seq = make_scheduler(block_size=4), sequence(1, 3, max_tokens=9)
    scheduler.add(seq)
    commit(scheduler, scheduler.schedule(), {1: 7})
    [row] = scheduler.schedule().rows
    drafted = row._replace(token_ids=[7, 8, 9, 10], logits=range(3, 7), num_sampled=4)
    seq.num_computed_tokens += 3
    seq.token_ids += [PENDING] * 3
    seq.num_pending_tokens += 3
    scheduler.update(Step([drafted]), {1: [8, 5]})
    assert answer(seq) == [7, 8, 5]
    assert (seq.num_computed_tokens, seq.num_committed_tokens, seq.num_pending_tokens) == (5, 5, 0)
    [row] = scheduler.schedule().rows
    assert (row.start, row.token_ids, row.sampled) == (5, [5], range(6, 7))


def test_each_token_of_a_row_with_drafts_counts_as_a_decoding_row() -> None:
    limits = PrefillLimits(SchedulerConfig(num_blocks=8))
    limits.observe(Step([DRAFTED, DRAFTED._replace(sequence_id=2)]), 0.5)
    assert limits.row_seconds() == {6: 0.5}
