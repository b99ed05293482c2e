"""The model runner of a rank: rank 0 lets the others make each call that changes the state of the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as ListOf
from typing import Any

import mlx.core as mx

from mlxpaged.attention.layout import KV_DTYPES
from mlxpaged.core.engine.errors import RankLostError
from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.engine.step_input import NO_TOKENS, SampledTokens
from mlxpaged.core.step import BlockMoves, Step
from mlxpaged.parts.images.images import Images
from mlxpaged.parts.ranks.rank_messages import MessageWriter
from mlxpaged.parts.ranks.ranks import Ranks


class SharedRunner(ModelRunner):
    """ranks: all of them. After `lead`, each call that changes the state of the device is made on all ranks."""

    is_shared = True

    def __init__(self, ranks: Ranks, images: Images | None, *args: Any, **options: Any) -> None:
        """args, options: those of ModelRunner. images: one of its inputs."""
        self.ranks, self._images = ranks, images
        self._broadcast: Callable[[bytes], object] | None = None
        self._messages = MessageWriter()
        super().__init__(*args, **options)

    def lead(self) -> None:
        """From now on, the other ranks make no call that rank 0 has not sent."""
        if self.ranks.leads:
            self._broadcast = self.ranks.broadcast
            if self._images is not None:
                self._images.on_put, self._images.on_drop = self._share_features, self._drop_features

    def tell(self, call: str, *arguments: Any) -> None:
        """Raises RankLostError."""
        if self._broadcast is not None:
            try:
                self._broadcast(self._messages.write(call, *arguments))
            except Exception as error:
                raise RankLostError(f"the other ranks cannot be reached: {error}") from error

    def agree(self, values: ListOf[int]) -> list[int]:
        """All ranks must call it. Raises RankLostError."""
        return self.ranks.least_of_each(values)

    def tokens_in_flight(self, sampled: SampledTokens) -> mx.array | None:
        """The tokens are those of rank 0. The others know only their sequences."""
        return self.ranks.tokens(sampled.tokens, len(sampled.sequence_ids))

    # -- calls of rank 0 that the others make too ----------------------------------------------------------------------

    def forward(self, step: Step, sampled: SampledTokens = NO_TOKENS, running: Collection[int] = ()) -> mx.array:
        """The step is launched on return. An exception after its message was sent is a RankLostError: the other ranks
        wait for this one in the step."""
        if self._broadcast is None:
            return super().forward(step, sampled, running)
        self.prepare(step)
        self.tell("run", step, list(sampled.sequence_ids), sorted(running))
        try:
            logits = self.run(step, sampled, running)
            self.start_step(logits)  # the same arrays as on the other ranks, so that MLX orders collectives alike
        except Exception as error:
            cause = error if isinstance(error, DeviceError) else f"{type(error).__name__}: {error}"
            raise RankLostError(f"a step of several ranks failed: {cause}") from error
        return logits

    def move_blocks(self, moves: BlockMoves) -> None:
        self.tell("move_blocks", moves)
        super().move_blocks(moves)

    def copy_blocks(self, moves: Mapping[int, int]) -> None:
        self.tell("copy_blocks", moves)
        super().copy_blocks(moves)

    def resize_pool(self, index: int, num_blocks: int) -> None:
        """Raises MemoryError if memory is missing on another rank. Then no rank's pool has changed. Only rank 0 has the
        pools of layers that only draft."""
        self.tell("resize_pool", index, num_blocks)
        if index >= len(self.pools):
            self.agree([True])
            return
        before = self.pools[index].num_blocks
        error: Exception | None = None
        try:
            super().resize_pool(index, num_blocks)
        except (MemoryError, RuntimeError) as failure:
            error = failure
        if not self.agree([error is None])[0]:
            if error is None:
                super().resize_pool(index, before)
            if self.ranks.leads:
                raise error or MemoryError("another rank does not have the memory")

    def free_memory(self) -> int:
        """The least of all ranks."""
        self.tell("free_memory")
        return self.agree([super().free_memory()])[0]

    def clear_cache(self) -> None:
        self.tell("clear_cache")
        super().clear_cache()

    # -- images --------------------------------------------------------------------------------------------------------

    def _share_features(self, number: int, grid: tuple[int, int], features: mx.array) -> None:
        """Give an image's features to all ranks."""
        sizes = (*features.shape, *grid)
        self.tell("receive_features", number, KV_DTYPES.index(features.dtype), *sizes)
        mx.eval(self.ranks.from_first(features))

    def receive_features(self, number: int, dtype: int, *sizes: int) -> None:
        """Does the part of another rank in `_share_features`. sizes: of the features, then rows and columns."""
        assert self._images is not None
        *shape, rows, columns = sizes
        features = self.ranks.from_first(mx.zeros(shape, KV_DTYPES[dtype]))
        mx.eval(features)
        self._images.receive(number, (rows, columns), features)

    def _drop_features(self, number: int) -> None:
        """Let the other ranks drop them too. If those are lost the next step says so: features are also dropped while
        all requests are ended because of it."""
        with contextlib.suppress(RankLostError):
            self.tell("forget_features", number)

    def forget_features(self, number: int) -> None:
        assert self._images is not None
        self._images.forget(number)
