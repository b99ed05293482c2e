"""Several ranks over loopback: each is a process, which loads its share of a model. Rank 0 plays a scene."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

from mlxpaged.cluster.follower import follow
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.engine import sizes as engine_sizes
from mlxpaged.engine.builder import load_core
from mlxpaged.engine_config import EngineConfig
from mlxpaged.parts.memory import memory_pressure
from mlxpaged.parts.ranks.ranks import Ranks
from tests.lazy_kernels import LazyKernels, no_fusion

CONTEXT: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
if sys.platform == "linux":
    CONTEXT.set_forkserver_preload([__name__])

SECONDS = 400.0
"""A rank that waits longer hangs."""

MESSAGES: list[int] = []
"""Bytes of each message that rank 0 has sent. In its process only."""


def no_fault() -> None:
    """Rank 1 does all that it is told."""


@dataclass(frozen=True)
class Setup:
    """An engine. lazy_metal: the Metal backend's schedule on the CPU, so that steps overlap. The pools begin with
    start_tokens, and have num_blocks at most, whatever a rank's share of a block takes. fault: called on rank 1 before
    its engine is made."""

    model: Path
    num_blocks: int = 200
    swap_slots: int = 0
    num_checkpoints: int = 24
    start_tokens: int = 2048
    lazy_metal: bool = False
    fault: Callable[[], None] = no_fault
    options: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def sizes(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value in {
                "kv_blocks": lambda *_: self.num_blocks,
                "swap_slots": lambda *_: self.swap_slots,
                "state_checkpoints": lambda *_: self.num_checkpoints,
                "START_TOKENS": self.start_tokens,
            }.items():
                stack.enter_context(mock.patch.object(engine_sizes, name, value))
            stack.enter_context(mock.patch.object(memory_pressure, "PSI", Path("/no/pressure")))
            if self.lazy_metal:
                stack.enter_context(no_fusion())
                stack.enter_context(LazyKernels().installed())
            yield

    @property
    def config(self) -> EngineConfig:
        steps = {"max_step_ms": 0}  # the same ones, however long they take
        metal = {"attention_backend": "metal", "attention_tuning": "paged"} if self.lazy_metal else {}
        swap = int(self.swap_slots > 0)
        return EngineConfig(str(self.model), swap_space_bytes=swap, **(steps | metal | self.options))

    def core(self, ranks: Ranks | None = None) -> EngineCore:
        core = load_core(self.config, time.monotonic, lambda progress: None, ranks)
        assert isinstance(core, EngineCore)
        return core


class RankFailed(Exception):
    """errors: by rank, as text. result: what the scene of rank 0 returned."""

    def __init__(self, errors: dict[int, str], result: Any) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
        self.errors = errors
        self.result = result


def play_alone(setup: Setup, scene: Callable[..., Any], *arguments: Any) -> Any:
    with setup.sizes():
        return scene(setup.core(), *arguments)


def play(count: int, setup: Setup, scene: Callable[..., Any], *arguments: Any) -> Any:
    """What a scene returns for the engine of rank 0. Raises RankFailed. The scene and its arguments are pickled."""
    links = [CONTEXT.Pipe(duplex=False) for _ in range(count - 1)]
    replies = [CONTEXT.Pipe(duplex=False) for _ in range(count)]
    hosts = json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(count)])
    processes = []
    for rank in range(count):
        own = [writer for _, writer in links] if rank == 0 else [links[rank - 1][0]]
        given = (rank, hosts, own, replies[rank][1], setup, scene, arguments)
        processes.append(CONTEXT.Process(target=run_rank, args=given, daemon=True))
        processes[-1].start()
    for pair in links:
        for end in pair:
            end.close()
    try:
        outcomes = {}
        deadline = time.monotonic() + SECONDS
        for rank, (reply, writer) in enumerate(replies):
            writer.close()
            try:
                hangs = not reply.poll(max(0.0, deadline - time.monotonic()))
                outcomes[rank] = (False, "it hangs") if hangs else reply.recv()
            except EOFError:
                outcomes[rank] = (False, "it died")
        errors = {rank: text for rank, (went_well, text) in outcomes.items() if not went_well}
        if errors:
            raise RankFailed(errors, outcomes[0][1])
        return outcomes[0][1]
    finally:
        for process in processes:
            process.kill()
            process.join()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def run_rank(
    rank: int,
    hosts: str,
    links: list[Connection],
    reply: Connection,
    setup: Setup,
    scene: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """A rank's process."""
    path = setup.model / f"hosts-{os.getpid()}.json"
    path.write_text(hosts)
    os.environ.update(MLX_RANK=str(rank), MLX_HOSTFILE=str(path))
    try:
        group = mx.distributed.init(strict=True, backend="ring")
        with setup.sizes():
            if rank == 0:
                result = scene(setup.core(Ranks(group, partial(send, links))), *arguments)
                for link in links:
                    link.close()
            else:
                if rank == 1:
                    setup.fault()
                result = follow(setup.config, Ranks(group), lambda: received(links[0]))
        reply.send((True, result))
    except BaseException:
        reply.send((False, traceback.format_exc()))


def send(links: list[Connection], message: bytes) -> None:
    MESSAGES.append(len(message))
    for link in links:
        link.send_bytes(message)


def received(link: Connection) -> bytes | None:
    try:
        return link.recv_bytes()
    except EOFError:
        return None


def ring_bytes() -> int:
    """Bytes that this process has sent over TCP, as the kernel counts them (tcpi_bytes_sent, linux/tcp.h)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.family == socket.AF_INET:
                        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                        total += struct.unpack_from("Q", info, 200)[0]
    return total
