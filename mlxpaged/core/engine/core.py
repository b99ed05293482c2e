"""The engine without its thread: takes requests, runs one step at a time, returns outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import TypeVar

from mlxpaged.core.engine.matcher import Matchers
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.part import Part
from mlxpaged.core.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.core.engine.request_rows import RequestRows
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.engine.sampler import Sampler
from mlxpaged.core.engine.stall import StepSize
from mlxpaged.core.engine.status import (
    MAX_WAITING_LISTED,
    MAX_WAITING_WATCHED,
    EngineSnapshot,
    EngineStats,
    EngineStatus,
    engine_status,
)
from mlxpaged.core.engine.step_loop import StepLoop
from mlxpaged.core.engine.worker import REST_SECONDS, DeviceClock, Embeds, Worker
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.models.features import Missing
from mlxpaged.models.layers import StateMemory, state_bytes
from mlxpaged.models.loader import ServedModel

P = TypeVar("P", bound=Part)


class EngineCore(Worker):
    """A model that generates text. `builder.build_engine` makes one.

    `requests` takes and ends requests, and `loop` runs them in steps. The embedder has steps of its own. parts: those
    of `requests` too. missing: why it has no embedder, images or other feature. kernels_off: as in BackendChoice.
    """

    generates = True

    def __init__(
        self,
        served: ServedModel,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        grammars: Matchers,
        requests: RequestTable,
        clock: Callable[[], float],
        parts: ListOf[Part],
        embedder: Embeds | None = None,
        missing: Missing | None = None,
        kernels_off: str | None = None,
        step_bytes: int = 0,
    ) -> None:
        super().__init__(embedder)
        self.step_bytes = step_bytes
        self.served = served
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.grammars = grammars
        self.clock = clock
        self.missing = served.missing if missing is None else missing
        self.kernels_off = kernels_off
        config = scheduler.config
        self.states = StateMemory(state_bytes(served.layers), config.max_num_seqs, config.num_checkpoints)
        self.parts = parts
        self.requests = requests
        rows = RequestRows(requests, grammars)
        self.loop = StepLoop(scheduler, runner, sampler, rows, requests, clock, parts)

    def part(self, kind: type[P]) -> P | None:
        """The part of this type, if there is one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def add(self, request: Request) -> None:
        """Queue a request, with the errors of `RequestTable.add`."""
        self.requests.add(request)

    def submit(self, requests: ListOf[Request]) -> list[RequestOutput]:
        return self.requests.submit(requests)

    def abort(self, request_id: str, error: str | None = None) -> list[RequestOutput]:
        return self.requests.abort(request_id, error)

    def abort_all(self, error: str) -> list[RequestOutput]:
        return super().abort_all(error) + self.requests.abort_all(error)

    def cancel(self, request_ids: ListOf[str]) -> tuple[list[EndedRequest], list[RequestOutput]]:
        of_embedder, _ = super().cancel(request_ids)
        ended, outputs = self.requests.cancel(request_ids)
        return of_embedder + ended, outputs

    # -- the engine thread -------------------------------------------------------------------------------------------

    def join(self, device: DeviceClock) -> None:
        self.loop.join(device)

    def expire(self) -> list[RequestOutput]:
        return self.requests.expire()

    def has_work(self) -> bool:
        has_requests = self.scheduler.has_unfinished() or self.loop.has_step_in_flight
        return has_requests or any(part.has_work for part in self.parts)

    def step(self) -> list[RequestOutput]:
        return self.loop.step()

    def finish_step(self) -> list[RequestOutput]:
        self.loop.finish_in_flight()
        return self.requests.take_outputs()

    def pause(self) -> float:
        waits = self.has_work()
        if self.embeds() or (waits and not self.waits_for_memory):
            return 0.0
        until_check = max(0.0, self.requests.next_check - self.clock())
        return min(REST_SECONDS, until_check, *(part.pause(waits) for part in self.parts))

    @property
    def waits_for_memory(self) -> bool:  # type: ignore[override]
        return self.loop.waits_for_memory

    @property
    def weight(self) -> float:  # type: ignore[override]
        return self.requests.weight

    def step_size(self) -> StepSize:
        return self.loop.step_size()

    def rest(self, device_is_idle: bool) -> bool:
        self.scheduler.blocks.size.forget_asked()
        self.scheduler.times.learn()
        return self.loop.rest(device_is_idle)

    def give_back(self) -> int:
        before = self.runner.kv_cache_bytes
        self.loop.give_back()
        return before - self.runner.kv_cache_bytes

    def clear_cache(self) -> int:
        for part in self.parts:
            part.clear()
        return self.scheduler.clear_cache()

    def keep_prefixes(self) -> None:
        self.loop.finish_in_flight()
        for part in self.parts:
            part.keep()

    def close(self) -> None:
        """Release the swap space, which may be a file, and the tier on the disk."""
        self.runner.swap.close()
        for part in self.parts:
            part.close()

    # -- statistics --------------------------------------------------------------------------------------------------

    def status(self, max_waiting: int = MAX_WAITING_LISTED) -> EngineStatus:
        sequences = (running.sequence for running in self.requests.by_sequence.values())
        return engine_status(self.scheduler, sequences, self.loop.num_steps, self.clock(), max_waiting)

    def snapshot(self) -> EngineSnapshot:
        started = time.thread_time()
        status, states = self.status(MAX_WAITING_WATCHED), self.scheduler.pool.states()
        return EngineSnapshot(status, states, time.thread_time() - started)

    def stats(self) -> EngineStats:
        return EngineStats(
            self.scheduler.stats(),
            self.loop.num_steps,
            self.runner.model_calls,
            self.runner.attention_calls,
            self.requests.num_generated_tokens,
            self.runner.kv_cache_bytes,
            self.runner.bytes_of(self.scheduler.config.num_blocks),
            self.states.nbytes,
            self.loop.results.prompt_chunks,
            (*(stats for part in self.parts if (stats := part.stats()) is not None), *self.stats_of_embedder),
            self.loop.results.num_prefilled,
            self.runner.swap.written.total,
            self.runner.swap.written.today,
        )
