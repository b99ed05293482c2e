"""What the engine asks of what enforces constraints on answers (parts/grammar/)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mlxpaged.core.engine.constraint import Constraint, StructuredOutput

Mask = npt.NDArray[np.int32]
"""[W]: one bit for each of 32 * W tokens, the lowest bit first. A set bit means that the token is allowed."""


def is_allowed(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> token_id % 32 & 1)


class Matcher(Protocol):
    """The state of one answer in its grammar."""

    def forced(self) -> list[int]:
        """The next tokens if there is no choice."""

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens can be drafts."""

    def may_end(self) -> bool:
        """Whether the answer is whole as it is."""

    def advance(self, token_id: int) -> bool:
        """Append a token to the answer. Returns True if nothing can follow. Raises GrammarError."""


class Matchers(Protocol):
    """Compiles the constraints of a model's requests. Matchers are those that `start` has made."""

    def start(self, constraint: Constraint | StructuredOutput, ignore_eos: bool) -> Matcher:
        """Make a matcher for one answer. Raises GrammarError."""

    def compile(self, constraint: Constraint | StructuredOutput) -> object:
        """Wait for what `compile_on_thread` makes. Raises GrammarError, or OSError if no process can be started."""

    def compile_on_thread(self, constraint: Constraint | StructuredOutput) -> Future[Any]:
        """What `start` takes no time after."""

    def is_compiled(self, constraint: Constraint | StructuredOutput) -> bool:
        """Whether `start` takes no time."""

    def masks(self, rows: Sequence[tuple[Any, Collection[int]]]) -> list[Mask]:
        """The tokens that each answer may continue with. rows: matchers, each with tokens that it should avoid now."""

    def masks_along(self, matcher: Any, drafts: Sequence[int], avoided: Sequence[Collection[int]]) -> list[Mask]:
        """The same for one answer, before each of its drafts and after the last one. avoided: for each mask."""
