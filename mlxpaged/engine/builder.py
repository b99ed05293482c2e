"""Loads a model and assembles its engine: sizes memory, checks kernels, tunes the attention, and makes the parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlxpaged.attention.backends import BACKENDS
from mlxpaged.attention.kv_cache import resolve_backend
from mlxpaged.attention.self_check import choose_backend
from mlxpaged.attention.tuner import Limits, choose_tunings
from mlxpaged.cache.disk_store import RANK_DIRECTORY, DiskStore, StoreError
from mlxpaged.cache.groups import CacheGroups
from mlxpaged.cpu.malloc import returning_freed_memory
from mlxpaged.engine.config import EngineConfig
from mlxpaged.engine.core import EngineCore
from mlxpaged.engine.device_tiles import device_tiles
from mlxpaged.engine.disk_share import DiskShare
from mlxpaged.engine.disk_tier import DiskTier, close_store, open_store
from mlxpaged.engine.draft_check import takes_drafts_back
from mlxpaged.engine.draft_loading import with_draft_model
from mlxpaged.engine.embedder import Embedder
from mlxpaged.engine.embedding_core import EmbeddingCore
from mlxpaged.engine.grammar import Grammars
from mlxpaged.engine.headroom import Headroom
from mlxpaged.engine.images import FEATURE_BYTES, Images, cannot_see
from mlxpaged.engine.memory import (
    START_TOKENS,
    StateMemory,
    cached_blocks,
    drafting_sequences,
    kv_blocks,
    least_step,
    limit_freed_buffers,
    state_checkpoints,
    swap_slots,
)
from mlxpaged.engine.memory_pressure import MemoryPressure, memory_pressure
from mlxpaged.engine.model_runner import ModelRunner
from mlxpaged.engine.network_drafters import AssistantDrafter, HeadDrafter, ModelDrafter, NetworkDrafter
from mlxpaged.engine.ngram import NgramDrafter
from mlxpaged.engine.pool_resizer import PoolResizer
from mlxpaged.engine.prompt_logits import max_prompt_logits
from mlxpaged.engine.ranks import Ranks, least
from mlxpaged.engine.row_times import time_rows
from mlxpaged.engine.sampler import Sampler
from mlxpaged.engine.shared_runner import SharedRunner
from mlxpaged.engine.step_memory import bytes_per_key, measure_encoding, measure_step
from mlxpaged.engine.wired_memory import choose_wiring
from mlxpaged.models.cache_groups import cache_layout, one_group
from mlxpaged.models.device_memory import free_device_memory
from mlxpaged.models.draft_assistant import Assistant
from mlxpaged.models.embedding import EmbeddingModel
from mlxpaged.models.encoder_model import EncoderModel
from mlxpaged.models.errors import EncoderError, UnsupportedModelError
from mlxpaged.models.fingerprint import fingerprint, library_versions
from mlxpaged.models.layers import bytes_per_token, is_per_sequence, keeps_states, state_bytes, unfused
from mlxpaged.models.loader import (
    ServedModel,
    load_embedding_model,
    load_model,
    own_embedding_model,
)
from mlxpaged.models.sources.preflight import Reserved
from mlxpaged.models.turns import Turns
from mlxpaged.progress import Report, Stage, reporter
from mlxpaged.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    served: ServedModel,
    clock: Callable[[], float] = time.monotonic,
    embedder: Embedder | None = None,
    no_embedder_because: str = "",
    report: Report = lambda progress: None,
    step_bytes: int = 0,
    pressure: Callable[[], MemoryPressure] = memory_pressure,
    ranks: Ranks | None = None,
) -> EngineCore:
    """Make an engine for a loaded model, on the thread that will run it.

    clock: seconds. Requests' arrival times refer to it. no_embedder_because: the reason if `embedder` is None. report:
    called while kernels are compiled, and timed at the first start. step_bytes: memory of the largest step, as
    `measure_step` finds it. pressure: what the system says about its memory. ranks: all of them make the engine at the
    same time, and the one with the least memory decides the sizes; only rank 0 calls its methods. Raises MemoryError if
    the KV pools, the recurrent states or the swap space do not fit, and SwapSpaceError if the swap space's directory
    cannot be used.
    """
    per_state, own_caches = state_bytes(served.layers), is_per_sequence(served.layers)
    if config.batch_invariant and (per_state or own_caches):
        raise UnsupportedModelError(f"{served.name}: its recurrent layers are not batch-invariant (--batch-invariant)")
    if served.vision is not None and (reason := cannot_see(served.vision, config)):
        logger.warning("this model is served without its eyes: %s", reason)
        served = replace(served, vision=None, no_vision_because=reason)
    turns, drafts, pads = Turns(report), can_draft(config, served), False
    if drafts and keeps_states(served.layers):
        turns.begin(Stage.CHECKING_DRAFTS)
        pads = takes_back(config, served, True, ranks)
        drafts = pads or takes_back(config, served, False, ranks)
        if not drafts:
            logger.warning("%s decodes without drafts: its logits are wrong after rejected ones", served.name)
    layout = one_group(served.kv_layers) if own_caches else cache_layout(served.kv_layers, served.max_model_len)
    groups = CacheGroups(layout.windows, config.block_size)
    per_block = (bytes_per_token(served.layers) if own_caches else layout.bytes_per_token) * config.block_size
    per_sequence = groups.blocks_needed(served.max_model_len, config.max_num_batched_tokens)
    checkpoints = config.prefix_caching and not own_caches
    num_checkpoints = 0
    if checkpoints:
        most = config.max_num_seqs * per_sequence  # one for each block of the largest default pool
        num_checkpoints = least(min(most, state_checkpoints(per_state, config.state_cache_bytes)), ranks)
    states = StateMemory(per_state, config.max_num_seqs, num_checkpoints)
    step_bytes = max(step_bytes, least_step())
    reserved = step_bytes + (0 if embedder is None else embedder.step_bytes)
    reserved += 0 if served.vision is None else FEATURE_BYTES
    num_blocks = least(
        kv_blocks(per_block, config.kv_cache_bytes, per_sequence, config.max_num_seqs, reserved, states), ranks
    )
    at_start = groups.blocks_needed(min(START_TOKENS, served.max_model_len), config.max_num_batched_tokens)
    start_blocks = min(num_blocks, at_start) if per_block else num_blocks
    swaps = config.swap_space_bytes > 0 and per_block > 0 and not own_caches
    slots = least(swap_slots(per_block, config.swap_space_bytes), ranks) if swaps else 0
    kv_type = ",".join(sorted({spec.stored_type for spec in served.kv_layers}))
    scheduler_config = replace(
        config.scheduler_config(num_blocks, slots, cache_seed=f"{served.name}|{kv_type}".encode()),
        start_blocks=start_blocks,
        cached_blocks=cached_blocks(per_block, served.weight_bytes),
        windows=layout.windows,
        recurrent=keeps_states(served.layers),
        num_checkpoints=num_checkpoints,
        max_draft_states=drafting_sequences(per_state),
        swap_slots_per_state=-least(-per_state // per_block, ranks) if slots else 0,  # a block of rank 0 may be larger
        max_prompt_logits=max_prompt_logits(served.vocab_size, config.max_num_batched_tokens),
        tiles=device_tiles(served),
    )
    shapes = [spec.attention_shape(config.block_size) for spec in served.kv_layers]
    fusions = [fusion for fusion in (spec.qkv_shape(config.block_size) for spec in served.kv_layers) if fusion]
    choice = choose_backend(config.attention_backend, shapes, reporter(Stage.COMPILING, report), fusions)
    served = replace(served, layers=[unfused(spec, choice.unfused, config.block_size) for spec in served.layers])
    own_backend = "gather" if config.batch_invariant and choice.backend == "cpu" else choice.backend
    backend = common_backend(own_backend, ranks)
    limits = Limits(served.max_model_len, config.max_num_seqs)
    timing = reporter(Stage.TIMING, report)
    tuning = "default" if config.batch_invariant else config.attention_tuning
    tunings = choose_tunings(backend, tuning, shapes, limits, config.retune, timing)
    images = None if served.vision is None else Images(served.vision)
    make_runner = ModelRunner if ranks is None else partial(SharedRunner, ranks)
    runner = make_runner(
        *(served, start_blocks, config.block_size, backend, tunings, slots, config.swap_dir, layout),
        batch_invariant=config.batch_invariant,
        images=images,
    )
    runner.rollback.pads = pads
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    absent = served.tokenizer.absent_ids(served.vocab_size)
    sampler = Sampler(served.vocab_size, compiled=on_gpu, one_by_one=config.batch_invariant, absent=absent)
    if on_gpu:
        turns.begin(Stage.WARMING_UP)
        runner.warm_up()
        sampler.warm_up()
    if isinstance(runner, SharedRunner):
        runner.lead()
    digest, no_tier_because = "", cannot_store(config, served, num_checkpoints)
    if not no_tier_because:
        turns.begin(Stage.HASHING)
        digest = turns.during(lambda: fingerprint(served.path))
    store, no_tier_because = (None, no_tier_because) if no_tier_because else open_tier(config, served, ranks)
    if store is not None:
        seed: tuple[object, ...] = digest, kv_type, backend, config.block_size, groups.windows, config.joins
        # The bits of a batch-invariant answer may be those of one version only, and so may the order of a state.
        libraries = ["mlx", "mlx-lm"] if config.batch_invariant or num_checkpoints else []
        if served.vision is not None and served.vision.tower.library:
            libraries.append(served.vision.tower.library)
        drafting = served.num_drafting > 0 if served.draft_model is None else served.draft_model.name
        seed = seed, library_versions(libraries), drafting
        if ranks is not None:
            seed = *seed, "tensor parallel", ranks.number, ranks.count
        scheduler_config = replace(scheduler_config, cache_seed=repr(seed).encode())
    scheduler = Scheduler(scheduler_config, clock)
    tier = None
    if store is not None:
        own_seed = b"" if ranks is None or ranks.leads else scheduler_config.cache_seed
        tier = DiskTier(DiskShare(store, served.name, runner, own_seed), scheduler, clock)
    headroom = Headroom(step_bytes, config.max_num_batched_tokens, clock, bytes_per_key(served.kv_layers))
    return EngineCore(
        served,
        scheduler,
        runner,
        PoolResizer(scheduler, runner, per_block, step_bytes, clock, pressure),
        sampler,
        Grammars(served.tokenizer, served.vocab_size),
        headroom,
        clock,
        embedder,
        no_embedder_because,
        choice.kernels_off,
        images,
        tier,
        no_tier_because,
        NgramDrafter() if drafts and config.speculative in ("ngram", "auto") else None,
        network_drafter_of(config, served, scheduler, runner, sampler) if drafts else None,
    )


def can_draft(config: EngineConfig, served: ServedModel) -> bool:
    """Whether drafts are wanted, and caches do not change in place."""
    if config.speculative == "off":
        return False
    if is_per_sequence(served.layers):
        logger.warning(
            "%s decodes without drafts: it runs once per sequence, and its caches change in place", served.name
        )
        return False
    return True


def takes_back(config: EngineConfig, served: ServedModel, pads: bool, ranks: Ranks | None) -> bool:
    """Whether all ranks take back recurrent states, as `takes_drafts_back` says."""
    return bool(least(takes_drafts_back(served, config.block_size, pads), ranks))


def network_drafter_of(
    config: EngineConfig, served: ServedModel, scheduler: Scheduler, runner: ModelRunner, sampler: Sampler
) -> NetworkDrafter | None:
    """Drafts by a smaller model or by the model's draft head; None if there is none, or none is wanted."""
    parts = scheduler, runner, sampler
    if served.draft_model is not None:
        return ModelDrafter(*parts, served.draft_model.nbytes / served.weight_bytes)
    if served.mtp is None:
        if config.loads_draft_head:
            level = logging.WARNING if config.speculative == "mtp" else logging.INFO
            logger.log(level, "no draft head drafts for %s: %s", served.name, served.no_mtp_because)
        return None
    drafter = AssistantDrafter if isinstance(served.mtp, Assistant) else HeadDrafter
    return drafter(*parts, served.mtp.bytes_read / served.weight_bytes)


def cannot_store(config: EngineConfig, served: ServedModel, num_checkpoints: int) -> str:
    """The reason why prefixes are not stored on a disk; empty if they can be."""
    if config.prefix_cache_dir is None:
        return "there is no --prefix-cache-dir"
    reason = ""
    if is_per_sequence(served.layers):
        reason = "its caches of single sequences are not stored"
    elif keeps_states(served.layers) and not num_checkpoints:
        reason = "there is no memory for checkpoints of recurrent states (--state-cache-memory)"
    if reason:
        logger.warning("no prefixes of %s are stored: %s", served.name, reason)
    return reason


def open_tier(config: EngineConfig, served: ServedModel, ranks: Ranks | None) -> tuple[DiskStore | None, str]:
    """The store of the prefix cache's tier on a disk, or None and the reason. Each rank has a directory of its own. If
    one has none, no rank stores prefixes."""
    assert config.prefix_cache_dir is not None
    directory, store, reason = config.prefix_cache_dir, None, ""
    if ranks is not None:
        directory /= RANK_DIRECTORY.format(ranks.number, ranks.count)
    try:
        store = open_store(directory, config.prefix_cache_disk_bytes, config.prefix_cache_write_bytes)
    except StoreError as error:
        reason = str(error)
    if not least(store is not None, ranks) and store is not None:
        close_store(store)
        store, reason = None, "another rank cannot use its directory; its log says why"
    if reason:
        logger.warning("no prefixes of %s are stored: %s", served.name, reason)
    return store, reason


def common_backend(own: str, ranks: Ranks | None) -> str:
    """The backend that all ranks chose, or "gather", which runs anywhere: backends fill up a step to different sizes,
    and a collective needs equal ones."""
    index = BACKENDS.index(resolve_backend(own))
    return own if least(index, ranks) == -least(-index, ranks) else "gather"


@returning_freed_memory()
def load_core(
    config: EngineConfig, clock: Callable[[], float], report: Report, ranks: Ranks | None = None
) -> EngineCore | EmbeddingCore:
    """Load a model and make its engine, on the thread that will run it. report: called while the model loads, and as
    `build_engine` calls it. ranks: those that compute the model together; all of them call this with an equal `config`.
    Raises ModelNotFoundError, UnsupportedModelError and the errors of `build_engine`."""
    choose_wiring(config.wired_memory)
    if ranks is not None:
        check_for_ranks(config)
    turns, name = Turns(report), config.served_model_name
    if config.only_embeds:
        return load_embedding_core(config, clock, turns)
    reserved = Reserved(config.kv_cache_bytes or 0, least_step())
    options = config.max_model_len, reserved, config.reranker, config.adapters
    group = None if ranks is None else ranks.group
    # The machine that renders prompts has the file; ranks on others may not.
    template = config.chat_template if ranks is None else None
    try:
        served = load_model(
            *(config.model, name, config.tool_parser, turns, *options, group, config.joins),
            *(config.max_image_pixels, config.kv_cache_dtype, config.loads_draft_head, config.mtp, template),
            config.cpu_dtype,
        )
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


def load_embedding_core(config: EngineConfig, clock: Callable[[], float], turns: Turns) -> EmbeddingCore:
    """An engine that generates no text. Raises ModelNotFoundError, UnsupportedModelError or MemoryError."""
    step = Reserved(step=least_step())
    options = config.embedding_max_model_len, turns, step, config.cpu_dtype
    model = load_embedding_model(config.model, config.served_model_name, *options)
    embedder = make_embedder(model, config)
    check_room(embedder)
    return EmbeddingCore(embedder, clock)


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


def check_room(embedder: Embedder) -> None:
    """Raises MemoryError if the largest step does not fit."""
    free = free_device_memory()
    if embedder.step_bytes > free:
        raise MemoryError(
            f"{embedder.model.name}: the longest input takes {embedder.step_bytes / 1e6:.1f} MB, but only "
            f"{free / 1e6:.1f} MB are free (--embedding-max-model-len)"
        )


def build_embedder(config: EngineConfig, served: ServedModel) -> tuple[Embedder | None, str]:
    """Make the embedder of a model that generates. Returns None and the reason if its directory does not state that it
    makes embeddings."""
    try:
        return make_embedder(own_embedding_model(served, config.embedding_max_model_len), config), ""
    except UnsupportedModelError as error:
        return None, str(error)


def make_embedder(model: EmbeddingModel | EncoderModel, config: EngineConfig) -> Embedder:
    embedder = Embedder(model, config.max_num_batched_tokens)
    logger.info(
        "%s by %s: %d dimensions, %s pooling, inputs up to %d tokens; %.1f MB are reserved for a step",
        "scores" if model.is_reranker else "embeddings",
        model.name,
        model.dimensions,
        model.spec.pooling.value,
        model.max_tokens,
        embedder.step_bytes / 1e6,
    )
    return embedder
