"""A rank other than 0: it makes the calls of rank 0's messages on its own model runner."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from mlxpaged.awake import AWAKE, LINGER_SECONDS, Hold
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.step_input import SampledTokens
from mlxpaged.core.step import Step
from mlxpaged.daemon_thread import in_daemon_thread
from mlxpaged.engine.builder import load_core
from mlxpaged.engine_config import EngineConfig
from mlxpaged.parts.disk.disk_share import CALLS as DISK_CALLS
from mlxpaged.parts.disk.disk_share import DiskShare
from mlxpaged.parts.disk.disk_tier import DiskTier
from mlxpaged.parts.memory.fitting import CACHE_LIMIT, limit_freed_buffers
from mlxpaged.parts.ranks.rank_messages import MessageReader
from mlxpaged.parts.ranks.ranks import Ranks
from mlxpaged.parts.ranks.shared_runner import SharedRunner
from mlxpaged.progress import Report

CALLS = {
    *("move_blocks", "copy_blocks", "resize_pool", "clear_cache", "free_memory"),
    *("receive_features", "forget_features"),
}
"""The calls of the model runner that a message can ask for, in addition to that for a step."""


class Follower:
    """Runs the steps of rank 0. Its steps overlap if rank 0's do: it waits for a step once it has launched the next.
    share: of the prefixes on a disk; None if none are stored."""

    def __init__(
        self, runner: SharedRunner, share: DiskShare | None = None, note_use: Callable[[], None] = lambda: None
    ) -> None:
        """note_use: is called before each step."""
        self._note_use = note_use
        self._runner, self._share = runner, share
        self._reader = MessageReader()
        self._in_flight: mx.array | None = None

    def perform(self, message: bytes) -> None:
        """Do what a message says. Any exception means that this rank has to end: it is out of step with the others."""
        call, arguments = self._reader.read(message)
        if call == "run":
            self._note_use()
            self._run(*arguments)
        elif call in CALLS:
            self.finish()
            getattr(self._runner, call)(*arguments)
        elif call in DISK_CALLS and self._share is not None:  # beside the step in flight, as on rank 0
            getattr(self._share, call)(*arguments)
        else:
            raise ValueError(f"rank 0 asks for {call!r}, which no rank can do")

    def finish(self) -> None:
        """Wait for the step in flight."""
        if self._in_flight is not None:
            self._runner.finish_step(self._in_flight)
            self._in_flight = None

    def _run(self, step: Step, sampled_ids: list[int], running: list[int]) -> None:
        logits = self._runner.run(step, SampledTokens(None, sampled_ids), running)
        self._runner.start_step(logits)
        self.finish()
        self._in_flight = logits
        if not self._runner.overlaps:
            self.finish()


def follow(
    config: EngineConfig, ranks: Ranks, receive: Callable[[], bytes | None], report: Report = lambda progress: None
) -> None:
    """Load this rank's share of a model, and do what the messages say until `receive` returns None.

    Raises the errors of `load_core`, RankLostError, and whatever fails here. All of them end this rank."""
    limit_freed_buffers(CACHE_LIMIT, loading=True)
    core = load_core(config, time.monotonic, report, ranks)  # only its runner is used: the other parts are rank 0's
    assert isinstance(core, EngineCore)
    assert isinstance(core.runner, SharedRunner)
    limit_freed_buffers(core.step_bytes)
    tier = core.part(DiskTier)
    hold = Hold(AWAKE, time.monotonic)
    in_daemon_thread(lambda: let_go(hold), "mlxpaged-awake")
    follower = Follower(core.runner, None if tier is None else tier.share, hold.note_use)
    try:
        while (message := receive()) is not None:
            follower.perform(message)
    finally:
        hold.end()
        core.close()


def let_go(hold: Hold) -> None:
    """Let this Mac sleep when rank 0 has sent no step for a while: this thread waits for messages then."""
    while True:
        time.sleep(LINGER_SECONDS)
        hold.rest()
