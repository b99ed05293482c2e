"""How many tokens the next step may have, so that its arrays fit into the memory that is free now.

The size of the pools leaves memory for the largest step (memory.py). But other programs, a limit that is set later and
the server's own requests can take it since then.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable

import mlx.core as mx

from mlxpaged.process_memory import (
    MARGIN,
    UNLIMITED,
    address_space_left,
    return_freed_memory,
    reusable_bytes,
    system_free_memory,
)
from mlxpaged.scheduler.prefill_budget import LEAST_CHUNK

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Between two looks at the system's free memory: they take 0.1 ms. The address space is looked at in every step."""

NEAR = 4
"""While less than so many of the largest steps would fit, the system's free memory is looked at in every step too."""

GIVE_BACK_SECONDS = 1.0
"""Freed memory is not returned to the system more often than this."""


class Headroom:
    """Belongs to the engine thread. step_bytes: of a step of `max_tokens`, which is estimated as linear in the tokens.
    clock: seconds.

    After an allocation that failed, steps have half the tokens, and twice as many after each step that succeeds.
    """

    def __init__(self, step_bytes: int, max_tokens: int, clock: Callable[[], float]) -> None:
        self._bytes_per_token = step_bytes / max_tokens
        self._max_tokens = self._limit = max_tokens
        self._clock = clock
        self._system_free = math.inf
        self._looked_at = self._gave_back_at = -math.inf
        self._is_short = False

    def tokens(self) -> int:
        """The most tokens that the next step may have; LEAST_CHUNK or more, because fewer take little less memory."""
        fitting = min(self._limit, self._fitting())
        was_short, self._is_short = self._is_short, fitting < self._max_tokens
        if not self._is_short:
            return self._max_tokens
        tokens = max(LEAST_CHUNK, int(fitting))
        if not was_short:
            logger.warning("memory is short: the next step has at most %d tokens", tokens)
        return tokens

    def require(self, tokens: int) -> None:
        """Raises MemoryError if a step of so many tokens does not fit."""
        if tokens > self._fitting():
            needed, free = tokens * self._bytes_per_token / 1e6, max(0, self._free() - MARGIN) / 1e6
            raise MemoryError(f"a step of {tokens} tokens may take {needed:.1f} MB, but only {free:.1f} MB are free")

    def note_failure(self, tokens: int) -> None:
        """An allocation failed in a step of so many tokens."""
        self._limit = max(LEAST_CHUNK, tokens // 2)
        self._gave_back_at = -math.inf
        self._give_back()

    def note_success(self) -> None:
        self._limit = min(self._max_tokens, 2 * self._limit)

    def _fitting(self) -> float:
        """Tokens that fit now, after freed memory was given back if that is needed. A Mac's GPU reports itself what
        does not fit."""
        if sys.platform != "linux":
            return math.inf
        needed = self._max_tokens * self._bytes_per_token + MARGIN
        free = self._free()
        if free < needed and self._give_back():
            free = self._free()
        return max(0.0, free - MARGIN) / max(1.0, self._bytes_per_token)

    def _free(self) -> float:
        """Bytes. Freed memory that MLX and malloc keep mapped counts only for the address space, because the system may
        have taken its pages back, and only if the rest is less than a step needs, because to count it takes longer."""
        needed = self._max_tokens * self._bytes_per_token + MARGIN
        now = self._clock()
        if now >= self._looked_at + LOOK_SECONDS or self._system_free < NEAR * needed:
            self._looked_at, self._system_free = now, system_free_memory(UNLIMITED)
        left = address_space_left()
        if left is None:
            return self._system_free
        if left < needed:
            left += reusable_bytes() + int(mx.get_cache_memory())
        return min(self._system_free, left)

    def _give_back(self) -> bool:
        """Return freed memory to the system, unless that was done just before. Returns whether it was."""
        now = self._clock()
        if now < self._gave_back_at + GIVE_BACK_SECONDS:
            return False
        mx.clear_cache()
        return_freed_memory()
        self._gave_back_at, self._looked_at = now, -math.inf
        return True
