"""What is replaced in a model, and what only looks at it."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model

from mlxpaged.models.layer_finder import Way, find_layers
from mlxpaged.models.replacements import route_layers
from tests.models.architectures import make_architecture


def classes_of(model: Module) -> list[type]:
    return [type(module) for _, module in model.named_modules()]


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2", "qwen3_5"])
def test_layers_are_found_without_a_change_to_the_model(name: str, tmp_path: Path) -> None:
    """`mlxpaged pull` and the page's list only ask what the layers keep."""
    model, _ = load_model(make_architecture(tmp_path / "m", name))
    before = classes_of(model)
    specs, owners = find_layers(model)
    assert len(specs) == len(model.layers)
    assert all(owner.modules for owner in owners)
    assert classes_of(model) == before
    route_layers(model, Way.ROWS)
    assert classes_of(model) != before
