"""The model runner of a batch-invariant engine: cuts each step into tiles (row_tiles.py)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.prompt_logits import INVARIANT_TOP
from mlxpaged.core.engine.step_input import NO_TOKENS, SampledTokens
from mlxpaged.core.step import Step
from mlxpaged.models.loader import ServedModel
from mlxpaged.parts.invariant.tiled_steps import largest_tile, row_tiles


class TiledRunner(ModelRunner):
    """Every forward pass has the same shapes: no rows are selected for the output head. No step is replayed: a replayed
    one has other kernels, so the bits of a row would depend on which it is.

    tile_size: rows of each forward pass.
    """

    least_top = INVARIANT_TOP  # of equal logits, which are the best depends on how many are computed

    def __init__(self, served: ServedModel, *args: Any, **options: Any) -> None:
        """args, options: those of ModelRunner."""
        super().__init__(replace(served, rows=None), *args, **options)
        self.graphs.stop()
        with self.uncounted():
            self.tile_size = largest_tile(self.run, self.num_groups)

    def forward(self, step: Step, sampled: SampledTokens = NO_TOKENS, running: Collection[int] = ()) -> mx.array:
        self.prepare(step)
        of_sampled: list[mx.array] = []
        of_prompts: list[mx.array] = []
        for i, tile in enumerate(row_tiles(step, self.tile_size)):
            if i > 0 and not self.overlaps:
                # A write of MLX's own operations would copy a pool that an unfinished tile still reads.
                self.finish_step(*of_sampled, *of_prompts)
            logits = self.run(tile, sampled)
            if tile.num_sampled:
                of_sampled.append(logits[: tile.num_sampled])
            if any(row.prompt_logprobs for row in tile.rows):
                of_prompts.append(logits[max(1, tile.num_sampled) :])
        return mx.concatenate([*(of_sampled or [logits[:1]]), *of_prompts])
