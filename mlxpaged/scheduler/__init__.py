"""Which tokens run in the next step. Plain Python over plain integers; never imports mlx."""

from mlxpaged.scheduler.batch import Batch, ScheduledSequence
from mlxpaged.scheduler.scheduler import (
    PromptTooLongError,
    Scheduler,
    SchedulerConfig,
    SchedulerStats,
    UnknownSequenceError,
)
from mlxpaged.scheduler.sequence import FinishReason, IllegalTransitionError, Priority, Sequence, SequenceStatus

__all__ = [
    "Batch",
    "FinishReason",
    "IllegalTransitionError",
    "Priority",
    "PromptTooLongError",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "Sequence",
    "SequenceStatus",
    "UnknownSequenceError",
]
