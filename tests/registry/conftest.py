"""Directories of models, for all tests of the registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.test_status import MAMBA
from tests.support import make_embedding_model, make_tiny_model


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models of different kinds."""
    root = tmp_path_factory.mktemp("models")
    return {
        "small": make_tiny_model(root / "small", "qwen3", 1),
        "hybrid": make_tiny_model(root / "hybrid", "mamba", 2, **MAMBA),
        "other": make_tiny_model(root / "other", "llama", 3),
        "vectors": make_embedding_model(root / "vectors"),
    }
