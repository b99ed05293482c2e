"""Sequences in the order in which they are served."""

from __future__ import annotations

import pytest

from mlxpaged.scheduler.queue import SequenceQueue
from tests.scheduler.simulation import sequence


def test_removing_a_sequence_that_is_not_in_the_queue_raises() -> None:
    queue = SequenceQueue()
    first, second, stranger = (sequence(number, 1) for number in range(3))
    for number, seq in enumerate((first, stranger, second)):
        seq.order = (0.0, number)
    queue.add(second)
    queue.add(first)
    with pytest.raises(ValueError, match="not in this queue"):
        queue.remove(stranger)
    queue.remove(first)
    with pytest.raises(ValueError, match="not in this queue"):
        queue.remove(first)
    assert list(queue) == [second]
