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

from mlxpaged.core.scheduling.row_tiles import LEAST_CHUNK
from mlxpaged.process_memory import (
    MARGIN,
    UNLIMITED,
    address_space_left,
    can_allocate,
    return_freed_memory,
    system_free_memory,
)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Seconds between two readings of the system's free memory: one takes 0.1 ms. The address space is read in every
step."""

NEAR = 4
"""While less than so many of the largest steps would fit, the system's free memory is looked at in every step too."""

OVERRUN = 6
"""While less than so many times the estimate of a step is free, MLX is held to it. A step of 1,500 tokens took
twice as much with the freed buffers that MLX keeps, and others 5 times while other programs used the cores."""

GIVE_BACK_SECONDS = 1.0
"""Freed memory is not returned to the system more often than this."""


class Headroom:
    """Belongs to the engine thread. step_bytes: of a step of `max_tokens`, which is estimated as linear in the tokens.
    clock: seconds. bytes_per_key: what attention takes for a token of the longest context.

    After an allocation that failed, steps have half the tokens, and twice as many after each step that succeeds.
    """

    def __init__(self, step_bytes: int, max_tokens: int, clock: Callable[[], float], bytes_per_key: int = 0) -> None:
        self._bytes_per_token = max(1.0, step_bytes / max_tokens)
        self._bytes_per_key = bytes_per_key
        self._max_tokens = self._limit = max_tokens
        self._clock = clock
        self._system_free = math.inf
        self._looked_at = self._gave_back_at = -math.inf
        self._is_short = False

    def tokens(self, longest: Callable[[], int]) -> int:
        """The most tokens that the next step may have; LEAST_CHUNK or more, because fewer take little less memory.
        longest: the tokens of the longest sequence. It is called only if memory is short."""
        fitting = self._fitting()
        if fitting < self._max_tokens:
            fitting -= longest() * self._bytes_per_key / self._bytes_per_token
        fitting = min(self._limit, fitting)
        was_short, self._is_short = self._is_short, fitting < self._max_tokens
        if not self._is_short:
            return self._max_tokens
        tokens = max(LEAST_CHUNK, int(fitting))
        if not was_short:
            logger.warning("memory is short: the next step has at most %d tokens", tokens)
        return tokens

    def require(self, tokens: int, longest: Callable[[], int] = lambda: 0) -> None:
        """Raises MemoryError if a step of so many tokens does not fit. longest: the longest context of its sequences.
        It is called only where memory can be seen to be short."""
        if tokens > LEAST_CHUNK:
            self._looked_at = -math.inf  # such a step takes far longer than a look
        fitting = self._fitting()
        if fitting == math.inf:
            return
        needed = tokens * self._bytes_per_token + longest() * self._bytes_per_key
        if needed > fitting * self._bytes_per_token:
            free = max(0, self._free() - MARGIN) / 1e6
            raise MemoryError(
                f"a step of {tokens} tokens may take {needed / 1e6:.1f} MB, but only {free:.1f} MB are free"
            )
        is_near = self._is_short or OVERRUN * needed > fitting * self._bytes_per_token
        hold_to(int(needed) if is_near else None)

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
        fitting = max(0.0, free - MARGIN) / self._bytes_per_token
        return fitting if address_space_left() is None else max(fitting, self._fitting_in_heap(fitting))

    def _fitting_in_heap(self, least: float) -> float:
        """Tokens, if they are more than `least`, that fit into memory that malloc has mapped before and that is free.
        It does not count for other limits than that on the address space: the system may have taken its pages back."""
        tokens, most = 2 * self._max_tokens, (self._system_free - MARGIN) / self._bytes_per_token
        while tokens > least:
            if tokens <= most and can_allocate(int(tokens * self._bytes_per_token)):
                return tokens
            tokens //= 2
        return 0.0

    def _free(self) -> float:
        """Bytes that the system and the limit on the address space leave."""
        needed = self._max_tokens * self._bytes_per_token + MARGIN
        now = self._clock()
        if now >= self._looked_at + LOOK_SECONDS or self._system_free < NEAR * needed:
            self._looked_at, self._system_free = now, system_free_memory(UNLIMITED)
        left = address_space_left()
        return self._system_free if left is None else min(self._system_free, left)

    def _give_back(self) -> bool:
        """Return freed memory to the system, unless that was done just before. Returns whether it was."""
        now = self._clock()
        if now < self._gave_back_at + GIVE_BACK_SECONDS:
            return False
        mx.clear_cache()
        return_freed_memory()
        self._gave_back_at, self._looked_at = now, -math.inf
        return True


_usual_limit: int | None = None
_usual_cache_limit = 0


def hold_to(more: int | None) -> None:
    """Let MLX wait for running operations before it allocates more than so many bytes beside those in use, and keep no
    freed buffers. None ends that. On a CPU, MLX allocates the outputs of up to 100 operations before they run. Freed
    buffers count for a control group, which kills the process at its limit. MLX keeps as many as a step takes."""
    global _usual_limit, _usual_cache_limit
    if more is not None:
        if (kept := int(mx.set_cache_limit(0))) > 0:
            _usual_cache_limit = kept
            mx.clear_cache()
        before = int(mx.set_memory_limit(int(mx.get_active_memory()) + more))
        _usual_limit = before if _usual_limit is None else _usual_limit
    elif _usual_limit is not None:
        mx.set_memory_limit(_usual_limit)
        mx.set_cache_limit(_usual_cache_limit)
        _usual_limit = None
