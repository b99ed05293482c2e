"""Runs one batch through the model: metadata in, one forward pass, one token out per row that samples."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlxpaged.attention import AttentionMetadata, LayerKVCache, PagedLayer, StepContext
from mlxpaged.models import ServedModel
from mlxpaged.scheduler import Batch


class ModelRunner:
    """Owns the KV pools. Belongs to the thread that made it: MLX streams are bound to a thread, and an array made on
    another one fails deep inside MLX, so a call from elsewhere is refused here."""

    def __init__(self, served: ServedModel, num_blocks: int, block_size: int, backend: str) -> None:
        self._model = served.model
        self._rows = served.rows
        self._block_size = block_size
        self._step = StepContext()
        self.layers = [
            PagedLayer(
                LayerKVCache(num_blocks, spec.num_kv_heads, spec.head_dim, spec.dtype, block_size, backend),
                self._step,
                spec.window,
            )
            for spec in served.layers
        ]
        self._thread = threading.get_ident()
        self.model_calls = 0
        mx.eval([layer.kv.arrays for layer in self.layers])

    @property
    def attention_calls(self) -> int:
        return self._step.attention_calls

    @property
    def backend(self) -> str:
        return self.layers[0].kv.backend

    def forward(self, batch: Batch, block_tables: Mapping[int, Sequence[int]]) -> mx.array:
        """Logits [R, V] of the R rows that sample, in the order of the batch; not yet evaluated.

        Writes the keys and values of the batch's tokens into their blocks.
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
            logits: mx.array = self._model(mx.array(np.asarray(token_ids, dtype=np.int32)[:, None]), cache=self.layers)
            self.model_calls += 1
        finally:
            self._step.end()
            if self._rows is not None:
                self._rows.rows = None
        return logits[:, -1] if self._rows is not None else logits[wanted, -1]

    def finish_step(self, *results: mx.array) -> None:
        """Wait until the results are known and the pools are written.

        On the CPU a step must end before the next one writes: a pool that an unfinished step still reads cannot be
        written in place and is copied whole.
        """
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
