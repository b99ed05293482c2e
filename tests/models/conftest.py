"""A tiny model in MLX's format, and the same one as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.gguf_models import as_gguf
from tests.support import make_tiny_model


@pytest.fixture(scope="module")
def mlx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("mlx") / "m", "llama")


@pytest.fixture(scope="module")
def gguf(mlx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_gguf(mlx, tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf")
