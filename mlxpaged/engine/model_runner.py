"""Runs one batch through the model: metadata in, one forward pass, one token out per row that samples."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
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
)
from mlxpaged.engine.swap_space import SwapSpace
from mlxpaged.models import ServedModel
from mlxpaged.scheduler import Batch, BlockMoves
from mlxpaged.scheduler.sequence import PENDING


@dataclass(frozen=True)
class DrawnTokens:
    """tokens[R], on the device: the last token of each of R sequences, in their order."""

    tokens: mx.array
    sequence_ids: Sequence[int]


def input_ids(batch: Batch, token_ids: Sequence[int], drawn: DrawnTokens | None) -> mx.array:
    """The batch's tokens [T], int32. Only a row's last token can be pending: it is taken from `drawn`."""
    known = np.asarray(token_ids, dtype=np.int32)
    if PENDING not in token_ids:
        return mx.array(known)
    assert drawn is not None
    place = {sequence_id: i for i, sequence_id in enumerate(drawn.sequence_ids)}
    ends = np.cumsum([row.num_tokens for row in batch.rows]) - 1
    source = np.zeros_like(known)
    source[ends] = [
        place[row.sequence.sequence_id] if token_ids[end] == PENDING else 0
        for row, end in zip(batch.rows, ends.tolist(), strict=True)
    ]
    uploaded = mx.array(np.stack([known, source]))
    return mx.where(uploaded[0] == PENDING, drawn.tokens[uploaded[1]], uploaded[0])


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
        self.swap = SwapSpace(pools, num_swap_slots, swap_dir) if num_swap_slots else None
        self._thread = threading.get_ident()
        self.model_calls = 0
        mx.eval([layer.kv.arrays for layer in self.layers])

    @property
    def attention_calls(self) -> int:
        return self._step.attention_calls

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

    def forward(
        self, batch: Batch, block_tables: Mapping[int, Sequence[int]], drawn: DrawnTokens | None = None
    ) -> mx.array:
        """Logits [R, V] of the R rows that sample, in the order of the batch; not yet evaluated.

        Writes the keys and values of the batch's tokens into their blocks. drawn: of the step under way, where tokens
        of the batch are still pending.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError("the model runs on the engine thread only")
        token_ids: list[int] = []
        last_rows = []
        for row in batch.rows:
            token_ids += row.sequence.token_ids[row.start : row.context_len]
            if row.samples:
                last_rows.append(len(token_ids) - 1)
        meta = AttentionMetadata.build(
            [row.num_tokens for row in batch.rows],
            [row.context_len for row in batch.rows],
            [block_tables[row.sequence.sequence_id] for row in batch.rows],
            self._block_size,
        )
        # A step that samples nothing (a chunk in the middle of a prompt) still projects one row: the model has no way
        # to skip its head, and an empty selection would hand it an array without rows.
        wanted = mx.array(np.asarray(last_rows or [len(token_ids) - 1], dtype=np.int32))
        self._step.begin(meta)
        try:
            if self._rows is not None:
                self._rows.rows = wanted
            logits: mx.array = self._model(input_ids(batch, token_ids, drawn)[:, None], cache=self.layers)
            self.model_calls += 1
        finally:
            self._step.end()
            if self._rows is not None:
                self._rows.rows = None
        return logits[:, -1] if self._rows is not None else logits[wanted, -1]

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
        """Let the device begin, and return at once."""
        mx.async_eval(results, [layer.kv.arrays for layer in self.layers])

    def finish_step(self, *results: mx.array) -> None:
        """Wait until the results are known and the pools are written."""
        mx.eval(results, [layer.kv.arrays for layer in self.layers])

    def recover(self) -> bool:
        """After a failed step: True where the pools are intact, False where they had to be made anew, all zero."""
        try:
            self.finish_step()
            return True
        except Exception:
            for layer in self.layers:
                layer.kv.clear()
            self.finish_step()
            return False
