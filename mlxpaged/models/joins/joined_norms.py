"""Joins the addition of a layer's residual and the norm after it into one kernel.

It is for decoder layers that compute h = x + f(norm(x)), then h + g(norm(h)). Whether a layer does shows when it runs
with stand-ins for its parts, which note what they get. The second addition goes with the norm that gets the layer's
output, in the next layer or at the end of the model. Without a Metal device, MLX's operations do the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.cache import make_prompt_cache

from mlxpaged.attention import kernels
from mlxpaged.models.checks.probe_steps import SHORT_PROMPT
from mlxpaged.models.checks.reference import are_rounding
from mlxpaged.trials import Trials, on_host, random_rows

VECTOR = 4
"""Elements that a thread of the kernel takes at once."""

THREADS = 512
"""Most threads for a row."""

MAX_SIZE = 16 * VECTOR * THREADS
"""Most elements of a row: a thread keeps up to 64 of them in its registers."""

ROWS = (1, SHORT_PROMPT)
"""Rows of the trials of additions."""
FORM_ROWS = 2
"""Rows that a layer runs with its stand-ins."""


class Addition:
    """An addition, computed together with a norm of the sum. The norm takes its output from here."""

    def __init__(self, norm: RMSNorm) -> None:
        self._norm = norm
        self._eps = mx.array(norm.eps)
        self._done: tuple[mx.array, mx.array] | None = None

    def __call__(self, x: mx.array, y: mx.array) -> mx.array:
        self._done = self.compute(x, y)
        return self._done[0]

    def take(self, x: mx.array) -> mx.array | None:
        """The norm of x if that is the last sum."""
        done, self._done = self._done, None  # nothing keeps the arrays of an earlier step
        return done[1] if done is not None and done[0] is x else None

    def compute(self, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        """x + y, and the norm of that."""
        weight = self._norm.weight
        are_alike = x.shape == y.shape and x.dtype == y.dtype == weight.dtype and x.size > 0
        if not are_alike or weight.size % VECTOR or weight.size > MAX_SIZE or not kernels.can_run():
            total = x + y
            return total, mx.fast.rms_norm(total, weight, self._norm.eps)
        threads = min(THREADS, -(-weight.size // (32 * VECTOR)) * 32)
        total, normed = kernels.launch(
            "add_rms_norm",
            [x, y, weight, self._eps],
            [("T", x.dtype), ("D", weight.size), ("THREADS", threads)],
            grid=(threads, x.size // weight.size, 1),
            threadgroup=(threads, 1, 1),
            outputs=[(x.shape, x.dtype)] * 2,
            threadgroup_memory=threads // 32 * 4,
        )
        return total, normed


class JoinedNorm(Module):
    """A base class that comes before a norm's own class."""

    _addition: Addition

    def __call__(self, x: mx.array) -> mx.array:
        normed = self._addition.take(x)
        return super().__call__(x) if normed is None else normed


@dataclass(frozen=True)
class Part:
    """A part of a layer, and which of the layer's arguments it gets beside its rows."""

    name: str
    args: Sequence[str]
    more: Mapping[str, str]

    def __call__(self, layer: Module, rows: mx.array, given: Mapping[str, Any]) -> mx.array:
        more = {key: given[name] for key, name in self.more.items()}
        out: mx.array = layer[self.name](rows, *(given[name] for name in self.args), **more)
        return out


@dataclass(frozen=True)
class Form:
    """What a layer does: parts[0] with norms[0], then parts[1] with norms[1]. defaults: of its arguments after the
    rows."""

    norms: tuple[str, str]
    parts: tuple[Part, Part]
    defaults: Mapping[str, Any]


class JoinedLayer(Module):
    """A base class that comes before a layer's own class. _following: with the norm that gets the output."""

    _form: Form
    _inner: Addition
    _following: Addition | None

    def __call__(self, x: mx.array, *args: Any, **more: Any) -> mx.array:
        form = self._form
        given = {**form.defaults, **dict(zip(form.defaults, args, strict=False)), **more}
        (first, second), (before, between) = form.parts, form.norms
        h = self._inner(x, first(self, self[before](x), given))
        y = second(self, self[between](h), given)
        return h + y if self._following is None else self._following(h, y)


class StandIn:
    """Notes its calls. rows: what it returns, None for what the module itself returns."""

    def __init__(self, name: str, module: Any, rows: mx.array | None, calls: list[Call]) -> None:
        self._name, self._module, self._rows, self._calls = name, module, rows, calls

    def __call__(self, *args: Any, **more: Any) -> mx.array:
        result = self._module(*args, **more) if self._rows is None else self._rows
        self._calls.append(Call(self._name, args, more, result))
        return result


@dataclass(frozen=True)
class Call:
    name: str
    args: tuple[Any, ...]
    more: dict[str, Any]
    result: mx.array


def join_norms(model: Module) -> tuple[int, list[str]]:
    """Join what can be joined, in place. Returns how many layers are joined, and the paths of those whose trial failed
    or gave other numbers. Norms of one size, type and epsilon are equal: one of them is tried."""
    named = list(model.named_modules())
    forms = {
        path: (layer, form)
        for (path, layer), form in zip(named, forms_of([layer for _, layer in named]), strict=True)
        if form is not None
    }
    if not forms:
        return 0, []
    following = following_norms(model, [layer for layer, _ in forms.values()])
    trials = Trials[bool]()
    additions: dict[int, Addition] = {}

    def addition_of(norm: RMSNorm | None) -> Addition | None:
        if norm is None:
            return None
        if id(norm) not in additions:
            additions[id(norm)] = addition = Addition(norm)
            kind = norm.weight.shape, norm.weight.dtype, norm.eps
            is_equal = trials.known(kind)
            if is_equal is None:
                is_equal = is_right(addition, norm)
                trials.note(kind, is_equal)
            if is_equal:
                norm._addition = addition
                norm.__class__ = type("JoinedRMSNorm", (JoinedNorm, RMSNorm), {})
        return additions[id(norm)] if isinstance(norm, JoinedNorm) else None

    failed = []
    for path, (layer, form) in forms.items():
        inner = addition_of(layer[form.norms[1]])
        if inner is None:
            failed.append(path)
            continue
        layer._form, layer._inner, layer._following = form, inner, addition_of(following.get(id(layer)))
        own = type(layer)
        layer.__class__ = type(f"Joined{own.__name__}", (JoinedLayer, own), {})
    return len(forms) - len(failed), failed


def is_right(addition: Addition, norm: RMSNorm) -> bool:
    """Whether sums on random rows are those of MLX to the bit, and their norms within rounding."""
    size, dtype = norm.weight.size, norm.weight.dtype
    try:
        pairs = [random_rows((2, rows, 1, size), dtype, rows) for rows in ROWS]
        expected = [(x + y, norm(x + y)) for x, y in pairs]
        got = [addition.compute(x, y) for x, y in pairs]
        totals = on_host([total for total, _ in (*got, *expected)])
        are_equal = all(map(np.array_equal, totals[: len(ROWS)], totals[len(ROWS) :]))
        return are_equal and are_rounding([normed for _, normed in got], [normed for _, normed in expected])
    except Exception:  # a kernel that does not compile
        return False


class Candidate(NamedTuple):
    """A form, if the arrays of each pair are equal."""

    form: Form
    pairs: Sequence[tuple[mx.array, mx.array]]


def forms_of(modules: Sequence[Any]) -> list[Form | None]:
    """None for modules that compute anything else. What they compute is compared by one evaluation."""
    candidates = [candidate_of(module) for module in modules]
    pairs = [pair for candidate in candidates if candidate is not None for pair in candidate.pairs]
    numbers = on_host([array for pair in pairs for array in pair])
    forms: list[Form | None] = []
    first = 0
    for candidate in candidates:
        count = 0 if candidate is None else 2 * len(candidate.pairs)
        own, first = numbers[first : first + count], first + count
        are_equal = all(map(np.array_equal, own[::2], own[1::2]))
        forms.append(candidate.form if candidate is not None and are_equal else None)
    return forms


def candidate_of(layer: Any) -> Candidate | None:
    children = {name: child for name, child in layer.children().items() if isinstance(child, Module)}
    norms = [child for child in children.values() if type(child) is RMSNorm]
    if len(norms) != 2 or len(children) < 4:
        return None
    others = list(inspect.signature(type(layer).__call__).parameters.values())[2:]
    if any(each.kind is not each.POSITIONAL_OR_KEYWORD for each in others):
        return None
    try:
        return candidate_by_calls(layer, children, {each.name: each.default for each in others}, norms[0])
    except Exception:  # a layer that looks into its arguments, or into its parts
        return None


def candidate_by_calls(
    layer: Any, children: Mapping[str, Any], defaults: dict[str, Any], norm: RMSNorm
) -> Candidate | None:
    shape = 1 + len(children), FORM_ROWS, 1, norm.weight.size
    x, *results = random_rows(shape, norm.weight.dtype)
    calls: list[Call] = []
    given = {name: object() for name in defaults}
    stand_ins = {
        name: StandIn(name, child, None if type(child) is RMSNorm else rows, calls)
        for (name, child), rows in zip(children.items(), results, strict=True)
    }
    dict.update(layer, stand_ins)
    try:
        out = layer(x, **given)
    finally:
        dict.update(layer, children)
    before, first, between, second = calls
    if any(type(children[call.name]) is not RMSNorm or len(call.args) > 1 or call.more for call in (before, between)):
        return None
    h = x + first.result
    rows = [(before, x), (first, before.result), (second, between.result)]
    if not all(call.args[0] is array for call, array in rows):
        return None
    names = {id(value): name for name, value in given.items()}
    parts = [
        Part(call.name, [names[id(value)] for value in call.args[1:]], {k: names[id(v)] for k, v in call.more.items()})
        for call in (first, second)
    ]
    form = Form((before.name, between.name), (parts[0], parts[1]), defaults)
    return Candidate(form, [(between.args[0], h), (out, h + second.result)])


def following_norms(model: Module, layers: Sequence[Module]) -> dict[int, RMSNorm]:
    """The norm that gets a layer's output, by the identity of the layer: a token runs through the model, and nothing is
    computed."""
    outputs: list[tuple[int, Any]] = []
    found: dict[int, list[RMSNorm]] = {}

    def note_output(layer: Any, _: Any, out: Any) -> None:
        outputs.append((id(layer), out))

    def note_input(norm: Any, x: Any, _: Any) -> None:
        for layer, out in outputs:
            if out is x:
                found.setdefault(layer, []).append(norm)

    norms = [module for module in model.modules() if type(module) is RMSNorm]
    with watched(layers, note_output), watched(norms, note_input):
        model(mx.array([[0]]), cache=make_prompt_cache(model))
    return {layer: norms[0] for layer, norms in found.items() if len(norms) == 1}


@contextmanager
def watched(modules: Sequence[Any], note: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """note gets a module, its first argument and its result after each call."""

    def watch(own: type[Any]) -> Callable[..., Any]:
        def call(self: Any, x: Any, *args: Any, **more: Any) -> Any:
            out = own.__call__(self, x, *args, **more)
            note(self, x, out)
            return out

        return call

    plain = [(module, type(module)) for module in modules]
    for module, own in plain:
        module.__class__ = type(own.__name__, (own,), {"__call__": watch(own)})
    try:
        yield
    finally:
        for module, own in plain:
            module.__class__ = own
