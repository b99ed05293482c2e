"""Trials of changed modules: of modules that compute alike, one is tried, and the others are changed like it.

MLX can record the operations of a function without computing them. Two modules for which it records the same compute
the same function, each of its own parameters: the same operations in the same order, with the same settings, on inputs
and parameters of the same names, shapes, types and quantization, and on constants with the same numbers. So a trial of
one shows what a trial of the other would. It does not matter which attributes a module has. If its code reads one (the
index of its layer, say), the operations or their settings differ, or else the attribute has no effect on these inputs.

What a trial may find beyond that is in the numbers of the parameters. It compares what two orders of the same sums
give, so these would have to be infinite or the like. The model's probe sees all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten

Outcome = TypeVar("Outcome")

MOST_ELEMENTS = 4096
"""Elements of a constant. A function with a larger one is equal to no other, so that comparing takes no time."""


class Trials(Generic[Outcome]):
    """Outcomes of trials, by what MLX has recorded of the modules before they were changed. count: of trials."""

    def __init__(self) -> None:
        self.count = 0
        self._outcomes: dict[Hashable, Outcome] = {}

    def known(self, recorded: Hashable | None) -> Outcome | None:
        """The outcome for an equal module; None if there was none, or if `recorded` is None."""
        return None if recorded is None else self._outcomes.get(recorded)

    def note(self, recorded: Hashable | None, outcome: Outcome) -> None:
        """The outcome of a trial. If `recorded` is None, no other module is equal."""
        self.count += 1
        if recorded is not None:
            self._outcomes[recorded] = outcome


def record(module: Module, run: Callable[..., Any], *inputs: mx.array) -> Hashable | None:
    """What MLX records of `run`, which computes the module on inputs like these and returns arrays; None if it cannot
    be recorded, for example because code reads results. Nothing is computed, and the module stays as it is."""
    parameters: Any = tree_flatten(module.parameters())
    names, arrays = [name for name, _ in parameters], [array for _, array in parameters]
    kept = [(each, dict(each), dict(vars(each))) for each in module.modules()]
    found: list[dict[str, Any]] = []

    def traced(*placeholders: mx.array) -> Any:
        module.update(tree_unflatten(list(zip(names, placeholders, strict=False))))
        return run(*placeholders[len(names) :])

    try:
        mx.export_function(found.append, traced, *arrays, *inputs)
        return repr((names, [comparable(each) for each in found]))
    except Exception:  # a module's own code may raise anything
        return None
    finally:
        module.update(tree_unflatten(parameters))
        for each, items, attributes in kept:  # a call may store placeholders
            dict.clear(each)
            dict.update(each, items)
            vars(each).clear()
            vars(each).update(attributes)


def record_all(module: Module, inputs: Sequence[Sequence[mx.array]]) -> Hashable | None:
    """What MLX records of the module's own call, for each of these inputs; None if it cannot be recorded."""
    found = [record(module, module, *each) for each in inputs]
    return None if None in found else tuple(found)


def comparable(recorded: dict[str, Any]) -> dict[str, Any]:
    """A record with the numbers of its constants. Raises ValueError if they are too many."""
    if recorded["type"] != "constants":
        return recorded
    constants = recorded["constants"]
    if any(array.size > MOST_ELEMENTS for _, array in constants):
        raise ValueError("a constant is too large to be compared")
    return {"constants": [(name, array.shape, array.dtype, array.tolist()) for name, array in constants]}


def on_host(arrays: Sequence[mx.array]) -> list[npt.NDArray[np.float32]]:
    """The arrays in float32, by one evaluation. Comparing them there takes no kernels that only a trial needs."""
    copies = [array.astype(mx.float32) for array in arrays]
    mx.eval(copies)
    return [np.array(copy) for copy in copies]


def random_rows(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Normal numbers, made by the host for the same reason."""
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)
