"""How far the start of an engine is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

ReportAmount = Callable[[int, int], object]
"""Gets how much is done, and of how much."""


class Stage(Enum):
    LOADING = "loading"  # weights, in bytes
    TOKENIZER = "reading the tokenizer"
    CHECKING_LAYERS = "checking layers"  # those that are joined or fused
    CHECKING_MODEL = "checking the model"  # in steps of the probe
    CHECKING_ADAPTERS = "checking adapters"
    CHECKING_IMAGES = "checking images"
    CHECKING_KV_CACHE = "checking the KV cache"  # if it is quantized, in steps of the probe
    CHECKING_DRAFTS = "checking drafts"  # of a model with recurrent states
    MEASURING = "measuring memory"
    TIMING_STEPS = "timing steps"
    COMPILING = "compiling kernels"  # and checking them, in cases
    TIMING = "timing kernels"  # in shape classes
    WARMING_UP = "warming up"  # decode steps that are replayed
    HASHING = "hashing the weights"  # for prefixes on a disk


@dataclass(frozen=True)
class Progress:
    """done, total: in the unit of the stage. total: 0 if it is not known, or the stage has no parts."""

    stage: Stage
    done: int
    total: int

    def __str__(self) -> str:
        if not self.total:
            return str(self.stage.value)
        if self.stage is not Stage.LOADING:
            return f"{self.stage.value} {self.done} of {self.total}"
        unit, size = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        return f"{self.stage.value} {self.done / size:.1f} of {self.total / size:.1f} {unit}"


Report = Callable[[Progress], object]


def reporter(stage: Stage, report: Report) -> ReportAmount:
    """What a stage calls with the amounts that are done and in total."""
    return lambda done, total: report(Progress(stage, done, total))
