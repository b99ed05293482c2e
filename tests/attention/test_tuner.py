"""Measuring: with a clock that only the measured work moves, and small real measurements on the stand-in."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged import durable_files
from mlxpaged.attention import kernels, tuner, tuning_cache
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import AttentionShape, KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.tuner import (
    Limits,
    Prepare,
    Run,
    ShapeTimes,
    Tuner,
    Workload,
    choose_tunings,
    classes_of,
    summary,
    tune,
)
from mlxpaged.attention.tuning import (
    BY_CONTEXT,
    CONTIGUOUS,
    DEFAULT_TUNING,
    MATRIX,
    Choice,
    ShapeClass,
    Tuning,
    default_choice,
)
from mlxpaged.attention.tuning_cache import Machine, TuningCache
from mlxpaged.cli.doctor import report
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import load_model
from tests.metal_on_cpu import Interpreter
from tests.support import every, make_tiny_model, run_requests

SHAPE = AttentionShape(4, KVLayout(2, 32, 32, mx.float32, 32))
OTHER = AttentionShape(8, KVLayout(2, 64, 64, mx.float16, 32))
SMALL = Limits(context_length=1024, max_num_seqs=4)
LARGE = Limits(context_length=40960, max_num_seqs=32)
MACHINE = Machine("Apple M9", "macOS 30.1", "0.40.0", "0123456789abcdef")

LONE = ShapeClass(1, 1, 1024)
EVEN = ShapeClass(1, 4, 1024)
RAGGED = ShapeClass(1, 4, 1024, ragged=True)
CHUNK = ShapeClass(31, 1, 1024)
LONG_CHUNK = ShapeClass(255, 1, 1024)

Cost = Callable[[Workload, Choice], float]


@dataclass
class FakeDevice:
    """Attention that takes `cost` seconds a call on the device and `host` on the host, `wait` more for a result, and
    `compile` more at the first call of a run. The calls of all runs are kept."""

    cost: Cost = lambda workload, choice: 1e-4
    wait: float = 0.0
    compile: float = 0.0
    now: float = 100.0
    host: Callable[[Choice], float] = lambda choice: 0.0
    calls: list[tuple[AttentionShape, Workload, Choice, int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def prepare(self, shape: AttentionShape, workload: Workload, choice: Choice) -> Run:
        compiling = [self.compile]

        def run(calls: int) -> None:
            self.calls.append((shape, workload, choice, calls))
            device = calls * self.cost(workload, choice)
            self.now += (compiling.pop() if compiling else 0) + self.wait + calls * self.host(choice) + device

        return run

    @property
    def tuner(self) -> Tuner:
        return Tuner(self.prepare, self.clock)


def favourite(*favourites: tuple[Callable[[Workload], bool], Choice]) -> Cost:
    """A tenth faster than all others."""
    return lambda workload, choice: 0.9e-4 if any(is_it(workload) and choice == c for is_it, c in favourites) else 1e-4


@pytest.fixture(autouse=True)
def _a_device_to_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And no file but in this test's directory."""
    monkeypatch.setattr(tuner, "can_measure", lambda: True)
    monkeypatch.setattr(tuning_cache, "default_path", lambda: tmp_path / "default" / "tuning.json")


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path / "caches" / "mlxpaged" / "tuning.json", MACHINE)


def measured(device: FakeDevice, cache: TuningCache, limits: Limits = SMALL) -> ShapeTimes:
    [one] = tune([SHAPE], limits, cache=cache, tuner=device.tuner)
    return one


# Choosing


def test_each_class_gets_the_choice_that_is_fastest_for_it(cache: TuningCache) -> None:
    cost = favourite(
        (lambda work: work.context_lens == [1024] and work.query_lens != [255], CONTIGUOUS),
        (lambda work: work.context_lens == [1024] * 4, Choice(1024)),
        (lambda work: work.context_lens == [1024, 128, 128, 128], Choice(256)),
        (lambda work: work.query_lens == [255], Choice(4096)),
    )
    one = measured(FakeDevice(cost), cache)
    expected = {LONE: CONTIGUOUS, EVEN: Choice(1024), RAGGED: Choice(256), LONG_CHUNK: Choice(4096)}
    assert expected.items() <= {entry: one.choice(entry) for entry in one.classes}.items()
    assert {entry: one.tuning.choice(entry) for entry in expected} == expected
    assert one.choice(CHUNK) == one.tuning.choice(CHUNK) == CONTIGUOUS


def test_a_choice_that_is_hardly_faster_than_the_default_is_noise(cache: TuningCache) -> None:
    factor = {Choice(256): 0.96, BY_CONTEXT: 1.0, Choice(4096): 1.0}
    one = measured(FakeDevice(lambda _, choice: factor.get(choice, 1.2) * 1e-4), cache)
    assert [one.choice(entry) for entry in one.classes] == [default_choice(entry) for entry in one.classes[:-2]] + [
        Choice(4096)
    ] * 2
    factor[Choice(256)] = 0.94
    [one] = tune([SHAPE], SMALL, True, cache, FakeDevice(lambda _, choice: factor.get(choice, 1.2) * 1e-4).tuner)
    assert one.choice(LONE) == Choice(256)


def test_compiling_is_not_timed_and_a_time_is_that_of_one_call(cache: TuningCache) -> None:
    device = FakeDevice(lambda _, choice: 2e-4 if choice == CONTIGUOUS else 1e-4, compile=0.05)
    times = measured(device, cache).times[LONE]
    paged = dict.fromkeys([BY_CONTEXT, *map(Choice, (128, 256, 512, 1024))], 1e-4)
    assert times == pytest.approx({**paged, CONTIGUOUS: 2e-4})


def test_fast_calls_are_chained_and_slow_ones_are_not_repeated_often(cache: TuningCache) -> None:
    def calls(cost: float) -> list[int]:
        device = FakeDevice(lambda *_: cost)
        [one] = tune([SHAPE], Limits(1024, 1), True, cache, device.tuner)
        assert one.times[LONE] == pytest.approx(dict.fromkeys(one.times[LONE], cost))
        return [number for _, work, choice, number in device.calls if work.query_lens == [1] and choice == BY_CONTEXT]

    assert calls(1e-5) == [1, 1, *[8] * 5]
    assert calls(0.48e-3) == [1, 1, *[4] * 5]
    assert calls(5e-3) == [1, 1, *[1] * 5]
    assert calls(0.04) == [1, 1, 1, 1]
    assert calls(0.1) == [1, 1, 1]


def test_waiting_for_a_result_makes_no_candidate_hopeless(cache: TuningCache) -> None:
    device = FakeDevice(lambda _, choice: 1e-5 if choice == BY_CONTEXT else 1.5e-5, wait=3e-4)
    times = measured(device, cache).times[LONE]
    assert times[BY_CONTEXT] == pytest.approx(1e-5 + 3e-4 / 6)
    assert times[CONTIGUOUS] == pytest.approx(1.5e-5 + 3e-4 / 6)


def test_a_choice_that_asks_more_of_the_host_loses_by_that(cache: TuningCache) -> None:
    device = FakeDevice(host=lambda choice: 2e-5 if choice == BY_CONTEXT else 5e-5 if choice == CONTIGUOUS else 1e-5)
    [one] = tune([SHAPE], Limits(1024, 1), cache=cache, tuner=device.tuner)
    assert one.times[LONE][BY_CONTEXT] == pytest.approx(1.2e-4)
    assert one.times[LONE][CONTIGUOUS] == pytest.approx(1.5e-4)
    assert one.choice(LONE) == Choice(128)


def test_a_repetition_that_was_disturbed_does_not_count(cache: TuningCache) -> None:
    device = FakeDevice()
    ordinary = device.prepare

    def disturbed(shape: AttentionShape, workload: Workload, choice: Choice) -> Run:
        run = ordinary(shape, workload, choice)

        def run_disturbed(calls: int) -> None:
            run(calls)
            if len(device.calls) % 7 in (4, 6):  # two of five repetitions, in turns early and late
                device.now += 0.01

        return run_disturbed

    [one] = tune([SHAPE], Limits(1024, 1), cache=cache, tuner=Tuner(disturbed, device.clock))
    assert one.times[LONE] == pytest.approx(dict.fromkeys(one.times[LONE], 1e-4))


def test_a_hopeless_candidate_runs_twice_and_no_more(cache: TuningCache) -> None:
    device = FakeDevice(lambda _, choice: 0.009 if choice == CONTIGUOUS else 0.003)
    one = measured(device, cache, Limits(1024, 1))
    assert [calls for *_, choice, calls in device.calls if choice == CONTIGUOUS][:2] == [1, 1]
    assert len([1 for _, work, choice, _ in device.calls if work.query_lens == [1] and choice == CONTIGUOUS]) == 2
    assert one.times[LONE][CONTIGUOUS] == pytest.approx(0.009)


def test_when_the_time_is_up_the_remaining_classes_keep_the_default_and_that_is_said(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "BUDGET_S", 1.0)
    device = FakeDevice(lambda work, choice: work.cost * (1e-7 if choice == CONTIGUOUS else 2e-7))
    one = measured(device, cache, LARGE)
    assert 1 <= device.now - 100 < 1.5
    assert 0 < len(one.times) < len(one.classes)
    missing = [entry for entry in one.classes if entry not in one.times]
    assert [str(entry) for entry in one.times][:3] == [
        "decode 1, to 1024 keys",
        "decode to 4, to 1024 keys, even",
        "decode 1, to 8192 keys",
    ], "what most steps are comes first"
    assert max(map(tuner.rarity, one.times)) <= min(map(tuner.rarity, missing))
    assert {one.choice(entry) == one.tuning.choice(entry) == default_choice(entry) for entry in missing} == {True}
    assert all(len(times) == len(tuner.candidates(entry, SHAPE, tuner.workload_of(entry, SHAPE, LARGE)))
               for entry, times in one.times.items()), "no class is decided by some of its candidates"  # fmt: skip
    assert f"{len(missing)} were not measured in time and keep the default" in summary([one])
    again = measured(FakeDevice(), cache, LARGE)
    assert again.cached, "the next start does not spend the time again"
    assert again.times == one.times


def test_all_shapes_share_one_budget(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "BUDGET_S", 0.3)
    device = FakeDevice(lambda *_: 2e-3)
    found = tune([SHAPE, OTHER], SMALL, cache=cache, tuner=device.tuner)
    assert device.now - 100 < 0.4
    assert all(0 < len(one.times) < len(one.classes) for one in found)


def test_equal_shapes_are_measured_once(cache: TuningCache) -> None:
    device = FakeDevice()
    assert [one.shape for one in tune([SHAPE, OTHER, SHAPE], SMALL, cache=cache, tuner=device.tuner)] == [SHAPE, OTHER]


def failing(device: FakeDevice, broken: Callable[[Choice], bool], at_call: bool) -> Prepare:
    def prepare(shape: AttentionShape, workload: Workload, choice: Choice) -> Run:
        def refuse(_: int) -> None:
            raise RuntimeError("no such kernel")

        if broken(choice):
            if at_call:
                return refuse
            refuse(0)
        return device.prepare(shape, workload, choice)

    return prepare


@pytest.mark.parametrize("at_call", [False, True])
@pytest.mark.parametrize("choice", [BY_CONTEXT, CONTIGUOUS], ids=["default", "other"])
def test_a_candidate_that_fails_is_dropped_with_its_error(
    cache: TuningCache, caplog: pytest.LogCaptureFixture, at_call: bool, choice: Choice
) -> None:
    device = FakeDevice(lambda _, c: 1e-4 if c == Choice(256) else 2e-4)
    prepare = failing(device, lambda c: c == choice, at_call)
    [one] = tune([SHAPE], SMALL, cache=cache, tuner=Tuner(prepare, device.clock))
    assert choice not in one.times[LONE]
    assert one.choice(LONE) == Choice(256)
    assert f"{choice} failed for {LONE} and is not timed: RuntimeError: no such kernel" in caplog.text


def test_if_every_candidate_fails_the_default_stays_and_nothing_is_stored(cache: TuningCache) -> None:
    device = FakeDevice()
    [one] = tune([SHAPE], SMALL, cache=cache, tuner=Tuner(failing(device, lambda _: True, True), device.clock))
    assert one.tuning == DEFAULT_TUNING
    assert one.times == {}
    assert cache.path is not None
    assert not cache.path.exists()


# Keeping


def test_a_second_start_measures_nothing_and_chooses_the_same(cache: TuningCache) -> None:
    one = measured(FakeDevice(favourite((lambda _: True, CONTIGUOUS))), cache)
    assert not one.cached
    device = FakeDevice()
    again = measured(device, cache)
    assert device.calls == []
    assert again.cached
    assert again.times == one.times
    assert again.tuning == one.tuning != DEFAULT_TUNING


def test_retune_measures_all_the_same_and_replaces_what_was_kept(cache: TuningCache) -> None:
    measured(FakeDevice(), cache)
    device = FakeDevice(favourite((lambda _: True, Choice(256))))
    [one] = tune([SHAPE], SMALL, True, cache, device.tuner)
    assert device.calls
    assert not one.cached
    again = measured(FakeDevice(), cache)
    assert again.cached
    assert again.choice(LONE) == Choice(256)
    assert num_entries(cache) == 1


def content(cache: TuningCache) -> dict[str, dict[str, dict[str, Any]]]:
    """Of the file: by chip, versions and shape."""
    assert cache.path is not None
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(cache.path.read_text())
    return found


def num_entries(cache: TuningCache) -> int:
    return sum(len(shapes) for versions in content(cache).values() for shapes in versions.values())


@pytest.mark.parametrize("changed", ["chip", "system", "mlx", "kernels"])
def test_another_machine_or_version_measures_for_itself(cache: TuningCache, changed: str) -> None:
    measured(FakeDevice(), cache)
    device = FakeDevice()
    other = TuningCache(cache.path, replace(MACHINE, **{changed: "another"}))
    assert not measured(device, other).cached
    assert device.calls
    stale = changed != "chip"  # entries of this chip with other versions are dropped
    assert num_entries(cache) == (1 if stale else 2)
    assert measured(FakeDevice(), other).cached
    assert measured(FakeDevice(), cache).cached != stale


SHAPES = [
    replace(SHAPE, num_query_heads=8),
    replace(SHAPE, layout=replace(SHAPE.layout, num_kv_heads=4)),
    replace(SHAPE, layout=replace(SHAPE.layout, key_size=64, value_size=64)),
    replace(SHAPE, layout=replace(SHAPE.layout, dtype=mx.float16)),
    replace(SHAPE, layout=replace(SHAPE.layout, block_size=16)),
    replace(SHAPE, window=1024),
    replace(SHAPE, sinks=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_another_shape_is_measured_beside_the_first(cache: TuningCache, shape: AttentionShape) -> None:
    measured(FakeDevice(), cache)
    device = FakeDevice()
    [one] = tune([shape], SMALL, cache=cache, tuner=device.tuner)
    assert not one.cached
    assert {call[0] for call in device.calls} == {shape}
    assert [found.cached for found in tune([SHAPE, shape], SMALL, cache=cache, tuner=FakeDevice().tuner)] == [True] * 2


def test_of_two_shapes_only_the_unknown_one_is_measured(cache: TuningCache) -> None:
    measured(FakeDevice(), cache)
    device = FakeDevice()
    found = tune([SHAPE, OTHER], SMALL, cache=cache, tuner=device.tuner)
    assert [one.cached for one in found] == [True, False]
    assert {call[0] for call in device.calls} == {OTHER}
    assert "6 shape classes measured, 6 cached" in summary(found)


@pytest.mark.parametrize(
    ("limits", "same"),
    [
        (Limits(1024, 4), True),
        (Limits(2048, 4), False),
        (Limits(1024, 3), False),
    ],
)
def test_other_limits_are_other_workloads(cache: TuningCache, limits: Limits, same: bool) -> None:
    measured(FakeDevice(), cache)
    assert measured(FakeDevice(), cache, limits).cached == same


def test_limits_beyond_what_is_measured_change_nothing(cache: TuningCache) -> None:
    measured(FakeDevice(), cache, Limits(40000, 64))
    assert measured(FakeDevice(), cache, Limits(200000, 300)).cached


BROKEN = {
    "empty": "",
    "cut off": '{"Apple M9": {"macOS',
    "not JSON": "\x00\xff",
    "nested": "[" * 100_000,
    "a list": "[]",
    "a number": "5",
    "numbers for chips": '{"Apple M9": 1}',
    "lists for shapes": '{"Apple M9": {"macOS 30.1": [1, null, {"machine": 3}]}}',
    "another format": '{"format": 1, "entries": "whatever"}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_measured_over(cache: TuningCache, text: str) -> None:
    assert cache.path is not None
    cache.path.parent.mkdir(parents=True)
    cache.path.write_text(text, encoding="latin-1")
    assert not measured(FakeDevice(), cache).cached
    assert measured(FakeDevice(), cache).cached
    assert num_entries(cache) == 1


def test_times_of_another_format_do_not_count(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(FakeDevice(), cache)
    monkeypatch.setattr(tuning_cache, "FORMAT", 0)
    assert not measured(FakeDevice(), cache).cached


@pytest.mark.parametrize(
    "times",
    [
        None,
        [],
        {"decode 1, to 1024 keys": None},
        {"decode 1, to 1024 keys": {}},
        {"decode 1, to 1024 keys": {"paged:512": "fast"}},
        {"decode 1, to 1024 keys": {"paged:512": float("nan")}},
        {"decode 1, to 1024 keys": {"paged:512": -1.0}},
        {"decode 1, to 1024 keys": {"paged:512": 0}},
        {"decode 1, to 1024 keys": {"paged:512": 10**400}},
        {"decode 1, to 1024 keys": {"paged:1": 1e-4}},
        {"decode 1, to 1024 keys": {"fast": 1e-4}},
        {"something else": {"paged:512": 1e-4}},
    ],
    ids=str,
)
def test_an_entry_that_makes_no_sense_is_warned_of_and_measured_over_and_its_neighbours_stay(
    cache: TuningCache, caplog: pytest.LogCaptureFixture, times: Any
) -> None:
    tune([SHAPE, OTHER], SMALL, cache=cache, tuner=FakeDevice().tuner)
    assert cache.path is not None
    whole = content(cache)
    [[shapes]] = [versions.values() for versions in whole.values()]
    shapes[next(iter(shapes))] = times
    cache.path.write_text(json.dumps(whole))
    found = tune([SHAPE, OTHER], SMALL, cache=cache, tuner=FakeDevice().tuner)
    assert [one.cached for one in found] == [False, True]
    assert "are ignored" in caplog.text
    assert [one.cached for one in tune([SHAPE, OTHER], SMALL, cache=cache)] == [True, True]


def test_a_file_that_cannot_be_written_or_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = TuningCache(tmp_path / "file" / "tuning.json", MACHINE)
    one = measured(FakeDevice(favourite((lambda _: True, CONTIGUOUS))), cache)
    assert one.choice(LONE) == CONTIGUOUS
    assert "cannot be read" in caplog.text
    assert "could not be saved" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured(FakeDevice(), cache)
    assert cache.path is not None
    before = cache.path.read_text()

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(durable_files, "flush_to_disk", full)
    tune([SHAPE], SMALL, True, cache, FakeDevice().tuner)
    assert cache.path.read_text() == before
    assert list(cache.path.parent.iterdir()) == [cache.path]
    assert "no space left" in caplog.text


def test_the_file_is_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tuning_cache.sys, "platform", "darwin")
    assert tuning_cache.default_path().parent == tmp_path / "Library" / "Caches" / "mlxpaged"
    monkeypatch.setattr(tuning_cache.sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tuning_cache.default_path().parent == tmp_path / ".cache" / "mlxpaged"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tuning_cache.default_path().parent == tmp_path / ".cache" / "mlxpaged"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuning_cache.default_path().parent == tmp_path / "xdg" / "mlxpaged"


def test_without_a_home_directory_the_times_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(tuning_cache, "default_path", homeless)
    assert measured(FakeDevice(), TuningCache(machine=MACHINE)).times
    assert "home directory" in caplog.text


def test_this_machine_is_known_by_its_chip_its_system_mlx_and_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Machine.current()
    assert here.chip == mx.device_info()["device_name"]
    assert here.mlx == importlib.metadata.version("mlx")
    assert here.kernels == kernels.source_hash()
    directory = tmp_path / "kernels"
    shutil.copytree(kernels.kernel_directory(), directory)
    monkeypatch.setattr(kernels, "kernel_directory", lambda: directory)
    assert Machine.current() == here
    with open(directory / "merge_partials.metal", "a") as file:
        file.write("\n")
    assert Machine.current().kernels != here.kernels


# What an engine takes


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A fake device in the place of the real one."""
    device = FakeDevice(favourite((lambda _: True, CONTIGUOUS)))
    monkeypatch.setattr(tuner, "Tuner", lambda: device.tuner)
    return device


def test_a_start_reads_what_was_measured_and_measures_only_when_it_is_asked_to(
    real: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose_tunings("metal", "auto", [SHAPE, SHAPE], SMALL) == {SHAPE: DEFAULT_TUNING}
    assert real.calls == []
    assert "default; `mlxpaged doctor MODEL` measures" in caplog.text
    caplog.clear()
    tunings = choose_tunings("metal", "auto", [SHAPE, SHAPE], SMALL, retune=True)
    assert list(tunings) == [SHAPE]
    assert tunings[SHAPE].choice(LONE) == CONTIGUOUS
    assert [record.getMessage() for record in caplog.records] == [
        "attention tuning: 6 shape classes measured, 0 cached, 4 differ from the default"
    ]
    real.calls.clear()
    assert choose_tunings("metal", "auto", [SHAPE], SMALL) == tunings
    assert real.calls == []
    assert "0 shape classes measured, 6 cached" in caplog.text


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("default", DEFAULT_TUNING),
        ("contiguous", Tuning(decode=CONTIGUOUS, chunks=CONTIGUOUS)),
        ("paged:8192", Tuning(decode=Choice(8192), chunks=Choice(8192))),
    ],
)
def test_an_override_measures_nothing(
    real: FakeDevice, caplog: pytest.LogCaptureFixture, setting: str, expected: Tuning
) -> None:
    caplog.set_level(logging.INFO)
    assert choose_tunings("metal", setting, [SHAPE, OTHER], SMALL) == {SHAPE: expected, OTHER: expected}
    assert real.calls == []
    assert f"attention tuning: {setting}, as configured" in caplog.text


@pytest.mark.parametrize("retune", [False, True])
def test_without_a_metal_device_nothing_is_measured_and_a_vain_retune_is_warned_of(
    real: FakeDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, retune: bool
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(tuner, "can_measure", lambda: False)
    assert choose_tunings("metal", "auto", [SHAPE], SMALL, retune) == {SHAPE: DEFAULT_TUNING}
    assert real.calls == []
    [record] = caplog.records
    assert "default, because nothing is measured without a Metal device" in record.getMessage()
    assert record.levelno == (logging.WARNING if retune else logging.INFO)


def test_on_the_gather_backend_there_is_nothing_to_choose(real: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_tunings("gather", "auto", [SHAPE], SMALL) == {}
    assert choose_tunings("gather", "default", [SHAPE], SMALL) == {}
    assert not caplog.records
    assert choose_tunings("gather", "contiguous", [SHAPE], SMALL) == {}
    assert choose_tunings("gather", "auto", [SHAPE], SMALL, retune=True) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "attention tuning has no effect: attention runs on the gather backend"
    ] * 2
    assert real.calls == []


# For real, on the stand-in


@pytest.mark.parametrize(
    "shape",
    every(
        3,
        [
            SHAPE,
            AttentionShape(8, KVLayout(1, 64, 64, mx.float16, 16), window=24),
            AttentionShape(3, KVLayout(3, 128, 128, mx.bfloat16, 8), sinks=True),
            AttentionShape(4, KVLayout(2, 48, 32, mx.float16, 32)),
            AttentionShape(4, KVLayout(1, 32, 48, mx.float16, 32)),
            AttentionShape(20, KVLayout(1, 40, 32, mx.float32, 32, latent=True)),
        ],
    ),
    ids=str,
)
def test_every_candidate_of_every_class_runs(
    unchecked: None, cache: TuningCache, monkeypatch: pytest.MonkeyPatch, shape: AttentionShape
) -> None:
    monkeypatch.setattr(tuner, "REPETITIONS", 1)
    monkeypatch.setattr(tuner, "BUDGET_S", 600.0)
    limits, readings = Limits(context_length=150, max_num_seqs=2), itertools.count()
    [one] = tune([shape], limits, cache=cache, tuner=Tuner(clock=lambda: next(readings) / 1024))
    assert set(one.times) == set(one.classes) == set(classes_of(shape, limits))
    for entry, times in one.times.items():
        assert list(times) == tuner.candidates(entry, shape, tuner.workload_of(entry, shape, limits))
        assert set(times.values()) == {1 / 2048}  # two calls between two readings
    assert tune([shape], limits, cache=cache)[0].times == one.times


def test_the_matrix_kernel_is_timed_if_it_has_a_variant() -> None:
    latent = AttentionShape(20, KVLayout(1, 40, 32, mx.float32, 32, latent=True))
    large = AttentionShape(1, KVLayout(1, 1280, 64, mx.float32, 32))
    for shape, is_timed in ((SHAPE, True), (latent, False), (large, False)):
        assert (MATRIX in tuner.candidates(ShapeClass(255, 1, 1024), shape, Workload([255], [1024]))) == is_timed


def test_what_is_timed_is_the_choice_for_the_workload(metal_on_cpu: Interpreter) -> None:
    for choice, kernel in ((CONTIGUOUS, "kv_gather"), (Choice(64), "merge_partials"), (Choice(128), "paged_decode")):
        run = tuner.prepare(SHAPE, Workload([1, 1], [100, 20]), choice)
        before = len(metal_on_cpu.launches)
        run(3)
        names = [launch.kernel for launch in metal_on_cpu.launches[before:]]
        assert names.count(kernel) == (6 if choice == CONTIGUOUS else 3), "one for each sequence where it is copied"
        assert ("merge_partials" in names) == (choice == Choice(64))
    metal_on_cpu.launches.clear()
    tuner.prepare(SHAPE, Workload([20], [50]), MATRIX)(3)
    assert [launch.kernel for launch in metal_on_cpu.launches] == ["kv_write", "matrix_attention"] * 3


def test_timed_calls_feed_on_each_other_and_attend_as_the_layer_does(
    metal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX would run calls that do not wait for each other at the same time."""
    seen: list[tuple[mx.array, dict[str, Any], mx.array]] = []
    attend = LayerKVCache.attend

    def recording(kv: LayerKVCache, queries: mx.array, *args: Any, **options: Any) -> mx.array:
        out = attend(kv, queries, *args, **options)
        seen.append((queries, options, out))
        return out

    monkeypatch.setattr(LayerKVCache, "attend", recording)
    tuner.prepare(replace(SHAPE, window=24, sinks=True), Workload([1], [24]), Choice(512))(3)
    assert len(seen) == 3
    assert seen[1][0] is seen[0][2]
    assert seen[2][0] is seen[1][2]
    assert seen[0][1]["window"] == 24
    assert seen[0][1]["sinks"].shape == (4,)


def test_a_timed_call_touches_the_pool_only_after_the_call_before_it(
    metal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies of keys wait for a write, and the write for the attention before: as from layer to layer."""
    written: list[float] = []
    write, outputs = LayerKVCache.write, iter(range(1, 10))

    def recording(kv: LayerKVCache, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None:
        written.extend([keys.max().item(), values.min().item()])
        write(kv, keys, values, meta)

    monkeypatch.setattr(LayerKVCache, "write", recording)
    monkeypatch.setattr(
        LayerKVCache, "attend", lambda _, queries, *args, **__: mx.full(queries.shape, float(next(outputs)))
    )
    tuner.prepare(SHAPE, Workload([1, 1], [24, 40]), CONTIGUOUS)(3)
    assert written == [0, 0, 1, 1, 2, 2]


def test_timed_pools_stay_small_and_are_freed(metal: None, cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[LayerKVCache] = []

    class Recorded(LayerKVCache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            pools.append(self)

    monkeypatch.setattr(tuner, "LayerKVCache", Recorded)
    run = tuner.prepare(SHAPE, Workload([1] * 3, [70, 40, 40]), CONTIGUOUS)
    assert pools[-1].num_blocks == 7, "as many as are needed"
    monkeypatch.setattr(tuner, "POOL_BYTES", 3 * 32 * 2 * 2 * 32 * 4)
    run = tuner.prepare(SHAPE, Workload([1] * 3, [70, 40, 40]), CONTIGUOUS)
    assert pools[-1].num_blocks == 3, "shared by the sequences"
    run(2)
    monkeypatch.setattr(tuner, "LayerKVCache", LayerKVCache)
    cleared: list[bool] = []
    monkeypatch.setattr(tuner.mx, "clear_cache", lambda: cleared.append(True))
    measured(FakeDevice(), cache)
    measured(FakeDevice(), cache)
    assert cleared == [True], "where something was measured"


def engine(directory: Path, **settings: Any) -> EngineCore:
    served = load_model(str(make_tiny_model(directory, "llama", head_dim=32, max_position_embeddings=160)))
    config = EngineConfig(kv_cache_bytes=20 * 32 * bytes_per_token(served.layers), max_num_seqs=2, **settings)
    return build_engine(config, served)


PROMPTS = [[(7 * i) % 250 for i in range(150)], [3, 4, 5]]


@pytest.mark.more
def test_an_engine_measures_keeps_and_follows_what_is_fastest(
    tmp_path: Path, unchecked: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "BUDGET_S", 600.0)
    monkeypatch.setattr(tuner, "REPETITIONS", 1)
    caplog.set_level(logging.INFO, "mlxpaged")
    expected = run_requests(engine(tmp_path / "m", attention_backend="gather"), PROMPTS, max_tokens=4)
    first = engine(tmp_path / "m", retune=True)
    assert first.runner.backend == "metal"
    assert run_requests(first, PROMPTS, max_tokens=4) == expected
    second = engine(tmp_path / "m")
    assert [layer.kv.tuning for layer in second.runner.layers] == [layer.kv.tuning for layer in first.runner.layers]
    assert len(first.runner.layers[0].kv.tuning.choices) == 6
    assert [text for text in caplog.messages if "6 shape classes measured, 0 cached" in text]
    assert [text for text in caplog.messages if "0 shape classes measured, 6 cached" in text]


def test_an_engine_follows_an_override(
    tmp_path: Path, metal_on_cpu: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "can_measure", lambda: False)
    expected = run_requests(engine(tmp_path / "m", attention_backend="gather"), PROMPTS, max_tokens=4)
    core = engine(tmp_path / "m", attention_backend="metal", attention_tuning="contiguous")
    metal_on_cpu.launches.clear()
    assert run_requests(core, PROMPTS, max_tokens=4) == expected
    names = {launch.kernel for launch in metal_on_cpu.launches}
    assert "kv_gather" in names
    assert "paged_attention" not in names


# The doctor


def shown(limits: Limits, retune: bool = False) -> list[str]:
    """The lines of `mlxpaged doctor` about tuning."""
    return report.lines("tuning", report.tuning_section(tune([SHAPE], limits, retune)))


def test_the_doctor_shows_the_choice_and_the_time_of_every_candidate_and_where_they_are_from(real: FakeDevice) -> None:
    lines = shown(SMALL)
    assert f"{SHAPE}: measured now" in lines
    [line] = [line for line in lines if line.startswith("  decode 1, to 1024 keys")]
    assert line.split()[5] == "contiguous"
    times = "paged 100, paged:128 100, paged:256 100, paged:512 100, paged:1024 100, contiguous 90 us"
    assert line.endswith(f"{times}, 1.11 times as fast as the default")
    assert len([line for line in lines if line.startswith(("  decode", "  chunk"))]) == 6
    real.calls.clear()
    assert f"{SHAPE}: cached" in shown(SMALL)
    assert real.calls == []
    assert f"{SHAPE}: measured now" in shown(SMALL, retune=True)
    assert real.calls


def test_the_doctor_shows_classes_that_there_was_no_time_for(real: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "BUDGET_S", 0.1)
    lines = shown(LARGE)
    assert "were not measured in time and keep the default" in lines[0]
    [line] = [line for line in lines if line.startswith("  chunk to 255, to 8192 keys")]
    assert line.split()[-3:] == ["contiguous", "not", "measured"]


def test_the_doctor_shows_the_default_if_nothing_is_measured(real: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "can_measure", lambda: False)
    lines = shown(SMALL, retune=True)
    assert "attention tuning: default, because nothing is measured without a Metal device" in lines
    assert f"{SHAPE}: default" in lines
    assert real.calls == []
