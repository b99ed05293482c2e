"""Prefixes on a disk: the same answers after a restart, whatever becomes of the files; work that is not done twice."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.row_times import time_rows
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.prefill_budget import PrefillLimits
from mlxpaged.engine import builder, sizes
from mlxpaged.engine.builder import build_engine, load_core
from mlxpaged.engine.engine_thread import LoadCancelled
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.features import Feature
from mlxpaged.models.fingerprint import fingerprint
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from mlxpaged.parts.disk import disk_tier, disk_writer, stored_prefixes
from mlxpaged.parts.disk.disk_store import DiskStore
from mlxpaged.parts.disk.disk_tier import NO_TIER, DiskTier
from mlxpaged.progress import Progress
from mlxpaged.vision.image import PromptImage
from tests.engine.helpers import being_read
from tests.engine.seeing import expected_answer, image, load_seeing, shown
from tests.models.architectures import make_architecture
from tests.support import make_adapter, make_tiny_model, poison_new_blocks

pytestmark = pytest.mark.usefixtures("known_costs")


Tokens = list[int]
MakeCore = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def served(model: Path) -> ServedModel:
    return load_model(str(model))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "prefixes"


@pytest.fixture
def make_core(served: ServedModel, directory: Path) -> Iterator[MakeCore]:
    """Makes engines on one directory. All that are not closed are closed at the end."""
    made: list[EngineCore] = []

    def make(blocks: int = 100, model: ServedModel = served, **options: Any) -> EngineCore:
        sizes = {"kv_cache_bytes": blocks * 32 * bytes_per_token(model.layers), "prefix_cache_dir": directory}
        core = build_engine(EngineConfig(**(sizes | {"max_step_ms": 0} | options)), model)
        poison_new_blocks(core)
        made.append(core)
        return core

    yield make
    for core in made:
        if core.part(DiskTier) is not None and directory.absolute() in disk_tier.STORES:
            core.close()


def prompt_of(number: int, length: int = 200) -> Tokens:
    return random.Random(number).choices(range(5, 200), k=length)


def add(core: EngineCore, name: str, prompt: Tokens, max_tokens: int = 8, **fields: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    core.add(Request(name, prompt, params, time.monotonic(), **fields))


def run(core: EngineCore) -> dict[str, Tokens]:
    """The tokens of all requests, to their ends."""
    return {name: [token for each in of_one for token in each.token_ids] for name, of_one in outputs(core).items()}


def outputs(core: EngineCore) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    while core.has_work():
        for output in core.step():
            assert output.error is None, output.error
            found.setdefault(output.request_id, []).append(output)
    assert core.scheduler.pool.usage().used == 0
    assert not being_read(core), "a death would now count for them"
    return found


def answer(core: EngineCore, prompt: Tokens, **fields: Any) -> Tokens:
    """The answer, after what was stored before is on the disk."""
    if (tier := core.part(DiskTier)) is not None:
        tier.share.store.flush()
    add(core, "a", prompt, **fields)
    return run(core)["a"]


def answer_twice(core: EngineCore, prompt: Tokens, **fields: Any) -> Tokens:
    """So that its prefix is found again, and worth storing."""
    tokens = answer(core, prompt, **fields)
    assert answer(core, prompt, **fields) == tokens
    return tokens


def end(core: EngineCore) -> None:
    """As the engine thread ends a model."""
    core.abort_all("end")
    core.keep_prefixes()
    core.close()


def num_stored(core: EngineCore) -> int:
    return core.stats().of(NO_TIER).blocks_stored_total


def num_full(core: EngineCore) -> int:
    """Cached blocks, but for those that are not full: the disk has none of these."""
    assert core.scheduler.prefix_cache is not None
    records = [each for each in core.scheduler.prefix_cache if len(each.tokens) < core.scheduler.config.block_size]
    return core.scheduler.pool.usage().cached - sum(len(each.blocks) for each in records)


def num_loaded(core: EngineCore) -> int:
    return core.stats().of(NO_TIER).blocks_loaded_total


@pytest.mark.usefixtures("overlaps")
def test_answers_after_a_restart_are_the_same_and_their_prompts_are_not_computed(
    make_core: MakeCore, served: ServedModel
) -> None:
    for backend in ("cpu", "gather"):
        core = make_core(attention_backend=backend)
        prompts = [prompt_of(i) for i in range(4)]
        expected = [answer_twice(core, prompt) for prompt in prompts]
        end(core)
        core = make_core(attention_backend=backend)
        for i, prompt in enumerate(prompts):
            add(core, str(i), prompt)
        found = outputs(core)
        tokens = [[token for each in found[str(i)] for token in each.token_ids] for i in range(4)]
        assert tokens == expected
        assert [found[str(i)][-1].num_cached_tokens for i in range(4)] == [192] * 4
        assert num_loaded(core) == 4 * 6
        assert num_stored(core) == 0
        end(core)


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_layers_with_windows_go_on_after_a_restart(make_core: MakeCore, tmp_path: Path, backend: str) -> None:
    sizes = {"num_hidden_layers": 6, "sliding_window": 64, "sliding_window_pattern": 6, "query_pre_attn_scalar": 16}
    model = load_model(str(make_tiny_model(tmp_path / "gemma", "gemma3_text", **sizes)))
    core = make_core(400, model, attention_backend=backend)
    prompt = prompt_of(1, 400)
    expected = answer_twice(core, prompt)
    end(core)
    core = make_core(400, model, attention_backend=backend)
    add(core, "a", prompt)
    [found] = outputs(core).values()
    assert [token for each in found for token in each.token_ids] == expected
    assert found[-1].num_cached_tokens == 384
    groups = core.scheduler.config.groups
    assert len(groups) > 1
    assert num_loaded(core) < 12 * len(groups), "of a window, only the last blocks are loaded"


@pytest.mark.usefixtures("overlaps")
def test_prefixes_that_left_the_pool_come_back(make_core: MakeCore) -> None:
    """8 prompts, each twice in a row, through a pool of 16 blocks: 5 blocks each."""
    core = make_core(16, max_num_seqs=2)
    expected = {i: answer_twice(core, prompt_of(i, 132)) for i in range(8)}
    assert num_stored(core) >= 4 * 4
    for i in range(8):
        assert answer(core, prompt_of(i, 132)) == expected[i]
    assert num_loaded(core) >= 4 * 4
    written = core.stats().of(NO_TIER).store.written_today
    assert written <= 1.1 * 8 * 5 * 32 * bytes_per_token(core.served.layers), "nothing is written twice"


def test_what_is_cheap_and_was_not_found_again_is_not_stored(make_core: MakeCore) -> None:
    core = make_core()
    answer(core, prompt_of(1, 400))
    end(core)
    assert num_stored(core) == 0


def test_what_took_long_to_compute_is_stored(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writer, "VALUABLE_SECONDS", 0.3)
    core = make_core()
    answer(core, prompt_of(1, 400))
    answer(core, prompt_of(2, 200))
    end(core)
    assert num_stored(core) == 12


def test_what_is_computed_sooner_than_read_is_computed(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    core, prompt = make_core(), prompt_of(1)
    expected = answer_twice(core, prompt)
    end(core)
    core = make_core()
    monkeypatch.setattr(PrefillLimits, "seconds_roughly", lambda *_: 0.001)
    assert answer(core, prompt) == expected
    assert num_loaded(core) == 0


def test_requests_for_one_prefix_read_it_once(make_core: MakeCore) -> None:
    core, shared = make_core(), prompt_of(1)
    prompts = [shared + prompt_of(10 + i, 50) for i in range(6)]
    expected = [answer(core, prompt) for prompt in prompts]
    end(core)
    core = make_core()
    for i, prompt in enumerate(prompts):
        add(core, str(i), prompt)
    assert core.stats().of(NO_TIER).loading == 6
    assert run(core) == {str(i): tokens for i, tokens in enumerate(expected)}
    assert num_loaded(core) == 6


def test_a_fork_waits_with_its_parent_for_their_prefix(make_core: MakeCore) -> None:
    core, prompt = make_core(), prompt_of(1)
    expected = answer_twice(core, prompt)
    end(core)
    core = make_core()
    add(core, "parent", prompt)
    add(core, "fork", prompt, fork_of="parent")
    assert run(core) == {"parent": expected, "fork": expected}
    assert num_loaded(core) == 6


@pytest.mark.usefixtures("overlaps")
def test_a_request_that_ends_while_its_prefix_is_loaded_leaves_nothing(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_writer, "PIECE_BYTES", 1)
    core, prompt = make_core(), prompt_of(1)
    expected = answer_twice(core, prompt)
    end(core)
    core = make_core()
    add(core, "other", [5, 6, 7])
    add(core, "ends", prompt)
    core.step()
    assert core.stats().of(NO_TIER).loading == 1
    core.abort("ends")
    run(core)
    add(core, "goes on", prompt)
    assert run(core) == {"goes on": expected}


@pytest.mark.usefixtures("overlaps")
def test_a_running_request_waits_for_one_piece_at_a_time(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    core, prompt = make_core(), prompt_of(1, 400)
    monkeypatch.setattr(disk_writer, "PIECE_BYTES", 2 * 32 * bytes_per_token(core.served.layers))
    answer_twice(core, prompt)
    end(core)
    core = make_core()
    add(core, "running", [5, 6, 7])
    core.step()
    add(core, "loads", prompt)
    before, steps = num_loaded(core), 0
    while core.stats().of(NO_TIER).loading and core.scheduler.running:
        core.step()
        assert num_loaded(core) - before <= 2
        before, steps = num_loaded(core), steps + 1
    assert steps > 3
    run(core)


def test_a_disk_that_does_not_answer_keeps_no_request_for_long(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core, prompt = make_core(), prompt_of(1)
    expected = answer_twice(core, prompt)
    end(core)
    monkeypatch.setattr(disk_tier, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(DiskStore, "read", lambda *_: Future())
    core = make_core()
    for name in ("one", "two"):
        add(core, name, prompt)
    assert run(core) == {"one": expected, "two": expected}
    assert caplog.text.count("the disk is too slow") == 1
    assert answer(core, prompt_of(2)) == answer(core, prompt_of(2))


@pytest.mark.parametrize("is_running", [True, False])
def test_a_prompt_that_is_loaded_in_part_takes_no_room_that_another_request_needs(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    """In a pool of 12 blocks, of which the load has three: the other request has eight and needs a tenth, or waits for
    eleven. The disk does not go on."""
    core, prompt = make_core(), prompt_of(1)
    expected = answer_twice(core, prompt)
    end(core)
    monkeypatch.setattr(disk_writer, "PIECE_BYTES", 1)
    read, calls = DiskStore.read, itertools.count()
    monkeypatch.setattr(DiskStore, "read", lambda *given: read(*given) if next(calls) < 3 else Future())
    core = make_core(12)
    if is_running:
        add(core, "other", prompt_of(2, 250), max_tokens=60)
        core.step()
    add(core, "loads", prompt)
    while num_loaded(core) < 3:
        core.step()
    if not is_running:
        add(core, "other", prompt_of(2, 340))
    assert run(core)["loads"] == expected


def test_a_prefix_is_loaded_while_the_pool_grows_for_another_request(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "START_TOKENS", 64)
    core, prompt = make_core(), prompt_of(1)
    expected = answer_twice(core, prompt)
    end(core)
    core = make_core()
    add(core, "other", prompt_of(2, 300))
    add(core, "loads", prompt)
    assert run(core)["loads"] == expected
    assert num_loaded(core) == 6


def damaged(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        del content[rng.randrange(len(content)) :]
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def test_damaged_files_change_no_answer_of_the_next_server(make_core: MakeCore, directory: Path) -> None:
    core, prompts = make_core(), [prompt_of(i) for i in range(2)]
    expected = [answer_twice(core, prompt) for prompt in prompts]
    rng, loaded = random.Random(1), 0
    for _ in range(4):
        end(core)
        damaged(rng.choice([path for path in sorted(directory.iterdir()) if path.stat().st_size]), rng)
        core = make_core()
        assert [answer_twice(core, prompt) for prompt in prompts] == expected  # what was lost is stored again
        loaded += num_loaded(core)
    assert loaded > 4 * 4


def test_files_that_are_damaged_while_the_engine_runs_change_no_answer(make_core: MakeCore, directory: Path) -> None:
    core, prompt = make_core(attention_backend="cpu"), prompt_of(1)
    expected = answer_twice(core, prompt)
    end(core)
    rng = random.Random(1)
    [path] = directory.glob("*.segment")
    whole, partly = path.read_bytes(), 0
    for _ in range(3):
        core = make_core(attention_backend="cpu")
        for _ in range(10):
            content = bytearray(whole)
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
            core.scheduler.clear_cache()
            before = num_loaded(core)
            assert answer(core, prompt) == expected
            partly += 0 < num_loaded(core) - before < 6
        core.close()
        path.write_bytes(whole)
    assert partly >= 3, "what comes before the damage is loaded"


def test_another_model_of_the_same_name_finds_nothing(make_core: MakeCore, served: ServedModel, tmp_path: Path) -> None:
    core, prompt = make_core(), prompt_of(1)
    answer_twice(core, prompt)
    end(core)
    other = load_model(str(make_tiny_model(tmp_path / "other", "llama", seed=1)))
    core = make_core(model=dataclasses.replace(other, name=served.name))
    expected = build_engine(EngineConfig(kv_cache_bytes=10**6), other)
    assert answer(core, prompt) == answer(expected, prompt)
    assert num_loaded(core) == 0


def test_a_model_has_a_fingerprint_of_its_weights_and_its_configuration(model: Path, tmp_path: Path) -> None:
    def changed(name: str, old: bytes, new: bytes) -> str:
        path = tmp_path / name
        make_tiny_model(path, "llama")
        file = path / name
        file.write_bytes(file.read_bytes().replace(old, new))
        return fingerprint(path)

    assert fingerprint(make_tiny_model(tmp_path / "same", "llama")) == fingerprint(model)
    assert changed("config.json", b"10000.0", b"20000.0") != fingerprint(model)
    last = (model / "model.safetensors").read_bytes()[-8:]
    assert changed("model.safetensors", last, last[:-1] + bytes([last[-1] ^ 1])) != fingerprint(model)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / ("ab" * 32)).write_bytes(b"not read")
    snapshot = tmp_path / "snapshot"
    make_tiny_model(snapshot, "llama")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(blobs / ("ab" * 32))
    linked = fingerprint(snapshot)
    (blobs / ("ab" * 32)).write_bytes(b"still not read")
    assert fingerprint(snapshot) == linked


def test_salts_and_adapters_share_no_prefix(make_core: MakeCore, model: Path, tmp_path: Path) -> None:
    adapter = AdapterPath("x", make_adapter(model, tmp_path / "x", 1))
    with_adapter = load_model(str(model), LoadOptions(adapters=[adapter]))
    kinds: list[dict[str, Any]] = [{}, {"adapter": "x"}, {"cache_salt": ("s",)}, {"cache_salt": ("t",)}]
    core, prompt = make_core(model=with_adapter), prompt_of(1)
    expected = []
    for kind in kinds[:3]:
        expected.append(answer_twice(core, prompt, **kind))
    end(core)
    core = make_core(model=with_adapter)
    for i, kind in enumerate(kinds[:3]):
        assert answer(core, prompt, **kind) == expected[i]
        assert num_loaded(core) == 6 * (i + 1)
    answer(core, prompt, **kinds[3])
    assert num_loaded(core) == 18


def test_models_of_a_process_share_the_store(make_core: MakeCore, directory: Path) -> None:
    one, two, prompt = make_core(), make_core(), prompt_of(1)
    expected = answer_twice(one, prompt)
    end(one)
    assert disk_tier.STORES[directory.absolute()][0].flush()
    assert answer(two, prompt) == expected
    assert num_loaded(two) == 6
    end(two)
    DiskStore(directory, 1000, 1000).close()


def test_a_load_that_is_cancelled_leaves_the_directory_to_another_server(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancel(progress: Progress) -> None:
        if directory.exists():
            raise LoadCancelled

    monkeypatch.setattr(builder, "time_rows", time_rows)
    config = EngineConfig(model=str(model), kv_cache_bytes=1_000_000, prefix_cache_dir=directory)
    with pytest.raises(LoadCancelled):
        load_core(config, time.monotonic, cancel)
    DiskStore(directory, 1000, 1000).close()


def test_an_engine_serves_without_a_directory_that_another_server_uses(
    make_core: MakeCore, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = DiskStore(directory, 1000, 1000)
    core = make_core()
    assert "another server uses" in core.missing[Feature.DISK_PREFIXES]
    assert "another server uses" in caplog.text
    assert answer(core, prompt_of(1)) == answer(core, prompt_of(1))
    end(core)
    other.close()


def test_a_full_disk_changes_no_answer(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(10, max_num_seqs=2)
    expected = {i: answer(core, prompt_of(i, 100)) for i in range(4)}
    real = os.open

    def full(path: Any, flags: int, *rest: Any) -> int:
        if str(path).endswith(".segment"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", full)
    for i in range(4):
        assert answer_twice(core, prompt_of(i, 100)) == expected[i]
    assert "No space left" in core.stats().of(NO_TIER).store.stopped
    assert caplog.text.count("no more prefixes are written") == 1


@pytest.mark.usefixtures("overlaps")
def test_blocks_of_steps_that_fail_are_not_stored(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(12, max_num_seqs=4)
    expected = {i: answer(core, prompt_of(i, 100)) for i in range(6)}
    rng, read = random.Random(2), InFlightStep.read

    def sometimes_failing(step: InFlightStep) -> Any:
        hit_before = any(each.num_step_failures for each in core.scheduler.sequences.values())
        if not hit_before and rng.random() < 0.1:
            for kv in core.runner.pools:
                blocks = list(range(kv.num_blocks))
                kv.write_blocks(blocks, *(mx.full(p.shape, float("nan"), p.dtype) for p in kv.read_blocks(blocks)))
            raise DeviceError("injected")
        return read(step)

    monkeypatch.setattr(InFlightStep, "read", sometimes_failing)
    for _ in range(2):
        for i in range(6):
            assert answer_twice(core, prompt_of(i, 100)) == expected[i]
    end(core)
    monkeypatch.undo()
    core = make_core(12, max_num_seqs=4)
    for i in range(6):
        assert answer(core, prompt_of(i, 100)) == expected[i]


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("error", [DeviceError("injected"), RuntimeError("injected"), MemoryError()])
def test_a_prefix_that_cannot_be_put_into_the_pool_is_computed(make_core: MakeCore, error: Exception) -> None:
    core, prompt = make_core(), prompt_of(1)
    expected = answer_twice(core, prompt)
    end(core)
    core = make_core()
    write_blocks, failures = core.runner.write_blocks, [error]

    def failing(*args: Any) -> None:
        write_blocks(*args)
        if failures:
            raise failures.pop()

    core.runner.write_blocks = failing  # type: ignore[method-assign]
    add(core, "runs", prompt_of(2))
    core.step()
    add(core, "loads", prompt)
    found = run(core)
    assert not failures
    assert found["loads"] == expected
    core.scheduler.clear_cache()
    assert answer(core, prompt_of(2))[-len(found["runs"]) :] == found["runs"]


@pytest.mark.usefixtures("overlaps")
def test_a_pool_that_shrinks_stores_what_it_gives_back(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "START_TOKENS", 64)
    core = make_core()
    prompts = [prompt_of(i, 100) for i in range(4)]
    expected = [answer_twice(core, prompt) for prompt in prompts]
    stored, cached, size = num_stored(core), num_full(core), core.scheduler.pool.num_blocks
    core.give_back()
    run(core)
    given_back = cached - num_full(core)
    assert core.scheduler.pool.num_blocks < size
    assert num_stored(core) - stored == given_back >= 4
    assert [answer(core, prompt) for prompt in prompts] == expected
    assert num_loaded(core) >= given_back


def test_an_emptied_cache_is_empty_on_the_disk_too(make_core: MakeCore) -> None:
    core, prompt = make_core(), prompt_of(1)
    answer_twice(core, prompt)
    end(core)
    core = make_core()
    core.clear_cache()
    answer(core, prompt)
    assert num_loaded(core) == 0


def test_the_tier_needs_a_prefix_cache() -> None:
    with pytest.raises(ValueError, match="--no-prefix-cache"):
        EngineConfig(prefix_cache_dir=Path("x"), prefix_caching=False)


def test_images_are_found_after_a_restart(make_core: MakeCore, tmp_path: Path) -> None:
    """Those of a prefix on the disk are not encoded; one after it is. Another image of this size is not found."""

    def shown_text(seed: int, last: int) -> tuple[Tokens, tuple[PromptImage, ...]]:
        return shown(prompt_of(1, 20), image(seed, 64, 64), prompt_of(2, 60), image(last, 32, 32), prompt_of(3, 5))

    model = make_architecture(tmp_path / "m", "qwen3")
    first = shown_text(1, 2)
    expected = {seeds: expected_answer(model, *shown_text(*seeds), num_tokens=8) for seeds in ((1, 2), (1, 3), (4, 2))}
    served, _ = load_seeing(model)
    before = make_core(model=served)
    assert answer(before, first[0], images=first[1]) == expected[1, 2]
    assert answer(before, first[0], images=first[1]) == expected[1, 2]
    before.keep_prefixes()
    before.close()
    served, tower = load_seeing(model)
    after = make_core(model=served)
    for seeds, calls in (((1, 3), [(1, 32, 32, 3)]), ((4, 2), [(1, 64, 64, 3), (1, 32, 32, 3)])):
        tower.calls.clear()
        tokens, images = shown_text(*seeds)
        assert answer(after, tokens, images=images) == expected[seeds]
        assert tower.calls == calls
    assert after.stats().of(NO_TIER).blocks_loaded_total == 4


def test_features_of_another_version_of_a_library_are_not_found(
    make_core: MakeCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_architecture(tmp_path / "m", "qwen3")
    tokens, images = shown(prompt_of(1, 20), image(1, 64, 64), prompt_of(2, 60))

    def restarted(version: str) -> EngineCore:
        monkeypatch.setattr(stored_prefixes, "library_versions", lambda names: [(name, version) for name in names])
        served, tower = load_seeing(model)
        monkeypatch.setattr(type(tower), "library", "mlx-vlm")
        return make_core(model=served)

    core = restarted("1.0")
    expected = answer_twice(core, tokens, images=images)
    for version, count in (("1.0", 4), ("1.1", 0)):
        end(core)
        core = restarted(version)
        assert answer_twice(core, tokens, images=images) == expected
        assert num_loaded(core) == count
