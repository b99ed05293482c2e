"""The probe refuses models that are computed wrongly, passes their windows, and takes few tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gemma3_text
from mlx_lm.utils import get_total_parameters
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.attention import precision
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layer import PagedLayer, StepContext
from mlxpaged.models import replacements
from mlxpaged.models.checks import probe_steps
from mlxpaged.models.checks.probe import probe
from mlxpaged.models.checks.reference import make_reference
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.layer_finder import Way
from mlxpaged.models.layers import is_per_sequence
from mlxpaged.models.loader import load_model
from mlxpaged.models.replacements import route_layers
from mlxpaged.models.states.states import RecurrentLayer
from tests.models.architectures import make_architecture
from tests.support import cast, make_tiny_model, quantize, since_mlx_lm_0_32

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


def rotary(base: float = 1.0, scale: float = 1.0) -> Break:
    """Multiply the base of rotary positions, or the positions, for paged rows. Those have an array of offsets."""

    def patch(monkeypatch: pytest.MonkeyPatch, _model: Any) -> None:
        plain = nn.RoPE.__call__

        def rope(self: nn.RoPE, x: mx.array, offset: Any = 0) -> mx.array:
            if not isinstance(offset, mx.array):
                return plain(self, x, offset)
            factors = {"base": base * self.base, "scale": scale * self.scale}
            return mx.fast.rope(x, self.dims, traditional=self.traditional, offset=offset, **factors)

        monkeypatch.setattr(nn.RoPE, "__call__", rope)

    return patch


def wrong_pool(monkeypatch: pytest.MonkeyPatch, _model: Any) -> None:
    """A layer that attends with the keys of another layer reads the pool of a third one."""
    plain, seen = StepContext.layer_of, dict[int, list[PagedLayer]]()

    def layer_of(self: StepContext, keys: mx.array) -> PagedLayer | None:
        right = plain(self, keys)
        assert right is not None
        layers = seen.setdefault(id(self.meta(0)), [])
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


BROKEN: dict[str, tuple[str, Way, Break]] = {
    "some rows one position later": ("qwen3", Way.ROWS, last_rows_one_position_later),
    "positions off by 2 %": ("qwen3", Way.ROWS, rotary(scale=1.02)),
    "rotary base off by 2 %": ("qwen3", Way.ROWS, rotary(base=1.02)),
    "scale off by 2 %": (
        "qwen3",
        Way.ROWS,
        attend_otherwise(lambda options: options.update(scale=options["scale"] * 1.02)),
    ),
    "window one key short": ("gemma3_text", Way.ROWS, more_keys(-1)),
    "window one key long": ("olmo3", Way.ROWS, more_keys(1)),
    "sinks ignored": ("gpt_oss", Way.ROWS, attend_otherwise(lambda options: options.update(sinks=None))),
    "softcap ignored": ("gemma2", Way.ROWS, attend_otherwise(lambda options: options.update(softcap=None))),
    "shared layer reads another pool": ("gemma4", Way.ROWS, wrong_pool),
    "state not restored": ("qwen3_5", Way.ROWS, no_restore),
    "state of a short convolution not restored": ("lfm2", Way.ROWS, no_restore),
    "one more key selected": ("deepseek_v32", Way.MODULES, attribute("index_topk", lambda topk: topk + 1)),
}

HALF = [
    (name, dtype)
    for name in BROKEN
    for dtype in (mx.float16, mx.bfloat16)
    if name not in ("sinks ignored", "one more key selected")  # on a CPU, MLX multiplies by experts in float32 only
    and name not in ("rotary base off by 2 %", "scale off by 2 %", "softcap ignored")  # as small as rounding
    and (name, dtype) not in (("positions off by 2 %", mx.bfloat16), ("window one key short", mx.bfloat16))
]


def plain_model(path: Path) -> Any:
    model, _ = load_plain_model(path)
    model.eval()
    return model


def assert_only_the_broken_one_is_refused(
    path: Path, way: Way, make_wrong: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model(path)
    reference = make_reference(model, CONTEXT)
    specs = route_layers(model, way)
    probe(model, specs, reference)
    make_wrong(monkeypatch, model)
    with pytest.raises(UnsupportedModelError, match="does not reproduce its logits"):
        probe(model, specs, reference)


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_is_computed_wrongly_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, way, make_wrong = BROKEN[name]
    path = make_architecture(tmp_path / "m", architecture)
    assert_only_the_broken_one_is_refused(path, way, make_wrong, monkeypatch)


@pytest.mark.parametrize(("name", "dtype"), HALF, ids=str)
def test_in_half_types_too_if_the_error_is_more_than_rounding(
    name: str, dtype: mx.Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, way, make_wrong = BROKEN[name]
    path = cast(make_architecture(tmp_path / "m", architecture), dtype)
    assert_only_the_broken_one_is_refused(path, way, make_wrong, monkeypatch)


@pytest.mark.parametrize("name", ["dbrx", "step3p5", "deepseek_v3"])
def test_experts_chosen_otherwise_because_of_rounding_do_not_make_a_model_slower(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With 4-bit weights in bfloat16, and two of four experts, single rows of logits are far from mlx-lm's."""
    served = load_model(str(quantize(cast(make_architecture(tmp_path / "m", name), mx.bfloat16), 4)))
    assert not is_per_sequence(served.layers)
    assert "slower" not in caplog.text


def test_a_model_that_was_changed_wrongly_after_loading_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is what mlx-lm loads, before the server changes anything."""

    def change(model: Any) -> None:
        for layer in model.layers:
            layer.self_attn.scale *= 1.02

    monkeypatch.setattr(replacements, "optimize_for_cpu", change)
    path = make_tiny_model(tmp_path / "m", "qwen3")
    with pytest.raises(UnsupportedModelError, match=r"does not reproduce its logits: they differ by \d+\.\d+% in"):
        load_model(str(path))


# -- how much is run -------------------------------------------------------------------------------------------------


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each forward pass of a Gemma 3."""
    counted: list[int] = []
    plain = gemma3_text.Model.__call__

    def count(self: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        counted.append(inputs.size)
        logits: mx.array = plain(self, inputs, *args, **kwargs)
        return logits

    monkeypatch.setattr(gemma3_text.Model, "__call__", count)
    return counted


def gemma(path: Path, window: int) -> Path:
    return make_tiny_model(path / "m", "gemma3_text", sliding_window=window, sliding_window_pattern=2)


def test_the_check_of_a_model_takes_ten_forward_passes_and_115_tokens(tmp_path: Path, sizes: list[int]) -> None:
    """So many take about 2 seconds for 4 billion parameters on the slowest Mac."""
    load_model(str(gemma(tmp_path, window=12)))
    assert (len(sizes), sum(sizes)) == (10, 115)
    assert sum(sizes) == probe_steps.num_tokens(probe_steps.SHORT_PROMPT)


def test_a_longer_window_is_passed_in_as_many_forward_passes(tmp_path: Path, sizes: list[int]) -> None:
    load_model(str(gemma(tmp_path, window=100)))
    assert len(sizes) == 10
    assert max(sizes) == 100 + probe_steps.PAST_WINDOW
    assert sum(sizes) == probe_steps.num_tokens(max(sizes))


@pytest.mark.parametrize("by", [-1, 1])
def test_an_error_that_begins_past_a_window_is_refused(
    by: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gemma(tmp_path, window=150)
    assert_only_the_broken_one_is_refused(path, Way.ROWS, more_keys(by), monkeypatch)


def test_a_window_that_would_take_long_is_not_passed_and_named_in_the_log(
    tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = gemma(tmp_path, window=100)
    parameters = get_total_parameters(plain_model(path))
    needed = parameters * probe_steps.num_tokens(100 + probe_steps.PAST_WINDOW)
    monkeypatch.setattr(probe_steps, "MAX_TOKENS_TIMES_PARAMETERS", needed - 1)
    with caplog.at_level("DEBUG", "mlxpaged"):
        load_model(str(path))
    assert max(sizes) == probe_steps.SHORT_PROMPT
    assert "not checked past windows of [100] tokens" in caplog.text


@pytest.mark.parametrize(("window", "context"), [(1025, 4096), (100, 110), (500, 500)])
def test_neither_a_window_over_1024_nor_one_near_the_context_length_is_passed(
    window: int, context: int, tmp_path: Path
) -> None:
    length, _ = probe_steps.prompt_length(plain_model(gemma(tmp_path, window)), context)
    assert length == probe_steps.SHORT_PROMPT


@pytest.mark.parametrize(
    "architecture", ["llama4", "deepseek_v32", pytest.param("minimax_m3_vl", marks=since_mlx_lm_0_32), "plamo2"]
)
def test_chunks_and_selections_are_found(architecture: str, tmp_path: Path) -> None:
    """Of local attention, an indexer, one that selects blocks, and a layer that masks by itself."""
    found = probe_steps.windows(plain_model(make_architecture(tmp_path / "m", architecture)))
    assert found == {12 if architecture in ("llama4", "plamo2") else 16}


def test_a_float32_model_is_served_where_mlx_rounds_matrix_products_to_tf32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Products of several rows are rounded, those of single rows are not, as on the GPU of an M5."""
    path, plain = make_tiny_model(tmp_path / "m", "llama", num_hidden_layers=6), nn.Linear.__call__

    def rounded(self: nn.Linear, x: mx.array) -> mx.array:
        if x.shape[-2] > 1:
            x = ((x.view(mx.int32) + 0x1000) & ~0x1FFF).view(mx.float32)
        return plain(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", rounded)
    with pytest.raises(UnsupportedModelError, match="does not reproduce its logits"):
        load_model(str(path))
    monkeypatch.setattr(precision, "rounds_float32", lambda: True)
    caplog.clear()
    load_model(str(path))
    assert not caplog.records
    attend = LayerKVCache.attend
    monkeypatch.setattr(
        LayerKVCache, "attend", lambda *args, scale, **options: attend(*args, scale=1.3 * scale, **options)
    )
    load_model(str(path))
    assert "runs once per sequence" in caplog.text
    assert "does not reproduce its logits" in caplog.text
