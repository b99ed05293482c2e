"""The array of all tables follows every change of a table."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mlxpaged.core.blocks.block_pool import BlockPool
from mlxpaged.core.blocks.block_table import BlockTable
from mlxpaged.core.blocks.prefix_cache import PrefixCache
from mlxpaged.core.blocks.table_rows import TableRows

SIZE = 2  # tokens of a block


class TablesMachine(RuleBasedStateMachine):
    """Tables grow, share, are copied before a write, adopt what others have, and come and go."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool: BlockPool[Any] = BlockPool(4096, SIZE)
        self.cache = PrefixCache(self.pool)
        self.rows = TableRows()
        self.all: list[BlockTable] = []

    @rule(target=tables)
    def start(self) -> BlockTable:
        self.all.append(BlockTable(self.pool, self.rows, self.cache))
        return self.all[-1]

    @rule(table=tables, num_tokens=st.integers(1, 40))
    def grow(self, table: BlockTable, num_tokens: int) -> None:
        table.grow(num_tokens)
        num_tokens = len(table) * SIZE
        keys: list[bytes] = []
        self.cache.extend_keys(keys, range(num_tokens), num_tokens)
        table.publish(range(num_tokens), num_tokens // 2, keys)

    @rule(table=tables, num_tokens=st.integers(1, 40))
    def adopt(self, table: BlockTable, num_tokens: int) -> None:
        """Which may leave it with fewer blocks than the private ones it had."""
        keys: list[bytes] = []
        self.cache.extend_keys(keys, range(num_tokens), num_tokens)
        hit = self.cache.match(keys, range(num_tokens), table.chain)
        if hit:
            table.adopt(hit)

    @rule(target=tables, parent=tables, share=st.floats(0, 1))
    def fork(self, parent: BlockTable, share: float) -> BlockTable:
        fork: Any = self.start()
        fork.fork(parent, int(share * SIZE * len(parent)))
        return fork

    @rule(table=tables, share=st.floats(0, 0.99))
    def write(self, table: BlockTable, share: float) -> None:
        position = int(share * SIZE * len(table))
        if table.is_shared(position):
            table.make_private(position)

    @rule(table=consumes(tables))
    def release(self, table: BlockTable) -> None:
        table.release()
        assert not table.row_numbers
        self.all.remove(table)

    @invariant()
    def rows_equal_the_tables(self) -> None:
        held = [table for table in self.all if table.block_ids]
        rows = [row for table in held for row in table.row_numbers]
        assert len(set(rows)) == len(held)
        width = max((len(table) for table in held), default=0)
        assert self.rows.select(rows).tolist() == [
            table.block_ids + [-1] * (width - len(table.block_ids)) for table in held
        ]


TablesMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestTables = TablesMachine.TestCase


def test_what_was_selected_stays_as_it_was() -> None:
    """A step in flight uses it while the next step is scheduled."""
    rows = TableRows()
    first = rows.take()
    rows.write(first, 0, [3, 4])
    selected = rows.select([first])
    rows.write(first, 1, [5, 6])
    assert selected.tolist() == [[3, 4]]
    assert rows.select([first]).tolist() == [[3, 5, 6]]
