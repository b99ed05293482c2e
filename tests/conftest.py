"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import secrets
import shlex
import signal
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import mlxpaged  # noqa: F401  (first: it loads the fast BLAS before mlx is imported)
from mlxpaged.attention import self_check, tuner
from mlxpaged.cli.doctor.sizes import Sizes
from mlxpaged.cpu import streams
from mlxpaged.engine import builder
from mlxpaged.engine_config import EngineConfig
from mlxpaged.parts.drafting import draft_budget
from mlxpaged.parts.memory import memory_pressure
from tests.support import RunningServer, running_server

collect_ignore = [] if find_spec("playwright") else ["browser"]
"""`make test-page` installs Playwright."""
MAX_ID = 2000
"""Characters."""

SAMPLED = {"attention", "cluster", "engine", "formats", "models", "scheduler", "vision"}
"""Folders whose tests have dear parameters: models, layouts, backends, formats."""

NOT_BY_DEFAULT = {"cluster", "encoders", "faults", "llamacpp", "mlxvlm", "models", "more", "peft", "real", "slow"}
"""Marks of tests in these folders that `make test` leaves out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "a number, or random: files, tests in them and hypothesis' examples are in the order of this seed"
    parser.addoption("--seed", help=text)
    parser.addoption("--more", action="store_true", help="with the tests that `make test-more` runs")
    parser.addoption("--real", action="store_true", help="with those of a real model; `make test-real` installs it")


def pytest_configure(config: pytest.Config) -> None:
    """Without --seed, every run does the same."""
    gc.disable()  # until all tests are collected: what is made until then stays
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs and their children ignore it
    if config.option.seed == "random":
        config.option.seed = str(secrets.randbelow(2**32))
    seed: str | None = config.option.seed
    settings.register_profile("mlxpaged", deadline=None, derandomize=seed is None)
    settings.load_profile("mlxpaged")
    if seed is not None:
        config.option.hypothesis_seed = seed
    for mark in ("more", "real"):
        if config.getoption(mark):
            config.option.markexpr = config.option.markexpr.replace(f" and not {mark}", "")
    stay_on_a_core()


def pytest_report_header(config: pytest.Config) -> str | None:
    return config.option.seed and f"seed: {config.option.seed}"


@pytest.hookimpl(tryfirst=True)  # then pytest groups tests by their fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order in a file is the same if only this file runs."""
    rotate(items)
    sample(items)
    if config.option.seed is None:
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    shuffled = [(path.relative_to(config.rootpath).as_posix(), tests) for path, tests in files.items()]
    random.Random(config.option.seed).shuffle(shuffled)
    for name, tests in shuffled:
        random.Random(f"{config.option.seed} {name}").shuffle(tests)
    items[:] = [item for _, tests in shuffled for item in tests]


def rotate(items: list[pytest.Item]) -> None:
    """Of a test marked `rotated`, as many combinations run by default as its longest list of parameters has values: the
    first values together, then the second ones; a shorter list begins again. The others get the mark that is named."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        marks = marks_of(item)
        if "rotated" in marks and marks.isdisjoint(NOT_BY_DEFAULT):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for tests in grids.values():
        combinations = [parameters_of(test) for test in tests]
        lists = [list(dict.fromkeys(values)) for values in zip(*combinations, strict=True)]
        quick = {tuple(each[i % len(each)] for each in lists) for i in range(max(map(len, lists)))}
        for test, combination in zip(tests, combinations, strict=True):
            mark = test.get_closest_marker("rotated")
            if combination not in quick and mark is not None:
                test.add_marker(mark.args[0])


def sample(items: list[pytest.Item]) -> None:
    """Of each test in the folders SAMPLED, the first parameters run by default. The others get the mark `more`."""
    seen = set()
    for item in items:
        test, _, parameters = item.nodeid.partition("[")
        if parameters and test.split("/")[-2] in SAMPLED and marks_of(item).isdisjoint(NOT_BY_DEFAULT):
            if test in seen:
                item.add_marker("more")
            seen.add(test)


def marks_of(item: pytest.Item) -> set[str]:
    """Names. There are 20,000 tests in each process."""
    return {mark.name for mark in item.iter_markers()}


def parameters_of(test: Any) -> tuple[str, ...]:
    """The values of each list of parameters as a text. Names that are listed together have one value."""
    values = dict(test.callspec.params)
    lists = [mark.args[0] for mark in test.iter_markers("parametrize")]
    names = [[name.strip() for name in each.split(",")] if isinstance(each, str) else each for each in lists]
    together = [repr([values.pop(name) for name in each]) for each in names]
    return (*together, *map(repr, values.values()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test with a long id fails: pytest puts it into the environment, and with 128 kB there no process starts."""
    if len(item.nodeid) > MAX_ID:
        pytest.fail(f"the id of this test has {len(item.nodeid):,} characters; the limit is {MAX_ID:,}", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    failed = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, ())]
    seed = config.option.seed
    for node in dict.fromkeys(failed):
        again = f"--seed {seed} {shlex.quote(node.partition('::')[0])}" if seed else shlex.quote(node)
        terminalreporter.write_line(f"again: .venv/bin/python -m pytest --more {again}")


def pytest_xdist_auto_num_workers() -> int:
    """Twice as many workers as cores: a test often waits for a process, or for the end of a server."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 2 * cores


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """The workers start at the same moment. Each would compile all test modules and what they import: 18 s of CPU."""
    for argument in config.args:
        path = config.rootpath / argument.partition("::")[0]
        for file in [path] if path.is_file() else sorted(path.rglob("test_*.py")):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # the workers report it
                import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


def stay_on_a_core() -> None:
    """On Linux, each worker stays on one core if there are not fewer workers than cores: the threads of a test's client
    and server wait for each other, and on two cores they would wake each other up all the time."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= len(cores):
            os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_collection_finish(session: pytest.Session) -> None:
    """The objects of the libraries and of 7,000 tests are no garbage. Full collections need not look at them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_measured() -> Iterator[None]:
    """On a Mac neither: only tests of timings time, and none writes to the user's cache. To time rows takes each engine
    0.4 s at its start, and steps would depend on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "can_measure", lambda: False)
        patch.setattr(builder, "time_rows", lambda *_: None)
        yield


TIME_ROWS = builder.time_rows


@pytest.fixture(scope="module")
def rows_are_timed() -> Iterator[None]:
    """Engines time rows at their start after all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "time_rows", TIME_ROWS)
        yield


WARM_UP = self_check.warm_up


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_warmed_up() -> Iterator[None]:
    """An engine of a test that asks for the Metal backend compiles a kernel when it meets it: the warm-up of a shape
    takes the interpreter 0.3 to 0.8 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_check, "warm_up", lambda *_: None)
        yield


@pytest.fixture
def warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines warm up after all."""
    monkeypatch.setattr(self_check, "warm_up", WARM_UP)


@pytest.fixture(scope="session", autouse=True)
def _enough_memory() -> Iterator[None]:
    """What else runs on the machine does not change the pools of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_pressure, "PSI", Path("/no/pressure"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_drafts_by_time() -> Iterator[None]:
    """Whether a step verifies draft tokens depends on the machine. Tests of drafts decide it themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_budget, "draft_lengths", lambda contexts, *_: [0] * len(contexts))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers of tests speak plain HTTP. To load the system's certificates takes 30 ms for each official client."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("no-certificates")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands neither read nor write files of the user who runs the tests, such as the configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "OLLAMA_MODELS"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """All work that can be split among CPU streams is split, however small it is and however few the cores are."""
    monkeypatch.setattr(streams, "HANDOFF", 1e-12)
    monkeypatch.setattr(streams, "cores", lambda: 3)


@pytest.fixture
def small_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlxpaged doctor` measures next to nothing."""
    from mlxpaged.cli.doctor import command

    sizes = Sizes(
        queries=(1, 4),
        keys=(40,),
        batches=(1, 2),
        prompt_tokens=5,
        answer_tokens=4,
        prefill_tokens=34,
        long_prefill_tokens=40,
    )
    monkeypatch.setattr(command, "SIZES", sizes)
    monkeypatch.setattr(tuner, "REPETITIONS", 1)
    monkeypatch.setattr(tuner, "MAX_CALLS", 1)


@pytest.fixture(scope="session")
def demo_server() -> Iterator[RunningServer]:
    """The demo model with the default settings, but a small pool."""
    with running_server(EngineConfig(kv_cache_bytes=64_000_000)) as server:
        yield server
