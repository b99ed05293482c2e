"""Mutated images to a model that sees: each answer is a 200 or a 400 with the reason, as the reader has it, and the log
has no traceback. `make test-fuzz CASES=100000 SEED=7` sends 20,000 to a server process of its own; FIRST is the number
of the first one."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import pytest

from mlxpaged.engine_config import EngineConfig
from tests.cli.helpers import Command, serving
from tests.fuzz.client import Answer, FaultError, Report, judge, send_all
from tests.fuzz.test_fuzz import CASES, FIRST, SEED
from tests.support import RunningServer, running_server
from tests.vision.files import mutated, url_of
from tests.vision.test_reading import attempt

CHAT = "/v1/chat/completions"
SAMPLE = 40
IMAGES = max(1, CASES // 5)
"""Each is encoded by the client, decoded twice, and shown to the model."""
CONCURRENCY = 16
LONGEST = 120.0
"""Seconds for an answer, on cores that do other work too."""


async def send_image(client: httpx.AsyncClient, number: int) -> str:
    data = mutated(number, SEED)
    question = {"type": "text", "text": "What number is in the picture?"}
    content = [question, {"type": "image_url", "image_url": {"url": url_of(data)}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    try:
        response = await client.post(CHAT, json=body)
    except httpx.HTTPError as error:
        raise FaultError(f"no answer: {error!r}") from None
    outcome = judge(Answer(response.status_code, dict(response.headers), response.content), CHAT, "POST")
    if outcome != ("200" if attempt(data) else "400"):
        raise FaultError(f"status {outcome}: {response.text}")
    return outcome


async def send_images(url: str, numbers: range) -> Report:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=LONGEST) as client:
        return await send_all(lambda number: send_image(client, number), numbers, CONCURRENCY)


def check(url: str, numbers: range, log: Callable[[], str]) -> Counter[str]:
    report = asyncio.run(send_images(url, numbers))
    print(f"mutated images, seed {SEED}: {report.table}")
    failures = [f"make test-fuzz SEED={SEED} FIRST={n} CASES=1\n{text}" for n, text in report.failures.items()]
    assert not failures, "\n\n".join(failures)
    assert "Traceback" not in log()
    return report.statuses


@pytest.fixture(scope="module")
def sampled() -> Iterator[RunningServer]:
    with running_server(EngineConfig(model="demo-vision", kv_cache_bytes=16_000_000)) as server:
        yield server


def test_a_sample_of_mutated_images_is_shown_or_refused(
    sampled: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    statuses = check(sampled.url, range(SAMPLE), lambda: caplog.text)
    assert set(statuses) == {"200", "400"}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    with serving(tmp_path_factory.mktemp("server"), "demo-vision", fork=False) as command:
        yield command


@pytest.mark.slow
def test_many_mutated_images_are_shown_or_refused(process: Command) -> None:
    check(process.url, range(FIRST, FIRST + IMAGES), lambda: process.stderr)
    assert process.process.poll() is None
