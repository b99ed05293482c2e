"""Requests while ranks start again: deadlines, cancelled ones, and one that kills. The ranks here are no processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from mlxpaged.cluster import cluster_engine
from mlxpaged.cluster.cluster_engine import ClusterEngine
from mlxpaged.cluster.hosts import LOCAL, Host, Hosts
from mlxpaged.cluster.messages import Hello, Ready, Run, Stepped, Submit, versions
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.engine import commands
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine.engine_thread import Callbacks, ModelSlot
from mlxpaged.engine.info import EngineInfo
from mlxpaged.engine.watchdog import StallLimits
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import load_model
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
        self._on_joined(self, Hello(0, os.getpid(), versions(), (LOCAL, 1), ()))

    def say(self, message: object) -> None:
        self._on_message(self, 0, message)

    def die(self) -> None:
        self._on_lost(self, 0)

    @property
    def submitted(self) -> list[str]:
        return [each.request_id for message in self.sent if isinstance(message, Submit) for each in message.requests]


class Scene:
    """An engine with such a rank, its outputs, and all ranks that it has started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = EngineConfig(kv_cache_bytes=4_000_000)
        self.core = build_engine(config, load_model("demo"))
        self.started: list[Ranks] = []
        self.outputs: list[RequestOutput] = []
        monkeypatch.setattr(cluster_engine, "Processes", self.start)
        callbacks = Callbacks(
            lambda progress: None,
            lambda info, stats: None,
            lambda found, stats: self.outputs.extend(found),
            lambda failure: None,
        )
        self.slot = ModelSlot(config, lambda report: self.core, callbacks)
        hosts = Hosts("ring", (Host(LOCAL, (LOCAL,)),), "[]")
        self.engine = ClusterEngine(hosts, StallLimits(), restarts=True, log_level="info")
        self.engine.start()
        self.engine.load(self.slot)

    def start(self, *args: Any) -> Ranks:
        self.started.append(Ranks(*args))
        return self.started[-1]

    def become_ready(self, number: int) -> Ranks:
        wait_until(lambda: len(self.started) == number)
        self.started[-1].join()
        self.started[-1].say(Ready(EngineInfo(self.core, self.slot.config), self.core.stats(), None))
        return self.started[-1]

    def submit(self, *names: str, **limits: dict[str, float]) -> None:
        requests = [Request(name, [1, 2], SamplingParams(), AGO, **limits.get(name, {})) for name in names]
        self.engine.submit(self.slot, requests)

    def give(self, name: str) -> None:
        """The rank gives a token of a request."""
        self.started[-1].say(Stepped([RequestOutput(name, AGO, token_ids=(3,))], self.core.stats()))


AGO = time.monotonic() - 100


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(monkeypatch)
    yield scene
    assert scene.engine.stop(60)


def test_a_request_whose_deadline_passes_while_the_ranks_start_again_ends(scene: Scene) -> None:
    ranks = scene.become_ready(1)
    limits: dict[str, dict[str, float]] = {
        "late": {"timeout": 50},
        "no_token": {"ttft_timeout": 50},
        "begun": {"ttft_timeout": 50},
        "in_time": {"timeout": 1e6},
        "none": {},
    }
    scene.submit(*limits, **limits)
    wait_until(lambda: len(ranks.submitted) == len(limits))
    scene.give("begun")
    wait_until(lambda: len(scene.outputs) == 1)
    ranks.die()
    wait_until(lambda: len(scene.outputs) == 3)
    ended = scene.outputs[1:]
    assert {each.request_id: each.finish_reason for each in ended} == dict.fromkeys(
        ("late", "no_token"), FinishReason.TIMEOUT
    )
    reasons = ["timeout of 50 s", "ttft_timeout of 50 s"]
    assert [str(each.error).partition(" passed")[0] for each in ended] == reasons
    ranks = scene.become_ready(2)
    names = ["begun", "in_time", "none"]
    for i, name in enumerate(names):  # one of them may be what the ranks have died of
        wait_until(lambda: len(ranks.submitted) > i)  # noqa: B023
        assert ranks.submitted == names[: i + 1]
        scene.give(name)


def test_a_request_whose_deadline_passes_before_the_new_ranks_get_it_ends(scene: Scene) -> None:
    ranks = scene.become_ready(1)
    scene.submit("first")
    wait_until(lambda: ranks.submitted)
    ranks.die()
    ranks = scene.become_ready(2)
    wait_until(lambda: ranks.submitted)
    scene.submit("late", late={"timeout": 50})
    wait_until(lambda: scene.outputs)
    assert [(each.request_id, each.finish_reason) for each in scene.outputs] == [("late", FinishReason.TIMEOUT)]
    assert ranks.submitted == ["first"]


def test_requests_that_are_cancelled_are_given_to_the_ranks_before(scene: Scene) -> None:
    ranks = scene.become_ready(1)
    scene.submit("first", "second")
    wait_until(lambda: len(ranks.submitted) == 2)
    ranks.die()
    ranks = scene.become_ready(2)
    wait_until(lambda: ranks.submitted == ["first"])
    scene.engine.send(scene.slot, partial(commands.abort, request_id="second"))
    wait_until(lambda: any(isinstance(each, Run) for each in ranks.sent))
    told = [type(each) for each in ranks.sent if isinstance(each, Submit | Run)]
    assert told == [Submit, Submit, Run]
    assert ranks.submitted == ["first", "second"]


def test_a_request_of_which_the_ranks_die_fails_and_the_others_go_on(scene: Scene) -> None:
    ranks = scene.become_ready(1)
    scene.submit("deadly", "other")
    wait_until(lambda: len(ranks.submitted) == 2)
    ranks.die()
    ranks = scene.become_ready(2)
    wait_until(lambda: ranks.submitted == ["deadly"])
    ranks.die()
    wait_until(lambda: scene.outputs)
    (output,) = scene.outputs
    assert (output.request_id, output.finish_reason) == ("deadly", FinishReason.ERROR)
    assert output.error == "the ranks died of this request again and again, so it is not run any more"
    ranks = scene.become_ready(3)
    wait_until(lambda: ranks.submitted == ["other"])
