"""Overlapped steps: the next one starts before the last one's tokens are read, and no answer shows it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.stand_in_device import stand_in_device
from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.engine import commands, sizes
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import ServedModel, load_model
from tests.support import every, make_tiny_model, poison_new_blocks, run_requests


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_model(str(make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")))


def make_core(served: ServedModel, blocks: int = 100, **options: Any) -> EngineCore:
    cache = blocks * 32 * bytes_per_token(served.layers)
    core = build_engine(EngineConfig(kv_cache_bytes=cache, max_step_ms=0, **options), served)
    poison_new_blocks(core)
    return core


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda overlaps: monkeypatch.setattr(ModelRunner, "overlaps", overlaps)


def add(core: EngineCore, name: str, prompt: list[int], **params: Any) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params
    core.add(Request(name, prompt, SamplingParams(**options), time.monotonic()))


def finish(core: EngineCore) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while core.has_work():
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert core.scheduler.pool.usage().used == 0
    return outputs


def test_a_step_is_started_before_the_tokens_of_the_last_one_are_read(
    served: ServedModel, overlapped: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    overlapped(True)
    events: list[str] = []
    forward, read = ModelRunner.forward, InFlightStep.read

    def noting_forward(*args: Any) -> Any:
        events.append("start")
        return forward(*args)

    def noting_read(*args: Any) -> Any:
        events.append("read")
        return read(*args)

    monkeypatch.setattr(ModelRunner, "forward", noting_forward)
    monkeypatch.setattr(InFlightStep, "read", noting_read)
    core = build_engine(EngineConfig(kv_cache_bytes=1_000_000), served)
    run_requests(core, [[1, 2, 3]], max_tokens=4)
    assert events == ["start", "start", "read", "start", "read", "start", "read", "read"]


MIXED: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 6, 7] * 20, {}),
    ([5, 6, 7] * 20 + [9], {"logprobs": 3}),
    ([8, 9], {"temperature": 1.0, "seed": 3}),
    ([10] * 40, {"temperature": 0.9, "seed": 4, "top_p": 0.9, "frequency_penalty": 1.5, "repetition_penalty": 1.3}),
    (list(range(100, 150)), {"temperature": 0.0, "presence_penalty": 2.0, "max_tokens": 40}),
    ([11, 12, 13, 14], {"max_tokens": 1}),
    ([3], {"max_tokens": 70, "logit_bias": {4: 50.0, 5: 49.9}, "temperature": 2.0, "seed": 1, "logprobs": 0}),
    (list(range(30)), {"max_tokens": 2}),
]


@pytest.mark.parametrize("blocks", [6, 100], ids=["preempted", "roomy"])
def test_answers_and_log_probabilities_are_those_of_plain_steps(
    served: ServedModel, overlapped: Callable[[bool], None], blocks: int
) -> None:
    outputs = []
    for overlaps in (False, True):
        overlapped(overlaps)
        core = make_core(served, blocks, max_num_batched_tokens=48)
        for i, (prompt, params) in enumerate(MIXED):
            add(core, str(i), prompt, **params)
        outputs.append(finish(core))
        assert (core.stats().scheduler.preemptions_total > 0) == (blocks == 6)
    plain, got = outputs
    for name in map(str, range(len(MIXED))):
        assert [t for o in got[name] for t in o.token_ids] == [t for o in plain[name] for t in o.token_ids]
        assert "".join(o.text for o in got[name]) == "".join(o.text for o in plain[name])
        assert [o.finish_reason for o in got[name][-1:]] == [o.finish_reason for o in plain[name][-1:]]
        assert got[name][-1].num_output_tokens == plain[name][-1].num_output_tokens
        expected = [entry for o in plain[name] for entry in o.logprobs]
        entries = [entry for o in got[name] for entry in o.logprobs]
        assert [entry.token_id for entry in entries] == [entry.token_id for entry in expected]
        assert [entry.logprob for entry in entries] == pytest.approx([e.logprob for e in expected], abs=1e-3)


def test_an_answer_that_stops_unforeseen_wastes_one_row_and_leaves_nothing(
    served: ServedModel, overlapped: Callable[[bool], None]
) -> None:
    overlapped(True)
    prompt = [5, 6, 7] * 20
    [free] = run_requests(make_core(served), [prompt], max_tokens=12)
    stop = next(token for token in free if free.index(token) >= 3)
    core = make_core(served)
    add(core, "stopped", prompt, stop_token_ids=frozenset({stop}))
    add(core, "neighbour", [8, 9], max_tokens=30)
    outputs = finish(core)
    answer = [token for output in outputs["stopped"] for token in output.token_ids]
    assert answer == free[: free.index(stop) + 1]
    assert outputs["stopped"][-1].finish_reason is FinishReason.STOP
    assert [token for o in outputs["neighbour"] for token in o.token_ids] == run_requests(
        make_core(served), [[8, 9]], max_tokens=30
    )[0]
    assert core.stats().model_calls_total == 30


def test_the_blocks_that_an_answer_fills_are_found_by_the_next_turn(
    served: ServedModel, overlapped: Callable[[bool], None]
) -> None:
    """Also the one whose last token was still unknown when the step that computes it was started."""
    for overlaps in (False, True):
        overlapped(overlaps)
        core = make_core(served)
        [answer] = run_requests(core, [list(range(30))], max_tokens=35)
        add(core, "next turn", [*range(30), *answer, 7])
        assert finish(core)["next turn"][-1].num_cached_tokens == 64


def test_a_request_aborted_while_its_step_is_under_way_is_gone_at_once(
    served: ServedModel, overlapped: Callable[[bool], None]
) -> None:
    overlapped(True)
    core = make_core(served)
    add(core, "alone", list(range(40)))
    core.step()
    core.step()
    [last] = core.abort("alone")
    assert last.finish_reason is FinishReason.ABORT
    assert core.scheduler.pool.usage().used == 0
    assert core.has_work(), "the step in flight is still to be read"
    assert core.step() == []
    assert not core.has_work()


def test_a_failing_step_whose_prefix_was_shared_and_whose_owner_was_aborted_spoils_no_answer(
    served: ServedModel, overlapped: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of the shared blocks are lost with the step, and he who should have computed them is gone."""
    overlapped(True)
    prefix = list(range(100, 170))
    [expected] = run_requests(make_core(served), [[*prefix, 30]], max_tokens=12)
    core = make_core(served)
    add(core, "owner", [*prefix, 20])
    add(core, "sharer", [*prefix, 30])
    core.step()
    core.abort("owner")
    read, failures = InFlightStep.read, iter([DeviceError("injected")])

    def failing(step: InFlightStep) -> Any:
        for error in failures:
            for layer in core.runner.layers:
                layer.kv.clear()
            raise error
        return read(step)

    monkeypatch.setattr(InFlightStep, "read", failing)
    outputs = finish(core)
    assert [token for output in outputs["sharer"] for token in output.token_ids] == expected


def test_an_answer_that_ends_while_memory_is_given_back_reaches_its_client(
    served: ServedModel, overlapped: Callable[[bool], None]
) -> None:
    overlapped(True)
    core = make_core(served)
    add(core, "a", [5, 6, 7], max_tokens=1)
    assert core.step() == []
    _, outputs = commands.give_back(core)
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH]
    assert not core.has_work()


def test_pools_that_are_lost_while_memory_is_given_back_are_not_read_again(
    served: ServedModel, overlapped: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    overlapped(True)
    monkeypatch.setattr(sizes, "START_TOKENS", 64)
    prompts = [[i + 1] * 100 for i in range(2)]
    expected = run_requests(make_core(served), prompts, max_tokens=12)
    core = make_core(served)
    run_requests(core, [[40 + i] * 100 for i in range(6)], max_tokens=12)  # so that the pool has grown
    for i, prompt in enumerate(prompts):
        add(core, str(i), prompt)
    core.step()

    def losing(*_: object) -> None:
        for layer in core.runner.layers:
            layer.kv.clear()
        raise DeviceError("the device is gone")

    monkeypatch.setattr(core.runner, "copy_blocks", losing)
    _, first = commands.give_back(core)
    rest = finish(core)
    answers = [[*(each for each in first if each.request_id == name), *rest[name]] for name in ("0", "1")]
    assert [[token for output in outputs for token in output.token_ids] for outputs in answers] == expected


def test_tokens_of_a_step_that_failed_do_not_count_for_penalties(
    served: ServedModel, overlapped: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    overlapped(True)
    prompts = [[i + 1] * 5 for i in range(4)]
    params = {"temperature": 0.9, "seed": 5, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    expected = run_requests(make_core(served), prompts, **params)
    read, reads = InFlightStep.read, iter(range(1000))

    def failing(step: InFlightStep) -> Any:
        if next(reads) in (1, 15):
            raise DeviceError("injected")
        return read(step)

    monkeypatch.setattr(InFlightStep, "read", failing)
    assert run_requests(make_core(served), prompts, **params) == expected


@pytest.mark.parametrize("seed", every(3, range(6)))
def test_whatever_happens_answers_are_those_of_requests_alone(
    served: ServedModel, overlapped: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Arrivals, aborts, and steps that fail once, in a pool that is too small."""
    overlapped(True)
    rng = random.Random(seed)
    prompts = [[rng.choice((40, 41)) for _ in range(rng.randint(1, 70))] for _ in range(14)]
    lengths = [rng.randint(1, 20) for _ in prompts]
    roomy = make_core(served)
    expected = [run_requests(roomy, [p], max_tokens=n)[0] for p, n in zip(prompts, lengths, strict=True)]
    core = make_core(served, blocks=7, max_num_batched_tokens=64, max_num_seqs=6)
    read = InFlightStep.read

    def sometimes_failing(step: InFlightStep) -> Any:
        hit_before = any(each.num_step_failures for each in core.scheduler.sequences.values())
        if rng.random() < 0.1 and not hit_before:  # a second device error in a row ends a request
            raise DeviceError("injected")
        return read(step)

    outputs: dict[str, list[RequestOutput]] = {}
    waiting, aborted = list(range(len(prompts))), set()
    with monkeypatch.context() as patch:
        patch.setattr(InFlightStep, "read", sometimes_failing)
        while waiting or core.has_work():
            while waiting and rng.random() < 0.4:
                number = waiting.pop(0)
                add(core, str(number), prompts[number], max_tokens=lengths[number])
            if rng.random() < 0.05:
                name = str(rng.randrange(len(prompts)))
                if core.abort(name):
                    aborted.add(name)
            for output in core.step() if core.has_work() else ():
                outputs.setdefault(output.request_id, []).append(output)
    assert core.scheduler.pool.usage().used == 0
    for number, tokens in enumerate(expected):
        got = outputs.get(str(number), [])
        if str(number) not in aborted:
            assert [token for output in got for token in output.token_ids] == tokens


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, time: float) -> None:
        self.now = max(self.now, time)


def step_times(served: ServedModel, constrained: int, masks_seconds: float) -> list[float]:
    """Seconds between the tokens of 16 sequences, of which some have a grammar whose masks take the host some time, on
    a device that takes 10 ms for a forward pass and 1 ms for its sampler. Every step must bring a token to each."""
    clock = Clock()
    core = build_engine(EngineConfig(kv_cache_bytes=4_000_000), served, clock)
    masks = core.grammars.masks

    def slow_masks(rows: Any) -> Any:
        clock.now += masks_seconds
        return masks(rows)

    core.grammars.masks = slow_masks  # type: ignore[method-assign]
    for i in range(16):
        constraint = Constraint("regex", "[a-z ]*") if i < constrained else None
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=30, ignore_eos=True, constraint=constraint)
        core.add(Request(str(i), [20 + i, 5], params, clock()))
    times = []
    with stand_in_device(core, 0.010, 0.001, clock.wait_until):
        core.step()
        while core.has_work():
            outputs = core.step()
            assert sorted(output.request_id for output in outputs) == sorted(map(str, range(16)))
            times.append(outputs[0].time)
    return [after - before for before, after in itertools.pairwise(times)]


def test_constrained_sequences_get_a_token_in_every_overlapped_step_and_delay_no_step(served: ServedModel) -> None:
    free = step_times(served, constrained=0, masks_seconds=0.0)
    assert free == pytest.approx([0.011] * 29)
    assert step_times(served, constrained=4, masks_seconds=0.008) == pytest.approx(free)


def test_masks_that_take_longer_than_the_device_delay_the_sampler(served: ServedModel) -> None:
    """The stand-in device shows a delay if there is one."""
    assert step_times(served, constrained=4, masks_seconds=0.015) == pytest.approx([0.016] * 29)


@pytest.mark.parametrize(
    ("params", "launches"),
    [
        ({}, 1),
        ({"temperature": 0.8, "seed": 3, "top_p": 0.9}, 1),
        ({"logprobs": 2, "logit_bias": {4: 2.0}, "min_tokens": 9, "ignore_eos": False}, 1),
        ({"presence_penalty": 1.0}, 2),
        ({"constraint": Constraint("regex", "[a-z ]*")}, 2),
        ({"thinking_budget": 4}, 2),
    ],
)
def test_a_sampler_that_needs_no_earlier_token_is_launched_with_its_step(
    served: ServedModel,
    overlapped: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    params: dict[str, Any],
    launches: int,
) -> None:
    overlapped(True)
    core, counts = make_core(served), [0]
    start_step = core.runner.start_step

    def counting(*results: Any) -> None:
        counts[-1] += 1
        start_step(*results)

    monkeypatch.setattr(core.runner, "start_step", counting)
    add(core, "plain", [8, 9], max_tokens=30)
    add(core, "other", [5, 6, 7], **params)
    for _ in range(8):
        core.step()
        counts.append(0)
    assert counts[:-1] == [launches] * 8
