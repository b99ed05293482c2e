"""Fused attention layers: one product makes queries, keys and values, and one kernel does all that comes before scores.

mlx-lm's modules normalize, rotate and store heads in separate operations, in nearly the same way in most architectures.
So a module's parts are read here, and its code is not repeated for each architecture. Then it is called with random
rows at near and far positions, as it is and fused. It is changed in place if queries, keys, values, scale, sinks and
outputs agree, else it stays as it is.

A fused module computes everything but the steps of a paged batch as before: its projections are still there.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxpaged.attention import precision
from mlxpaged.attention.layer import PagedLayer
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.qkv import Norm, Qkv, Rope, row_size
from mlxpaged.cpu.joined_linear import JOINT, PROJECTIONS, Join, make_joint
from mlxpaged.cpu.split_linear import precede
from mlxpaged.models.turns import Turns
from mlxpaged.progress import Stage
from mlxpaged.trials import Trials, record

if TYPE_CHECKING:
    from mlxpaged.models.adapted_layers import StepAdapters
    from mlxpaged.vision.embedding import FeatureRows

logger = logging.getLogger(__name__)

OWN_JOINT = "qkv_proj"
OUTPUTS = ("o_proj", "out_proj", "dense", "wo")
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))
ROPES = ("rope", "rotary_emb")
"""Names that mlx-lm's modules give to their parts. OWN_JOINT: a projection that an architecture has already joined."""

POSITIONS = (0, 1, 2, 31, 1000, 8191, 100_003, 1_000_003)
SIZES = (1, 64, 1, 64, 1, 64, 1, 64)
"""Positions and sizes of the rows of the check. Some architectures change queries from a position on, and some limit
large elements."""

TOLERANCE = {mx.float32: 1e-4, mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6}
TF32_TOLERANCE = 2e-2
"""Largest difference as a share of the row's largest element: four units of rounding in half types, because a product
with more outputs may be added up in another order. TF32: as in self_check.py."""


class CannotFuseError(ValueError):
    """The reason why a module stays as it is."""


@dataclass(frozen=True)
class Fusion:
    """arguments: names of the module's input, mask and cache. joint, output: of its linear layers. adapters: of
    the running step, if some change the projections. images: of the running step, if the rotary embedding depends on
    them. The rest is what the module passes to its attention."""

    arguments: tuple[str, ...]
    joint: str
    output: str
    qkv: Qkv
    scale: float
    sinks: mx.array | None
    softcap: float | None
    adapters: StepAdapters | None = None
    images: FeatureRows | None = None

    def run(self, module: Any, x: mx.array, cache: PagedLayer) -> mx.array:
        """[T, 1, hidden] -> [T, 1, hidden]"""
        rows = module[self.joint](x).squeeze(1)
        heads = cache.attend(cache.write_rows(rows, self.qkv), self.scale, None, self.sinks, self.softcap)
        if self.qkv.gated:
            heads = self.qkv.gate(heads, rows)
        output: mx.array = module[self.output](heads.reshape(len(x), 1, -1))
        return output


class FusedAttention(Module):
    """A base class before an attention module's own."""

    fusion: Fusion

    def __call__(self, *args: Any, **more: Any) -> Any:
        """Takes what the module's own class does. A step without adapters, without positions in three axes, and without
        more than its input and its cache, is computed fused."""
        fusion = self.fusion
        if fusion.adapters is not None and any(fusion.adapters.active):
            return super().__call__(*args, **more)
        if fusion.images is not None and fusion.images.positions is not None:
            return super().__call__(*args, **more)
        x, mask, cache = (*args, *map(more.get, fusion.arguments[len(args) :]))[:3]
        known = len(args) <= 3 and more.keys() <= set(fusion.arguments)
        if known and isinstance(cache, PagedLayer) and mask is None and x.shape[1] == 1:
            return fusion.run(self, x, cache)
        return super().__call__(*args, **more)


class Record(PagedLayer):
    """Stands for the cache of a step at POSITIONS. It records what a module passes to it."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self.window = self.chunk = None
        self.calls: list[str] = []
        self.arrays: dict[str, mx.array] = {}
        self.options: tuple[Any, ...] = ()
        self._dtype = dtype
        self._positions = mx.array(POSITIONS, mx.int32)

    @property
    def offset(self) -> mx.array:
        return self._positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.calls.append("write")
        self.arrays |= {"keys": keys, "values": values}
        return keys, values

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None, softcap: float | None = None
    ) -> mx.array:
        """Returns random heads, so that outputs show what the module does with them."""
        self.calls.append("attend")
        self.arrays["queries"] = queries
        self.options = scale, mask, sinks, softcap
        shape = (*queries.shape[:3], self.arrays["values"].shape[-1])
        return random(shape, self._dtype).astype(queries.dtype)

    @property
    def layout(self) -> KVLayout:
        """Raises CannotFuseError if it is not known."""
        if self.calls != ["write", "attend"]:
            raise CannotFuseError(f"it calls its cache and its attention otherwise: {', '.join(self.calls)}")
        keys, values = self.arrays["keys"], self.arrays["values"]
        if {keys.dtype, values.dtype} != {self._dtype} or keys.shape[2] != 1 or keys.shape[:3] != values.shape[:3]:
            raise CannotFuseError("it keeps other keys and values")
        return KVLayout(keys.shape[1], keys.shape[3], values.shape[3], self._dtype, block_size=1)


class FusedRecord(Record):
    """The same for the fused module."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout.dtype)
        self._layout = layout

    def write_rows(self, rows: mx.array, qkv: Qkv) -> mx.array:
        queries, keys, values = qkv.split(rows, self._layout, self._positions)
        self.update_and_fetch(keys, values)
        return queries


def fuse_attention(modules: Sequence[tuple[Module, mx.Dtype]], turns: Turns | None = None) -> None:
    """Fuse the modules that can be fused. They come with the type of their keys. turns: of other models."""
    turns, trials, reasons = turns or Turns(), Trials[int | str](), Counter[str]()
    turns.begin(Stage.CHECKING_LAYERS, len(modules))
    for module, dtype in modules:
        turns.step()
        try:
            fuse(module, dtype, trials)
        except CannotFuseError as error:
            reasons[str(error)] += 1
        except Exception as error:  # a module that takes other arguments, or returns something else
            logger.debug("an attention layer does not run on the rows of the check", exc_info=True)
            reasons[f"it does not run on the rows of the check ({type(error).__name__})"] += 1
    if modules:
        fused = len(modules) - reasons.total()
        logger.info("%d of %d attention layers are fused", fused, len(modules))
        logger.debug("%d of %d attention layers were tried", trials.count, len(modules))
    for reason, count in reasons.items():
        logger.info("%d attention layers are not fused: %s", count, reason)


def fuse(module: Any, dtype: mx.Dtype, trials: Trials[int | str]) -> None:
    """trials: outcomes for other modules: which norms and rope a module's own are, or why it stays as it is. Raises
    CannotFuseError if this one stays as it is."""
    output = next((each for each in OUTPUTS if each in module), None)
    if output is None:
        raise CannotFuseError("it has no output projection")
    x = random((len(POSITIONS), 1, module[output].weight.shape[0]), dtype)

    def run(rows: mx.array) -> list[mx.array]:
        noted = Record(dtype)
        return [module(rows, None, noted), *noted.arrays.values()]

    recorded = record(module, run, x)
    known = trials.known(recorded)
    if isinstance(known, str):
        raise CannotFuseError(known)
    try:
        which = fuse_as(module, dtype, output, x, known)
    except CannotFuseError as error:
        if known is None:
            trials.note(recorded, str(error))
        raise
    if known is None:
        trials.note(recorded, which)


def fuse_as(module: Any, dtype: mx.Dtype, output: str, x: mx.array, known: int | None) -> int:
    """Fuse a module. known: which of the norms and ropes that the module may have are right; None to try them on x.
    Returns which they are. Raises CannotFuseError if the module stays as it is."""
    name, joint = joint_of(module)
    own = Record(dtype)
    result = module(x, None, own)  # only what is compared is computed
    layout = own.layout
    scale, mask, sinks, softcap = own.options
    heads = own.arrays["queries"].shape[1]
    rows = joint(x)
    if mask is not None or not isinstance(scale, (int, float)) or rows.dtype != dtype:
        raise CannotFuseError("it attends with a mask, a scale or a type of its own")
    gated = layout.key_size == layout.value_size and rows.shape[-1] == row_size(layout, heads, gated=True)
    if not gated and rows.shape[-1] != row_size(layout, heads):
        raise CannotFuseError("its projections have other outputs in addition")
    arguments = tuple(inspect.signature(module.__call__).parameters)[:3]
    problems = []
    for which, (norms, rope) in enumerate(itertools.product(norms_of(module, layout), ropes_of(module, layout))):
        if known is not None and which < known:
            continue
        fusion = Fusion(arguments, name, output, Qkv(heads, norms, rope, gated=gated), scale, sinks, softcap)
        if which == known:
            break
        fused = FusedRecord(layout)
        got = fusion.run({name: joint, output: module[output]}, x, fused)
        problems.append(difference_of(own.arrays | {"outputs": result}, fused.arrays | {"outputs": got}, dtype))
        if problems[-1] is None:
            break
    else:
        raise CannotFuseError(problems[0])
    if name not in module:
        Join(module, PROJECTIONS, JOINT, joint)
        mx.clear_cache()  # else MLX keeps the memory of the separate weights, which fits no other array
    own_rope = None if rope is None else own_rope_of(module)
    module.fusion = replace(fusion, qkv=replace(fusion.qkv, own_rope=own_rope))
    precede(module, FusedAttention, "Fused")
    return which


def unfuse_for_images(model: Module, rows: FeatureRows) -> None:
    """Computes steps with positions in three axes by the modules' own code."""
    for module in model.modules():
        if isinstance(module, FusedAttention):
            module.fusion = replace(module.fusion, images=rows)


def joint_of(module: Any) -> tuple[str, Any]:
    """The joined projection and its name. It is a new layer if the module has none of that name. Raises
    CannotFuseError."""
    for name in (OWN_JOINT, JOINT):
        if name in module:
            return name, module[name]
    joint = make_joint([module.get(name) for name in PROJECTIONS])
    if joint is None:
        raise CannotFuseError("its projections cannot be joined")
    return JOINT, joint


def norms_of(module: Any, layout: KVLayout) -> Iterator[tuple[Norm, Norm] | None]:
    """What the norms of its queries and keys may be. Some architectures add 1 to the weights."""
    for names in NORMS:
        norms = [module.get(name) for name in names]
        if all(isinstance(norm, Module) and "weight" in norm and hasattr(norm, "eps") for norm in norms):
            weights = [norm["weight"] for norm in norms]
            if all(weight.shape == (layout.key_size,) and weight.dtype == layout.dtype for weight in weights):
                for added in (0.0, 1.0):
                    queries, keys = (
                        Norm(1.0 + weight if added else weight, float(norm.eps))
                        for weight, norm in zip(weights, norms, strict=True)
                    )
                    yield queries, keys
    yield None


def ropes_of(module: Any, layout: KVLayout) -> Iterator[Rope | None]:
    """What its rotary embedding may be."""
    rope: Any = own_rope_of(module)
    dims = getattr(rope, "dims", getattr(rope, "dim", None))
    if isinstance(dims, int) and 0 < dims <= layout.key_size and dims % 2 == 0:
        freqs, base = getattr(rope, "_freqs", None), getattr(rope, "base", None)
        factor = getattr(rope, "mscale", getattr(rope, "_scale", 1.0))
        own = Rope(dims, bool(getattr(rope, "traditional", False)), factor=float(factor))
        if freqs is not None:
            yield replace(own, freqs=freqs.astype(mx.float32))
        elif base is not None:
            yield replace(own, base=float(base), scale=float(getattr(rope, "scale", 1.0)))
    yield None


def own_rope_of(module: Any) -> Any:
    return next((module[name] for name in ROPES if name in module), None)


def difference_of(own: dict[str, mx.array], fused: dict[str, mx.array], dtype: mx.Dtype) -> str | None:
    """What differs by more than rounding, in a sentence; None if nothing does."""
    allowed = TF32_TOLERANCE if dtype == mx.float32 and precision.rounds_float32() else TOLERANCE[dtype]
    for name, expected in own.items():
        got = fused[name]
        if got.shape != expected.shape:
            return f"its {name} have another shape than fused"
        expected, got = expected.astype(mx.float32), got.astype(mx.float32)
        rows = tuple(range(1, expected.ndim))
        difference: Any = (mx.abs(got - expected).max(axis=rows) / mx.abs(expected).max(axis=rows)).max().item()
        if not difference <= allowed:  # not a number if all is zero
            logger.debug("fused, a row's %s differ by %.1e of their largest element", name, difference)
            return f"its {name} differ from those of the fused layer"
    return None


def random(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Rows of SIZES."""
    sizes = mx.array(SIZES).reshape(-1, *[1] * (len(shape) - 1))
    return (sizes * mx.random.normal(shape, key=mx.random.key(0))).astype(dtype)
