"""No pass for embeddings costs more than it may, and no client waits for the many inputs of another one.

Costs are counted, in multiply-adds, and waits are counted in passes.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from mlxpaged.models.loader import load_embedding_model
from mlxpaged.parts.embeddings.embedder import MEDIUM_TOKENS, STEP_TOKENS, Embedder
from mlxpaged.parts.embeddings.embedding_line import EmbeddingRequest, Job, Line
from tests.api.helpers import random_tokens
from tests.engine.multiply_adds import MultiplyAdds
from tests.models.encoders import LONGEST, VOCABULARY, make_encoder
from tests.support import make_embedding_model

PASSES = 400
"""More than any request here takes."""


def make_embedder(path: Path, max_step_tokens: int = 2048) -> Embedder:
    return Embedder(load_embedding_model(str(path), None, 8192), max_step_tokens)


DIRECTORIES: dict[str, Callable[[Path], Path]] = {
    "decoder": make_embedding_model,
    **{kind: functools.partial(make_encoder, kind=kind) for kind in ("mpnet", "modernbert")},
}
"""Those of models with inputs that take several passes. The last one has windows."""


def request(name: str, lengths: Sequence[int], client: str = "") -> EmbeddingRequest:
    inputs = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
    known = [[token % (len(VOCABULARY) - 5) + 5 for token in tokens] for tokens in inputs]
    return EmbeddingRequest(name, known, 8, client=client)


def costs_of(embedder: Embedder, counted: MultiplyAdds, *requests: EmbeddingRequest) -> list[int]:
    """Multiply-adds of each pass until all are done."""
    for each in requests:
        embedder.add(each)
    costs = []
    while embedder.has_work():
        embedder.step(alone=False)
        costs.append(counted.take())
    return costs


def passes_until(embedder: Embedder, asked: EmbeddingRequest, alone: bool = False) -> int:
    for count in range(PASSES):
        if asked.reply.done():
            return count
        embedder.step(alone)
    raise AssertionError(f"{PASSES} passes were not enough")


def passes_alone(path: Path, lengths: Sequence[int]) -> int:
    embedder = make_embedder(path)
    embedder.add(asked := request("alone", lengths))
    return passes_until(embedder, asked)


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_no_pass_costs_more_than_one_input_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Late parts of a long input attend to more keys, and have fewer tokens for that."""
    embedder, counted = make_embedder(DIRECTORIES[kind](tmp_path / "m")), MultiplyAdds(monkeypatch)
    (one,) = costs_of(embedder, counted, request("one", [STEP_TOKENS]))
    most = 1.01 * one  # at the ends of a text, windows have fewer keys
    costs = costs_of(embedder, counted, request("long", [511]))
    assert max(costs) <= most
    assert min(costs[:-1]) >= 0.7 * most, "no pass is shorter than it must be"
    assert len(costs) > 511 / STEP_TOKENS + 1, "there are more passes than tokens alone would take"
    rng = random.Random(2)
    several = [request(str(i), [rng.randrange(1, 512) for _ in range(rng.randrange(1, 20))]) for i in range(10)]
    assert max(costs_of(embedder, counted, *several)) <= most


def test_a_text_in_parts_has_the_numbers_of_one_that_is_computed_at_once(tmp_path: Path) -> None:
    for kind, longest in LONGEST.items():
        path = make_encoder(tmp_path / kind, kind)
        for lengths in ([longest], [longest - 1], [longest // 2 + 1]):
            vectors = []
            for step_tokens in (1024, 32):
                embedder = make_embedder(path, step_tokens)
                embedder.add(asked := request("r", lengths))
                passes = passes_until(embedder, asked, alone=True)
                assert (passes > 1) is (step_tokens == 32)
                vectors.append(asked.reply.result(0).vectors)
            np.testing.assert_allclose(*vectors, atol=2e-5, err_msg=f"{kind}, {lengths}")


@pytest.mark.parametrize("others", [[20] * 60, [500] * 8, [500, 200, 400, 3] * 3])
def test_a_client_waits_for_no_second_turn_of_another_one_with_many_requests(tmp_path: Path, others: list[int]) -> None:
    """Beside 12 requests of another client. A short input waits for a pass of each line. A longer one waits for the one
    that has begun, and each of its passes for one of the short inputs."""
    path = make_embedding_model(tmp_path / "m")
    begun = max(passes_alone(path, [length]) for length in set(others))
    for own, most in (([5], 3), ([300], 2 * (begun + passes_alone(path, [300])))):
        embedder = make_embedder(path)
        flood = [request(f"flood {i}", others, "flood") for i in range(12)]
        for each in flood:
            embedder.add(each)
        for _ in range(3):
            embedder.step(alone=False)
        embedder.add(asked := request("asked", own, "other"))
        assert passes_until(embedder, asked) <= most
        assert not any(each.reply.done() for each in flood)


def test_clients_take_turns_and_so_do_the_requests_of_a_client() -> None:
    line = Line(0, 10)
    for name, client in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c")):
        line.add(Job(request(name, [1, 1], client)))
    names = [line.take_one().job.request.request_id for _ in range(10)]
    assert names == ["a1", "b1", "c1", "a2", "b1", "c1", "a3", "a1", "a2", "a3"]
    assert not line.has_work


def test_a_client_that_comes_during_a_turn_is_next_and_not_always_first() -> None:
    line = Line(0, 10)
    line.add(Job(request("many", [1] * 9, "a")))
    names = [line.take_one().job.request.request_id]
    for number in range(4):
        line.add(Job(request(f"new {number}", [1], "b")))
        names.append(line.take_one().job.request.request_id)
        line.add(Job(request(f"more {number}", [1], "b")))
        names += [line.take_one().job.request.request_id for _ in range(2)]
    assert names[::2] == ["many"] * 7
    assert "many" not in names[1::2]


def test_a_pass_is_the_turn_of_the_client_that_fills_it_first() -> None:
    line = Line(0, 10)
    for name, client in (("a", "a"), ("b", "b")):
        line.add(Job(request(name, [1] * 6, client)))
    passes = [[row.job.request.request_id for row in line.take(lambda lengths: len(lengths) <= 4)] for _ in range(3)]
    assert passes == [["a"] * 4, ["b"] * 4, ["a", "a", "b", "b"]]


def test_an_input_of_medium_length_does_not_wait_for_the_end_of_a_longer_one(tmp_path: Path) -> None:
    path = make_embedding_model(tmp_path / "m", max_position_embeddings=8192)
    embedder = make_embedder(path)
    assert embedder.model.max_tokens > MEDIUM_TOKENS + 500
    embedder.add(long := request("long", [MEDIUM_TOKENS + 500]))
    for _ in range(3):
        embedder.step(alone=False)
    embedder.add(medium := request("medium", [300]))
    assert passes_until(embedder, medium) <= 2 * passes_alone(path, [300])
    assert not long.reply.done()
    assert passes_until(embedder, long) > 10
