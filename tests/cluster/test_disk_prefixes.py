"""Prefixes on the disks of several ranks: each has its share, and what one cannot read is read by none."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.prefill_budget import PrefillLimits
from mlxpaged.models.features import Feature
from mlxpaged.parts.disk import disk_tier
from mlxpaged.parts.disk.disk_store import DiskStore
from mlxpaged.parts.disk.disk_tier import NO_TIER
from tests.cluster.ranks import Setup, no_fault, play, play_alone
from tests.cluster.servers import cluster_of
from tests.models.architectures import QWEN3_5, linear_attention, make_architecture, nested
from tests.support import wait_until

pytestmark = pytest.mark.cluster

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": HEADS,
    "gpt_oss": HEADS,
    "qwen3_5": nested(model_type="qwen3_5_text", **QWEN3_5 | linear_attention(heads=4) | {"num_hidden_layers": 2}),
}
each_kind = pytest.mark.parametrize("stored", KINDS, indirect=True)
hybrid = pytest.mark.parametrize("stored", ["qwen3_5"], indirect=True)
SIZE, NUM_BLOCKS = 8, 8
"""Tokens of a block, and whole blocks of a prompt."""


@dataclass
class Outcome:
    """tokens: of each answer. cached: tokens of its prompt that were not computed. The rest is of rank 0's tier."""

    tokens: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    loaded: int = 0
    stored: int = 0
    stopped: str = ""
    reason: str = ""


def prompt_of(number: int) -> list[int]:
    return random.Random(number).choices(range(5, 200), k=SIZE * NUM_BLOCKS + 3)


def answer(core: EngineCore, outcome: Outcome, prompts: list[list[int]]) -> None:
    """Answer them one after the other, beside a stream if they are several."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    if len(prompts) > 1:
        core.add(Request("stream", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40), time.monotonic()))
        core.step()
    for i, prompt in enumerate(prompts):
        core.add(Request(str(i), prompt, params, time.monotonic()))
    last = {}
    while core.has_work():
        for output in core.step():
            assert output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            last[output.request_id] = output.num_cached_tokens
    for i in range(len(prompts)):
        outcome.tokens.append(tokens[str(i)])
        outcome.cached.append(last[str(i)])


@dataclass(frozen=True)
class Life:
    """What a server does: it answers the prompts so many times, and ends. is_emptied: before the last time, it stores
    all and empties its memory. prepare: called first."""

    numbers: list[int]
    rounds: int = 1
    patience: float = 60.0
    is_emptied: bool = False
    prepare: Callable[[], None] = no_fault

    def __call__(self, core: EngineCore) -> Outcome:
        outcome = Outcome()
        self.prepare()
        costs = mock.patch.object(PrefillLimits, "seconds_roughly", lambda _, start, tokens: tokens / 10)
        with costs, mock.patch.object(disk_tier, "PATIENCE_SECONDS", self.patience):
            for i in range(self.rounds):
                if self.is_emptied and i == self.rounds - 1:
                    core.keep_prefixes()
                    core.scheduler.clear_cache()
                answer(core, outcome, [prompt_of(number) for number in self.numbers])
            core.abort_all("end")
            core.keep_prefixes()
        tier = core.stats().of(NO_TIER)
        outcome.loaded, outcome.stored = tier.blocks_loaded_total, tier.blocks_stored_total
        outcome.stopped, outcome.reason = tier.store.stopped, core.missing[Feature.DISK_PREFIXES]
        core.close()
        return outcome


@dataclass
class Case:
    """One model, whose ranks have stored three prompts. expected: what it answers on one rank without a tier."""

    path: Path
    directory: Path
    expected: list[list[int]]

    def setup(self, directory: Path | None, fault: Callable[[], None] = no_fault) -> Setup:
        options = {"block_size": SIZE, "max_num_seqs": 4, "prefix_cache_dir": directory}
        return Setup(self.path, num_blocks=200, options=options, fault=fault)

    def play(self, directory: Path, count: int = 2, fault: Callable[[], None] = no_fault, **options: Any) -> Outcome:
        """A server on a directory, whose answers are checked."""
        life = Life(**{"numbers": [0, 1, 2], **options})
        got: Outcome = play(count, self.setup(directory, fault), life)
        for i, tokens in enumerate(got.tokens):
            assert tokens == self.expected[life.numbers[i % len(life.numbers)]]
        return got


@pytest.fixture(scope="module")
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    case = Case(make_architecture(folder / "m", kind, **KINDS[kind]), folder / "prefixes", [])
    case.expected = play_alone(case.setup(None), Life([0, 1, 2, 3])).tokens
    assert case.play(case.directory).stored > 0
    return case


@pytest.fixture
def directory(stored: Case, tmp_path: Path) -> Path:
    """What the ranks have stored, to be damaged."""
    return Path(shutil.copytree(stored.directory, tmp_path / "prefixes"))


@each_kind
def test_all_ranks_load_their_shares_after_a_restart(stored: Case, directory: Path) -> None:
    sizes = [sum(each.stat().st_size for each in path.glob("*.segment")) for path in sorted(directory.iterdir())]
    assert [path.name for path in sorted(directory.iterdir())] == ["rank-0-of-2", "rank-1-of-2"]
    assert sizes[0] == sizes[1] > 0
    alone = stored.play(directory, numbers=[1])
    assert alone.cached == [SIZE * NUM_BLOCKS]
    assert alone.loaded > 0
    beside = stored.play(directory)
    assert beside.cached == [SIZE * NUM_BLOCKS] * 3
    assert beside.stored == 0


def overlap_steps() -> None:
    ModelRunner.overlaps = True  # type: ignore[assignment, method-assign]


@hybrid
def test_ranks_store_and_load_beside_steps_in_flight(stored: Case, directory: Path) -> None:
    """The last prompt is new, and is stored."""
    numbers, overlapped = [0, 1, 2, 3], {"fault": overlap_steps, "prepare": overlap_steps}
    got = stored.play(directory, numbers=numbers, **overlapped)
    assert got.cached == [*[SIZE * NUM_BLOCKS] * 3, 0]
    assert stored.play(directory, numbers=numbers, **overlapped).cached == [SIZE * NUM_BLOCKS] * 4


@each_kind
def test_what_is_damaged_on_one_rank_is_computed_on_all_and_stored_again(stored: Case, directory: Path) -> None:
    """A byte in the middle of rank 1's file, so that some of a prompt's blocks are lost."""
    [path] = (directory / "rank-1-of-2").glob("*.segment")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    damaged = stored.play(directory)
    assert min(damaged.cached) < SIZE * NUM_BLOCKS
    assert damaged.loaded > 0
    assert stored.play(directory).cached == [SIZE * NUM_BLOCKS] * 3


@hybrid
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_does_not_have_is_computed_on_all_and_stored_again(
    stored: Case, directory: Path, rank: int
) -> None:
    shutil.rmtree(directory / f"rank-{rank}-of-2")
    [other] = (directory / f"rank-{1 - rank}-of-2").glob("*.segment")
    before = other.stat().st_size
    lost = stored.play(directory)
    assert lost.cached == [0] * 3
    assert lost.loaded == 0
    assert stored.play(directory).cached == [SIZE * NUM_BLOCKS] * 3
    assert sum(path.stat().st_size for path in other.parent.glob("*.segment")) == before, "it is not written again"


@hybrid
def test_the_share_of_another_rank_is_not_found(stored: Case, directory: Path) -> None:
    for name, other in (("rank-0-of-2", "x"), ("rank-1-of-2", "rank-0-of-2"), ("x", "rank-1-of-2")):
        (directory / name).rename(directory / other)
    assert stored.play(directory).loaded == 0


@hybrid
def test_another_number_of_ranks_finds_nothing(stored: Case, directory: Path) -> None:
    for number in range(4):
        shutil.copytree(directory / f"rank-{number % 2}-of-2", directory / f"rank-{number}-of-4")
    assert stored.play(directory, count=4).loaded == 0


def read_slowly() -> None:
    read = DiskStore.read

    def slow(store: DiskStore, wanted: Any) -> Any:
        found, later = read(store, wanted), Future[Any]()
        threading.Timer(0.3, lambda: later.set_result(found.result())).start()
        return later

    DiskStore.read = slow  # type: ignore[method-assign]


def read_nothing() -> None:
    DiskStore.read = lambda store, wanted: Future()  # type: ignore[method-assign]


@hybrid
def test_ranks_wait_for_a_slow_one(stored: Case, directory: Path) -> None:
    assert stored.play(directory, fault=read_slowly).cached == [SIZE * NUM_BLOCKS] * 3


@hybrid
def test_a_rank_whose_disk_does_not_answer_keeps_no_request_for_long(stored: Case, directory: Path) -> None:
    got = stored.play(directory, fault=read_nothing, patience=0.0)
    assert (got.cached, got.loaded) == ([0] * 3, 0)


def fill_the_disk() -> None:
    real = os.open

    def full(path: Any, flags: int, *rest: Any) -> int:
        if str(path).endswith(".segment") and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *rest)

    os.open = full  # type: ignore[assignment]


@hybrid
def test_if_the_disk_of_one_rank_is_full_none_stores_more(stored: Case, tmp_path: Path) -> None:
    """Rank 0 learns of it when all is stored, or when it would be read."""
    got = stored.play(tmp_path / "prefixes", rounds=2, is_emptied=True, fault=fill_the_disk)
    assert got.cached == [0] * 6
    assert got.loaded == 0
    assert got.stopped == "another rank stores nothing more; its log says why"
    assert got.stored > 0


@hybrid
def test_if_one_rank_cannot_use_its_directory_none_stores_prefixes(stored: Case, tmp_path: Path) -> None:
    directory = tmp_path / "prefixes"
    directory.mkdir()
    (directory / "rank-1-of-2").write_text("a file")
    got = stored.play(directory)
    assert got.reason == "another rank cannot use its directory; its log says why"
    assert got.stored == 0


def test_a_server_finds_what_its_ranks_have_stored_after_an_unload_and_after_a_restart(tmp_path: Path) -> None:
    directory = tmp_path / "prefixes"
    prompt = "Once upon a time, there was a little cat. " * 12

    def ask(url: str) -> tuple[str, int]:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=180, trust_env=False).json()
        cached = found["usage"].get("prompt_tokens_details") or {"cached_tokens": 0}
        return found["choices"][0]["text"], cached["cached_tokens"]

    flags = ["--prefix-cache-dir", str(directory), "--prefix-cache-disk", "10MB"]
    with cluster_of(tmp_path / "one", *flags) as cluster:
        assert re.search(rf"on disk +0.0 MB of prefixes in {directory}, up to 10.0 MB\n", cluster.command.stdout)
        text, _ = ask(cluster.url)
        again, cached = ask(cluster.url)
        assert again == text
        assert cached >= 32
        unloaded = httpx.post(f"{cluster.url}/v1/models/demo/unload", timeout=60, trust_env=False)
        assert unloaded.status_code == 200, unloaded.text
        wait_until(lambda: not cluster.ranks(), 60)
        assert ask(cluster.url) == (text, cached)
        cluster.command.process.send_signal(signal.SIGTERM)
        assert cluster.command.wait_end() == 0
    with cluster_of(tmp_path / "two", *flags) as cluster:
        assert ask(cluster.url) == (text, cached)
        status = httpx.get(f"{cluster.url}/v1/status", timeout=30, trust_env=False).json()
        assert status["prefix_cache_disk"]["loaded_blocks"] == cached // 32
        assert status["prefix_cache_disk"]["directory"] == str(directory / "rank-0-of-2")
        cluster.command.process.send_signal(signal.SIGTERM)
        assert cluster.command.wait_end() == 0
        assert "Traceback" not in cluster.command.stderr
