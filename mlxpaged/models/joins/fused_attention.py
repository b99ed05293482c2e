"""Fused attention layers: one product makes queries, keys and values, and one kernel does all that comes before scores.

mlx-lm's modules normalize, rotate and store heads in separate operations, in nearly the same way in most architectures.
So a module's parts are read here, and its code is not repeated for each architecture. Then it is called with random
rows at near and far positions, as it is and fused. It is changed in place if queries, keys, values, scale, sinks and
outputs agree, else it stays as it is.

Of modules that compute alike, one is called (trials.py). The others are fused in the way that it was, each with its own
weights, norms, rotary embedding and sinks, if what the kernel gets of these is the same apart from the weights.

A fused module computes everything but the steps of a paged batch as before: its projections are still there.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from mlxpaged.attention import precision
from mlxpaged.attention.layer import PagedLayer
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.qkv import Norm, Qkv, Rope, row_size
from mlxpaged.models.adapters.step_adapters import StepAdapters
from mlxpaged.models.joins.joined_linear import JOINT, PROJECTIONS, Join, make_joint, precede
from mlxpaged.models.turns import Turns
from mlxpaged.progress import Stage
from mlxpaged.trials import Trials, on_host, record

if TYPE_CHECKING:
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
        return self._heads(shape).astype(queries.dtype)

    def _heads(self, shape: tuple[int, ...]) -> mx.array:
        return random(shape, self._dtype)

    @property
    def plain_options(self) -> Hashable:
        """The options without what arrays among them contain."""
        scale, mask, sinks, softcap = self.options or (None,) * 4
        return *self.calls, isinstance(scale, (int, float)) and scale, mask is None, sinks is None, softcap

    @property
    def layout(self) -> KVLayout:
        """Raises CannotFuseError if it is not known."""
        if self.calls != ["write", "attend"]:
            raise CannotFuseError(f"it calls its cache and its attention otherwise: {', '.join(self.calls)}")
        keys, values = self.arrays["keys"], self.arrays["values"]
        if {keys.dtype, values.dtype} != {self._dtype} or keys.shape[2] != 1 or keys.shape[:3] != values.shape[:3]:
            raise CannotFuseError("it keeps other keys and values")
        return KVLayout(keys.shape[1], keys.shape[3], values.shape[3], self._dtype, block_size=1)


class ZeroRecord(Record):
    """The same with heads that are zero: what MLX records has no numbers of random ones."""

    def _heads(self, shape: tuple[int, ...]) -> mx.array:
        return mx.zeros(shape, self._dtype)


class FusedRecord(Record):
    """The same for the fused module."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout.dtype)
        self._layout = layout

    def write_rows(self, rows: mx.array, qkv: Qkv) -> mx.array:
        queries, keys, values = qkv.split(rows, self._layout, self._positions)
        self.update_and_fetch(keys, values)
        return queries


class Verified(NamedTuple):
    """A fusion that computes what its module does. which: among those that were possible. description: as
    `description_of` has it."""

    which: int
    description: Hashable


def fuse_attention(modules: Sequence[tuple[Module, mx.Dtype]], turns: Turns | None = None) -> None:
    """Fuse the modules that can be fused. They come with the type of their keys. turns: of other models."""
    turns, trials = turns or Turns(), Trials[Verified | str]()
    reasons = Counter[str]()
    turns.begin(Stage.CHECKING_LAYERS, len(modules))
    for module, dtype in modules:
        try:
            fuse(module, dtype, trials)
        except CannotFuseError as error:
            reasons[str(error)] += 1
        except Exception as error:  # a module that takes other arguments, or returns something else
            logger.debug("an attention layer does not run on the rows of the check", exc_info=True)
            reasons[f"it does not run on the rows of the check ({type(error).__name__})"] += 1
        turns.step()
    if modules:
        fused = len(modules) - reasons.total()
        logger.info("%d of %d attention layers are fused", fused, len(modules))
        logger.debug("%d of %d attention layers were tried", trials.count, len(modules))
    for reason, count in reasons.items():
        logger.info("%d attention layers are not fused: %s", count, reason)


def fuse(module: Any, dtype: mx.Dtype, trials: Trials[Verified | str]) -> None:
    """Raises CannotFuseError if the module stays as it is."""
    fusion, joint = find_fusion(module, dtype, trials)
    if fusion.joint not in module:
        Join(module, PROJECTIONS, JOINT, joint)
        mx.clear_cache()  # else MLX keeps the memory of the separate weights, which fits no other array
    own_rope = None if fusion.qkv.rope is None else own_rope_of(module)
    module.fusion = replace(fusion, qkv=replace(fusion.qkv, own_rope=own_rope))
    precede(module, FusedAttention, "Fused")


def find_fusion(module: Any, dtype: mx.Dtype, trials: Trials[Verified | str]) -> tuple[Fusion, Any]:
    """What computes the same as the module, and the joined projection. Raises CannotFuseError. trials: of other
    modules, with the problem of those that cannot be fused."""
    output = next((each for each in OUTPUTS if each in module), None)
    if output is None:
        raise CannotFuseError("it has no output projection")
    shape = len(POSITIONS), 1, module[output].weight.shape[0]
    recorded = recorded_call(module, mx.zeros(shape, dtype))
    known = trials.known(recorded)
    if isinstance(known, str):
        raise CannotFuseError(known)
    new = recorded if known is None else None  # an outcome stays what it was
    try:
        verified, fusion, joint = verify(module, dtype, output, random(shape, dtype), known)
    except CannotFuseError as error:
        trials.note(new, str(error))
        raise
    if verified != known:
        trials.note(new, verified)
    return fusion, joint


def verify(
    module: Any, dtype: mx.Dtype, output: str, x: mx.array, known: Verified | None
) -> tuple[Verified, Fusion, Any]:
    """What computes the same as the module, and the joined projection. known: the fusion of an equal module. If it is
    possible here, nothing is computed. Raises CannotFuseError."""
    name, joint = joint_of(module)
    own = Record(dtype)
    result = module(x, None, own)
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
    possible = [
        Fusion(arguments, name, output, Qkv(heads, norms, rope, gated=gated), scale, sinks, softcap)
        for norms, rope in itertools.product(norms_of(module, layout), ropes_of(module, layout))
    ]
    described = [Verified(index, description_of(fusion, layout)) for index, fusion in enumerate(possible)]
    if known in described:
        return known, possible[known.which], joint
    problems = []
    for verified, fusion in zip(described, possible, strict=True):
        fused = FusedRecord(layout)
        got = fusion.run({name: joint, output: module[output]}, x, fused)
        problem = difference_of(own.arrays | {"outputs": result}, fused.arrays | {"outputs": got}, dtype)
        if problem is None:
            return verified, fusion, joint
        problems.append(problem)
    raise CannotFuseError(problems[0])


def recorded_call(module: Any, x: mx.array) -> Hashable | None:
    """What MLX records of the module on rows like x, with the other options of its attention; None if it cannot be
    recorded."""
    own = ZeroRecord(x.dtype)
    recorded = record(module, lambda x: [module(x, None, own), *own.arrays.values()], x)
    return None if recorded is None else (recorded, own.plain_options)


def description_of(fusion: Fusion, layout: KVLayout) -> Hashable:
    """All that it computes with, apart from the weights of the module."""
    qkv, rope = fusion.qkv, fusion.qkv.rope
    epsilons = None if qkv.norms is None else [norm.eps for norm in qkv.norms]
    rotation = None if rope is None else replace(rope, freqs=None)
    freqs = None if rope is None or rope.freqs is None else rope.freqs.tolist()
    names = fusion.arguments, fusion.joint, fusion.output
    options = fusion.scale, fusion.sinks is None, fusion.softcap
    return repr((names, options, layout, qkv.num_query_heads, qkv.gated, epsilons, rotation, freqs))


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
    """What differs by more than rounding, in a sentence; None if nothing does. The host compares it."""
    allowed = TF32_TOLERANCE if dtype == mx.float32 and precision.rounds_float32() else TOLERANCE[dtype]
    for name, expected in own.items():
        if fused[name].shape != expected.shape:
            return f"its {name} have another shape than fused"
    numbers = on_host([*own.values(), *(fused[name] for name in own)])
    for name, one, other in zip(own, numbers[: len(own)], numbers[len(own) :], strict=True):
        rows = tuple(range(1, one.ndim))
        with np.errstate(invalid="ignore", divide="ignore"):
            difference = (np.abs(other - one).max(axis=rows) / np.abs(one).max(axis=rows)).max()
        if not difference <= allowed:  # not a number if all is zero
            logger.debug("fused, a row's %s differ by %.1e of their largest element", name, difference)
            return f"its {name} differ from those of the fused layer"
    return None


def random(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Rows of SIZES."""
    sizes = np.array(SIZES, np.float32).reshape(-1, *[1] * (len(shape) - 1))
    return mx.array(sizes * np.random.default_rng(0).standard_normal(shape, np.float32)).astype(dtype)
