"""Clients that are shut out: they have waiting sequences and none that runs, while those of others run."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListOf

from mlxpaged.core.scheduling.queue import SequenceQueue, WaitingQueue
from mlxpaged.core.scheduling.sequence import Sequence

SHUT_OUT_BOUND = 4
"""After this many steps, the first waiting sequence of a client that is shut out may preempt those of clients that have
several. Blocks that become free in these steps cost nothing."""


class ShutOut:
    """first: the first waiting sequence of each client that is shut out, in this step. sequences: all unfinished ones,
    by id."""

    def __init__(self, running: SequenceQueue, waiting: WaitingQueue, sequences: Mapping[int, Sequence]) -> None:
        self._running = running
        self._waiting = waiting
        self._sequences = sequences
        self.first: ListOf[Sequence] = ()

    def find(self) -> None:
        """A step begins: it counts for those that it finds. If nothing runs now, they are those that were shut out: the
        end of the last one is their turn. None is while sequences of a failed step are to run again: they would be in
        the next one that fails."""
        running = {sequence.client for sequence in self._running}
        others = self._waiting.first_of_others(running)
        if others and any(sequence.num_step_failures for sequence in self._sequences.values()):
            others = []
        for sequence in others if running else ():
            sequence.steps_shut_out += 1
        self.first = [sequence for sequence in others if sequence.steps_shut_out]

    @property
    def overdue(self) -> list[Sequence]:
        """Those that may preempt others."""
        return [sequence for sequence in self.first if sequence.steps_shut_out > SHUT_OUT_BOUND]
