"""The engine gives the rule of speculative decoding what steps took and what was accepted, and does what it says.

The model is real. Steps take what a clock says that does not run by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.step import Step
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import load_model
from mlxpaged.parts.drafting import draft_budget
from mlxpaged.parts.drafting.acceptance import MOST_LOSS, SEARCH_EVERY
from mlxpaged.parts.drafting.draft_budget import MOST_DRAFT_ROWS, TIME_AGAIN, draft_lengths
from mlxpaged.parts.drafting.drafting import Drafting
from tests.engine.helpers import part_of
from tests.engine.test_drafting import Oracle, answers, prompt, tokens_of
from tests.models.architectures import make_architecture

TOKENS = 160

Seconds = Callable[[int], float]
"""What a step of so many rows takes."""


class Device:
    """An engine whose steps take what `seconds` says of their rows, on its clock. steps: those that were read."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, seconds: Seconds, overlaps: bool) -> None:
        self.now, self.seconds, self.steps = 0.0, seconds, list[Step]()
        self.asked = list[int]()
        """How many steps had been read when the drafter was asked."""
        monkeypatch.setattr(draft_budget, "draft_lengths", draft_lengths)
        monkeypatch.setattr(ModelRunner, "overlaps", overlaps)
        config = EngineConfig(kv_cache_bytes=4_000_000, max_step_ms=0, speculative="ngram")
        self.core: EngineCore = build_engine(config, load_model(str(path)), clock=lambda: self.now)
        self.core.scheduler.times.learn_rows({rows: seconds(rows) for rows in range(1, MOST_DRAFT_ROWS + 1)})
        read = InFlightStep.read

        def reading(step: InFlightStep) -> Any:
            self.steps.append(step.scheduled)
            self.now += self.seconds(step.scheduled.num_tokens)
            step.is_usual = True
            return read(step)

        monkeypatch.setattr(InFlightStep, "read", reading)

    def use(self, drafter: Any) -> None:
        drafting = part_of(self.core, Drafting)
        drafting.drafter = drafter

    def decoding(self) -> list[Step]:
        return [step for step in self.steps if all(row.decodes for row in step.rows)]


class Late:
    """An oracle that knows nothing before so many tokens, and nothing at all of some requests."""

    def __init__(self, device: Device, known: Mapping[str, ListOf[int]], after: int = 0) -> None:
        self._device, self._known, self._after, self._oracle = device, known, after, Oracle(known)

    def begin_step(self) -> None:
        pass

    def propose(self, running: RunningRequest, most: int) -> tuple[list[int], int]:
        self._device.asked.append(len(self._device.steps))
        sequence = running.sequence
        if sequence.num_output_tokens < self._after or sequence.request_id not in self._known:
            return [], 0
        return self._oracle.propose(running, most)

    def forget(self, sequence_id: int) -> None:
        pass


def asked(count: int) -> list[Request]:
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return [Request(f"r{i}", prompt(i, 20), params, 0.0) for i in range(count)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_architecture(tmp_path_factory.mktemp("budget") / "m", "llama")


@pytest.fixture(scope="module")
def known(path: Path) -> dict[str, tuple[int, ...]]:
    config = EngineConfig(kv_cache_bytes=4_000_000, max_step_ms=0, speculative="off")
    return tokens_of(answers(build_engine(config, load_model(str(path))), asked(4)))


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def device(request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(path, monkeypatch, lambda rows: 0.02 + 0.002 * rows, request.param)


def test_after_many_steps_with_drafts_one_goes_without(device: Device, known: dict[str, tuple[int, ...]]) -> None:
    device.seconds = lambda rows: 0.02 + 0.01 * rows
    device.core.scheduler.times.learn_rows({rows: device.seconds(rows) for rows in range(1, MOST_DRAFT_ROWS + 1)})
    device.use(Late(device, known))
    assert tokens_of(answers(device.core, asked(1))) == {"r0": known["r0"]}
    with_drafts = "".join("d" if step.has_drafts else "p" for step in device.decoding())
    longest = max(map(len, with_drafts.split("p")))
    assert TIME_AGAIN <= longest <= 2 * TIME_AGAIN, "by the gain, which is less than two"


def test_drafts_end_when_rows_become_dear(device: Device, known: dict[str, tuple[int, ...]]) -> None:
    device.use(Late(device, known))
    assert tokens_of(answers(device.core, asked(1))) == {"r0": known["r0"]}
    assert sum(step.has_drafts for step in device.decoding()) > 20
    device.steps.clear()
    device.seconds = lambda rows: 0.02 * rows
    for _ in range(5):
        assert tokens_of(answers(device.core, asked(1))) == {"r0": known["r0"]}
    last = device.decoding()[-TOKENS:]
    assert len(last) == TOKENS
    assert sum(step.has_drafts for step in last) < TOKENS // 20


def test_a_text_that_repeats_nothing_is_searched_in_every_fourth_step_until_it_does(
    device: Device, known: dict[str, tuple[int, ...]]
) -> None:
    device.use(Late(device, known, after=TOKENS // 2))
    assert tokens_of(answers(device.core, asked(1))) == {"r0": known["r0"]}
    steps = sorted(set(device.asked))
    apart = [after - before for before, after in itertools.pairwise(steps)]
    assert apart[:8] == [1] * 8, "at first in each step"
    assert SEARCH_EVERY in apart
    assert max(apart) == SEARCH_EVERY
    assert sum(step.has_drafts for step in device.decoding()) > 10, "and then they are verified"


def test_a_request_without_drafts_loses_little_to_those_of_others(
    device: Device, known: dict[str, tuple[int, ...]]
) -> None:
    device.use(Late(device, {name: tokens for name, tokens in known.items() if name != "r3"}))
    assert tokens_of(answers(device.core, asked(4))) == known
    took = sum(device.seconds(step.num_tokens) for step in device.decoding())
    assert any(step.has_drafts for step in device.decoding())
    assert took <= device.seconds(4) * (TOKENS * (1 + MOST_LOSS) + 4)
