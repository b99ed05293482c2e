"""Opens the store of prefixes on a disk for one model."""

from __future__ import annotations

import logging
from typing import NamedTuple

from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.fingerprint import fingerprint, library_versions
from mlxpaged.models.layers import is_per_sequence, keeps_states
from mlxpaged.models.loader import ServedModel
from mlxpaged.models.turns import Turns
from mlxpaged.parts.disk.disk_store import RANK_DIRECTORY, DiskStore, StoreError
from mlxpaged.parts.disk.disk_tier import close_store, open_store
from mlxpaged.parts.ranks.ranks import Ranks, least
from mlxpaged.progress import Stage

logger = logging.getLogger(__name__)


class StoredPrefixes(NamedTuple):
    """store: None if there is none, for this reason. seed: of the names of what is stored."""

    store: DiskStore | None
    seed: bytes = b""
    reason: str = ""


def open_stored_prefixes(
    config: EngineConfig,
    served: ServedModel,
    scheduler: SchedulerConfig,
    backend: str,
    turns: Turns,
    ranks: Ranks | None,
) -> StoredPrefixes:
    """backend: that computed the keys and values."""
    if reason := cannot_store(config, served, scheduler.num_checkpoints):
        return StoredPrefixes(None, reason=reason)
    turns.begin(Stage.HASHING)
    digest = turns.during(lambda: fingerprint(served.path))
    store, reason = open_own(config, served, ranks)
    if store is None:
        return StoredPrefixes(None, reason=reason)
    computed = digest, served.kv_type, backend, config.block_size, scheduler.windows, config.joins
    # The bits of a batch-invariant answer may be those of one version only, and so may the order of a state.
    libraries = ["mlx", "mlx-lm"] if config.batch_invariant or scheduler.num_checkpoints else []
    if served.vision is not None and served.vision.tower.library:
        libraries.append(served.vision.tower.library)
    drafting = served.num_drafting > 0 if served.draft_model is None else served.draft_model.name
    seed: tuple[object, ...] = computed, library_versions(libraries), drafting
    if ranks is not None:
        seed = *seed, "tensor parallel", ranks.number, ranks.count
    return StoredPrefixes(store, repr(seed).encode())


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


def open_own(config: EngineConfig, served: ServedModel, ranks: Ranks | None) -> tuple[DiskStore | None, str]:
    """The store, or None and the reason. Each rank has a directory of its own. If one has none, no rank stores
    prefixes."""
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
