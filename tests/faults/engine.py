"""Steps that fail, are slow, or meet a device, a disk or a grammar that fails; deadlines, cancels and preemption."""

from __future__ import annotations

import asyncio
import time

from tests.faults.fault import VICTIMS, Context, fault, must, refused
from tests.faults.streams import completion
from tests.faults.table import LostError, Outcome, judge
from tests.faults.wire import Answer, answer_of

FAILED = (500, 503)
"""Of a step that fails again and again. The streams may be in it too."""


@fault("a forward pass that raises once", 400)
async def forward_once(context: Context, i: int) -> Outcome:
    request_id = context.new_id()
    await context.arm("forward", error="RuntimeError", prefix=request_id)
    return await context.ask(i, (200, *FAILED), X_Request_Id=request_id)


@fault("a forward pass that always raises", 200)
async def forward_always(context: Context, i: int) -> Outcome:
    request_id = context.new_id()
    await context.arm("forward", times=10**9, error="RuntimeError", prefix=request_id)
    path, body = VICTIMS[i % len(VICTIMS)]
    reply = await context.post(path, body | {"stream": bool(i % 2)}, X_Request_Id=request_id)
    await context.disarm("forward", request_id)
    outcome = judge(path, reply, context.expected[i % len(VICTIMS)], (200, *FAILED))
    must(outcome is Outcome.REFUSED, f"an answer in spite of the fault: {reply}")
    return outcome


@fault("a forward pass without memory", 300, refusals=FAILED)
async def forward_memory(context: Context, i: int) -> Outcome:
    message = "[malloc] Unable to allocate 1073741824 bytes."
    await context.arm("forward", error=("MemoryError", "RuntimeError")[i % 2], message=message, times=1 + i % 3)
    return await context.ask(i, (200, *FAILED))


@fault("an evaluation without memory", 100, parallel=1, refusals=FAILED)
async def eval_memory(context: Context, i: int) -> Outcome:
    await context.arm("eval", error="RuntimeError", message="[malloc] Unable to allocate 1073741824 bytes.")
    return await context.ask(i, (200, *FAILED))


@fault("a sampler that raises", 300, refusals=FAILED)
async def sampler(context: Context, i: int) -> Outcome:
    await context.arm("sample", error=("RuntimeError", "MemoryError")[i % 2])
    return await context.ask(i, (200, *FAILED))


@fault("a device that fails", 100, parallel=1)
async def device(context: Context, i: int) -> Outcome:
    await context.arm("device", error="DeviceError")
    return await context.ask(i, (200, *FAILED))


@fault("a step that is slow", 60, parallel=1)
async def slow_step(context: Context, i: int) -> Outcome:
    await context.arm("forward", seconds=0.3)
    return await context.ask(i)


@fault("a detokenizer that raises", 300)
async def detokenizer(context: Context, i: int) -> Outcome:
    request_id = context.new_id()
    await context.arm("advance", error="LookupError", prefix=request_id)
    return await context.ask(i, (200, *FAILED), X_Request_Id=request_id)


@fault("a grammar that fails in the middle", 200)
async def grammar(context: Context, i: int) -> Outcome:
    request_id = context.new_id()
    await context.arm("advance", error="GrammarError", prefix=request_id, message="ParserTooComplex")
    return await context.ask(4, (200, 400, 500), X_Request_Id=request_id)


@fault("masks that cannot be computed", 100, refusals=FAILED)
async def masks(context: Context, i: int) -> Outcome:
    await context.arm("masks", error="RuntimeError")
    return await context.ask(4, (200, *FAILED))


@fault("swap space that cannot be written", 100)
async def swap_out(context: Context, i: int) -> Outcome:
    await context.arm("swap out", error="no space")
    return await context.ask(i)


@fault("swap space that cannot be read", 100)
async def swap_in(context: Context, i: int) -> Outcome:
    await context.arm("swap in", error="RuntimeError")
    return await context.ask(i)


@fault("a tokenizer that fails", 100)
async def tokenizer(context: Context, i: int) -> Outcome:
    text = context.new_id()
    await context.arm("tokenizer", error="MemoryError", prefix=text)
    body = {"model": "tiny", "prompt": text, "max_tokens": 2}
    return judge("/v1/completions", await context.post("/v1/completions", body), None, (200, *FAILED))


@fault("a cleared cache", 300)
async def cleared(context: Context, i: int) -> Outcome:
    asked = asyncio.ensure_future(context.ask(i))
    await asyncio.sleep(0.002 * (i % 20))
    must((await context.post("/v1/cache/clear", {}, "admin")).status == 200, "not cleared")
    return await asked


@fault("a cancel", 800)
async def cancel(context: Context, i: int) -> Outcome:
    """At any phase: before it is known, while it waits, computes its prompt or answers, and after its end."""
    request_id, (path, body) = context.new_id(), VICTIMS[i % 4]
    asked = asyncio.ensure_future(
        context.post(path, body | {"stream": i % 3 > 0, "max_tokens": 60}, X_Request_Id=request_id)
    )
    await asyncio.sleep(0.004 * (i % 40))
    deleted = await context.request("DELETE", f"/v1/requests/{request_id}")
    must(deleted.status in (200, 404), deleted)
    reply = await asked
    return judge(path, reply, None, (200, 499))


@fault("a deadline", 800)
async def deadline(context: Context, i: int) -> Outcome:
    number = i % 4
    path, body = VICTIMS[number]
    name, seconds = ("timeout", "ttft_timeout")[i % 2], 0.001 * 1.2 ** (i % 40)
    reply = await context.post(path, body | {"stream": i % 3 > 0, name: seconds})
    return judge(path, reply, context.expected[number], (200, 408))


@fault("a more urgent request", 200)
async def urgent(context: Context, i: int) -> Outcome:
    """Others may be preempted for it."""
    path, body = VICTIMS[i % 4]
    return judge(path, await context.post(path, body, "urgent"), context.expected[i % 4])


@fault("a clock that jumps", 100, parallel=2)
async def clock(context: Context, i: int) -> Outcome:
    """As after the sleep of a laptop: no deadline passes in it."""
    path, body = VICTIMS[i % 4]
    asked = asyncio.ensure_future(context.post(path, body | {"timeout": 100}))
    await asyncio.sleep(0.002 * (i % 20))
    await context.server.order(jump=(3600.0, -3600.0, 86400.0)[i % 3])
    return judge(path, await asked, context.expected[i % 4])


def add_quantized(dtype: str) -> None:
    known: dict[int, Answer] = {}

    @fault(f"a flood over a KV cache of {dtype}", 60, seconds=60, flags=("--kv-cache-dtype", dtype))
    async def flood(context: Context, i: int) -> Outcome:
        """Long prompts, of which some are swapped out and preempted. The same prompt has the same answer."""
        prompt = [20 + (7 * (i % 4) + 11 * n) % 400 for n in range(350)]
        path, body = completion(prompt, 40, n=2, stream=False, model="wide")
        reply = await context.post(path, body)
        must(f"the KV cache is {dtype};" in context.server.log.read_text(), "the KV cache is not quantized")
        return judge(path, reply, known.setdefault(i % 4, answer_of(path, reply)))


for kv_dtype in ("int8", "int4"):
    add_quantized(kv_dtype)


STALLS = ("--step-timeout", "1")


@fault("a step that stalls", 15, parallel=1, flags=STALLS, refusals=(503,))
async def stall(context: Context, i: int) -> Outcome:
    """What runs gets its right answer when the step ends; what waits, and what comes meanwhile, gets a 503."""
    await context.arm("forward", seconds=3.0)
    for _ in range(400):
        health = await context.request("GET", "/health")
        if health.status == 503:
            break
        await asyncio.sleep(0.02)
    must(health.status == 503 and health.json["status"] == "stalled", health)
    path, body = VICTIMS[i % 4]
    outcome = refused(path, await context.post(path, body), 503, code="stalled")
    started = time.monotonic()
    while (await context.request("GET", "/health")).status != 200:
        await asyncio.sleep(0.02)
        if time.monotonic() - started > 10:
            raise LostError("still stalled")
    return outcome
