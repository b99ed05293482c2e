"""What the clients of a soak do. A job is one request or a few, and raises `Wrong` if the server answers it wrongly."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak.cases import Case, same
from tests.soak.http_client import Answer, Connection

BATCH_SECONDS = 300.0
"""Without a finished line of a batch or of those before it. They run one after the other, below other requests."""
LOAD_ENDED = "was unloaded before its load had ended"
"""What a request is told that waits for a model while another client unloads it."""
BATCH_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class Wrong(Exception):
    """The server answered wrongly."""


class Refused(Exception):
    """The server cannot answer now: a 503, or the end of a stream that waited for a load that was ended."""


@dataclass(frozen=True)
class Client:
    """One of several. expected: the answers computed alone, by the case's name."""

    rng: random.Random
    connection: Connection
    cases: Sequence[Case]
    expected: dict[str, Any]

    def case(self, *paths: str) -> Case:
        """Any of these paths, or of all."""
        return self.rng.choice([case for case in self.cases if not paths or case.path in paths])

    async def ask(self, method: str, path: str, body: Any = None, *statuses: int, **headers: str) -> Answer:
        """statuses: those that are right, 200 by default. Raises Wrong or Refused."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self.connection.ask(method, path, body, named)
        if answer.status == 503:
            raise Refused
        if answer.status not in (statuses or (200,)):
            raise Wrong(f"{method} {path}: {answer.status} {answer.body[:300]!r} to {str(body)[:300]}")
        return answer


def check(case: Case, expected: Any, answer: Answer, streams: bool = False) -> None:
    """Raises Wrong if the answer is not the one computed alone."""
    read = case.read_stream if streams else case.read
    assert read is not None
    try:
        found = read(answer)
    except (ValueError, LookupError, TypeError) as error:
        raise Wrong(f"{case.name}: malformed ({error!r}): {answer.body[-500:]!r}") from None
    if not same(found, expected):
        raise Wrong(f"{case.name}{' streamed' * streams}: {found!r:.500}, alone {expected!r:.500}")


# -- answers that are known --------------------------------------------------------------------------------------------


async def answered(client: Client) -> None:
    """A request with a known answer, in one of the ways to ask for it."""
    case = client.case()
    streams = case.read_stream is not None and client.rng.random() < 0.5
    answer = await client.ask("POST", case.path, case.body | changes(client.rng, case) | streaming(case, streams))
    if streams and (error := error_in(answer)) is not None:
        raise Wrong(f"{case.name}: {error}")
    check(case, client.expected[case.name], answer, streams)


def streaming(case: Case, streams: bool) -> dict[str, Any]:
    return {} if case.read_stream is None else {"stream": streams}


def changes(rng: random.Random, case: Case) -> dict[str, Any]:
    """Fields that do not change the answer."""
    if case.path not in BATCH_PATHS or rng.random() < 0.5:
        return {}
    return rng.choice(({"service_tier": "flex"}, {"timeout": 100}, {"user": f"user-{rng.randrange(10**9)}"}))


def error_in(answer: Answer) -> Any:
    """The error at the end of a stream, if there is one: an event, a line, a response that failed. Raises Refused."""
    lines = [line.removeprefix(b"data:").strip() for line in answer.body.splitlines()]
    last = json.loads([line for line in lines if line.startswith(b"{")][-1])
    response = last.get("response")
    error = last.get("error") or (response.get("error") if isinstance(response, dict) else None)
    if LOAD_ENDED in str(error):
        raise Refused
    return error


async def deadline(client: Client) -> None:
    """The whole answer in time, or a 408."""
    case = client.case(*BATCH_PATHS)
    limits = {client.rng.choice(("timeout", "ttft_timeout")): client.rng.choice((0.02, 0.1, 0.4))}
    answer = await client.ask("POST", case.path, case.body | limits, 200, 408)
    if answer.status == 200:
        check(case, client.expected[case.name], answer)


async def batch(client: Client) -> None:
    """A file of requests, their batch and its output, and one that is cancelled from time to time."""
    path = client.rng.choice(BATCH_PATHS)
    cases = {f"line-{index}": client.case(path) for index in range(client.rng.randint(1, 5))}
    lines = [{"custom_id": name, "method": "POST", "url": path, "body": case.body} for name, case in cases.items()]
    file_id = await upload(client, "".join(json.dumps(line) + "\n" for line in lines))
    body = {"input_file_id": file_id, "endpoint": path, "completion_window": "24h"}
    made = (await client.ask("POST", "/v1/batches", body)).json
    if client.rng.random() < 0.2:
        await client.ask("POST", f"/v1/batches/{made['id']}/cancel", None, 200, 409)
    loop = asyncio.get_running_loop()
    deadline, before = loop.time() + BATCH_SECONDS, await finished_lines(client, made)
    while made["status"] not in ("completed", "failed", "expired", "cancelled"):
        if loop.time() > deadline:
            finished = await finished_lines(client, made)
            if finished == before:
                raise Wrong(f"a batch is {made['status']}, and no line was finished in {BATCH_SECONDS:.0f} s")
            deadline, before = deadline + BATCH_SECONDS, finished
        await asyncio.sleep(0.3)
        made = (await client.ask("GET", f"/v1/batches/{made['id']}")).json
    if made["status"] not in ("completed", "cancelled"):
        raise Wrong(f"a batch is {made['status']}: {made}")
    if made["output_file_id"] is not None:
        await check_output(client, cases, made["output_file_id"], made["status"] == "completed")
    for each in (file_id, made["output_file_id"], made["error_file_id"]):
        if each is not None:
            await client.ask("DELETE", f"/v1/files/{each}")


async def finished_lines(client: Client, batch: dict[str, Any]) -> int:
    """How many lines of a batch, and of the latest ones that were made before it, have ended."""
    earlier = (await client.ask("GET", f"/v1/batches?limit=100&after={batch['id']}")).json["data"]
    return sum(each["request_counts"][kind] for each in (batch, *earlier) for kind in ("completed", "failed"))


async def check_output(client: Client, cases: dict[str, Case], file_id: str, all_lines: bool) -> None:
    content = (await client.ask("GET", f"/v1/files/{file_id}/content")).body
    found = {line["custom_id"]: line["response"] for line in map(json.loads, content.splitlines())}
    if all_lines and found.keys() != cases.keys():
        raise Wrong(f"a batch has {sorted(found)} of {sorted(cases)}")
    for name, response in found.items():
        body = json.dumps(response["body"]).encode()
        check(cases[name], client.expected[cases[name].name], Answer(response["status_code"], {}, body))


async def upload(client: Client, content: str) -> str:
    head = '--part\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
    body = (
        head.format("purpose", "", "batch") + head.format("file", '; filename="lines.jsonl"', content) + "--part--\r\n"
    )
    form = {"Content_Type": "multipart/form-data; boundary=part"}
    return str((await client.ask("POST", "/v1/files", body.encode(), **form)).json["id"])


# -- requests that end early -------------------------------------------------------------------------------------------


async def left(client: Client) -> None:
    """The client leaves within a stream, or before its answer begins."""
    case = client.case("/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat")
    body = case.body | {"stream": client.rng.random() < 0.7}
    asking = asyncio.ensure_future(client.connection.ask("POST", case.path, body))
    await asyncio.wait([asking], timeout=client.rng.choice((0.001, 0.02, 0.1)))
    asking.cancel()
    await asyncio.wait([asking])
    client.connection.close()


async def cancelled(client: Client) -> None:
    """Another client cancels the request: its answer is whole, or ends with an error that says so."""
    case = client.case("/v1/chat/completions", "/v1/completions")
    name = f"cancelled-{client.rng.randrange(10**12)}"
    asking = asyncio.ensure_future(
        client.ask("POST", case.path, case.body | {"stream": True}, 200, 499, X_Request_Id=name)
    )
    await asyncio.wait([asking], timeout=client.rng.choice((0.001, 0.02, 0.1)))
    other = Connection(client.connection.port)
    status = (await other.ask("DELETE", f"/v1/requests/{name}")).status
    other.close()
    answer = await asking
    if status not in (200, 404):
        raise Wrong(f"a cancelled request: {status}")
    if answer.status == 200 and error_in(answer) is None:
        check(case, client.expected[case.name], answer, streams=True)
    elif answer.status == 200 and "cancel" not in str(error_in(answer)):
        raise Wrong(f"a cancelled request: {error_in(answer)}")


# -- the rest ----------------------------------------------------------------------------------------------------------

MALFORMED: Sequence[tuple[str, str, Any, int]] = (
    ("GET", "/nothing/{}", None, 404),
    ("PUT", "/v1/completions", None, 405),
    ("POST", "/v1/completions", b"{", 400),
    ("POST", "/v1/completions", b"\xff\xfe", 400),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": -2}, 400),
    ("POST", "/v1/chat/completions", {"messages": []}, 400),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "temperature": 3}, 400),
    ("POST", "/v1/chat/completions", {"model": "model-{}", "messages": [{"role": "user", "content": "a"}]}, 404),
    ("POST", "/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, 400),
    ("POST", "/v1/completions", {"prompt": "word " * 3000, "model": "small"}, 400),
    ("POST", "/v1/embeddings", {"input": [], "model": "vectors"}, 400),
    ("POST", "/v1/embeddings", {"input": "a", "model": "vectors", "dimensions": 7}, 400),
    ("POST", "/v1/rerank", {"query": "a", "model": "judge"}, 400),
    (
        "POST",
        "/v1/batches",
        {"input_file_id": "file-{}", "endpoint": "/v1/completions", "completion_window": "1h"},
        400,
    ),
    ("GET", "/v1/files/file-{}", None, 404),
    ("GET", "/v1/responses/resp-{}", None, 404),
    ("DELETE", "/v1/requests/request-{}", None, 404),
)


async def malformed(client: Client) -> None:
    method, path, body, status = client.rng.choice(MALFORMED)
    number = str(client.rng.randrange(10**9))
    if isinstance(body, dict):
        body = {key: value.replace("{}", number) if isinstance(value, str) else value for key, value in body.items()}
    await client.ask(method, path.replace("{}", number), body, status)


async def invalid_http(client: Client) -> None:
    """Bytes that are no request get a 400, and the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.connection.port)
    writer.write(client.rng.choice((b"\x16\x03\x01\x02", b"GET\r\n", b"POST / HTTP/9\r\n")) + b"\r\n\r\n")
    found = await asyncio.wait_for(reader.read(), 60)
    writer.transport.abort()
    if not found.startswith(b"HTTP/1.1 400 "):
        raise Wrong(f"invalid HTTP: {found[:100]!r}")


LOOKED_AT = ("/v1/status", "/metrics", "/health", "/v1/models", "/api/ps", "/v1/batches", "/openapi.json")


async def looked_at(client: Client) -> None:
    """What monitors and pages ask."""
    path = client.rng.choice(
        ("/v1/status", "/metrics", "/health", "/v1/models", "/api/ps", "/v1/batches", "/openapi.json")
    )
    answer = await client.ask("GET", path)
    if path == "/metrics" and b"mlxpaged_engine_steps_total" not in answer.body:
        raise Wrong("the metrics have no steps")


async def watched(client: Client) -> None:
    """The stream of the page, for a while."""
    _, headers = await client.connection.begin("GET", "/v1/status/stream")
    seen = 0
    async for _ in client.connection.pieces(headers):
        seen += 1
        if seen == 4:
            break
    client.connection.close()
    if seen < 4:
        raise Wrong("the stream of the status ended")


async def cleared(client: Client) -> None:
    await client.ask("POST", "/v1/cache/clear")


async def unloaded(client: Client) -> None:
    """A model that other clients use from time to time is unloaded and loaded again."""
    await client.ask("POST", "/v1/models/other/unload", None, 200, 409)
    await client.ask("POST", "/v1/models/other/load")


async def remembered(client: Client) -> None:
    """A response is read, continued and deleted."""
    body = client.case("/v1/responses").body | {"store": True}
    first = (await client.ask("POST", "/v1/responses", body)).json
    again = (await client.ask("GET", f"/v1/responses/{first['id']}")).json
    if again["output"] != first["output"]:
        raise Wrong("a stored response differs")
    body |= {"input": "and?", "previous_response_id": first["id"], "store": False}
    await client.ask("POST", "/v1/responses", body)
    await client.ask("DELETE", f"/v1/responses/{first['id']}")


JOBS: dict[Callable[[Client], Awaitable[None]], int] = {
    answered: 100,
    cancelled: 12,
    left: 12,
    deadline: 10,
    malformed: 12,
    looked_at: 8,
    invalid_http: 3,
    remembered: 3,
    cleared: 2,
    batch: 1,
    watched: 1,
    unloaded: 2,
}
"""How often each is done, of all."""
