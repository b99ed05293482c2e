"""Gated delta nets compute prompt chunks with MLX's kernel if it is right and faster, and else as in mlx-lm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta
from mlx_lm.models.gated_delta import gated_delta_ops

from mlxpaged.models.states import gated_delta as routed
from mlxpaged.models.states.gated_delta import MIN_TOKENS, GatedDelta, Sizes, route_gated_delta
from tests.engine.hybrid import Hybrid, request, run

SIZES = Sizes(2, 16, 4, 8, mx.bfloat16, mx.bfloat16, mx.float32)


class Kernel:
    """A stand-in for a kernel that takes some seconds. spoil: changes its results."""

    def __init__(
        self, seconds: float, spoil: Callable[[mx.array, mx.array], Any] = lambda out, state: (out, state)
    ) -> None:
        self.seconds = seconds
        self.spoil = spoil
        self.now = 0.0
        self.lengths: list[int] = []

    def __call__(self, q: mx.array, *rest: Any) -> Any:
        self.lengths.append(q.shape[1])
        self.now += self.seconds
        return self.spoil(*gated_delta_ops(q, *rest))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel, Kernel | None], GatedDelta]:
    def install(own: Kernel, theirs: Kernel | None) -> GatedDelta:
        """theirs: None if MLX has no kernel."""
        if theirs is None:
            monkeypatch.delattr(mx.fast, "gated_delta_update", raising=False)
        else:
            monkeypatch.setattr(mx.fast, "gated_delta_update", theirs, raising=False)
        monkeypatch.setattr(routed, "clock", lambda: own.now + (0.0 if theirs is None else theirs.now))
        return GatedDelta(own)

    return install


def choose(router: GatedDelta, sizes: Sizes = SIZES) -> None:
    """As when a model with these sizes is loaded."""
    router(*sizes.random_inputs(4))
    router.choose()


def test_long_chunks_are_computed_by_the_faster_kernel_of_mlx(install: Callable[..., GatedDelta]) -> None:
    own, theirs = Kernel(1.0), Kernel(0.5)
    router = install(own, theirs)
    choose(router)
    own.lengths.clear(), theirs.lengths.clear()
    for length in (1, MIN_TOKENS - 1, MIN_TOKENS, 100):
        inputs = SIZES.random_inputs(length)
        for got, expected in zip(router(*inputs), gated_delta_ops(*inputs), strict=True):
            assert mx.array_equal(got, expected)
    assert own.lengths == [1, MIN_TOKENS - 1]
    assert theirs.lengths == [MIN_TOKENS, 100]


def test_masks_and_decays_by_element_are_for_mlx_lms_kernel(install: Callable[..., GatedDelta]) -> None:
    own, theirs = Kernel(1.0), Kernel(0.5)
    router = install(own, theirs)
    choose(router)
    theirs.lengths.clear()
    q, k, v, decay, beta, state = SIZES.random_inputs(40)
    router(q, k, v, decay, beta, state, mx.ones((1, 40), mx.bool_))
    router(q, k, v, mx.broadcast_to(decay[..., None], (*decay.shape, 16)), beta, state)
    router.choose()
    assert not theirs.lengths


def test_sizes_of_another_model_are_decided_when_it_is_loaded(install: Callable[..., GatedDelta]) -> None:
    own, theirs = Kernel(1.0), Kernel(0.5)
    router = install(own, theirs)
    choose(router)
    other = Sizes(1, 16, 2, 8, mx.float32, mx.float32, mx.float32)
    theirs.lengths.clear()
    router(*other.random_inputs(100))
    assert not theirs.lengths
    router.choose()
    count = len(theirs.lengths)
    router(*other.random_inputs(100))
    assert len(theirs.lengths) == count + 1


def broken(_out: mx.array, _state: mx.array) -> Any:
    raise RuntimeError("no kernel for these sizes")


@pytest.mark.parametrize(
    "theirs",
    [
        None,
        Kernel(0.96),
        Kernel(2.0),
        Kernel(0.1, lambda out, state: (out * 1.1, state)),
        Kernel(0.1, lambda out, state: (out, state * 1.1)),
        Kernel(0.1, lambda out, state: (out, mx.nan * state)),
        Kernel(0.1, lambda out, state: (out, state.astype(mx.bfloat16))),
        Kernel(0.1, lambda out, state: (out, state.swapaxes(-1, -2))),
        Kernel(0.1, broken),
    ],
    ids=["missing", "as fast", "slower", "outputs", "states", "nan", "type", "layout", "error"],
)
def test_a_kernel_that_is_missing_wrong_or_not_faster_is_not_used(
    install: Callable[..., GatedDelta], theirs: Kernel | None
) -> None:
    own = Kernel(1.0)
    router = install(own, theirs)
    choose(router)
    own.lengths.clear()
    router(*SIZES.random_inputs(100))
    assert own.lengths == [100]


def test_the_log_says_that_a_kernel_is_wrong(
    install: Callable[..., GatedDelta], caplog: pytest.LogCaptureFixture
) -> None:
    choose(install(Kernel(1.0), Kernel(0.1, lambda out, state: (out * 1.1, state))))
    assert [record.levelno for record in caplog.records if "other numbers" in record.message] == [logging.WARNING]


def test_a_model_that_is_loaded_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, mlx-lm calls the function that is replaced here; on a CPU, its operations."""
    own, theirs = Kernel(1.0), Kernel(0.5)
    monkeypatch.setattr(gated_delta, "gated_delta_kernel", own)
    monkeypatch.setattr(gated_delta, "gated_delta_ops", lambda *args: gated_delta.gated_delta_kernel(*args))
    monkeypatch.setattr(mx.fast, "gated_delta_update", theirs, raising=False)
    monkeypatch.setattr(routed, "clock", lambda: own.now + theirs.now)
    hybrid, prompt = Hybrid(tmp_path / "model", num_layers=2), list(range(50))
    expected = hybrid.answer(prompt, 6)
    assert route_gated_delta() is route_gated_delta()
    own.lengths.clear(), theirs.lengths.clear()
    result = run(hybrid.engine(), [request("0", prompt, 6)])
    assert expected.equals(result.tokens("0"))
    assert theirs.lengths
    assert min(theirs.lengths) >= MIN_TOKENS
    assert 1 in own.lengths
