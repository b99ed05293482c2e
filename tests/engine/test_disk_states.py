"""Recurrent states on a disk: prompts go on from the stored checkpoints, with the answers of a model that computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.core.blocks.table_rows import UNUSED
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.models.features import Feature
from mlxpaged.parts.disk import disk_share
from mlxpaged.parts.disk.disk_tier import NO_TIER, DiskTier
from tests.engine.helpers import being_read
from tests.engine.hybrid import Hybrid, TinyModel, request, run
from tests.models.architectures import make_architecture

pytestmark = pytest.mark.usefixtures("known_costs")


Tokens = list[int]
MakeCore = Callable[..., EngineCore]
SIZE = 8


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("hybrid") / "model", num_layers=2)


@pytest.fixture
def make_core(hybrid: Hybrid, tmp_path: Path) -> Iterator[MakeCore]:
    """Makes engines on one directory, one after the other."""
    made: list[EngineCore] = []

    def make(model: TinyModel = hybrid, **options: Any) -> EngineCore:
        while made:
            end(made.pop())
        made.append(model.engine(prefix_cache_dir=tmp_path / "prefixes", **options))
        return made[0]

    yield make
    while made:
        end(made.pop())


def end(core: EngineCore) -> None:
    core.abort_all("end")
    core.keep_prefixes()
    core.close()


def prompt_of(number: int, length: int = 60) -> Tokens:
    return random.Random(number).choices(range(5, 200), k=length)


def answer(core: EngineCore, prompt: Tokens, num_tokens: int = 8) -> tuple[Tokens, int]:
    """The answer, after what was stored before is on the disk, and the number of tokens that were not computed."""
    if (tier := core.part(DiskTier)) is not None:
        tier.share.store.flush()
    result = run(core, [request("a", prompt, num_tokens)])
    assert not being_read(core), "a death would now count for them"
    return result.tokens("a"), result.outputs["a"][-1].num_cached_tokens


def check(core: EngineCore, model: TinyModel, prompt: Tokens, num_cached: int | None = None) -> None:
    tokens, cached = answer(core, prompt)
    assert model.answer(prompt, 8).equals(tokens)
    assert num_cached is None or cached == num_cached


def num_loaded(core: EngineCore) -> int:
    return core.stats().of(NO_TIER).blocks_loaded_total


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "mamba2"])
def test_prompts_go_on_from_a_checkpoint_after_a_restart(
    make_core: MakeCore, hybrid: Hybrid, tmp_path: Path, name: str
) -> None:
    """mamba2 has no layer that attends, so its blocks have no bytes."""
    model = hybrid if name == "qwen3_5" else TinyModel(make_architecture(tmp_path / name, name), SIZE)
    core = make_core(model)
    prompts = [prompt_of(1), prompt_of(2), prompt_of(1)[:40] + prompt_of(3, 30)]
    for prompt in prompts:
        check(core, model, prompt)
        check(core, model, prompt, (len(prompt) - 1) // SIZE * SIZE)
    core = make_core(model)
    for prompt in prompts:
        check(core, model, prompt, (len(prompt) - 1) // SIZE * SIZE)
    assert num_loaded(core) == 7 + 7 + 3 + 3, "blocks that two prompts share are loaded once, and a state for each"
    assert core.stats().of(NO_TIER).blocks_stored_total == 0


def test_a_model_with_a_window_in_all_layers_goes_on_from_its_last_blocks_and_a_checkpoint(
    make_core: MakeCore, tmp_path: Path
) -> None:
    """A window has 12 tokens, so a prompt needs its last two blocks and a state. The records of those before have no
    blocks, and go with these."""
    model = TinyModel(make_architecture(tmp_path / "m", "recurrent_gemma"), SIZE)
    core = make_core(model)
    assert None not in core.scheduler.config.groups.windows
    prompts = [prompt_of(1), prompt_of(2), prompt_of(1)[:40] + prompt_of(3, 30)]
    for prompt in prompts:
        for _ in range(2):
            check(core, model, prompt)
    core = make_core(model, num_blocks=40)
    for prompt in prompts:
        check(core, model, prompt, (len(prompt) - 1) // SIZE * SIZE)
    assert num_loaded(core) == 3 * 3
    for number in range(4, 16):
        check(core, model, prompt_of(number, 40))
    cache = core.scheduler.prefix_cache
    assert cache is not None
    parents = {record.parent for record in cache}
    assert all(record in parents or set(record.blocks) != {UNUSED} for record in cache)


def test_a_prompt_that_parts_from_the_stored_one_goes_on_from_the_last_checkpoint_before(
    make_core: MakeCore, hybrid: Hybrid
) -> None:
    core, shared = make_core(), prompt_of(1, 44)
    check(core, hybrid, shared)
    check(core, hybrid, shared + prompt_of(2, 40), 40)
    check(core, hybrid, shared + prompt_of(2, 40), 80)
    core = make_core()
    check(core, hybrid, (shared + prompt_of(2, 40))[:70] + prompt_of(3, 20), 40)


def test_a_checkpoint_that_was_replaced_in_memory_is_loaded_for_the_blocks_that_are_there(
    make_core: MakeCore, hybrid: Hybrid
) -> None:
    core = make_core(num_checkpoints=2)
    for number in range(6):
        for _ in range(2):
            check(core, hybrid, prompt_of(number))
    assert len(core.scheduler.prefix_cache or ()) >= 6 * 8
    for number in range(6):
        check(core, hybrid, prompt_of(number), 56)
    assert num_loaded(core) >= 4
    assert core.stats().of(NO_TIER).blocks_stored_total < 12, "only states have been replaced"


@pytest.mark.usefixtures("overlaps")
def test_any_turns_of_chats_through_a_small_pool_get_the_right_answers(make_core: MakeCore, hybrid: Hybrid) -> None:
    """Blocks leave, checkpoints are replaced, and the server restarts, in any order."""
    rng, loaded = random.Random(7), 0
    chats = [prompt_of(number, 30) for number in range(4)]
    sizes = {"num_blocks": 40, "num_checkpoints": 3, "max_num_seqs": 4}
    core = make_core(**sizes)
    for _ in range(24):
        if rng.random() < 0.15:
            loaded += num_loaded(core)
            core = make_core(**sizes)
        some = rng.sample(range(4), rng.choice((1, 1, 2, 3)))
        result = run(core, [request(str(i), chats[i], 6) for i in some])
        for i in some:
            assert hybrid.answer(chats[i], 6).equals(result.tokens(str(i)))
            if rng.random() < 0.6:
                chats[i] = chats[i] + result.tokens(str(i)) + prompt_of(rng.randrange(99), 9)
            if len(chats[i]) > 120:
                chats[i] = chats[i][:30]
    assert loaded + num_loaded(core) > 12


def test_instead_of_a_damaged_state_the_one_before_is_read(make_core: MakeCore, hybrid: Hybrid, tmp_path: Path) -> None:
    core, shared = make_core(), prompt_of(1, 44)
    whole = shared + prompt_of(2, 40)
    for prompt, cached in ((shared, 0), (whole, 40), (whole, 80)):
        check(core, hybrid, prompt, cached)
    core = make_core()
    [path] = (tmp_path / "prefixes").glob("*.segment")
    content = bytearray(path.read_bytes())
    content[-7] ^= 1  # the states of a model that ends are written after its blocks, the last one at the end
    path.write_bytes(content)
    check(core, hybrid, whole, 40)
    assert core.stats().of(NO_TIER).store.damaged == 1
    check(core, hybrid, whole, 80)


@pytest.mark.usefixtures("overlaps")
def test_a_request_that_ends_while_its_state_is_loaded_leaves_nothing(
    make_core: MakeCore, hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_share, "PIECE_BYTES", 1)
    core, prompt = make_core(Hybrid(hybrid.path.parent / "deep", num_layers=4)), prompt_of(1)
    for _ in range(2):
        answer(core, prompt)
    core = make_core(Hybrid(hybrid.path.parent / "deep", num_layers=4))
    core.add(request("other", [5, 6, 7], 60))
    core.step()
    core.add(request("ends", prompt, 8))
    checkpoints = core.scheduler.blocks.states.checkpoints
    before = checkpoints.num_reserved
    while checkpoints.num_reserved == before:
        core.step()
        assert core.stats().of(NO_TIER).loading == 1
    core.abort("ends")
    run(core, [])
    assert answer(core, prompt)[1] == 56


@pytest.mark.usefixtures("overlaps")
def test_states_of_steps_that_fail_are_not_stored(
    make_core: MakeCore, hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_blocks": 20, "num_checkpoints": 2, "max_num_seqs": 4}
    core = make_core(**sizes)
    rng, read = random.Random(2), InFlightStep.read

    def sometimes_failing(step: InFlightStep) -> Any:
        hit_before = any(each.num_step_failures for each in core.scheduler.sequences.values())
        if not hit_before and rng.random() < 0.04:
            for layer in core.runner.recurrent:
                for checkpoint in range(2):
                    layer.put_checkpoint(
                        checkpoint, iter([mx.full(shape, mx.nan, dtype) for shape, dtype in layer.likes])
                    )
            raise DeviceError("injected")
        return read(step)

    monkeypatch.setattr(InFlightStep, "read", sometimes_failing)
    for number in (*range(4), *range(4)):
        for _ in range(2):
            check(core, hybrid, prompt_of(number))
    monkeypatch.setattr(InFlightStep, "read", read)
    core = make_core(**sizes)
    for number in range(4):
        check(core, hybrid, prompt_of(number))
    assert num_loaded(core) > 0


@pytest.mark.usefixtures("overlaps")
def test_states_of_a_checkpoint_that_is_replaced_in_its_own_step_are_not_stored(
    make_core: MakeCore, hybrid: Hybrid
) -> None:
    """Each prompt comes twice, so it is found again in the step that computes it. With one checkpoint, the next prompt
    takes its place in the same step."""
    core = make_core(num_checkpoints=1)
    prompts = [prompt_of(number) for number in (0, 0, 1, 1, 2, 2)]
    for _ in range(2):
        result = run(core, [request(str(i), prompt, 8) for i, prompt in enumerate(prompts)])
        for i, prompt in enumerate(prompts):
            assert hybrid.answer(prompt, 8).equals(result.tokens(str(i)))
    core = make_core(num_checkpoints=1)
    for prompt in prompts:
        check(core, hybrid, prompt)


def test_without_memory_for_checkpoints_nothing_is_stored(make_core: MakeCore, tmp_path: Path) -> None:
    core = make_core(num_checkpoints=0)
    assert "--state-cache-memory" in core.missing[Feature.DISK_PREFIXES]
    assert not (tmp_path / "prefixes").exists()
