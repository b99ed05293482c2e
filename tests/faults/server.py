"""A server in a process of its own, whose faults can be armed, and which can be killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.api.helpers import write_keys
from tests.faults import wire
from tests.faults.patience import Delays
from tests.support import make_embedding_model, make_tiny_model

START_SECONDS = 60.0
FLAGS = (
    *("--served-model-name", "tiny", "--served-embedding-model-name", "vectors", "--max-model-len", "512"),
    *("--kv-cache-memory", "1500KB", "--swap-space", "1MB", "--max-num-seqs", "24", "--max-queue", "300"),
    *("--write-timeout", "2", "--step-timeout", "0", "--isolate-prefix-cache", "--drain-timeout", "1"),
)
"""Room for about ninety blocks: the streams alone need more now and then, so that some are swapped out."""


class FaultyServer:
    """`mlxpaged serve` with two models that generate, one for embeddings, API keys and a directory for batches. Others
    are loaded when they are named: `wide`, whose heads have room for a quantized KV cache.

    keys: by name. `streams` is that of the streams, `victim` and `other` are those of the clients that have faults.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.models = directory / "models"
        make_tiny_model(self.models / "tiny", "qwen3")
        make_tiny_model(self.models / "second", "llama", seed=3)
        make_tiny_model(self.models / "wide", "qwen3", head_dim=64)
        make_embedding_model(directory / "vectors")
        self.keys: dict[str, str] = {}
        self.write_keys()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address: wire.Address = free.getsockname()
        self._control = str(directory / "control")
        self._process: subprocess.Popen[bytes] | None = None
        self.flags: tuple[str, ...] = ()
        self.open_files = 0
        self.num_starts = 0
        self._delays = Delays()

    def write_keys(self) -> None:
        """New keys for all names."""
        tiers: dict[str, dict[str, Any]] = {name: {} for name in ("streams", "victim", "other", "brief")}
        self.keys = write_keys(self.directory / "keys.json", **tiers, urgent={"tier": "high"}, admin={"admin": True})

    @property
    def adapter(self) -> Path:
        """The directory of an adapter, for those that start the server with one."""
        return self.directory / "adapter"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def delay(self) -> float:
        """Seconds for which the server has waited for a core since the first call."""
        return self._delays.of(self.pid)

    async def start(
        self, *flags: str, open_files: int = 0, stdout: int | None = None, stderr: int | None = None
    ) -> None:
        """flags: beside FLAGS. open_files: the limit of the process; 0 for the machine's. stdout, stderr: descriptors;
        by default the log."""
        self.flags, self.open_files = flags, open_files
        models = [str(self.models / "tiny"), "--model", f"second={self.models / 'second'}"]
        places = ["--api-keys", self.directory / "keys.json", "--data-dir", self.directory / "data"]
        places += ["--embedding-model", self.directory / "vectors", "--model-dir", self.models]
        command = [sys.executable, "-m", "tests.faults.injector", self._control, str(open_files), "serve", *models]
        command += [*map(str, places), "--port", str(self.address[1]), *FLAGS, *flags]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXPAGED_")}
        env = kept | {"HOME": str(self.directory), "MLXPAGED_ATTENTION_TUNING": "default"}
        with self.log.open("ab") as log:
            output, errors = log if stdout is None else stdout, log if stderr is None else stderr
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=env)
        self.num_starts += 1
        await self.wait_ready()

    async def wait_ready(self) -> None:
        until = time.monotonic() + START_SECONDS - self.delay()
        while time.monotonic() < until + self.delay():
            assert self._process is not None
            assert self._process.poll() is None, f"the server ended: {self.tail()}"
            try:
                if (await wire.request(self.address, "GET", "/health")).status == 200:
                    return
            except ConnectionError:
                pass
            await asyncio.sleep(0.05)
        raise AssertionError(f"the server has not started: {self.tail()}")

    async def restart(self) -> None:
        """With the same flags."""
        await self.kill()
        await self.start(*self.flags, open_files=self.open_files)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self.wait_end()

    async def wait_end(self) -> int:
        """Returns the exit status."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait, START_SECONDS)

    async def order(self, **order: Any) -> dict[str, Any]:
        """An order to the injector."""
        reader, writer = await asyncio.open_unix_connection(self._control)
        writer.write(json.dumps(order).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await reader.readline())
        writer.close()
        return answer

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]
