"""Sizes as operators write them, and the number of blocks they give."""

from __future__ import annotations

import dataclasses
import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import psutil
import pytest

from mlxpaged import process_memory
from mlxpaged.core.scheduling.config import MOST_STATES
from mlxpaged.engine import builder, engine_thread, garbage
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.device_memory import CPU_MARGIN, free_device_memory
from mlxpaged.models.errors import ModelNotFoundError, UnsupportedModelError
from mlxpaged.models.layers import bytes_per_token, state_bytes
from mlxpaged.models.loader import LoadOptions, load_embedding_model, load_model
from mlxpaged.models.sources.preflight import Reserved
from mlxpaged.parts.drafting.ngram import BYTES_PER_TOKEN, MOST_TOKENS, index_bytes
from mlxpaged.parts.embeddings.embedder import Embedder
from mlxpaged.parts.memory import fitting as memory
from mlxpaged.parts.memory.fitting import MOST_DRAFT_STATES, drafting_sequences, kv_blocks, swap_slots
from mlxpaged.process_memory import system_free_memory
from tests.support import make_embedding_model, make_tiny_model

LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}


@pytest.fixture
def ten_megabytes_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_device_memory", lambda: 10_000_000)
    monkeypatch.setattr(memory, "default_device_memory", lambda: 5_000_000)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)


def test_fewer_sequences_have_drafts_if_their_states_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_device_memory", lambda: 16_000_000_000)
    assert drafting_sequences(0) == drafting_sequences(1_000_000) == MOST_STATES
    assert drafting_sequences(147 * 2**20) == 1, "0.5 GB for two states of Qwen3.5-27B each"
    assert drafting_sequences(10**9) == 1
    monkeypatch.setattr(memory, "free_device_memory", lambda: 10**12)
    assert drafting_sequences(147 * 2**20) == MOST_DRAFT_STATES // (2 * 147 * 2**20) == 3


@pytest.mark.usefixtures("ten_megabytes_left")
def test_the_operators_size_decides_however_many_blocks_that_is() -> None:
    assert kv_blocks(1000, 5999, blocks_per_sequence=1, max_num_seqs=2) == 5
    assert kv_blocks(1000, 1000, blocks_per_sequence=1, max_num_seqs=2) == 1
    assert kv_blocks(1000, 10_000_000, blocks_per_sequence=1, max_num_seqs=2) == 10_000


@pytest.mark.usefixtures("ten_megabytes_left")
def test_a_size_below_one_block_is_refused_with_both_figures() -> None:
    with pytest.raises(MemoryError, match=r"--kv-cache-memory is 1\.0 MB, but one block takes 2\.0 MB"):
        kv_blocks(2_000_000, 1_000_000, blocks_per_sequence=1, max_num_seqs=10)


@pytest.mark.usefixtures("ten_megabytes_left")
def test_a_size_above_the_free_memory_is_refused_with_both_figures() -> None:
    with pytest.raises(MemoryError, match=r"--kv-cache-memory is 10\.0 GB, but only 0\.0 GB are free"):
        kv_blocks(1000, 10_000_000_000, blocks_per_sequence=1, max_num_seqs=10)


@pytest.mark.usefixtures("ten_megabytes_left")
def test_without_a_size_the_default_share_less_what_a_step_needs_is_taken() -> None:
    assert kv_blocks(1000, None, blocks_per_sequence=10**4, max_num_seqs=10**5) == 5000
    assert kv_blocks(1000, None, blocks_per_sequence=10**4, max_num_seqs=10**5, reserved_bytes=3_000_000) == 2000


@pytest.mark.usefixtures("ten_megabytes_left")
def test_without_a_size_no_more_blocks_are_taken_than_could_be_filled() -> None:
    assert kv_blocks(1000, None, blocks_per_sequence=11, max_num_seqs=7) == 77


@pytest.fixture
def many_gigabytes_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("free_device_memory", "default_device_memory"):
        monkeypatch.setattr(memory, name, lambda: 100 * 2**30)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)


@pytest.mark.usefixtures("many_gigabytes_left")
def test_the_default_pool_of_a_cpu_is_a_gibibyte_however_much_is_free() -> None:
    assert kv_blocks(2**20, None, blocks_per_sequence=128, max_num_seqs=32) == 1024


@pytest.mark.usefixtures("many_gigabytes_left")
def test_the_default_pool_of_a_cpu_holds_one_sequence_of_the_full_context_length() -> None:
    assert kv_blocks(2**20, None, blocks_per_sequence=4096, max_num_seqs=32) == 4096


@pytest.mark.usefixtures("many_gigabytes_left")
def test_the_operator_may_ask_for_more_than_the_default_of_a_cpu() -> None:
    assert kv_blocks(2**20, 8 * 2**30, blocks_per_sequence=128, max_num_seqs=32) == 8192


def test_the_pool_of_a_gpu_is_not_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("free_device_memory", "default_device_memory"):
        monkeypatch.setattr(memory, name, lambda: 100 * 2**30)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert kv_blocks(2**20, None, blocks_per_sequence=4096, max_num_seqs=8) == 8 * 4096


@pytest.mark.usefixtures("ten_megabytes_left")
def test_without_memory_left_the_error_says_how_much_there_is() -> None:
    with pytest.raises(MemoryError, match=r"5\.0 MB are left for KV after the weights"):
        kv_blocks(6_000_000, None, blocks_per_sequence=1, max_num_seqs=10)


@pytest.mark.usefixtures("ten_megabytes_left")
def test_what_is_reserved_for_embeddings_is_not_taken(tmp_path: Path) -> None:
    """The weights of their model are loaded by then, so that the memory that is free is free of them."""
    assert kv_blocks(1000, None, 10**4, 10**5, reserved_bytes=4_000_000) == 1000
    with pytest.raises(MemoryError, match=r"--kv-cache-memory is 0\.0 GB, but only 0\.0 GB are free"):
        kv_blocks(1000, 7_000_000, 10**4, 10**5, reserved_bytes=4_000_000)
    served = load_model("demo")
    model = load_embedding_model(str(make_embedding_model(tmp_path / "m")), None, 8192)
    config = EngineConfig(speculative="off")
    cores = [build_engine(config, served, embedder=embedder) for embedder in (None, Embedder(model, 256))]
    assert model.kv_bytes == 512 * 512  # tokens, and bytes of each: 2 layers, keys and values, 2 heads of 16 float32
    limits = [core.scheduler.config.num_blocks for core in cores]
    lost = model.kv_bytes / (cores[0].runner.kv_cache_bytes / cores[0].scheduler.pool.num_blocks)
    assert limits[0] - limits[1] == pytest.approx(lost, abs=1)
    assert lost > 1


def test_what_indexes_of_drafts_may_take_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tokens that all sequences may have, but no more than the indexes have."""
    served = load_model("demo")
    block = 32 * bytes_per_token(served.layers)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    free = 100 * block + index_bytes(2 * served.max_model_len)
    for name in ("free_device_memory", "default_device_memory"):
        monkeypatch.setattr(memory, name, lambda: free)

    def build(speculative: str) -> int:
        config = EngineConfig(max_num_seqs=2, speculative=speculative)
        return build_engine(config, served).scheduler.config.num_blocks

    assert build("ngram") == 100
    assert build("off") == free // block > 100
    assert index_bytes(10**9) == MOST_TOKENS * BYTES_PER_TOKEN


def test_recurrent_states_are_reserved_before_the_kv_pool_is_sized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error says how much the states take, and which flags make it less."""
    served = load_model(str(make_tiny_model(tmp_path / "m", "lfm2", **LFM2)))
    state, block = state_bytes(served.layers), 32 * bytes_per_token(served.layers)
    assert state == 3 * (2 * 64 * 4)  # layers, and two float32 rows of the hidden size
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    free = 40 * state + 10 * block

    def build(free_bytes: int, **options: Any) -> int:
        monkeypatch.setattr(memory, "free_device_memory", lambda: free_bytes)
        monkeypatch.setattr(memory, "default_device_memory", lambda: free_bytes)
        config = EngineConfig(max_num_seqs=32, state_cache_bytes=8 * state, speculative="off", **options)
        return build_engine(config, served).scheduler.config.num_blocks

    assert build(free) == 10
    assert build(free, kv_cache_bytes=10 * block) == 10
    assert build(free, kv_cache_bytes=11 * block, prefix_caching=False) == 11  # without checkpoints
    taken = rf"states of 32 sequences take {32 * state / 1e6:.1f} MB, and 8 checkpoints take {8 * state / 1e6:.1f} MB: "
    flags = r"lower --max-num-seqs or --state-cache-memory$"
    with pytest.raises(MemoryError, match=r"^the recurrent states do not fit: 0\.1 MB are free; .*" + taken + flags):
        build(40 * state - 1)
    with pytest.raises(MemoryError, match=r"^no KV block fits: only 0\.0 MB are left .*" + taken + flags):
        build(40 * state)
    with pytest.raises(MemoryError, match=r"^--kv-cache-memory is .* GB are free; .*" + taken + flags):
        build(free, kv_cache_bytes=11 * block)


def test_this_machine_has_memory_to_give() -> None:
    assert 2**20 < free_device_memory() < 2**50


def test_the_swap_space_has_as_many_slots_as_fit() -> None:
    assert swap_slots(1000, 5999) == 5
    assert swap_slots(1000, 1000) == 1
    with pytest.raises(MemoryError, match=r"--swap-space is 1\.0 MB, but one KV block takes 2\.0 MB"):
        swap_slots(2_000_000, 1_000_000)


def test_the_engine_limits_freed_memory_before_it_loads_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def load_model(*_: object, **__: object) -> None:
        order.append("load")
        raise ModelNotFoundError("no such model")

    monkeypatch.setattr(engine_thread, "limit_freed_buffers", lambda *_, loading: order.append(f"limit {loading}"))
    monkeypatch.setattr(builder, "load_model", load_model)
    thread = engine_thread.EngineThread()

    def on_end(failure: engine_thread.Failure | None) -> None:
        assert failure is not None
        order.append(failure.reason)
        thread.end()

    thread.load(slot(on_end))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert order[:3] == ["limit True", "load", "no such model"]
    assert set(order[3:]) == {"limit False"}


@pytest.mark.parametrize(("step_bytes", "limit"), [(190_000_000, 190_000_000), (2**31, memory.CACHE_LIMIT)])
def test_mlx_keeps_the_freed_buffers_of_one_step(monkeypatch: pytest.MonkeyPatch, step_bytes: int, limit: int) -> None:
    kept: list[int] = []
    monkeypatch.setattr(mx, "set_cache_limit", kept.append)
    monkeypatch.setattr(builder, "measure_step", lambda *_: step_bytes)
    thread = engine_thread.EngineThread()
    loading = slot(lambda _: thread.end(), EngineConfig(kv_cache_bytes=4_000_000))
    loading.callbacks = dataclasses.replace(loading.callbacks, on_ready=lambda *_: thread.end())
    thread.load(loading)
    thread.run()
    assert kept == [memory.LOAD_CACHE, limit, limit]  # while it loads, while its steps are timed, and then


def slot(
    on_end: Callable[[engine_thread.Failure | None], None], config: EngineConfig | None = None
) -> engine_thread.ModelSlot:
    callbacks = engine_thread.Callbacks(lambda _: None, lambda *_: None, lambda *_: None, on_end)
    config = config or EngineConfig()
    return engine_thread.ModelSlot(config, lambda report: builder.load_core(config, time.monotonic, report), callbacks)


@pytest.mark.parametrize("version", [2, 1])
def test_a_containers_cached_file_pages_count_as_free(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fill every container in time: the weights, logs and swap files that were read or written."""
    _, *names, field = process_memory.CGROUP_MEMORY[2 - version]
    monkeypatch.setattr(process_memory, "CGROUP_MEMORY", ((tmp_path, *names, field),))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**12))
    for name, text in zip((*names, "memory.stat"), ("8000", "7900", f"active_file 5\n{field} 3000\n"), strict=True):
        (tmp_path / name).write_text(text)
    assert system_free_memory() == 3100
    (tmp_path / names[0]).write_text("max")
    assert system_free_memory() == 10**12


@pytest.mark.parametrize("version", [2, 1])
def test_the_limits_of_a_services_own_control_group_and_its_parents_count(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd's MemoryMax= limits a group that the process does not see as the root."""
    _, *names, field = process_memory.CGROUP_MEMORY[2 - version]
    own, group = tmp_path / "cgroup", tmp_path / "system.slice" / "mlxpaged.service"
    own.write_text(f"{'0::' if version == 2 else '4:memory:'}/system.slice/mlxpaged.service\n3:cpu:/elsewhere\n")
    monkeypatch.setattr(process_memory, "CGROUP_MEMORY", ((tmp_path, *names, field),))
    monkeypatch.setattr(process_memory, "OWN_CGROUPS", own)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**12))
    group.mkdir(parents=True)
    for directory, limit in ((group, "9000"), (group.parent, "8500")):
        for name, text in zip((*names, "memory.stat"), (limit, "7000", f"{field} 100\n"), strict=True):
            (directory / name).write_text(text)
    assert system_free_memory() == 1600
    (group / names[0]).write_text("7500")
    assert system_free_memory() == 600


def test_a_model_that_does_not_fit_into_a_container_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights, and the KV cache if its size is configured, with a margin: the kernel would kill the process."""
    path = make_tiny_model(tmp_path / "m", "llama")
    size = (path / "model.safetensors").stat().st_size
    _, *names, field = process_memory.CGROUP_MEMORY[0]
    monkeypatch.setattr(process_memory, "CGROUP_MEMORY", ((tmp_path, *names, field),))
    for name, text in zip((*names, "memory.stat"), (str(size + CPU_MARGIN + 99), "100", f"{field} 0\n"), strict=True):
        (tmp_path / name).write_text(text)
    with pytest.raises(UnsupportedModelError, match=rf"{path} cannot be loaded: its weights take .* GB of memory are"):
        load_model(str(path))
    (tmp_path / names[0]).write_text(str(10 * size + CPU_MARGIN))
    assert load_model(str(path)).weight_bytes > 0
    with pytest.raises(UnsupportedModelError, match=r"--kv-cache-memory 0\.1 GB, but only 0\.0 GB of memory are free"):
        load_model(str(path), LoadOptions(reserved=Reserved(100_000_000)))


def test_a_model_that_was_frozen_after_the_start_is_freed_after_its_end() -> None:
    class Model:
        def __init__(self) -> None:
            self.parts = [self]

    before, model = garbage.freezes(), Model()
    old = weakref.ref(model)
    garbage.freeze()
    after, model = garbage.freezes(), Model()
    young = weakref.ref(model)
    del model
    garbage.free_garbage(after)
    assert young() is None
    assert old() is not None, "frozen objects were looked at"
    garbage.free_garbage(before)
    assert old() is None
    assert gc.get_freeze_count() > 0, "the others are still frozen"
    assert garbage.freezes() == after + 1, "what is left may be garbage of a model that began to load before"
