"""The hostfile: what is read, and what is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.cli import main, serve
from mlxpaged.cluster.hosts import Hosts

HERE = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}
OTHER = {"ssh": "studio-2.local", "ips": ["10.0.0.2"]}


@pytest.fixture(autouse=True)
def no_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets up the log of its process."""
    monkeypatch.setattr(serve, "set_up", lambda level: None)


def write(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(content))
    return path


def test_both_formats_of_mlx_launch_are_read(tmp_path: Path) -> None:
    plain = Hosts.read(write(tmp_path, [HERE, OTHER]))
    assert plain.backend == "ring"
    assert [plain.label(rank) for rank in range(len(plain))] == ["rank 0 (127.0.0.1)", "rank 1 (studio-2.local)"]
    assert plain.addresses == {"127.0.0.1", "10.0.0.2"}
    rdma = [{**HERE, "rdma": [None, "rdma_en2"]}, {**OTHER, "rdma": ["rdma_en2", None]}]
    assert Hosts.read(write(tmp_path, {"backend": "jaccl", "envs": [], "hosts": rdma})).backend == "jaccl"


def test_the_first_host_is_started_without_ssh(tmp_path: Path) -> None:
    """`mlx.distributed_config` gives every machine its name."""
    named = {"backend": "ring", "envs": ["A=1"], "hosts": [{**HERE, "ssh": "studio-1.local"}, OTHER]}
    hosts = Hosts.read(write(tmp_path, named))
    assert hosts.hosts[0].is_local
    assert json.loads(hosts.for_launch) == {"backend": "ring", "envs": ["A=1"], "hosts": [HERE, OTHER]}


def test_the_ranks_are_told_the_addresses_that_the_server_has_found(tmp_path: Path) -> None:
    """A name may be that of another address on the machine that has it."""
    hosts = Hosts.read(write(tmp_path, [{**HERE, "ips": ["localhost"]}, OTHER]))
    assert [host["ips"] for host in json.loads(hosts.for_launch)] == [["127.0.0.1"], ["10.0.0.2"]]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"backend": "nccl", "hosts": [HERE]}, "the backend must be one of ring, jaccl, jaccl-ring, got 'nccl'"),
        ([], "needs a list of hosts"),
        ({"hosts": "a,b"}, "needs a list of hosts"),
        ([["127.0.0.1:5000"]], "host 0 needs a name to log in to"),
        ([HERE, {"ssh": "-oProxyCommand=x", "ips": ["10.0.0.2"]}], "host 1 needs a name to log in to"),
        ([HERE, {"ssh": "b"}], r"host 1 \(b\) needs a list of its addresses"),
        ([HERE, {"ssh": "b", "ips": ["no.such.host.invalid"]}], r"host 1 \(b\): "),
        ([{**OTHER, "ips": ["192.0.2.1"]}, HERE], "192.0.2.1 is no address of this machine"),
    ],
)
def test_a_bad_hostfile_is_refused_with_the_reason(tmp_path: Path, content: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Hosts.read(write(tmp_path, content))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--hosts", "/no/such/file"], "--hosts /no/such/file: No such file or directory"),
        (["--hosts", "FILE", "--model", "demo", "--model", "b=demo"], "a second model cannot be used"),
        (["--hosts", "FILE", "--model", "demo", "--embedding-model", "e"], "a second model cannot be used"),
        (["--hosts", "FILE", "--adapter", "a=dir"], "--adapter cannot be used together with --hosts"),
        (["--hosts", "FILE", "--reranker"], "--reranker cannot be used together with --hosts"),
    ],
)
def test_serve_says_what_does_not_go_with_hosts(
    tmp_path: Path,
    arguments: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # which `--hosts` sets
    path = str(write(tmp_path, [HERE, HERE]))
    with pytest.raises(SystemExit):
        main(["serve", "--port", "0", *(path if each == "FILE" else each for each in arguments)])
    assert reason in capsys.readouterr().err


def test_serve_under_mlx_launch_says_how_it_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_RANK", "1")
    with pytest.raises(SystemExit):
        main(["serve"])
    assert "run `mlxpaged serve MODEL --hosts FILE`" in capsys.readouterr().err
