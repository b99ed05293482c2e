"""Who waits for whom before a tokenizer: scripted by events, without time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from mlxpaged.api.tokenizer_lanes import LONG_TEXT, TokenizerLanes
from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.models.text.tokenizer import Tokenizer
from tests.api.helpers import DEADLINE

Scenario = Callable[[TokenizerLanes], Coroutine[Any, Any, None]]


class Model:
    """As much of a tokenizer as the lanes look at."""

    def __init__(self, is_thread_safe: bool = True) -> None:
        self.is_thread_safe = is_thread_safe


class Job:
    """A function that runs until it is told to end."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._name, self._order = name, order

    def __call__(self) -> str:
        self._order.append(self._name)
        self.begun.set()
        assert self.go_on.wait(DEADLINE)
        return self._name


def play(scenario: Scenario) -> None:
    async def run() -> None:
        lanes = TokenizerLanes(lambda: 0.0)
        try:
            await asyncio.wait_for(scenario(lanes), DEADLINE)
        finally:
            lanes.close()

    asyncio.run(run())


async def begun(job: Job) -> None:
    assert await asyncio.to_thread(job.begun.wait, DEADLINE)


async def round_of_the_loop() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_short_text_waits_neither_for_a_long_one_nor_for_another_model() -> None:
    order: list[str] = []
    jobs = {name: Job(name, order) for name in ("long", "short", "other")}
    models: list[Any] = [Model(), Model()]

    async def scenario(lanes: TokenizerLanes) -> None:
        tasks = [
            asyncio.ensure_future(lanes.run("a", models[0], LONG_TEXT, jobs["long"])),
            asyncio.ensure_future(lanes.run("a", models[0], 10, jobs["short"])),
            asyncio.ensure_future(lanes.run("a", models[1], 10, jobs["other"])),
        ]
        for job in jobs.values():  # all run at the same time
            await begun(job)
        for job in jobs.values():
            job.go_on.set()
        assert await asyncio.gather(*tasks) == list(jobs)

    play(scenario)


def test_texts_without_end_of_many_models_hold_no_other_one_up() -> None:
    """As a model that is loaded again and again, whose regular expression takes hours each time."""
    models: list[Any] = [Model() for _ in range(20)]
    jobs = [Job(str(i), []) for i in range(40)]

    async def scenario(lanes: TokenizerLanes) -> None:
        tasks = [
            asyncio.ensure_future(lanes.run("a", models[i // 2], (1, LONG_TEXT)[i % 2], job))
            for i, job in enumerate(jobs)
        ]
        for job in jobs:
            await begun(job)
        other: Any = Model()
        assert await lanes.run("a", other, 1, lambda: "other") == "other"
        for job in jobs:
            job.go_on.set()
        await asyncio.gather(*tasks)

    play(scenario)


def test_the_threads_of_a_tokenizer_end_with_it() -> None:
    async def scenario(lanes: TokenizerLanes) -> None:
        model: Any = Model()
        [thread] = await asyncio.gather(lanes.run("a", model, 1, threading.current_thread))
        assert thread.is_alive()
        del model
        await asyncio.to_thread(thread.join, DEADLINE)
        assert not thread.is_alive()

    play(scenario)


@pytest.mark.parametrize("is_thread_safe", [True, False])
def test_the_shortest_of_those_that_wait_is_next(is_thread_safe: bool) -> None:
    """A tokenizer that only one thread may use has one lane."""
    order: list[str] = []
    model: Any = Model(is_thread_safe)
    sizes = {"first": LONG_TEXT, "longest": 9 * LONG_TEXT, "middle": 3 * LONG_TEXT, "long": 2 * LONG_TEXT}
    sizes |= {} if is_thread_safe else {"short": 1}

    async def scenario(lanes: TokenizerLanes) -> None:
        jobs = {name: Job(name, order) for name in sizes}
        tasks = [asyncio.ensure_future(lanes.run("a", model, size, jobs[name])) for name, size in sizes.items()]
        await begun(jobs["first"])
        await round_of_the_loop()
        for job in jobs.values():
            job.go_on.set()
        await asyncio.gather(*tasks)

    play(scenario)
    assert order == ["first", *sorted(list(sizes)[1:], key=sizes.__getitem__)]


def test_a_caller_that_leaves_does_not_let_the_next_one_in() -> None:
    """Its function cannot be interrupted. A caller that leaves while it waits leaves no gap."""
    order: list[str] = []
    model: Any = Model()

    async def scenario(lanes: TokenizerLanes) -> None:
        jobs = {name: Job(name, order) for name in ("left", "never", "last")}
        left, never, last = (asyncio.ensure_future(lanes.run("a", model, 1, job)) for job in jobs.values())
        await begun(jobs["left"])
        for task in (left, never):
            task.cancel()
        await asyncio.gather(left, never, return_exceptions=True)
        await round_of_the_loop()
        assert not jobs["last"].begun.is_set()
        for job in jobs.values():
            job.go_on.set()
        assert await last == "last"

    play(scenario)
    assert order == ["left", "last"]


def test_a_tokenizer_gives_the_same_tokens_on_several_threads() -> None:
    """Texts and conversations, with control tokens as text, of which the first makes the renamed tokenizer."""
    alone, together = Tokenizer(load_tokenizer(DEMO_PATH)), Tokenizer(load_tokenizer(DEMO_PATH))
    texts = [f"{'word ' * (50 * i)}<|im_start|>{i}" for i in range(1, 9)]

    def of(tokenizer: Tokenizer, text: str) -> tuple[list[int], ...]:
        return (
            tokenizer.encode(text),
            tokenizer.encode(text, split_special_tokens=True),
            tokenizer.apply_chat_template([{"role": "user", "content": text}]),
        )

    assert together.is_thread_safe
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda text: of(together, text), texts * 3)) == [of(alone, text) for text in texts] * 3


def test_an_error_is_its_callers_and_the_next_one_runs() -> None:
    model: Any = Model()

    def fail() -> None:
        raise ValueError("no such text")

    async def scenario(lanes: TokenizerLanes) -> None:
        results = await asyncio.gather(
            lanes.run("a", model, 1, fail), lanes.run("a", model, 1, lambda: 2), return_exceptions=True
        )
        assert [type(result) for result in results] == [ValueError, int]

    play(scenario)
