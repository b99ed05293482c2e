"""Models that are unloaded while they are used, and loaded again."""

from __future__ import annotations

import asyncio

from tests.faults.fault import Context, fault, must, refused
from tests.faults.streams import COMPLETIONS, completion
from tests.faults.table import Outcome, judge


@fault("the unload of a model in use", 150)
async def in_use(context: Context, i: int) -> Outcome:
    return refused("", await context.request("POST", "/v1/models/tiny/unload", key="admin"), 409, code="model_busy")


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
