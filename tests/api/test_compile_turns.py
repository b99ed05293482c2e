"""Who compiles next: scripted by a clock of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mlxpaged.api import compile_turns
from mlxpaged.api.compile_turns import FREE_SECONDS, HALF_LIFE, MAX_WAITING, CompilerBusyError, CompileTurns, Turn
from tests.api.helpers import DEADLINE


class Scene:
    """Clients that wait for turns, and the order in which they got them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = CompileTurns(lambda: self.now)
        self.order: list[str] = []
        self.running: dict[str, Turn] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, *names: str) -> None:
        """The client of "a1" is "a"."""
        for name in names:
            self._tasks.append(asyncio.ensure_future(self._enter(name)))
            await settle()

    async def _enter(self, name: str) -> None:
        self.running[name] = await self.turns.enter(name[0], DEADLINE)
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


def play(script: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        scene = Scene()
        try:
            await asyncio.wait_for(script(scene), DEADLINE)
        finally:
            await scene.close()

    asyncio.run(run())


def test_two_compile_at_a_time_and_a_client_that_has_used_less_is_next() -> None:
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


def test_a_flood_of_one_client_leaves_a_place_to_the_others() -> None:
    async def script(scene: Scene) -> None:
        await scene.use("a", 5 * FREE_SECONDS)
        await scene.use("b", 5 * FREE_SECONDS)
        scene.now += 10.0  # they have rested, and have not been forgotten
        await scene.ask("a1", "a2", "a3", "b1", "b2")
        assert len(scene.order) == 1  # heavy clients compile one at a time, all together
        await scene.ask("c1")
        assert scene.order[-1] == "c1"
        await scene.end("c1", 0.1)
        assert len(scene.order) == 2  # the place stays free

    play(script)


def test_a_heavy_client_rests_as_long_as_it_has_compiled() -> None:
    async def script(scene: Scene) -> None:
        await scene.use("a", FREE_SECONDS + 1.0)
        await scene.ask("a1")
        assert scene.order == []
        scene.now += 1.9
        await scene.ask("a2")
        assert scene.order == []
        scene.now += 0.2
        await scene.ask("a3")
        assert scene.order == ["a1"]

    play(script)


def test_a_rest_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(_: Scene) -> None:
        turns = CompileTurns()
        turn = await turns.enter("a", DEADLINE)
        await asyncio.sleep(0.02)
        turns.leave(turn)
        turns.leave(await turns.enter("a", DEADLINE))

    monkeypatch.setattr(compile_turns, "FREE_SECONDS", -1.0)
    play(script)


def test_what_a_client_has_used_is_forgotten() -> None:
    async def script(scene: Scene) -> None:
        await scene.use("a", 3 * FREE_SECONDS)
        scene.now += 2 * HALF_LIFE
        await scene.ask("a1", "a2")
        assert scene.order == ["a1", "a2"]

    play(script)


def test_a_client_that_floods_is_refused_and_another_is_not() -> None:
    async def script(scene: Scene) -> None:
        await scene.ask(*(f"a{i}" for i in range(2 + MAX_WAITING)))
        with pytest.raises(CompilerBusyError, match="16 grammars of this client wait"):
            await scene.turns.enter("a", DEADLINE)
        await scene.ask("b1")
        await scene.end("a0", 0.1)
        assert scene.order[-1] == "b1"

    play(script)


def test_a_turn_that_does_not_come_in_time_is_given_up() -> None:
    async def script(scene: Scene) -> None:
        await scene.ask("a1", "b1")
        with pytest.raises(CompilerBusyError, match="busy for 0 s"):
            await scene.turns.enter("c", 0.01)
        await scene.ask("d1")
        await scene.end("a1")
        assert scene.order[-1] == "d1"

    play(script)


@pytest.mark.parametrize("is_running", [False, True])
def test_a_request_that_leaves_gives_its_turn_to_the_next(is_running: bool) -> None:
    async def script(scene: Scene) -> None:
        await scene.ask("a1", "b1")
        leaving = asyncio.ensure_future(scene.turns.enter("c", DEADLINE))
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
