"""Which tokens run in the next step. Plain Python over plain integers; never imports mlx."""

from mlxpaged.scheduler.admission import Admission, PromptTooLongError
from mlxpaged.scheduler.batch import Batch, BlockMoves, ScheduledSequence
from mlxpaged.scheduler.config import PREFILL_MODES, SchedulerConfig, SchedulerStats
from mlxpaged.scheduler.scheduler import Scheduler, UnknownSequenceError
from mlxpaged.scheduler.sequence import FinishReason, IllegalTransitionError, Priority, Sequence, SequenceStatus

__all__ = [
    "PREFILL_MODES",
    "Admission",
    "Batch",
    "BlockMoves",
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
