"""Malformed HTTP and mutated bodies to every endpoint: no status of 500 or more but 503, no traceback, no late answer,
no other answer disturbed. `make test-fuzz CASES=100000 SEED=7` sends many to a server process of its own; FIRST is the
number of the first case."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.api.config import HttpConfig
from mlxpaged.api.endpoints import ENDPOINTS
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import bearer, write_keys
from tests.cli.helpers import Command, serving
from tests.fuzz import bodies, wire
from tests.fuzz.client import LONGEST, FaultError, Report, Target, canary, check_error, send_all, send_body, send_wire
from tests.support import RunningServer, running_server, wait_until, with_embeddings

SEED = int(os.environ.get("MLXPAGED_FUZZ_SEED", "1"))
FIRST = int(os.environ.get("MLXPAGED_FUZZ_FIRST", "0"))
CASES = int(os.environ.get("MLXPAGED_FUZZ_CASES", "2000"))
SAMPLE = 150
CONCURRENCY = {"body": 48, "wire": 96}
KINDS = ("body", "wire")
SHOWN = 3000  # characters of a case that failed


def send_case(target: Target, kind: str, number: int, most_steps: int = 99) -> Awaitable[str]:
    if kind == "body":
        return send_body(target, bodies.case(SEED, number, most_steps))
    return send_wire(target, wire.case(SEED, number, most_steps, target.key))


async def smallest_failure(target: Target, kind: str, number: int) -> str:
    """The case with the fewest mutations with which it fails again."""
    case: Callable[..., Any] = {"body": bodies.case, "wire": wire.case}[kind]
    for steps in range(bodies.MAX_STEPS + 1):
        try:
            await send_case(target, kind, number, steps)
        except (FaultError, OSError):
            return f"with {steps} mutations: {case(SEED, number, steps)!r}"[:SHOWN]
    return f"not again by itself: {case(SEED, number)!r}"[:SHOWN]


async def fuzz(target: Target, kind: str, numbers: range) -> tuple[Report, int]:
    """The report, and how many answers of the canary were right."""
    done = asyncio.Event()
    watch = asyncio.create_task(canary(target, done))
    report = await send_all(lambda number: send_case(target, kind, number), numbers, CONCURRENCY[kind])
    done.set()
    right = await watch
    for number, failure in report.failures.items():
        again = f"make test-fuzz SEED={SEED} FIRST={number} CASES=1"
        report.failures[number] = f"{kind} {again}\n{failure}\n{await smallest_failure(target, kind, number)}"
    return report, right


def check(target: Target, kind: str, numbers: range, log: Callable[[], str]) -> None:
    before = len(log())
    report, right = asyncio.run(fuzz(target, kind, numbers))
    print(f"{kind} cases, seed {SEED}: {report.table}; {right} answers of the canary were right")
    assert not report.failures, "\n\n".join(report.failures.values())
    new = log()[before:]
    at = new.find("Traceback")
    assert at < 0, new[max(0, at - 2000) : at + 6000]
    assert right >= 2
    with httpx.Client(base_url=target.url, headers=bearer(target.key), trust_env=False, timeout=LONGEST) as client:
        assert client.get("/health").status_code == 200

        def is_idle() -> bool:
            status = client.get("/v1/status").json()
            return all(model.get("blocks", {}).get("used", 0) == 0 for model in status["models"])

        wait_until(is_idle, LONGEST, 0.1)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A file of keys, and one of an admin."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return path, write_keys(path, admin={"admin": True})["admin"]


@pytest.fixture(scope="module")
def sampled(
    model: Path, embedding_model: Path, key_file: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    config = EngineConfig(model=str(model), served_model_name="demo", kv_cache_bytes=16_000_000)
    http = HttpConfig(api_keys=key_file[0])
    data = tmp_path_factory.mktemp("data")
    with running_server(with_embeddings(config, embedding_model), http=http, data_dir=data) as server:
        yield server


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_hostile_requests_gets_answers_and_disturbs_no_other(
    sampled: RunningServer, key_file: tuple[Path, str], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    check(Target(sampled.url, key_file[1]), kind, range(SAMPLE), lambda: caplog.text)


@pytest.fixture(scope="module")
def process(
    model: Path, embedding_model: Path, key_file: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Command]:
    directory = tmp_path_factory.mktemp("server")
    flags = ["--served-model-name", "demo", "--api-keys", str(key_file[0]), "--data-dir", str(directory / "data")]
    flags += ["--embedding-model", str(embedding_model), "--served-embedding-model-name", "vectors"]
    with serving(directory, str(model), *flags, fork=False) as command:
        wait_until(lambda: httpx.get(f"{command.url}/health", trust_env=False).status_code == 200, 60, 0.1)
        yield command


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_hostile_requests_get_answers_and_disturb_no_other(
    process: Command, key_file: tuple[Path, str], kind: str
) -> None:
    check(Target(process.url, key_file[1]), kind, range(FIRST, FIRST + CASES), lambda: process.stderr)
    assert process.process.poll() is None


def test_every_endpoint_gets_cases() -> None:
    groups = bodies.bases()
    assert len(groups) == len(ENDPOINTS)
    reads = {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS if endpoint.body is not None}
    have = {(group[0].method, group[0].path) for group in groups if group[0].fields is not None}
    assert have == reads


def test_a_case_depends_on_the_seed_and_its_number_alone() -> None:
    for make in (bodies.case, wire.case):
        assert [make(3, i) for i in range(50)] == [make(3, i) for i in range(50)]
        assert [make(3, i) for i in range(50)] != [make(4, i) for i in range(50)]
        assert all(make(3, i, 0).steps == 0 for i in range(50))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/api/chat", "/v1/decisions"])
def test_an_error_in_the_format_of_another_api_is_noticed(path: str) -> None:
    formats = {
        "/v1/models": {"error": {"message": "x", "type": "x", "param": None, "code": None}},
        "/v1/messages": {"type": "error", "error": {"type": "x", "message": "x"}, "request_id": "x"},
        "/api/chat": {"error": "x"},
        "/v1/decisions": {"error": {"message": "x", "type": "x", "param": None, "code": None}, "detail": "x"},
    }
    for other, body in formats.items():
        for place in (path, f"{path}/.."):
            if other == path:
                check_error(body, place, 400)
            else:
                with pytest.raises(FaultError):
                    check_error(body, place, 400)
