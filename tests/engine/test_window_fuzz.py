"""Random requests to models whose layers slide: whatever happens around a request, its answer is that of the request
alone.

80 requests run by default, 3,200 with `make test-models`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.core.blocks.groups import CacheGroups
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.models.cache_groups import cache_layout
from tests.engine.fuzz import LONGEST, MOST_TOKENS, play, play_all
from tests.engine.hybrid import TinyModel
from tests.models.architectures import make_architecture

MODELS: dict[str, tuple[dict[str, Any], int]] = {
    # changes of the configuration, groups
    "gemma3_text": ({"sliding_window": 5}, 3),
    "gemma4_text": ({}, 5),
    "recurrent_gemma": ({}, 1),
    "gpt_oss": ({}, 2),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    changes, num_groups = MODELS[request.param]
    path: Path = tmp_path_factory.mktemp("models") / request.param
    found = TinyModel(make_architecture(path, request.param, **changes))
    layout = cache_layout(found.served.kv_layers, found.served.context_length)
    assert len(layout.windows) == num_groups
    assert not CacheGroups(layout.windows).keeps_all
    return found


def make_engine(model: TinyModel, rng: random.Random) -> EngineCore:
    """A pool that has room for little more than the longest request."""
    chunk, block_size = rng.choice((10, 16, 40, 200)), rng.choice((8, 8, 16, 32))
    windows = cache_layout(model.served.kv_layers, model.served.context_length).windows
    least = CacheGroups(windows, block_size).blocks_needed(LONGEST + MOST_TOKENS - 1, chunk)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return model.engine(
        num_blocks=least + rng.choice((0, 1, 8)),
        swap_blocks=rng.choice((0, 8, 100)),
        num_checkpoints=rng.choice((0, 1, 4, 30)),
        max_num_seqs=rng.choice((2, 6, 10)),
        max_num_batched_tokens=chunk,
        prefix_caching=rng.random() < 0.9,
        block_size=block_size,
        attention_backend=rng.choice(("gather", "cpu" if on_cpu else "gather")),
    )


def test_answers_among_random_requests_are_those_of_requests_alone(model: TinyModel) -> None:
    assert sum(play(model, make_engine, seed, 10)["preemptions"] for seed in (11, 12)) > 0


@pytest.mark.models
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_answers_among_many_random_requests_are_those_of_requests_alone(model: TinyModel, first: int) -> None:
    play_all(model, make_engine, range(100 + first, 105 + first), 40)
