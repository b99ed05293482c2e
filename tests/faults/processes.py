"""The process: stopped, out of file descriptors, ended by a stall, killed; an engine that dies; a disk that is full."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from typing import Any

from tests.faults.fault import VICTIMS, Context, fault, must, refused
from tests.faults.streams import COMPLETIONS
from tests.faults.table import LostError, Outcome, judge
from tests.faults.wire import Answer, Connection, read_reply, request_bytes


@fault("a process that is stopped", 40, parallel=1)
async def stopped(context: Context, i: int) -> Outcome:
    """Its deadlines do not pass meanwhile."""
    path, body = VICTIMS[i % 4]
    asked = asyncio.ensure_future(context.post(path, body | {"timeout": 2.5}))
    await asyncio.sleep(0.002 * (i % 20))
    context.server.signal(signal.SIGSTOP)
    await asyncio.sleep(4.0 if i % 20 == 0 else 0.1)
    context.server.signal(signal.SIGCONT)
    return judge(path, await asked, context.expected[i % 4])


@fault("a process that is stopped for 40 s", 1, parallel=1, seconds=120)
async def stopped_for_long(context: Context, i: int) -> Outcome:
    """As by a lid that is closed. Requests that run and wait have deadlines meanwhile, a body has come in part, and a
    batch runs."""
    batch_id = await batch_of(context, 30)
    data = context.bytes_of(0, stream=False)
    connection = await Connection.open(context.server.address)
    await connection.send(data[:-5])
    asked = [asyncio.ensure_future(context.post(path, body | {"timeout": 5.0})) for path, body in VICTIMS[:4]]
    await asyncio.sleep(0.05)
    context.server.signal(signal.SIGSTOP)
    await asyncio.sleep(40.0)
    context.server.signal(signal.SIGCONT)
    await connection.send(data[-5:])
    for (path, _), expected, reply in zip(VICTIMS, context.expected, await asyncio.gather(*asked), strict=False):
        judge(path, reply, expected)
    judge(VICTIMS[0][0], read_reply(await connection.read()), context.expected[0])
    connection.close()
    return await batch_result(context, batch_id, 30)


@fault("a wall clock that jumps", 60, parallel=1, seconds=60)
async def wall_clock(context: Context, i: int) -> Outcome:
    """By hours, forward and back. It is for dates only, and for the day in which a batch has to end."""
    path, body = VICTIMS[i % 4]
    asked = asyncio.ensure_future(context.post(path, body | {"timeout": 30}))
    batch_id = await batch_of(context, 3)
    await asyncio.sleep(0.002 * (i % 20))
    await context.server.order(wall=(5 * 3600.0, -9 * 3600.0, 4 * 3600.0)[i % 3])
    judge(path, await asked, context.expected[i % 4])
    for name in ("/v1/models", "/v1/status", "/metrics", "/api/ps"):
        must((await context.request("GET", name, key="admin")).status == 200, name)
    return await batch_result(context, batch_id, 3)


async def batch_of(context: Context, count: int) -> str:
    """Start a batch with some victims' requests. Returns its id."""
    lines = []
    for n in range(count):
        path, body = VICTIMS[n % 3]
        line = {"custom_id": str(n), "method": "POST", "url": path, "body": body | {"stream": False}}
        lines.append(json.dumps(line))
    uploaded = await context.upload("\n".join(lines) + "\n")
    must(uploaded.status == 200, uploaded)
    made = {"input_file_id": uploaded.json["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    batch = await context.post("/v1/batches", made)
    must(batch.status == 200, batch)
    return str(batch.json["id"])


async def batch_result(context: Context, batch_id: str, count: int) -> Outcome:
    """Wait for the end of a batch, and compare its lines with the known answers."""
    while True:
        reply = await context.request("GET", f"/v1/batches/{batch_id}")
        must(reply.status in (200, 503), reply)
        state: dict[str, Any] = reply.json
        if state.get("status") in ("completed", "failed", "expired", "cancelled"):
            break
        await asyncio.sleep(0.1)
    if state["status"] == "failed":
        must(state["errors"]["data"][0]["message"], state)
        return Outcome.REFUSED
    must(state["status"] == "completed" and state["request_counts"]["completed"] == count, state)
    content = await context.request("GET", f"/v1/files/{state['output_file_id']}/content")
    lines = [json.loads(line) for line in content.body.splitlines()]
    must(sorted(int(line["custom_id"]) for line in lines) == list(range(count)), "a line is missing or there twice")
    for line in lines:
        choices = line["response"]["body"]["choices"]
        answer = Answer(tuple(c["text"] for c in choices), tuple(c["finish_reason"] for c in choices))
        must(answer == context.expected[int(line["custom_id"]) % 3], f"wrong answer in a batch: {line}")
    return Outcome.RIGHT


@fault("a full disk under a batch", 40, parallel=1, seconds=60)
async def full_disk(context: Context, i: int) -> Outcome:
    await context.arm(("batch line", "batch record")[i % 2], error="no space", times=1 + i % 3)
    try:
        batch_id = await batch_of(context, 6)
    except LostError:
        path, body = VICTIMS[0]
        await context.disarm(("batch line", "batch record")[i % 2])
        return judge(path, await context.post(path, body), context.expected[0])
    return await batch_result(context, batch_id, 6)


KILLED = (503,)


@fault("a process that is killed", 6, parallel=1, seconds=120, refusals=KILLED, is_cut=True)
async def killed(context: Context, i: int) -> Outcome:
    """Its batch goes on after the restart."""
    batch_id = await batch_of(context, 30)
    await asyncio.sleep(0.1 + 0.15 * i)
    await context.server.restart()
    return await batch_result(context, batch_id, 30)


@fault("an engine that dies", 6, parallel=1, seconds=120, refusals=(500, 503), is_cut=True)
async def dead_engine(context: Context, i: int) -> Outcome:
    """Requests get a 503 with the reason, and the server must be started again."""
    path, body = VICTIMS[0]
    asked = [asyncio.ensure_future(context.post(path, body | {"max_tokens": 60})) for _ in range(4)]
    await asyncio.sleep(0.05)
    await context.arm(("schedule", "turn")[i % 2], error=("RuntimeError", "SystemExit", "MemoryError")[i % 3])
    for reply in await asyncio.gather(*asked):
        judge(path, reply, None, (200, 500, 503))
    for _ in range(100):
        health = await context.request("GET", "/health")
        if health.status == 503:
            break
        await asyncio.sleep(0.05)
    must(health.status == 503 and health.json["status"] == "dead", health)
    outcome = refused(path, await context.post(path, body), 503, code="engine_dead")
    await context.server.restart()
    return outcome


@fault(
    "a stall that ends the process",
    5,
    parallel=1,
    seconds=120,
    flags=("--step-timeout", "2", "--exit-when-stalled"),
    refusals=(503,),
    is_cut=True,
)
async def exit_when_stalled(context: Context, i: int) -> Outcome:
    path, body = VICTIMS[0]
    await context.arm("forward", seconds=30.0)
    while (await context.request("GET", "/health")).status == 200:
        await asyncio.sleep(0.02)
    outcome = refused(path, await context.post(path, body), 503, code="stalled")
    status = await context.server.wait_end()
    must(status == 70, f"ended with {status}")
    await context.server.start(*context.server.flags)
    return outcome


@fault("a server without descriptors", 900, parallel=300, open_files=160, seconds=60, refusals=(503,))
async def few_files(context: Context, i: int) -> Outcome:
    """Three hundred connections at a time, of which it can have half: each gets its answer, or a 503. Most ask for
    what costs little, because all answers of a round must come within a minute."""
    asks = i % 10 == 0
    connection = await Connection.open(context.server.address)
    try:
        await asyncio.sleep(0.5)
        with contextlib.suppress(ConnectionError):
            await connection.send(context.bytes_of(i // 10) if asks else request_bytes("GET", "/health", None, {}))
        reply = read_reply(await connection.read())
    finally:
        connection.close()
    number = i // 10 % len(VICTIMS)
    path, expected = (VICTIMS[number][0], context.expected[number]) if asks else ("/health", None)
    return judge(path, reply, expected, (200, 503))
