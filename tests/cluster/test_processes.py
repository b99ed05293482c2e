"""`serve --hosts` with real ranks over loopback: what happens if one dies, is stopped, or is slow, under load."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.sources.resolve import resolve
from tests.cli.helpers import mlxpaged
from tests.cluster.servers import LOCAL, PROMPTS, START_SECONDS, Cluster, Load, Storm, cluster_of, processes_of
from tests.support import make_tiny_model, wait_until

pytestmark = pytest.mark.cluster

TIMES = int(os.environ.get("MLXPAGED_FAULTS", "2"))
"""For each fault and rank. `make test-cluster` sets 20."""
NUM_RANKS = int(os.environ.get("MLXPAGED_RANKS", "2"))
"""`make test-cluster RANKS=4` sets 4."""
NOTICED_SECONDS = 60.0

HOSTS = [LOCAL] * NUM_RANKS
LENGTH = 64 if NUM_RANKS <= 2 else 16
"""Tokens of an answer. Four ranks that wait for each other on two cores take 0.3 s for one."""

each_rank = pytest.mark.parametrize("rank", range(NUM_RANKS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model has two KV heads, too few for more ranks."""
    if NUM_RANKS <= 2:
        return "demo"
    sizes = {"hidden_size": 128, "num_attention_heads": 2 * NUM_RANKS, "num_key_value_heads": NUM_RANKS}
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama", **sizes))


@pytest.fixture(scope="module")
def restarting(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Of the four requests of a load, two wait in the queue."""
    directory = tmp_path_factory.mktemp("restarting")
    flags = ("--restart-ranks", "--max-num-seqs", "2")
    with cluster_of(directory, *flags, model=model, hosts=HOSTS, length=LENGTH) as cluster:
        yield cluster


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@each_rank
def test_the_ranks_start_again_and_every_request_gets_its_whole_answer(
    restarting: Cluster, rank: int, number: signal.Signals
) -> None:
    took: list[float] = []
    kept: list[int] = []
    for i in range(TIMES):
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


def test_what_a_stopped_rank_was_told_is_told_again_after_the_restart(restarting: Cluster) -> None:
    load = Load(restarting)
    os.kill(restarting.ranks()[0], signal.SIGSTOP)
    httpx.delete(f"{restarting.url}/v1/requests", timeout=60, trust_env=False)  # 503 if the restart takes long
    assert any("cancelled" in str(answer.error) for answer in load.join().values())
    wait_until(lambda: restarting.health()[0] == 200, START_SECONDS)
    assert restarting.used_blocks() == 0


@each_rank
def test_a_slow_rank_only_slows_the_others(restarting: Cluster, rank: int) -> None:
    before = restarting.processes()
    for _ in range(TIMES):
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


def test_the_banner_says_what_the_link_takes_of_each_token(restarting: Cluster, model: str) -> None:
    ranks = ", ".join(f"rank {rank} (127.0.0.1)" for rank in range(NUM_RANKS))
    line = (
        rf"  ranks     {re.escape(ranks)}, by ring\n"
        r"  link      (.+) of one token are added up in (\S+) ms, and (.+) of a full step in (\S+) ms\n"
        r"            (\d+) sums take (\S+) ms of every token's time\n"
    )
    found = re.search(line, restarting.command.stdout)
    assert found is not None, restarting.command.stdout
    config = resolve(model).config
    token_bytes, sums = 4 * config["hidden_size"], 2 * config["num_hidden_layers"]
    assert (found[1], found[3]) == ("0.5 KB", "1.0 MB")
    assert (token_bytes, token_bytes * EngineConfig.max_num_batched_tokens) == (512, 2**20)
    token_ms, step_ms, all_ms = float(found[2]), float(found[4]), float(found[6])
    assert token_ms > 0
    assert step_ms > 0
    assert int(found[5]) == sums
    assert all_ms == pytest.approx(sums * token_ms, abs=0.05 + 0.005 * sums)  # both are rounded


def test_mlx_launch_takes_no_core_from_the_ranks(restarting: Cluster) -> None:
    (pid,) = [pid for pid in restarting.processes() if b"mlxpaged.cluster.launch" in arguments(pid)]
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
    model: str, tmp_path: Path, number: signal.Signals
) -> None:
    with cluster_of(tmp_path, model=model, hosts=HOSTS) as cluster:
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
def test_no_orphan_stays_when_the_server_ends(model: str, tmp_path: Path, number: signal.Signals) -> None:
    with cluster_of(tmp_path, model=model, hosts=HOSTS) as cluster:
        assert len(cluster.ranks()) == NUM_RANKS
        os.kill(cluster.command.process.pid, number)
        cluster.command.wait_end()
        wait_until(lambda: not cluster.processes(), 15)


def with_start(directory: Path, code: str) -> str:
    """A PYTHONPATH with which every interpreter first runs `code`."""
    start = directory / "start"
    start.mkdir()
    (start / "sitecustomize.py").write_text(code)
    return os.pathsep.join((str(start), *filter(None, [os.environ.get("PYTHONPATH")])))


WAITING_RANK_1 = """\
import os, pathlib, time

while os.environ.get("MLX_RANK") == "1" and not pathlib.Path({reached!r}).exists():
    time.sleep(0.05)
"""
"""Until all ranks are there, the server and rank 0 listen."""


KILLPG_OF_MACOS = """\
import os, pathlib

def killpg(group, number, found=os.killpg):
    fields = [path.read_text().rpartition(")")[2].split() for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
    if all(state == "Z" for state, _, of, *_ in fields if int(of) == group):
        raise PermissionError
    found(group, number)

os.killpg = killpg
"""
"""Processes that have ended, but were not waited for, cannot be killed there: kern_sig.c of XNU, `killpg1`."""


def test_ranks_that_have_ended_already_are_ended_on_macos_too(model: str, tmp_path: Path) -> None:
    env = {"PYTHONPATH": with_start(tmp_path, KILLPG_OF_MACOS)}
    with cluster_of(tmp_path, model=model, hosts=HOSTS, env=env) as cluster:
        os.kill(cluster.ranks()[1], signal.SIGKILL)
        wait_until(lambda: cluster.health()[0] == 503, NOTICED_SECONDS)
        assert "rank 1 (127.0.0.1)" in json.dumps(cluster.complete("Hello").error)


DEADLY_REQUEST = """\
import os

if os.environ.get("MLX_RANK") == "0":
    from mlxpaged.core.engine.core import EngineCore

    def submit(core, requests, found=EngineCore.submit):
        if any(request.params.seed == 666 for request in requests):
            os._exit(1)
        return found(core, requests)

    EngineCore.submit = submit
"""


def test_a_request_that_kills_the_ranks_again_and_again_fails_and_the_others_get_their_whole_answers(
    model: str, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": with_start(tmp_path, DEADLY_REQUEST)}
    flags = ("--restart-ranks", "--max-num-seqs", "2")
    with cluster_of(tmp_path, *flags, model=model, hosts=HOSTS, length=LENGTH, env=env) as cluster:
        load = Load(cluster)
        body = {"prompt": "Once", "seed": 666, "max_tokens": 4}
        deadly = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=180, trust_env=False)
        assert deadly.status_code == 500
        error = "the ranks died of this request again and again, so it is not run any more"
        assert error in deadly.json()["error"]["message"]
        answers = load.join()
        assert {prompt: answer.text for prompt, answer in answers.items()} == cluster.expected
        assert {(answer.finish_reason, answer.error) for answer in answers.values()} == {("length", None)}
        assert cluster.command.stderr.count("the ranks start again; ") <= 3
        assert cluster.used_blocks() == 0


def test_connections_that_prove_nothing_keep_no_rank_from_starting(model: str, tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    env = {"PYTHONPATH": with_start(tmp_path, WAITING_RANK_1.format(reached=str(reached)))}
    with Storm(tmp_path, reached) as storm, cluster_of(tmp_path, model=model, hosts=HOSTS, env=env) as cluster:
        wait_until(
            lambda: len(storm.ports) >= 4
        )  # of the server for its ranks, two of rank 0 for the others, and of HTTP
        assert set(cluster.ranks()) == {*range(NUM_RANKS)}
        answer = cluster.complete(PROMPTS[0])
        assert (answer.text, answer.error) == (cluster.expected[PROMPTS[0]], None)


def test_a_model_that_a_rank_does_not_have_is_named_with_the_rank(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([LOCAL] * 2))
    arguments = ["serve", "some/model", "--port", "0", "--hosts", str(hostfile)]
    with mlxpaged(tmp_path, *arguments, fork=False) as command:
        assert command.process.wait(START_SECONDS) == 1
        assert "(127.0.0.1): some/model could not be fetched" in command.stderr
    wait_until(lambda: not processes_of(tmp_path))


OTHER_MLX_ON_RANK_1 = """\
import importlib.metadata, os

def version(name, found=importlib.metadata.version):
    return "0.1" if name == "mlx" else found(name)

if os.environ.get("MLX_RANK") == "1":
    importlib.metadata.version = version
"""


def test_a_rank_with_other_versions_is_refused_and_named(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([LOCAL] * 2))
    arguments = ["serve", "demo", "--port", "0", "--hosts", str(hostfile)]
    env = {"PYTHONPATH": with_start(tmp_path, OTHER_MLX_ON_RANK_1)}
    with mlxpaged(tmp_path, *arguments, env=env, fork=False) as command:
        assert command.process.wait(START_SECONDS) == 1
        assert f"rank 1 (127.0.0.1) has mlx 0.1, but the server has mlx {version('mlx')}\n" in command.stderr
    wait_until(lambda: not processes_of(tmp_path))
