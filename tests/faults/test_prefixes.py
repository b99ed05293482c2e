"""Prefixes on a disk under load: servers that are killed at random moments, and files that are damaged in place."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.cache.test_disk_store import check_prompts
from tests.cli.helpers import DEADLINE, Command, mlxpaged, serving
from tests.faults.fault import SHARE
from tests.models.architectures import QWEN3_5, nested, random_weights
from tests.support import make_tiny_model

NUM_KILLS, NUM_DAMAGES = max(1, round(60 * SHARE)), max(50, round(1000 * SHARE))
DAMAGES_PER_SERVER = 50
NUM_CLIENTS = 3
BUDGET = 4_000_000
INDEX_BYTES = 2_000_000
START_SECONDS, RUN_SECONDS = 1.5, 4.0
"""A kill comes at most this long after the start of a process, or after its models are loaded."""

Expected = dict[tuple[str, int], str]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recurrent layers, and clear-cut answers."""
    config = nested(model_type="qwen3_5_text", **QWEN3_5 | {"num_hidden_layers": 2})
    path = tmp_path_factory.mktemp("models") / "hybrid"
    return make_tiny_model(path, "qwen3_5", 0, partial(random_weights, embedding=1.0), **config)


def ask(client: httpx.Client, model: str, number: int) -> str:
    """Six prompts that begin alike, then six others, and so on."""
    shared, own = random.Random(number // 6), random.Random(number)
    prompt = [*shared.choices(range(5, 200), k=96), *own.choices(range(5, 200), k=80)]
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def store_all(client: httpx.Client, expected: Expected) -> None:
    """What is found again is stored when it leaves the pool."""
    for case, text in expected.items():
        assert ask(client, *case) == ask(client, *case) == text


def http(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=DEADLINE, trust_env=False, verify=False)


@pytest.fixture(scope="module")
def expected(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """The answers of a server without a tier."""
    with (
        serving(tmp_path_factory.mktemp("answers"), "demo", "--model", f"hybrid={hybrid}") as command,
        http(command.url) as client,
    ):
        return {(model, i): ask(client, model, i) for model in ("demo", "hybrid") for i in range(18)}


def flags_of(hybrid: Path, directory: Path) -> list[str]:
    """The pools have room for a few of the prompts, so the others are read from the disk again and again."""
    tier = ["--prefix-cache-dir", str(directory), "--prefix-cache-disk", str(BUDGET)]
    sizes = ["--kv-cache-memory", "1500KB", "--max-num-seqs", "4", "--max-model-len", "256"]
    return ["demo", "--model", f"hybrid={hybrid}", "--port", "0", *sizes, *tier]


def ask_on(url: str, expected: Expected, seed: int, ends: threading.Event) -> int:
    """Compare answers until the end of the server. Returns their number."""
    rng, count = random.Random(seed), 0
    with http(url) as client:
        while not ends.is_set():
            case = rng.choice(list(expected))
            for _ in range(2):
                try:
                    found = ask(client, *case)
                except httpx.HTTPError:
                    return count
                assert found == expected[case], case
                count += 1
    return count


@contextmanager
def load(command: Command, expected: Expected, seed: int) -> Iterator[Callable[[], int]]:
    """Clients until the end of the context. Yields what returns the number of their answers after it."""
    ends = threading.Event()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(ask_on, command.url, expected, seed * 100 + i, ends) for i in range(NUM_CLIENTS)]
        try:
            yield lambda: sum(client.result() for client in clients)
        finally:
            ends.set()


def damage(directory: Path, rng: random.Random) -> None:
    """Truncates a file, or flips one of its bits: mostly of blocks, because a damaged index loses all of them."""
    pattern = "*.segment" if rng.random() < 0.95 else "index*"
    files = [path for path in sorted(directory.glob(pattern)) if path.stat().st_size]
    if not files:
        return
    path = rng.choice(files)
    at = rng.randrange(path.stat().st_size)
    if rng.random() < 0.2:
        os.truncate(path, at)
        return
    with path.open("r+b", buffering=0) as file:
        [byte] = os.pread(file.fileno(), 1, at) or b"\0"
        os.pwrite(file.fileno(), bytes([byte ^ 1 << rng.randrange(8)]), at)


def check_size(directory: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert sum(size for name, size in sizes.items() if name.endswith(".segment")) <= BUDGET
    assert sum(size for name, size in sizes.items() if name.startswith("index")) <= INDEX_BYTES


def loaded_blocks(client: httpx.Client) -> int:
    metrics = client.get("/metrics").text
    return sum(map(int, re.findall(r"^mlxpaged_kv_blocks_loaded_total\{.*\} (\d+)", metrics, re.MULTILINE)))


@pytest.mark.faults
def test_servers_that_are_killed_give_no_wrong_answer(tmp_path: Path, hybrid: Path, expected: Expected) -> None:
    rng, directory, answers = random.Random(1), tmp_path / "prefixes", 0
    flags = flags_of(hybrid, directory)
    with serving(tmp_path / "begin", *flags) as command, http(command.url) as client:
        store_all(client, expected)
    for kill in range(NUM_KILLS):
        with mlxpaged(tmp_path / str(kill), "serve", *flags) as command:
            if kill % 5 == 4:
                time.sleep(rng.uniform(0, START_SECONDS))
                command.process.kill()
            else:
                command.wait_started()
                with load(command, expected, kill) as num_answers:
                    time.sleep(rng.uniform(0.1, RUN_SECONDS))
                    command.process.kill()
                answers += num_answers()
            command.wait_end()
            assert "Traceback" not in command.stderr, command.stderr
        check_size(directory)
    with serving(tmp_path / "end", *flags) as command, http(command.url) as client:
        assert {case: ask(client, *case) for case in expected} == expected
        print(f"{NUM_KILLS} kills, {answers} answers, {loaded_blocks(client)} blocks loaded at the end")
        assert loaded_blocks(client) > 0


@pytest.mark.faults
def test_damaged_files_give_no_wrong_answer_under_load(tmp_path: Path, hybrid: Path, expected: Expected) -> None:
    check_damages(tmp_path, hybrid, expected, NUM_DAMAGES)


def check_damages(tmp_path: Path, hybrid: Path, expected: Expected, count: int) -> None:
    rng, directory = random.Random(2), tmp_path / "prefixes"
    answers = loaded = 0
    for server in range(-(-count // DAMAGES_PER_SERVER)):
        with serving(tmp_path / str(server), *flags_of(hybrid, directory)) as command, http(command.url) as client:
            store_all(client, expected)
            with load(command, expected, server) as num_answers:
                for _ in range(min(count, DAMAGES_PER_SERVER)):
                    time.sleep(rng.uniform(0, 0.2))
                    with suppress(FileNotFoundError):  # a segment that the server deletes
                        damage(directory, rng)
            answers += num_answers()
            loaded += loaded_blocks(client)
            command.process.send_signal(signal.SIGTERM)
            assert command.wait_end() == 0
            assert "Traceback" not in command.stderr, command.stderr
        check_size(directory)
    print(f"{count} damages, {answers} answers, {loaded} blocks loaded")
    assert loaded > 0


@pytest.mark.faults
def test_10000_prompts_through_100_blocks_stay_within_the_budget(tmp_path: Path) -> None:
    print(f"{check_prompts(tmp_path / 'prefixes', 10_000):.3f} bytes written for each byte")
