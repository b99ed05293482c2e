"""The process of one rank: `python -m mlxpaged.cluster.rank`, started by `mlx.launch`.

It ends when the server does, or has not been heard from for LOST_SECONDS, so that no orphan stays.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Any, NoReturn

import mlx.core as mx

from mlxpaged.cluster.channel import Channel, Listener, connect
from mlxpaged.cluster.follower import follow
from mlxpaged.cluster.link import hidden_size, measure_link
from mlxpaged.cluster.messages import (
    BEAT_SECONDS,
    LOST_SECONDS,
    Ask,
    Beat,
    Failed,
    Hello,
    Progressed,
    Ready,
    Replied,
    Run,
    Start,
    Stepped,
    Submit,
    versions,
)
from mlxpaged.cluster.ring import Ring, own_addresses
from mlxpaged.cluster.silence import Silence
from mlxpaged.core.engine.errors import RankLostError
from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.core.engine.request import RequestOutput
from mlxpaged.core.engine.stall import Stall
from mlxpaged.core.engine.worker import Worker
from mlxpaged.engine.builder import load_core
from mlxpaged.engine.engine_thread import EXPECTED, Callbacks, EngineThread, Failure, ModelSlot
from mlxpaged.engine.info import Link
from mlxpaged.engine.watchdog import Watchdog
from mlxpaged.log_writer import LogHandler, Writer
from mlxpaged.parts.ranks.ranks import Ranks
from mlxpaged.progress import Report

logger = logging.getLogger(__name__)

FAILED_STATUS = 1

LOST_PEER = (RankLostError.__name__, DeviceError.__name__)
"""Names in the reason of a failure which the other end of a link may have caused."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, told = int(os.environ["MLX_RANK"]), json.loads(sys.stdin.readline())
    form = f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"
    logging.basicConfig(level=told["log_level"].upper(), format=form, handlers=[LogHandler(Writer(2))])
    secret, server = bytes.fromhex(told["secret"]), tuple(told["server"])
    # The other ranks reach rank 0 where they reach the server.
    accepts = Listener(server[0], told["peers"], secret) if rank == 0 else None
    ring = Ring(own_addresses(rank), secret)
    channel = connect(server, secret)
    channel.send(Hello(rank, os.getpid(), versions(), None if accepts is None else accepts.address, ring.addresses))
    Rank(rank, channel, secret, accepts, ring).run()


class Rank:
    """accepts: on rank 0, the channels of the others."""

    def __init__(self, rank: int, channel: Channel, secret: bytes, accepts: Listener | None, ring: Ring) -> None:
        self._rank = rank
        self._channel = channel
        self._secret = secret
        self._accepts = accepts
        self._ring = ring
        self._silence = Silence()  # of the server
        self._silence.heard()
        self._thread = EngineThread()
        self._slot: ModelSlot | None = None
        self._link: Link | None = None

    def run(self) -> NoReturn:
        """Serve until the server is gone."""
        threading.Thread(target=self._beat, name="mlxpaged-beats", daemon=True).start()
        try:
            while True:
                message = self._channel.receive()
                self._silence.heard()
                self._handle(message)
        except (OSError, EOFError):
            logger.debug("the server has ended")
        finally:
            os._exit(0)  # whatever the other threads wait for

    def _beat(self) -> None:
        """Tell the server that this process is alive, and end it if the server is not."""
        while not self._silence.lost():
            self._send(Beat())
            time.sleep(BEAT_SECONDS)
        logger.critical("the server has not been heard from for %.0f s", LOST_SECONDS)
        os._exit(FAILED_STATUS)

    def _send(self, message: object) -> None:
        try:
            self._channel.send(message)
        except OSError:
            os._exit(FAILED_STATUS)

    def _handle(self, message: Any) -> None:
        if isinstance(message, Start):
            (self._lead if self._rank == 0 else self._follow)(message)
            return
        slot = self._slot
        if isinstance(message, Beat) or slot is None:
            return
        if isinstance(message, Submit):
            self._thread.submit(slot, message.requests)
        elif isinstance(message, Run):
            self._thread.send(slot, partial(self._run, run=message))
        elif isinstance(message, Ask):
            self._thread.send(slot, partial(self._reply, ask=message))

    def _run(self, core: Worker, run: Run) -> list[RequestOutput]:
        try:
            return run.command(core)
        finally:  # a command that raises ends the model, and would do so after each restart
            self._send(Replied(run.number, None))

    def _reply(self, core: Worker, ask: Ask) -> list[RequestOutput]:
        try:
            result, outputs = ask.question(core)
        except Exception as error:
            self._send(Replied(ask.number, None, error))
            return []
        self._send(Replied(ask.number, result))
        return outputs

    def _lead(self, start: Start) -> None:
        """Rank 0: run the engine."""

        def load(report: Report) -> Worker:
            group = self._join(start)
            if group is None:
                return load_core(start.config, time.monotonic, report)
            ranks = Ranks(group, partial(self._broadcast, followers))
            return load_core(start.config, time.monotonic, report, ranks)

        callbacks = Callbacks(
            lambda progress: self._send(Progressed(progress)),
            lambda info, stats: self._send(Ready(info, stats, self._link)),
            lambda outputs, stats: self._send(Stepped(outputs, stats)),
            lambda failure: self._fail(failure or Failure("the engine has ended")),
        )
        followers = self._accept_followers(start.size - 1)
        self._slot = ModelSlot(start.config, load, callbacks)
        Watchdog(self._thread, start.stall_limits, time.monotonic, self._note_stall).start()
        self._thread.start()
        self._thread.load(self._slot)

    def _note_stall(self, stall: Stall) -> None:
        self._send(Failed(Failure(str(stall))))

    def _accept_followers(self, count: int) -> list[Channel]:
        assert self._accepts is not None
        followers = [self._accepts.accept() for _ in range(count)]
        self._accepts.close()
        return followers

    def _broadcast(self, followers: list[Channel], message: bytes) -> None:
        """Raises RankLostError."""
        try:
            for follower in followers:
                follower.send(message)
        except OSError as error:
            raise RankLostError(f"a rank takes no messages: {error}") from error

    def _join(self, start: Start) -> mx.distributed.Group | None:
        """Meet the other ranks; None if there are none."""
        if start.size == 1:
            return None
        if start.backend == "ring":
            group = self._ring.join(self._rank, start.ring)
        else:
            group = mx.distributed.init(strict=True, backend=start.backend.removesuffix("-ring"))
        size, tokens = hidden_size(start.config.model), start.config.max_num_batched_tokens
        self._link = measure_link(group, size, tokens)
        return group

    def _follow(self, start: Start) -> None:
        """Another rank: do what rank 0 says."""
        threading.Thread(target=self._follow_on_thread, args=(start,), name="mlxpaged-engine", daemon=True).start()

    def _follow_on_thread(self, start: Start) -> None:
        try:
            steps = connect(start.steps, self._secret)
            group = self._join(start)
            assert group is not None
            follow(start.config, Ranks(group), partial(receive, steps))
        except BaseException as error:
            if not isinstance(error, EXPECTED):
                logger.exception("this rank failed")
            self._fail(Failure.of(error))

    def _fail(self, failure: Failure) -> None:
        self._send(Failed(failure, lost_peer=any(each in failure.reason for each in LOST_PEER)))


def receive(steps: Channel) -> bytes:
    """A message of rank 0. Raises RankLostError."""
    try:
        message = steps.receive()
    except (OSError, EOFError) as error:
        raise RankLostError(f"rank 0 sends no more steps: {error}") from error
    assert isinstance(message, bytes)
    return message


if __name__ == "__main__":
    main()
