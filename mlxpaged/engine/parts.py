"""The optional parts of a model's engine, and their order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mlxpaged.core.engine.part import Part
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.engine.executor import Executor
from mlxpaged.engine.sizes import Sizes
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.drafts.draft_assistant import Assistant
from mlxpaged.models.features import Feature
from mlxpaged.models.loader import ServedModel
from mlxpaged.parts.disk.disk_share import DiskShare
from mlxpaged.parts.disk.disk_store import DiskStore
from mlxpaged.parts.disk.disk_tier import DiskTier
from mlxpaged.parts.drafting.draft_passes import DraftPasses
from mlxpaged.parts.drafting.drafting import Drafting
from mlxpaged.parts.drafting.network_drafters import AssistantDrafter, HeadDrafter, ModelDrafter, NetworkDrafter
from mlxpaged.parts.drafting.ngram import NgramDrafter, index_bytes
from mlxpaged.parts.images.image_encoder import ImageEncoder, NoImages
from mlxpaged.parts.images.images import FEATURE_BYTES
from mlxpaged.parts.memory.growth_wait import GrowthWait
from mlxpaged.parts.memory.memory_pressure import MemoryPressure
from mlxpaged.parts.memory.pool_resizer import PoolResizer
from mlxpaged.parts.memory.step_limit import StepLimit
from mlxpaged.parts.owner.duty_cycle import DutyCycle
from mlxpaged.parts.owner.sensors import sensors_here
from mlxpaged.parts.ranks.ranks import Ranks
from mlxpaged.parts.repetition.loop_end import LoopEnd

logger = logging.getLogger(__name__)

FROM_TEXT = "ngram", "auto"
"""Settings of `speculative` with drafts from the text of a request."""


@dataclass(frozen=True)
class Assembly:
    """What parts are made of. drafts: whether the model decodes with drafts. store: of prefixes; None if none are
    stored."""

    config: EngineConfig
    sizes: Sizes
    executor: Executor
    scheduler: Scheduler
    requests: RequestTable
    clock: Callable[[], float]
    pressure: Callable[[], MemoryPressure]
    store: DiskStore | None
    drafts: bool
    ranks: Ranks | None


def parts_of(assembly: Assembly, parts: Sequence[Part]) -> Iterator[Part]:
    """In the order in which they are asked. parts: the list that they come into.

    A pause comes before all that a step needs. The pools grow and shrink next, so that a step has what it asked for.
    Requests that have waited too long for memory end next, and answers that only repeat themselves: nothing is prepared
    for them. Images that a prefix covers are not encoded, so the encoder comes after the tier. Drafts follow known
    tokens, so they come after it: the encoder may have ended the step in flight.
    """
    if assembly.config.duty_cycle < 1:
        yield from duty_cycle_of(assembly)
    scheduler, requests, clock, sizes = assembly.scheduler, assembly.requests, assembly.clock, assembly.sizes
    bytes_of = sizes.bytes_per_block, sizes.step_bytes
    yield PoolResizer(scheduler, assembly.executor.runner, *bytes_of, clock, assembly.pressure, parts)
    yield GrowthWait(scheduler, requests, clock)
    yield LoopEnd(requests, assembly.executor.served.tokenizer, assembly.config.end_loops)
    if assembly.store is not None:
        yield tier_of(assembly, assembly.store)
    runner, sampler, images = assembly.executor.runner, assembly.executor.sampler, assembly.executor.images
    if images is None:
        yield NoImages()
    else:
        yield ImageEncoder(images, scheduler, requests.end_held, clock, assembly.config.batch_invariant)
    if assembly.drafts:
        drafter = NgramDrafter() if assembly.config.speculative in FROM_TEXT else None
        network = network_drafter_of(assembly)
        if drafter is not None or network is not None:
            yield Drafting(scheduler, requests, sampler.vocab_size, drafter, network, runner.overlaps, clock)
    yield StepLimit(scheduler)


def duty_cycle_of(assembly: Assembly) -> Iterator[Part]:
    if (sensors := sensors_here()) is None:
        logger.warning("--duty-cycle has no effect here: only macOS says whether the machine is in use")
    else:
        yield DutyCycle(assembly.config.duty_cycle, sensors, assembly.clock)


def bytes_of_parts(config: EngineConfig, served: ServedModel, drafts: bool) -> int:
    """Memory that the parts take while the engine runs, beside a step. drafts: as in Assembly."""
    features = 0 if served.vision is None else FEATURE_BYTES
    indexes = config.max_num_seqs * served.max_model_len if drafts and config.speculative in FROM_TEXT else 0
    return features + index_bytes(indexes)


def tier_of(assembly: Assembly, store: DiskStore) -> DiskTier:
    """Rank 0 names what all ranks store, and the others put their own seed before these names."""
    ranks, scheduler, executor = assembly.ranks, assembly.scheduler, assembly.executor
    own_seed = b"" if ranks is None or ranks.leads else scheduler.config.cache_seed
    return DiskTier(DiskShare(store, executor.served.name, executor.runner, own_seed), scheduler, assembly.clock)


def network_drafter_of(assembly: Assembly) -> NetworkDrafter | None:
    """Drafts by a smaller model or by the model's draft head; None if there is none, or none is wanted."""
    config, served = assembly.config, assembly.executor.served
    passes = DraftPasses(served, assembly.executor.runner, config.block_size)
    own = assembly.scheduler, passes, assembly.executor.sampler
    if served.draft_model is not None:
        return ModelDrafter(*own, served.draft_model.nbytes / served.weight_bytes)
    if served.mtp is None:
        if config.loads_draft_head:
            level = logging.WARNING if config.speculative == "mtp" else logging.INFO
            logger.log(level, "no draft head drafts for %s: %s", served.name, served.missing[Feature.DRAFT_HEAD])
        return None
    drafter = AssistantDrafter if isinstance(served.mtp, Assistant) else HeadDrafter
    return drafter(*own, served.mtp.bytes_read / served.weight_bytes)
