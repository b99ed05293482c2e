"""Decides which tokens run in the next step. Plain Python on plain integers: nothing here imports mlx."""

from typing import TYPE_CHECKING

from mlxpaged.lazy_names import lazy_names

if TYPE_CHECKING:
    from mlxpaged.scheduler.admission import PromptTooLongError
    from mlxpaged.scheduler.batch import Batch, BlockMoves, ScheduledSequence
    from mlxpaged.scheduler.config import PREFILL_MODES, SchedulerConfig
    from mlxpaged.scheduler.pool_size import PoolSize
    from mlxpaged.scheduler.row_tiles import ANY_ROWS, RowTiles
    from mlxpaged.scheduler.scheduler import Scheduler
    from mlxpaged.scheduler.sequence import FinishReason, IllegalTransitionError, Priority, Sequence, SequenceStatus
    from mlxpaged.scheduler.stats import SchedulerStats
else:
    __getattr__ = lazy_names(__name__, __file__)
