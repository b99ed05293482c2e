"""Models that do not fit together: the real registry, with engines that take as long as a virtual clock says."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast
from unittest import mock

import pytest

from mlxpaged.core.engine.errors import EngineState
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.engine.engine_thread import EngineHost
from mlxpaged.engine_config import EngineConfig
from mlxpaged.registry import registry as registry_module
from mlxpaged.registry.errors import NoRoomError
from mlxpaged.registry.model import Model
from mlxpaged.registry.occupants import Limits
from mlxpaged.registry.registry import Registry
from mlxpaged.registry.swaps import PATIENCE, STAY
from tests import virtual_time

LOAD_SECONDS, SWAP_WAIT, MOST_SECONDS = 4.0, 30.0, 6.0


class Asked(NamedTuple):
    """A request: when it comes, for what, and for how long it runs."""

    at: float
    model: str
    seconds: float = 1.0
    priority: Priority = Priority.NORMAL


class FakeEngine:
    """Takes LOAD_SECONDS to load, and runs all its requests at once. started: the models of all engines, in order."""

    started: ClassVar[list[str]] = []

    def __init__(self, config: EngineConfig, clock: Callable[[], float], host: object) -> None:
        self._clock = clock
        self.state, self.num_unfinished, self.idle_since = EngineState.LOADING, 0, clock()
        self.info = self.stats = self.progress = self.failure = None
        self.on_idle: Callable[[], None] = lambda: None
        self.started.append(config.model)

    def start(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """The load begins when it is waited for."""

    @property
    def is_idle(self) -> bool:
        return self.num_unfinished == 0

    async def wait_loaded(self) -> None:
        await asyncio.sleep(LOAD_SECONDS)
        self.state, self.idle_since = EngineState.READY, self._clock()

    def require_ready(self) -> None:
        assert self.state is EngineState.READY

    def touch(self) -> None:
        self.idle_since = self._clock()

    async def unload(self) -> None:
        assert self.is_idle, "a model is never unloaded under its requests"
        self.state = EngineState.DRAINING

    async def give_back(self) -> bool:
        return False

    async def run(self, seconds: float) -> None:
        assert self.state is EngineState.READY
        self.num_unfinished += 1
        await asyncio.sleep(seconds)
        self.num_unfinished -= 1
        self.idle_since = self._clock()
        if self.is_idle:
            self.on_idle()


@dataclass
class Outcome:
    """waits: seconds from each request's arrival to its start, in the order of the trace. loads: models, in order."""

    waits: list[float] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def serve(trace: Sequence[Asked], pinned: Sequence[str] = (), watched: int = -1) -> Outcome:
    """What becomes of the requests with room for one model. watched: the request whose comments are noted."""
    names = sorted({asked.model for asked in trace})
    outcome = Outcome([math.nan] * len(trace))

    async def work(loop: asyncio.AbstractEventLoop) -> Outcome:
        models = {name: Model(name, EngineConfig(name), pinned=name in pinned) for name in names}
        limits, host = Limits(1, swap_wait=SWAP_WAIT), cast(EngineHost, object())
        registry = Registry(models, EngineConfig(), 0, limits=limits, clock=loop.time, engine_host=host)
        registry.start(loop)

        async def ask(number: int, asked: Asked) -> None:
            await asyncio.sleep(asked.at)
            model = models[asked.model]
            if number == watched and registry.loader.must_load(model):
                loop.call_later(0.01, lambda: outcome.told.append(registry.loader.waiting_for(model)))
            engine: Any = await registry.loader.ready(model, asked.priority)
            outcome.waits[number] = loop.time() - asked.at
            await engine.run(asked.seconds)

        await asyncio.gather(*(ask(number, asked) for number, asked in enumerate(trace)))
        return outcome

    with mock.patch.object(registry_module, "AsyncEngine", FakeEngine), mock.patch.object(FakeEngine, "started", []):
        virtual_time.run(work)
        outcome.loads = FakeEngine.started
    return outcome


def test_requests_wait_for_their_model_and_none_is_refused() -> None:
    trace = [Asked(float(i), name, 2.5) for i, name in enumerate("abaacabc")]
    found = serve(trace)
    assert sorted(found.loads) == ["a", "b", "c"], "requests for one model are answered together"
    assert not any(math.isnan(wait) for wait in found.waits)


def random_trace(rng: random.Random, num_models: int) -> list[Asked]:
    """Clients that each ask one model again and again, with pauses: agents at work."""
    trace = []
    for client in range(rng.randint(num_models, 2 * num_models)):
        model, pause = "abc"[client % num_models], rng.choice([0.2, 1.0, 3.0])
        at = rng.uniform(0, 20)
        while at < 240:
            seconds = rng.uniform(0.5, MOST_SECONDS)
            priority = rng.choice([Priority.NORMAL] * 4 + [Priority.HIGH, Priority.LOW])
            trace.append(Asked(at, model, seconds, priority))
            at += seconds + rng.expovariate(1 / pause)
    return sorted(trace)


def fewest_loads(trace: Sequence[Asked], waits: dict[Priority, float]) -> int:
    """Loads that are needed if none may wait for longer, loads and requests take no time, and a model may keep its room
    as long as it likes: each is loaded as late as possible, and answers all that wait for it."""
    loads, current, due = 0, "", dict[str, float]()
    for at, asked in [*((asked.at, asked) for asked in trace), (math.inf, None)]:
        while due and min(due.values()) < at:
            current = min(due, key=lambda name: due[name])
            loads += 1
            del due[current]
        if asked is not None and asked.model != current:
            due[asked.model] = min(due.get(asked.model, math.inf), at + waits[asked.priority])
    return loads


@pytest.mark.parametrize("num_models", [2, 3])
@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_loads_are_few_and_no_request_waits_for_ever(num_models: int, count: int) -> None:
    loads = fewest = 0
    longest = 0.0
    for seed in range(count):
        trace = random_trace(random.Random(seed), num_models)
        found = serve(trace)
        assert not any(math.isnan(wait) for wait in found.waits), "each is answered"
        loads += len(found.loads)
        fewest += fewest_loads(trace, {each: PATIENCE[each] * SWAP_WAIT for each in Priority})
        longest = max(longest, *found.waits)
    print(f"{num_models} models: {loads} loads, at least {fewest}; longest wait {longest:.1f} s")
    assert loads <= 1.3 * fewest
    turn = STAY * LOAD_SECONDS + MOST_SECONDS + LOAD_SECONDS
    assert longest <= SWAP_WAIT + num_models * turn, "a turn each of the others, and the own load"


def test_a_request_of_a_higher_priority_keeps_new_requests_out_sooner() -> None:
    def wait(priority: Priority) -> float:
        busy = [Asked(0.5 * number, "a", 3.0) for number in range(400)]
        return serve(sorted([*busy, Asked(10.0, "b", 1.0, priority)])).waits[21]

    high, normal, low = map(wait, Priority)
    assert PATIENCE[Priority.HIGH] * SWAP_WAIT < high < normal < low < PATIENCE[Priority.LOW] * SWAP_WAIT + 20


def test_a_model_stays_for_some_times_what_its_load_took() -> None:
    """Two clients that never pause: without a stay, the models would change places all the time."""
    trace = sorted(Asked(0.5 * number + 0.1 * (name == "b"), name, 2.0) for number in range(600) for name in "ab")
    found = serve(trace)
    assert len(found.loads) <= 320 / min(SWAP_WAIT, STAY * LOAD_SECONDS) + 2


def test_a_client_that_goes_on_soon_keeps_its_model_and_one_that_does_not_gives_it_up() -> None:
    quick = [Asked(5.0 + 1.5 * number, "a", 1.0) for number in range(12)]
    other = Asked(10.2, "b", 1.0)
    found = serve(sorted([*quick, other]))
    assert found.loads == ["a", "b"], "the pauses of half a second are its usual ones"
    assert found.waits[sorted([*quick, other]).index(other)] >= 10
    slow = [Asked(20.0 * number, "a", 1.0) for number in range(4)]
    found = serve(sorted([*slow, Asked(65.2, "b", 1.0)]))
    assert found.waits[-1] <= LOAD_SECONDS + 3.0, "it makes room at once"


def test_a_pinned_model_makes_no_room() -> None:
    with pytest.raises(NoRoomError, match="--max-loaded-models is 1"):
        serve([Asked(0.0, "a", 9.0), Asked(5.0, "b", 1.0)], pinned=["a"])


def test_a_request_is_told_for_what_it_waits() -> None:
    trace = [Asked(0.0, "a", 9.0), Asked(1.0, "a", 9.0), Asked(6.0, "c", 1.0), Asked(7.0, "b", 1.0)]
    assert serve(trace, watched=3).told == ["waiting for b, 3 ahead"], "two that run, and the one for c"
    assert serve(trace, watched=0).told == ["loading"]
