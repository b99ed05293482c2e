"""A model-free engine around a scheduler: tokens are made up, everything else is the real thing."""

from __future__ import annotations

from collections import Counter

from mlxpaged.scheduler import Batch, FinishReason, Scheduler, SchedulerConfig, Sequence, SequenceStatus


def make_scheduler(num_blocks: int = 64, block_size: int = 4, **options: int | bool) -> Scheduler:
    settings: dict[str, int | bool] = {"max_num_seqs": 8, "max_num_batched_tokens": 16} | options
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, block_size=block_size, **settings))  # type: ignore[arg-type]


def sequence(number: int, prompt: int | list[int], max_tokens: int = 4, stop: int | None = None) -> Sequence:
    """A prompt given by its length consists of tokens that no other sequence has."""
    tokens = [number * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence(number, tokens, max_tokens, frozenset() if stop is None else frozenset({stop}))


def unfinished(scheduler: Scheduler) -> list[Sequence]:
    return list(scheduler._sequences.values())


def answer(seq: Sequence) -> list[int]:
    return seq.token_ids[seq.num_prompt_tokens :]


def next_token(seq: Sequence) -> int:
    """Depends on the tokens so far and on nothing else, as a greedy model's answer does."""
    return hash(tuple(seq.token_ids)) % 997


class Simulation:
    """Keeps what a KV pool would hold, so that a wrong or unwritten block is noticed when it is read."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> the tokens up to this one
        self.ended: dict[int, FinishReason] = {}
        self.computed: Counter[int] = Counter()
        self.batches: list[list[tuple[int, int]]] = []

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.scheduler.add(seq)

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        self.check_books()
        tables = self.scheduler.get_block_tables(batch.sequence_ids)
        size = self.scheduler.config.block_size
        for row in batch.rows:
            table = tables[row.sequence.sequence_id]
            for position in range(row.start, row.context_len):
                self.slots[table[position // size], position % size] = tuple(row.sequence.token_ids[: position + 1])
        for row in batch.rows:
            table = tables[row.sequence.sequence_id]
            for position in range(row.context_len):
                held = self.slots[table[position // size], position % size]
                assert held == tuple(row.sequence.token_ids[: position + 1]), f"{row.sequence} reads foreign KV"
            self.computed[row.sequence.sequence_id] += row.num_tokens
        self.batches.append([(row.sequence.sequence_id, row.num_tokens) for row in batch.rows])
        tokens = {row.sequence.sequence_id: next_token(row.sequence) for row in batch.rows if row.samples}
        for seq in self.scheduler.update(batch, tokens):
            self.note_end(seq)
        self.check_books()
        return batch

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                return
            assert self.step().rows, "nothing was scheduled while sequences wait"
        raise AssertionError(f"not done after {max_steps} steps")

    def abort(self, sequence_id: int) -> None:
        self.note_end(self.scheduler.finish(sequence_id, FinishReason.ABORT))
        self.check_books()

    def note_end(self, seq: Sequence) -> None:
        assert seq.sequence_id not in self.ended, f"{seq} ended twice"
        assert seq.finish_reason is not None
        self.ended[seq.sequence_id] = seq.finish_reason

    def check_books(self) -> None:
        """Blocks add up, reference counts equal the tables that hold them, and nobody writes into a shared block."""
        pool = self.scheduler.pool
        usage = pool.usage()
        assert usage.used + usage.cached + usage.free == pool.num_blocks
        holders: Counter[int] = Counter()
        for seq in unfinished(self.scheduler):
            assert (seq.block_table is not None) == (seq.status is SequenceStatus.RUNNING)
            assert seq.block_table is not None or seq.num_computed_tokens == 0
            if seq.block_table is not None:
                holders.update(seq.block_table.block_ids)
                partial = seq.block_table.block_ids[seq.num_computed_tokens // pool.block_size :]
                assert all(pool.ref_count(block) == 1 for block in partial)
        assert all(pool.ref_count(block) == holders[block] for block in range(pool.num_blocks))
        running = [s for s in unfinished(self.scheduler) if s.status is SequenceStatus.RUNNING]
        assert len(running) <= self.scheduler.config.max_num_seqs
