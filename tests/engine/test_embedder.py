"""Embeddings are those of mlx-lm's own model, however inputs are batched and cut, and no step is longer than it may."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.cpu import streams
from mlxpaged.models.encoders.embedding import Pooling
from mlxpaged.models.loader import load_embedding_model
from mlxpaged.parts.embeddings.embedder import STEP_TOKENS, Embedder
from mlxpaged.parts.embeddings.embedding_core import EmbeddingCore
from mlxpaged.parts.embeddings.embedding_line import EmbeddingOutput, EmbeddingRequest
from mlxpaged.parts.memory.memory_pressure import MemoryPressure
from tests.api.helpers import random_tokens
from tests.support import make_embedding_model, make_tiny_model, write_modules

LENGTHS = [1, 2, 3, 300, 17, 1, 90, 31, 32, 33, 200, 511, 64, 5]


def make_embedder(path: Path, max_step_tokens: int = 512) -> Embedder:
    return Embedder(load_embedding_model(str(path), None, 8192), max_step_tokens)


def reference(path: Path, tokens: Sequence[int], pooling: Pooling, dimensions: int = 64, normalize: bool = True) -> Any:
    """Straight with mlx-lm: the whole model, one input, no padding, no cache."""
    model, _ = load_plain_model(path.with_name(f"{path.name}-whole"))
    states = np.array(model.model(mx.array([tokens]))[0]).astype(np.float64)
    count = np.arange(1, len(tokens) + 1)
    weights = {
        Pooling.LAST: (count == len(tokens)).astype(float),
        Pooling.CLS: (count == 1).astype(float),
        Pooling.MEAN: np.full(len(tokens), 1 / len(tokens)),
        Pooling.MEAN_SQRT_LENGTH: np.full(len(tokens), len(tokens) ** -0.5),
        Pooling.WEIGHTED_MEAN: count / count.sum(),
    }
    vector = (weights[pooling][:, None] * states).sum(axis=0)[:dimensions]
    return vector / np.linalg.norm(vector) if normalize else vector


def run(embedder: Embedder, requests: Sequence[EmbeddingRequest], alone: bool = True) -> list[Any]:
    for request in requests:
        embedder.add(request)
    while embedder.has_work():
        embedder.step(alone)
    return [request.reply.result(0) for request in requests]


def watch(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the tokens of every forward pass."""
    shapes: list[tuple[int, ...]] = []
    decode = embedder.model.decode

    def watching(tokens: mx.array, cache: Any) -> mx.array:
        shapes.append(tokens.shape)
        return decode(tokens, cache)

    object.__setattr__(embedder.model, "decode", watching)
    return shapes


@pytest.mark.parametrize("pooling", [each for each in Pooling if each is not Pooling.MAX])
@pytest.mark.parametrize("alone", [True, False])
def test_embeddings_are_those_of_mlx_lms_model_for_inputs_of_any_length_together(
    tmp_path: Path, pooling: Pooling, alone: bool
) -> None:
    path = make_embedding_model(tmp_path / "m", pooling.value)
    inputs = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    random.Random(1).shuffle(inputs)
    requests = [EmbeddingRequest("all", inputs, 64), *(EmbeddingRequest(str(i), [x], 64) for i, x in enumerate(inputs))]
    together, *single = run(make_embedder(path), requests, alone)
    expected = np.stack([reference(path, tokens, pooling) for tokens in inputs])
    assert together.vectors.dtype == np.float32
    np.testing.assert_allclose(together.vectors, expected, atol=2e-6)
    np.testing.assert_allclose(np.concatenate([one.vectors for one in single]), expected, atol=2e-6)


def test_a_sliding_window_reaches_as_far_in_chunks_as_in_the_whole(tmp_path: Path) -> None:
    window = {"sliding_window": 48, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    path = make_tiny_model(tmp_path / "m", "gemma3_text", num_hidden_layers=4, **window)
    write_modules(path, "mean", ("Transformer", "Pooling"))
    inputs = [random_tokens(length, length) for length in (500, 129, 100, 3)]
    (output,) = run(make_embedder(path, max_step_tokens=128), [EmbeddingRequest("r", inputs, 64)])
    model, _ = load_plain_model(path)
    expected = [np.array(model.model(mx.array([tokens]))[0]).mean(axis=0) for tokens in inputs]
    np.testing.assert_allclose(output.vectors, np.stack(expected), rtol=2e-4, atol=2e-4)


def test_without_normalize_vectors_have_the_length_that_they_have(tmp_path: Path) -> None:
    path = make_embedding_model(tmp_path / "m", "mean", ("Transformer", "Pooling"))
    tokens = random_tokens(20, 1)
    (output,) = run(make_embedder(path), [EmbeddingRequest("r", [tokens], 64)])
    expected = reference(path, tokens, Pooling.MEAN, normalize=False)
    assert np.linalg.norm(expected) > 1.5
    np.testing.assert_allclose(output.vectors[0], expected, rtol=1e-5, atol=1e-5)


def test_a_vector_is_cut_before_it_is_normalized(tmp_path: Path) -> None:
    path = make_embedding_model(tmp_path / "m")
    tokens = random_tokens(20, 1)
    (output,) = run(make_embedder(path), [EmbeddingRequest("r", [tokens], 16)])
    np.testing.assert_allclose(output.vectors[0], reference(path, tokens, Pooling.LAST, 16), atol=2e-6)


def test_no_step_is_longer_than_it_may_be_and_padding_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = make_embedder(make_embedding_model(tmp_path / "m"), max_step_tokens=2048)
    shapes = watch(embedder, monkeypatch)
    inputs = [random_tokens(random.Random(i).randrange(1, 500), i) for i in range(60)]
    run(embedder, [EmbeddingRequest("r", inputs, 64)], alone=False)
    assert max(rows * length for rows, length in shapes) <= STEP_TOKENS
    num_tokens = sum(map(len, inputs))
    assert embedder.stats().tokens_total == num_tokens
    assert sum(rows * length for rows, length in shapes) < 1.2 * num_tokens

    del shapes[:]
    run(embedder, [EmbeddingRequest("r", inputs, 64)], alone=True)
    assert STEP_TOKENS < max(rows * length for rows, length in shapes) <= 2048


def test_requests_take_turns(tmp_path: Path) -> None:
    """A small one does not wait for all of a large one, be it of short inputs or of long ones, that came before."""
    embedder = make_embedder(make_embedding_model(tmp_path / "m"), max_step_tokens=64)
    large = [
        EmbeddingRequest("short", [random_tokens(60, i) for i in range(50)], 64),
        EmbeddingRequest("long", [random_tokens(500, i) for i in range(50)], 64),
    ]
    small = [EmbeddingRequest("s", [random_tokens(10, 1)], 64), EmbeddingRequest("l", [random_tokens(100, 1)], 64)]
    for request in large + small:
        embedder.add(request)
    for _ in range(80):
        embedder.step(alone=True)
    assert all(request.reply.done() for request in small)
    assert not any(request.reply.done() for request in large)


def test_a_request_whose_client_has_left_ends_before_the_next_step(tmp_path: Path) -> None:
    embedder = make_embedder(make_embedding_model(tmp_path / "m"), max_step_tokens=64)
    left = EmbeddingRequest("left", [random_tokens(500, 1), random_tokens(5, 1)], 64)
    stays = EmbeddingRequest("stays", [random_tokens(500, 2)], 64)
    embedder.add(left)
    embedder.add(stays)
    embedder.step(alone=True)
    assert left.reply.cancel()
    tokens = embedder.stats().tokens_total
    run(embedder, [])
    assert embedder.stats().waiting == 0
    assert embedder.stats().requests_total == 1
    assert embedder.stats().tokens_total - tokens <= 500  # of the other one
    assert stays.reply.done()


def test_a_request_that_makes_a_step_fail_ends_alone(tmp_path: Path) -> None:
    embedder = make_embedder(make_embedding_model(tmp_path / "m"))
    decode = embedder.model.decode

    def failing(tokens: mx.array, cache: Any) -> mx.array:
        if (tokens == 77).any().item():
            raise RuntimeError("no memory")
        return decode(tokens, cache)

    object.__setattr__(embedder.model, "decode", failing)
    bad = EmbeddingRequest("bad", [[5], [77, 77], [6]], 64)
    long = EmbeddingRequest("long", [[77] * 300], 64)
    good = EmbeddingRequest("good", [[5], [6, 7]], 64)
    outputs = run(embedder, [bad, long, good])
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.STOP]
    assert "no memory" in outputs[0].error
    assert outputs[2].vectors.shape == (2, 64)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="only a CPU has CPU streams")
@pytest.mark.usefixtures("many_streams")
def test_an_evaluation_that_fails_on_a_cpu_stream_ends_its_request_alone(tmp_path: Path) -> None:
    """The error is raised inside MLX; the stream is used again.

    As in a server, that is not the thread that used MLX first. There MLX raises the error while it hands a stream the
    next operation, and then counts a task that never ends (CommandEncoder::dispatch); with two of those, an evaluation
    may wait for one of them for ever (Scheduler::wait_for_one).
    """
    mx.eval(mx.zeros(1) + 1)
    embedder = make_embedder(make_embedding_model(tmp_path / "m"))
    decode = embedder.model.decode

    def failing(tokens: mx.array, cache: Any) -> mx.array:
        states = decode(tokens, cache)
        is_bad = (tokens == 77).any().item()
        with streams.assign([0, 1])[0][1]:
            return states + (mx.linalg.inv(mx.zeros((64, 64)))[0] if is_bad else mx.zeros(64) + 0)

    object.__setattr__(embedder.model, "decode", failing)
    good = [[5], [6, 7]]
    outputs: list[EmbeddingOutput] = []

    def engine() -> None:
        bad = EmbeddingRequest("bad", [[5], [77, 77]], 64)
        outputs.extend(run(embedder, [bad, EmbeddingRequest("good", good, 64)]))
        outputs.extend(run(embedder, [EmbeddingRequest("long", [[77] * 300], 64)]))
        outputs.extend(run(embedder, [EmbeddingRequest("again", good, 64)]))

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    expected = [FinishReason.ERROR, FinishReason.STOP, FinishReason.ERROR, FinishReason.STOP]
    assert [output.finish_reason for output in outputs] == expected
    assert outputs[3].vectors.shape == (2, 64)


def test_numbers_that_are_none_are_an_error(tmp_path: Path) -> None:
    embedder = make_embedder(make_embedding_model(tmp_path / "m", modules=("Transformer", "Pooling")))
    object.__setattr__(embedder.model, "decode", lambda tokens, _: mx.full((*tokens.shape, 64), mx.nan))
    (output,) = run(embedder, [EmbeddingRequest("r", [[1, 2]], 64)])
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "an embedding is not finite")


@pytest.mark.parametrize("is_short", [False, True])
def test_freed_buffers_are_given_back_after_a_minute_or_when_memory_is_short(
    tmp_path: Path, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX's counter and its call are replaced, because other engines of the process give back the same buffers."""
    now, level, cleared = 0.0, MemoryPressure.NORMAL, list[float]()
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0 if cleared else 1)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(now))
    core = EmbeddingCore(make_embedder(make_embedding_model(tmp_path / "m")), lambda: now, lambda: level)
    request = EmbeddingRequest("r", [random_tokens(200, 1)], 64)
    core.embed(request)
    while core.embeds():
        core.embedder.step(alone=True)
    assert request.reply.result().vectors is not None
    now += 59
    core.rest(device_is_idle=True)
    assert cleared == []
    now += 1
    level = MemoryPressure.WARNING if is_short else level
    assert core.pause() <= 1
    core.rest(device_is_idle=not is_short)
    assert cleared == [60]
    assert core.pause() > 60
