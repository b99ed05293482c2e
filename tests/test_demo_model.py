"""The bundled demo model does what the README says it does, asked over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from openai import AsyncOpenAI

from demo_model import tasks
from mlxpaged.models.loader import DEMO_PATH
from tests.support import RunningServer

CASES, ALL_CASES = 12, 60

LEAST_ACCURACY = {"repeat": 0.95, "passkey": 0.92, "add": 0.95, "reverse": 0.95, "identity": 0.95}
"""A little under the README's figures, which are over 200 cases each."""

FILLER = "The river runs past the old mill. A gardener waters the roses. The train to the coast leaves at noon. " * 12

PLAIN = {
    "Repeat: blue river stone": "blue river stone",
    f"{FILLER}The passkey is 48213. {FILLER}What is the passkey?": "48213",
    "What is 17 + 25?": "42",
    "Reverse: a b c": "c b a",
}


async def ask_all(server: RunningServer, conversations: Sequence[Sequence[tasks.Message]]) -> list[str]:
    """Greedy answers to all of them, 16 at a time."""
    limit = asyncio.Semaphore(16)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(messages: Sequence[tasks.Message]) -> str:
            async with limit:
                reply = await client.chat.completions.create(
                    model="demo",
                    messages=list(messages),  # type: ignore[arg-type]
                    temperature=0,
                    max_tokens=200,
                )
            return (reply.choices[0].message.content or "").strip()

        return list(await asyncio.gather(*(ask(messages) for messages in conversations)))


@pytest.mark.parametrize("number", [CASES, pytest.param(ALL_CASES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", LEAST_ACCURACY)
def test_held_out_cases_are_answered_right(demo_server: RunningServer, task: str, number: int) -> None:
    cases = tasks.held_out(task, number, seed=3)
    answers = asyncio.run(ask_all(demo_server, [case.messages for case in cases]))
    wrong = [(case.answer, answer) for case, answer in zip(cases, answers, strict=True) if answer != case.answer]
    accuracy = 1 - len(wrong) / len(cases)
    print(f"{task}: {accuracy:.3f}")
    assert accuracy >= LEAST_ACCURACY[task], wrong[:5]


def test_the_readmes_questions_are_answered_right(demo_server: RunningServer) -> None:
    questions = [({"role": "user", "content": question},) for question in PLAIN]
    assert asyncio.run(ask_all(demo_server, questions)) == list(PLAIN.values())


def test_asked_who_it_is_it_says_so(demo_server: RunningServer) -> None:
    [answer] = asyncio.run(ask_all(demo_server, [({"role": "user", "content": "Who are you?"},)]))
    assert "mlxpaged demo model" in answer


def test_the_model_takes_at_most_8_megabytes() -> None:
    assert sum(path.stat().st_size for path in DEMO_PATH.iterdir()) <= 8_000_000
