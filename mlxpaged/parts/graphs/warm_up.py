"""Runs decode steps before the first request, until they are replayed, and checks what replayed ones compute.

MLX joins operations of a replayed step into kernels of its own, and compiles these when they first run. They are the
same for all larger batches.
"""

from __future__ import annotations

import logging

import mlx.core as mx

from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.engine.step_input import SampledTokens, decoding_step
from mlxpaged.core.step import PENDING
from mlxpaged.parts.graphs.step_graphs import TRACE_AT

logger = logging.getLogger(__name__)

BATCHES = (1, 2)
"""MLX has a kernel of its own for arrays of one row, and another one for all other shapes."""

MAX_DIFFERENCE = 0.05
"""Largest difference between the logits of a replayed step and another, as a share of the largest: far above rounding
in bfloat16, far below a wrong position or block."""


def warm_up(runner: ModelRunner) -> None:
    """Run decode steps of one sequence and of two in the first blocks, before any block is in use. Their tokens are
    pending, as in nearly all decode steps. If replayed steps fail here, or give other logits, no step is replayed from
    then on, on any rank."""
    graphs = runner.graphs
    if not graphs.enabled or not runner.overlaps:
        return
    blocks = min((pool.num_blocks for pool in runner.pools), default=0)
    try:
        with runner.uncounted():
            for count in BATCHES:
                if count <= blocks and not replays_rightly(runner, count):
                    logger.warning("replayed decode steps give other logits: none is replayed")
                    graphs.stop()
    except DeviceError:
        logger.exception("decode steps cannot be replayed here")
        graphs.stop()
        runner.rebuild_pools()
    if not runner.agree([graphs.enabled])[0]:
        graphs.stop()


def replays_rightly(runner: ModelRunner, count: int) -> bool:
    """Whether a replayed step of so many sequences gives the logits of one that is not."""
    positions = range(TRACE_AT + 1 + runner.is_recurrent)  # no state comes before the first token
    logits = decoded(runner, count, positions)
    with runner.graphs.disabled():
        expected = decoded(runner, count, positions if runner.is_recurrent else positions[-1:])
    return bool((mx.abs(logits - expected).max() <= MAX_DIFFERENCE * mx.abs(expected).max()).item())


def decoded(runner: ModelRunner, count: int, positions: range) -> mx.array:
    """The logits of the last of these positions, of so many sequences, each with a block of its own."""
    for position in positions:
        step = decoding_step(range(count), position, PENDING, count, runner.num_groups)
        sampled = SampledTokens(mx.arange(position, position + count, dtype=mx.int32), range(count))
        logits = runner.forward(step, sampled, range(count))
        runner.finish_step(logits)
    return logits
