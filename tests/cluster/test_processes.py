"""`serve --hosts` with real ranks over loopback: what happens if one dies, is stopped, or is slow, under load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.helpers import Command, mlxpaged
from tests.support import wait_until

pytestmark = pytest.mark.cluster

TIMES = int(os.environ.get("MLXPAGED_FAULTS", "2"))
"""For each fault and rank. `make test-cluster` sets 20."""
NUM_RANKS = 2
NOTICED_SECONDS = 10.0
START_SECONDS = 180.0
PROMPTS = ["Once upon a time", "The sum of 3 and 4", "Hello there, my", "A list: one, two"]
LENGTH = 24


@dataclass
class Cluster:
    command: Command
    url: str
    expected: dict[str, str] = field(default_factory=dict)

    def health(self) -> tuple[int, dict[str, Any]]:
        response = httpx.get(f"{self.url}/health", timeout=10, trust_env=False)
        return response.status_code, response.json()

    def ranks(self) -> dict[int, int]:
        """The process of each rank."""
        found = {}
        for pid in processes("mlxpaged.cluster.rank"):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found.update({int(each[9:]): pid for each in environment if each.startswith(b"MLX_RANK=")})
        return found

    def complete(self, prompt: str, length: int = LENGTH, **options: Any) -> Answer:
        body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True} | options
        answer = Answer()
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=180, trust_env=False) as response:
            if response.status_code != 200:
                answer.error = response.read().decode()
                return answer
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    answer.error = answer.error or event.get("error")
                    for choice in event.get("choices", ()):
                        answer.text += choice["text"]
                        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        return answer


@dataclass
class Answer:
    text: str = ""
    finish_reason: str | None = None
    error: Any = None


class Load:
    """One stream for each prompt, on threads."""

    def __init__(self, cluster: Cluster) -> None:
        self.answers: dict[str, Answer] = {}
        self._threads = [threading.Thread(target=self._run, args=(cluster, prompt)) for prompt in PROMPTS]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: httpx.get(f"{cluster.url}/health", trust_env=False).json().get("running"), 60)

    def _run(self, cluster: Cluster, prompt: str) -> None:
        self.answers[prompt] = cluster.complete(prompt)

    def join(self) -> dict[str, Answer]:
        for thread in self._threads:
            thread.join(180)
            assert not thread.is_alive(), "a client hangs"
        return self.answers


def processes(name: str) -> list[int]:
    """Python processes that run a module, among those of the cluster under test."""
    found = subprocess.run(["pgrep", "-f", rf"^\S*python\S* -m {name}"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


@contextmanager
def cluster_of(directory: Path, *flags: str, size: int = NUM_RANKS) -> Iterator[Cluster]:
    directory.mkdir(parents=True, exist_ok=True)
    hostfile = directory / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * size))
    arguments = ["serve", "--port", "0", "--kv-cache-memory", "16MB", "--hosts", str(hostfile), *flags]
    with mlxpaged(directory, *arguments, env={"OPENBLAS_NUM_THREADS": "1"}, fork=False) as command:
        wait_until(lambda: "http://" in command.stdout or command.process.poll() is not None, START_SECONDS)
        assert command.process.poll() is None, command.stderr
        cluster = Cluster(command, command.url)
        cluster.expected = {prompt: cluster.complete(prompt).text for prompt in PROMPTS}
        yield cluster


@pytest.fixture(scope="module")
def restarting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("restarting"), "--restart-ranks") as cluster:
        yield cluster


def hurt(cluster: Cluster, rank: int, number: int) -> None:
    os.kill(cluster.ranks()[rank], number)


def used_blocks(cluster: Cluster) -> int:
    status = httpx.get(f"{cluster.url}/v1/status", timeout=30, trust_env=False).json()
    return int(status["blocks"]["used"])


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_ranks_start_again_and_every_request_gets_its_whole_answer(
    restarting: Cluster, rank: int, number: signal.Signals
) -> None:
    for _ in range(TIMES):
        before = restarting.ranks()
        load = Load(restarting)
        hurt(restarting, rank, number)
        wait_until(lambda: restarting.health()[0] == 503, NOTICED_SECONDS, pause=0.05)
        status, body = restarting.health()
        if status == 503:
            assert body["status"] == "loading"
            assert f"rank {rank} (127.0.0.1)" in body["reason"]
        answers = load.join()
        assert {prompt: answer.text for prompt, answer in answers.items()} == restarting.expected
        assert {(answer.finish_reason, answer.error) for answer in answers.values()} == {("length", None)}
        assert restarting.health()[0] == 200
        assert used_blocks(restarting) == 0
        after = restarting.ranks()
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values())


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_slow_rank_only_slows_the_others(restarting: Cluster, rank: int) -> None:
    before = restarting.ranks()
    for _ in range(TIMES):
        load = Load(restarting)
        for _ in range(5):
            hurt(restarting, rank, signal.SIGSTOP)
            time.sleep(0.3)
            hurt(restarting, rank, signal.SIGCONT)
            time.sleep(0.1)
        assert {prompt: answer.text for prompt, answer in load.join().items()} == restarting.expected
    assert restarting.ranks() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_without_restarts_every_client_gets_an_error_that_names_the_rank(
    tmp_path: Path, number: signal.Signals
) -> None:
    with cluster_of(tmp_path) as cluster:
        ranks = cluster.ranks()
        load = Load(cluster)
        hurt(cluster, 1, number)
        wait_until(lambda: cluster.health()[0] == 503, NOTICED_SECONDS, pause=0.05)
        assert "rank 1 (127.0.0.1)" in cluster.health()[1]["reason"]
        for answer in load.join().values():
            assert answer.finish_reason is None or answer.error
            assert "rank 1 (127.0.0.1)" in json.dumps(answer.error)
        assert "rank 1 (127.0.0.1)" in json.dumps(cluster.complete("Hello").error)
        wait_until(lambda: not any(alive(pid) for pid in ranks.values()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_no_orphan_stays_when_the_server_ends(tmp_path: Path, number: signal.Signals) -> None:
    with cluster_of(tmp_path) as cluster:
        ranks = cluster.ranks()
        assert len(ranks) == NUM_RANKS
        os.kill(cluster.command.process.pid, number)
        cluster.command.wait_end()
        wait_until(lambda: not any(alive(pid) for pid in ranks.values()), 15)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_model_that_a_rank_does_not_have_is_named_with_the_rank(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    arguments = ["serve", "some/model", "--port", "0", "--hosts", str(hostfile)]
    with mlxpaged(tmp_path, *arguments, fork=False) as command:
        assert command.process.wait(START_SECONDS) == 1
        assert "(127.0.0.1): some/model could not be fetched" in command.stderr
    wait_until(lambda: not processes("mlxpaged.cluster.rank"))
    assert not processes("mlxpaged.cluster.rank")
