"""A flood of one client, and how many of its requests are answered before that of another client, which comes later and
has to pass through the same queue. In the order in which they come, all that wait would be."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fault import Context
from tests.faults.floods import FLOODS, Flood, make_models
from tests.faults.server import FaultyServer

pytestmark = pytest.mark.faults

TRIES = 10
"""The least count is that of what the server does. What the clients do on busy cores is in others."""
KEYS = {"one key": ["victim"], "four keys": ["victim", "brief", "admin", "streams"]}
"""All of one tier: requests of a higher one would go first."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    server = FaultyServer(tmp_path_factory.mktemp("floods"))
    make_models(server)
    asyncio.run(server.start())
    yield server
    asyncio.run(server.kill())


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.name)
def test_few_requests_of_a_flood_come_before_that_of_another_client(
    server: FaultyServer, flood: Flood, keys: str, capsys: pytest.CaptureFixture[str]
) -> None:
    num_answered = 0
    names = itertools.cycle(KEYS[keys])

    async def go_on(context: Context, key: str) -> None:
        nonlocal num_answered
        while True:
            await flood.asked(context, key)
            num_answered += 1

    async def run() -> list[int]:
        context = Context(server)
        await flood.begin(context)
        await flood.is_answered(context)
        running = [asyncio.ensure_future(go_on(context, next(names))) for _ in range(flood.clients)]
        counts: list[int] = []
        while len(counts) < TRIES and (not counts or min(counts) > flood.at_most):
            before = num_answered
            while num_answered < before + flood.clients:  # all have been in the queue, and are again
                for each in running:
                    if each.done():
                        each.result()  # raises what was wrong with an answer
                await asyncio.sleep(0.05)
            before = num_answered
            await flood.is_answered(context)
            counts.append(num_answered - before)
        for each in running:
            each.cancel()
        for end in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(end, Exception):  # other than that it was cancelled
                raise end
        return counts

    counts = asyncio.run(run())
    with capsys.disabled():
        print(f"\n{flood.name}: {counts} of {flood.clients}", end=" ")
    assert min(counts) <= flood.at_most


def test_the_server_is_well_after_all_floods(server: FaultyServer, tmp_path: Path) -> None:
    async def run() -> None:
        context = Context(server)
        for flood in FLOODS:
            await flood.is_answered(context)
        await context.end()
        assert (await context.request("GET", "/health")).json["status"] == "ok"

    asyncio.run(run())
    assert "Traceback" not in server.log.read_text(errors="replace")
