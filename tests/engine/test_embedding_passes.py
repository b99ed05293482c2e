"""Encoders in the embedder: texts without padding, long ones some layers at a time, in the memory that is reserved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.models.loader import load_embedding_model
from mlxpaged.parts.embeddings.embedder import STEP_TOKENS, Embedder
from mlxpaged.parts.embeddings.embedding_line import EmbeddingRequest
from tests.models.encoders import CONFIGS, LONGEST, VOCABULARY, WIDTH, Reference, make_encoder


def texts(lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(5, len(VOCABULARY), length).tolist() for length in lengths]


def make_embedder(path: Path, max_step_tokens: int = 512) -> Embedder:
    return Embedder(load_embedding_model(str(path), None, 8192), max_step_tokens)


def run(embedder: Embedder, requests: Sequence[EmbeddingRequest], alone: bool) -> tuple[list[Any], list[int]]:
    """The outputs, and the tokens of each pass."""
    for request in requests:
        embedder.add(request)
    sizes = []
    while embedder.has_work():
        embedder.step(alone)
        sizes.append(embedder.step_size.tokens)
    return [request.reply.result(0) for request in requests], sizes


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.rotated("models")
def test_embeddings_of_any_length_together_are_those_of_one_text(tmp_path: Path, kind: str, alone: bool) -> None:
    path = make_encoder(tmp_path / "m", kind)
    reference, inputs = Reference(path, kind), texts([5, 1, 30, 31, LONGEST[kind], 12, 100, 2])
    requests = [EmbeddingRequest("all", inputs, WIDTH), EmbeddingRequest("one", inputs[4:5], WIDTH)]
    (together, one), _ = run(make_embedder(path), requests, alone)
    means = np.stack([reference.states(tokens).mean(axis=0) for tokens in inputs])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    assert together.vectors.dtype == np.float32
    np.testing.assert_allclose(together.vectors, expected, atol=5e-5)
    np.testing.assert_allclose(one.vectors, expected[4:5], atol=5e-5)


def test_beside_other_requests_a_long_text_takes_several_passes(tmp_path: Path) -> None:
    embedder = make_embedder(make_encoder(tmp_path / "m", "modernbert"), max_step_tokens=2048)
    request = EmbeddingRequest("r", texts([400]), WIDTH)
    _, sizes = run(embedder, [request], alone=False)
    assert len(sizes) == 2
    assert sum(sizes) == 400
    assert embedder.stats().tokens_total == 400
    assert run(embedder, [EmbeddingRequest("alone", texts([400]), WIDTH)], alone=True)[1] == [400]


def test_a_pass_has_as_many_tokens_as_it_may_and_none_is_padding(tmp_path: Path) -> None:
    inputs = texts(np.random.default_rng(1).integers(1, 200, 60).tolist())
    embedder = make_embedder(make_encoder(tmp_path / "m", "mpnet"), max_step_tokens=2048)
    for alone, most in ((False, STEP_TOKENS), (True, 2048)):
        _, sizes = run(embedder, [EmbeddingRequest("r", inputs, WIDTH)], alone)
        assert sum(sizes) == sum(map(len, inputs))
        assert most / 2 < max(sizes) <= most


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_pass_takes_no_more_memory_than_is_reserved(tmp_path: Path, kind: str) -> None:
    embedder = make_embedder(make_encoder(tmp_path / "m", kind), max_step_tokens=2048)
    longest = LONGEST[kind]
    for lengths in ([longest], [min(longest, 250)] * 8, [2] * 1024, np.arange(1, 60).tolist()):
        run(embedder, [EmbeddingRequest("warm", texts(lengths), WIDTH)], alone=True)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        run(embedder, [EmbeddingRequest("r", texts(lengths), WIDTH)], alone=True)
        assert mx.get_peak_memory() - before < embedder.step_bytes


def test_numbers_that_are_none_end_only_their_request(tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "m", "bert")
    stored: Any = mx.load(str(path / "model.safetensors"))
    weights = dict(stored)
    words = np.array(weights["embeddings.word_embeddings.weight"])
    words[7] = np.nan
    mx.save_safetensors(
        str(path / "model.safetensors"), weights | {"embeddings.word_embeddings.weight": mx.array(words)}
    )
    good, bad = EmbeddingRequest("good", [[5, 6]], WIDTH), EmbeddingRequest("bad", [[5], [7]], WIDTH)
    (first, second), _ = run(make_embedder(path), [good, bad], alone=True)
    assert (first.finish_reason, second.finish_reason) == (FinishReason.STOP, FinishReason.ERROR)
