"""The probe refuses models that are computed wrongly, passes their windows, and takes few tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.attention import LayerKVCache, PagedLayer, StepContext
from mlxpaged.models import load_model
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.layer_finder import Way, layer_specs
from mlxpaged.models.probe import probe
from mlxpaged.models.probe_steps import SHORT_PROMPT, num_tokens
from mlxpaged.models.reference import make_reference
from mlxpaged.models.states import RecurrentLayer
from tests.models.architectures import make_architecture
from tests.support import cast, make_tiny_model

CONTEXT = 512

Break = Callable[[pytest.MonkeyPatch, Any], None]
"""Makes the paged run wrong, after the reference was computed. It gets the model."""


def attend_otherwise(change: Callable[[dict[str, Any]], None]) -> Break:
    """Change the options of attention over the pools."""

    def patch(monkeypatch: pytest.MonkeyPatch, _model: Any) -> None:
        plain = LayerKVCache.attend

        def attend(self: LayerKVCache, *args: Any, **options: Any) -> mx.array:
            change(options)
            return plain(self, *args, **options)

        monkeypatch.setattr(LayerKVCache, "attend", attend)

    return patch


def more_keys(by: int) -> Break:
    def change(options: dict[str, Any]) -> None:
        if options["window"] is not None:
            options["window"] += by

    return attend_otherwise(change)


def last_rows_one_position_later(monkeypatch: pytest.MonkeyPatch, _model: Any) -> None:
    """The last third of a step's rows is wrong. An equal shift of all would change nothing."""
    offset: Any = PagedLayer.offset

    def later(self: PagedLayer) -> mx.array:
        positions: mx.array = offset.fget(self)
        count = positions.shape[0]
        return positions + (mx.arange(count) >= count - max(1, count // 3))

    monkeypatch.setattr(PagedLayer, "offset", property(later))


def rotary_factor(factor: float) -> Break:
    """Positions of paged rows are multiplied by a factor."""

    def patch(monkeypatch: pytest.MonkeyPatch, _model: Any) -> None:
        plain = nn.RoPE.__call__

        def rope(self: nn.RoPE, x: mx.array, offset: Any = 0) -> mx.array:
            if not isinstance(offset, mx.array):
                return plain(self, x, offset)
            options = {"traditional": self.traditional, "base": self.base, "scale": factor * self.scale}
            return mx.fast.rope(x, self.dims, offset=offset, **options)

        monkeypatch.setattr(nn.RoPE, "__call__", rope)

    return patch


def rotary_base(monkeypatch: pytest.MonkeyPatch, _model: Any) -> None:
    plain = nn.RoPE.__call__

    def rope(self: nn.RoPE, x: mx.array, offset: Any = 0) -> mx.array:
        if not isinstance(offset, mx.array):
            return plain(self, x, offset)
        options = {"traditional": self.traditional, "base": 1.02 * self.base, "scale": self.scale}
        return mx.fast.rope(x, self.dims, offset=offset, **options)

    monkeypatch.setattr(nn.RoPE, "__call__", rope)


def wrong_pool(monkeypatch: pytest.MonkeyPatch, _model: Any) -> None:
    """A layer that attends with the keys of another layer reads the pool of a third one."""
    plain, seen = StepContext.layer_of, dict[int, list[PagedLayer]]()

    def layer_of(self: StepContext, keys: mx.array) -> PagedLayer | None:
        right = plain(self, keys)
        assert right is not None
        layers = seen.setdefault(id(self.meta), [])
        if right in layers:
            return next(each for each in layers if each is not right and each.kv.layout == right.kv.layout)
        layers.append(right)
        return right

    monkeypatch.setattr(StepContext, "layer_of", layer_of)


def no_restore(monkeypatch: pytest.MonkeyPatch, _model: Any) -> None:
    """A sequence starts from shared blocks without the recurrent state that belongs to them."""
    plain = RecurrentLayer.load

    def load(self: RecurrentLayer, index: int) -> RecurrentLayer:
        loaded = plain(self, index)
        if self.groups[index].restore is not None:
            loaded.cache = [None] * len(loaded.cache)
        return loaded

    monkeypatch.setattr(RecurrentLayer, "load", load)


def attribute(name: str, change: Callable[[Any], Any]) -> Break:
    """Change a number in all modules of the model."""

    def patch(_monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        owners = [module for module in model.modules() if hasattr(module, name)]
        assert owners
        for module in owners:
            setattr(module, name, change(getattr(module, name)))

    return patch


BROKEN: dict[str, tuple[str, Break]] = {
    "some rows one position later": ("qwen3", last_rows_one_position_later),
    "positions off by 2 %": ("qwen3", rotary_factor(1.02)),
    "rotary base off by 2 %": ("qwen3", rotary_base),
    "scale off by 2 %": ("qwen3", attend_otherwise(lambda options: options.update(scale=1.02 * options["scale"]))),
    "window one key short": ("gemma3_text", more_keys(-1)),
    "window one key long": ("olmo3", more_keys(1)),
    "sinks ignored": ("gpt_oss", attend_otherwise(lambda options: options.update(sinks=None))),
    "softcap ignored": ("gemma2", attribute("attn_logit_softcapping", lambda cap: 1e6)),
    "shared layer reads another pool": ("gemma4", wrong_pool),
    "state not restored": ("qwen3_5", no_restore),
    "state of a short convolution not restored": ("lfm2", no_restore),
    "one more key selected": ("deepseek_v32", attribute("index_topk", lambda topk: topk + 1)),
}

def run_broken(path: Path, patch: Break, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    model: Any = load_plain_model(path)[0]
    model.eval()
    reference = make_reference(model, CONTEXT)
    specs = layer_specs(model, way)
    patch(monkeypatch, model)
    probe(model, specs, reference)
