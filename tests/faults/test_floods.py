"""A flood of one client's new schemas, and how long another client's new schema takes beside it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from tests.faults import floods
from tests.faults.fault import Context, must
from tests.faults.server import FaultyServer
from tests.faults.streams import chat
from tests.faults.test_attacks import FLOOR_SECONDS, MOST_TRIES, RATIO, TRIES

pytestmark = pytest.mark.faults


async def seconds_of_a_new_schema(context: Context) -> float:
    begun = time.monotonic()
    path, body = chat("x", 1, stream=False, structured_outputs={"json": floods.new_schema(40)})
    reply = await context.post(path, body, "other")
    must(reply.status == 200, reply)
    return time.monotonic() - begun


async def flood(context: Context, key: str) -> None:
    while True:
        await floods.ask_new_schemas(context, 1, key)


@pytest.mark.parametrize("keys", [["victim"] * 6, ["victim", "brief", "urgent", "admin", "streams", "victim"]])
def test_a_new_schema_beside_a_flood_of_them_waits_for_few(
    tmp_path: Path, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As in test_attacks.py, the best of several tries counts, and it may take three times as long as alone."""

    async def run() -> tuple[float, float]:
        server = FaultyServer(tmp_path)
        await server.start()
        context = Context(server)
        try:
            alone = min([await seconds_of_a_new_schema(context) for _ in range(TRIES)])
            flooding = [asyncio.ensure_future(flood(context, key)) for key in keys]
            tries: list[float] = []
            await asyncio.sleep(2.0)
            while len(tries) < MOST_TRIES and (not tries or min(tries) > RATIO * max(alone, FLOOR_SECONDS)):
                tries.append(await seconds_of_a_new_schema(context))
                await asyncio.sleep(1.0)  # or it would be a flood too
            assert not any(each.done() for each in flooding), "a client of the flood got an unexpected answer"
            for each in flooding:
                each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*flooding)
            return alone, min(tries)
        finally:
            await server.kill()

    alone, flooded = asyncio.run(run())
    with capsys.disabled():
        print(
            f"\na new schema: {1000 * alone:.0f} ms alone, {1000 * flooded:.0f} ms beside {len(set(keys))} keys",
            end=" ",
        )
    assert flooded <= RATIO * max(alone, FLOOR_SECONDS)
