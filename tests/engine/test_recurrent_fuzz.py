"""Random requests to a hybrid model: whatever happens around a request, its answer is that of the request alone.

60 requests run by default, 2,000 with `make test-models`.
"""

from __future__ import annotations

import random

import pytest

from mlxpaged.core.engine.core import EngineCore
from tests.engine.fuzz import play_all
from tests.engine.hybrid import Hybrid, TinyModel


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("hybrid") / "model", num_layers=2)


def make_engine(model: TinyModel, rng: random.Random) -> EngineCore:
    """A pool that is too small, and any number of checkpoints."""
    return model.engine(
        num_blocks=rng.choice((14, 18, 30)),
        swap_blocks=rng.choice((0, 8, 60)),
        num_checkpoints=rng.choice((0, 1, 2, 4, 30)),
        max_num_seqs=rng.choice((3, 6, 10)),
        max_num_batched_tokens=rng.choice((16, 40, 200)),
        speculative=rng.choice(("off", "ngram")),
        prefix_caching=rng.random() < 0.9,
    )


@pytest.mark.more
def test_answers_among_60_random_requests_are_those_of_requests_alone(hybrid: Hybrid) -> None:
    play_all(hybrid, make_engine, range(3), 20)


@pytest.mark.models
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_answers_among_2000_random_requests_are_those_of_requests_alone(hybrid: Hybrid, first: int) -> None:
    play_all(hybrid, make_engine, range(100 + first, 110 + first), 40)
