"""What engine.py compares a step with: mlx-lm's model alone, with the BLAS on all cores."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlxpaged.cpu import blas, streams  # before mlx: it loads the fast BLAS
from mlxpaged.cpu.optimize import swiglu_by_exp2, swiglu_of_mlx_lm

# isort: split
import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache


def stay_awake(seconds: float) -> None:
    """A virtual machine that sleeps is slow for a while after."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@contextmanager
def blas_threads() -> Iterator[None]:
    """Lets MLX's own operations use the BLAS on all cores; mlxpaged splits its work among CPU streams instead."""
    blas.use_threads(streams.cores())
    try:
        yield
    finally:
        blas.use_threads(1)
        stay_awake(0.03)  # as long as the BLAS's threads keep their cores busy


@contextmanager
def own_activation(model: Any) -> Iterator[None]:
    """Lets the model use mlx-lm's own activation, which loading the engine's model has replaced."""
    modules: list[Any] = [sys.modules[name] for name in {type(module).__module__ for module in model.modules()}]
    routed = [module for module in modules if getattr(module, "swiglu", None) is swiglu_by_exp2]
    for module in routed:
        module.swiglu = swiglu_of_mlx_lm
    try:
        yield
    finally:
        for module in routed:
            module.swiglu = swiglu_by_exp2


class Bare:
    """The forward pass and the most likely token: one static batch of equal lengths, without padding or a mask."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def _start(self, tokens: mx.array) -> None:
        with own_activation(self._model):
            logits = self._model(tokens, cache=self._cache)
        self._tokens = mx.argmax(logits[:, -1], axis=-1)

    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds."""
        self._cache = make_prompt_cache(self._model)
        start = time.perf_counter()
        self._start(mx.array(prompts))
        with blas_threads():
            mx.eval(self._tokens, [layer.state for layer in self._cache])
            return time.perf_counter() - start

    def step(self) -> float:
        """Seconds of one token for every sequence."""
        start = time.perf_counter()
        self._start(self._tokens[:, None])
        with blas_threads():
            self._tokens.tolist()
            return time.perf_counter() - start


class Batched:
    """mlx-lm's own continuous batching, which its server decodes with."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Until every sequence decodes."""
        batch = len(prompts)
        self._generator = BatchGenerator(
            self._model, max_tokens=new_tokens, completion_batch_size=batch, prefill_batch_size=batch
        )
        self._generator.insert(prompts)
        while len(self._next()) < batch:
            pass

    def _next(self) -> list[Any]:
        """The sequences' tokens. The generator has started its next step by then: it is waited for, or it would take
        time from what is measured next."""
        with own_activation(self._model):
            _, responses = self._generator.next()
        mx.synchronize(self._generator.stream)
        return list(responses)

    def step(self) -> float:
        """Seconds of one token for every sequence."""
        start = time.perf_counter()
        with blas_threads():
            self._next()
            return time.perf_counter() - start
