"""What a step contains, which sequences are admitted, which are preempted."""

from __future__ import annotations

import pytest

from mlxpaged.core.scheduling.sequence import FinishReason, Priority, SequenceStatus
from tests.scheduler.simulation import Simulation, answer, make_scheduler, next_token, sequence, undisturbed

# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_step_mixes_decoding_sequences_and_several_prompt_chunks_within_the_budget() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=16))
    simulation.add(sequence(1, 3, max_tokens=9))
    simulation.step()
    simulation.add(sequence(2, 6), sequence(3, 20))
    simulation.step()
    assert simulation.batches[-1] == [(1, 1), (2, 6), (3, 2)], (
        "half of the budget is withheld from prompts while a sequence decodes"
    )
    simulation.step()
    assert simulation.batches[-1] == [(1, 1), (2, 1), (3, 8)]


def test_no_step_exceeds_the_token_budget_and_decodes_are_never_left_out() -> None:
    simulation = Simulation(make_scheduler(num_blocks=256, max_num_batched_tokens=10))
    for number in range(1, 9):
        simulation.add(sequence(number, 7 * number, max_tokens=12))
        decoding = {s.sequence_id for s in simulation.unfinished if s.num_output_tokens}
        batch = simulation.step()
        assert batch.num_tokens <= 10
        assert decoding <= set(batch.sequence_ids)
    simulation.run()
    assert all(sum(n for _, n in batch) <= 10 for batch in simulation.batches)


def test_drafts_are_cut_to_the_token_budget_and_to_half_of_the_logits() -> None:
    def drafts_of_step(max_tokens: int, admits: bool = True, logits: int = 2048) -> list[int]:
        scheduler = make_scheduler(max_num_batched_tokens=64, max_prompt_logits=logits)
        sequences = [sequence(number, 3, max_tokens=20) for number in (1, 2, 3)]
        for each in sequences:
            scheduler.add(each)
        scheduler.update(scheduler.schedule(), {1: [7], 2: [7], 3: [7]})
        for each in sequences:
            each.drafts = [7] * 8
        scheduler.max_tokens, scheduler.admits = max_tokens, admits
        scheduler.add(sequence(4, 9, logprobs=True))
        step = scheduler.schedule()
        drafts = [row.num_sampled - 1 for row in step.rows[:3]]
        assert sum(drafts) + sum(len(row.prompt_logprobs) for row in step.rows) <= logits
        return drafts

    assert drafts_of_step(64) == [8, 8, 8]
    assert drafts_of_step(14) == [8, 3, 0]
    assert drafts_of_step(2) == [0, 0, 0]
    assert drafts_of_step(64, logits=20) == [8, 2, 0]
    assert drafts_of_step(64, admits=False) == [0, 0, 0], "memory was short"


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(sequence(1, 20))
    samples = []
    for _ in range(3):
        batch = scheduler.schedule()
        samples.append([(row.start, row.num_tokens, row.samples) for row in batch.rows])
        scheduler.update(batch, {1: [7]})
    assert samples == [[(0, 8, False)], [(8, 8, False)], [(16, 4, True)]]


@pytest.mark.parametrize("cap", [1, 3, 8])
def test_exactly_max_num_seqs_run(cap: int) -> None:
    simulation = Simulation(make_scheduler(max_num_seqs=cap, max_num_batched_tokens=64))
    simulation.add(*(sequence(number, 2, max_tokens=3) for number in range(1, 11)))
    simulation.step()
    assert simulation.scheduler.stats().running == cap
    assert simulation.scheduler.stats().waiting == 10 - cap
    simulation.run()
    assert len(simulation.ended) == 10


def test_the_batch_shrinks_as_sequences_end_and_a_late_one_joins_the_next_step() -> None:
    simulation = Simulation(make_scheduler())
    simulation.add(*(sequence(number, 2, max_tokens=number) for number in (1, 2, 3)))
    sizes = [len(simulation.step()), len(simulation.step())]
    simulation.add(sequence(4, 2, max_tokens=1))
    sizes += [len(simulation.step())]
    assert sizes == [3, 2, 2]
    assert simulation.batches[-1] == [(3, 1), (4, 2)]
    assert not simulation.scheduler.has_unfinished()
    assert simulation.scheduler.schedule().rows == ()


def test_after_its_prefill_a_sequence_feeds_one_token_a_step() -> None:
    simulation = Simulation(make_scheduler())
    simulation.add(sequence(1, 9, max_tokens=20))
    simulation.run()
    assert simulation.batches == [[(1, 9)]] + [[(1, 1)]] * 19
    assert simulation.computed[1] == 9 + 20 - 1


def test_an_answer_ends_at_its_stop_token() -> None:
    seq = sequence(1, 3, max_tokens=10)
    expected = undisturbed(3, 1, 10)
    simulation = Simulation(make_scheduler())
    simulation.add(sequence(1, 3, max_tokens=10, stop=expected[4]))
    simulation.run()
    assert simulation.ended == {1: FinishReason.STOP}
    simulation = Simulation(make_scheduler())
    simulation.add(seq)
    simulation.run()
    assert simulation.ended == {1: FinishReason.LENGTH}
    assert answer(seq) == expected


# -- block tables ----------------------------------------------------------------------------------------------------


def test_each_row_has_the_exact_blocks_of_its_sequence() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(sequence(1, 9))
    scheduler.add(sequence(2, 4))
    batch = scheduler.schedule()
    tables = [row.tables.tolist() for row in batch.rows if row.tables is not None]
    assert tables == [[[0, 1, 2]], [[3, -1, -1]]]


def test_two_sequences_of_one_id_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence(1, 2))
    with pytest.raises(ValueError, match="already queued"):
        scheduler.add(sequence(1, 2))


# -- preemption ------------------------------------------------------------------------------------------------------


def test_when_blocks_run_out_the_newest_sequence_is_preempted_and_no_answer_changes() -> None:
    simulation = Simulation(make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=32))
    older, newer = sequence(1, 7, max_tokens=8), sequence(2, 6, max_tokens=8)
    simulation.add(older, newer)
    simulation.step()
    simulation.step()
    assert simulation.batches == [[(1, 7), (2, 6)], [(1, 1), (2, 1)]]
    simulation.step()  # the older one needs a third block, and the pool's four are taken
    assert simulation.batches[-1] == [(1, 1)]
    assert (older.num_preemptions, newer.num_preemptions) == (0, 1)
    simulation.run()
    assert answer(older) == undisturbed(7, 1, 8)
    assert answer(newer) == undisturbed(6, 2, 8)


def test_a_preempted_sequence_keeps_its_place_before_later_arrivals() -> None:
    simulation = Simulation(make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=32, max_num_seqs=3))
    simulation.add(*(sequence(number, 7, max_tokens=14) for number in (1, 2, 3)))
    while not simulation.scheduler.stats().preemptions_total:
        simulation.step()
    simulation.add(sequence(4, 16, max_tokens=1))
    simulation.run()
    first_seen = [number for batch in simulation.batches for number, _ in batch]
    resumed = max(
        i
        for i, (number, tokens) in enumerate([row for batch in simulation.batches for row in batch])
        if number == 3 and tokens > 1
    )
    assert first_seen.index(4) > resumed


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    simulation = Simulation(make_scheduler(num_blocks=9, block_size=4, max_num_batched_tokens=64))
    sequences = [sequence(number, 12, max_tokens=12) for number in (1, 2)]
    simulation.add(*sequences)
    simulation.run()
    assert sequences[1].num_preemptions > 0
    assert simulation.computed[2] < 2 * (12 + 11), "its prompt was computed again from the start"
    assert answer(sequences[1]) == undisturbed(12, 2, 12)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_no_load_wedges_a_pool_that_holds_one_request(prefix_caching: bool) -> None:
    simulation = Simulation(
        make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=8, prefix_caching=prefix_caching)
    )
    sequences = [sequence(number, 1 + number % 13, max_tokens=12) for number in range(1, 25)]
    simulation.add(*sequences)
    simulation.run()
    assert set(simulation.ended.values()) == {FinishReason.LENGTH}
    assert all(answer(s) == undisturbed(1 + s.sequence_id % 13, s.sequence_id, 12) for s in sequences)
    assert simulation.scheduler.pool.usage().used == 0


# -- prefixes --------------------------------------------------------------------------------------------------------

PREFIX = list(range(40))


def test_a_prompt_seen_before_is_not_computed_again_but_for_its_last_token() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    simulation.add(sequence(1, PREFIX))
    simulation.run()
    again = sequence(2, PREFIX)
    simulation.add(again)
    simulation.run()
    assert again.num_cached_tokens == 39, "one token is left to compute, in a copy of the tenth block"
    assert answer(again) == undisturbed(PREFIX, 1, 4)


def test_the_next_turn_of_a_chat_finds_its_own_answer() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    first = sequence(1, PREFIX, max_tokens=17)
    simulation.add(first)
    simulation.run()
    second = sequence(2, [*first.token_ids, 7, 8, 9])
    simulation.add(second)
    simulation.step()
    assert second.num_cached_tokens == 56  # of 40 + 16 tokens with KV, all in full blocks


def test_sixteen_sequences_that_arrive_together_compute_their_common_prefix_once() -> None:
    simulation = Simulation(make_scheduler(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=16))
    simulation.add(*(sequence(number, [*PREFIX, 1000 + number], max_tokens=2) for number in range(16)))
    simulation.run()
    assert sum(simulation.computed.values()) == 40 + 16 * 1 + 16 * 1
    assert simulation.scheduler.stats().prefix_hit_tokens_total == 15 * 40


def test_a_sequence_that_arrives_while_its_prefix_is_computed_waits_for_it() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=8))
    late = sequence(2, [*PREFIX, 2])
    simulation.add(sequence(1, [*PREFIX, 1]))
    simulation.step()
    simulation.add(late)
    simulation.run()
    assert late.num_cached_tokens == 40
    assert simulation.computed[2] == 1 + 3


def test_a_waiting_sequence_computes_the_prefix_itself_if_its_owner_is_aborted() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=8))
    heir = sequence(2, [*PREFIX, 2])
    simulation.add(sequence(1, [*PREFIX, 1]), heir)
    simulation.step()
    simulation.abort(1)
    simulation.run()
    assert heir.num_cached_tokens == 8
    assert answer(heir) == undisturbed([*PREFIX, 2], 2, 4)


def test_an_aborted_waiting_sequence_never_runs() -> None:
    simulation = Simulation(make_scheduler(max_num_seqs=1))
    simulation.add(sequence(1, 4), sequence(2, 4), sequence(3, 4))
    simulation.step()
    simulation.abort(2)
    simulation.run()
    assert simulation.computed[2] == 0
    assert simulation.ended[2] is FinishReason.ABORT
    with pytest.raises(KeyError):
        simulation.scheduler.finish(2, FinishReason.ABORT)


def test_without_prefix_caching_nothing_is_shared() -> None:
    simulation = Simulation(make_scheduler(prefix_caching=False, max_num_batched_tokens=64))
    simulation.add(sequence(1, PREFIX), sequence(2, PREFIX))
    simulation.run()
    assert simulation.computed[1] == simulation.computed[2] == 43
    assert simulation.scheduler.pool.usage().cached == 0


def test_a_prefix_in_use_is_never_evicted() -> None:
    simulation = Simulation(make_scheduler(num_blocks=14, max_num_batched_tokens=64))
    simulation.add(sequence(1, PREFIX, max_tokens=15))
    simulation.step()
    for number in range(2, 12):
        simulation.add(sequence(number, 2, max_tokens=2))
    simulation.run()
    assert len(simulation.ended) == 11


# -- failure ---------------------------------------------------------------------------------------------------------


def test_what_a_failed_sequence_published_in_that_step_is_unpublished_and_recomputed_by_others() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    culprit, dependant, stranger = sequence(1, [*PREFIX, 1]), sequence(2, [*PREFIX, 2]), sequence(3, 5)
    simulation.add(culprit, dependant, stranger)
    batch = simulation.scheduler.schedule()
    assert dependant.num_cached_tokens == 40
    simulation.scheduler.fail(1)
    assert culprit.finish_reason is FinishReason.ERROR
    assert dependant.status is SequenceStatus.PREEMPTED
    assert stranger.status is SequenceStatus.RUNNING
    simulation.scheduler.update(batch, {3: [next_token(stranger)]})
    simulation.slots.update({(b, o): tuple(stranger.token_ids[: o + 1]) for b in range(64) for o in range(4)})
    simulation.check_books()
    batch = simulation.scheduler.schedule()
    assert (2, 32) in [(row.sequence_id, row.num_tokens) for row in batch.rows]


@pytest.mark.parametrize("culprit", [1, 2])
def test_a_failure_does_not_touch_sequences_that_share_committed_blocks_only(culprit: int) -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    simulation.add(sequence(1, [*PREFIX, 1], max_tokens=9))
    simulation.step()
    simulation.add(sequence(2, [*PREFIX, 2], max_tokens=9))
    simulation.fail(lambda running: next(seq for seq in running if seq.sequence_id == culprit))
    simulation.run()
    assert simulation.scheduler.stats().preemptions_total == 0
    assert simulation.ended == {culprit: FinishReason.ERROR, 3 - culprit: FinishReason.LENGTH}
    assert simulation.scheduler.prefix_cache is not None
    assert len(simulation.scheduler.prefix_cache) >= len(PREFIX) // 4


def test_what_a_failed_step_should_have_written_for_a_preempted_sequence_is_not_found_again() -> None:
    simulation = Simulation(make_scheduler(max_num_seqs=1, max_num_batched_tokens=64), overlap=True)
    low = sequence(1, [*PREFIX, 1], priority=Priority.LOW)
    simulation.add(low)
    simulation.step()
    high = sequence(2, 5, priority=Priority.HIGH)
    simulation.add(high)
    simulation.fail(lambda running: next(seq for seq in running if seq is high))
    assert low.status is SequenceStatus.PREEMPTED
    simulation.add(sequence(3, [*PREFIX, 3]))
    simulation.run()
    assert simulation.ended == dict.fromkeys((1, 2, 3), FinishReason.LENGTH), "everything was recomputed"


# -- overlapped steps ------------------------------------------------------------------------------------------------


def test_every_decoding_sequence_is_in_every_overlapped_step() -> None:
    simulation = Simulation(make_scheduler(), overlap=True)
    simulation.add(*(sequence(number, 3, max_tokens=9) for number in range(1, 5)))
    simulation.step()
    for _ in range(8):
        assert simulation.step().sequence_ids == [1, 2, 3, 4]
    simulation.run()


def test_a_sequence_preempted_with_its_token_in_flight_gets_it_and_comes_back_in_a_later_step() -> None:
    simulation = Simulation(make_scheduler(num_blocks=5), overlap=True)
    first, second = sequence(1, 7, max_tokens=9), sequence(2, 7, max_tokens=9)
    simulation.add(first, second)
    while second.status is not SequenceStatus.PREEMPTED:
        batch = simulation.step()
    assert 2 not in batch.sequence_ids
    assert second.num_pending_tokens == 0, "the step before it was preempted has ended since"
    simulation.run()
    assert answer(second) == undisturbed(7, 2, 9)


def test_a_sequence_preempted_with_its_token_in_flight_samples_it_again_if_that_step_fails() -> None:
    preempted = 0
    for steps in range(1, 10):
        simulation = Simulation(make_scheduler(num_blocks=5), overlap=True)
        first, second = sequence(1, 7, max_tokens=9), sequence(2, 7, max_tokens=9)
        simulation.add(first, second)
        for _ in range(steps):
            simulation.step()
        was_running = second.status is SequenceStatus.RUNNING
        simulation.fail(lambda running: next(each for each in running if each.sequence_id == 1))
        preempted += was_running and second.status is SequenceStatus.PREEMPTED
        assert second.num_pending_tokens == 0
        simulation.run()
        assert simulation.ended == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
        assert answer(second) == undisturbed(7, 2, 9)
    assert preempted == 1


def test_after_a_reset_everything_is_computed_again() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    sequences = [sequence(number, PREFIX) for number in (1, 2)]
    simulation.add(*sequences)
    simulation.step()
    simulation.scheduler.reset_cache()
    assert simulation.scheduler.pool.usage().free == 64
    simulation.slots.clear()
    simulation.run()
    assert [answer(s) for s in sequences] == [undisturbed(PREFIX, 1, 4)] * 2


def test_aborted_waiting_sequences_leave_nothing_behind_while_the_batch_is_full() -> None:
    simulation = Simulation(make_scheduler(max_num_seqs=1))
    simulation.add(sequence(1, 4, max_tokens=50))
    simulation.step()
    for number in range(2, 200):
        simulation.add(sequence(number, 4))
        simulation.abort(number)
    assert len(simulation.scheduler.waiting) == 0
    simulation.run()


def test_a_prefix_hit_is_logged_with_its_blocks_and_their_reference_counts(caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=64))
    simulation.add(sequence(1, [*PREFIX, 1], max_tokens=9))
    simulation.step()
    with caplog.at_level("DEBUG"):
        simulation.add(sequence(2, [*PREFIX, 2], max_tokens=9))
        simulation.step()
    assert len(PREFIX) == 40
    assert "sequence 2: prefix_hit=true, 10 blocks (40 tokens), reference counts up to 2" in caplog.text
