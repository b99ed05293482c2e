"""`serve --hosts` with real ranks over loopback: what happens if one dies, is stopped, or is slow, under load."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.helpers import mlxpaged
from tests.cluster.servers import LOCAL, START_SECONDS, Cluster, Load, cluster_of, processes_of
from tests.models.architectures import make_architecture
from tests.support import wait_until

pytestmark = pytest.mark.cluster

TIMES = int(os.environ.get("MLXPAGED_FAULTS", "2"))
"""For each fault and rank, with two ranks. With four, a tenth. `make test-cluster` sets 20."""
NUM_RANKS = 2
EACH_RANK = [pytest.param(size, rank, id=f"{rank} of {size}") for size in (NUM_RANKS,) for rank in range(size)]
NOTICED_SECONDS = 10.0


class Clusters:
    """Keeps a cluster with `--restart-ranks` until one of another size is asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._size = 0
        self._cluster: Cluster | None = None

    def of(self, size: int) -> Cluster:
        if self._cluster is None or self._size != size:
            self.close()
            self._size, self._cluster = size, self._stack.enter_context(self._start(size))
        return self._cluster

    def _start(self, size: int) -> contextlib.AbstractContextManager[Cluster]:
        directory, model = self._directory / str(size), "demo"
        if size > NUM_RANKS:  # the demo model has two KV heads
            heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
            model = str(make_architecture(directory / "model", "llama", **heads))
        return cluster_of(directory, "--restart-ranks", model=model, hosts=[LOCAL] * size)

    def close(self) -> None:
        self._stack.close()
        self._cluster = None


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    found = Clusters(tmp_path_factory.mktemp("restarting"))
    yield found
    found.close()


def times(cluster: Cluster) -> int:
    return TIMES if len(cluster.ranks()) == NUM_RANKS else max(1, TIMES // 10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(("size", "rank"), EACH_RANK)
def test_the_ranks_start_again_and_every_request_gets_its_whole_answer(
    clusters: Clusters, size: int, rank: int, number: signal.Signals
) -> None:
    restarting = clusters.of(size)
    took: list[float] = []
    kept: list[int] = []
    for i in range(times(restarting)):
        before, ranks = restarting.processes(), restarting.ranks()
        load = Load(restarting)
        time.sleep(0.1 * (i % 5))  # not always at the first step
        started = time.monotonic()
        os.kill(ranks[rank], number)
        wait_until(lambda: restarting.health()[0] == 503, NOTICED_SECONDS, pause=0.05)
        took.append(time.monotonic() - started)
        status, body = restarting.health()
        if status == 503:
            assert body["status"] == "loading"
            assert f"rank {rank} (127.0.0.1)" in body["reason"]
        answers = load.join()
        assert {prompt: answer.text for prompt, answer in answers.items()} == restarting.expected
        assert {(answer.finish_reason, answer.error) for answer in answers.values()} == {("length", None)}
        wait_until(lambda: restarting.health()[0] == 200, START_SECONDS)
        assert restarting.used_blocks() == 0
        assert restarting.ranks().keys() == ranks.keys()
        after = restarting.processes()
        assert len(after) == 2 + len(ranks)  # the server and mlx.launch
        assert after.keys() & before.keys() == {restarting.command.process.pid}
        kept.append(restarting.kept())
    print(f"{len(took)} times, noticed after {min(took):.1f} to {max(took):.1f} s")
    assert kept[-1] - kept[0] < max(16, len(kept) // 2)  # pools of threads grow at first


@pytest.mark.parametrize(("size", "rank"), EACH_RANK)
def test_a_slow_rank_only_slows_the_others(clusters: Clusters, size: int, rank: int) -> None:
    restarting = clusters.of(size)
    before = restarting.processes()
    for _ in range(times(restarting)):
        load = Load(restarting)
        pid = restarting.ranks()[rank]
        for _ in range(5):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)
        assert {prompt: answer.text for prompt, answer in load.join().items()} == restarting.expected
        assert restarting.used_blocks() == 0
    assert restarting.processes() == before


def test_mlx_launch_takes_no_core_from_the_ranks(clusters: Clusters) -> None:
    (pid,) = [pid for pid in clusters.of(NUM_RANKS).processes() if b"mlxpaged.cluster.launch" in arguments(pid)]
    before = cpu_seconds(pid)
    time.sleep(2)
    assert cpu_seconds(pid) - before < 0.2


def arguments(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


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
    hostfile.write_text(json.dumps([LOCAL] * 2))
    arguments = ["serve", "some/model", "--port", "0", "--hosts", str(hostfile)]
    with mlxpaged(tmp_path, *arguments, fork=False) as command:
        assert command.process.wait(START_SECONDS) == 1
        assert "(127.0.0.1): some/model could not be fetched" in command.stderr
    wait_until(lambda: not processes_of(tmp_path))
