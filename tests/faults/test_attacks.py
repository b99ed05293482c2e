"""Each attack is played against a real server, beside a stream with a known answer and a second client.

Both are measured in a process of their own (watcher.py), first without the attack and then with it. The stream's answer
stays right. Its largest gap, and the second client's first token, take at most three times as long; in a flood, by the
processor time of the server, because other programs have the cores too. The memory of the
process grows by a bounded amount, and in the middle of the attack, the process ends soon after a SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mlxpaged.models.sources.resolve import resolve
from mlxpaged.models.text.tokenizer_limits import MAX_REPLACED
from mlxpaged.parts.grammar.grammar_limits import MAX_OPENINGS
from mlxpaged.parts.grammar.schema_limits import MAX_DEPTH, MAX_NESTING
from tests.engine.constraints import LOOSE, WRAPPED, chain, doubling, nested
from tests.faults import costs, floods, wire
from tests.faults.fault import Context, must
from tests.faults.server import FaultyServer
from tests.faults.streams import CHAT, COMPLETIONS, MESSAGES, OLLAMA, RESPONSES, chat, completion, user
from tests.faults.table import LostError
from tests.faults.wire import Reply
from tests.models import test_hostile as hostile
from tests.models.test_hostile_adapters import REFUSED as REFUSED_ADAPTERS
from tests.support import make_adapter
from tests.vision.files import HOSTILE as HOSTILE_IMAGES
from tests.vision.files import black_png, encoded, url_of

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc"),
]

STEP_SECONDS = 0.02
"""Least time of a step, so that the tokens of a stream come steadily."""
TRIES, MOST_TRIES, WINDOW_SECONDS = 5, 20, 1.0
"""Times that the server is measured without the attack, and at most with it, and the least time of each. The best one
counts: what the server cannot do in time is in all of them, and what other programs take from it is not. The first try
with the attack that is good is the last one."""
FLOOR_SECONDS = 0.05
"""Gaps below this one are not compared."""
RATIO = 3.0
END_SECONDS = 5.0

BUNDLED_VISION = resolve("demo-vision").directory

Play = Callable[[Context], Awaitable[None]]


@dataclass(frozen=True)
class Attack:
    """play: plays it once. works: whether the server can only be late by working, so that waits are judged by its
    processor time: not if it may wait for a pipe or a disk. mebibytes: that the process may grow by, at most. stdout,
    stderr: what is there in place of a file: a pipe that is not read ("pipe"), one whose reader has left ("left"), or a
    full disk ("full")."""

    name: str
    play: Play
    mebibytes: int = 256
    works: bool = False
    stdout: str = "file"
    stderr: str = "file"


ATTACKS: list[Attack] = []


def attack(name: str, **options: Any) -> Callable[[Play], Play]:
    def add(play: Play) -> Play:
        ATTACKS.append(Attack(name, play, **options))
        return play

    return add


# Pipes


@attack("standard error is a pipe that is not read", stderr="pipe")
@attack("standard output and error are pipes that are not read", stdout="pipe", stderr="pipe")
@attack("standard output is a pipe that is not read", stdout="pipe")
@attack("the readers of standard output and error have left", stdout="left", stderr="left")
@attack("the log is on a full disk", stdout="full", stderr="full")
@attack("standard output is on a full disk", stdout="full")
async def many_lines(context: Context) -> None:
    for _ in range(30):
        requests = [context.request("GET", f"/v1/files/{'x' * 200}") for _ in range(20)]
        must(all(reply.status in (400, 404) for reply in await asyncio.gather(*requests)), "not refused")


# Bodies


def body_with(field: str) -> bytes:
    return f'{{"model":"tiny","max_tokens":1,"messages":[{{"role":"user","content":"x"}}],{field}}}'.encode()


PARTS: dict[str, Callable[[], str]] = {
    "metadata": lambda: f'"metadata":{costs.keys()}',
    "a tool's schema": lambda: f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{costs.keys()}}}}}]',
    "an unknown field": lambda: f'"unknown":{costs.keys()}',
    "logit_bias": lambda: f'"logit_bias":{costs.keys()}',
    "deep arrays": lambda: '"metadata":' + "[" * 4_000_000,
    "stop strings": lambda: f'"stop":{json.dumps(["x"] * 2_000_000)}',
    "tools": lambda: f'"tools":{json.dumps([{}] * 2_000_000)}',
    "escapes": lambda: '"user":"' + "\\u00e9" * 2_000_000 + '"',
    "digits": lambda: '"seed":' + "9" * 4_000_000,
    "numbers": lambda: f'"metadata":[{"1e9," * 3_000_000}1]',
}
"""Fields, which are made when they are sent: each process of the other tests imports this file."""


def add_part(name: str, field: Callable[[], str]) -> None:
    @attack(f"12 MB of {name}", mebibytes=700)
    async def part(context: Context) -> None:
        reply = await context.post(CHAT, body_with(field()))
        must(reply.status == (200 if name == "escapes" else 400), reply)


for part_name, part_field in PARTS.items():
    add_part(part_name, part_field)


@attack("a number that JSON does not have")
async def no_number(context: Context) -> None:
    for i in range(50):
        await costs.no_number(context, i)


@attack("a body in chunks of one byte")
async def tiny_chunks(context: Context) -> None:
    await costs.tiny_chunks(context, 0)


@attack("a body in chunks of one byte, without a key")
async def tiny_chunks_of_a_stranger(context: Context) -> None:
    data = wire.head_of("POST", CHAT, None, {"Transfer-Encoding": "chunked"}) + b"1\r\n \r\n" * 1_500_000
    reply = await wire.exchange(context.server.address, data)
    must(reply.status in (400, 401), reply)  # it is refused before its key is read


@attack("90 presented keys")
async def many_keys_presented(context: Context) -> None:
    for i in range(100):
        await costs.many_keys_presented(context, i)


@attack("a head of 100 headers, often")
async def headers(context: Context) -> None:
    fields = {f"X_{i}": "y" * 500 for i in range(90)}
    for _ in range(50):
        reply = await context.request("GET", "/v1/models", **fields)
        must(reply.status in (200, 431), reply)


HOSTS = (
    *(
        "example.com",
        "localhost.example.com",
        "localhost#.example.com",
        "localhost/example.com",
        "localhost\\example.com",
    ),
    *("127.0.0.1.example.com", "me@localhost", "localhost:80:80", "local host", "[::1].example.com", "", "."),
)
HEADS = (
    b"GET /v1/models HTTP/1.1\nHost: localhost\n\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n X: y\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: example.com\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2, 2\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: +2\r\n\r\n{}",
    b"POST /tokenize HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
)


@attack("hosts of others, and heads that are no HTTP")
async def strange_heads(context: Context) -> None:
    for _ in range(10):
        for host in HOSTS:
            reply = await context.request("GET", "/v1/models", Host=host)
            must(reply.status in (400, 403), f"{host}: {reply}")
        for head in HEADS:
            reply = await wire.exchange(context.server.address, head)
            must(reply.status in (400, 403), f"{head!r}: {reply}")


@attack("8 texts of 1 MB to tokenize", mebibytes=1500)
async def texts(context: Context) -> None:
    bodies = [{"model": "tiny", "prompt": f"{i} " + "ab " * 333_000} for i in range(8)]
    replies = await asyncio.gather(*(context.post("/tokenize", body) for body in bodies))
    must(all(reply.status == 200 for reply in replies), replies[0])


@attack("a million tokens to detokenize")
async def tokens(context: Context) -> None:
    for count, status in ((250_000, 200), (1_000_000, 400)):
        reply = await context.post("/detokenize", {"model": "tiny", "tokens": [20, 30] * (count // 2)})
        must(reply.status == status, reply.status)


# Work in each step


@attack("16 answers with a bias for 300 tokens, 1,000 stop tokens and long stop strings")
async def sampling(context: Context) -> None:
    fields = {"logit_bias": {str(i): 1 for i in range(300)}, "min_tokens": 90, "stop": ["x" * 1023 + "y"] * 2}
    fields |= {"stop_token_ids": list(range(300, 500)) * 5, "frequency_penalty": 0.1}
    path, body = chat("x", 100, stream=False, n=16, ignore_eos=True, **fields)
    reply = await context.post(path, body)
    must(reply.status == 200, reply)


@attack("16 answers with 20 log-probabilities for each token")
async def logprobs(context: Context) -> None:
    path, body = chat("x", 150, stream=False, n=16, ignore_eos=True, logprobs=True, top_logprobs=20)
    reply = await context.post(path, body)
    must(reply.status == 200, reply)


@attack("4 clients whose texts repeat themselves")
async def repetition(context: Context) -> None:
    """What came after the same tokens is a draft in each step. The pool has room for all."""

    prompts = ([20 + number, *(30 + i % 7 for i in range(99))] for number in range(4))
    await asyncio.gather(*(answered(context, *completion(prompt, 60, stream=False)) for prompt in prompts))


async def answered(context: Context, path: str, body: Any) -> None:
    reply = await context.post(path, body)
    must(reply.status == 200, reply)


@attack("4 clients of an adapter of another model")
async def adapted(context: Context) -> None:
    prompts = ([20 + (7 * number + 11 * i) % 400 for i in range(100)] for number in range(4))
    bodies = (completion(prompt, 60, stream=False, model="second:mine") for prompt in prompts)
    await asyncio.gather(*(answered(context, *each) for each in bodies))


# Constraints


def asked_with(schema: Any) -> dict[str, dict[str, Any]]:
    """A request of each API for an answer that fits a schema."""
    model, form = {"model": "tiny"}, {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
    messages = model | {"messages": user("x"), "max_tokens": 1}
    return {
        CHAT: messages | {"response_format": {"type": "json_schema", "json_schema": form}},
        COMPLETIONS: model | {"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": schema}},
        RESPONSES: model | {"input": "x", "max_output_tokens": 16, "text": {"format": form}},
        MESSAGES: messages | {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        OLLAMA: model | {"messages": user("x"), "format": schema, "stream": False, "options": {"num_predict": 1}},
    }


@attack("schemas and grammars beyond their limits")
async def deep_constraints(context: Context) -> None:
    """Each is harmless, and a little more than what is compiled, in each API that takes a schema."""
    schemas = [chain(name, MAX_DEPTH + 5) for name in WRAPPED] + [doubling(60), nested(MAX_NESTING + 1)]
    for schema in schemas:
        for path, body in asked_with(schema).items():
            reply = await context.post(path, body)
            must(reply.status == 400 and (b"schemas" in reply.body or b"nested" in reply.body), f"{path}: {reply}")
    path, body = chat("x", 1, stream=False, structured_outputs={"grammar": "start: " + "(" * (MAX_OPENINGS + 1)})
    reply = await context.post(path, body)
    must(reply.status == 400 and reply.json["error"]["code"] == "unsupported_constraint", reply)


@attack("schemas that are left out as far as they are not enforced")
async def loose_constraints(context: Context) -> None:
    """Keywords with schemas that no grammar expresses, as deep as a schema may be and a little deeper."""
    for wrap in LOOSE.values():
        for depth in (10, MAX_NESTING // 2 - 10, MAX_NESTING):
            schema: dict[str, Any] = {}
            for _ in range(depth):
                schema = wrap(schema)
            for path, body in asked_with(schema).items():
                reply = await context.post(path, body)
                must(reply.status in (200, 400), f"{path}: {reply}")


# Floods

ATTACKS += [Attack(f"a flood: {each.name}", each.play, each.mebibytes, works=True) for each in floods.FLOODS]


# Images


@contextlib.asynccontextmanager
async def seeing(context: Context, damage: Callable[[Path], None]) -> AsyncIterator[tuple[str, Reply]]:
    """The name of a model that sees, or would without the damage, and the answer to its load."""
    async with loaded(context, damage, BUNDLED_VISION) as found:
        yield found


def with_images(model: str, *files: bytes) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url_of(file)}} for file in files]
    question = {"type": "text", "text": "What number is in the picture?"}
    return {"model": model, "messages": [{"role": "user", "content": [question, *parts]}], "max_tokens": 4}


@attack("files that are no images, or hostile ones")
async def hostile_images(context: Context) -> None:
    async with seeing(context, lambda _: None) as (name, reply):
        must(reply.status == 200, reply)
        for _ in range(3):
            replies = await asyncio.gather(
                *(context.post(CHAT, with_images(name, file)) for file, _ in HOSTILE_IMAGES.values())
            )
            for reply, (_, reason) in zip(replies, HOSTILE_IMAGES.values(), strict=True):
                must(reply.status == 400 and reason in reply.json["error"]["message"], reply)


LARGE_IMAGES: dict[str, Callable[[int], bytes]] = {
    "PNG of one bit a pixel": lambda i: black_png(8000 - i, 5000),
    "PNG of 16 bits and 4 channels": lambda i: black_png(8000 - i, 5000, 16, 4),
    "JPEG": lambda i: encoded(Image.new("L", (8000 - i, 5000)), "JPEG"),
    "JPEG of four channels": lambda i: encoded(Image.new("CMYK", (8000 - i, 5000)), "JPEG"),
    "GIF": lambda i: encoded(Image.new("P", (8000 - i, 5000)), "GIF"),
    "WEBP with transparency": lambda i: encoded(Image.new("RGBA", (8000 - i, 5000)), "WEBP", lossless=True),
    "WEBP with losses": lambda i: encoded(Image.new("RGB", (8000 - i, 5000)), "WEBP", quality=1, method=0),
}


def add_large_images(kind: str, made: Callable[[int], bytes]) -> None:
    @attack(f"4 images of 40 MP at once: {kind}")
    async def large_images(context: Context) -> None:
        async with seeing(context, lambda _: None) as (name, reply):
            must(reply.status == 200, reply)
            bodies = [with_images(name, made(i)) for i in range(4)]
            replies = await asyncio.gather(*(context.post(CHAT, body) for body in bodies))
            must(all(reply.status in (200, 400, 429, 503) for reply in replies), replies[0])


for image_kind, image_made in LARGE_IMAGES.items():
    add_large_images(image_kind, functools.lru_cache(image_made))


@attack("200 images in a request, and 90 different ones")
async def many_images(context: Context) -> None:
    async with seeing(context, lambda _: None) as (name, reply):
        must(reply.status == 200, reply)
        refused = await context.post(CHAT, with_images(name, *[black_png(64, 64)] * 200))
        must(refused.status == 400 and "100" in refused.body.decode(), refused)
        many = await context.post(CHAT, with_images(name, *(black_png(64 + i, 64) for i in range(90))))
        must(many.status in (200, 400), many)


def vision_config(**values: Any) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        file = directory / "config.json"
        config = json.loads(file.read_text())
        config["vision_config"] |= values
        file.write_text(json.dumps(config))

    return damage


BLIND_DIRECTORIES = {
    "a vision tower of a million layers": vision_config(num_hidden_layers=10**6),
    "a vision tower of enormous sizes": vision_config(hidden_size=2**40, intermediate_size=2**40),
    "a vision tower with patches of no pixels": vision_config(patch_size=0),
    "preprocessor_config.json that is deep": hostile.write("preprocessor_config.json", "[" * 10_000_000),
    "preprocessor_config.json of a terabyte": hostile.sparse("preprocessor_config.json", 2**40),
}


def add_blind(name: str, damage: Callable[[Path], None]) -> None:
    @attack(f"a model with {name}", mebibytes=500)
    async def blind(context: Context) -> None:
        """It is refused, or served for text."""
        async with seeing(context, damage) as (model, reply):
            must(reply.status in (200, 400, 404, 500, 507), reply)
            if reply.status == 200:
                answer = await context.post(CHAT, with_images(model, black_png(64, 64)))
                must(answer.status == 400, answer)


for blind_name, blind_damage in BLIND_DIRECTORIES.items():
    add_blind(blind_name, blind_damage)


# What is stored


@attack("a chain of responses of 14 MB each", mebibytes=700)
async def responses(context: Context) -> None:
    """Of which no template shows anything."""
    hidden = {"type": "output_text", "text": "Yes.", "annotations": [{"url": "x" * 14_000_000}]}
    said = {"type": "message", "role": "assistant", "content": [hidden]}
    last: str | None = None
    for _ in range(8):
        body = {"model": "tiny", "input": [said, user("x")[0]], "max_output_tokens": 1, "previous_response_id": last}
        reply = await context.post(RESPONSES, body)
        gone = reply.status == 400 and reply.json["error"]["code"] == "previous_response_not_found"
        must(reply.status == 200 or gone, reply)
        last = reply.json["id"] if reply.status == 200 else None


@attack("files of 16 MB")
async def files(context: Context) -> None:
    for _ in range(3):
        uploaded = await context.upload("x" * 16_000_000)
        must(uploaded.status in (200, 400), uploaded)
        if uploaded.status == 200:
            must((await context.request("DELETE", f"/v1/files/{uploaded.json['id']}")).status == 200, "not deleted")


async def begin_batch(context: Context, bodies: Iterable[dict[str, Any]]) -> str:
    """Returns the id of the batch."""
    lines = (
        json.dumps({"custom_id": str(i), "method": "POST", "url": CHAT, "body": body}) for i, body in enumerate(bodies)
    )
    uploaded = await context.upload("\n".join(lines))
    must(uploaded.status == 200, uploaded)
    made = {"input_file_id": uploaded.json["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str((await context.post("/v1/batches", made)).json["id"])


async def after(context: Context, batch_id: str, *states: str) -> Any:
    """The batch when it is in another state than these."""
    for _ in range(600):
        found = (await context.request("GET", f"/v1/batches/{batch_id}")).json
        if found["status"] not in states:
            return found
        await asyncio.sleep(0.1)
    raise LostError(str(found))


@attack("a batch of 50,000 lines")
async def batch(context: Context) -> None:
    _, body = chat("x", 1, stream=False)
    batch_id = await begin_batch(context, itertools.repeat(body, 50_000))
    await after(context, batch_id, "validating")
    cancelled = await context.post(f"/v1/batches/{batch_id}/cancel", {})
    must(cancelled.status in (200, 409), cancelled)


# Model directories


@contextlib.asynccontextmanager
async def loaded(
    context: Context, damage: Callable[[Path], None], source: Path | None = None
) -> AsyncIterator[tuple[str, Reply]]:
    """The name of a damaged model, and the answer to its load. source: of the model; by default that of the streams."""
    directory = context.server.models / f"hostile-{time.monotonic_ns()}"
    shutil.copytree(source or context.server.models / "tiny", directory)
    try:
        damage(directory)
        yield directory.name, await context.request("POST", f"/v1/models/{directory.name}/load", key="admin")
        await context.request("POST", f"/v1/models/{directory.name}/unload", key="admin")
    finally:
        shutil.rmtree(directory)


REFUSED_DIRECTORIES = {
    "tokenizer.json that grows": hostile.change("tokenizer.json", normalizer=hostile.GROWS),
    "tokenizer.json of a million tokens": hostile.many_tokens,
    "tokenizer.json of a terabyte": hostile.sparse("tokenizer.json", 2**40),
    "tokenizer_config.json that is deep": hostile.write("tokenizer_config.json", "[" * 10_000_000),
    "tokenizer_config.json of 200,000 tokens": lambda directory: hostile.change(
        "tokenizer_config.json", added_tokens_decoder={str(i): {"content": f"<{i}>"} for i in range(200_000)}
    )(directory),
    "generation_config.json of a terabyte": hostile.sparse("generation_config.json", 2**40),
    "generation_config.json of a million ends": hostile.write("generation_config.json", hostile.MANY_ENDS),
    "chat_template.jinja that loops": costs.template(costs.LOOPS),
    "chat_template.jinja that is a FIFO": hostile.fifo("chat_template.jinja"),
    "config.json of a million layers": hostile.change("config.json", num_hidden_layers=10**6),
    "model.safetensors that is a FIFO": costs.fifo,
    "model.safetensors of a terabyte": hostile.sparse("model.safetensors", 2**40),
}


def add_directory(name: str, damage: Callable[[Path], None]) -> None:
    @attack(f"a {name}", mebibytes=500)
    async def directory(context: Context) -> None:
        async with loaded(context, damage) as (_, reply):
            must(reply.status in (200, 400, 404, 500, 507), reply)


for directory_name, directory_damage in REFUSED_DIRECTORIES.items():
    add_directory(directory_name, directory_damage)


def add_adapter(name: str) -> None:
    damage, _ = REFUSED_ADAPTERS[name]

    @attack(f"an adapter with {name}", mebibytes=500)
    async def adapter(context: Context) -> None:
        """It takes the place of the adapter of another model than that of the streams, which is loaded again."""
        directory = context.server.adapter
        good = Path(shutil.copytree(directory, directory.with_name(f"good-{time.monotonic_ns()}")))

        async def load() -> Reply:
            await context.request("POST", "/v1/models/second/unload", key="admin")
            return await context.request("POST", "/v1/models/second/load", key="admin")

        try:
            damage(directory)
            reply = await load()
            must(reply.status in (400, 500, 507) and "adapter" in reply.body.decode(), reply)
        finally:
            shutil.rmtree(directory)
            good.rename(directory)
        must((await load()).status == 200, "the adapter is not loaded again")


for adapter_name in (
    "a tensor of a terabyte",
    "a config of a terabyte",
    "a deep header",
    "a header of 35,000 tensors",
    "too many fields",
    "no weights of a rank",
):
    add_adapter(adapter_name)


def splitting(pattern: str) -> Callable[[Path], None]:
    """Texts are split by a regular expression."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return hostile.change("tokenizer.json", pre_tokenizer=split)


@attack("a tokenizer that panics")
async def panic(context: Context) -> None:
    async with loaded(context, splitting(r"((a|aa)+)+b")) as (name, reply):
        must(reply.status == 200, reply)
        for path, body in (
            ("/tokenize", {"model": name, "prompt": "a" * 40}),
            (COMPLETIONS, {"model": name, "prompt": "a" * 40, "max_tokens": 2}),
            (CHAT, {"model": name, "messages": user("a" * 40), "max_tokens": 2}),
        ):
            answer = await context.post(path, body)
            must(answer.status == 500 and "tokenizer failed" in answer.body.decode(), answer)
        health = await context.request("GET", "/health")
        must(health.json.get("batch_task_restarts", 0) == 0, health)


@attack("a tokenizer that panics in a batch")
async def panic_in_a_batch(context: Context) -> None:
    async with loaded(context, splitting(r"((a|aa)+)+b")) as (name, reply):
        must(reply.status == 200, reply)
        for model in (name, "tiny"):  # the next batch runs
            bodies = [{"model": each, "messages": user("a" * 40), "max_tokens": 2} for each in (model, "tiny")]
            ended = await after(context, await begin_batch(context, bodies), "validating", "in_progress", "finalizing")
            failed = int(model == name)
            must(ended["status"] == "completed", ended)
            must(ended["request_counts"] == {"total": 2, "completed": 2 - failed, "failed": failed}, ended)
        health = await context.request("GET", "/health")
        must(health.json.get("batch_task_restarts", 0) == 0, health)


@attack("a tokenizer that takes hours for a text")
async def slow_regex(context: Context) -> None:
    """The client waits for a while, and leaves."""
    async with loaded(context, splitting(r"a+b")) as (name, reply):
        must(reply.status == 200, reply)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(context.post("/tokenize", {"model": name, "prompt": "a" * 1_000_000}), 3)


@attack("a tokenizer that writes as much as it may", mebibytes=1200)
async def growing(context: Context) -> None:
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * MAX_REPLACED}
    async with loaded(context, hostile.change("tokenizer.json", normalizer=rule)) as (name, reply):
        must(reply.status == 200, reply)
        for length, status in ((200_000, 200), (1_000_000, 400)):
            answer = await context.post("/tokenize", {"model": name, "prompt": "a" * length})
            must(answer.status == status, answer.status)


@attack("a chat template that loops if it is told to")
async def slow_template(context: Context) -> None:
    text = "{% if messages[0].content == 'loop' %}" + costs.LOOPS + "{% endif %}{{ messages[0].content }}"
    async with loaded(context, costs.template(text)) as (name, reply):
        must(reply.status == 200, reply)
        answer = await context.post(CHAT, {"model": name, "messages": user("loop"), "max_tokens": 1})
        must(answer.status == 400, answer)


@attack("a model directory whose name forges a line of the log")
async def forged(context: Context) -> None:
    for name in ("a%0AFORGED%20line", "a%1b%5b2J", "a%0d%0aFORGED"):
        for method, path in (("POST", f"/v1/models/{name}/load"), ("GET", f"/v1/models/{name}")):
            reply = await context.request(method, path, key="admin")
            must(reply.status in (400, 404), reply)
    text = context.server.log.read_text(errors="replace")
    must("\x1b" not in text and not any(line.startswith("FORGED") for line in text.splitlines()), text[-1000:])


# Measuring


@dataclass(frozen=True)
class Seen:
    """Largest gap of the stream and longest wait for the second client's first token, in seconds, and both by the
    server's processor time (watcher.py); right answers, and what was wrong."""

    gap: float
    first: float
    gap_work: float
    first_work: float
    right: int
    problems: list[str]


def best(tries: list[Seen]) -> Seen:
    """A machine may be busy for a moment; an attack is there in all tries."""
    return Seen(
        min(seen.gap for seen in tries),
        min(seen.first for seen in tries),
        min(seen.gap_work for seen in tries),
        min(seen.first_work for seen in tries),
        sum(seen.right for seen in tries),
        [problem for seen in tries for problem in seen.problems],
    )


def is_as_fast(attacked: Seen, without: Seen, works: bool) -> bool:
    names = ("gap_work", "first_work") if works else ("gap", "first")
    pairs = ((getattr(attacked, name), getattr(without, name)) for name in names)
    return all(now <= RATIO * max(then, FLOOR_SECONDS) for now, then in pairs)


class Watcher:
    """The process of watcher.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, server: FaultyServer) -> AsyncIterator[Watcher]:
        address = [str(part) for part in (*server.address, server.pid)]
        command = ["-m", "tests.faults.watcher", *address, server.keys["streams"], server.keys["other"]]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
        try:
            yield cls(process)
        finally:
            process.kill()
            await process.wait()

    async def seen(self) -> Seen:
        """Since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return Seen(**json.loads(await self._process.stdout.readline()))

    async def during(self, play: Play, context: Context) -> Seen:
        """Play it until the time of a try is over, and to its end."""
        until = time.monotonic() + WINDOW_SECONDS
        await self.seen()
        while True:
            await play(context)
            if time.monotonic() >= until:
                return await self.seen()


async def nothing(_: Context) -> None:
    await asyncio.sleep(WINDOW_SECONDS)


def memory(pid: int, name: str) -> float:
    """MiB. name: VmRSS, or VmHWM for the most since it was reset."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


@contextlib.contextmanager
def output(kind: str) -> Iterator[int | None]:
    """A descriptor of what is there in place of a file."""
    if kind == "file":
        yield None
        return
    reading, writing = (os.open("/dev/null", 0), os.open("/dev/full", os.O_WRONLY)) if kind == "full" else os.pipe()
    with open(reading), open(writing, "w"):
        if kind == "left":
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), reading)
        yield writing


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> FaultyServer:
    server = FaultyServer(tmp_path_factory.mktemp("attacks"))
    floods.make_models(server)
    make_adapter(server.models / "second", server.adapter, 1)
    return server


async def measure(attack: Attack, server: FaultyServer) -> tuple[Seen, Seen, float, float]:
    """What was seen without the attack, and with it; MiB that the process grew by, and seconds to its end."""
    context = Context(server)
    await server.order(place="forward", times=10**9, seconds=STEP_SECONDS)
    async with Watcher.started(server) as watcher:
        await watcher.seen()
        without = best([await watcher.during(nothing, context) for _ in range(TRIES)])
        Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak begins here
        before = memory(server.pid, "VmRSS")
        tries = [await watcher.during(attack.play, context)]
        while len(tries) < MOST_TRIES and not is_as_fast(best(tries), without, attack.works):
            tries.append(await watcher.during(attack.play, context))
        grown = memory(server.pid, "VmHWM") - before
        playing = asyncio.ensure_future(attack.play(context))
        await asyncio.sleep(0.3)
        begin = time.monotonic()
        server.signal(signal.SIGTERM)
        await server.wait_end()
        ended = time.monotonic() - begin
        playing.cancel()
        with contextlib.suppress(asyncio.CancelledError, LostError, OSError, ValueError, KeyError):
            await playing
    return without, best(tries), grown, ended


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_leaves_others_alone(
    attack: Attack, server: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> tuple[Seen, Seen, float, float]:
        with output(attack.stdout) as stdout, output(attack.stderr) as stderr:
            await server.start("--adapter", f"second:mine={server.adapter}", stdout=stdout, stderr=stderr)
            try:
                return await measure(attack, server)
            finally:
                await server.kill()

    without, attacked, grown, ended = asyncio.run(run())
    with capsys.disabled():
        waits = ", ".join(
            f"{name} {1000 * getattr(without, name):.0f} -> {1000 * getattr(attacked, name):.0f} ms"
            for name in ("gap", "first", "gap_work", "first_work")
        )
        print(f"\n{attack.name}: {waits}, {grown:+.0f} MiB, end {ended:.1f} s", end=" ")
    assert without.problems + attacked.problems == []
    assert attacked.right > 0
    assert is_as_fast(attacked, without, attack.works)
    assert grown <= attack.mebibytes
    assert ended <= END_SECONDS
