"""Deadlines of requests hold while ranks start again. The ranks here are no processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from mlxpaged.cluster import cluster_engine
from mlxpaged.cluster.cluster_engine import ClusterEngine
from mlxpaged.cluster.hosts import LOCAL, Host, Hosts
from mlxpaged.cluster.messages import Hello, Ready, Stepped, Submit, versions
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine.config import EngineConfig
from mlxpaged.engine.engine_thread import Callbacks, ModelSlot
from mlxpaged.engine.request import Request, RequestOutput
from mlxpaged.engine.sampling_params import SamplingParams
from mlxpaged.engine.watchdog import StallLimits
from mlxpaged.models.loader import load_model
from mlxpaged.scheduler.sequence import FinishReason
from tests.support import wait_until


class Ranks:
    """A rank that says what it is told to."""

    launch_status = None

    def __init__(self, hosts: Hosts, log_level: str, *callbacks: Callable[..., None]) -> None:
        self._on_joined, self._on_message, self._on_lost = callbacks
        self.silence = self
        self.sent: list[Any] = []

    def lost(self) -> list[int]:
        return []

    def send(self, rank: int, message: object) -> None:
        self.sent.append(message)

    def kill(self) -> None: ...

    def join(self) -> None:
        self._on_joined(self, Hello(0, os.getpid(), versions(), (LOCAL, 1)))

    def say(self, message: object) -> None:
        self._on_message(self, 0, message)

    def die(self) -> None:
        self._on_lost(self, 0)

    @property
    def submitted(self) -> list[str]:
        return [each.request_id for message in self.sent if isinstance(message, Submit) for each in message.requests]


def test_a_request_whose_deadline_passes_while_the_ranks_start_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(kv_cache_bytes=4_000_000)
    core = build_engine(config, load_model("demo"))
    started: list[Ranks] = []
    outputs: list[RequestOutput] = []

    def start(*args: Any) -> Ranks:
        started.append(Ranks(*args))
        return started[-1]

    monkeypatch.setattr(cluster_engine, "Processes", start)
    callbacks = Callbacks(
        lambda progress: None,
        lambda info, stats: None,
        lambda found, stats: outputs.extend(found),
        lambda failure: None,
    )
    slot = ModelSlot(config, lambda report: core, callbacks)
    hosts = Hosts("ring", (Host(LOCAL, (LOCAL,)),), "[]")
    engine = ClusterEngine(hosts, StallLimits(), restarts=True, log_level="info")
    engine.start()
    engine.load(slot)

    def become_ready(number: int) -> Ranks:
        wait_until(lambda: len(started) == number)
        started[-1].join()
        started[-1].say(Ready(core.info(config), core.stats(), None))
        return started[-1]

    ranks = become_ready(1)
    ago, params = time.monotonic() - 100, SamplingParams()
    limits: dict[str, dict[str, float]] = {
        "late": {"timeout": 50},
        "no token": {"ttft_timeout": 50},
        "begun": {"ttft_timeout": 50},
        "in time": {"timeout": 1000},
        "none": {},
    }
    engine.submit(slot, [Request(name, [1, 2], params, ago, **each) for name, each in limits.items()])
    wait_until(lambda: len(ranks.submitted) == len(limits))
    ranks.say(Stepped([RequestOutput("begun", ago, token_ids=(3,))], core.stats()))
    wait_until(lambda: len(outputs) == 1)
    ranks.die()
    wait_until(lambda: len(outputs) == 3)
    assert {each.request_id: each.finish_reason for each in outputs[1:]} == dict.fromkeys(
        ("late", "no token"), FinishReason.TIMEOUT
    )
    assert [str(each.error).partition(" passed")[0] for each in outputs[1:]] == [
        "timeout of 50 s",
        "ttft_timeout of 50 s",
    ]
    ranks = become_ready(2)
    wait_until(lambda: ranks.submitted)
    assert sorted(ranks.submitted) == ["begun", "in time", "none"]
    assert engine.stop(60)
