"""Requests and connections that are wrong, slow, or end in the middle."""

from __future__ import annotations

import asyncio
import json

from tests.api.helpers import random_tokens
from tests.faults import wire
from tests.faults.fault import VICTIMS, Context, fault, must, refused
from tests.faults.streams import CHAT, COMPLETIONS, MESSAGES, completion, headers_of, user
from tests.faults.table import LostError, Outcome
from tests.faults.wire import Connection

WRONG = [
    (COMPLETIONS, {"model": "tiny", "prompt": "x", "temperature": "hot"}),
    (COMPLETIONS, {"model": "tiny", "prompt": [[]]}),
    (COMPLETIONS, {"model": "tiny", "prompt": [10**9]}),
    (COMPLETIONS, {"model": "tiny", "prompt": "x", "stop": ["x"] * 17}),
    (CHAT, {"model": "tiny", "messages": []}),
    (CHAT, {"model": "tiny", "messages": user("x"), "tools": 3}),
    (CHAT, {"model": "tiny", "messages": user("x"), "logit_bias": {"a": 1}}),
    (MESSAGES, {"model": "tiny", "messages": user("x")}),
    ("/v1/responses", {"model": "tiny", "input": 3}),
    ("/api/chat", {"model": "tiny", "messages": 3}),
    ("/v1/embeddings", {"model": "vectors", "input": [1.5]}),
    ("/tokenize", {"model": "tiny"}),
]
BROKEN = [b"", b"{", b"[" * 2000, b'{"a":"\xff"}', b"\x00", b'{"model": 1e999}', b"nul", b'"' + b"x" * 70_000]


@fault("an unknown path", 500)
async def unknown_path(context: Context, i: int) -> Outcome:
    return refused("", await context.request("GET", f"/v1/nothing/{i}"), 404)


@fault("an unknown model", 500)
async def unknown_model(context: Context, i: int) -> Outcome:
    path = (CHAT, COMPLETIONS, MESSAGES)[i % 3]
    body = {"model": f"no-{i}", "messages": user("x"), "prompt": "x", "max_tokens": 1}
    body.pop("prompt" if path != COMPLETIONS else "messages")
    return refused(path, await context.post(path, body), 404)


@fault("a field that is wrong", 1000)
async def wrong_field(context: Context, i: int) -> Outcome:
    path, body = WRONG[i % len(WRONG)]
    return refused(path, await context.post(path, body), 400)


@fault("a body that is no JSON", 500)
async def broken_body(context: Context, i: int) -> Outcome:
    path = (CHAT, COMPLETIONS, MESSAGES, "/v1/embeddings")[i % 4]
    return refused(path, await context.post(path, BROKEN[i // 4 % len(BROKEN)]), 400)


@fault("a wrong method", 200)
async def wrong_method(context: Context, i: int) -> Outcome:
    return refused("", await context.request(("PUT", "PATCH", "DELETE")[i % 3], CHAT), 405)


@fault("a body over the limit", 12, parallel=2)
async def large_body(context: Context, i: int) -> Outcome:
    return refused(CHAT, await context.post(CHAT, b" " * (33 * 2**20)), 413)


@fault("too many headers", 200)
async def many_headers(context: Context, i: int) -> Outcome:
    return refused(CHAT, await context.post(CHAT, {}, **{f"X-{n}": "x" for n in range(120)}), 431)


@fault("a prompt that does not fit", 300)
async def long_prompt(context: Context, i: int) -> Outcome:
    path, body = completion(random_tokens(600, i), 8)
    return refused(path, await context.post(path, body), 400)


CHARSETS = ["nothing", "utf-7", "idna", "punycode", "unicode_escape", "rot13", "hex", "utf-16", "\x7f", "zlib_codec"]


@fault("a multipart charset", 300)
async def charset(context: Context, i: int) -> Outcome:
    edge = "edge"
    parts = [
        f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode(),
        f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="'.encode(),
        b"\xff\xfe" if i % 2 else b"a.jsonl",
        f'"\r\n\r\n{{}}\r\n--{edge}--\r\n'.encode(),
    ]
    kind = f"multipart/form-data; boundary={edge}; charset={CHARSETS[i % len(CHARSETS)]}"
    reply = await context.post("/v1/files", b"".join(parts), Content_Type=kind)
    if reply.status == 200:
        deleted = await context.request("DELETE", f"/v1/files/{reply.json['id']}")
        must(deleted.status == 200, deleted)
        return Outcome.RIGHT
    return refused("", reply, 400)


@fault("a folded header", 300)
async def folded(context: Context, i: int) -> Outcome:
    data = context.bytes_of(i).replace(b"\r\n", b"\r\nX-Fold: a\r\n\t b\r\n", 1)
    return refused("", await wire.exchange(context.server.address, data), 400)


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
"""What a request must not carry into the server: it would be answered as a second one."""
FRAMES = [
    b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n1234",
    b"Content-Length: +4\r\n\r\n1234",
    b"Content-Length: 4,5\r\n\r\n1234",
    b"Content-Length: 4\r\nContent-Length: 4\r\n\r\n1234",
    b"Content-Length: 4, 4\r\n\r\n1234",
    b"Content-Length: 4\n\r\n1234",
    b"X: y\nContent-Length: 4\r\n\r\n1234",
    b"Content-Length: -1\r\n\r\n",
    b"Content-Length: 0x4\r\n\r\n1234",
    b"Transfer-Encoding: identity\r\n\r\n",
    b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n4\r\n12345\r\n0\r\n\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    b"X\x00: y\r\nContent-Length: 0\r\n\r\n",
    b"X: a\rContent-Length: 5\r\n\r\n",
    b" Content-Length: 5\r\n\r\n",
]


@fault("a smuggled request", 880)
async def smuggling(context: Context, i: int) -> Outcome:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {context.server.keys['victim']}\r\n"
    connection = await Connection.open(context.server.address)
    try:
        await connection.send(head.encode() + FRAMES[i % len(FRAMES)] + SMUGGLED)
        received = await connection.read()
    finally:
        connection.close()
    must(received.count(b"HTTP/1.1 ") == 1, f"{FRAMES[i % len(FRAMES)]!r}: {received!r}")
    return refused(CHAT, wire.read_reply(received), 400, 501)


@fault("a connection that says nothing", 1000, parallel=20)
async def silent(context: Context, i: int) -> Outcome:
    connection = await Connection.open(context.server.address)
    if i % 3 == 0:
        await connection.send(b"POST")
    if i % 2:
        connection.reset()
    else:
        connection.close()
    return Outcome.RIGHT


@fault("a reset in the request", 600)
async def reset_in_request(context: Context, i: int) -> Outcome:
    data = context.bytes_of(i)
    connection = await Connection.open(context.server.address)
    await connection.send(data[: len(data) * (i % 10 + 1) // 11])
    await asyncio.sleep(0.001 * (i % 5))
    connection.reset()
    return Outcome.RIGHT


@fault("a reset while the request waits or runs", 600)
async def reset_before_answer(context: Context, i: int) -> Outcome:
    connection = await Connection.open(context.server.address)
    await connection.send(context.bytes_of(i, max_tokens=200))
    await asyncio.sleep(0.004 * (i % 25))
    connection.reset()
    return Outcome.RIGHT


@fault("a client that leaves its stream", 1000)
async def leave_stream(context: Context, i: int) -> Outcome:
    connection = await Connection.open(context.server.address)
    await connection.send(context.bytes_of(i % 4, max_tokens=200))
    received = await connection.read_until(b"\ndata:" if i % 2 else b"data:")
    must(b" 200 OK" in received, received)
    if i % 3:
        connection.close()
    else:
        connection.reset()
    return Outcome.RIGHT


@fault("a body that comes slowly", 40, parallel=20)
async def slow_body(context: Context, i: int) -> Outcome:
    path, _ = VICTIMS[i % 4]
    data = context.bytes_of(i % 4)
    connection = await Connection.open(context.server.address)
    size = len(data) // 20 + 1
    for start in range(0, len(data), size):
        await connection.send(data[start : start + size])
        await asyncio.sleep(0.1)
    reply = wire.read_reply(await connection.read())
    connection.close()
    if wire.answer_of(path, reply) != context.expected[i % 4]:
        raise LostError(str(reply))
    return Outcome.RIGHT


@fault("a body that never ends", 60, parallel=60, seconds=60)
async def endless_body(context: Context, i: int) -> Outcome:
    connection = await Connection.open(context.server.address)
    await connection.send(context.bytes_of(i)[: -1 - i % 30])
    reply = wire.read_reply(await connection.read())
    connection.close()
    return refused(VICTIMS[i % len(VICTIMS)][0], reply, 408, code="body_timeout")


@fault("a head that never ends", 40, parallel=40, seconds=60)
async def endless_head(context: Context, i: int) -> Outcome:
    connection = await Connection.open(context.server.address)
    await connection.send(context.bytes_of(i)[: 10 + i])
    must(await connection.read() == b"", "an answer to half a head")
    connection.close()
    return Outcome.REFUSED  # with the end of the connection: there is no request yet


@fault("a reader that is slow", 20, parallel=10)
async def slow_reader(context: Context, i: int) -> Outcome:
    path, body = completion(random_tokens(20, 2), 60, logprobs=5)
    connection = await Connection.open(context.server.address, 4096)
    await connection.send(wire.request_bytes("POST", path, body, headers_of(context.server, "victim")))
    connection.stop_reading()
    await asyncio.sleep(1.0)
    connection.start_reading()
    reply = wire.read_reply(await connection.read())
    connection.close()
    answer = wire.answer_of(path, reply)
    must(answer.ended == ("length",) and reply.whole, reply)
    return Outcome.RIGHT


@fault("a reader that is dead", 40, parallel=20, seconds=60)
async def dead_reader(context: Context, i: int) -> Outcome:
    """The answer is larger than what the systems of both sides take. Its end shows that its connection was closed."""
    path, body = completion(random_tokens(2, 2), 500, n=8, logprobs=20, stream=bool(i % 2), prompt_logprobs=None)
    connection = await Connection.open(context.server.address, 4096)
    request_id = context.new_id()
    await connection.send(wire.request_bytes("POST", path, body, headers_of(context.server, "victim", request_id)))
    connection.stop_reading()
    deadline = asyncio.get_running_loop().time() + 50
    while asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.5)
        if (await context.request("DELETE", f"/v1/requests/{request_id}")).status == 404:
            connection.reset()
            return Outcome.REFUSED
    raise LostError("the request still runs")


@fault("one id for two requests", 100)
async def two_with_one_id(context: Context, i: int) -> Outcome:
    path, body = VICTIMS[i % 4]
    request_id = context.new_id()
    replies = await asyncio.gather(
        *(context.post(path, body | {"max_tokens": 40, "ignore_eos": True}, X_Request_Id=request_id) for _ in range(2))
    )
    statuses = sorted(reply.status for reply in replies)
    must(statuses in ([200, 409], [200, 200]), [str(reply) for reply in replies])
    for reply in replies:
        if reply.status == 409:
            return refused(path, reply, 409, code="request_id_in_use")
    return Outcome.RIGHT


@fault("more requests than the queue takes", 400, parallel=400, seconds=60, refusals=(503,))
async def full_queue(context: Context, i: int) -> Outcome:
    return await context.ask(i, (200, 503))


@fault("a batch line that is wrong", 30)
async def wrong_line(context: Context, i: int) -> Outcome:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"model": "tiny"}})
    uploaded = await context.upload(f"{line}\n{'{' * (i % 3)}")
    if uploaded.status != 200:
        return refused("", uploaded, 400)
    made = {"input_file_id": uploaded.json["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    batch = await context.post("/v1/batches", made)
    if batch.status != 200:
        return refused("", batch, 400)
    while True:
        state = (await context.request("GET", f"/v1/batches/{batch.json['id']}")).json
        if state["status"] in ("completed", "failed"):
            break
        await asyncio.sleep(0.1)
    must(state["status"] == "failed" or state["request_counts"]["failed"] == 1, state)
    return Outcome.REFUSED
