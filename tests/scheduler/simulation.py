"""A model-free engine around a scheduler: tokens are made up, everything else is the real thing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from mlxpaged.core.blocks.block_pool import BlockPool
from mlxpaged.core.scheduling import scheduler as scheduler_module
from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.core.scheduling.queue import ORDER
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import PENDING, FinishReason, Priority, Sequence, SequenceStatus
from mlxpaged.core.scheduling.shut_out import SHUT_OUT_BOUND
from mlxpaged.core.step import BlockMoves, Row, Step

PREEMPTOR = 999_999


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(
    num_blocks: int = 64, block_size: int = 4, clock: Callable[[], float] | None = None, **options: Any
) -> Scheduler:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 16, **options}
    config = SchedulerConfig(num_blocks=num_blocks, block_size=block_size, **settings)
    return Scheduler(config, FakeClock() if clock is None else clock)


def sequence(
    number: int,
    prompt: int | list[int],
    max_tokens: int = 4,
    stop: int | None = None,
    priority: Priority = Priority.NORMAL,
    arrival_time: float = 0.0,
    fork_of: Sequence | None = None,
    ttft_deadline: float = math.inf,
    deadline: float = math.inf,
    logprobs: bool = False,
    client: str = "",
) -> Sequence:
    """A prompt given by its length consists of tokens that no other sequence has. logprobs: those of the prompt."""
    tokens = [number * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    stop_ids = frozenset() if stop is None else frozenset({stop})
    seq = Sequence(number, tokens, max_tokens, stop_ids, priority, arrival_time)
    seq.client, seq.fork_of = client, fork_of
    seq.ttft_deadline, seq.deadline = ttft_deadline, deadline
    seq.logits_from = 0 if logprobs and len(tokens) > 1 else None
    return seq


def answer(seq: Sequence) -> list[int]:
    return seq.token_ids[seq.num_prompt_tokens :]


def undisturbed(prompt: int | list[int], number: int, max_tokens: int) -> list[int]:
    """The answer of a sequence that has the whole pool to itself."""
    seq = sequence(number, prompt, max_tokens)
    while seq.num_output_tokens < max_tokens:
        seq.token_ids.append(next_token(seq))
    return answer(seq)


def next_token(seq: Sequence) -> int:
    """Depends on the tokens so far and on nothing else, as a greedy model's answer does."""
    return token_after(seq.token_ids[: seq.num_known_tokens])


def token_after(token_ids: list[int]) -> int:
    return hash(tuple(token_ids)) % 997


def sequences_of(scheduler: Scheduler, rows: Iterable[Row]) -> list[Sequence]:
    """Those that have not ended."""
    return [scheduler.sequences[row.sequence_id] for row in rows if row.sequence_id in scheduler.sequences]


def commit(scheduler: Scheduler, batch: Step, tokens: dict[int, int]) -> list[Sequence]:
    """Update the scheduler, and finish the sequences whose answers these tokens end, as the engine does. Returns
    them."""
    scheduler.update(batch, {sequence_id: [token] for sequence_id, token in tokens.items()})
    sampled = sequences_of(scheduler, (row for row in batch.rows if row.samples))
    ends = [
        (seq, seq.finish_reason_after(tokens[seq.sequence_id], seq.num_output_tokens))
        for seq in sampled
        if seq.sequence_id in tokens
    ]
    return [scheduler.finish(seq.sequence_id, reason) for seq, reason in ends if reason is not None]


class Simulation:
    """Keeps what a KV pool would contain, so that reading a wrong or unwritten block is noticed.

    overlap: a step's tokens are read after the next step has been scheduled and run. growth_steps: steps that pass
    until the pool has grown.
    """

    def __init__(self, scheduler: Scheduler, overlap: bool = False, growth_steps: int = 0) -> None:
        self.scheduler = scheduler
        self.overlap = overlap
        self.growth_steps = growth_steps
        self.growing_since = 0
        self.num_growths = self.num_shrinks = 0
        self.in_flight: Step | None = None
        self.added: list[Sequence] = []
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> group, tokens up to this one
        self.swapped: dict[tuple[int, int], tuple[int, ...]] = {}  # (swap slot, offset) -> the same
        self.places: dict[int, list[tuple[int, int]]] = {}  # by the id of a row: (block, offset) that it wrote
        self.sampled: dict[tuple[int, int], int] = {}  # (sequence, position) -> token, on the device
        self.ended: dict[int, FinishReason] = {}
        self.computed: Counter[int] = Counter()
        self.logprobs: dict[int, list[int]] = {}  # by sequence, the positions that are known, in order
        self.batches: list[list[tuple[int, int]]] = []

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.scheduler.add(seq)
            self.added.append(seq)

    @property
    def unfinished(self) -> list[Sequence]:
        return [seq for seq in self.added if seq.status is not SequenceStatus.FINISHED]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished() or self.in_flight is not None

    def step(self) -> Step:
        self.grow()
        batch, due = self.schedule()
        self.move(batch.moves)
        self.compute(batch.rows)
        self.batches.append([(row.sequence_id, row.num_tokens) for row in batch.rows])
        for each in due:
            self.update(each)
        return batch

    def grow(self) -> None:
        """Give the scheduler the blocks that it has asked for, after some steps."""
        size = self.scheduler.blocks.size
        wanted = size.wanted
        self.growing_since += wanted > size.num_blocks
        if self.growing_since > self.growth_steps and wanted > size.num_blocks:
            assert wanted <= size.limit
            size.grow(wanted)
            self.growing_since = 0
            self.num_growths += 1
            self.check_books()

    def shrink(self, num_blocks: int) -> None:
        """As the engine does: after the step in flight, and with the blocks copied before the tables change."""
        if self.in_flight is not None:
            self.update(self.in_flight)
            self.in_flight = None
        pool = self.scheduler.pool
        usage = pool.usage()
        num_blocks = min(pool.num_blocks, max(1, num_blocks, usage.used))
        moves = pool.moves_to(num_blocks)
        assert not moves or min(moves) >= num_blocks > max(moves.values())
        self.move(BlockMoves(copies=tuple(moves.items())))
        self.slots = {place: kept for place, kept in self.slots.items() if place[0] < num_blocks}
        self.scheduler.shrink(num_blocks, moves)
        assert pool.num_blocks == num_blocks
        assert pool.usage().used == usage.used
        if self.scheduler.blocks.groups.keeps_all:  # an evicted block of a window may take others with it
            assert pool.usage().cached == min(usage.cached, num_blocks - usage.used)
        self.num_shrinks += 1
        self.check_books()

    def schedule(self) -> tuple[Step, list[Step]]:
        """The next batch, and those whose tokens are read once it runs."""
        known = self.unfinished
        preemptions = {seq.sequence_id: seq.num_preemptions for seq in known}
        orders = {seq.sequence_id: seq.order for seq in known}
        bound, shut_out = scheduler_module.STARVATION_BOUND, SHUT_OUT_BOUND
        starving = [seq for seq in known if seq.skipped_steps >= bound or seq.steps_shut_out >= shut_out]
        was_running = set(self.scheduler.running)
        batch, before = self.scheduler.schedule(), self.in_flight
        served = sequences_of(self.scheduler, batch.rows)
        self.check_rows(batch.rows)
        for seq in served:
            assert seq.num_preemptions == preemptions[seq.sequence_id], "it was preempted in this step"
        gainers = served + [seq for seq in self.scheduler.running if seq not in was_running]
        for seq in known:
            if seq.num_preemptions > preemptions[seq.sequence_id]:
                gained = any(other.order < orders[seq.sequence_id] or other in starving for other in gainers)
                outgrown = not self.scheduler.blocks.can_hold(seq)
                assert gained or outgrown, f"{seq} was preempted, but no earlier or starving sequence ran instead"
        assert batch.num_tokens <= self.scheduler.config.max_num_batched_tokens
        for row in batch.rows:
            spans = self.scheduler.sequences[row.sequence_id].spans
            assert not any(start < row.context_len < end for start, end in spans), "an image is cut"
            several = [span for span in spans if len({*range(*span)} & {*range(row.start, row.context_len)}) > 1]
            assert list(row.spans) == several
        assert sum(len(row.prompt_logprobs) for row in batch.rows) <= self.scheduler.config.max_prompt_logits
        assert len({seq.sequence_id for seq in served}) == len(served)
        self.check_books()
        may_wait = self.scheduler.pool.num_blocks < self.scheduler.config.num_blocks
        assert batch.rows or before is not None or may_wait, "nothing was scheduled while sequences wait"
        if not self.overlap:
            return batch, [batch]
        self.in_flight = batch if batch.rows else None
        return batch, [] if before is None else [before]

    def fail(self, choose: Callable[[list[Sequence]], Sequence] | None) -> None:
        """The steps in flight fail because of one sequence, or (choose: None) with the loss of everything in the pools.
        They are run again as EngineCore does."""
        batch, due = self.schedule()
        self.move(batch.moves)
        self.compute(batch.rows)
        failed = [*due, batch] if self.overlap else due
        if choose is not None and self.overlap and not self.scheduler.blocks.groups.keeps_all:
            for each in due:  # an earlier step is not run again: the blocks that left a window are gone
                self.update(each)
            failed = [batch]
        self.in_flight = None
        rows = [row for each in failed for row in each.rows]
        for row in rows:
            self.forget(row)
        concerned = sequences_of(self.scheduler, rows)
        running = [seq for seq in concerned if seq.status is SequenceStatus.RUNNING]
        culprit = None
        if choose is None:
            for seq in dict.fromkeys(concerned):
                self.end_failed(seq)
            self.scheduler.reset_cache()
            self.slots.clear()
        else:
            culprit = choose(running) if running else None
            if len(running) < len(rows):
                self.scheduler.reset_cache()
        for seq in sequences_of(self.scheduler, rows):
            if seq.status in (SequenceStatus.PREEMPTED, SequenceStatus.SWAPPED):
                self.scheduler.recompute(seq)
        for each in failed:
            for row in each.rows:
                if culprit and row.sequence_id == culprit.sequence_id and culprit.status is SequenceStatus.RUNNING:
                    self.end_failed(culprit)
            self.run_again(each)

    def end_failed(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self.scheduler.fail(seq.sequence_id)
        else:
            self.scheduler.finish(seq.sequence_id, FinishReason.ERROR)
        self.note_end(seq)

    def run_again(self, batch: Step) -> None:
        alive = self.scheduler.running_rows(batch.rows)
        self.compute(alive)
        self.update(batch, alive)

    def fail_to_move(self, num_done: int) -> None:
        """The moves of a step fail after the first few. It runs without the sequences that need them."""
        batch, due = self.schedule()
        moves, done = batch.moves, num_done
        if not moves:
            self.move(moves)
            self.compute(batch.rows)
        else:
            kinds = []
            for kind in (moves.swap_out, moves.copies, moves.swap_in):
                kinds.append(tuple(kind[:done]))
                done -= len(kinds[-1])
            self.move(BlockMoves(*kinds))
            self.scheduler.undo_moves(batch)
            self.check_books()
            self.in_flight = None
        if not moves or not self.overlap:
            for each in due:
                self.run_again(each) if moves else self.update(each)
            return
        for each in due:
            self.update(each)
        self.run_again(batch)

    def forget(self, row: Row) -> None:
        """A step wrote nothing, or nothing right, into the blocks that the sequence had then."""
        for place in self.places.pop(id(row)):
            self.slots.pop(place, None)
        self.sampled.pop((row.sequence_id, row.context_len), None)

    def move(self, moves: BlockMoves) -> None:
        """In the order of BlockMoves. Blocks move as they are, also if parts were never written."""
        size = self.scheduler.config.block_size
        read, written = {slot for slot, _ in moves.swap_in}, {slot for _, slot in moves.swap_out}
        assert read.isdisjoint(written), "a step writes a slot that it reads"
        for kind, source, target in (
            (moves.swap_out, self.slots, self.swapped),
            (moves.copies, self.slots, self.slots),
            (moves.swap_in, self.swapped, self.slots),
        ):
            assert len({to for _, to in kind}) == len(kind), "moved twice to one place"
            held = {(to, o): source[at, o] for at, to in kind for o in range(size) if (at, o) in source}
            for _, to in kind:
                for offset in range(size):
                    target.pop((to, offset), None)
            target.update(held)

    def compute(self, rows: Iterable[Row]) -> None:
        """What the device does: write, read, sample. Only the device knows the tokens that it sampled before."""
        size, groups = self.scheduler.config.block_size, self.scheduler.config.groups
        contexts = []
        written: set[tuple[int, int]] = set()
        for row in rows:
            seq = self.scheduler.sequences[row.sequence_id]
            assert row.tables is not None
            tokens = [
                self.sampled[seq.sequence_id, position] if token == PENDING else token
                for position, token in enumerate(seq.token_ids[: row.context_len])
            ]
            places_of_row = self.places[id(row)] = []
            for group, (ids, window) in enumerate(zip(row.tables.tolist(), groups.windows, strict=True)):
                places = [(ids[p // size], p % size) for p in range(row.context_len)]
                places_of_row += places[row.start :]
                for position in range(row.start, row.context_len):
                    assert places[position] not in written, "two sequences write to one place"
                    written.add(places[position])
                    self.slots[places[position]] = (group, *tokens[: position + 1])
                first = 0 if window is None else max(0, row.start - window + 1)
                contexts.append((row, tokens, group, list(enumerate(places))[first:]))
        for row, tokens, group, seen in contexts:
            for position, place in seen:
                assert self.slots[place] == (group, *tokens[: position + 1]), f"{row} reads foreign KV"
        for row, tokens in {id(row): (row, tokens) for row, tokens, _, _ in contexts}.values():
            self.computed[row.sequence_id] += row.num_tokens
            if row.samples:
                self.sampled[row.sequence_id, row.context_len] = token_after(tokens)

    def update(self, batch: Step, rows: Iterable[Row] | None = None) -> None:
        tokens = {
            row.sequence_id: self.sampled[row.sequence_id, row.context_len]
            for row in (batch.rows if rows is None else rows)
            if row.samples
        }
        sequences = self.scheduler.sequences
        live = [row for row in (batch.rows if rows is None else rows) if row.sequence_id in sequences]
        for row in live:
            self.read_logprobs(sequences[row.sequence_id], row.prompt_logprobs)
        complete = [row.sequence_id for row in live if sequences[row.sequence_id].ends_after(row)]
        ended = commit(self.scheduler, batch, tokens)
        ended += [self.scheduler.finish(sequence_id, FinishReason.LENGTH) for sequence_id in complete]
        for seq in ended:
            self.note_end(seq)
        self.check_books()

    def read_logprobs(self, seq: Sequence, positions: range) -> None:
        """The log-probabilities of these prompt tokens are known, as in the engine."""
        if positions:
            self.logprobs.setdefault(seq.sequence_id, []).extend(positions)
            seq.logits_from = None if positions.stop == seq.num_prompt_tokens else positions.stop - 1

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def preempt_all(self) -> None:
        """A HIGH sequence takes the whole pool for one step."""
        config = self.scheduler.config
        tokens = (config.num_blocks - 1) * config.block_size
        self.add(sequence(PREEMPTOR, tokens, max_tokens=2, priority=Priority.HIGH, arrival_time=-1e6))
        self.step()
        assert [seq.sequence_id for seq in self.scheduler.running] == [PREEMPTOR]
        self.abort(PREEMPTOR)

    def abort(self, sequence_id: int) -> None:
        self.note_end(self.scheduler.finish(sequence_id, FinishReason.ABORT))
        self.check_books()

    def note_end(self, seq: Sequence) -> None:
        assert seq.sequence_id not in self.ended, f"{seq} ended twice"
        assert seq.finish_reason is not None
        self.ended[seq.sequence_id] = seq.finish_reason

    def check_rows(self, rows: Iterable[Row]) -> None:
        """A row has the tokens of its sequence and its block tables, padded to the longest of the step."""
        held = [(row, self.scheduler.sequences[row.sequence_id]) for row in rows]
        width = max((len(seq.kv.table.ids[0]) for _, seq in held if seq.kv.table), default=0)
        for row, seq in held:
            assert seq.kv.table is not None
            assert row.tables is not None
            assert row.tables.tolist() == [[*ids, *[-1] * (width - len(ids))] for ids in seq.kv.table.ids]
            assert row.token_ids == seq.token_ids[row.start : row.context_len]
            assert set(row.logits) <= set(range(row.start, row.context_len))

    def check_books(self) -> None:
        """Blocks add up, reference counts equal the tables that hold them, and no sequence is in two queues."""
        pool = self.scheduler.pool
        usage = pool.usage()
        assert usage.used + usage.cached + usage.free == pool.num_blocks
        holders: Counter[int] = Counter()
        slots: Counter[int] = Counter()
        unfinished = self.unfinished
        for seq in unfinished:
            assert seq.num_pending_tokens == seq.token_ids.count(PENDING) <= 1 + self.overlap
            assert (seq.kv.table is not None) == (seq.status is SequenceStatus.RUNNING)
            assert seq.kv.table is not None or seq.num_computed_tokens == 0
            assert bool(seq.kv.swap_slots) == (seq.status is SequenceStatus.SWAPPED) == (seq.kv.num_swapped_tokens > 0)
            slots.update(seq.kv.swap_slots)
            if seq.kv.table is not None:
                holders.update(seq.kv.table.block_ids)
        running = [s for s in unfinished if s.status is SequenceStatus.RUNNING]
        assert counts_agree(pool, holders)
        assert pool.shared(range(pool.num_blocks)) == {block for block, count in holders.items() if count > 1}
        for block in range(pool.num_blocks):
            content = pool.content(block)
            assert content is None or content.record.blocks[content.group] == block, "a record names another block"
        waiting = list(self.scheduler.waiting)
        for seq in waiting:
            if seq.fork_of is None:
                lookup, least = seq.kv.last_lookup, self.scheduler.blocks.least_room_for(seq)
                room = self.scheduler.blocks.room_for(seq, self.scheduler.blocks.find(seq))
                assert least <= room, f"{seq} would be refused in error"
                seq.kv.last_lookup = lookup
        swap = self.scheduler.blocks.swap
        assert max(slots.values(), default=0) <= 1
        assert counts_agree(swap, slots)
        assert len(running) <= self.scheduler.config.max_num_seqs
        assert sorted(running, key=ORDER) == list(self.scheduler.running)
        assert sorted(waiting, key=ORDER) == waiting
        for seq in unfinished:
            waits_for_parent = seq not in running and seq not in waiting
            if waits_for_parent:
                assert seq.fork_of is not None
                assert seq.fork_of in unfinished
                assert seq.fork_of.num_output_tokens == 0
            assert (seq in running) + (seq in waiting) + waits_for_parent == 1


def counts_agree(pool: BlockPool[Any], holders: Counter[int]) -> bool:
    """Whether each block has as many references as holders. Called so often that generators are too slow."""
    blocks = range(pool.num_blocks)
    return [*map(pool.ref_count, blocks)] == [holders.get(block, 0) for block in blocks]
