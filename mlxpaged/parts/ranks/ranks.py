"""The ranks of a model that several machines compute together, each with its share of the heads (tensor parallel).

Each rank is a process. Rank 0 has the scheduler and the sampler. Before it changes the state of its device, it sends a
message (rank_messages.py) to the others, which make the same call on their own model runner (follower.py). So all ranks
issue the same collectives in the same order. That is what MLX's groups need: they match them by order alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxpaged.core.engine.errors import RankLostError
from mlxpaged.models import sharding


@dataclass(frozen=True)
class Ranks:
    """All ranks, as one of them sees them.

    group: MLX's. broadcast: brings a message of rank 0 to all others, in order; unused by them.
    """

    group: mx.distributed.Group
    broadcast: Callable[[bytes], object] = lambda message: None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.number == 0

    @property
    def number(self) -> int:
        return self.group.rank()

    @property
    def count(self) -> int:
        return self.group.size()

    def least(self, value: int) -> int:
        """The least of the ranks' values. All ranks must call it. Raises RankLostError."""
        return self.least_of_each([value])[0]

    def least_of_each(self, values: Sequence[int]) -> list[int]:
        """For each of the values, the least that a rank has in its place. All ranks must call it. Raises
        RankLostError."""
        try:
            return sharding.least_of_each(values, self.group)
        except RuntimeError as error:
            raise RankLostError(f"the ranks cannot agree: {error}") from error

    def tokens(self, sampled: mx.array | None, count: int) -> mx.array:
        """Rank 0's tokens [count], on the devices of all ranks.

        They are the first collective of the step that needs them. No host waits for them."""
        # An array of host numbers is evaluated already, as the sampler's tokens are. So the graphs of all ranks are
        # equal, and MLX evaluates independent collectives in the same order.
        own = sampled if self.leads and sampled is not None else mx.array(np.zeros(count, np.int32))
        return mx.distributed.all_sum(own, group=self.group)

    def from_first(self, array: mx.array) -> mx.array:
        """Rank 0's array, on the devices of all ranks. array: on the others, of zeros. All ranks must call it."""
        return mx.distributed.all_sum(array, group=self.group)


def least(value: int, ranks: Ranks | None) -> int:
    """The least of the ranks' values, or the value if there is one rank."""
    return value if ranks is None else ranks.least(value)
