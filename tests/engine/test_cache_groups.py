"""A model whose layers slide, in the engine: what its blocks hold, and how many sequences fit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import ServedModel, load_model
from tests.engine.helpers import finish
from tests.models.architectures import VOCAB_SIZE, make_architecture
from tests.support import poison_new_blocks

WINDOW, CONTEXT, BLOCK = 128, 2048, 32
SLIDING, FULL = 5, 1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """As Gemma 3: five of six layers slide."""
    path: Path = tmp_path_factory.mktemp("models") / "gemma3"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    layers = {"num_hidden_layers": SLIDING + FULL, "sliding_window": WINDOW, "sliding_window_pattern": SLIDING + FULL}
    make_architecture(path, "gemma3_text", max_position_embeddings=2 * CONTEXT, **sizes, **layers)
    return load_model(str(path))


def make_engine(served: ServedModel, tokens: int, **options: int) -> EngineCore:
    """An engine whose pools take as many bytes as `tokens` tokens of every layer."""
    return build_engine(EngineConfig(kv_cache_bytes=tokens * bytes_per_token(served.layers), **options), served)


def prompt_of(number: int, length: int = CONTEXT) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True), 0.0)


def test_three_times_as_many_long_sequences_fit_and_they_hold_what_their_layers_need(served: ServedModel) -> None:
    """The pool has room for one sequence that keeps the keys of all layers."""
    core = make_engine(served, CONTEXT + 2 * BLOCK, max_num_batched_tokens=CONTEXT // 4, max_step_ms=0)
    for number in range(3):
        core.add(request(f"request-{number}", prompt_of(number), 50))
    most = 0
    while core.has_work():
        core.step()
        running = list(core.scheduler.running)
        if running and all(each.num_output_tokens > 1 for each in running):
            most = max(most, len(running))
            needed = sum(FULL * each.num_computed_tokens + SLIDING * WINDOW for each in running) / BLOCK
            assert core.scheduler.pool.usage().used <= 1.1 * needed
    assert most == 3
    stats = core.stats().scheduler
    assert stats.preemptions_total == 0
    assert stats.blocks.used == 0


def test_what_left_a_window_is_not_missed_by_the_next_turn(served: ServedModel) -> None:
    """The blocks that left a window are evicted. A prompt that goes on where the first one ended finds all of it."""
    core = make_engine(served, 2 * CONTEXT)
    poison_new_blocks(core)
    prompt = prompt_of(0, 1500)
    core.add(request("first", prompt, 8))
    finish(core)
    pool, cached = core.scheduler.pool, core.scheduler.pool.usage().cached
    blocks = 1507 // BLOCK + 1  # the last one is not full
    kept = FULL * blocks + SLIDING * (blocks - (1472 - WINDOW) // BLOCK)
    pool.evict(cached - kept)
    core.add(request("again", [*prompt, 5], 8))
    finish(core)
    assert core.stats().scheduler.prefix_hit_tokens_total == 1500
