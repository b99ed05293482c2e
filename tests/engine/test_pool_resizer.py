"""The KV pools grow and shrink while requests run: no answer changes, and no step waits for more than one layer."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import RequestOutput
from mlxpaged.core.scheduling.sequence import FinishReason, Priority
from mlxpaged.parts.memory import pool_resizer
from mlxpaged.parts.memory.growth_wait import GROWTH_SECONDS
from mlxpaged.parts.memory.memory_pressure import MemoryPressure
from mlxpaged.parts.memory.memory_watch import IDLE_SECONDS, POLL_SECONDS
from mlxpaged.parts.memory.pool_resizer import LEAST_SHARE, PRESSURE_SECONDS, PoolResizer
from tests.engine.fuzz import play
from tests.engine.helpers import part_of
from tests.engine.hybrid import Hybrid, TinyModel, assert_balanced, request, run
from tests.metal_on_cpu import Interpreter
from tests.models.architectures import VOCAB_SIZE, make_architecture
from tests.support import make_tiny_model

NORMAL, WARNING, CRITICAL = MemoryPressure
SHARED = [(5 * i) % 190 + 1 for i in range(37)]


class Clock:
    """Seconds that pass when told to, and a little in every look at it."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(
        make_tiny_model(tmp_path_factory.mktemp("m") / "llama", "llama", vocab_size=VOCAB_SIZE, head_dim=32)
    )


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, llama: TinyModel) -> TinyModel:
    path: Path = tmp_path_factory.mktemp("models") / request.param
    if request.param == "llama":
        return llama
    if request.param == "hybrid":
        return Hybrid(path, num_layers=2)
    return TinyModel(make_architecture(path, request.param, sliding_window=5))


@pytest.fixture
def no_cached_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of other tests may be collected at any time. MLX then keeps their buffers."""
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)


def rest(core: EngineCore) -> None:
    """As the engine thread does when no command arrives."""
    core.rest(device_is_idle=True)
    while core.pause() == 0:
        core.rest(device_is_idle=True)


def load(core: EngineCore, clock: Clock, model: TinyModel, count: int = 12, num_tokens: int = 8) -> None:
    """`count` requests and a third as many forks, which leave their parent at once. Some begin alike, and some are of a
    higher class. They come in two halves, with some idle minutes between them."""
    rng, requests = random.Random(3), []
    for i in range(count):
        tail = [rng.randrange(1, 190) for _ in range(rng.randint(1, 12))]
        prompt = (SHARED[: rng.choice((0, 16, 37))] + tail)[:45]
        priority = rng.choice((Priority.NORMAL, Priority.NORMAL, Priority.HIGH))
        requests.append(request(str(i), prompt, num_tokens, priority=priority))
        if i % 3 == 0:
            banned = (model.answer(prompt, 1).tokens[0],)
            requests.append(request(f"{i}-fork", prompt, num_tokens, banned, str(i), priority))
    sizes: list[int] = []
    halves = requests[: len(requests) // 2], requests[len(requests) // 2 :]
    results = []
    for half in halves:
        results.append(run(core, half, lambda _: sizes.append(core.scheduler.pool.num_blocks)))
        for _ in range(5):
            clock.now += IDLE_SECONDS
            rest(core)
    for each, result in [(each, result) for half, result in zip(halves, results, strict=True) for each in half]:
        banned = tuple((each.params.logit_bias or {}).keys())
        right = model.answer(each.prompt_token_ids, num_tokens, banned)
        assert right.equals(result.tokens(each.request_id)), each.request_id
    changes = list(itertools.pairwise(sizes))
    assert any(after > before for before, after in changes)
    assert any(after < before for before, after in changes)
    assert core.stats().scheduler.prefix_hit_tokens_total > 0


@pytest.mark.parametrize(("backend", "copy_bytes"), [("gather", 1), ("cpu", pool_resizer.COPY_BYTES)])
@pytest.mark.rotated("models")
def test_16_requests_get_their_answers_while_the_pool_grows_and_shrinks(
    model: TinyModel, backend: str, copy_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "cpu" and mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("this backend is for a CPU")
    monkeypatch.setattr(pool_resizer, "COPY_BYTES", copy_bytes)
    levels = itertools.cycle([NORMAL] * 4 + [CRITICAL])
    clock = Clock(0.1)
    core = model.engine(
        num_blocks=24 if model.path.name == "gemma3_text" else 14,
        swap_blocks=40,
        start_tokens=16,
        clock=clock,
        pressure=lambda: next(levels),
        attention_backend=backend,
        max_num_batched_tokens=40,
    )
    load(core, clock, model)
    assert core.stats().scheduler.preemptions_total > 0
    assert core.stats().scheduler.blocks_swapped_in_total > 0


def test_the_kernels_find_their_blocks_in_pools_that_grow_and_shrink(llama: TinyModel, metal: Interpreter) -> None:
    """Steps overlap on this backend: the one in flight ends before a pool is made anew."""
    levels = itertools.cycle([NORMAL] * 3 + [CRITICAL])
    clock = Clock(0.1)
    core = llama.engine(
        num_blocks=14,
        swap_blocks=40,
        start_tokens=16,
        clock=clock,
        pressure=lambda: next(levels),
        attention_backend="metal",
        max_num_batched_tokens=60,
    )
    assert core.runner.overlaps
    load(core, clock, llama)
    assert core.stats().scheduler.blocks_swapped_in_total > 0


def disturbed_engine(model: TinyModel, rng: random.Random) -> EngineCore:
    """An engine with little memory at the start, on a machine that is often short of it."""
    return model.engine(
        num_blocks=rng.choice((40, 56) if model.path.name == "gemma3_text" else (28, 40)),
        swap_blocks=rng.choice((0, 8, 60)),
        num_checkpoints=rng.choice((1, 4, 30)),
        start_tokens=rng.choice((1, 30)),
        clock=Clock(0.2),
        pressure=lambda: rng.choice((NORMAL, NORMAL, NORMAL, WARNING, CRITICAL)),
        max_num_seqs=rng.choice((3, 6, 10)),
        max_num_batched_tokens=rng.choice((16, 40, 200)),
        prefix_caching=rng.random() < 0.9,
    )


def test_random_requests_get_their_answers_on_a_machine_that_is_often_short_of_memory(model: TinyModel) -> None:
    play(model, disturbed_engine, 5, 10)


@pytest.mark.models
@pytest.mark.parametrize("seed", range(30))
def test_many_random_requests_get_their_answers_on_such_a_machine(model: TinyModel, seed: int) -> None:
    play(model, disturbed_engine, 100 + seed, 40)


def test_between_two_steps_one_layer_is_copied(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_resizer, "COPY_BYTES", 1)
    core = llama.engine(num_blocks=64, start_tokens=32)
    copied: list[int] = []
    before = [0]
    resize = LayerKVCache.resize

    def noting_resize(pool: LayerKVCache, num_blocks: int) -> None:
        before[0] = mx.get_active_memory()
        mx.reset_peak_memory()
        resize(pool, num_blocks)
        copied.append(mx.get_peak_memory() - before[0] - pool.nbytes)

    monkeypatch.setattr(LayerKVCache, "resize", noting_resize)
    counts: list[int] = []
    run(core, [request(str(i), [i + 1] * 8, 20) for i in range(4)], lambda _: counts.append(len(copied)))
    assert len(copied) >= 2 * len(core.runner.pools)
    assert max(after - before for before, after in itertools.pairwise(counts)) == 1
    assert max(copied) < core.runner.pools[0].nbytes / 4  # beside the new layer, nothing is allocated


def test_a_growth_that_fails_changes_nothing_and_is_tried_again_later(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer cannot be allocated, so the first one is given back. A request that needs the blocks waits."""
    clock, resize, fails = Clock(), LayerKVCache.resize, [True]
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock)
    start = core.runner.kv_cache_bytes

    def failing_resize(pool: LayerKVCache, num_blocks: int) -> None:
        if fails[0] and pool is core.runner.pools[-1] and num_blocks > pool.num_blocks:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        resize(pool, num_blocks)

    monkeypatch.setattr(LayerKVCache, "resize", failing_resize)
    prompt = [(3 * i) % 180 + 1 for i in range(80)]
    core.add(request("long", prompt, 4))
    core.add(request("short", [1, 2, 3], 4))
    outputs = []
    for _ in range(12):
        outputs += core.step()
    assert {output.request_id for output in outputs} == {"short"}
    assert outputs[-1].finish_reason is not None
    assert core.waits_for_memory
    assert core.pause() == POLL_SECONDS
    assert core.runner.kv_cache_bytes == start
    assert core.scheduler.pool.num_blocks == 4
    fails[0] = False
    core.step()
    assert core.waits_for_memory  # it is not tried again at once
    clock.now += 2 * POLL_SECONDS
    tokens = []
    while core.has_work():
        tokens += [token for output in core.step() for token in output.token_ids]
    assert llama.answer(prompt, 4).equals(tokens)
    assert_balanced(core)


def test_the_pool_does_not_grow_into_memory_that_others_use(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [0]
    monkeypatch.setattr("mlxpaged.core.engine.model_runner.unused_memory", lambda: free[0])
    clock = Clock()
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock)
    block = core.runner.kv_cache_bytes // 4
    core.add(request("long", [1] * 60, 4))
    core.step()
    core.step()
    assert core.scheduler.pool.num_blocks == 4
    free[0] = 8 * block
    clock.now += 2.0
    while core.has_work():
        core.step()
    assert 8 <= core.scheduler.pool.num_blocks <= 12
    assert_balanced(core)


@pytest.mark.usefixtures("no_cached_buffers")
def test_a_request_that_waits_for_memory_ends_at_its_deadline(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxpaged.core.engine.model_runner.unused_memory", lambda: 0)
    clock = Clock()
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock)
    core.add(dataclasses.replace(request("long", [1] * 60, 4), arrival_time=0.0, timeout=0.5))
    while not (ended := core.expire()):
        core.step()
        clock.now += core.pause()
    assert core.waits_for_memory
    assert ended[0].finish_reason is FinishReason.TIMEOUT
    assert clock.now == 0.5
    assert core.pause() > IDLE_SECONDS


@pytest.mark.parametrize("is_pressed", [False, True])
def test_a_request_for_which_the_pool_cannot_grow_ends_and_others_do_not(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch, is_pressed: bool
) -> None:
    """Nothing of this server would make room for it. It ends after GROWTH_SECONDS, and later ones are served."""
    if not is_pressed:
        monkeypatch.setattr("mlxpaged.core.engine.model_runner.unused_memory", lambda: 0)
    clock, level = Clock(), WARNING if is_pressed else NORMAL
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock, pressure=lambda: level)
    core.add(request("long", [1] * 60, 4))
    ended = step_until(core, clock, "long")
    assert ended.finish_reason is FinishReason.MEMORY
    assert "it stays at 4 blocks" in (ended.error or "")
    assert GROWTH_SECONDS <= clock.now <= GROWTH_SECONDS + 2 * POLL_SECONDS
    core.add(request("later", [1] * 60, 4))
    clock.now += POLL_SECONDS
    core.add(request("short", [1, 2, 3], 4))
    assert step_until(core, clock, "short").finish_reason is FinishReason.LENGTH
    assert core.requests.by_sequence  # the later one has its own time
    assert step_until(core, clock, "later").finish_reason is FinishReason.MEMORY
    assert_balanced(core)


def test_an_answer_that_outgrows_a_pool_that_cannot_grow_ends(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxpaged.core.engine.model_runner.unused_memory", lambda: 0)
    clock = Clock()
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock)
    core.add(request("answer", [1] * 8, 60))
    ended = step_until(core, clock, "answer")
    assert ended.finish_reason is FinishReason.MEMORY
    assert 20 <= ended.num_output_tokens <= 32
    assert_balanced(core)


def test_a_request_that_outgrows_the_pool_again_waits_as_long_again(llama: TinyModel) -> None:
    clock, level = Clock(), [WARNING]
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock, pressure=lambda: level[0])
    core.add(request("long", [1] * 60, 100))
    while clock.now < GROWTH_SECONDS - 2 * POLL_SECONDS:
        core.step()
        clock.now += POLL_SECONDS
    level[0] = NORMAL
    while core.scheduler.pool.num_blocks == 4:
        core.step()
        clock.now += POLL_SECONDS
    grown_at, level[0] = clock.now, WARNING
    ended = step_until(core, clock, "long")
    assert ended.finish_reason is FinishReason.MEMORY
    assert ended.num_output_tokens > 0
    assert clock.now >= grown_at + GROWTH_SECONDS


def step_until(core: EngineCore, clock: Clock, request_id: str) -> RequestOutput:
    """The last output of a request. Time passes only while the engine waits."""
    while clock.now < 10 * GROWTH_SECONDS:
        for output in core.step():
            if output.request_id == request_id and output.finish_reason is not None:
                return output
        clock.now += core.pause()
    pytest.fail(f"{request_id} does not end")


def test_a_growth_to_less_than_was_wanted_is_not_repeated_at_once(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each growth copies all blocks, so a block more in every step would cost as much as large steps together."""
    clock, cores = Clock(), list[EngineCore]()

    def free() -> int:
        return cores[0].runner.pools[0].nbytes + cores[0].runner.bytes_of(1)

    monkeypatch.setattr("mlxpaged.core.engine.model_runner.unused_memory", free)
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock)
    cores.append(core)
    core.add(request("long", [1] * 60, 4))
    sizes = []
    for _ in range(20):
        core.step()
        clock.now += POLL_SECONDS / 10
        sizes.append(core.scheduler.pool.num_blocks)
    assert sorted(set(sizes)) == [4, 5]
    while core.has_work():
        core.step()
        clock.now += POLL_SECONDS
    assert_balanced(core)


def fill(core: EngineCore) -> int:
    """Use the pool until it has its greatest size. Returns its bytes."""
    run(core, [request(str(i), [(i + j) % 180 + 1 for j in range(100)], 4) for i in range(8)])
    assert core.scheduler.pool.num_blocks == core.stats().scheduler.max_blocks
    return core.runner.kv_cache_bytes


@pytest.mark.usefixtures("no_cached_buffers")
def test_an_idle_pool_is_halved_and_halved_again_down_to_its_size_at_the_start(llama: TinyModel) -> None:
    clock = Clock()
    core = llama.engine(num_blocks=64, start_tokens=64, clock=clock)
    start, full = core.runner.kv_cache_bytes, fill(core)
    sizes = [full]
    for _ in range(5):
        clock.now += IDLE_SECONDS - 1
        rest(core)
        assert core.runner.kv_cache_bytes == sizes[-1]
        clock.now += 1
        rest(core)
        sizes.append(core.runner.kv_cache_bytes)
    assert core.pause() > IDLE_SECONDS  # nothing is left to give back
    assert sizes == [full, full // 2, full // 4, full // 8, start, start]
    result = run(core, [request("next", [3] * 60, 4)])
    assert llama.answer([3] * 60, 4).equals(result.tokens("next"))


def test_an_idle_engine_leaves_freed_buffers_to_another_one_that_works(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, cleared = Clock(), list[float]()
    core = llama.engine(num_blocks=64, start_tokens=512, clock=clock)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(clock.now))
    clock.now += 2 * IDLE_SECONDS
    core.rest(device_is_idle=False)
    assert not cleared
    clock.now += POLL_SECONDS
    core.rest(device_is_idle=True)
    assert cleared


@pytest.mark.parametrize("level", [WARNING, CRITICAL])
def test_half_of_an_idle_pool_is_given_back_at_the_second_poll_and_nothing_is_lost(
    llama: TinyModel, level: MemoryPressure
) -> None:
    """Two polls are two seconds apart at most: the engine thread waits POLL_SECONDS for commands."""
    assert POLL_SECONDS <= 1.0
    clock, now = Clock(), [NORMAL]
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock, pressure=lambda: now[0])
    full = fill(core)
    now[0] = level
    for _ in range(2):
        clock.now += POLL_SECONDS
        rest(core)
    assert core.runner.kv_cache_bytes <= full // 2
    assert core.scheduler.pool.num_blocks == (32 if level is WARNING else 4)
    clock.now += PRESSURE_SECONDS
    rest(core)
    assert core.scheduler.pool.num_blocks == (16 if level is WARNING else 4)
    last = [(7 + j) % 180 + 1 for j in range(100)]
    now[0] = NORMAL
    clock.now += POLL_SECONDS
    result = run(core, [request("again", last, 4)])
    assert llama.answer(last, 4).equals(result.tokens("again"))
    assert core.stats().scheduler.prefix_hit_tokens_total == (99 if level is WARNING else 32)


def test_the_pool_does_not_grow_while_the_system_is_short_of_memory(
    llama: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    clock, level = Clock(), [WARNING]
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock, pressure=lambda: level[0])
    core.add(request("long", [1] * 60, 4))
    for _ in range(5):
        clock.now += POLL_SECONDS
        core.step()
    assert core.scheduler.pool.num_blocks == 4
    assert caplog.text.count("pressure is warning; the KV pool has 4 blocks") == 1  # why the request waits
    level[0] = NORMAL
    clock.now += 2 * POLL_SECONDS
    while core.has_work():
        core.step()
    assert core.scheduler.pool.num_blocks > 4


@pytest.mark.parametrize("is_idle", [False, True])
def test_requests_survive_a_device_that_cannot_copy_blocks_down(
    llama: TinyModel, is_idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is in flight then, so no request is blamed for it."""
    clock, level, failures, copy = Clock(), [NORMAL], [0], LayerKVCache.copy_blocks
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock, pressure=lambda: level[0])
    fill(core)

    def failing_copy(pool: LayerKVCache, pairs: list[tuple[int, int]]) -> None:
        if failures[0] < 2:
            failures[0] += 1
            raise RuntimeError("[METAL] Command buffer execution failed")
        copy(pool, pairs)

    def lose_memory(step: int) -> None:
        level[0] = CRITICAL if step in (3, 4) else NORMAL
        clock.now += POLL_SECONDS

    monkeypatch.setattr(LayerKVCache, "copy_blocks", failing_copy)
    if is_idle:
        lose_memory(3)
        rest(core)
    result = run(core, [request("1", [5] * 30, 8)], lose_memory)
    assert failures[0] > is_idle
    assert llama.answer([5] * 30, 8).equals(result.tokens("1"))


def test_a_growth_ends_when_the_system_becomes_short_of_memory(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_resizer, "COPY_BYTES", 1)  # one layer between two steps
    clock, level = Clock(), [NORMAL]
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock, pressure=lambda: level[0])
    start = core.runner.kv_cache_bytes
    core.add(request("long", [1] * 60, 4))
    core.step()
    core.step()
    assert core.runner.kv_cache_bytes > start
    level[0] = WARNING
    for _ in range(4):
        clock.now += POLL_SECONDS
        core.step()
        assert core.scheduler.pool.num_blocks == 4
    assert core.runner.kv_cache_bytes == start
    level[0] = NORMAL
    clock.now += 2 * POLL_SECONDS
    while core.has_work():
        core.step()
    assert_balanced(core)


def test_a_growth_ends_when_another_model_needs_memory(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_resizer, "COPY_BYTES", 1)  # one layer between two steps
    core = llama.engine(num_blocks=64, start_tokens=32)
    start = core.runner.kv_cache_bytes
    prompt = [(3 * i) % 180 + 1 for i in range(60)]
    core.add(request("long", prompt, 4))
    core.step()
    core.step()
    assert (grown := core.runner.kv_cache_bytes) > start
    assert core.give_back() == grown - start
    assert core.runner.kv_cache_bytes == start
    assert llama.answer(prompt, 4).equals(run(core, []).tokens("long"))


def test_a_pool_that_shrinks_keeps_room_for_the_prompts_that_run(llama: TinyModel) -> None:
    """Otherwise a prompt in its first half would keep its blocks and wait, and others behind it, until the pool may
    grow again."""
    clock, level = Clock(), [NORMAL]
    core = llama.engine(
        num_blocks=64,
        start_tokens=32,
        clock=clock,
        pressure=lambda: level[0],
        max_num_batched_tokens=20,
    )
    fill(core)

    def lose_memory(step: int) -> None:
        level[0] = CRITICAL if step > 1 else NORMAL
        clock.now += POLL_SECONDS
        assert step < 60, core.stats()

    prompt = [(7 * i) % 180 + 1 for i in range(120)]
    result = run(core, [request("long", prompt, 4), request("short", [4, 5, 6], 4)], lose_memory)
    assert core.scheduler.pool.num_blocks < 20
    assert core.stats().scheduler.preemptions_total == 0
    assert llama.answer(prompt, 4).equals(result.tokens("long"))
    assert llama.answer([4, 5, 6], 4).equals(result.tokens("short"))


def test_a_pool_whose_use_falls_slowly_shrinks_in_few_steps(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, level = Clock(), [NORMAL]
    core = llama.engine(num_blocks=96, start_tokens=8, clock=clock, pressure=lambda: level[0])
    start = core.scheduler.pool.num_blocks
    fill(core)
    resizer = part_of(core, PoolResizer)
    shrink, shrinks = resizer.shrink, list[tuple[int, int]]()

    def noting_shrink(num_blocks: int) -> None:
        shrinks.append((core.scheduler.pool.num_blocks, num_blocks))
        shrink(num_blocks)

    def lose_memory(step: int) -> None:
        level[0] = CRITICAL if step > 2 else NORMAL
        clock.now += POLL_SECONDS

    monkeypatch.setattr(resizer, "shrink", noting_shrink)
    requests = [request(str(i), [(3 * i + j) % 180 + 1 for j in range(30)], 6 + 2 * i) for i in range(12)]
    run(core, requests, lose_memory)
    assert len(shrinks) > 1
    for before, after in shrinks:
        assert after == start or before - after >= LEAST_SHARE * before


def test_what_mlx_keeps_of_freed_memory_is_given_back_before_the_free_memory_is_measured(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 1 GiB, of which a Mac says that it is not free."""
    free, clear_cache = [0], mx.clear_cache

    def noting_clear_cache() -> None:
        free[0] = 10**9
        clear_cache()

    monkeypatch.setattr("mlxpaged.core.engine.model_runner.unused_memory", lambda: free[0])
    core = llama.engine(num_blocks=64, start_tokens=32, clock=Clock())
    monkeypatch.setattr(mx, "clear_cache", noting_clear_cache)
    core.add(request("long", [1] * 60, 4))
    for _ in range(3):
        core.step()
    assert core.scheduler.pool.num_blocks > 4


def test_an_idle_engine_with_its_smallest_pool_gives_back_what_mlx_keeps_of_freed_memory(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, kept, level = Clock(), [10**9], [NORMAL]
    core = llama.engine(num_blocks=64, start_tokens=32, clock=clock, pressure=lambda: level[0])
    monkeypatch.setattr(mx, "get_cache_memory", lambda: kept[0])
    monkeypatch.setattr(mx, "clear_cache", lambda: kept.__setitem__(0, 0))
    for _ in range(2):
        clock.now += POLL_SECONDS
        rest(core)
        assert core.pause() == POLL_SECONDS
    assert kept[0]
    level[0] = WARNING
    clock.now += POLL_SECONDS
    rest(core)
    assert not kept[0]
    assert core.pause() > IDLE_SECONDS
    kept[0], level[0] = 10**9, NORMAL
    clock.now += IDLE_SECONDS
    rest(core)
    assert not kept[0]
