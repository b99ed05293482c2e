"""Requests that would cost too much, or that cannot be answered after all, and hostile model directories."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.faults import wire
from tests.faults.fault import Context, fault, must, refused
from tests.faults.streams import CHAT, COMPLETIONS, chat, headers_of, user
from tests.faults.table import LostError, Outcome, judge
from tests.faults.wire import answer_of

DIGITS = "((a{1,100}){1,100}){1,100}"
RULES = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} | "x" r{i + 1}' for i in range(800)) + '\nr800: "y"'
DOUBLES = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(20)) + '\nr20: "y"'
CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
    {"structured_outputs": {"regex": DIGITS}},
    {"structured_outputs": {"grammar": RULES}},
    {"structured_outputs": {"grammar": DOUBLES}},
    {"structured_outputs": {"regex": ".?" * 4000}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"grammar": "start: start"}},
    {"structured_outputs": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}}},
]


@fault("a constraint that cannot go on", 80, parallel=3)
async def constraint(context: Context, i: int) -> Outcome:
    path, body = chat("Go on.", 6, **CONSTRAINTS[i % len(CONSTRAINTS)])
    reply = await context.post(path, body)
    outcome = judge(path, reply, None, (200, 400, 503))  # 503: two others are compiled
    must(b'"error"' not in reply.body or reply.status != 200, reply)
    return outcome


@fault("a regular expression without bounds", 60, parallel=3)
async def regex(context: Context, i: int) -> Outcome:
    text = (".?" * (1000 + i), "(a|b|){900}" * (i % 3 + 2), "x{1,9999}" * 20, "(.*a){60}")[i % 4]
    path, body = chat("Go on.", 6, structured_outputs={"regex": text})
    return judge(path, await context.post(path, body), None, (200, 400))


@fault("2,048 embeddings", 10, parallel=2, seconds=60)
async def embeddings(context: Context, i: int) -> Outcome:
    body = {"model": "vectors", "input": [f"{i} {n} and some words more" for n in range(2048)]}
    reply = await context.post("/v1/embeddings", body)
    if judge("/v1/embeddings", reply, None, (200, 400, 503)) is Outcome.RIGHT:
        must(len(reply.json["data"]) == 2048, "embeddings are missing")
        return Outcome.RIGHT
    return Outcome.REFUSED


@fault("a deep and wide body", 24, parallel=2, seconds=60)
async def deep_body(context: Context, i: int) -> Outcome:
    deep = ('{"a":' * 150 + "1" + "}" * 150, '[{"b":[]},' * 100 + "1" + "]" * 100)[i % 2]
    wide = ",".join([deep] * (12_000_000 // len(deep)))
    body = f'{{"model":"tiny","messages":[{{"role":"user","content":"x"}}],"metadata":[{wide}]}}'
    return refused(CHAT, await context.post(CHAT, body.encode()), 400)


@fault("16 long stop strings", 60)
async def stop_strings(context: Context, i: int) -> Outcome:
    stop = [f"{n:02}" + "ab" * 63 for n in range(16)]
    path, body = chat("Go on.", 40, stop=stop, ignore_eos=True)
    reply = await context.post(path, body)
    plain_path, plain = chat("Go on.", 40, ignore_eos=True)
    if reply.body.count(b"data:") == 0:
        raise LostError(str(reply))
    return judge(path, reply, answer_of(CHAT, await context.post(plain_path, plain)))


BOMBS = [
    "<|im_end|>" * 100_000,
    "a" * 1_000_000,
    " " * 1_000_000,
    "\U0001f600" * 250_000,
    "<|im" * 200_000,
    "\x00" * 10**6,
]


@fault("a text that is slow to tokenize", 36, parallel=2)
async def bomb(context: Context, i: int) -> Outcome:
    text = BOMBS[i // 2 % len(BOMBS)]
    path = ("/tokenize", COMPLETIONS)[i % 2]
    body = {"model": "tiny", "prompt": text} | ({"max_tokens": 1} if i % 2 else {})
    return judge(path, await context.post(path, body), None, (200, 400, 413))


@functools.cache
def keys() -> str:
    """Thirteen megabytes of JSON."""
    return "{" + ",".join(f'"{n}":1' for n in range(900_000)) + "}"


@fault("a body of a million keys", 12, parallel=2, seconds=60)
async def many_keys(context: Context, i: int) -> Outcome:
    place = ('"metadata":%s', '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]')[i % 2] % keys()
    body = f'{{"model":"tiny","messages":[{{"role":"user","content":"x"}}],{place}}}'
    return refused(CHAT, await context.post(CHAT, body.encode()), 400, code="too_many_keys")


@fault("a number that JSON does not have", 200)
async def no_number(context: Context, i: int) -> Outcome:
    number = ("NaN", "1e999", "-Infinity", "[[-1e400]]")[i % 4]
    tool = f'{{"type":"function","name":"f","parameters":{{"const":{number}}}}}'
    body = f'{{"model":"tiny","input":"x","tools":[{tool}]}}'
    return refused("/v1/responses", await context.post("/v1/responses", body.encode()), 400, code="invalid_json")


@fault("a body in chunks of one byte", 12, parallel=2, seconds=60)
async def tiny_chunks(context: Context, i: int) -> Outcome:
    fields = headers_of(context.server, "victim") | {"Transfer-Encoding": "chunked"}
    data = wire.head_of("POST", CHAT, None, fields) + b"1\r\n \r\n" * 1_500_000 + b"0\r\n\r\n"
    return refused(CHAT, await wire.exchange(context.server.address, data), 400)


@fault("90 presented keys", 200)
async def many_keys_presented(context: Context, i: int) -> Outcome:
    data = context.bytes_of(i).replace(b"\r\n", b"\r\n" + b"X-Api-Key: unknown\r\n" * 90, 1)
    return refused("", await wire.exchange(context.server.address, data), 401)


def change(**fields: Any) -> Any:
    def damage(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | fields))

    return damage


def template(text: str) -> Any:
    def damage(directory: Path) -> None:
        (directory / "chat_template.jinja").write_text(text)

    return damage


def fifo(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")


def remove(name: str) -> Any:
    return lambda directory: (directory / name).unlink()


def replace(name: str, data: bytes) -> Any:
    return lambda directory: (directory / name).write_bytes(data)


LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
HOSTILE = {
    "layers": change(num_hidden_layers=10**6),
    "hidden": change(hidden_size=10**15),
    "vocab": change(vocab_size=10**15),
    "type": change(model_type="../../x"),
    "loops": template(LOOPS),
    "large": template("{{ 'x' * 999999999 }}"),
    "fifo": fifo,
    "no-tokenizer": remove("tokenizer.json"),
    "no-config": remove("config.json"),
    "empty": replace("model.safetensors", b""),
    "header": replace("model.safetensors", b"\xff" * 64),
    "json": replace("config.json", b"[" * 100_000),
    "tokenizer": replace("tokenizer.json", b"{}"),
}


@fault("a hostile model directory", 52, parallel=1, seconds=60)
async def hostile(context: Context, i: int) -> Outcome:
    """It is refused, or its chat template when a chat needs it."""
    name = list(HOSTILE)[i % len(HOSTILE)]
    directory = context.server.models / f"hostile-{name}-{i}"
    shutil.copytree(context.server.models / "tiny", directory)
    HOSTILE[name](directory)
    try:
        reply = await context.request("POST", f"/v1/models/{directory.name}/load", key="admin")
        if judge("", reply, None, (200, 400, 404, 500, 507)) is Outcome.REFUSED:
            return Outcome.REFUSED
        body = {"model": directory.name, "messages": user("x"), "max_tokens": 2}
        refused(CHAT, await context.post(CHAT, body), 400)
        unloaded = await context.request("POST", f"/v1/models/{directory.name}/unload", key="admin")
        must(unloaded.status == 200, unloaded)
        return Outcome.REFUSED
    finally:
        shutil.rmtree(directory)
