"""/v1/files and /v1/batches with the official client: answers, errors, cancelling, expiry, restarts, and idle room."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Batch
from pydantic_core import to_json
from starlette import formparsers

from mlxpaged.api.access import key_file, key_ring
from mlxpaged.api.app import create_app
from mlxpaged.api.batches import lines as batch_lines
from mlxpaged.api.batches import runner
from mlxpaged.api.batches.records import BatchRecord, FileRecord, OutputLine
from mlxpaged.api.batches.runner import BatchRunner
from mlxpaged.api.batches.store import Store, text_of
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.generation import prompt
from mlxpaged.durable_files import DirectoryInUseError
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    DEADLINE,
    Background,
    StepGate,
    answer_text,
    ask,
    checked_file,
    post,
    queued_commands,
    raw,
    run_on,
    write_keys,
)
from tests.api.test_plain_tools import TOO_MANY
from tests.api.test_queues import Held, check_turns
from tests.support import RunningServer, running_server, short_id, wait_until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
DECISIONS = "/v1/decisions"
CONFIG = EngineConfig(kv_cache_bytes=16_000_000, max_num_seqs=4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(CONFIG, data_dir=tmp_path_factory.mktemp("data") / "new") as server:
        yield server


def jsonl(bodies: Sequence[Any], url: str = COMPLETIONS) -> bytes:
    lines = [{"custom_id": f"line-{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def submit(client: OpenAI, content: bytes, endpoint: Any = COMPLETIONS, **fields: Any) -> Batch:
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: OpenAI, batch: Batch) -> Batch:
    found: list[Batch] = []

    def over() -> bool:
        found.append(client.batches.retrieve(batch.id))
        return found[-1].status in ("completed", "failed", "expired", "cancelled")

    wait_until(over, DEADLINE, pause=0.02)  # each question takes as long as a step
    return found[-1]


def lines_of(client: OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """By custom id."""
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert len({line["custom_id"] for line in lines}) == len({line["id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


@pytest.mark.parametrize("custom_id", ["a", '"body":null', '\\"body":'])
def test_the_body_of_an_answer_is_kept_as_it_came(custom_id: str) -> None:
    """It can have megabytes. Parsing it would block all threads."""
    body = {"text": 'a\u2028b\x85 "body":null', "logprobs": [-1.5, None]}
    response = {"status_code": 200, "request_id": "r", "body": to_json(body)}
    text = text_of(OutputLine(id="i", custom_id=custom_id, response=response))
    assert text.splitlines() == [text]
    expected = {"id": "i", "custom_id": custom_id, "response": response | {"body": body}, "error": None}
    assert json.loads(text) == expected


def test_every_line_gets_the_answer_that_its_route_gives(client: OpenAI, server: RunningServer) -> None:
    questions = [f"What is {i} + {i + 1}?" for i in range(12)]
    bodies = [ask(question, max_tokens=12) for question in questions]
    labels: Any = {"night": "1", "number": 2, "nothing": None}
    batch = submit(client, jsonl(bodies, CHAT), CHAT, metadata=labels)
    shown = {"night": "1", "number": "2", "nothing": "null"}
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, shown)
    assert batch.expires_at == batch.created_at + 86400
    done = ended(client, batch)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"completed": 12, "failed": 0, "total": 12}
    assert done.error_file_id is None
    assert done.created_at <= (done.in_progress_at or 0) <= (done.finalizing_at or 0) <= (done.completed_at or 0)
    lines = lines_of(client, done.output_file_id)
    for i, body in enumerate(bodies):
        response = lines[f"line-{i}"]["response"]
        assert (response["status_code"], lines[f"line-{i}"]["error"]) == (200, None)
        answer = response["body"]
        assert answer["choices"] == post(server, body)["choices"]
        assert (answer["object"], answer["service_tier"]) == ("chat.completion", "flex")
        assert answer["id"] == response["request_id"]
    assert batch.id in [each.id for each in client.batches.list()]


def test_lines_may_be_responses(client: OpenAI, server: RunningServer) -> None:
    body = {"model": "demo", "input": "What is 17 + 25?", "temperature": 0}
    bodies = [body, body | {"store": True}, body | {"tools": [{"type": "web_search"}]}, body | {"stream": True}]
    batch = ended(client, submit(client, jsonl(bodies, RESPONSES), RESPONSES))
    answers = [line["response"]["body"] for line in lines_of(client, batch.output_file_id).values()]
    assert {answer["output"][0]["content"][0]["text"] for answer in answers} == {"42"}
    assert {answer["service_tier"] for answer in answers} == {"flex"}
    kept = {answer["id"]: answer["store"] for answer in answers}
    assert sorted(kept.values()) == [False, True]
    for response_id, stored in kept.items():
        assert ((None, response_id) in server.app.state.responses.responses) == stored
    errors = lines_of(client, batch.error_file_id).values()
    assert {line["response"]["body"]["error"]["param"] for line in errors} == {"tools.0.type", "stream"}


def test_lines_may_be_decisions(client: OpenAI, server: RunningServer) -> None:
    asked = {"type": "choice", "instructions": "Which?", "choices": [{"value": "river"}, {"value": "stone"}]}
    bodies = [{"model": "demo", "input": f"river {i}", "questions": [asked, asked]} for i in range(3)]
    lines = lines_of(client, ended(client, submit(client, jsonl(bodies, DECISIONS), DECISIONS)).output_file_id)
    with raw(server) as http:
        for i, body in enumerate(bodies):
            answer = lines[f"line-{i}"]["response"]["body"]
            alone = http.post(DECISIONS, json=body).json()
            found, expected = (
                [each["probability"] for answer in each["answers"] for each in answer["probabilities"]]
                for each in (answer, alone)
            )
            assert found == pytest.approx(expected, abs=1e-5)


def test_a_large_line_is_read_off_the_event_loop(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, rendering = [], prompt.rendering

    def recorded(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return rendering(*args)

    monkeypatch.setattr(prompt, "rendering", recorded)
    bodies = [ask("What is 17 + 25?", max_tokens=4), ask("word " * 20_000)]
    done = ended(client, submit(client, jsonl(bodies, CHAT), CHAT))
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    assert sorted(name.startswith("mlxpaged-body") for name in threads) == [False, True]


def test_a_line_that_fails_fails_alone(client: OpenAI) -> None:
    bad: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 9},
        "stream": {"stream": True},
        "service_tier": {"service_tier": "priority"},
        "lora": {"lora": [{"id": 0}]},
        "n": {"n": 5},
        "prompt": {"prompt": [20] * 5000},
        "model": {"model": "gpt-4"},
    }
    good = run_on("Once upon", 4)
    batch = ended(client, submit(client, jsonl([good, *(good | fields for fields in bad.values()), good])))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, len(bad))
    assert set(lines_of(client, batch.output_file_id)) == {"line-0", f"line-{len(bad) + 1}"}
    errors = lines_of(client, batch.error_file_id)
    for i, param in enumerate(bad, start=1):
        response = errors[f"line-{i}"]["response"]
        assert response["status_code"] == (404 if param == "model" else 400)
        assert response["body"]["error"]["param"] == param


def test_the_log_names_the_ignored_fields_of_a_line(client: OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxpaged.api.ignored_fields")
    line = ask("x", max_tokens=1, num_ctx=9, colour="red", tools=TOO_MANY)
    batch = ended(client, submit(client, jsonl([line] * 2, CHAT), CHAT))
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 0)
    assert [record.getMessage() for record in caplog.records if record.name.endswith("ignored_fields")] == [
        "fields of batches are ignored: num_ctx, colour",
        "fields of batches are ignored: tools",
    ]


LINE = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": run_on("x", 1)}


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (b"", "empty_file", 1),
        (b"\n\n", "empty_file", 1),
        (b"hello\n", "invalid_json_line", 1),
        (b"\xff\xfe\n", "invalid_json_line", 1),
        (b"[" * 100_000, "invalid_json_line", 1),
        ([LINE, LINE], "duplicate_custom_id", 2),
        ([LINE, LINE | {"url": CHAT, "custom_id": "b"}], "mismatched_url", 2),
        ([LINE | {"method": "GET"}], "invalid_request", 1),
        ([LINE | {"body": 3}], "invalid_request", 1),
        ([LINE | {"custom_id": 3}], "invalid_request", 1),
        ([LINE | {"more": 3}], "invalid_request", 1),
        ([{}], "invalid_request", 1),
    ],
    ids=short_id,
)
def test_a_file_that_is_no_batch_runs_nothing(client: OpenAI, lines: Any, code: str, number: int) -> None:
    content = lines if isinstance(lines, bytes) else "\n".join(map(json.dumps, lines)).encode()
    batch = ended(client, submit(client, content))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
    assert batch.output_file_id is None


@pytest.mark.parametrize(
    ("limit", "value", "found"),
    [
        ("MAX_REQUESTS", 2, [("too_many_requests", 3)]),
        ("MAX_LINES", 2, [("too_many_requests", 3)]),
        ("MAX_LINE_BYTES", 9, [("line_too_long", line) for line in (1, 2, 3, 4)]),
        ("MAX_ERRORS", 1, [("duplicate_custom_id", 4)]),
    ],
)
def test_a_file_over_a_limit_is_refused_with_its_lines(
    limit: str, value: int, found: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, limit, value)
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(LINE | {"custom_id": name}) for name in "abca"))
    errors = checked_file(path, COMPLETIONS).errors
    assert [(error.code, error.line) for error in errors] == found


def test_blank_lines_count(tmp_path: Path) -> None:
    """150 MB of line feeds took 24 seconds. A file may have one after each request."""
    path = tmp_path / "requests.jsonl"
    path.write_text("\n" * batch_lines.MAX_LINES)
    assert [error.code for error in checked_file(path, COMPLETIONS).errors] == ["empty_file"]
    path.write_text("\n" * (batch_lines.MAX_LINES + 1) + "no request")
    [error] = checked_file(path, COMPLETIONS).errors
    assert (error.code, error.line) == ("too_many_requests", batch_lines.MAX_LINES + 1)


@pytest.mark.parametrize("part", [1, 200, 2**20])
def test_a_file_is_checked_in_parts_with_the_same_result(tmp_path: Path, part: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(batch_lines, "PART_BYTES", part)
    lines = [json.dumps(LINE | {"custom_id": name}) for name in ("a", "é", "b", "a")] + ["", "{}", "[]"]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))
    check = checked_file(path, COMPLETIONS)
    assert [(error.code, error.line) for error in check.errors] == [
        ("duplicate_custom_id", 4),
        ("invalid_request", 6),
        ("invalid_request", 7),
    ]
    assert [place.custom_id for place in check.places] == ["a", "é", "b"]
    assert [batch_lines.read_line(path, place).custom_id for place in check.places] == ["a", "é", "b"]


def test_files_are_kept_listed_and_deleted(client: OpenAI) -> None:
    content = b"\n".join([b'{"a": "caf\xc3\xa9"}'] * 100_000)
    files = [client.files.create(file=(f"f{i}.jsonl", content), purpose="batch") for i in range(3)]
    assert files[0].bytes == len(content)
    assert client.files.retrieve(files[1].id).model_dump() == files[1].model_dump()
    assert client.files.content(files[1].id).content == content
    newest = [file.id for file in client.files.list(purpose="batch", limit=2)]  # follows the pages
    assert newest[:3] == [file.id for file in files[::-1]]
    oldest = [file.id for file in client.files.list(order="asc")]
    assert oldest[-3:] == [file.id for file in files]
    assert client.files.delete(files[0].id).deleted
    with pytest.raises(openai.NotFoundError, match="file"):
        client.files.retrieve(files[0].id)
    assert files[0].id not in [file.id for file in client.files.list()]


def test_files_are_read_and_deleted_at_the_same_time(server: RunningServer) -> None:
    """Each request is answered: with the file, or with 404 after it is deleted."""

    async def all_at_once(client: httpx.AsyncClient) -> list[int]:
        form = {"data": {"purpose": "batch"}, "files": {"file": b"{}" * 1000}}
        file_id = (await client.post("/v1/files", **form)).json()["id"]
        path = f"/v1/files/{file_id}"
        requests = [client.get(f"{path}/content") if i % 2 == 0 else client.delete(path) for i in range(5)]
        return [answer.status_code for answer in await asyncio.gather(*requests)]

    async def many() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE, trust_env=False, verify=False) as client:
            return [await all_at_once(client) for _ in range(10)]

    for statuses in asyncio.run(many()):
        assert set(statuses) <= {200, 404}
        assert sorted((statuses[1], statuses[3])) == [200, 404]


def test_a_file_is_in_use_while_its_batch_is_saved(
    client: OpenAI, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, go_on, save = threading.Event(), threading.Event(), Store.save_batch

    def slow(store: Store, batch: BatchRecord, **changes: Any) -> None:
        saves.set()
        go_on.wait(DEADLINE)
        save(store, batch, **changes)

    monkeypatch.setattr(Store, "save_batch", slow)
    file = client.files.create(file=("f.jsonl", jsonl([run_on("x", 1)])), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    pending = Background.post(server, "/v1/batches", body)
    assert saves.wait(DEADLINE)
    with pytest.raises(openai.ConflictError, match="cannot be deleted"):
        client.files.delete(file.id)
    go_on.set()
    assert ended(client, client.batches.retrieve(pending.result().json()["id"])).status == "completed"


@pytest.mark.parametrize(("wanted", "status"), [("bytes=8-", 416), ("lines=1-2", 400), ("bytes=5-2", 400)])
def test_a_range_that_a_file_does_not_have_is_refused_in_json(
    client: OpenAI, server: RunningServer, wanted: str, status: int
) -> None:
    file = client.files.create(file=("requests.jsonl", b"12345678"), purpose="batch")
    with raw(server) as other:
        part = other.get(f"/v1/files/{file.id}/content", headers={"Range": "bytes=2-3"})
        refused = other.get(f"/v1/files/{file.id}/content", headers={"Range": wanted})
    assert (part.status_code, part.content) == (206, b"34")
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, "invalid_range")
    assert refused.headers.get("content-range") == ("bytes */8" if status == 416 else None)


def test_one_thread_writes_all_that_is_saved_of_a_batch(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its first record, of which the disk may take long, cannot replace a later one."""
    threads, save = set[int](), Store.save_batch

    def recorded(store: Store, batch: BatchRecord, **changes: Any) -> None:
        threads.add(threading.get_ident())
        save(store, batch, **changes)

    monkeypatch.setattr(Store, "save_batch", recorded)
    assert ended(client, submit(client, jsonl([run_on("x", 1)]))).status == "completed"
    assert len(threads) == 1


def test_the_content_of_a_deleted_file_stays_until_it_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = FileRecord(id="file-1", bytes=2, created_at=0, filename="f", purpose="batch")
    store.add_file(record, io.BytesIO(b"{}"))
    store.begin_reading("file-1")
    store.begin_reading("file-1")
    store.delete_file("file-1")
    store.end_reading("file-1")
    assert store.content("file-1").read_bytes() == b"{}"
    store.end_reading("file-1")
    assert not store.content("file-1").exists()
    store.close()


def test_the_content_of_a_deleted_file_does_not_outlive_the_server_that_sends_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = FileRecord(id="file-1", bytes=2, created_at=0, filename="f", purpose="batch")
    store.add_file(record, io.BytesIO(b"{}"))
    store.begin_reading("file-1")
    store.delete_file("file-1")
    store.close()
    Store(tmp_path).close()
    assert not list((tmp_path / "files").iterdir())


BAD_REQUESTS: list[tuple[str, str, dict[str, Any], int, str | None]] = [
    ("POST", "/v1/files", {"files": {"file": b"x"}}, 400, "purpose"),
    ("POST", "/v1/files", {"data": {"purpose": "batch"}, "files": {"other": b"x"}}, 400, "other"),
    ("POST", "/v1/files", {"data": {"purpose": "assistants"}, "files": {"file": b"x"}}, 400, "purpose"),
    ("POST", "/v1/files", {"data": {"purpose": "batch", "file": "x"}, "files": {"purpose": b"x"}}, 400, "file"),
    (
        "POST",
        "/v1/files",
        {"data": {"purpose": "batch", "expires_after[seconds]": "9"}, "files": {"file": b"x"}},
        400,
        "expires_after",
    ),
    ("POST", "/v1/files", {"json": {}}, 400, None),
    ("POST", "/v1/files", {"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, None),
    ("POST", "/v1/files", {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400, None),
    ("GET", "/v1/files/nothing", {}, 404, "file_id"),
    ("GET", "/v1/files/..%2Flock/content", {}, 404, None),
    ("DELETE", "/v1/files/nothing", {}, 404, "file_id"),
    ("GET", "/v1/files?limit=0", {}, 400, "limit"),
    ("GET", "/v1/files?after=x", {}, 400, "after"),
    ("GET", "/v1/files?colour=red", {}, 400, "colour"),
    ("GET", "/v1/batches?limit=101", {}, 400, "limit"),
    ("GET", "/v1/batches/nothing", {}, 404, "batch_id"),
    ("POST", "/v1/batches/nothing/cancel", {}, 404, "batch_id"),
    ("POST", "/v1/batches", {"json": {"endpoint": COMPLETIONS, "completion_window": "24h"}}, 400, "input_file_id"),
]
CREATE = {"input_file_id": "file-x", "endpoint": COMPLETIONS, "completion_window": "24h"}
BAD_REQUESTS += [
    ("POST", "/v1/batches", {"json": CREATE | fields}, 400, next(iter(fields)))
    for fields in (
        {"input_file_id": "file-x"},
        {"endpoint": "/v1/embeddings"},
        {"completion_window": "forever"},
        {"completion_window": "0h"},
        {"output_expires_after": {"seconds": 9}},
    )
]


@pytest.mark.parametrize(("method", "path", "options", "status", "param"), BAD_REQUESTS, ids=str)
def test_what_cannot_be_done_is_refused_by_name(
    server: RunningServer, method: str, path: str, options: dict[str, Any], status: int, param: str | None
) -> None:
    with raw(server) as client:
        response = client.request(method, path, **options)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def form(filename: bytes, charset: str | None) -> dict[str, Any]:
    """The body of an upload, and its headers."""
    disposition = b'--b\r\nContent-Disposition: form-data; name="%s"'
    file = disposition % b"file" + b'; filename="' + filename + b'"\r\n\r\nx\r\n'
    kind = "multipart/form-data; boundary=b" + ("" if charset is None else f"; charset={charset}")
    content = file + disposition % b"purpose" + b"\r\n\r\nbatch\r\n--b--\r\n"
    return {"content": content, "headers": {"content-type": kind}}


@pytest.mark.parametrize("end", [5, 67, 90, None], ids=["header", "file", "purpose", "whole"])
def test_no_file_of_a_form_stays_open(server: RunningServer, end: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may end before its file does."""
    opened: list[Any] = []

    def spooled(*args: Any, **more: Any) -> Any:
        opened.append(tempfile.SpooledTemporaryFile(*args, **more))  # noqa: SIM115
        return opened[-1]

    monkeypatch.setattr(formparsers, "SpooledTemporaryFile", spooled)
    body = form(b"a", None)
    with raw(server) as client:
        response = client.post("/v1/files", **body | {"content": body["content"][:end]})
    assert response.status_code == (200 if end is None else 400)
    assert [file.closed for file in opened] == [True] * (end != 5)


def test_a_file_without_a_name_is_refused_in_words_that_name_no_type_of_python(server: RunningServer) -> None:
    with raw(server) as client:
        parts = {"purpose": (None, "batch"), "file": (None, "{}")}
        response = client.post("/v1/files", files=parts)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "file: must be a file, with the name of the file"


@pytest.mark.parametrize(
    ("filename", "charset"),
    [
        (b"a", "nothing"),
        (b"a", "undefined"),
        (b"\\", "punycode"),
        (b"xn--a-ecp.ru", "idna"),
        (b"\\ud800", "unicode_escape"),
    ],
)
def test_a_charset_whose_names_cannot_be_read_is_refused(server: RunningServer, filename: bytes, charset: str) -> None:
    with raw(server) as client:
        response = client.post("/v1/files", **form(filename, charset))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_form"
    assert repr(charset) in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("filename", "charset"), [("é".encode(), None), ("é".encode(), "UTF-8"), (b"\xe9", "iso-8859-1")]
)
def test_a_filename_is_read_by_the_charset_of_its_form(
    server: RunningServer, filename: bytes, charset: str | None
) -> None:
    with raw(server) as client:
        created = client.post("/v1/files", **form(filename, charset)).json()
        assert created["filename"] == "é"
        assert client.delete(f"/v1/files/{created['id']}").status_code == 200


@pytest.mark.filterwarnings("ignore:Unclosed file:ResourceWarning")  # Starlette does not close a part without an end
def test_a_damaged_form_is_stored_or_refused(server: RunningServer) -> None:
    rng = random.Random(7)
    statuses = set()
    with raw(server) as client:
        for _ in range(150):
            upload = form(rng.choice([b"a", b"\xff", b"\x00", b'\\"', b"\xed\xa0\x80"]), rng.choice([None, "utf-8"]))
            damaged = bytearray(upload["content"])
            for _ in range(rng.randrange(4)):
                at = rng.randrange(len(damaged))
                damaged[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(3))
            response = client.post("/v1/files", content=bytes(damaged), headers=upload["headers"])
            statuses.add(response.status_code)
            if response.status_code == 200:
                path = f"/v1/files/{response.json()['id']}"
                assert client.get(f"{path}/content").status_code == 200
                assert client.delete(path).status_code == 200
    assert statuses == {200, 400}


def test_a_file_that_is_too_large_is_not_kept(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpaged.api.batches.routes.MAX_FILE_BYTES", 3_000_000)
    with raw(server) as client:
        before = client.get("/v1/files").json()
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"x" * 4_000_000}}
        response = client.post("/v1/files", **form)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert client.get("/v1/files").json() == before


def test_a_batch_leaves_half_of_the_sequence_slots_and_waits_for_the_rest(
    client: OpenAI, server: RunningServer
) -> None:
    with StepGate(server) as gate:
        batch = submit(client, jsonl([run_on("x", 40) for _ in range(6)]))
        wait_until(lambda: server.engine.num_unfinished == 2)
        gate.wait_held()
        gate.allow(1)
        gate.wait_held()
        interactive = [Background.post(server, COMPLETIONS, run_on("Once", 60)) for _ in range(2)]
        wait_until(lambda: server.engine.num_unfinished == 4 and queued_commands(server) == 2)
        gate.allow(2)
        gate.wait_held()
        scheduled = server.core.stats().scheduler  # the engine's figures reach the event loop some time after the step
        assert (scheduled.running, scheduled.waiting) == (4, 0)
        gate.allow(10)
        gate.wait_held()
        assert server.engine.num_unfinished == 4
        gate.open()
        texts = [pending.text for pending in interactive]
    assert texts == [answer_text(server, run_on("Once", 60))] * 2
    assert ended(client, batch).status == "completed"


def test_a_batch_starts_nothing_while_others_fill_the_sequence_slots(client: OpenAI, server: RunningServer) -> None:
    with StepGate(server) as gate:
        interactive = [Background.post(server, COMPLETIONS, run_on("Once", 20)) for _ in range(4)]
        wait_until(lambda: server.engine.num_unfinished == 4)
        batch = submit(client, jsonl([run_on("x", 4)] * 3))
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        gate.allow(3)
        gate.wait_held()
        assert server.engine.num_unfinished == 4
        assert client.batches.retrieve(batch.id).request_counts == openai.types.BatchRequestCounts(
            total=3, completed=0, failed=0
        )
        gate.open()
        assert all(pending.text for pending in interactive)
    assert ended(client, batch).status == "completed"


def test_a_cancelled_batch_ends_at_once_and_keeps_what_is_done(client: OpenAI, server: RunningServer) -> None:
    bodies = [run_on("x", 1), *[run_on("x", 1000) for _ in range(5)]]
    with StepGate(server) as gate:
        batch = submit(client, jsonl(bodies))
        queued = submit(client, jsonl(bodies))

        def one_is_done() -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed == 1

        wait_until(lambda: server.engine.num_unfinished == 2)
        gate.allow(3)
        wait_until(one_is_done)
        with pytest.raises(openai.ConflictError, match="unfinished"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(queued.id).status == "cancelled"
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        gate.open()
        done = ended(client, batch)
    assert done.status == "cancelled"
    assert done.cancelled_at is not None
    assert set(lines_of(client, done.output_file_id)) == {"line-0"}
    server.wait_idle()
    with pytest.raises(openai.ConflictError, match="cancelled"):
        client.batches.cancel(batch.id)


def test_a_slow_disk_holds_up_the_batch_and_no_other_request(
    client: OpenAI, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, writing, go_on = Store.append, threading.Event(), threading.Event()

    def slow_append(store: Store, batch_id: str, kind: str, lines: Sequence[OutputLine]) -> None:
        writing.set()
        assert go_on.wait(DEADLINE)
        append(store, batch_id, kind, lines)

    monkeypatch.setattr(Store, "append", slow_append)
    batch = submit(client, jsonl([run_on("x", 1), run_on("x", 1), run_on("x", 9, temperature=9)]))
    try:
        assert writing.wait(DEADLINE)
        assert answer_text(server, ask("What is 17 + 25?")) == "42"
        found = client.batches.retrieve(batch.id)
        assert found.status == "in_progress"
        assert found.request_counts == openai.types.BatchRequestCounts(total=3, completed=0, failed=0)
    finally:
        go_on.set()
    done = ended(client, batch)
    assert done.request_counts == openai.types.BatchRequestCounts(total=3, completed=2, failed=1)


@pytest.mark.parametrize(
    ("method", "error", "reason"),
    [
        ("append", RuntimeError("a bug"), "RuntimeError: a bug"),
        ("done", KeyError("custom_id"), "KeyError: 'custom_id'"),
        ("publish_results", RuntimeError("a bug"), "RuntimeError: a bug"),
    ],
    ids=str,
)
def test_an_unexpected_error_fails_its_batch_and_the_next_one_runs(
    client: OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    error: Exception,
    reason: str,
) -> None:
    def failing(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Store, method, failing)
        failed = ended(client, submit(client, jsonl([run_on("x", 1)] * 3)))
    assert (failed.status, failed.output_file_id) == ("failed", None)
    assert failed.failed_at is not None
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert [(each.code, each.message) for each in failed.errors.data] == [("batch_failed", reason)]
    assert f"{failed.id} failed" in caplog.text
    assert ended(client, submit(client, jsonl([run_on("x", 1)]))).status == "completed"


def test_a_batch_whose_failure_cannot_be_saved_does_not_hold_up_the_next_one(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_batch = Store.save_batch

    def failing(store: Store, batch: BatchRecord, **changes: Any) -> None:
        if changes:
            raise RuntimeError("a bug")
        save_batch(store, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "save_batch", failing)
        assert ended(client, submit(client, jsonl([run_on("x", 1)]))).status == "failed"
    assert ended(client, submit(client, jsonl([run_on("x", 1)]))).status == "completed"


def test_a_batch_goes_on_after_a_restart_and_runs_nothing_twice(tmp_path: Path) -> None:
    lengths = [6, 6, 6, 80, 80, 80]
    bodies = [run_on(f"Once {i}", length) for i, length in enumerate(lengths)]
    with running_server(CONFIG, data_dir=tmp_path) as server, server.client() as client, StepGate(server) as gate:
        batch = submit(client, jsonl(bodies))

        def some_are_done() -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed >= 2

        wait_until(lambda: server.engine.num_unfinished == 2)
        gate.allow(10)
        wait_until(some_are_done)
        with pytest.raises(DirectoryInUseError, match=rf"^another server uses {tmp_path} \(process {os.getpid()}\)$"):
            create_app(None, data_dir=tmp_path)
    results = tmp_path / "files" / f"file-{batch.id}-output"
    kept = results.read_bytes()
    before = [json.loads(line) for line in kept.splitlines()]
    assert 2 <= len(before) < 6
    results.write_bytes(kept + b'{"id": "batch_req-1", "custom')
    with running_server(CONFIG, data_dir=tmp_path) as server, server.client() as client:
        done = ended(client, batch)
        assert done.status == "completed"
        lines = lines_of(client, done.output_file_id)
        assert len(lines) == 6
        assert [lines[line["custom_id"]] for line in before] == before
        assert server.engine.stats is not None
        left = sum(lengths) - sum(line["response"]["body"]["usage"]["completion_tokens"] for line in before)
        wait_until(lambda: server.engine.stats.generated_tokens_total == left)
        texts = [lines[f"line-{i}"]["response"]["body"]["choices"][0]["text"] for i in range(6)]
        again = [Background.post(server, COMPLETIONS, body) for body in bodies]
        assert texts == [pending.text for pending in again]
    with running_server(CONFIG, data_dir=tmp_path) as server, server.client() as client:
        assert client.batches.retrieve(batch.id) == done
        assert len(lines_of(client, done.output_file_id)) == 6


def test_a_batch_whose_window_has_closed_says_so_for_every_line_that_is_left(tmp_path: Path) -> None:
    with running_server(CONFIG, data_dir=tmp_path) as server, server.client() as client, StepGate(server) as gate:
        batch = submit(client, jsonl([run_on("x", 1), run_on("x", 900), run_on("x", 900)]))

        def one_is_done() -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed == 1

        wait_until(lambda: server.engine.num_unfinished == 2)
        gate.allow(3)
        wait_until(one_is_done)
    path = tmp_path / "batches" / f"{batch.id}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"expires_at": batch.created_at}))
    with running_server(CONFIG, data_dir=tmp_path) as server, server.client() as client:
        done = ended(client, batch)
        assert done.status == "expired"
        assert done.expired_at is not None
        assert set(lines_of(client, done.output_file_id)) == {"line-0"}
        errors = lines_of(client, done.error_file_id)
        assert {name: line["error"]["code"] for name, line in errors.items()} == {
            "line-1": "batch_expired",
            "line-2": "batch_expired",
        }


def test_results_are_published_once_however_often_the_server_ends_in_between(tmp_path: Path) -> None:
    with running_server(CONFIG, data_dir=tmp_path) as server, server.client() as client:
        done = ended(client, submit(client, jsonl([run_on("x", 2)])))
        output = lines_of(client, done.output_file_id)
    store = Store(tmp_path)
    record = store.batches[done.id]
    record.status, record.output_file_id, record.completed_at = "finalizing", None, None
    store.save_batch(record)
    store.close()
    with running_server(CONFIG, data_dir=tmp_path) as server, server.client() as client:
        again = ended(client, done)
        assert again.status == "completed"
        assert again.output_file_id == done.output_file_id
        assert lines_of(client, again.output_file_id) == output


def test_what_is_left_of_a_batch_fails_where_its_key_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile no other request makes the server read the file of keys again."""
    monkeypatch.setattr(key_ring, "CHECK_SECONDS", 0.0)
    path = tmp_path / "keys.json"
    keys = write_keys(path, anna={}, boss={"admin": True})
    with running_server(CONFIG, http=HttpConfig(api_keys=path), data_dir=tmp_path / "data") as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key=keys["anna"], timeout=DEADLINE) as anna:
            with StepGate(server) as gate:
                batch = submit(anna, jsonl([run_on(f"{i}", 4) for i in range(10)]))
                gate.wait_held()
                content, _ = key_file.read(path)
                key_file.write(path, content.model_copy(update={"keys": content.keys[1:]}))
                gate.open()
                wait_until(lambda: not server.app.state.store.batches[batch.id].unfinished, DEADLINE)
            with pytest.raises(openai.AuthenticationError):
                anna.batches.retrieve(batch.id)
        with OpenAI(base_url=f"{server.url}/v1", api_key=keys["boss"], timeout=DEADLINE) as boss:
            done = boss.batches.retrieve(batch.id)
            good, bad = lines_of(boss, done.output_file_id), lines_of(boss, done.error_file_id)
    assert done.status == "completed"
    assert 1 <= len(good) <= 2  # those that were running
    assert len(good) + len(bad) == 10
    for line in bad.values():
        assert line["response"] is None
        assert line["error"]["code"] == "api_key_removed"
        assert "the API key 'anna' was removed" in line["error"]["message"]


def test_the_asynchronous_client_can_do_it_too(server: RunningServer) -> None:
    async def run() -> str:
        async with (
            httpx.AsyncClient(trust_env=False, verify=False, timeout=DEADLINE) as http,
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
        ):
            content = jsonl([ask("What is 17 + 25?")], CHAT)
            file = await client.files.create(file=("a.jsonl", content), purpose="batch")
            batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            while batch.status != "completed":
                assert batch.status != "failed"
                await asyncio.sleep(0.02)
                batch = await client.batches.retrieve(batch.id)
            assert batch.output_file_id is not None
            return (await client.files.content(batch.output_file_id)).text

    line = json.loads(asyncio.run(run()))
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "42"


def test_a_server_without_a_directory_keeps_no_files(demo_server: RunningServer) -> None:
    with demo_server.client() as client, pytest.raises(openai.BadRequestError, match="--data-dir"):
        client.files.list()
    with demo_server.client() as client, pytest.raises(openai.BadRequestError, match="--data-dir"):
        client.batches.create(input_file_id="x", endpoint=CHAT, completion_window="24h")


def test_no_character_of_an_answer_ends_a_line_of_the_output_for_pythons_splitlines(tmp_path: Path) -> None:
    text = "one\x85two\u2028three\u2029\n\v\f\x1cfour"
    lines = [OutputLine(id="1", custom_id=f"line {i}", response={"status_code": 200, "body": text}) for i in range(2)]
    store = Store(tmp_path)
    store.append("batch", "output", lines)
    store.close()
    written = (tmp_path / "files" / "file-batch-output").read_text()
    assert [OutputLine.model_validate_json(line) for line in written.splitlines()] == lines


@pytest.fixture(scope="module")
def two_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoKeys]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = write_keys(path, anna={}, bert={})
    http = HttpConfig(api_keys=path)
    with running_server(CONFIG, http=http, data_dir=tmp_path_factory.mktemp("data")) as server:
        clients = [OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=DEADLINE) for key in keys.values()]
        yield TwoKeys(server, *clients)
        for client in clients:
            client.close()


@dataclass
class TwoKeys:
    server: RunningServer
    anna: OpenAI
    bert: OpenAI

    @property
    def runner(self) -> BatchRunner:
        runner: BatchRunner = self.server.app.state.batch_runner
        return runner


def answered_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of batches, in the order in which their lines are saved."""
    order, append = [], Store.append

    def recorded(store: Store, batch_id: str, kind: str, lines: Sequence[OutputLine]) -> None:
        append(store, batch_id, kind, lines)
        order.extend([batch_id] * len(lines))

    monkeypatch.setattr(Store, "append", recorded)
    return order


def test_a_long_batch_of_a_key_holds_up_no_batch_of_another(two_keys: TwoKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    order = answered_by(monkeypatch)
    with StepGate(two_keys.server) as gate:
        long = submit(two_keys.anna, jsonl([run_on(f"Once {i}", 2) for i in range(40)]))
        wait_until(lambda: two_keys.server.engine.num_unfinished == 2)
        short = submit(two_keys.bert, jsonl([run_on(f"{i}", 2) for i in range(3)]))
        wait_until(lambda: "bert" in two_keys.runner.line_turns.waiting)
        gate.open()
        done = [ended(two_keys.bert, short), ended(two_keys.anna, long)]
    assert [batch.status for batch in done] == ["completed"] * 2
    assert len(order) == 43
    first = order[: len(order) - order[::-1].index(short.id)]  # up to the last line of the short batch
    assert first.count(long.id) < 20


def test_a_batch_makes_room_for_that_of_another_key_and_goes_on_after_it(
    two_keys: TwoKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if as many batches of other keys ran as may run at a time."""
    order = answered_by(monkeypatch)
    monkeypatch.setattr(runner, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(two_keys.runner.batch_turns, "rules", replace(runner.BATCHES, at_once=1))
    with StepGate(two_keys.server) as gate:
        long = submit(two_keys.anna, jsonl([run_on(f"Once {i}", 2) for i in range(20)]))
        wait_until(lambda: two_keys.server.engine.num_unfinished == 2)
        short = submit(two_keys.bert, jsonl([run_on(f"{i}", 2) for i in range(3)]))
        wait_until(lambda: "bert" in two_keys.runner.batch_turns.waiting)
        gate.open()
        done = [ended(two_keys.bert, short), ended(two_keys.anna, long)]
    assert [batch.status for batch in done] == ["completed"] * 2
    assert order.index(short.id) < 20
    assert (order.count(long.id), order.count(short.id)) == (20, 3)
    assert len(lines_of(two_keys.anna, done[1].output_file_id)) == 20


def test_a_long_file_of_a_key_holds_up_no_change_of_another(two_keys: TwoKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "PART_BYTES", 1)  # each line is a part
    check_part = batch_lines.FileCheck.check_part
    held = Held(check_part, lambda check: "part")
    monkeypatch.setattr(batch_lines.FileCheck, "check_part", lambda check: held(check))
    file = two_keys.bert.files.create(file=("b.jsonl", jsonl([run_on("x", 1)])), purpose="batch")
    long = submit(two_keys.anna, jsonl([run_on("x", 1) for _ in range(40)]))
    wait_until(lambda: held.begun)
    create = partial(two_keys.bert.batches.create, input_file_id=file.id, endpoint=COMPLETIONS)
    with ThreadPoolExecutor(1) as thread:
        creating = thread.submit(create, completion_window="24h")
        wait_until(lambda: "bert" in two_keys.runner.disk_turns.waiting)
        held.allow(1)
        other = creating.result(DEADLINE)
        assert len(held.begun) <= 2
        held.allow(100)
    assert ended(two_keys.bert, other).status == "completed"
    assert ended(two_keys.anna, long).status == "completed"


def test_a_key_whose_changes_wait_gets_a_503(two_keys: TwoKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(Store.add_batch, lambda *_: "batch")
    monkeypatch.setattr(Store, "add_batch", lambda store, batch: held(store, batch))
    monkeypatch.setattr(two_keys.runner.disk_turns, "rules", replace(runner.DISK, places=1))
    file = two_keys.bert.files.create(file=("b.jsonl", jsonl([run_on("x", 1)])), purpose="batch")
    bert = two_keys.bert.with_options(max_retries=0)
    create = partial(bert.batches.create, input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    with ThreadPoolExecutor(2) as threads:
        creating = [threads.submit(create)]
        wait_until(lambda: held.begun)
        creating.append(threads.submit(create))
        wait_until(lambda: "bert" in two_keys.runner.disk_turns.waiting)
        with pytest.raises(openai.InternalServerError, match="of this client wait already") as refused:
            create()
        assert (refused.value.status_code, refused.value.code) == (503, "engine_busy")
        assert refused.value.response.headers["Retry-After"] == "1"
        held.allow(2)
        created = [each.result(DEADLINE).id for each in creating]
    assert [batch.id for batch in bert.batches.list()][:2] == created[::-1]
    for batch_id in created:
        assert ended(bert, bert.batches.retrieve(batch_id)).status == "completed"


def test_a_flood_of_uploads_of_a_client_delays_no_other_client(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(Store.add_file, lambda store, record, content: record.filename)
    monkeypatch.setattr(Store, "add_file", lambda *args: held(*args))

    def ask(client: str) -> Background:
        files, data, headers = {"file": (client, b"{}")}, {"purpose": "batch"}, {"User-Agent": client}
        return Background.request(server, "POST", "/v1/files", files=files, data=data, headers=headers)

    check_turns(lambda: server.app.state.server.file_turns, held, ask)
