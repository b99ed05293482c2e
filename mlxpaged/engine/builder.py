"""Loads a model and assembles its engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from mlxpaged.attention.neural_accelerators import log_advice
from mlxpaged.awake import AWAKE
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.part import Part
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.engine.row_times import time_rows
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.cpu.malloc import returning_freed_memory
from mlxpaged.engine.executor import executor_of
from mlxpaged.engine.parts import Assembly, bytes_of_parts, parts_of
from mlxpaged.engine.sizes import sizes_of
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.errors import EncoderError, UnsupportedModelError
from mlxpaged.models.features import Feature
from mlxpaged.models.layers import is_per_sequence, keeps_states
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from mlxpaged.models.sources.preflight import Reserved
from mlxpaged.models.turns import Turns
from mlxpaged.parts.disk.stored_prefixes import open_stored_prefixes
from mlxpaged.parts.drafting.draft_check import draft_support
from mlxpaged.parts.drafting.draft_loading import with_draft_model
from mlxpaged.parts.embeddings.embedder import Embedder
from mlxpaged.parts.embeddings.embedder_loading import build_embedder, load_embedding_core
from mlxpaged.parts.embeddings.embedding_core import EmbeddingCore
from mlxpaged.parts.grammar.grammar import Grammars
from mlxpaged.parts.images.images import cannot_see
from mlxpaged.parts.memory.fitting import least_step, limit_freed_buffers
from mlxpaged.parts.memory.memory_pressure import MemoryPressure, memory_pressure
from mlxpaged.parts.memory.step_memory import measure_encoding, measure_step
from mlxpaged.parts.memory.wired_memory import choose_wiring
from mlxpaged.parts.ranks.ranks import Ranks
from mlxpaged.progress import Report, Stage

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    served: ServedModel,
    clock: Callable[[], float] = time.monotonic,
    embedder: Embedder | None = None,
    no_embedder: str = "",
    report: Report = lambda progress: None,
    step_bytes: int = 0,
    pressure: Callable[[], MemoryPressure] = memory_pressure,
    ranks: Ranks | None = None,
) -> EngineCore:
    """Make an engine for a loaded model, on the thread that will run it.

    clock: seconds. Requests' arrival times refer to it. no_embedder: the reason if `embedder` is None. report: called
    while kernels are compiled, and timed at the first start. step_bytes: memory of the largest step, as `measure_step`
    finds it. pressure: what the system says about its memory. ranks: all of them make the engine at the same time, and
    the one with the least memory decides the sizes; only rank 0 calls its methods. Raises MemoryError if the KV pools,
    the recurrent states or the swap space do not fit, and SwapSpaceError if the swap space's directory cannot be used.
    """
    if config.batch_invariant and (keeps_states(served.layers) or is_per_sequence(served.layers)):
        raise UnsupportedModelError(f"{served.name}: its recurrent layers are not batch-invariant (--batch-invariant)")
    served, turns = as_it_sees(config, served), Turns(report)
    drafts = draft_support(config, served, turns, ranks)
    beside_step = (0 if embedder is None else embedder.step_bytes) + bytes_of_parts(config, served, drafts.works)
    sizes = sizes_of(config, served, step_bytes, beside_step, ranks)
    executor = executor_of(config, served, sizes, drafts.pads, report, turns, ranks)
    served, runner, sampler = executor.served, executor.runner, executor.sampler
    stored = open_stored_prefixes(config, served, sizes.scheduler, executor.backend, turns, ranks)
    scheduler = Scheduler(replace(sizes.scheduler, cache_seed=stored.seed or sizes.scheduler.cache_seed), clock)
    parts: list[Part] = []
    grammars = Grammars(served.tokenizer, served.vocab_size)
    requests = RequestTable(served, scheduler, grammars, sampler, clock, parts)
    made_of = config, sizes, executor, scheduler, requests, clock, pressure, stored.store, drafts.works, ranks
    parts += parts_of(Assembly(*made_of), parts)
    missing = served.missing.but(Feature.EMBEDDINGS, no_embedder).but(Feature.DISK_PREFIXES, stored.reason)
    own = served, scheduler, runner, sampler, grammars, requests, clock, parts
    return EngineCore(*own, embedder, missing, executor.kernels_off, sizes.step_bytes)


def as_it_sees(config: EngineConfig, served: ServedModel) -> ServedModel:
    """The model, without its vision tower if the engine cannot compute images whole."""
    if served.vision is None or not (reason := cannot_see(served.vision, config)):
        return served
    logger.warning("this model is served without its eyes: %s", reason)
    return replace(served, vision=None, missing=served.missing.but(Feature.IMAGES, reason))


@returning_freed_memory()
def load_core(
    config: EngineConfig, clock: Callable[[], float], report: Report, ranks: Ranks | None = None
) -> EngineCore | EmbeddingCore:
    """Load a model and make its engine, on the thread that will run it. report: called while the model loads, and as
    `build_engine` calls it. ranks: those that compute the model together; all of them call this with an equal `config`.
    Raises ModelNotFoundError, UnsupportedModelError and the errors of `build_engine`."""
    log_advice()
    AWAKE.choose(not config.allow_sleep)
    choose_wiring(config.wired_memory if ranks is None else "off")
    if ranks is not None:
        if config.wired_memory == "on":
            logger.warning("several machines wire no memory (--wired-memory)")
        check_for_ranks(config)
    turns = Turns(report)
    if config.only_embeds:
        return load_embedding_core(config, clock, turns)
    try:
        served = load_model(config.model, load_options(config, ranks), turns, None if ranks is None else ranks.group)
    except EncoderError as error:
        if ranks is not None or config.adapters:
            raise
        logger.info("%s; it is loaded for embeddings only", error)
        return load_embedding_core(config, clock, turns)
    served = with_draft_model(config, served, turns, ranks)
    turns.begin(Stage.MEASURING)
    step_bytes = measure_step(served, config)
    turns.take()
    if served.vision is not None:
        step_bytes = max(step_bytes, measure_encoding(served.vision))
        turns.take()
    embedder = build_embedder(config, served) if ranks is None else (None, "several ranks make no embeddings")
    core = build_engine(config, served, clock, *embedder, report, step_bytes, ranks=ranks)
    if ranks is None:  # the other ranks take no steps before all are ready
        try:
            turns.begin(Stage.TIMING_STEPS)
            limit_freed_buffers(step_bytes)  # as steps will have it: those of many rows take new buffers otherwise
            time_rows(core, turns.take)
        except BaseException:  # also if the load is not wanted any more
            core.close()
            raise
    return core


def load_options(config: EngineConfig, ranks: Ranks | None) -> LoadOptions:
    return LoadOptions(
        served_name=config.served_model_name,
        tool_parser=config.tool_parser,
        max_model_len=config.max_model_len,
        reserved=Reserved(config.kv_cache_bytes or 0, least_step()),
        is_reranker=config.reranker,
        adapters=config.adapters,
        joins=config.joins,
        most_pixels=config.max_image_pixels,
        kv_cache_dtype=config.kv_cache_dtype,
        drafts=config.loads_draft_head,
        mtp_path=config.mtp,
        # The machine that renders prompts has the file; ranks on others may not.
        chat_template=config.chat_template if ranks is None else None,
        cpu_dtype=config.cpu_dtype,
        dtype=config.dtype,
    )


def check_for_ranks(config: EngineConfig) -> None:
    """Raises UnsupportedModelError if the configuration asks for something that several ranks cannot do."""
    if config.only_embeds:
        raise UnsupportedModelError(f"{config.model}: several ranks make no embeddings; run this model on one machine")
    if config.adapters:
        raise UnsupportedModelError(f"{config.model}: several ranks cannot serve adapters; leave out --adapter")
    if config.batch_invariant:
        raise UnsupportedModelError(
            f"{config.model}: several ranks are not batch-invariant; leave out --batch-invariant"
        )
