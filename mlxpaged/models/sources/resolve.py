"""Finds the files of a model, whatever its source: bundled, on this machine, or on the hub."""

from __future__ import annotations

import logging
from pathlib import Path

from mlxpaged.models.sources.hub import download
from mlxpaged.models.sources.local import check_before_loading, local_path
from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.sources.preflight import NOTHING, Reserved, local_file_sizes
from mlxpaged.models.sources.short_names import BUNDLED, full_name, taken

logger = logging.getLogger(__name__)

MODELS = Path(__file__).parents[1]
"""Where the bundled ones are."""


def resolve(name: str, reserved: Reserved = NOTHING, num_ranks: int = 1) -> ModelFiles:
    """The files of a bundled model, of a local one, of one that another app has, or of a hub repository, which is
    downloaded if it is not cached. A repository may have a short name. The weights are neither downloaded nor read if
    other files show that they cannot be loaded. reserved: memory that is needed beside the weights. num_ranks: each
    loads a share of them.

    Raises ModelNotFoundError, whose message says what was tried, or UnsupportedModelError."""
    if name in BUNDLED:
        path = MODELS / BUNDLED[name]
    else:
        if (said := taken(name)) is not None:
            logger.info("%s", said)
        name = full_name(name)
        path = local_path(name) or download(name, reserved, num_ranks)
    check_before_loading(name, path, local_file_sizes(path), reserved, num_ranks)
    return ModelFiles(path)
