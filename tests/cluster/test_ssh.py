"""`serve --hosts` with a rank behind ssh. The other host is a network namespace with an sshd of its own, so these tests
need root on Linux."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxpaged.cluster.messages import LOST_SECONDS
from tests.cluster.servers import Cluster, Load, cluster_of
from tests.support import wait_until

pytestmark = pytest.mark.cluster

OURS, THEIRS = "198.51.100.1", "198.51.100.2"
"""Of a network that is only for documentation (RFC 5737)."""
NAME = "other-mac"
NOTICED_SECONDS = 60.0


@dataclass
class OtherHost:
    """folder: with its keys, and with a command `ssh` that knows it by its name."""

    namespace: str
    link: str
    folder: Path

    @property
    def hosts(self) -> list[dict[str, object]]:
        return [{"ssh": "127.0.0.1", "ips": [OURS]}, {"ssh": NAME, "ips": [THEIRS]}]

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": f"{self.folder}:{os.environ['PATH']}"}

    def rank(self) -> int | None:
        """The process of the rank there."""
        for pid in run("ip", "netns", "pids", self.namespace).split():
            if b"mlxpaged.cluster.rank" in read(f"/proc/{pid}/cmdline").split(b"\0")[:4]:
                return int(pid)
        return None

    def plug(self, state: str) -> None:
        run("ip", "link", "set", self.link, state)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherHost]:
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if os.geteuid() != 0 or shutil.which("ip") is None or sshd is None:
        pytest.skip("needs root, iproute2 and openssh-server")
    folder = tmp_path_factory.mktemp("ssh")
    for key in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    (folder / "known_hosts").write_text(f"{THEIRS} {(folder / 'host.pub').read_text()}")
    (folder / "sshd_config").write_text(
        f"ListenAddress {THEIRS}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\n"
        "PasswordAuthentication no\nUsePAM no\nPidFile none\n"
    )
    (folder / "config").write_text(
        f"Host {NAME}\nHostName {THEIRS}\nUser root\nIdentityFile {folder}/user\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {folder}/known_hosts\nStrictHostKeyChecking yes\n"
    )
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd needs it, and does not make it
    found = OtherHost(f"mlxpaged-{os.getpid()}", f"mlxp{os.getpid()}", folder)
    inside = ("ip", "netns", "exec", found.namespace)
    run("ip", "netns", "add", found.namespace)
    try:
        run("ip", "link", "add", found.link, "type", "veth", "peer", "name", "there", "netns", found.namespace)
        run("ip", "addr", "add", f"{OURS}/30", "dev", found.link)
        run("ip", "link", "set", found.link, "up")
        run(*inside, "ip", "addr", "add", f"{THEIRS}/30", "dev", "there")
        run(*inside, "ip", "link", "set", "there", "up")
        daemon = subprocess.Popen([*inside, sshd, "-D", "-e", "-f", f"{folder}/sshd_config"])
        yield found
        daemon.terminate()
        daemon.wait(10)
    finally:
        for pid in run("ip", "netns", "pids", found.namespace).split():
            os.kill(int(pid), signal.SIGKILL)
        run("ip", "netns", "del", found.namespace)  # with the link


def started(cluster: Cluster, other: OtherHost) -> int:
    """The process of the other rank of a cluster that serves."""
    assert f"rank 0 (127.0.0.1), rank 1 ({NAME}), by ring" in cluster.command.stdout
    pid = other.rank()
    assert pid is not None
    assert len(cluster.ranks()) == 1
    return pid


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_rank_is_started_over_ssh_and_ends_with_the_server(other: OtherHost, tmp_path: Path, stopped: bool) -> None:
    with cluster_of(tmp_path, "--log-level", "debug", hosts=other.hosts, env=other.env) as cluster:
        pid = started(cluster, other)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        cluster.command.process.send_signal(signal.SIGINT)
        assert cluster.command.wait_end() == 0
        wait_until(lambda: other.rank() is None and not cluster.processes())
    # mlx.launch keeps the first line from there, the name of a file. It would be logged after an echo.
    assert "/tmp." not in cluster.command.stderr
    assert "secret" not in cluster.command.stderr


def test_a_rank_ends_if_the_server_is_killed(other: OtherHost, tmp_path: Path) -> None:
    with cluster_of(tmp_path, hosts=other.hosts, env=other.env) as cluster:
        started(cluster, other)
        cluster.command.process.send_signal(signal.SIGKILL)
        wait_until(lambda: other.rank() is None and not cluster.processes(), 2 * LOST_SECONDS)


def test_a_host_that_leaves_the_network_is_noticed_and_the_ranks_start_again_when_it_is_back(
    other: OtherHost, tmp_path: Path
) -> None:
    with cluster_of(tmp_path, "--restart-ranks", hosts=other.hosts, env=other.env) as cluster:
        before = started(cluster, other)
        load = Load(cluster)
        began = time.monotonic()
        other.plug("down")
        wait_until(lambda: cluster.health()[0] == 503, NOTICED_SECONDS, pause=0.05)
        print(f"noticed after {time.monotonic() - began:.1f} s")
        assert f"rank 1 ({NAME}) has not been heard from" in json.dumps(cluster.health()[1])
        wait_until(lambda: other.rank() != before, 2 * LOST_SECONDS)
        other.plug("up")
        answers = load.join()
        assert {prompt: answer.text for prompt, answer in answers.items()} == cluster.expected
        assert cluster.used_blocks() == 0
        assert started(cluster, other) != before
