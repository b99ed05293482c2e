"""The engine without its thread: takes requests, runs one step at a time, returns outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as ListOf

from mlxpaged.engine.disk_tier import NO_TIER, DiskTier
from mlxpaged.engine.drafting import Drafter, Drafting
from mlxpaged.engine.embedder import NO_EMBEDDINGS, Embedder
from mlxpaged.engine.grammar import Grammars
from mlxpaged.engine.growth_wait import GrowthWait
from mlxpaged.engine.headroom import Headroom
from mlxpaged.engine.image_encoder import ImageEncoder
from mlxpaged.engine.images import Images
from mlxpaged.engine.memory import StateMemory
from mlxpaged.engine.memory_watch import POLL_SECONDS
from mlxpaged.engine.model_runner import ModelRunner
from mlxpaged.engine.network_drafters import NetworkDrafter
from mlxpaged.engine.part import Part
from mlxpaged.engine.pool_resizer import REST_SECONDS, PoolResizer
from mlxpaged.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.engine.request_table import RequestTable
from mlxpaged.engine.sampler import Sampler
from mlxpaged.engine.stall import StepSize
from mlxpaged.engine.status import (
    MAX_WAITING_LISTED,
    MAX_WAITING_WATCHED,
    NO_DRAFTS,
    NO_IMAGES,
    EngineSnapshot,
    EngineStats,
    EngineStatus,
    ImageStats,
    engine_status,
)
from mlxpaged.engine.step_loop import StepLoop
from mlxpaged.engine.worker import DeviceClock, Worker
from mlxpaged.models.layers import state_bytes
from mlxpaged.models.loader import ServedModel
from mlxpaged.scheduler.scheduler import Scheduler


class EngineCore(Worker):
    """A model that generates text. `builder.build_engine` makes one. kernels_off: as in BackendChoice.

    `requests` takes and ends requests, and `loop` runs them in steps. The embedder has steps of its own.
    """

    generates = True

    def __init__(
        self,
        served: ServedModel,
        scheduler: Scheduler,
        runner: ModelRunner,
        resizer: PoolResizer,
        sampler: Sampler,
        grammars: Grammars,
        headroom: Headroom,
        clock: Callable[[], float] = time.monotonic,
        embedder: Embedder | None = None,
        no_embedder_because: str = "",
        kernels_off: str | None = None,
        images: Images | None = None,
        tier: DiskTier | None = None,
        no_tier_because: str = "",
        drafter: Drafter | None = None,
        network: NetworkDrafter | None = None,
    ) -> None:
        super().__init__(embedder)
        self.served = served
        self.scheduler = scheduler
        self.runner = runner
        self.resizer = resizer
        self.sampler = sampler
        self.grammars = grammars
        self.clock = clock
        self.no_embedder_because = no_embedder_because
        self.kernels_off = kernels_off
        self.images = images
        self.tier = tier
        self.no_tier_because = no_tier_because
        if tier is not None:
            resizer.before_shrink, resizer.on_evicted = tier.end_load, tier.take_leaving
        config = scheduler.config
        self.states = StateMemory(state_bytes(served.layers), config.max_num_seqs, config.num_checkpoints)
        # The order in which they are asked. Images that a prefix covers are not encoded, so they come after the tier.
        # Drafts follow known tokens, so they come last: the encoder may have ended the step in flight.
        self.parts: list[Part] = []
        self.requests = RequestTable(served, scheduler, grammars, clock, self._forget, images, self.parts)
        self.parts.append(GrowthWait(scheduler, self.requests, clock))
        if tier is not None:
            self.parts.append(tier)
        if images is not None:
            if scheduler.prefix_cache is not None:
                scheduler.prefix_cache.content_of = images.content_of
            invariant = runner.tile_size is not None
            self.parts.append(ImageEncoder(images, scheduler, self.requests.end_held, clock, invariant))
        self.drafting = None
        if drafter is not None or network is not None:
            sizes = sampler.vocab_size, drafter, network
            self.drafting = Drafting(scheduler, self.requests, *sizes, runner.overlaps, clock)
            self.parts.append(self.drafting)
        own = scheduler, runner, resizer, sampler, grammars, headroom, self.requests, clock
        self.loop = StepLoop(*own, self.parts)

    def _forget(self, sequence_id: int) -> None:
        self.sampler.forget(sequence_id)
        for part in self.parts:
            part.forget(sequence_id)

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
        self.loop.device = device

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
        if self.embeds() or self.resizer.is_resizing or (self.has_work() and not self.waits_for_memory):
            return 0.0
        longest = POLL_SECONDS if self.has_work() or self.resizer.can_shrink else REST_SECONDS
        return min(longest, max(0.0, self.requests.next_check - self.clock()))

    @property
    def waits_for_memory(self) -> bool:  # type: ignore[override]
        return self.loop.waits_for_memory

    @property
    def weight(self) -> float:  # type: ignore[override]
        return self.requests.weight

    @property
    def step_bytes(self) -> int:  # type: ignore[override]
        return self.resizer.step_bytes

    def step_size(self) -> StepSize:
        return self.loop.step_size()

    def rest(self, device_is_idle: bool) -> bool:
        self.scheduler.blocks.size.missing = 0  # no request waits for more
        self.scheduler.times.learn()
        return self.loop.resize_pools(is_idle=True, device_is_idle=device_is_idle)

    def give_back(self) -> int:
        """Shrink the pool to what running requests and its least size need."""
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
        if self.runner.swap is not None:
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
            self.resizer.bytes_of(self.scheduler.config.num_blocks),
            self.states.nbytes,
            NO_EMBEDDINGS if self.embedder is None else self.embedder.stats(),
            NO_IMAGES if self.images is None else ImageStats(self.images.num_encoded, self.images.nbytes),
            self.loop.prompt_chunks,
            NO_TIER._replace(off_because=self.no_tier_because) if self.tier is None else self.tier.stats(),
            NO_DRAFTS if self.drafting is None else self.drafting.stats,
        )
