"""Keeps steps within the memory that is free when they run."""

from __future__ import annotations

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.part import Need, Part, Tokens
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.step import Step
from mlxpaged.parts.memory.headroom import Headroom


class StepLimit(Part):
    """The last part: what others do before a step takes memory too."""

    def __init__(self, scheduler: Scheduler, requests: RequestTable, headroom: Headroom) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self.headroom = headroom

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        self._scheduler.limit_tokens(self.headroom.tokens(self._requests.longest))
        return Need.NOTHING

    def launching(self, step: Step) -> None:
        self.headroom.require(step.num_tokens, lambda: max(step.context_lens))

    def committed(self, step: InFlightStep, tokens: Tokens) -> None:
        self.headroom.note_success()

    def ran_short(self, step: Step) -> None:
        self.headroom.note_failure(step.num_tokens)
