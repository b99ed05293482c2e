"""`serve --hosts` with real ranks over loopback: what happens if one dies, is stopped, or is slow, under load."""

from __future__ import annotations

import contextlib
import json
import os
import signal
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
from tests.models.architectures import make_architecture
from tests.support import wait_until

pytestmark = pytest.mark.cluster

TIMES = int(os.environ.get("MLXPAGED_FAULTS", "2"))
"""For each fault and rank, with two ranks. With four, a tenth. `make test-cluster` sets 20."""
NUM_RANKS = 2
EACH_RANK = [pytest.param(size, rank, id=f"{rank} of {size}") for size in (2, 4) for rank in range(size)]
NOTICED_SECONDS = 10.0
START_SECONDS = 180.0
PROMPTS = ["Once upon a time", "The sum of 3 and 4", "Hello there, my", "A list: one, two"]
LENGTH = 24


@dataclass
class Cluster:
    command: Command
    url: str
    home: Path
    size: int
    expected: dict[str, str] = field(default_factory=dict)

    @property
    def times(self) -> int:
        return TIMES if self.size == NUM_RANKS else max(1, TIMES // 10)

    def health(self) -> tuple[int, dict[str, Any]]:
        response = httpx.get(f"{self.url}/health", timeout=10, trust_env=False)
        return response.status_code, response.json()

    def processes(self) -> dict[int, dict[str, str]]:
        return processes_of(self.home)

    def ranks(self) -> dict[int, int]:
        """The process of each rank."""
        every = self.processes()
        return {int(each["MLX_RANK"]): pid for pid, each in every.items() if "MLX_RANK" in each}

    def kept(self) -> int:
        """Threads and descriptors of the server."""
        process = Path(f"/proc/{self.command.process.pid}")
        return len(os.listdir(process / "task")) + len(os.listdir(process / "fd"))

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


def processes_of(home: Path) -> dict[int, dict[str, str]]:
    """The environments of a server and of all processes that it has started: they have its home."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of a zombie it is empty
            entries = path.read_bytes().decode(errors="replace").split("\0")
            environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
            if environment.get("HOME") == str(home):
                found[int(path.parent.name)] = environment
    return found


@contextmanager
def cluster_of(directory: Path, *flags: str, size: int = NUM_RANKS) -> Iterator[Cluster]:
    directory.mkdir(parents=True, exist_ok=True)
    hostfile = directory / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * size))
    # The demo model has two KV heads.
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = "demo" if size == NUM_RANKS else str(make_architecture(directory / "model", "llama", **heads))
    arguments = ["serve", model, "--port", "0", "--kv-cache-memory", "16MB", "--hosts", str(hostfile), *flags]
    with mlxpaged(directory, *arguments, env={"OPENBLAS_NUM_THREADS": "1"}, fork=False) as command:
        wait_until(lambda: "http://" in command.stdout or command.process.poll() is not None, START_SECONDS)
        assert command.process.poll() is None, command.stderr
        cluster = Cluster(command, command.url, directory, size)
        cluster.expected = {prompt: cluster.complete(prompt).text for prompt in PROMPTS}
        yield cluster


@pytest.fixture(scope="module")
def restarting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("restarting")
    with cluster_of(directory, "--restart-ranks", size=request.param) as cluster:
        yield cluster


def used_blocks(cluster: Cluster) -> int:
    status = httpx.get(f"{cluster.url}/v1/status", timeout=30, trust_env=False).json()
    return int(status["blocks"]["used"])


@pytest.mark.parametrize(("restarting", "rank"), EACH_RANK, indirect=["restarting"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_ranks_start_again_and_every_request_gets_its_whole_answer(
    restarting: Cluster, rank: int, number: signal.Signals
) -> None:
    took: list[float] = []
    kept: list[int] = []
    for i in range(restarting.times):
        before = restarting.processes()
        load = Load(restarting)
        time.sleep(0.1 * (i % 5))  # not always at the first step
        started = time.monotonic()
        os.kill(restarting.ranks()[rank], number)
        wait_until(lambda: restarting.health()[0] == 503, NOTICED_SECONDS, pause=0.05)
        took.append(time.monotonic() - started)
        status, body = restarting.health()
        if status == 503:
            assert body["status"] == "loading"
            assert f"rank {rank} (127.0.0.1)" in body["reason"]
        answers = load.join()
        assert {prompt: answer.text for prompt, answer in answers.items()} == restarting.expected
        assert {(answer.finish_reason, answer.error) for answer in answers.values()} == {("length", None)}
        assert restarting.health()[0] == 200
        assert used_blocks(restarting) == 0
        assert restarting.ranks().keys() == set(range(restarting.size))
        after = restarting.processes()
        assert len(after) == 2 + restarting.size  # the server and mlx.launch
        assert after.keys() & before.keys() == {restarting.command.process.pid}
        kept.append(restarting.kept())
    print(f"{len(took)} times, noticed after {min(took):.1f} to {max(took):.1f} s")
    assert kept[-1] <= kept[0] + max(4, len(kept) // 2)  # less than one for each restart


@pytest.mark.parametrize(("restarting", "rank"), EACH_RANK, indirect=["restarting"])
def test_a_slow_rank_only_slows_the_others(restarting: Cluster, rank: int) -> None:
    before = restarting.processes()
    for _ in range(restarting.times):
        load = Load(restarting)
        pid = restarting.ranks()[rank]
        for _ in range(5):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)
        assert {prompt: answer.text for prompt, answer in load.join().items()} == restarting.expected
        assert used_blocks(restarting) == 0
    assert restarting.processes() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_without_restarts_every_client_gets_an_error_that_names_the_rank(
    tmp_path: Path, number: signal.Signals
) -> None:
    with cluster_of(tmp_path) as cluster:
        ranks = cluster.ranks()
        load = Load(cluster)
        os.kill(ranks[1], number)
        wait_until(lambda: cluster.health()[0] == 503, NOTICED_SECONDS, pause=0.05)
        assert "rank 1 (127.0.0.1)" in cluster.health()[1]["reason"]
        for answer in load.join().values():
            assert answer.finish_reason is None or answer.error
            assert "rank 1 (127.0.0.1)" in json.dumps(answer.error)
        assert "rank 1 (127.0.0.1)" in json.dumps(cluster.complete("Hello").error)
        wait_until(lambda: list(cluster.processes()) == [cluster.command.process.pid])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_no_orphan_stays_when_the_server_ends(tmp_path: Path, number: signal.Signals) -> None:
    with cluster_of(tmp_path) as cluster:
        assert len(cluster.ranks()) == NUM_RANKS
        os.kill(cluster.command.process.pid, number)
        cluster.command.wait_end()
        wait_until(lambda: not cluster.processes(), 15)


def test_a_model_that_a_rank_does_not_have_is_named_with_the_rank(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    arguments = ["serve", "some/model", "--port", "0", "--hosts", str(hostfile)]
    with mlxpaged(tmp_path, *arguments, fork=False) as command:
        assert command.process.wait(START_SECONDS) == 1
        assert "(127.0.0.1): some/model could not be fetched" in command.stderr
    wait_until(lambda: not processes_of(tmp_path))
