"""API keys: wrong ones, one that is removed, and what one key can learn of another one's prompts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.api.helpers import random_tokens
from tests.faults import wire
from tests.faults.fault import VICTIMS, Context, fault, must, refused
from tests.faults.streams import completion
from tests.faults.table import LostError, Outcome, judge


@fault("a key that is wrong or missing", 400)
async def wrong_key(context: Context, i: int) -> Outcome:
    path, body = VICTIMS[i % len(VICTIMS)]
    headers = {"Authorization": f"Bearer sk-mlxpaged-{i:064x}"} if i % 2 else {}
    return refused(path, await wire.request(context.server.address, "POST", path, body, **headers), 401)


@fault("what only an admin may do", 200)
async def not_admin(context: Context, i: int) -> Outcome:
    method, path = (("GET", "/v1/status"), ("POST", "/v1/cache/clear"), ("POST", "/v1/models/second/load"))[i % 3]
    return refused("", await context.request(method, path), 403)


@fault("a prompt of another key is looked for", 300)
async def probing(context: Context, i: int) -> Outcome:
    path, body = completion(random_tokens(128, 1000 + i), 2, stream=False)
    first = await context.post(path, body, "victim")
    second = await context.post(path, body, "other")
    judge(path, first, None)
    judge(path, second, None)
    cached = (second.json["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    must(cached == 0, f"{cached} tokens of another key's prompt are cached")
    must(wire.answer_of(path, first) == wire.answer_of(path, second), "the two keys got different answers")
    return Outcome.RIGHT


@fault("the request of another key is cancelled", 200)
async def foreign_cancel(context: Context, i: int) -> Outcome:
    request_id = context.new_id()
    asked = asyncio.ensure_future(context.ask(i, X_Request_Id=request_id))
    await asyncio.sleep(0.002 * (i % 20))
    reply = await context.request("DELETE", f"/v1/requests/{request_id}", key="other")
    refused("", reply, 404)
    return await asked


@fault("a key that is removed during a request", 20, parallel=1)
async def removed_key(context: Context, i: int) -> Outcome:
    """The request that was accepted gets its answer; the next one is refused."""
    file = context.server.directory / "keys.json"
    before = file.read_text()
    path, body = VICTIMS[1]
    asked = asyncio.ensure_future(context.post(path, body, "brief"))
    await asyncio.sleep(0.01)
    kept = [key for key in json.loads(before)["keys"] if key["name"] != "brief"]
    try:
        write(file, json.dumps({"keys": kept}))
        judge(path, await asked, context.expected[1], (200, 401))
        for _ in range(100):
            reply = await context.post(path, body, "brief")
            if reply.status == 401:
                return refused(path, reply, 401)
            await asyncio.sleep(0.05)
        raise LostError("the key is still accepted")
    finally:
        write(file, before)
        for _ in range(100):
            if (await context.post(path, body, "brief")).status == 200:
                break
            await asyncio.sleep(0.05)


def write(path: Path, text: str) -> None:
    """As a whole, as `mlxpaged keys` does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
