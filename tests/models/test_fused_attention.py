"""Attention modules are fused if they compute the same then, and stay as they are if not."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cohere2, gpt_oss, llama, qwen3, qwen3_next
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layer import PagedAttentionError, PagedLayer, StepContext, route_attention
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.qkv import QkvShape
from mlxpaged.attention.self_check import BackendChoice
from mlxpaged.engine import builder, executor
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.joins.fused_attention import FusedAttention, fuse_attention
from mlxpaged.models.loader import load_model
from tests.models.architectures import make_architecture

HIDDEN, HEADS, KV_HEADS, SIZE = 128, 4, 2, 32
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "head_dim": SIZE,
    "tie_word_embeddings": True,
}
LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 64}


def attention() -> Any:
    """Qwen 3's, with norms that are not all the same."""
    mx.random.seed(0)
    module: Any = qwen3.Attention(qwen3.ModelArgs(model_type="qwen3", **SIZES))
    for norm in (module.q_norm, module.k_norm):
        norm.weight = mx.random.uniform(0.5, 1.5, (SIZE,))
    return prepared(module)


def prepared(module: Any) -> Any:
    module.eval()
    mx.eval(module.parameters())
    route_attention(module)
    return module


def changed(make: Callable[[], Any] | None = None, **parts: Any) -> Any:
    module = (make or attention)()
    for name, part in parts.items():
        module[name] = part
    return prepared(module)


def quantized(bits: int, value_bits: int) -> Any:
    module = attention()
    nn.quantize(module, 32, bits, class_predicate=lambda path, _: path.endswith("proj") and path != "v_proj")
    nn.quantize(module, 32, value_bits, class_predicate=lambda path, _: path == "v_proj")
    return prepared(module)


def biased() -> Any:
    args = llama.ModelArgs(**(SIZES | {"model_type": "llama", "attention_bias": True}))
    return prepared(llama.Attention(args))


def without_window() -> Any:
    """A layer of Cohere 2 that has a rope and does not call it."""
    own = {name: SIZES[name] for name in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")}
    args = cohere2.ModelArgs(model_type="cohere2", attention_bias=True, sliding_window_pattern=2, **own)
    return prepared(cohere2.Attention(args, layer_idx=1))


def gated() -> Any:
    """Qwen3-Next's, whose query projection makes gates too."""
    mx.random.seed(0)
    args: Any = SimpleNamespace(**SIZES, attention_bias=False, partial_rotary_factor=0.25, rope_scaling=None)
    module: Any = qwen3_next.Qwen3NextAttention(args)
    for norm in (module.q_norm, module.k_norm):
        norm.weight = mx.random.uniform(0.5, 1.5, (SIZE,))
    return prepared(module)


def half(dtype: mx.Dtype) -> Any:
    module = attention()
    module.set_dtype(dtype)
    return prepared(module)


FUSED: dict[str, Callable[[], Any]] = {
    "Qwen 3": attention,
    "4 bits": lambda: quantized(4, 4),
    "biased": biased,
    "float16": lambda: half(mx.float16),
    "bfloat16": lambda: half(mx.bfloat16),
    "rope of Llama 3": lambda: changed(rope=Llama3RoPE(SIZE, scaling_config=LLAMA3)),
    "rope by neighbours": lambda: changed(rope=nn.RoPE(SIZE, traditional=True, scale=0.5)),
    "rope of a part": lambda: changed(rope=nn.RoPE(SIZE // 2)),
    "Yarn": lambda: changed(rope=YarnRoPE(SIZE, scaling_factor=4.0)),
    "longrope": lambda: changed(rope=SuScaledRoPE(SIZE, long_factor=[2.0] * (SIZE // 2))),
    "a rope that is not called": without_window,
    "no rope": lambda: changed(rope=Unchanged()),
    "gates": gated,
    "norms that add 1": lambda: changed(q_norm=OneMore(SIZE), k_norm=OneMore(SIZE)),
}


class Unchanged(nn.Module):
    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return x


class OneMore(nn.RMSNorm):
    """Gemma's."""

    def __init__(self, dims: int) -> None:
        super().__init__(dims)
        self.weight = mx.random.uniform(-0.5, 0.5, (dims,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 1.0 + self["weight"], self.eps)


class LaterScaled(nn.RoPE):
    """Another one from a position on."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        later = (mx.array(offset) > 100_000).reshape(-1, 1, 1, 1)
        return super().__call__(x, offset) * mx.where(later, 1.1, 1.0).astype(x.dtype)


class Limited(nn.RoPE):
    """As DBRX limits queries and keys."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return super().__call__(mx.clip(x, -8, 8), offset)


class Gated(qwen3.Attention):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        out: mx.array = super().__call__(x, mask, cache)
        return out * mx.sigmoid(x)


class Twice(qwen3.Attention):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return super().__call__(super().__call__(x, mask, cache), mask, cache)  # type: ignore[no-any-return]


def of(kind: type[qwen3.Attention]) -> Any:
    module = attention()
    module.__class__ = kind
    return module


SEPARATE: dict[str, tuple[Callable[[], Any], str]] = {
    "scaled from a position on": (lambda: changed(rope=LaterScaled(SIZE)), "its keys differ"),
    "limited": (lambda: changed(biased, rope=Limited(SIZE)), "its keys differ"),
    "gated": (lambda: of(Gated), "its outputs differ"),
    "another norm": (lambda: changed(k_norm=nn.LayerNorm(SIZE)), "its keys differ"),
    "a norm of queries alone": (lambda: changed(k_norm=Unchanged()), "its queries differ"),
    "values of other bits": (lambda: quantized(4, 8), "its projections cannot be joined"),
    "two calls": (lambda: of(Twice), "calls its cache and its attention otherwise: write, attend, write, attend"),
    "no output projection": (lambda: without("o_proj"), "no output projection"),
    "another rope": (
        lambda: changed(rope=nn.Linear(SIZE, SIZE)),
        r"does not run on the rows of the check \(TypeError\)",
    ),
}


def without(name: str) -> Any:
    module = attention()
    del module[name]
    return module


def run(module: Any, dtype: mx.Dtype) -> mx.array:
    """Its outputs in two steps: a chunk and a decoding token, and two decoding tokens."""
    kv = LayerKVCache.from_layout(8, KVLayout(KV_HEADS, SIZE, SIZE, dtype, 8), "gather")
    context = StepContext()
    layer = PagedLayer(kv, context)
    outputs = []
    for lens, contexts in (([9, 1], [9, 1]), ([1, 1], [10, 2])):
        context.begin([AttentionMetadata.build(lens, contexts, [[5, 2], [7]], 8)])
        x = mx.random.normal((sum(lens), 1, HIDDEN), key=mx.random.key(sum(lens))).astype(dtype)
        outputs.append(module(x, None, cache=layer))
        context.end()
    return mx.concatenate(outputs).astype(mx.float32)


def dtype_of(module: Any) -> mx.Dtype:
    dtype: mx.Dtype = module.q_norm.weight.dtype if "q_norm" in module else mx.float32
    return dtype


def nbytes(module: Any) -> int:
    parameters: Any = tree_flatten(module.parameters())
    return sum(array.nbytes for _, array in parameters)


@pytest.mark.parametrize("name", FUSED)
def test_a_module_is_fused_and_computes_the_same(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    module = FUSED[name]()
    dtype = dtype_of(module)
    expected, size = run(module, dtype), nbytes(module)
    plain = module(mx.ones((2, 5, HIDDEN), dtype), None, KVCache())
    fuse_attention([(module, dtype)])
    assert isinstance(module, FusedAttention)
    assert caplog.messages == ["1 of 1 attention layers are fused"]
    assert nbytes(module) == size, "the separate projections are gone"
    tolerance = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 5e-2}[dtype]
    assert mx.allclose(run(module, dtype), expected, rtol=tolerance, atol=tolerance)
    own = module(mx.ones((2, 5, HIDDEN), dtype), None, KVCache())
    assert mx.allclose(own, plain, rtol=tolerance, atol=tolerance), "with mlx-lm's own cache too"


@pytest.mark.parametrize("name", FUSED)
def test_what_is_read_of_rope_and_norms_computes_the_same(name: str) -> None:
    """The kernel gets it. The module's own rope is called where there is no kernel."""
    module = FUSED[name]()
    fuse_attention([(module, dtype_of(module))])
    qkv, positions = module.fusion.qkv, mx.array([0, 3, 70_000])
    x = mx.random.normal((3, 2, 1, SIZE)).astype(dtype_of(module))
    if qkv.rope is None:
        assert name in ("no rope", "a rope that is not called")
        assert qkv.own_rope is None
    else:
        assert qkv.own_rope is module.rope
        own = module.rope(x, offset=positions)
        assert mx.allclose(qkv.rope(x, positions), own, rtol=1e-4, atol=1e-4)
    assert (qkv.norms is None) == ("q_norm" not in module)
    if qkv.norms is not None:
        for norm, other in zip(qkv.norms, (module.q_norm, module.k_norm), strict=True):
            assert mx.allclose(norm(x), other(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SEPARATE)
def test_another_module_stays_as_it_is_and_the_log_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make, reason = SEPARATE[name]
    module = make()
    kind, before = type(module), dict(tree_flatten(module.parameters()))
    fuse_attention([(module, mx.float32)] * 2)
    assert type(module) is kind
    after: Any = dict(tree_flatten(module.parameters()))
    assert after.keys() == before.keys()
    first, second = caplog.messages
    assert first == "0 of 2 attention layers are fused"
    assert second.startswith("2 attention layers are not fused: ")
    assert re.search(reason, second)


def other_weights(make: Callable[[], Any]) -> Any:
    """A module of this kind, with random weights and norms of its own."""
    module = make()
    for name, array in tree_flatten(module.parameters()):  # type: ignore[misc, union-attr, str-unpack]
        if array.dtype != mx.uint32:
            noise = mx.random.uniform(0.8, 1.2, array.shape, key=mx.random.key(len(name)))
            module.update(tree_unflatten([(name, (array * noise).astype(array.dtype))]))
    return prepared(module)


def tried(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.endswith("were tried")]


@pytest.mark.parametrize("name", FUSED)
def test_of_modules_that_compute_alike_one_is_tried(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The others get their own weights, norms and rotary embedding."""
    caplog.set_level(logging.DEBUG)
    modules = [FUSED[name](), *(other_weights(FUSED[name]) for _ in range(3))]
    dtype = dtype_of(modules[0])
    expected = [run(module, dtype) for module in modules]
    assert not mx.allclose(expected[0], expected[1])
    fuse_attention([(module, dtype) for module in modules])
    assert tried(caplog) == ["1 of 4 attention layers were tried"]
    tolerance = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 5e-2}[dtype]
    for module, wanted in zip(modules, expected, strict=True):
        assert isinstance(module, FusedAttention)
        assert mx.allclose(run(module, dtype), wanted, rtol=tolerance, atol=tolerance)


OTHERS: dict[str, Callable[[], Any]] = {
    "another base": lambda: changed(rope=nn.RoPE(SIZE, base=5e5)),
    "another scale": lambda: changed(rope=nn.RoPE(SIZE, scale=0.5)),
    "no rope": lambda: changed(rope=Unchanged()),
    "norms that add 1": lambda: changed(q_norm=OneMore(SIZE), k_norm=OneMore(SIZE)),
    "another epsilon": lambda: changed(q_norm=nn.RMSNorm(SIZE, 0.1)),
    "quantized": lambda: quantized(4, 4),
    "another scale of scores": lambda: with_attribute("scale", 0.3),
}


def with_attribute(name: str, value: Any) -> Any:
    module = attention()
    setattr(module, name, value)
    return module


@pytest.mark.parametrize("name", OTHERS)
def test_a_module_that_computes_something_else_is_tried_too(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    modules = [attention(), OTHERS[name](), attention()]
    expected = [run(module, mx.float32) for module in modules]
    fuse_attention([(module, mx.float32) for module in modules])
    assert tried(caplog) == ["2 of 3 attention layers were tried"]
    for module, wanted in zip(modules, expected, strict=True):
        assert isinstance(module, FusedAttention)
        assert mx.allclose(run(module, mx.float32), wanted, rtol=1e-5, atol=1e-5)


def test_ropes_that_rotate_by_other_frequencies_are_tried_each(caplog: pytest.LogCaptureFixture) -> None:
    """The numbers are constants, no parameters."""
    caplog.set_level(logging.DEBUG)
    fuse_attention([(changed(rope=YarnRoPE(SIZE, scaling_factor=each)), mx.float32) for each in (4.0, 4.0, 8.0)])
    assert tried(caplog) == ["2 of 3 attention layers were tried"]


class Alike(nn.RoPE):
    """It rotates by `own`, and says that its base is another one."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return mx.fast.rope(x, self.dims, traditional=False, base=1e4, scale=1.0, offset=offset)  # type: ignore[no-any-return]


def test_what_the_kernel_would_get_is_compared_too(caplog: pytest.LogCaptureFixture) -> None:
    """A module that computes the same, and says something else of it, is tried."""
    caplog.set_level(logging.DEBUG)
    said = [changed(rope=Alike(SIZE, base=base)) for base in (1e4, 1e4, 2e4)]
    fuse_attention([(module, mx.float32) for module in said])
    assert tried(caplog) == ["2 of 3 attention layers were tried"]
    assert [isinstance(module, FusedAttention) for module in said] == [True, True, False]


class Indexed(qwen3.Attention):
    """Each layer has an index, as Gemma 3's have. From the third one on, heads are scaled."""

    index = 0

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        out: mx.array = super().__call__(x, mask, cache)
        return out if self.index < 3 else out * mx.sigmoid(x)


def test_an_index_makes_a_difference_only_where_it_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    modules = [of(Indexed) for _ in range(5)]
    for index, module in enumerate(modules):
        module.index = index
    fuse_attention([(module, mx.float32) for module in modules])
    assert tried(caplog) == ["2 of 5 attention layers were tried"]
    assert [isinstance(module, FusedAttention) for module in modules] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("name", ["scaled from a position on", "gated"])
def test_if_a_trial_fails_its_equals_stay_as_they_are(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    make, reason = SEPARATE[name]
    modules = [make() for _ in range(3)]
    before = [dict(tree_flatten(module.parameters())).keys() for module in modules]  # type: ignore[arg-type]
    fuse_attention([(module, mx.float32) for module in modules])
    assert tried(caplog) == ["1 of 3 attention layers were tried"]
    assert caplog.messages[-1] == f"3 attention layers are not fused: {reason} from those of the fused layer"
    assert [dict(tree_flatten(module.parameters())).keys() for module in modules] == before  # type: ignore[arg-type]


def test_each_layer_keeps_its_own_sinks() -> None:
    args: Any = SimpleNamespace(
        **SIZES, sliding_window=8, attention_bias=True, rope_scaling=None, num_local_experts=4, num_experts_per_tok=2
    )
    modules = []
    for seed in (1, 2):
        module: Any = gpt_oss.AttentionBlock(args)
        module.sinks = mx.random.normal(module.sinks.shape, key=mx.random.key(seed))
        modules.append(prepared(module))
    fuse_attention([(module, mx.float32) for module in modules])
    for module in modules:
        assert module.fusion.sinks is not None
        assert mx.array_equal(module.fusion.sinks, module.sinks)
    assert not mx.array_equal(modules[0].sinks, modules[1].sinks)


def test_memory_grows_by_the_projections_of_one_layer_at_most() -> None:
    args = qwen3.ModelArgs(model_type="qwen3", **(SIZES | {"hidden_size": 2048, "head_dim": 256}))
    modules = [prepared(qwen3.Attention(args)) for _ in range(8)]
    before, one = mx.get_active_memory(), nbytes(modules[0])
    mx.reset_peak_memory()
    fuse_attention([(module, mx.float32) for module in modules])
    assert all(isinstance(module, FusedAttention) for module in modules)
    assert mx.get_peak_memory() - before < one
    assert mx.get_active_memory() - before < one / 10


@pytest.mark.parametrize(
    "call",
    [
        lambda module, x, cache: module(x, cache=cache),
        lambda module, x, cache: module(x=x, mask=None, cache=cache),
        lambda module, x, cache: module(x, None, cache),
    ],
)
def test_arguments_may_come_by_position_or_by_name(call: Callable[..., mx.array]) -> None:
    module = attention()
    fuse_attention([(module, mx.float32)])
    seen: list[bool] = []

    class Layer(PagedLayer):
        def write_rows(self, rows: mx.array, qkv: Any) -> mx.array:
            seen.append(True)
            return super().write_rows(rows, qkv)

    context = StepContext()
    kv = LayerKVCache.from_layout(8, KVLayout(KV_HEADS, SIZE, SIZE, mx.float32, 8), "gather")
    context.begin([AttentionMetadata.build([2], [2], [[1]], 8)])
    try:
        assert call(module, mx.ones((2, 1, HIDDEN)), Layer(kv, context)).shape == (2, 1, HIDDEN)
    finally:
        context.end()
    assert seen == [True]


class Doubling(qwen3.Attention):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, factor: float = 1.0) -> mx.array:
        return factor * super().__call__(x, mask, cache)


def test_further_arguments_are_honoured() -> None:
    module = of(Doubling)
    fuse_attention([(module, mx.float32)])
    once = run(module, mx.float32)
    for double in (
        lambda x, mask, cache: module(x, mask, cache, 2.0),
        lambda x, mask, cache: module(x, mask=mask, cache=cache, factor=2.0),
    ):
        assert mx.allclose(run(double, mx.float32), 2 * once, rtol=1e-5, atol=1e-5)


def test_a_mask_is_an_error_in_a_step_as_without_fusion() -> None:
    module = attention()
    fuse_attention([(module, mx.float32)])
    kv = LayerKVCache.from_layout(8, KVLayout(KV_HEADS, SIZE, SIZE, mx.float32, 8), "gather")
    context = StepContext()
    context.begin([AttentionMetadata.build([2], [2], [[1]], 8)])
    try:
        with pytest.raises(PagedAttentionError, match="mask of its own"):
            module(mx.ones((2, 1, HIDDEN)), mx.ones((2, 2)), PagedLayer(kv, context))
    finally:
        context.end()


def test_a_model_is_loaded_without_fusion_if_the_configuration_says_so(tmp_path: Path) -> None:
    path = make_architecture(tmp_path, "qwen3")
    for fusion in (True, False):
        config = EngineConfig(str(path), joins=fusion, kv_cache_bytes=2**20)
        core = builder.load_core(config, lambda: 0.0, lambda _: None)
        modules = list(core.served.model.modules())  # type: ignore[union-attr]
        assert any(isinstance(module, FusedAttention) for module in modules) == fusion


def test_layers_whose_kernel_fails_its_check_run_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = load_model(str(make_architecture(tmp_path, "smollm3")))
    shapes = [spec.qkv_shape(32) for spec in served.kv_layers]
    assert len(set(shapes)) == 2, "layers with rope and without"
    broken: Any = {shapes[0]}

    def choose(*_args: Any) -> BackendChoice:
        found: list[QkvShape] = _args[3]
        assert found == shapes
        return BackendChoice("gather", unfused=frozenset(broken))

    monkeypatch.setattr(executor, "choose_backend", choose)
    core = builder.build_engine(EngineConfig(kv_cache_bytes=2**20), served)
    assert [layer.kv.fuses for layer in core.runner.layers] == [shape not in broken for shape in shapes]
