"""Memory for each kind of request: `python -m tests.soak.kinds [KIND ...] --requests 50000`.

Prints how many bytes the server keeps for each request of a kind. The first half warms up: caches and bounded histories
fill, and the allocator reaches its level. The slope is that of the second half. A cache that would take longer is full
before the first request.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.api.helpers import write_keys
from tests.soak.http_client import Connection
from tests.soak.server_process import ServerProcess, server_process
from tests.soak.slopes import slope, without_step
from tests.support import make_embedding_model, make_tiny_model

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
FLAGS = ("--served-model-name", "demo", "--kv-cache-memory", "1MB", "--served-embedding-model-name", "vectors")
"""Memory of a KV pool is taken when its blocks are first used, so the pool is small."""
KEYS = 16_384
"""Keys of JSON objects that the parser keeps (jiter). A key has five places, given by its hash. So all places are taken
after four times as many keys."""
READINGS = 40
NUM_CLIENTS = 8
MOST_BYTES = 40.0
"""A kind whose slope is larger is not flat. 50,000 requests then take at most 2 MB."""
STEP_BYTES = 1_500_000
"""One step of this size or more is a table that doubles, and is printed apart. Python's table of interned strings is
one: 1.9 MB. A leak makes several steps, of at most a megabyte, the size of an arena of Python's allocator."""


@dataclass(frozen=True)
class Kind:
    """send: sends the request with this number over a connection. status: what its answer must have."""

    send: Callable[[Connection, int], Awaitable[int]]
    status: int


def plain(status: int, method: str, path: str, make: Callable[[int], Any] = lambda i: None, **headers: str) -> Kind:
    """path, headers: {} stands for the number of the request."""

    async def send(connection: Connection, index: int) -> int:
        given = {name.replace("_", "-"): text.format(index) for name, text in headers.items()}
        answer = await connection.ask(method, path.format(index), make(index), {"X-Request-Id": f"r-{index}"} | given)
        return answer.status

    return Kind(send, status)


async def connect(connection: Connection, index: int) -> int:
    status = (await connection.ask("GET", "/v1/models")).status
    connection.close()
    return status


async def leave(connection: Connection, index: int) -> int:
    """Leaves a stream within its answer."""
    body = CHAT | {"max_tokens": 200, "stream": True}
    status, headers = await connection.begin("POST", "/v1/chat/completions", body)
    async for _ in connection.pieces(headers):
        break
    connection.close()
    return status


async def leave_before(connection: Connection, index: int) -> int:
    """Leaves a request before its answer begins."""
    asking = asyncio.ensure_future(connection.ask("POST", "/v1/completions", {"prompt": f"{index}", "max_tokens": 50}))
    await asyncio.sleep(0.003)
    asking.cancel()
    await asyncio.wait([asking])
    connection.close()
    return 200


async def watch(connection: Connection, index: int) -> int:
    status, headers = await connection.begin("GET", "/v1/status/stream")
    async for _ in connection.pieces(headers):
        break
    connection.close()
    return status


async def cancel(connection: Connection, index: int) -> int:
    name = f"to-cancel-{index}"
    body = CHAT | {"max_tokens": 200, "stream": True}
    _, headers = await connection.begin("POST", "/v1/chat/completions", body, {"X-Request-Id": name})
    other = Connection(connection.port, connection.key)
    pieces = connection.pieces(headers)
    await anext(pieces)
    status = (await other.ask("DELETE", f"/v1/requests/{name}")).status
    other.close()
    async for _ in pieces:
        pass
    return status


def schema(index: int) -> dict[str, Any]:
    properties = {f"name_{index}": {"type": "boolean"}}
    made = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": made, "strict": True}}


KINDS = {
    "404": plain(404, "GET", "/nothing/{}"),
    "405": plain(405, "PUT", "/v1/chat/completions"),
    "400": plain(400, "POST", "/v1/chat/completions", lambda i: {"messages": [], f"field_{i}": i, "max_tokens": -1}),
    "400-json": plain(400, "POST", "/v1/completions", lambda i: b"{" * (1 + i % 50)),
    "unknown-key": plain(401, "GET", "/v1/models", Authorization="Bearer key-{}"),
    "unknown-model": plain(404, "POST", "/v1/chat/completions", lambda i: CHAT | {"model": f"model-{i}"}),
    "unknown-field": plain(200, "POST", "/v1/completions", lambda i: {"prompt": "a", "max_tokens": 1, f"f_{i}": i}),
    "connections": Kind(connect, 200),
    "models": plain(200, "GET", "/v1/models"),
    "status": plain(200, "GET", "/v1/status"),
    "metrics": plain(200, "GET", "/metrics"),
    "watchers": Kind(watch, 200),
    "chats": plain(200, "POST", "/v1/chat/completions", lambda i: CHAT),
    "distinct-chats": plain(
        200,
        "POST",
        "/v1/chat/completions",
        lambda i: CHAT | {"messages": [{"role": "user", "content": f"Say {i} {i * i}"}], "user": f"user-{i}"},
    ),
    "completions": plain(200, "POST", "/v1/completions", lambda i: {"prompt": f"{i} is", "max_tokens": 2}),
    "messages": plain(
        200, "POST", "/v1/messages", lambda i: {"model": "demo", "max_tokens": 1} | {"messages": CHAT["messages"]}
    ),
    "responses": plain(200, "POST", "/v1/responses", lambda i: {"input": f"{i}", "max_output_tokens": 1}),
    "ollama": plain(
        200,
        "POST",
        "/api/chat",
        lambda i: {"model": "demo", "messages": CHAT["messages"], "options": {"num_predict": 1}},
    ),
    "tokenize": plain(200, "POST", "/tokenize", lambda i: {"prompt": f"number {i} of {i * 7}"}),
    "embeddings": plain(200, "POST", "/v1/embeddings", lambda i: {"model": "vectors", "input": f"{i}"}),
    "schemas": plain(200, "POST", "/v1/chat/completions", lambda i: CHAT | {"response_format": schema(i)}),
    "left-streams": Kind(leave, 200),
    "left-requests": Kind(leave_before, 200),
    "cancels": Kind(cancel, 200),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "kinds", nargs="*", choices=[[], *KINDS], metavar="KIND", help=f"of {', '.join(KINDS)}; default: all"
    )
    parser.add_argument("--requests", type=int, default=50_000, metavar="N", help="of each kind (default 50000)")
    args = parser.parse_args()
    print(
        f"{'kind':<16}{'requests':>9}{'a second':>10}{'CPU us':>9}{'MB':>21}{'bytes a request':>17}{'step MB':>9}",
        flush=True,
    )
    flat = [asyncio.run(measure(name, args.requests)) for name in args.kinds or KINDS]
    return 0 if all(flat) else 1


async def measure(name: str, count: int) -> bool:
    """Prints a line, and returns whether the kind is flat."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        keys = write_keys(root / "keys.json", known={"admin": True})
        model = make_tiny_model(root / "demo", "llama", num_hidden_layers=1)
        vectors = make_embedding_model(root / "vectors", num_hidden_layers=1)
        flags = [model, *FLAGS, "--embedding-model", vectors, "--api-keys", root / "keys.json"]
        with server_process(flags, root) as server:
            await fill_caches(Connection(server.port, keys["known"]))
            return await send_all(name, KINDS[name], count, server, keys["known"])


async def fill_caches(connection: Connection) -> None:
    for part in range(4):
        keys = dict.fromkeys((f"filled_{part * KEYS + i}" for i in range(KEYS)), 0)
        answer = await connection.ask("POST", "/tokenize", {"prompt": "a"} | keys)
        assert answer.status == 200, answer.body
    connection.close()


async def send_all(name: str, kind: Kind, count: int, server: ServerProcess, key: str) -> bool:
    numbers = iter(range(count))
    readings = [(0, server.usage().private)]
    started, before = time.monotonic(), server.usage().cpu_seconds

    async def client() -> None:
        connection = Connection(server.port, key)
        for index in numbers:
            status = await kind.send(connection, index)
            assert status == kind.status, f"{name}: a status of {status}"
            if (index + 1) % (count // READINGS) == 0:
                readings.append((index + 1, server.usage().private))
        connection.close()

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    seconds, cpu = time.monotonic() - started, server.usage().cpu_seconds - before
    second_half, step = without_step([reading for reading in readings if reading[0] >= count // 2], STEP_BYTES)
    found = slope(second_half)
    memory = ", ".join(f"{readings[len(readings) * at // 4 - (at > 0)][1] / 1e6:.1f}" for at in (0, 2, 3, 4))
    print(f"{name:<16}{count:>9}{count / seconds:>10.0f}{cpu / count * 1e6:>9.0f}", end="")
    print(f"{memory:>25}{found:>13.1f}{step / 1e6:>9.1f}", flush=True)
    return found <= MOST_BYTES


if __name__ == "__main__":
    sys.exit(main())
