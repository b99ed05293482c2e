"""What the API tests share: raw requests, collected answers, and an engine that steps only when told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from openai import AsyncOpenAI
from openai.types import CompletionChoice
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from mlxpaged.api.access.key_file import KeyEntry, KeyFile, make_key, write
from mlxpaged.api.batches.lines import FileCheck
from mlxpaged.core.scheduling.sequence import SequenceStatus
from mlxpaged.engine.engine_thread import EngineThread
from tests.support import RunningServer, demo_vocab_size, wait_until

One = TypeVar("One")
Other = TypeVar("Other")

DEADLINE = 300.0
"""Seconds after which a test gives up; nothing is expected to take that long."""


def ask(question: str, **fields: Any) -> dict[str, Any]:
    """A greedy chat request of one question."""
    return {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0} | fields


def run_on(prompt: Any, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy completion request for exactly `num_tokens` tokens."""
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
    return body | fields


def random_tokens(count: int, seed: int) -> list[int]:
    """Ordinary tokens, no special ones. Different seeds share no prefix block."""
    source = random.Random(seed)
    return [source.randrange(16, demo_vocab_size()) for _ in range(count)]


def chat_tokens(server: RunningServer, messages: Sequence[dict[str, Any]]) -> list[int]:
    assert server.engine.info is not None
    return server.engine.info.tokenizer.apply_chat_template(messages)


def tokens_of(server: RunningServer, text: str) -> list[int]:
    assert server.engine.info is not None
    return server.engine.info.tokenizer.encode(text)


def block_bytes(server: RunningServer) -> int:
    """Memory of one KV block of the served model."""
    assert server.engine.info is not None
    return server.engine.info.kv_cache_bytes // server.engine.info.num_blocks


@contextlib.contextmanager
def raw(server: RunningServer) -> Iterator[httpx.Client]:
    # verify=False: loading the system's certificates takes longer than most tests.
    with httpx.Client(base_url=server.url, timeout=DEADLINE, trust_env=False, verify=False) as client:
        yield client


def side_by_side(one: Callable[[], One], other: Callable[[], Other]) -> tuple[One, Other]:
    """The results of two calls that run at the same time. Two requests share their steps, which halves their time."""
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(other)
        return one(), later.result()


def events(lines: Iterator[str]) -> Iterator[Any]:
    """The data of server-sent events: parsed JSON, or the string [DONE]. A loaded machine may be silent for so long
    that there are comments."""
    for line in lines:
        if line and not line.startswith(":"):
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def stream_events(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    with raw(server) as client, client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        return list(events(response.iter_lines()))


def text_of(chunks: Sequence[Any]) -> str:
    """The text of all chunks of one choice of a stream, of either route."""
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk.get("choices", ())]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def post(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a completion request, or to a chat request where it has messages."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with raw(server) as client:
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


def answer_text(server: RunningServer, body: dict[str, Any]) -> str:
    choice = post(server, body)["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def legacy_logprobs(choice: CompletionChoice) -> list[tuple[str, Any, Any]]:
    """The token, its log-probability and the most likely tokens, at each place of a completion. The offsets fit the
    tokens."""
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    return list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))


def stream_together(server: RunningServer, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The texts of all requests, streamed at the same time with the official asynchronous client."""
    known = {"model", "messages", "prompt", "temperature", "max_tokens", "seed", "stop"}

    async def one(client: AsyncOpenAI, body: dict[str, Any]) -> str:
        fields = {name: value for name, value in body.items() if name in known}
        extra = {name: value for name, value in body.items() if name not in known}
        create = client.chat.completions.create if "messages" in body else client.completions.create
        stream = await create(**fields, extra_body=extra, stream=True)
        return text_of([chunk.model_dump(exclude_none=True) async for chunk in stream])

    async def together() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(limits=limits, timeout=DEADLINE, trust_env=False, verify=False) as http,
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
        ):
            return await asyncio.gather(*(one(client, body) for body in bodies))

    return asyncio.run(together())


def stream_at_once(server: RunningServer, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """As `stream_together`, but no request has more than one step before all have arrived."""
    with ThreadPoolExecutor(1) as thread, StepGate(server) as gate:
        texts = thread.submit(stream_together, server, bodies)
        wait_until(lambda: server.engine.num_unfinished == len(bodies) or texts.done())
        gate.open()
        return texts.result()


def finish_round(server: RunningServer) -> None:
    """Until the event loop has done what it was about to do."""
    server.run(asyncio.sleep(0)).result(DEADLINE)


def samples(server: RunningServer) -> list[Sample]:
    """What /metrics has."""
    with raw(server) as client:
        response = client.get("/metrics")
    assert response.status_code == 200
    return [sample for family in text_string_to_metric_families(response.text) for sample in family.samples]


def metrics(server: RunningServer) -> dict[str, float]:
    """Sample name, with its labels' values, -> value; summed over the models."""
    found: dict[str, float] = defaultdict(float)
    for sample in samples(server):
        found[sample_name(sample)] += sample.value
    return dict(found)


def sample_name(sample: Sample) -> str:
    return "|".join([sample.name, *(value for label, value in sample.labels.items() if label != "model")])


@dataclass
class Background:
    """A request in a thread; `result` waits for its answer."""

    thread: threading.Thread
    outcome: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def post(cls, server: RunningServer, path: str, body: dict[str, Any], **headers: str) -> Background:
        return cls.request(
            server, "POST", path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    @classmethod
    def request(cls, server: RunningServer, method: str, path: str, **options: Any) -> Background:
        outcome: dict[str, Any] = {}

        def work() -> None:
            try:
                with raw(server) as client:
                    outcome["response"] = client.request(method, path, **options)
            except Exception as error:
                outcome["error"] = error

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return cls(thread, outcome)

    def result(self) -> httpx.Response:
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive(), "no answer"
        if "error" in self.outcome:
            raise self.outcome["error"]
        response: httpx.Response = self.outcome["response"]
        return response

    @property
    def text(self) -> str:
        """The answer to a streamed or whole completion or chat request."""
        response = self.result()
        assert response.status_code == 200, response.text
        if response.headers["content-type"].startswith("text/event-stream"):
            return text_of(list(events(iter(response.text.splitlines()))))
        choice = response.json()["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])


class StepGate:
    """Forward passes happen only as permitted, so that a test decides how far a request has come."""

    def __init__(self, server: RunningServer) -> None:
        self._hold(server.core.runner, "forward")

    def _hold(self, owner: Any, method: str) -> None:
        self._owner, self._method = owner, method
        self._forward = getattr(owner, method)
        self._permits = threading.Semaphore(0)
        self._open = threading.Event()
        self._allowed = self._arrived = self._passed = 0

    def __enter__(self) -> StepGate:
        def gated(*args: Any) -> Any:
            self._arrived += 1
            while not self._open.is_set() and not self._permits.acquire(timeout=0.01):
                pass
            self._passed += 1
            return self._forward(*args)

        object.__setattr__(self._owner, self._method, gated)  # a model may be frozen
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        object.__setattr__(self._owner, self._method, self._forward)

    @property
    def is_held(self) -> bool:
        """Whether a step waits for its permit, all others having been used."""
        return self._passed == self._allowed < self._arrived

    def wait_held(self) -> None:
        wait_until(lambda: self.is_held)

    def allow(self, steps: int) -> None:
        self._allowed += steps
        self._permits.release(steps)

    def open(self) -> None:
        self._open.set()


class EmbeddingGate(StepGate):
    """The same for the steps of a model that makes embeddings."""

    def __init__(self, server: RunningServer, model: str) -> None:
        embedder = server.core_of(model).embedder
        assert embedder is not None
        self._hold(embedder.model, "decode")


def within_one_step(server: RunningServer, gate: StepGate, method: str, path: str, **options: Any) -> httpx.Response:
    """The answer to a question to the engine, which is in the middle of a step: that one is let through, no other."""
    gate.wait_held()
    before = queued_commands(server)
    pending = Background.request(server, method, path, **options)
    wait_until(lambda: queued_commands(server) > before)
    gate.allow(1)
    return pending.result()


def queued_commands(server: RunningServer) -> int:
    """Questions that the engine thread has not answered yet."""
    assert isinstance(server.engine.host, EngineThread)
    return server.engine.host.commands.qsize()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def write_keys(path: Path, **entries: dict[str, Any]) -> dict[str, str]:
    """A file of new keys with these names and settings; the keys by their names."""
    made = {name: make_key() for name in entries}
    write(
        path,
        KeyFile(
            keys=tuple(
                KeyEntry(name=name, salt=made[name][1], hash=made[name][2], **fields)
                for name, fields in entries.items()
            )
        ),
    )
    return {name: key for name, (key, _, _) in made.items()}


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def tick(self, server: RunningServer, seconds: float = 1.0) -> None:
        """From now on, every forward pass takes so long."""
        forward = server.core.runner.forward

        def slow(*args: Any) -> Any:
            self.advance(seconds)
            return forward(*args)

        server.core.runner.forward = slow  # type: ignore[method-assign]


def start(server: RunningServer, body: dict[str, Any], request_id: str, **headers: str) -> Background:
    """A request with an id of its own, once the engine has all its sequences."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    pending = Background.post(server, path, body, X_Request_Id=request_id, **headers)
    requests = server.app.state.server.open_requests
    wait_until(lambda: any(each.request_id == request_id and each.submitted for each in list(requests)))
    return pending


def run_until_preempted(server: RunningServer, gate: StepGate, request_id: str) -> None:
    """Step until the request has lost its blocks."""

    def preempted() -> bool:
        waiting = server.core.status().waiting  # no step runs, so that this thread may ask
        states = [sequence.status for sequence in waiting if sequence.request_id == request_id]
        return states in ([SequenceStatus.PREEMPTED], [SequenceStatus.SWAPPED])

    gate.wait_held()
    while not preempted():  # permits that are not used yet would carry it past that
        gate.allow(1)
        gate.wait_held()


def check_failure(pending: Background, status: int, kind: str, code: str) -> dict[str, Any]:
    """The error that ended a request, streamed or not."""
    response = pending.result()
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.status_code == 200
        received = list(events(iter(response.text.splitlines())))
        assert "[DONE]" not in received
        body = received[-1]
    else:
        assert response.status_code == status, response.text
        body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["code"]) == (kind, code)
    assert "Traceback" not in error["message"]
    return error


def raw_post(server: RunningServer, path: str, body: dict[str, Any], missing: int = 0) -> socket.socket:
    """A request on a plain socket, sent whole but for the last `missing` bytes; nothing is read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=DEADLINE)
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + payload[: len(payload) - missing])
    return connection


def checked_file(path: Path, endpoint: str) -> FileCheck:
    """What the server makes of the input file of a batch."""
    check = FileCheck(path, endpoint)
    while not check.is_done:
        check.check_part()
    return check
