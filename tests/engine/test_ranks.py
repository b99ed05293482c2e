"""What several ranks cannot do is refused before a model is loaded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.engine.builder import load_core
from mlxpaged.engine.config import EngineConfig
from mlxpaged.engine.ranks import Ranks
from mlxpaged.models.adapter_path import AdapterPath
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.sharding import Share


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"only_embeds": True}, "several ranks make no embeddings"),
        ({"adapters": (AdapterPath("red", Path("/no/adapter")),)}, "several ranks cannot serve adapters"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(options: dict[str, Any], reason: str) -> None:
    group: Any = Share(0, 2)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_core(EngineConfig(**options), time.monotonic, lambda progress: None, Ranks(group))
