"""Who is next: scripted by a clock of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpaged.api.server import GRAMMARS
from mlxpaged.api.tokenizer_lanes import TEXTS
from mlxpaged.api.turns import FORGOTTEN, HALF_LIFE, MAX_USE, OVERTAKEN, Rules, Turn, TurnRefusedError, Turns
from tests.api.helpers import DEADLINE, FakeClock

FREE, PLACES = GRAMMARS.free_seconds, GRAMMARS.places


class Scene:
    """Clients that wait for turns, and the order in which they got them."""

    def __init__(self, rules: Rules = GRAMMARS) -> None:
        self.now = 0.0
        self.turns = Turns(rules, lambda: self.now)
        self.order: list[str] = []
        self.running: dict[str, Turn] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, *names: str, size: int = 0) -> None:
        """The client of "a1" is "a"."""
        for name in names:
            self._tasks.append(asyncio.ensure_future(self._enter(name, size)))
            await settle()

    async def _enter(self, name: str, size: int) -> None:
        self.running[name] = await self.turns.enter(name[0], size)
        self.order.append(name)

    async def end(self, name: str, seconds: float = 0.0) -> None:
        """It has taken so long."""
        self.now += seconds
        self.turns.leave(self.running.pop(name))
        await settle()

    async def use(self, client: str, seconds: float) -> None:
        await self.ask(f"{client}-")
        await self.end(f"{client}-", seconds)
        self.order.remove(f"{client}-")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def play(script: Callable[[Scene], Coroutine[Any, Any, None]], rules: Rules = GRAMMARS) -> None:
    async def run() -> None:
        scene = Scene(rules)
        try:
            await asyncio.wait_for(script(scene), DEADLINE)
        finally:
            await scene.close()

    asyncio.run(run())


def test_two_last_at_a_time_and_a_client_that_has_used_less_is_next() -> None:
    async def script(scene: Scene) -> None:
        await scene.use("a", 0.6)
        await scene.use("b", 0.1)
        await scene.ask("c1", "d1", "a1", "a2", "b1", "e1")
        assert scene.order == ["c1", "d1"]
        await scene.end("c1")
        await scene.end("d1")
        await scene.end("e1")
        await scene.end("b1")
        assert scene.order == ["c1", "d1", "e1", "b1", "a1", "a2"]

    play(script)


def test_of_a_client_the_small_are_next_and_a_large_one_ages() -> None:
    """By a tenth of a second each second: 100,000 characters take that long."""

    async def script(scene: Scene) -> None:
        await scene.ask("a0")
        await scene.ask("a1", size=200_000)
        await scene.ask("a2", size=100_000)
        scene.now += 1.01
        await scene.ask("a3", size=100_000)
        await scene.ask("a4", size=1)
        for name in ("a0", "a2", "a4", "a1"):
            await scene.end(name)
        assert scene.order == ["a0", "a2", "a4", "a1", "a3"]

    play(script, TEXTS)


def test_a_flood_of_one_client_leaves_a_place_to_the_others() -> None:
    async def script(scene: Scene) -> None:
        await scene.use("a", 5 * FREE)
        await scene.use("b", 5 * FREE)
        scene.now += 10.0  # they have rested, and have not been forgotten
        await scene.ask("a1", "a2", "a3", "b1", "b2")
        assert len(scene.order) == 1  # heavy clients have one turn at a time, all together
        await scene.ask("c1")
        assert scene.order[-1] == "c1"
        await scene.end("c1", 0.1)
        assert len(scene.order) == 2  # the place stays free

    play(script)


def test_a_heavy_client_rests_as_long_as_its_turn_has_lasted() -> None:
    async def script(scene: Scene) -> None:
        await scene.use("a", FREE + 1.0)
        await scene.ask("a1")
        assert scene.order == []
        scene.now += 1.9
        await scene.ask("a2")
        assert scene.order == []
        scene.now += 0.2
        await scene.ask("a3")
        assert scene.order == ["a1"]

    play(script)


def test_a_rest_ends_by_itself() -> None:
    async def script(_: Scene) -> None:
        turns = Turns(replace(GRAMMARS, free_seconds=0.0))
        turn = await turns.enter("a")
        await asyncio.sleep(0.02)
        turns.leave(turn)
        turns.leave(await turns.enter("a"))

    play(script)


def test_clients_that_become_heavy_one_after_the_other_prolong_no_rest_for_ever() -> None:
    async def script(scene: Scene) -> None:
        await scene.use("a", 1000 * FREE)
        begun = scene.now
        await scene.ask("a1")
        for client in map(chr, range(ord("b"), ord("z"))):
            await scene.ask(f"{client}1")
            if "a1" in scene.order:
                break
            await scene.end(f"{client}1", 4.0)
        assert OVERTAKEN <= scene.now - begun <= OVERTAKEN + 8.0

    play(script)


def test_what_a_client_has_used_is_forgotten() -> None:
    async def script(scene: Scene) -> None:
        await scene.use("a", 3 * FREE)
        scene.now += 2 * HALF_LIFE
        await scene.ask("a1", "a2")
        assert scene.order == ["a1", "a2"]

    play(script)


def test_clients_are_forgotten_and_their_number_is_bounded() -> None:
    """A client may give itself another name for each request."""

    async def script(scene: Scene) -> None:
        for number in range(10_000):
            turn = scene.turns.ask(f"client {number}")
            scene.now += 1.1 * FORGOTTEN
            scene.turns.leave(turn)
        assert len(scene.turns.used) <= 2 * 1.1 * HALF_LIFE / FORGOTTEN
        scene.now += 100.0
        for number in range(20_000):
            scene.turns.leave(scene.turns.ask(f"other {number}"))
        assert len(scene.turns.used) <= 64

    play(script)


def test_a_client_that_floods_is_refused_and_another_is_not() -> None:
    async def script(scene: Scene) -> None:
        await scene.ask(*(f"a{i}" for i in range(2 + PLACES)))
        with pytest.raises(TurnRefusedError, match="16 grammars of this client wait"):
            await scene.turns.enter("a")
        await scene.ask("b1")
        await scene.end("a0", 0.1)
        assert scene.order[-1] == "b1"

    play(script)


def test_a_turn_that_does_not_come_in_time_is_given_up() -> None:
    async def script(scene: Scene) -> None:
        await scene.ask("a1", "b1")
        with pytest.raises(TurnRefusedError, match="took longer than 0 s"):
            await scene.turns.enter("c", timeout=0.01)
        await scene.ask("d1")
        await scene.end("a1")
        assert scene.order[-1] == "d1"

    play(script)


@pytest.mark.parametrize("is_running", [False, True])
def test_a_request_that_leaves_gives_its_turn_to_the_next(is_running: bool) -> None:
    async def script(scene: Scene) -> None:
        await scene.ask("a1", "b1")
        leaving = asyncio.ensure_future(scene.turns.enter("c"))
        await settle()
        await scene.ask("d1")
        if is_running:
            scene.turns.leave(scene.running["a1"])  # its turn begins, and it leaves before it notices
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        if not is_running:
            await scene.end("a1")
        await settle()
        assert scene.order[-1] == "d1"

    play(script)


def test_a_turn_lasts_as_long_as_its_thread_though_its_caller_has_left() -> None:
    async def script(scene: Scene) -> None:
        go_on, begun = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            assert go_on.wait(DEADLINE)

        with ThreadPoolExecutor(2) as threads:
            left = asyncio.ensure_future(scene.turns.run("a", 0, threads, work))
            assert await asyncio.to_thread(begun.wait, DEADLINE)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            await scene.ask("b1")
            assert scene.order == []
            go_on.set()
            while not scene.order:
                await asyncio.sleep(0.001)
            await scene.end("b1")
            assert await scene.turns.run("c", 0, threads, lambda: "c") == "c"

    play(script, replace(TEXTS, at_once=1))


def test_without_a_thread_there_is_no_turn() -> None:
    async def script(scene: Scene) -> None:
        threads = ThreadPoolExecutor(1)
        threads.shutdown()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="after shutdown"):
                await scene.turns.run("a", 0, threads, lambda: None)

    play(script, TEXTS)


@st.composite
def rules_of(draw: st.DrawFn) -> Rules:
    at_once = draw(st.integers(1, 3))
    heavy = st.sampled_from([{}, {"free_seconds": 0.0, "rests": True}, {"free_seconds": 1.0, "rests": True}])
    more: dict[str, Any] = {**draw(heavy), "heavy_at_once": draw(st.integers(1, at_once))}
    return Rules("things", at_once, draw(st.integers(1, 4)), draw(st.sampled_from([0.0, 0.01, 0.5])), **more)


CLIENTS = [*"abcdefgh"]
STEPS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(CLIENTS), st.integers(0, 10)),
    st.tuples(st.just("pass"), st.floats(0, 30), st.none()),
    st.tuples(st.just("end"), st.integers(0, 10), st.none()),
    st.tuples(st.just("give up"), st.integers(0, 100), st.none()),
)


class Model:
    """Does steps at random, and checks after each what is promised."""

    def __init__(self, rules: Rules) -> None:
        self.now = 0.0
        self.rules = rules
        self.turns = Turns(rules, lambda: self.now)
        self.asked: list[Turn] = []  # that wait, or last

    def step(self, step: tuple[str, Any, Any]) -> None:
        kind, what, size = step
        waiting, running = self.waiting(), self.running()
        if kind == "ask":
            count = sum(turn.client == what for turn in waiting)
            try:
                self.asked.append(self.turns.ask(what, size))
                assert count < self.rules.places
            except TurnRefusedError:
                assert count == self.rules.places
        elif kind == "pass":
            self.now += what
            self.turns.begin()  # a rest may be over
        else:
            some = running if kind == "end" else waiting
            if some:
                turn = some[what % len(some)]
                self.asked.remove(turn)
                self.turns.leave(turn)
        self.check([turn for turn in self.running() if turn not in running])

    def waiting(self) -> list[Turn]:
        return [turn for turn in self.asked if not turn.has_begun]

    def running(self) -> list[Turn]:
        return [turn for turn in self.asked if turn.has_begun]

    def is_held(self, turn: Turn) -> bool:
        """Whether a turn may be overtaken because its client is heavy."""
        return self.turns.is_heavy(turn.client, self.now)

    def check(self, begun: list[Turn]) -> None:
        waiting, running = self.waiting(), self.running()
        assert len(running) <= self.rules.at_once
        assert sum(turn.is_heavy for turn in running) <= self.rules.heavy_at_once
        assert all(count <= self.rules.places for count in Counter(turn.client for turn in waiting).values())
        if len(running) < self.rules.at_once:  # no place is free that any of them may take
            assert all(self.is_held(turn) for turn in waiting)
        for turn in begun:
            for other in waiting:
                assert turn.asked <= other.asked + OVERTAKEN or (self.is_held(other) and not turn.is_heavy)
                if turn.client == other.client:
                    assert turn.order < other.order


@settings(deadline=None)
@given(rules_of(), st.lists(STEPS, max_size=60))
def test_places_are_kept_and_a_turn_is_overtaken_for_a_limited_time(
    rules: Rules, steps: list[tuple[str, Any, Any]]
) -> None:
    async def run() -> None:
        model = Model(rules)
        for step in steps:
            model.step(step)
        for _ in range(len(model.asked)):  # all of them come, if all end
            model.step(("end", 0, None))
            model.step(("pass", 6.0, None))
        assert not model.waiting()
        assert not model.turns.waiting

    asyncio.run(run())


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(CLIENTS), st.integers(0, 4), min_size=2), st.randoms())
def test_clients_that_ask_together_come_in_the_order_of_their_use(used: dict[str, int], random: Any) -> None:
    now = 0.0
    turns = Turns(TEXTS, lambda: now)
    for client, seconds in used.items():
        turn = turns.ask(client)
        now += seconds
        turns.leave(turn)
    first = turns.ask("first")
    clients = random.sample(list(used), len(used))
    asked = [turns.ask(client) for client in clients]
    lately = {client: turns.use(client, now) for client in used}
    order = []
    turns.leave(first)
    for _ in clients:
        [turn] = [turn for turn in asked if turn.has_begun]
        order.append(turn.client)
        asked.remove(turn)
        turns.leave(turn)
    assert [lately[client] for client in order] == pytest.approx(sorted(lately.values()))


def test_new_clients_one_after_the_other_do_not_hold_up_one_that_has_used_much() -> None:
    """Each has used nothing. The one with the most use and the largest text is next after OVERTAKEN seconds."""

    async def script(scene: Scene) -> None:
        await scene.use("a", 10 * MAX_USE)
        await scene.ask("first")
        await scene.ask("a1", size=10**9)
        name = "first"
        for number in range(1000):
            await scene.ask(f"{chr(1000 + number)}1")
            await scene.end(name, 1.0)
            name = scene.order[-1]
            if name == "a1":
                break
        assert scene.now - 10 * MAX_USE <= OVERTAKEN + 1.0

    play(script, TEXTS)


def test_a_client_waits_for_no_flood_of_a_client_that_has_used_more() -> None:
    """For one turn of the flood at most: the one that lasts."""

    async def script(scene: Scene) -> None:
        await scene.ask(*(f"a{i}" for i in range(100)), size=30_000)
        for number in range(10):
            await scene.end(f"a{number}", 0.03)
        await scene.ask("b", size=60_000)
        await scene.end(scene.order[-1], 0.03)
        assert scene.order[-1] == "b"

    play(script, TEXTS)


def test_a_turn_without_room_is_overtaken_and_holds_others_back_at_times() -> None:
    clock = FakeClock()
    turns = Turns(replace(TEXTS, at_once=9), clock, lambda size: turns.size + size <= 4)
    small, large = turns.ask("a", 1), turns.ask("b", 4)
    for begins in (True, False, True, False):
        other = turns.ask("c", 1)
        assert (other.has_begun, large.has_begun) == (begins, False)
        turns.leave(other)
        clock.advance(OVERTAKEN)
    clock.advance(OVERTAKEN)
    waits = turns.ask("c", 1)
    turns.leave(small)
    assert (large.has_begun, waits.has_begun) == (True, False)
    turns.leave(large)
    assert waits.has_begun


def test_a_turn_begins_when_there_is_room_again() -> None:
    room = 0
    turns = Turns(TEXTS, has_room=lambda size: size <= room)
    turn = turns.ask("a", 1)
    assert not turn.has_begun
    room = 1
    turns.begin()
    assert turn.has_begun
