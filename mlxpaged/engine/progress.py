"""How far the start of an engine is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from mlxpaged.attention.self_check import ReportAmount


class Stage(Enum):
    LOADING = "loading"  # weights, in bytes
    COMPILING = "compiling kernels"  # and checking them, in cases
    TIMING = "timing kernels"  # in shape classes


@dataclass(frozen=True)
class Progress:
    """done, total: in the unit of the stage."""

    stage: Stage
    done: int
    total: int

    def __str__(self) -> str:
        if self.stage is not Stage.LOADING:
            return f"{self.stage.value} {self.done} of {self.total}"
        if not self.total:  # not known before the files are read
            return str(self.stage.value)
        unit, size = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        return f"{self.stage.value} {self.done / size:.1f} of {self.total / size:.1f} {unit}"


Report = Callable[[Progress], object]


def reporter(stage: Stage, report: Report) -> ReportAmount:
    """What a stage calls with the amounts that are done and in total."""
    return lambda done, total: report(Progress(stage, done, total))
