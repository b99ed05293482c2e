"""Every fault that was found, injected into a real server while sixteen clients compare their answers."""

from __future__ import annotations

import pytest

from tests.faults import access, costs, engine, processes, requests, unloading  # noqa: F401  (their rows)
from tests.faults.conftest import ROWS, Bench
from tests.faults.fault import FAULTS, Fault, inject_all
from tests.faults.table import Outcome, Row, line

pytestmark = pytest.mark.faults

LOST = (Outcome.HUNG, Outcome.LOST)


BY_SERVER = sorted(FAULTS, key=lambda fault: fault.server)
"""The faults that need the same server one after the other."""


@pytest.mark.parametrize("fault", BY_SERVER, ids=lambda fault: fault.name)
def test_a_fault_ends_no_answer_without_a_reason(
    fault: Fault, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row(fault.name)

    async def run() -> None:
        await inject_all(fault, await bench.context_for(fault), row)

    ROWS.append(row)
    bench.loop.run_until_complete(run())
    with capsys.disabled():
        print(f"\n{line(row)}", *row.problems, sep="\n", end=" ")
    assert not any(counts[outcome] for counts in (row.faulted, row.streams) for outcome in LOST), row.problems
