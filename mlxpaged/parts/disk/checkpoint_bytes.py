"""Takes checkpoints of recurrent states as bytes, and makes them from bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import mlx.core as mx

from mlxpaged.core.engine.model_runner import device_errors
from mlxpaged.core.engine.swap_space import Bytes, arrays_of, flat_bytes
from mlxpaged.models.states.states import RecurrentLayer


class CheckpointBytes:
    """layers: those with states, in the order of their bytes. nbytes: of one checkpoint; 0 without such layers."""

    def __init__(self, layers: Sequence[RecurrentLayer]) -> None:
        self._layers = layers
        self._likes = [like for layer in layers for like in layer.likes]
        self.nbytes = sum(math.prod(shape) * int(dtype.size) for shape, dtype in self._likes)

    def read(self, checkpoint: int) -> list[mx.array]:
        """The bytes of all arrays, after the steps in flight."""
        arrays = [flat_bytes(array) for layer in self._layers for array in layer.checkpoint(checkpoint)]
        mx.async_eval(arrays)
        return arrays

    def write(self, checkpoint: int, data: Bytes, most: int) -> Iterator[None]:
        """Make a checkpoint layer by layer. Yields after every `most` bytes. Raises DeviceError."""
        arrays, written = arrays_of(data, self._likes), 0
        for layer in self._layers:
            layer.put_checkpoint(checkpoint, arrays)
            new = layer.checkpoint(checkpoint)
            with device_errors():
                mx.eval(new)
            written += sum(array.nbytes for array in new)
            if written >= most:
                yield
                written = 0
