"""Adds to a loaded model what drafts for it, if that has files of its own."""

from __future__ import annotations

import logging
from dataclasses import replace

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.cache_groups import cache_layout
from mlxpaged.models.drafts.draft_head import load_mtp
from mlxpaged.models.drafts.draft_model import DraftModel
from mlxpaged.models.errors import AssistantError, UnsupportedModelError
from mlxpaged.models.features import Feature
from mlxpaged.models.files.weights import WeightReader
from mlxpaged.models.layers import KV, leaves
from mlxpaged.models.loader import NO_HEADS_TO_READ, LoadOptions, ServedModel, load_model, resolve_mtp
from mlxpaged.models.sources.preflight import Reserved
from mlxpaged.models.turns import Turns
from mlxpaged.parts.memory.fitting import least_step
from mlxpaged.parts.ranks.ranks import Ranks

logger = logging.getLogger(__name__)


def with_draft_model(
    config: EngineConfig, served: ServedModel, turns: Turns, ranks: Ranks | None = None
) -> ServedModel:
    """The model with the draft model of the configuration, if it has one. Of several ranks, rank 0 drafts alone: the
    hidden states and the tokens are there. Raises ModelNotFoundError or UnsupportedModelError."""
    if config.draft_model is not None and (ranks is None or ranks.leads):
        reserved = Reserved(config.kv_cache_bytes or 0, least_step())
        try:
            options = LoadOptions(
                reserved=reserved, joins=config.joins, most_pixels=0, cpu_dtype=config.cpu_dtype, dtype="auto"
            )
            draft = load_model(config.draft_model, options, turns)
        except AssistantError:
            if ranks is not None:
                raise UnsupportedModelError(f"{config.draft_model} cannot draft: {NO_HEADS_TO_READ}") from None
            return with_assistant(served, config, config.draft_model, turns)
        small = draft_model(draft, served)
        weights = served.weight_bytes + small.nbytes
        served = replace(served, layers=[*served.layers, *small.layers], draft_model=small, weight_bytes=weights)
    windows = cache_layout(served.kv_layers, served.max_model_len).windows
    if ranks is not None and served.num_drafting and len(windows) > 1:
        reason = "of several ranks, those without its layers would put their own into other cache groups"
        logger.warning("%s decodes without a draft head or model: %s", served.name, reason)
        served = without_drafts(served, reason)
    return served


def draft_model(draft: ServedModel, served: ServedModel) -> DraftModel:
    """Raises UnsupportedModelError, with the reason, if a loaded model cannot draft for another one."""
    reason = ""
    if draft.tokenizer.reader.get_vocab() != served.tokenizer.reader.get_vocab():
        reason = f"its vocabulary is not that of {served.name}"
    elif not all(isinstance(spec, KV) for spec in leaves(draft.layers)):
        reason = "its layers keep more than keys and values"
    elif draft.rows is None:
        reason = "its output head is not found"
    if reason or draft.rows is None:
        raise UnsupportedModelError(f"{draft.name} cannot draft: {reason}")
    sizes = draft.vocab_size, served.vocab_size, draft.weight_bytes
    return DraftModel(draft.name, draft.model, draft.rows, draft.layers, *sizes)


def with_assistant(served: ServedModel, config: EngineConfig, name: str, turns: Turns) -> ServedModel:
    """The model with the assistant of this name. Raises UnsupportedModelError."""
    if served.rows is None:
        raise UnsupportedModelError(f"{name} cannot draft: the output head of {served.name} is not found")
    mtp = load_mtp(served.model, resolve_mtp(name))
    WeightReader(config.cpu_dtype, 0, turns.report).read(mtp.head)
    missing = served.missing.but(Feature.DRAFT_HEAD, "")
    return replace(served, mtp=mtp, missing=missing, weight_bytes=served.weight_bytes + mtp.nbytes)


def without_drafts(served: ServedModel, reason: str) -> ServedModel:
    """The model without its draft head or draft model."""
    layers = served.layers[: len(served.layers) - served.num_drafting]
    missing = served.missing.but(Feature.DRAFT_HEAD, reason)
    return replace(served, layers=layers, mtp=None, draft_model=None, missing=missing)
