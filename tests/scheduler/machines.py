"""Machines whose steps take known times, and a scheduler that hears of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from mlxpaged.core.scheduling.row_tiles import RowTiles
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.scheduling.step_cost import Costs
from mlxpaged.core.step import Step
from tests.scheduler.simulation import commit, make_scheduler, sequence

SLOW_CPU = Costs(0.05, 0.002, 1e-6, 0.002, 8e-7)
"""An 80 M model on two cores."""


FAST_GPU = Costs(0.01, 1e-4, 1e-8, 0.0012, 1e-8)


MACHINES = pytest.mark.parametrize("machine", [SLOW_CPU, FAST_GPU], ids=["slow CPU", "fast GPU"])


class TimedScheduler:
    """Every step takes what the machine's costs say, and the scheduler hears of it."""

    def __init__(self, machine: Costs, **options: Any) -> None:
        settings: dict[str, Any] = {
            "num_blocks": 4000,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 8192,
            "decode_preference": 0.0,
        }
        self.scheduler = make_scheduler(**(settings | options))
        self.machine = machine
        self.last = Step(())

    def seconds(self, contexts: list[int], chunks: list[tuple[int, int]]) -> float:
        return self.machine.step_seconds(contexts, chunks)

    def add(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.scheduler.add(one)

    def step(self) -> float:
        self.last = self.scheduler.schedule()
        contexts = [row.context_len for row in self.last.rows if row.num_tokens == 1]
        chunks = [(row.start, row.num_tokens) for row in self.last.rows if row.num_tokens > 1]
        seconds = self.seconds(contexts, chunks)
        tokens = {row.sequence_id: 1 for row in self.last.rows if row.samples}
        self.scheduler.times.observe(self.last, seconds)
        commit(self.scheduler, self.last, tokens)
        return seconds


QUANTIZED, MIXTURE = RowTiles(32), RowTiles(32, 128)


def rows_of_a_gpu(rows: int) -> float:
    """Reads the weights again for each of the first rows, and computes more of them in tiles of 32."""
    return 0.01 * rows if rows <= 6 else 0.06 * -(-rows // 32)


def with_streams(
    machine: Costs, count: int = 8, timed_rows: Mapping[int, float] = MappingProxyType({}), **options: Any
) -> TimedScheduler:
    """Streams decode, and the machine is known. timed_rows: seconds by rows, measured before."""
    timed = TimedScheduler(machine, **options)
    timed.scheduler.times.learn_rows(timed_rows)
    timed.add(*(sequence(number, 20 + 10 * number, max_tokens=5000) for number in range(count)))
    for number in range(100, 104):
        for _ in range(4):
            timed.step()
        timed.add(sequence(number, 50 * (number - 97), max_tokens=4))
    while timed.scheduler.waiting or len(timed.scheduler.running) > count:
        timed.step()
    return timed
