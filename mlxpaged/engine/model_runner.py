"""Runs one batch through the model: metadata in, one forward pass, one token out per row that samples."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxpaged.attention import (
    DEFAULT_TUNING,
    AttentionMetadata,
    AttentionShape,
    LayerKVCache,
    PagedLayer,
    StepContext,
    Tuning,
    lanes,
)
from mlxpaged.attention.metadata import IntArray, repeat_last
from mlxpaged.engine.swap_space import SwapSpace
from mlxpaged.models import RowGroups, ServedModel
from mlxpaged.scheduler import Batch, BlockMoves
from mlxpaged.scheduler.sequence import PENDING


class DeviceError(RuntimeError):
    """The device failed to run a step, now or earlier: the KV pools are lost."""


@dataclass(frozen=True)
class SampledTokens:
    """tokens[R], on the device: the last token of each of R sequences, in their order."""

    tokens: mx.array
    sequence_ids: Sequence[int]


def places_of_pending(batch: Batch, token_ids: IntArray, last: IntArray, drawn: SampledTokens) -> IntArray:
    """For each of the batch's tokens [T] that is pending, its place in `drawn`. Only a row's last token can be, and
    `last` says where these are."""
    place = {sequence_id: i for i, sequence_id in enumerate(drawn.sequence_ids)}
    pending = token_ids[last] == PENDING
    places = np.zeros_like(token_ids)
    places[last[pending]] = [
        place[row.sequence.sequence_id] for row in itertools.compress(batch.rows, pending.tolist())
    ]
    return places


class ModelRunner:
    """Owns the KV pools. Belongs to the thread that made it: MLX streams are bound to a thread, and an array made on
    another one fails deep inside MLX, so a call from elsewhere is refused here.

    tunings: of the layers' shapes, the default one for those that are missing.
    """

    def __init__(
        self,
        served: ServedModel,
        num_blocks: int,
        block_size: int,
        backend: str,
        tunings: Mapping[AttentionShape, Tuning] | None = None,
        num_swap_slots: int = 0,
        swap_dir: Path | None = None,
    ) -> None:
        self._model = served.model
        self._rows = served.rows
        self._block_size = block_size
        self._step = StepContext()
        self.layers = [
            PagedLayer(
                LayerKVCache(
                    num_blocks,
                    spec.num_kv_heads,
                    spec.head_dim,
                    spec.dtype,
                    block_size,
                    backend,
                    (tunings or {}).get(spec.attention_shape(block_size), DEFAULT_TUNING),
                ),
                self._step,
                spec.window,
            )
            for spec in served.layers
        ]
        pools = [layer.kv for layer in self.layers]
        self._groups = served.row_groups if self.backend == "gather" else RowGroups()
        self.swap = SwapSpace(pools, num_swap_slots, swap_dir) if num_swap_slots else None
        self.thread_id = threading.get_ident()
        self.model_calls = 0
        mx.eval([layer.kv.arrays for layer in self.layers])

    @property
    def attention_calls(self) -> int:
        return self._step.attention_calls

    @property
    def kv_cache_bytes(self) -> int:
        return sum(layer.kv.nbytes for layer in self.layers)

    @property
    def backend(self) -> str:
        return self.layers[0].kv.backend

    @property
    def overlaps(self) -> bool:
        """Whether a step may be dispatched while the one before it is under way.

        The Metal backend writes its pools in place whatever else is under way. With MLX's own operations, on a GPU, a
        pool that an unfinished step still reads would be copied whole by the next write. On a CPU it would not, since
        MLX runs few operations ahead there; but for the same reason starting a step takes nearly as long as the step,
        and the tokens of the one before would be read that much later.
        """
        return self.backend == "metal"

    def forward(self, batch: Batch, block_tables: IntArray, drawn: SampledTokens | None = None) -> mx.array:
        """Logits [R, V] of the R rows that sample, in the order of the batch; not yet evaluated.

        Writes the keys and values of the batch's tokens into their blocks. block_tables: of its rows, as the metadata
        wants them. drawn: of the step under way, where tokens of the batch are still pending. All that the model has
        to know of the batch goes to the device in one array; a backend's plan, of which sequence is attended in which
        part of its work, adds a few of its own.
        """
        if threading.get_ident() != self.thread_id:
            raise RuntimeError("the model runs on the engine thread only")
        rows = batch.rows
        tokens: list[int] = []
        for row in rows:
            tokens += row.sequence.token_ids[row.start : row.start + row.num_tokens]
        token_ids: IntArray = np.asarray(tokens, dtype=np.int32)
        query_lens = [row.num_tokens for row in rows]
        last = np.cumsum(query_lens, dtype=np.int32) - 1
        wanted = last[[row.samples for row in rows]]
        # A step that samples nothing (a chunk in the middle of a prompt) still projects one row: the model has no way
        # to skip its head, and an empty selection would hand it an array without rows.
        selected = wanted if wanted.size else last[-1:]
        repeats = self._groups.missing(len(tokens))
        more = [repeat_last(token_ids, repeats), repeat_last(selected, self._groups.missing(len(selected)))]
        if PENDING in tokens:
            assert drawn is not None
            more.append(repeat_last(places_of_pending(batch, token_ids, last, drawn), repeats))
        meta, (ids, wanted_rows, *places) = AttentionMetadata.upload(
            query_lens, [row.start + row.num_tokens for row in rows], block_tables, self._block_size, more, repeats
        )
        if drawn is not None and places:
            ids = mx.where(ids == PENDING, drawn.tokens[places[0]], ids)
        self._step.begin(meta)
        try:
            if self._rows is not None:
                self._rows.rows = wanted_rows
            logits: mx.array = self._model(ids[:, None], cache=self.layers)
            self.model_calls += 1
        finally:
            self._step.end()
            if self._rows is not None:
                self._rows.rows = None
        logits = logits[:, -1] if self._rows is not None else logits[wanted_rows, -1]
        return logits[: len(selected)]

    def move_blocks(self, moves: BlockMoves) -> None:
        """Before the step that asked for them, behind those under way. Raises whatever disk and device do."""
        if self.swap is not None:
            self.swap.store(moves.swap_out)
        for layer in self.layers:
            layer.kv.copy_blocks(moves.copies)
        if self.swap is not None:
            self.swap.load(moves.swap_in)

    def close(self) -> None:
        """Give the swap space back."""
        if self.swap is not None:
            self.swap.close()

    def start_step(self, *results: mx.array) -> None:
        """Let the device begin, and return at once. Raises DeviceError."""
        with device_errors():
            mx.async_eval(results, [layer.kv.arrays for layer in self.layers])

    def finish_step(self, *results: mx.array) -> None:
        """Wait until the results are known and the pools are written. Raises DeviceError."""
        with device_errors():
            mx.eval(results, [layer.kv.arrays for layer in self.layers])

    def rebuild_pools(self) -> None:
        """After a device error: wait for whatever still runs, then make all KV pools anew. Raises DeviceError if the
        device cannot do even that."""
        lanes.settle()
        with contextlib.suppress(Exception):
            mx.synchronize()
        for layer in self.layers:
            layer.kv.clear()
        self.finish_step()


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """MLX raises a device's errors at whatever call evaluates next, as exceptions of several types."""
    try:
        yield
    except Exception as error:
        raise DeviceError(f"{type(error).__name__}: {error}") from error
