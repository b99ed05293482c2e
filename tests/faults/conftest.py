"""The server of the faults, and the table at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.faults.fault import Context, Fault
from tests.faults.server import FaultyServer
from tests.faults.table import HEAD, Row, line, total

ROWS: list[Row] = []


class Bench:
    """The server with its streams, on an event loop that runs while a fault is injected. A fault that needs other flags
    than the one before gets a server of its own."""

    def __init__(self, server: FaultyServer) -> None:
        self.loop = asyncio.new_event_loop()
        self.server = server
        self.context: Context | None = None
        self._serves: object = None

    async def context_for(self, fault: Fault) -> Context:
        if self.context is None or self._serves != fault.server:
            await self.end()
            await self.server.start(*fault.flags, open_files=fault.open_files)
            self.context, self._serves = Context(self.server), fault.server
            await self.context.begin()
        return self.context

    async def end(self) -> None:
        context, self.context = self.context, None
        try:
            if context is not None:
                await context.end()
        finally:
            await self.server.kill()


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(FaultyServer(tmp_path_factory.mktemp("faults")))
    yield bench
    bench.loop.run_until_complete(bench.end())
    bench.loop.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("faults")
        for text in (HEAD, *map(line, [*ROWS, total(ROWS)])):
            terminalreporter.write_line(text)
