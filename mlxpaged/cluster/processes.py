"""The processes of the ranks: starts them with `mlx.launch`, and ends them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial

from mlxpaged.cluster.channel import Channel, Listener
from mlxpaged.cluster.hosts import Hosts
from mlxpaged.cluster.messages import Hello
from mlxpaged.cluster.silence import Silence
from mlxpaged.interpreter import PYTHON

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
SSH_SECONDS = 10


class Processes:
    """One process for each rank, until `kill`. The callbacks come from threads of its own.

    on_joined: a rank has said Hello. on_message: it has sent a message. on_lost: its connection ended.
    """

    def __init__(
        self,
        hosts: Hosts,
        log_level: str,
        on_joined: Callable[[Processes, Hello], None],
        on_message: Callable[[Processes, int, object], None],
        on_lost: Callable[[Processes, int], None],
    ) -> None:
        self._hosts = hosts
        self._on_joined, self._on_message, self._on_lost = on_joined, on_message, on_lost
        self.channels: dict[int, Channel] = {}
        self.pids: dict[int, int] = {}
        self.silence = Silence()  # of the ranks
        secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = Listener(hosts.hosts[0].ips[0], hosts.addresses, secret)
        self._hostfile = tempfile.NamedTemporaryFile("w", prefix="mlxpaged-hosts-")  # noqa: SIM115
        self._hostfile.write(hosts.for_launch)
        self._hostfile.flush()
        script = [*PYTHON, "-m", "mlxpaged.cluster.rank"]
        self._launcher = subprocess.Popen(
            [*LAUNCH, "--hostfile", self._hostfile.name, "--backend", hosts.backend, *OFFLINE, "--", *script],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            start_new_session=True,  # Ctrl-C in the terminal is for the server, which ends the ranks after its requests
        )
        # Not as an argument, which other users of the machines can see. It passes this on to every rank.
        peers = sorted(hosts.addresses)
        told = {"secret": secret.hex(), "server": self._listener.address, "peers": peers, "log_level": log_level}
        assert self._launcher.stdin is not None
        self._launcher.stdin.write(json.dumps(told).encode() + b"\n")
        self._launcher.stdin.flush()
        threading.Thread(target=self._accept, name="mlxpaged-accept", daemon=True).start()

    @property
    def launch_status(self) -> int | None:
        """The exit status of `mlx.launch`; None while it runs."""
        return self._launcher.poll()

    def send(self, rank: int, message: object) -> None:
        """Raises OSError if the rank is lost."""
        self.channels[rank].send(message)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed by `kill`
            while len(self.channels) < len(self._hosts):
                channel = self._listener.accept()
                threading.Thread(target=self._read, args=(channel,), name="mlxpaged-rank", daemon=True).start()

    def _read(self, channel: Channel) -> None:
        rank: int | None = None
        with contextlib.suppress(OSError, EOFError):
            hello = channel.receive()
            assert isinstance(hello, Hello)
            rank = hello.rank
            self.channels[rank], self.pids[rank] = channel, hello.pid
            self.silence.heard(rank)
            self._on_joined(self, hello)
            while True:
                message = channel.receive()
                self.silence.heard(rank)
                self._on_message(self, rank, message)
        if rank is not None:
            self._on_lost(self, rank)

    def kill(self) -> None:
        """End all ranks at once, those that are stopped or hang too."""
        self._listener.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: all of them have ended by themselves
            os.killpg(self._launcher.pid, signal.SIGKILL)  # with the ranks on this machine
        self._launcher.wait()
        self._hostfile.close()
        for rank, pid in self.pids.items():
            if not (host := self._hosts.hosts[rank]).is_local:
                # They end by themselves when their channel is closed, unless they are stopped.
                threading.Thread(target=partial(kill_remote, host.ssh, pid), name="mlxpaged-kill", daemon=True).start()
        for channel in self.channels.values():
            channel.close()


OFFLINE = ["--env", "HF_HUB_OFFLINE=1"]
"""Ranks load from their own disks. They do not all download the same weights at once."""

LAUNCH = [*PYTHON, "-m", "mlxpaged.cluster.launch"]


def kill_remote(host: str, pid: int) -> None:
    try:
        command = ["ssh", "-o", "BatchMode=yes", host, "kill", "-9", str(pid)]
        subprocess.run(command, timeout=SSH_SECONDS, capture_output=True, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("process %d of %s may still run: %s", pid, host, error)
