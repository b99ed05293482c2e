"""Models that are unloaded while they are used, and loaded again."""

from __future__ import annotations

import asyncio

from tests.faults.fault import Context, fault, must, refused
from tests.faults.streams import COMPLETIONS, completion
from tests.faults.table import Outcome, judge
from tests.faults.wire import Connection


@fault("the unload of a model in use", 150)
async def in_use(context: Context, i: int) -> Outcome:
    """It runs at least this request, which is left then."""
    connection = await Connection.open(context.server.address)
    await connection.send(context.bytes_of(0, max_tokens=450))
    received = await connection.read_until(b"data:")
    must(b" 200 OK" in received, received)
    unloaded = await context.request("POST", "/v1/models/tiny/unload", key="admin")
    connection.close()
    return refused("", unloaded, 409, code="model_busy")


@fault("the unload of a model that is just asked", 30, parallel=1, seconds=60)
async def while_asked(context: Context, i: int) -> Outcome:
    """It is loaded again, or the unload is refused."""
    _, body = completion([20, 21, 22], 8)
    asked = asyncio.ensure_future(context.post(COMPLETIONS, body | {"model": "second"}))
    await asyncio.sleep(0.01 * (i % 10))
    unloaded = await context.request("POST", "/v1/models/second/unload", key="admin")
    must(unloaded.status in (200, 409), unloaded)
    reply = await asked
    outcome = judge(COMPLETIONS, reply, None, (200, 503))
    await context.request("POST", "/v1/models/second/unload", key="admin")
    return outcome
