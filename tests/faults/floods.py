"""Floods: many requests of one client at a time, for what the server does for a few at a time. And what another client
asks for beside each: something that has to pass through the same queue."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mlxpaged.models.sources.resolve import resolve
from tests.faults.fault import Context, must
from tests.faults.server import FaultyServer
from tests.faults.streams import CHAT, COMPLETIONS, chat, user
from tests.faults.wire import Reply
from tests.support import make_reranker
from tests.vision.files import encoded, url_of

SEEING, RERANKER = "seeing", "qwen3-reranker"
"""Directories of models beside those of the streams."""

Ask = Callable[[Context, str, int], Awaitable[Reply]]
"""Makes a request with a key. The number is another one each time."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Flood:
    """ask: a request of the flood. other: what another client asks for, by default the same. clients: requests of the
    flood at a time. model: a directory that is loaded for it. mebibytes: that the process may grow by."""

    name: str
    ask: Ask
    other: Ask
    clients: int = 24
    model: str | None = None
    mebibytes: int = 700

    async def asked(self, context: Context, key: str = "victim") -> None:
        """One request of the flood. It is answered, or refused because the client asks too often, or too much."""
        reply = await self.ask(context, key, next(_numbers))
        busy = reply.status == 503 and reply.json["error"]["code"] in ("engine_busy", "queue_full")
        must(reply.status in (200, 400) or busy, reply)

    async def is_answered(self, context: Context, key: str = "other") -> None:
        """The other client's request. It is answered."""
        reply = await self.other(context, key, next(_numbers))
        must(reply.status in (200, 400), reply)

    async def play(self, context: Context) -> None:
        """Each of its clients asks once."""
        await self.begin(context)
        await asyncio.gather(*(self.asked(context) for _ in range(self.clients)))

    async def begin(self, context: Context) -> None:
        if self.model is not None:
            reply = await context.request("POST", f"/v1/models/{self.model}/load", key="admin")
            must(reply.status in (200, 409), reply)

    @property
    def at_most(self) -> int:
        """Answers to the flood that may come before the other client's: behind its queue, all are in the engine's."""
        return self.clients // 2


def make_models(server: FaultyServer) -> None:
    """The models that floods load."""
    shutil.copytree(resolve("demo-vision").directory, server.models / SEEING)
    make_reranker(server.models / RERANKER)


FLOODS: list[Flood] = []


def flood(name: str, ask: Ask, other: Ask | None = None, **options: Any) -> None:
    FLOODS.append(Flood(name, ask, other or ask, **options))


# Texts


def text(length: int) -> Ask:
    def ask(context: Context, key: str, number: int) -> Awaitable[Reply]:
        return context.post("/tokenize", {"model": "tiny", "prompt": f"{number} " + "ab " * (length // 3)}, key)

    return ask


def chat_text(length: int) -> Ask:
    def ask(context: Context, key: str, number: int) -> Awaitable[Reply]:
        messages = user(f"{number} " + "ab " * (length // 3))
        return context.post("/tokenize", {"model": "tiny", "messages": messages}, key)

    return ask


flood("texts of 30,000 characters", text(30_000), text(60_000))
flood("texts of 300,000 characters", text(300_000), text(100_000), clients=12, mebibytes=1000)
flood("chats of 30,000 characters", chat_text(30_000), chat_text(60_000))

# Bodies


def body_of(size: int) -> Ask:
    def ask(context: Context, key: str, number: int) -> Awaitable[Reply]:
        path, body = chat(f"{number} " + "ab " * (size // 3), 1, stream=False)
        return context.post(path, body, key)

    return ask


flood("bodies of 100 kB", body_of(100_000))
flood("bodies of 1.5 MB", body_of(1_500_000), body_of(1_100_000), clients=12)

# Constraints


def new_schema(size: int, number: int) -> dict[str, Any]:
    """A schema that no request had."""
    return {
        "type": "object",
        "properties": {
            f"p{i}": {"type": "string", "maxLength": 20 + i, "enum": [f"{number} {i}"]} for i in range(size)
        },
        "required": [f"p{i}" for i in range(size)],
    }


def schema(size: int) -> Ask:
    def ask(context: Context, key: str, number: int) -> Awaitable[Reply]:
        path, body = chat("x", 1, stream=False, structured_outputs={"json": new_schema(size, number)})
        return context.post(path, body, key)

    return ask


flood("new schemas", schema(200), schema(40), clients=6)

# Images


@functools.cache
def image_file(kind: str, width: int, height: int) -> bytes:
    return encoded(Image.new("RGB", (width, height), (200, 30, 40)), kind)


def image(kind: str, width: int, height: int) -> Ask:
    """Each is another file, so that none was decoded before: bytes follow the image's end. The clients only copy it, so
    that the server's queue is full, and not theirs."""

    async def ask(context: Context, key: str, number: int) -> Reply:
        url = {"type": "image_url", "image_url": {"url": url_of(image_file(kind, width, height) + b"%9d" % number)}}
        content = [{"type": "text", "text": "What number is in the picture?"}, url]
        messages = [{"role": "user", "content": content}]
        return await context.post(CHAT, {"model": SEEING, "messages": messages, "max_tokens": 1}, key)

    return ask


for image_kind in ("PNG", "JPEG", "WEBP", "GIF"):
    flood(
        f"{image_kind} images of 12 MP",
        image(image_kind, 4000, 3000),
        image(image_kind, 64, 64),
        clients=12,
        model=SEEING,
    )

# Files and batches


def uploaded(size: int) -> Ask:
    """A file, which is deleted then."""

    async def ask(context: Context, key: str, number: int) -> Reply:
        reply = await context.upload(f"{number}" + "x" * size, key)
        if reply.status == 200:
            reply = await context.request("DELETE", f"/v1/files/{reply.json['id']}", key=key)
        return reply

    return ask


def checked_batch(num_lines: int) -> Ask:
    """A batch whose last line is wrong, so that it ends when its file has been read."""

    async def ask(context: Context, key: str, number: int) -> Reply:
        lines = "".join(
            json.dumps({"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": {}}) + "\n"
            for i in range(num_lines)
        )
        file = await context.upload(lines + "no line\n", key)
        if file.status != 200:
            return file
        made = {"input_file_id": file.json["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        reply = await context.post("/v1/batches", made, key)
        while reply.status == 200 and reply.json["status"] == "validating":
            await asyncio.sleep(0.02)
            reply = await context.request("GET", f"/v1/batches/{reply.json['id']}", key=key)
        return reply

    return ask


flood("files of 5 MB", uploaded(5_000_000), uploaded(1000), clients=12)
flood("batches of 5,000 lines", checked_batch(5_000), checked_batch(2), clients=12)

# Embeddings and rerankers


def embeddings(count: int) -> Ask:
    def ask(context: Context, key: str, number: int) -> Awaitable[Reply]:
        inputs = [f"{number} {i} and some words more" for i in range(count)]
        return context.post("/v1/embeddings", {"model": "vectors", "input": inputs}, key)

    return ask


def documents(count: int, words: int) -> Ask:
    def ask(context: Context, key: str, number: int) -> Awaitable[Reply]:
        texts = [f"{number} {i} " + "ab " * words for i in range(count)]
        return context.post("/v1/rerank", {"model": RERANKER, "query": "Which?", "documents": texts}, key)

    return ask


flood("300 embeddings", embeddings(300), embeddings(1))
flood("100 documents to rank", documents(100, 20), documents(1, 20), clients=12, model=RERANKER)
flood("1,000 documents that are too long", documents(1000, 500), documents(1, 20), clients=12, model=RERANKER)
