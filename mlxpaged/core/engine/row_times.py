"""Times steps by their rows at the start, so that the scheduler knows what they cost before the first request."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.step_input import decoding_step

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 33, 64, 128, 3, 6, 12)
"""Decoding rows of the steps. A GPU's tiles begin and end at 32, 33 and 64; fewer rows matter most for drafts."""

RECURRENT_ROWS = 8
"""Most rows of a model with recurrent states, because each row takes the memory of a state."""

STEPS = 3
"""Steps of each number of rows. The shortest counts: the first one compiles what it needs."""

TOTAL_SECONDS = 0.5
"""No more steps are timed when they have taken this time, or if the next ones would take longer."""


def time_rows(core: EngineCore, take_turn: Callable[[], None] = lambda: None) -> dict[int, float]:
    """Seconds of decoding steps by their rows, as many as can be timed. No block may be in use. The scheduler learns
    them.

    take_turn: called before each step, for the steps of other models.
    """
    runner, config = core.runner, core.scheduler.config
    most = min(RECURRENT_ROWS, config.max_num_seqs) if runner.is_recurrent else config.max_num_batched_tokens
    spent, longest, seconds = 0.0, 0.0, dict[int, float]()
    with runner.uncounted():
        for rows in ROWS:
            if rows <= most and spent + longest <= TOTAL_SECONDS:
                steps = step_times(core, rows, take_turn)
                seconds[rows] = min(steps)
                spent += sum(steps)
                longest = max(longest, sum(steps))
    core.scheduler.times.learn_rows(seconds)
    times = ", ".join(f"{rows}: {1000 * seconds[rows]:.1f}" for rows in sorted(seconds))
    logger.info("milliseconds of a decoding step by its rows: %s", times)
    return seconds


def step_times(core: EngineCore, rows: int, take_turn: Callable[[], None]) -> list[float]:
    """Seconds of STEPS steps. The rows share the first blocks: what they read does not matter."""
    runner, num_blocks = core.runner, core.scheduler.pool.num_blocks
    sequence_ids, num_groups = range(-rows, 0), len(core.scheduler.config.groups)
    times = []
    for position in range(STEPS):
        step = decoding_step(sequence_ids, position, 0, num_blocks, num_groups)
        running = sequence_ids if position < STEPS - 1 else ()  # after the last step, no state is kept
        take_turn()
        began = core.clock()
        runner.finish_step(runner.forward(step, running=running))
        times.append(core.clock() - began)
    return times
