"""What is kept of log-probabilities until an answer is complete, and how it is rendered then."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from types import SimpleNamespace

import pytest

from mlxpaged.api import answer_thread
from mlxpaged.api.answer_thread import AnswerThread, give_way
from mlxpaged.api.generation.logprob_table import LogprobTable
from mlxpaged.core.engine.logprobs import TokenLogprobs


def tokens(count: int, top: int) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(i, -0.1 * i, tuple((i + k, -1.5 * k if k else -math.inf) for k in range(top)))
        for i in range(count)
    ]


def test_a_table_has_what_was_added() -> None:
    for top in (0, 1, 20):
        table, given = LogprobTable(), tokens(9, top)
        parts = [table.add(given[:1]), table.add(given[1:2]), table.add(()), table.add(given[2:])]
        assert [list(part) for part in parts] == [given[:1], given[1:2], [], given[2:]]
        assert list(table) == given
        assert (table[-1], list(table[2:5]), list(parts[3][1:3])) == (given[-1], given[2:5], given[3:5])
        assert table.total == sum(token.logprob for token in given)


def test_a_table_keeps_no_object_for_each_token() -> None:
    """The garbage collector stops all threads, and looks at each object."""
    table = LogprobTable()
    table.add(tokens(1000, 20))
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, TokenLogprobs)]
    assert len(list(table)) == 1000


def test_the_thread_of_large_answers_rests_and_no_other_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    clock = SimpleNamespace(sleep=rests.append, perf_counter=time.perf_counter)
    monkeypatch.setattr(answer_thread, "time", clock)
    monkeypatch.setattr(answer_thread, "WORK_SECONDS", -1.0)
    give_way()
    assert rests == []
    thread = AnswerThread()
    asyncio.run(thread.run(lambda: [give_way() for _ in range(3)]))
    thread.close()
    assert len(rests) == 3
    give_way()
    assert len(rests) == 3
