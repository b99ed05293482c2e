"""Gated delta nets (Qwen3.5, Qwen3-Next, OLMo hybrid): MLX's own kernel for prompt chunks, if it is right and faster.

mlx-lm's kernel goes from token to token. `mx.fast.gated_delta_update` of MLX 0.32.4 computes several tokens at a time,
on an M5 with its neural accelerators (ml-explore/mlx#4020). Which one is faster depends on the chip and the sizes: both
are compared and timed for the sizes of a model when it is loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import gated_delta

logger = logging.getLogger(__name__)

MIN_TOKENS = 32
"""Shorter calls, decoding ones among them, are mlx-lm's."""

TIMED_TOKENS = 512
RUNS = 3

MAX_DIFFERENCE = 0.02
"""Largest difference, as a share of the largest value: above rounding in bfloat16."""

CLEARLY_FASTER = 0.95
"""Most time that MLX's kernel may take, as a share of mlx-lm's."""

clock = time.perf_counter

Update = Callable[..., Any]
"""Returns the outputs [B, T, Hv, Dv] and the new state [B, Hv, Dv, Dk], from q and k [B, T, Hk, Dk], v [B, T, Hv, Dv],
the decay and beta [B, T, Hv], and a state."""


class Sizes(NamedTuple):
    """What a layer's calls have in common."""

    num_key_heads: int
    key_size: int
    num_value_heads: int
    value_size: int
    dtype: mx.Dtype
    beta_dtype: mx.Dtype
    state_dtype: mx.Dtype

    def random_inputs(self, num_tokens: int) -> list[mx.array]:
        """As a layer makes them: queries and keys of length one, decays just below one, beta between zero and one."""
        keys = mx.random.split(mx.random.key(0), 6)
        heads = (1, num_tokens, self.num_key_heads, self.key_size)
        q, k = (mx.random.normal(heads, key=key) for key in keys[:2])
        q, k = ((x / mx.linalg.norm(x, axis=-1, keepdims=True)).astype(self.dtype) for x in (q, k))
        values = (1, num_tokens, self.num_value_heads)
        v = mx.random.normal((*values, self.value_size), key=keys[2]).astype(self.dtype)
        decay = mx.random.uniform(0.8, 1.0, values, key=keys[3])
        beta = mx.random.uniform(0.0, 1.0, values, key=keys[4]).astype(self.beta_dtype)
        state = mx.random.normal((1, self.num_value_heads, self.value_size, self.key_size), key=keys[5])
        return [q, k, v, decay, beta, state.astype(self.state_dtype)]


class GatedDelta:
    """Replaces mlx-lm's function that calls its kernel. own: that function."""

    def __init__(self, own: Update) -> None:
        self.own = own
        self._is_faster: dict[Sizes, bool | None] = {}  # None until it is decided

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        decay: mx.array,
        beta: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
    ) -> Any:
        if mask is not None or decay.ndim != 3:  # MLX's has one decay for each head (not so in Kimi Linear)
            return self.own(q, k, v, decay, beta, state, mask)
        _, num_tokens, key_heads, key_size = k.shape
        sizes = Sizes(key_heads, key_size, v.shape[2], v.shape[3], q.dtype, beta.dtype, state.dtype)
        if self._is_faster.setdefault(sizes, None) and num_tokens >= MIN_TOKENS:
            return mx.fast.gated_delta_update(q, k, v, decay, beta, state)
        return self.own(q, k, v, decay, beta, state, mask)

    def choose(self) -> None:
        """Compare and time both kernels for the sizes that models have used."""
        for sizes, decided in self._is_faster.items():
            if decided is None:
                self._is_faster[sizes] = self._wins(sizes)

    def _wins(self, sizes: Sizes) -> bool:
        """Whether MLX's kernel exists, returns what mlx-lm's does, and is faster."""
        if not hasattr(mx.fast, "gated_delta_update"):
            return False
        try:
            if not self._is_equal(sizes):
                logger.warning("MLX's kernel of gated delta nets gives other numbers: mlx-lm's is used")
                return False
            theirs, own = (self._seconds(each, sizes) for each in (mx.fast.gated_delta_update, self.own))
        except Exception as error:
            logger.info("MLX's kernel of gated delta nets does not run here: %s", error)
            return False
        logger.info("prompts of gated delta nets: MLX's kernel takes %.2f of the time of mlx-lm's", theirs / own)
        return theirs <= CLEARLY_FASTER * own

    def _is_equal(self, sizes: Sizes) -> bool:
        """In a chunk that is no multiple of anything."""
        inputs = sizes.random_inputs(MIN_TOKENS + 5)
        update: Update = mx.fast.gated_delta_update
        pairs = zip(update(*inputs), self.own(*inputs), strict=True)
        return all(
            theirs.shape == own.shape
            and theirs.dtype == own.dtype
            and bool((mx.abs(theirs - own).max() <= MAX_DIFFERENCE * mx.abs(own).max()).item())
            for theirs, own in pairs
        )

    def _seconds(self, update: Update, sizes: Sizes) -> float:
        """The least of some runs, after one that compiles the kernel."""
        inputs = sizes.random_inputs(TIMED_TOKENS)
        mx.eval(inputs, update(*inputs))
        times = []
        for _ in range(RUNS):
            start = clock()
            mx.eval(update(*inputs))
            times.append(clock() - start)
        return min(times)


def route_gated_delta() -> GatedDelta:
    """Let mlx-lm's models call their kernel through a GatedDelta, which is the same for all models."""
    found: Any = gated_delta.gated_delta_kernel
    router = found if isinstance(found, GatedDelta) else GatedDelta(found)
    gated_delta.gated_delta_kernel = router  # type: ignore[assignment]
    return router
